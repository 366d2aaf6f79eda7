"""Key table of the causal video VAE, published diffusers names.

Owns: which tensor of vae/*.safetensors is which parameter, for both forms. Does not own: reading, shapes.
Invariant: every tensor of AutoencoderKLWan appears once: 194 for Wan 2.1, 196 for Wan 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from videodiff.configs import VaeConfig
from videodiff.weights.keys import KeyRule, Layout

Path = tuple[str | int, ...]


def _conv(target: Path, name: str, layout: Layout = Layout.CONV3D) -> Iterator[KeyRule]:
    yield KeyRule((*target, "kernel"), (f"{name}.weight",), layout)
    yield KeyRule((*target, "bias"), (f"{name}.bias",))


def _norm(target: Path, name: str, trailing_ones: int = 3) -> Iterator[KeyRule]:
    yield KeyRule((*target, "gamma"), (f"{name}.gamma",), Layout.FLATTEN_GAMMA, trailing_ones=trailing_ones)


def _resnet(target: Path, name: str, shortcut: bool) -> Iterator[KeyRule]:
    for part in ("norm1", "norm2"):
        yield from _norm((*target, part), f"{name}.{part}")
    for part in ("conv1", "conv2", *(["conv_shortcut"] if shortcut else [])):
        yield from _conv((*target, part), f"{name}.{part}")


def _mid(target: Path, name: str) -> Iterator[KeyRule]:
    for i in range(2):
        yield from _resnet((*target, "resnets", i), f"{name}.resnets.{i}", False)
    yield from _norm((*target, "attention", "norm"), f"{name}.attentions.0.norm", trailing_ones=2)
    for part in ("to_qkv", "proj"):
        yield from _conv((*target, "attention", part), f"{name}.attentions.0.{part}", Layout.CONV2D)


def _resample(target: Path, name: str, temporal: bool) -> Iterator[KeyRule]:
    yield from _conv((*target, "conv"), f"{name}.resample.1", Layout.CONV2D)
    if temporal:
        yield from _conv((*target, "time_conv"), f"{name}.time_conv")


def _ends(side: str) -> Iterator[KeyRule]:
    yield from _conv((side, "conv_in"), f"{side}.conv_in")
    yield from _norm((side, "norm_out"), f"{side}.norm_out")
    yield from _conv((side, "conv_out"), f"{side}.conv_out")
    yield from _mid((side, "mid"), f"{side}.mid_block")


def _encoder(config: VaeConfig) -> Iterator[KeyRule]:
    dims = [config.base_dim * m for m in (1, *config.dim_mult)]
    flat = 0  # the plain form numbers resnets and resamplers in one list
    for i, (a, b) in enumerate(pairwise(dims)):
        level: Path = ("encoder", "levels", i)
        for j in range(config.num_res_blocks):
            name = f"encoder.down_blocks.{i}.resnets.{j}" if config.is_residual else f"encoder.down_blocks.{flat}"
            flat += 1
            yield from _resnet((*level, "resnets", j), name, j == 0 and a != b)
        if i < len(config.dim_mult) - 1:
            name = f"encoder.down_blocks.{i}.downsampler" if config.is_residual else f"encoder.down_blocks.{flat}"
            flat += 1
            yield from _resample((*level, "resample"), name, config.temperal_downsample[i])


def _decoder(config: VaeConfig) -> Iterator[KeyRule]:
    base = config.decoder_base_dim or config.base_dim
    dims = [base * m for m in (config.dim_mult[-1], *reversed(config.dim_mult))]
    up_time = tuple(reversed(config.temperal_downsample))
    for i, (a, b) in enumerate(pairwise(dims)):
        a = a // 2 if i and not config.is_residual else a
        level, name = ("decoder", "levels", i), f"decoder.up_blocks.{i}"
        for j in range(config.num_res_blocks + 1):
            yield from _resnet((*level, "resnets", j), f"{name}.resnets.{j}", j == 0 and a != b)
        if i < len(config.dim_mult) - 1:
            upsampler = "upsampler" if config.is_residual else "upsamplers.0"
            yield from _resample((*level, "resample"), f"{name}.{upsampler}", up_time[i])


def table(config: VaeConfig) -> list[KeyRule]:
    """Rules for a VAE of this config."""
    return [
        *_ends("encoder"),
        *_encoder(config),
        *_conv(("quant_conv",), "quant_conv"),
        *_conv(("post_quant_conv",), "post_quant_conv"),
        *_ends("decoder"),
        *_decoder(config),
    ]
