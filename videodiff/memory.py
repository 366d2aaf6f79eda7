"""The memory plan: what each stage of a generation needs, before anything is loaded or compiled.

Owns: parameter counts of the components, working-set estimates by stage, how much memory there is, refusing a job that
does not fit. Does not own: loading and freeing (`stages`), the shapes themselves (`configs`, `grid`).
Invariant: plain arithmetic on configs and sizes: no model is built, no device is touched. The estimates are upper
bounds of what XLA allocates, held to that by tests/test_memory.py.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from videodiff.configs import TextEncoderConfig, TransformerConfig, VaeConfig
from videodiff.grid import VideoGeometry

GIB = 2**30
LIMIT_ENV = "VIDEODIFF_MEMORY_LIMIT_GIB"
F32 = 4  # bytes
TEXT_TOKENS = 512

# Interpreter, JAX, compiled programs and the allocator's slack on CPU; weights' read buffers while loading.
RUNTIME_BYTES = 700 << 20
READ_BYTES = 128 << 20
ATTENTION_BYTES = 64 << 20  # scores the VAE's per-frame attention holds


def transformer_parameters(c: TransformerConfig) -> tuple[int, int]:
    """(all parameters, those kept in float32) of a WanTransformer3DModel.

    Float32 are the time embedder, every scale_shift_table and the affine norm before cross-attention (models.md 2.8).
    """
    width, patch = c.width, c.patch_size[1] * c.patch_size[2]
    time = c.freq_dim * width + width + width * width + width
    text = c.text_dim * width + width + width * width + width
    embed = c.in_channels * patch * width + width
    head = width * c.out_channels * patch + c.out_channels * patch
    attention = 4 * (width * width + width) + 2 * width
    cross_norm = 2 * width if c.cross_attn_norm else 0
    ffn = 2 * width * c.ffn_dim + c.ffn_dim + width
    block = 2 * attention + ffn + cross_norm + 6 * width
    kept = time + 2 * width + c.num_layers * (6 * width + cross_norm)
    total = time + text + 6 * width * width + 6 * width + embed + head + 2 * width + c.num_layers * block
    return total, kept


def text_parameters(c: TextEncoderConfig) -> int:
    """Parameters of a UMT5 encoder; the embedding is counted once, every layer has its own bias table."""
    inner = c.num_heads * c.d_kv
    layer = (
        4 * c.d_model * inner + c.relative_attention_num_buckets * c.num_heads + 3 * c.d_model * c.d_ff + 2 * c.d_model
    )
    return c.vocab_size * c.d_model + c.num_layers * layer + c.d_model


def _conv(cin: int, cout: int, taps: int) -> int:
    return taps * cin * cout + cout


def _resnet(cin: int, cout: int) -> int:
    shortcut = _conv(cin, cout, 1) if cin != cout else 0
    return cin + _conv(cin, cout, 27) + cout + _conv(cout, cout, 27) + shortcut


def _mid(c: int) -> int:
    return 2 * _resnet(c, c) + c + _conv(c, 3 * c, 1) + _conv(c, c, 1)


def vae_parameters(c: VaeConfig) -> tuple[int, int]:
    """(encoder side, decoder side) parameters of an AutoencoderKLWan, quantisation convolutions included."""
    blocks, last = c.num_res_blocks, len(c.dim_mult) - 1
    widths = [c.base_dim * m for m in (1, *c.dim_mult)]
    encoder = _conv(c.in_channels, widths[0], 27) + _mid(widths[-1]) + widths[-1] + _conv(widths[-1], 2 * c.z_dim, 27)
    for i, (cin, cout) in enumerate(pairwise(widths)):
        encoder += _resnet(cin, cout) + (blocks - 1) * _resnet(cout, cout)
        if i < last:
            encoder += _conv(cout, cout, 9) + (_conv(cout, cout, 3) if c.temperal_downsample[i] else 0)
    encoder += _conv(2 * c.z_dim, 2 * c.z_dim, 1)
    levels = decoder_levels(c)
    top, bottom = levels[0].channels_in, levels[-1].channels
    decoder = (
        _conv(c.z_dim, c.z_dim, 1) + _conv(c.z_dim, top, 27) + _mid(top) + bottom + _conv(bottom, c.out_channels, 27)
    )
    for level in levels:
        decoder += _resnet(level.channels_in, level.channels) + blocks * _resnet(level.channels, level.channels)
        if level.channels_up:
            decoder += _conv(level.channels, level.channels_up, 9)
            decoder += _conv(level.channels, 2 * level.channels, 3) if level.doubles_time else 0
    return encoder, decoder


@dataclass(frozen=True)
class DecoderLevel:
    """One resolution of the VAE decoder.

    Args:
      channels_in: what the first residual block takes.
      channels: what all of them give.
      channels_up: what the upsampler gives; 0 at the last level.
      doubles_time: whether the upsampler doubles the frames.
      scale: rows and columns of the level, in multiples of the latent's.
      frames: frames of the level for one latent frame.
    """

    channels_in: int
    channels: int
    channels_up: int
    doubles_time: bool
    scale: int
    frames: int


def decoder_levels(c: VaeConfig) -> list[DecoderLevel]:
    """The decoder from the latent's resolution up (models.md 3.3, 3.4)."""
    base = c.decoder_base_dim or c.base_dim
    widths = [base * m for m in (c.dim_mult[-1], *reversed(c.dim_mult))]
    times = tuple(reversed(c.temperal_downsample))
    out, scale, frames = [], 1, 1
    for i, (cin, cout) in enumerate(pairwise(widths)):
        up = i < len(times)
        taken = cin if i == 0 or c.is_residual else cin // 2
        given = (cout if c.is_residual else cout // 2) if up else 0
        out.append(DecoderLevel(taken, cout, given, up and times[i], scale, frames))
        scale, frames = scale * 2, frames * (2 if up and times[i] else 1)
    return out


@dataclass(frozen=True)
class Workload:
    """Everything that decides how much memory a generation takes.

    Args:
      transformer, vae, text_encoder: the components.
      geometry: pixels, frames, latents.
      batch: videos at once.
      guided: whether the unconditional branch runs (it doubles the denoiser's batch).
      dtype: of the transformer's weights and activations.
      text_dtype: in which the text encoder's weights stay; it computes in float32.
      encode_text: False when embeddings are given: the text encoder is not loaded.
      float_output: frames are returned as float32 instead of uint8.
      encode_video: an enlarged base is encoded at this size.
      platform: "cpu", "gpu" or "tpu". XLA on CPU has no bfloat16 matrix product: it runs bfloat16 models in float32
        and holds a float32 copy of the layers beside them.
    """

    transformer: TransformerConfig
    vae: VaeConfig
    text_encoder: TextEncoderConfig
    geometry: VideoGeometry
    batch: int = 1
    guided: bool = True
    dtype: Any = np.float32
    text_dtype: Any = np.float32
    encode_text: bool = True
    float_output: bool = False
    encode_video: bool = False
    platform: str = "cpu"


@dataclass(frozen=True)
class StageMemory:
    """One stage: what must be resident and what it works with, in bytes."""

    name: str
    weights: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.working


@dataclass(frozen=True)
class MemoryPlan:
    """The planned memory of a generation.

    Args:
      stages: in order of running.
      runtime: bytes that are there in every stage.
    """

    stages: tuple[StageMemory, ...]
    runtime: int

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda s: s.total)

    @property
    def peak(self) -> int:
        """Peak when each stage's weights are freed before the next one loads."""
        return self.runtime + self.worst.total

    @property
    def resident_peak(self) -> int:
        """Peak when all weights stay in memory between stages and calls."""
        return self.runtime + sum(s.weights for s in self.stages) + max(s.working for s in self.stages)

    def __str__(self) -> str:
        lines = [f"{'stage':14s}{'weights':>12s}{'working':>12s}{'in all':>12s}"]
        for s in self.stages:
            lines.append(f"{s.name:14s}{gib(s.weights):>12s}{gib(s.working):>12s}{gib(s.total + self.runtime):>12s}")
        kept = f"{gib(self.resident_peak)} with all weights kept"
        lines.append(f"planned peak {gib(self.peak)} ({kept}); {gib(self.runtime)} runtime in each line")
        return "\n".join(lines)


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _itemsize(dtype: Any) -> int:
    return np.dtype(dtype).itemsize


def _text_stage(w: Workload) -> StageMemory:
    """One layer in float32 at a time; activations of all prompts at full length."""
    c, prompts = w.text_encoder, w.batch * (2 if w.guided else 1)
    inner, rows = c.num_heads * c.d_kv, prompts * TEXT_TOKENS
    layer = F32 * (4 * c.d_model * inner + 3 * c.d_model * c.d_ff)
    scores = F32 * rows * TEXT_TOKENS * c.num_heads * 3 // 2
    activations = F32 * rows * (2 * c.d_model + c.d_ff)
    weights = text_parameters(c) * _itemsize(w.text_dtype)
    return StageMemory("text encoder", weights, layer + scores + activations)


def _denoise_stage(w: Workload) -> StageMemory:
    """Weights, one layer's slice of them, and the larger of attention's and the feed-forward's buffers.

    Fitted to programs JAX 0.10 compiles for CPU in float32: 7 N C (dense) or 8 N C (sparse) while q, k, v and their rotated and
    per-head copies live, or the feed-forward's hidden layer before and after its activation.
    """
    c, batch = w.transformer, w.batch * (2 if w.guided else 1)
    total, kept = transformer_parameters(c)
    stored = _itemsize(w.dtype)
    emulated = w.platform == "cpu" and stored < F32
    item = F32 if emulated else stored
    tokens, width = w.geometry.token_grid.tokens, c.width
    layer = 8 * width * width + 2 * width * c.ffn_dim
    one = batch * tokens * width * item
    block = max(8.2 * one, 2 * one * c.ffn_dim / width + 1.2 * one)
    scores = F32 * batch * c.num_attention_heads * (min(tokens, 1280) ** 2 + min(tokens, 4096) * (TEXT_TOKENS + 1))
    latents = 12 * F32 * w.batch * int(np.prod(w.geometry.latent_shape))  # noise, solver history, both branches
    tables = F32 * tokens * c.attention_head_dim
    copy = F32 * layer * c.num_layers if emulated else item * layer
    return StageMemory(
        "denoiser", kept * F32 + (total - kept) * stored, int(block + scores + latents + tables + copy)
    )  # fmt: skip


def _decoder_state(c: VaeConfig, rows: int, cols: int) -> int:
    """Elements the streamed decoder carries from one latent frame to the next: two frames of every causal input."""
    levels = decoder_levels(c)
    pixels = rows * cols
    state = 2 * pixels * (c.z_dim + 4 * levels[0].channels_in)
    for level in levels:
        inputs = level.channels_in + (2 * c.num_res_blocks + 1) * level.channels
        inputs += level.channels if level.doubles_time else 0
        state += 2 * pixels * level.scale**2 * inputs
    last = levels[-1]
    return state + 2 * pixels * last.scale**2 * last.channels


def _decode_stage(w: Workload) -> StageMemory:
    """The VAE, its carried frames, the widest level's buffers, convolution scratch, and all decoded frames.

    Fitted like the denoiser's, with the carried state donated to the step: a level's residual blocks hold 2.1 times
    their input and 4 times their output, two frames of history included. The scratch is not in XLA's own account: resident
    memory grew by 4 to 5 outputs of the last level beyond it, between 64 x 64 and 1440 x 2560 pixels on CPU.
    """
    c, g = w.vae, w.geometry
    _, rows, cols, _ = g.latent_shape
    widest = 0.0
    for level in decoder_levels(c):
        pixels = rows * cols * level.scale**2
        blocks = (level.frames + 2) * pixels * (2.1 * level.channels_in + 4.0 * level.channels)
        scratch = 4.5 * level.frames * pixels * level.channels
        frames_up = level.frames * (2 if level.doubles_time else 1)
        up = frames_up * 4 * pixels * (level.channels + level.channels_up)  # nearest-neighbour input, convolved output
        widest = max(widest, blocks + scratch, up)
    pixels = 3 * g.computed_height * g.computed_width
    # Videos are decoded one after the other; their frames gather in host memory.
    frames = pixels * w.batch * g.num_frames * (F32 if w.float_output else 1) if w.platform == "cpu" else 0
    chunk = 3 * F32 * pixels * g.layout.temporal_factor
    working = int(F32 * (_decoder_state(c, rows, cols) + widest)) + ATTENTION_BYTES + chunk + frames
    return StageMemory("decoder", F32 * sum(vae_parameters(c)), working)


def _encode_stage(w: Workload) -> StageMemory:
    """The VAE, the encoder's carried frames, its widest level's buffers, and the pixels of one latent frame.

    Counted like the decoder: a level holds the frames of one latent frame and two of history.
    """
    c, g = w.vae, w.geometry
    _, rows, cols, z = g.latent_shape
    widths = [c.base_dim * m for m in (1, *c.dim_mult)]
    down = len(c.dim_mult) - 1
    frames = g.layout.temporal_factor
    pixels = rows * cols * 4**down
    state, widest = 2.0 * pixels * c.in_channels, 0.0
    for i, (cin, cout) in enumerate(pairwise(widths)):
        state += 2 * pixels * (cin + (2 * c.num_res_blocks - 1) * cout)
        blocks = (frames + 2) * pixels * (2.1 * cin + 4.0 * cout)
        widest = max(widest, blocks + 4.5 * frames * pixels * cout)
        if i < down:
            pixels //= 4
            if c.temperal_downsample[i]:
                state += pixels * cout
                frames = max(1, frames // 2)
    state += 2 * pixels * 5 * widths[-1]
    image = 3 * g.computed_height * g.computed_width
    small = (
        F32 * image * w.batch * g.num_frames // 2
    )  # the base's frames; at most so large that enlarging saves something
    chunk = 5 * F32 * image * g.layout.temporal_factor
    working = int(F32 * (state + widest)) + ATTENTION_BYTES + chunk + small + F32 * w.batch * rows * cols * z
    return StageMemory("encoder", F32 * sum(vae_parameters(c)), working)


def plan_memory(w: Workload) -> MemoryPlan:
    """Plan the stages of a generation.

    Args:
      w: what is to be run.
    """
    stages = [_denoise_stage(w), _decode_stage(w)]
    if w.encode_video:
        stages.insert(0, _encode_stage(w))
    if w.encode_text:
        stages.insert(0, _text_stage(w))
    return MemoryPlan(tuple(stages), RUNTIME_BYTES + READ_BYTES if w.platform == "cpu" else RUNTIME_BYTES)


class NotEnoughMemory(ValueError):
    """A job that does not fit, refused before anything is loaded."""


def _remedies(w: Workload) -> Iterator[tuple[str, str, Workload]]:
    """Changes that make a job smaller, gentlest first: (what changes, in words, the smaller job)."""
    g, change = w.geometry, dataclasses.replace
    if w.encode_text and _itemsize(w.text_dtype) == F32:
        yield "text", "text encoder weights in bfloat16", change(w, text_dtype=np.float16)
    if w.platform != "cpu" and _itemsize(w.dtype) == F32:
        yield "dtype", "dtype=bfloat16", change(w, dtype=np.float16)
    if w.batch > 1:
        yield "batch", "one video at a time", change(w, batch=1)
    if w.guided:
        yield "guided", "guidance_scale=1", change(w, guided=False)
    if w.encode_text:
        yield "prompt", "prompt_embeds in place of prompt", change(w, encode_text=False)
    t = g.layout.temporal_factor
    for d in (2, 4):
        frames = max(1, (g.num_frames - 1) // d // t * t + 1)
        yield "frames", f"num_frames={frames}", change(w, geometry=change(g, num_frames=frames))
    m = g.layout.size_multiple_px
    for scale in (1.5, 2, 3, 4):
        height, width = (max(m, int(px / scale) // m * m) for px in (g.height, g.width))
        yield "size", f"height={height} width={width}", change(w, geometry=change(g, height=height, width=width))


def _advice(w: Workload, limit: int) -> str:
    """What makes a job fit: single changes if any does, else changes added up, gentlest first."""
    peaks = [(text, plan_memory(smaller).peak) for _, text, smaller in _remedies(w)]
    single = [f"{text} ({gib(peak)})" for text, peak in peaks if peak <= limit]
    if single:
        return "any of these makes it fit: " + ", ".join(single)
    chosen: dict[str, str] = {}
    while (peak := plan_memory(w).peak) > limit:
        better = [(k, text, less) for k, text, less in _remedies(w) if plan_memory(less).peak < peak]
        if not better:
            return f"use a machine with more memory: the smallest form of this job still needs {gib(peak)}"
        kind, text, w = next((b for b in better if plan_memory(b[2]).peak <= limit), better[0])
        chosen[kind] = text
    return f"together these make it fit ({gib(peak)}): " + ", ".join(chosen.values())


def check_memory(w: Workload, available: Available) -> MemoryPlan:
    """The plan of a job that fits.

    Args:
      w: what is to be run.
      available: from :func:`available_memory`.

    Raises:
      NotEnoughMemory: the planned peak exceeds what there is; the message has the table and what would help.
    """
    plan = plan_memory(w)
    if plan.peak <= available.nbytes:
        return plan
    raise NotEnoughMemory(
        f"the {plan.worst.name} needs {gib(plan.peak)} of memory and {gib(available.nbytes)} are available "
        f"({available.source}):\n{plan}\nremedy: {_advice(w, available.nbytes)}. {LIMIT_ENV} overrides what counts as "
        "available."
    )


@dataclass(frozen=True)
class Available:
    """Memory this process may use in all, and where the figure comes from."""

    nbytes: int
    source: str


def _number(path: Path, pattern: str = r"(\d+)") -> int | None:
    """The first number a file shows, or None when there is no such file or number."""
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def _cgroups(root: Path) -> Iterator[tuple[int, str]]:
    """(bytes still free below the limit, name) of every memory cgroup this process is in, versions 1 and 2.

    Page cache counts as used in a cgroup but is given back on demand, so inactive file pages are added.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A container may see its own group as the root, so the path inside is tried from its end upwards.
        place = top / inside.lstrip("/")
        for folder in (place, *place.parents):
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None and most < 1 << 60:
                cache = _number(folder / "memory.stat", r"(?m)^(?:total_)?inactive_file (\d+)") or 0
                yield most - now + cache, f"{limit} of the control group"
            if folder == top:
                break


def available_memory(device: Any = None, root: Path = Path("/")) -> Available:
    """How much memory this process may use in all, what it already holds included.

    On an accelerator its own memory; on CPU the smallest of what the kernel calls available and the limits of the
    control groups. The environment variable VIDEODIFF_MEMORY_LIMIT_GIB overrides all of it.

    Args:
      device: a JAX device; None takes the default one.
      root: where proc and sys lie, for tests.

    Raises:
      ValueError: the override is not a positive number.
    """
    override = os.environ.get(LIMIT_ENV)
    if override is not None:
        try:
            limit = float(override)
        except ValueError:
            limit = 0.0
        if not limit > 0:
            raise ValueError(f"{LIMIT_ENV}={override!r} must be a positive number of GiB")
        return Available(int(limit * GIB), LIMIT_ENV)
    if device is None:
        import jax  # here, so that plans need no JAX

        device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            return Available(int(stats["bytes_limit"]), f"memory of {device.device_kind}")
    own = (_number(root / "proc/self/status", r"VmRSS:\s+(\d+) kB") or 0) * 1024
    free = _number(root / "proc/meminfo", r"MemAvailable:\s+(\d+) kB")
    found = [(nbytes + own, name) for nbytes, name in _cgroups(root)]
    if free is not None:
        found.append((free * 1024 + own, "MemAvailable"))
    if not found:
        found.append((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "physical memory"))
    return Available(*min(found))
