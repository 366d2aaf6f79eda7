"""The stages of a generation, each with its weights: text, denoising, decoding, and upscaling between two passes.

Owns: when a component's weights come into memory and leave it, in which dtype, and the compiled programs around a single component.
Does not own: what a request asks for and the order of the stages (`pipeline`), the loop (`sampling`).
Invariant: a stage that was freed and loaded again gives the same result bit for bit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from videodiff import media
from videodiff.grid import VideoGeometry
from videodiff.models.transformer import WanTransformer, param_dtype_for
from videodiff.models.vae import WanVAE
from videodiff.sampling.loop import NonFiniteError, Progress
from videodiff.text.umt5 import UMT5Encoder
from videodiff.weights import keys_text, keys_transformer, keys_vae
from videodiff.weights.folder import ModelFolder
from videodiff.weights.load import load_module

M = TypeVar("M", bound=nnx.Module)

LARGE_TEXT_ENCODER_BYTES = 2**31  # above this (float32) the text encoder is kept in bfloat16 and upcast layer by layer


class Stage(Generic[M]):
    """A module that is loaded on first use and can be freed.

    Args:
      name: for the report.
      load: makes the module with its weights.
    """

    def __init__(self, name: str, load: Callable[[], M]) -> None:
        self.name = name
        self.load_s = 0.0
        self.loads = 0
        self._load = load
        self._module: M | None = None

    @property
    def module(self) -> M:
        """The module with its weights; loads them on first use."""
        if self._module is None:
            start = time.perf_counter()
            self._module = self._load()
            jax.block_until_ready(nnx.state(self._module))
            self.load_s += time.perf_counter() - start
            self.loads += 1
        return self._module

    @property
    def loaded(self) -> bool:
        return self._module is not None

    def free(self) -> None:
        """Drop the weights; the next use loads them again."""
        self._module = None
        gc.collect()


def text_param_dtype(folder: ModelFolder) -> Any:
    """float32 for a small text encoder, bfloat16 for a large one."""
    return jnp.bfloat16 if folder.checkpoints["text_encoder"].parameters * 4 > LARGE_TEXT_ENCODER_BYTES else jnp.float32


def text_stage(folder: ModelFolder, dtype: Any) -> Stage[UMT5Encoder]:
    """UMT5; computes in ``dtype``, stores as :func:`text_param_dtype` says."""
    stored = text_param_dtype(folder)
    config = folder.text_encoder

    def load() -> UMT5Encoder:
        return load_module(
            lambda: UMT5Encoder(config, dtype=dtype, param_dtype=stored, rngs=nnx.Rngs(0)),
            keys_text.table(config),
            folder.checkpoints["text_encoder"],
            lambda path: stored,
        )

    return Stage("text_encoder", load)


def transformer_stage(folder: ModelFolder, dtype: Any) -> Stage[WanTransformer]:
    """The denoiser's network in ``dtype``, with the parameters models.transformer keeps in float32."""
    config = folder.transformer

    def load() -> WanTransformer:
        return load_module(
            lambda: WanTransformer(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)),
            keys_transformer.table(config),
            folder.checkpoints["transformer"],
            lambda path: param_dtype_for(path, dtype),
        )

    return Stage("transformer", load)


def vae_stage(folder: ModelFolder) -> Stage[WanVAE]:
    """The VAE, always float32: published files are, and the reference decodes in it."""
    config = folder.vae

    def load() -> WanVAE:
        return load_module(
            lambda: WanVAE(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)),
            keys_vae.table(config),
            folder.checkpoints["vae"],
            lambda path: jnp.dtype(jnp.float32),
        )

    return Stage("vae", load)


@partial(jax.jit, static_argnums=0)
def _decode_first(graph: Any, weights: Any, latents: jax.Array) -> Any:
    vae = nnx.merge(graph, weights)
    frames, state = vae.decode_first(vae.denormalize(latents))
    return _unit(frames), state


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _decode_next(graph: Any, weights: Any, latents: jax.Array, state: Any) -> Any:
    vae = nnx.merge(graph, weights)
    frames, state = vae.decode_next(vae.denormalize(latents), state)
    return _unit(frames), state


def _unit(video: jax.Array) -> jax.Array:
    """[-1, 1] -> [0, 1], clamped; NaN stays NaN."""
    return jnp.clip(video * 0.5 + 0.5, 0.0, 1.0)


def decode_frames(
    vae: WanVAE, latents: np.ndarray, geometry: VideoGeometry, output_type: str, progress: Progress | None = None
) -> np.ndarray:
    """Decode one latent frame of one video at a time: device memory does not grow with frames or batch.

    Args:
      vae: the decoder.
      latents: [B, F, Y, X, C] float32, normalised.
      geometry: the promised size; computed rows and columns beyond it are cropped.
      output_type: "uint8", or "np" for float32 in [0, 1].
      progress: told after every latent frame.

    Returns:
      [B, T, height, width, 3].

    Raises:
      NonFiniteError: a frame holds NaN or infinity.
    """
    graph, weights = nnx.split(vae)
    batch, frames = latents.shape[:2]
    shape = (batch, geometry.num_frames, geometry.height, geometry.width, 3)
    out = np.empty(shape, np.uint8 if output_type == "uint8" else np.float32)
    began = time.perf_counter()
    for b in range(batch):
        at, state = 0, None
        for f in range(frames):
            if progress:
                progress("decode", b * frames + f, batch * frames, time.perf_counter() - began)
            z = jnp.asarray(latents[b : b + 1, f : f + 1])
            if state is None:
                video, state = _decode_first(graph, weights, z)
            else:
                video, state = _decode_next(graph, weights, z, state)
            part = np.asarray(video)[0, :, : geometry.height, : geometry.width]
            if not np.isfinite(part).all():
                raise NonFiniteError("decode", b * frames + f, batch * frames, "the frames", f"latent frame {f}")
            out[b, at : at + len(part)] = media.to_uint8(part) if output_type == "uint8" else part
            at += len(part)
    if progress:
        progress("decode", batch * frames, batch * frames, time.perf_counter() - began)
    return out


@partial(jax.jit, static_argnums=(0, 3))
def _encode_first(graph: Any, weights: Any, frames: jax.Array, geometry: VideoGeometry) -> Any:
    vae = nnx.merge(graph, weights)
    mean, state = vae.encode_first(_enlarged(frames, geometry))
    return vae.normalize(mean), state


@partial(jax.jit, static_argnums=(0, 3), donate_argnums=4)
def _encode_next(graph: Any, weights: Any, frames: jax.Array, geometry: VideoGeometry, state: Any) -> Any:
    vae = nnx.merge(graph, weights)
    mean, state = vae.encode_next(_enlarged(frames, geometry), state)
    return vae.normalize(mean), state


def _enlarged(frames: jax.Array, g: VideoGeometry) -> jax.Array:
    """[B, T, h, w, 3] in [0, 1] -> the promised size by cubic interpolation, its last row and column repeated up to the
    computed one, in [-1, 1]."""
    b, t = frames.shape[:2]
    large = jnp.clip(jax.image.resize(frames, (b, t, g.height, g.width, 3), "cubic"), 0.0, 1.0)
    below, right = g.computed_height - g.height, g.computed_width - g.width
    return jnp.pad(large, ((0, 0), (0, 0), (0, below), (0, right), (0, 0)), mode="edge") * 2 - 1


def upscale_frames(
    vae: WanVAE, frames: np.ndarray, geometry: VideoGeometry, progress: Progress | None = None
) -> np.ndarray:
    """Enlarge videos and encode them, the frames of one latent frame at a time.

    Args:
      vae: the encoder.
      frames: [B, T, h, w, 3] float32 in [0, 1], T as in ``geometry``.
      geometry: the size to reach.
      progress: told after every latent frame.

    Returns:
      [B, F, Y, X, C] float32, normalised: the posterior's mean.

    Raises:
      NonFiniteError: a latent holds NaN or infinity.
    """
    graph, weights = nnx.split(vae)
    factor, count = geometry.layout.temporal_factor, geometry.latent_frames
    batch = len(frames)
    assert frames.shape[1] == geometry.num_frames, (frames.shape, geometry)
    out = np.empty((batch, *geometry.latent_shape), np.float32)
    began = time.perf_counter()
    for b in range(batch):
        state = None
        for f in range(count):
            if progress:
                progress("upscale", b * count + f, batch * count, time.perf_counter() - began)
            part = frames[b : b + 1, max(0, factor * (f - 1) + 1) : factor * f + 1]
            if state is None:
                z, state = _encode_first(graph, weights, part, geometry)
            else:
                z, state = _encode_next(graph, weights, part, geometry, state)
            out[b, f] = np.asarray(z)[0, 0]
            if not np.isfinite(out[b, f]).all():
                raise NonFiniteError("upscale", b * count + f, batch * count, "the latents", f"latent frame {f}")
    if progress:
        progress("upscale", batch * count, batch * count, time.perf_counter() - began)
    return out
