"""The causal video VAE (AutoencoderKLWan): the plain form of Wan 2.1 and the residual, patchified one of Wan 2.2.

Owns: encoder, decoder, latent statistics, streamed decoding. Does not own: the layers' arithmetic (`vae_layers`),
uint8 frames (`media`).
Invariant: decode_first then decode_next, one latent frame at a time, equals decode; encode_first then encode_next, its
frames at a time, equals encode.
Source: diffusers 0.42.1 ``autoencoder_kl_wan.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from videodiff.configs import VaeConfig
from videodiff.models.vae_layers import (
    Carry,
    CausalConv,
    FrameAttention,
    Resample,
    ResidualBlock,
    RMSNorm,
    State,
    avg_down,
    dup_up,
)


class MidBlock(nnx.Module):
    """Residual block, per-frame attention, residual block."""

    def __init__(self, channels: int, **kw: Any) -> None:
        self.resnets = nnx.List([ResidualBlock(channels, channels, **kw) for _ in range(2)])
        self.attention = FrameAttention(channels, **kw)

    def __call__(self, x: jax.Array, carry: Carry) -> jax.Array:
        return self.resnets[1](self.attention(self.resnets[0](x, carry)), carry)


class Level(nnx.Module):
    """Residual blocks and a resampler, with the 2.2 form's bypass around both.

    Args:
      widths: channels in, then out of each residual block.
      resample: the resampler or None.
      bypass: (factor_t, factor_s) of the residual form's bypass, or None.
    """

    def __init__(
        self, widths: Sequence[int], resample: Resample | None, bypass: tuple[int, int] | None, **kw: Any
    ) -> None:
        self.resnets = nnx.List([ResidualBlock(i, o, **kw) for i, o in pairwise(widths)])
        self.resample = resample
        self.bypass = bypass
        self.width = widths[-1]

    def __call__(self, x: jax.Array, carry: Carry) -> jax.Array:
        before = x
        for resnet in self.resnets:
            x = resnet(x, carry)
        if self.resample is not None:
            x = self.resample(x, carry)
        if self.bypass is None:
            return x
        if self.resample is not None and self.resample.mode.startswith("up"):
            return x + dup_up(before, self.width, *self.bypass, first=carry.first)
        return x + avg_down(before, self.width, *self.bypass)


class Encoder(nnx.Module):
    """Pixels (patchified) to 2 z channels."""

    def __init__(self, config: VaeConfig, **kw: Any) -> None:
        dims = [config.base_dim * m for m in (1, *config.dim_mult)]
        self.conv_in = CausalConv(config.in_channels, dims[0], (3, 3, 3), **kw)
        levels = []
        for i, (a, b) in enumerate(pairwise(dims)):
            last = i == len(config.dim_mult) - 1
            temporal = not last and config.temperal_downsample[i]
            mode = "downsample3d" if temporal else "downsample2d"
            bypass = (2 if temporal else 1, 1 if last else 2) if config.is_residual else None
            resample = None if last else Resample(mode, b, b, **kw)
            levels.append(Level([a] + [b] * config.num_res_blocks, resample, bypass, **kw))
        self.levels = nnx.List(levels)
        self.mid = MidBlock(dims[-1], **kw)
        self.norm_out = RMSNorm(dims[-1], param_dtype=kw["param_dtype"])
        self.conv_out = CausalConv(dims[-1], 2 * config.z_dim, (3, 3, 3), **kw)

    def __call__(self, x: jax.Array, carry: Carry) -> jax.Array:
        x = self.conv_in(x, carry)
        for i, level in enumerate(self.levels):
            with jax.named_scope(f"level_{i}"):
                x = level(x, carry)
        x = self.mid(x, carry)
        return self.conv_out(jax.nn.silu(self.norm_out(x)), carry)


class Decoder(nnx.Module):
    """z channels to pixels (patchified)."""

    def __init__(self, config: VaeConfig, **kw: Any) -> None:
        base = config.decoder_base_dim or config.base_dim
        dims = [base * m for m in (config.dim_mult[-1], *reversed(config.dim_mult))]
        up_time = tuple(reversed(config.temperal_downsample))
        self.conv_in = CausalConv(config.z_dim, dims[0], (3, 3, 3), **kw)
        self.mid = MidBlock(dims[0], **kw)
        levels = []
        for i, (a, b) in enumerate(pairwise(dims)):
            if i and not config.is_residual:
                a //= 2  # the plain form's resampler has halved them
            last = i == len(config.dim_mult) - 1
            temporal = not last and up_time[i]
            mode = "upsample3d" if temporal else "upsample2d"
            bypass = (2 if temporal else 1, 2) if config.is_residual and not last else None
            resample = None if last else Resample(mode, b, b if config.is_residual else b // 2, **kw)
            levels.append(Level([a] + [b] * (config.num_res_blocks + 1), resample, bypass, **kw))
        self.levels = nnx.List(levels)
        self.norm_out = RMSNorm(dims[-1], param_dtype=kw["param_dtype"])
        self.conv_out = CausalConv(dims[-1], config.out_channels, (3, 3, 3), **kw)

    def __call__(self, x: jax.Array, carry: Carry) -> jax.Array:
        x = self.mid(self.conv_in(x, carry), carry)
        for i, level in enumerate(self.levels):
            with jax.named_scope(f"level_{i}"):
                x = level(x, carry)
        return self.conv_out(jax.nn.silu(self.norm_out(x)), carry)


def patchify(x: jax.Array, p: int) -> jax.Array:
    """[B, T, h, w, 3] -> [B, T, h/p, w/p, 3 p p]; channel = (c * p + x offset) * p + y offset, as published."""
    if p == 1:
        return x
    b, t, h, w, c = x.shape
    x = x.reshape(b, t, h // p, p, w // p, p, c).transpose(0, 1, 2, 4, 6, 5, 3)
    return x.reshape(b, t, h // p, w // p, c * p * p)


def unpatchify(x: jax.Array, p: int) -> jax.Array:
    """The inverse of :func:`patchify`."""
    if p == 1:
        return x
    b, t, h, w, c = x.shape
    x = x.reshape(b, t, h, w, c // (p * p), p, p).transpose(0, 1, 2, 6, 3, 5, 4)
    return x.reshape(b, t, h * p, w * p, c // (p * p))


class WanVAE(nnx.Module):
    """Causal video autoencoder.

    Args:
      config: shapes and latent statistics.
      dtype: of activations.
      param_dtype: of stored parameters.
      rngs: initialisation; only training uses it.
    """

    def __init__(
        self, config: VaeConfig, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.config, self.dtype = config, dtype
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.encoder = Encoder(config, **kw)
        self.quant_conv = CausalConv(2 * config.z_dim, 2 * config.z_dim, (1, 1, 1), **kw)
        self.post_quant_conv = CausalConv(config.z_dim, config.z_dim, (1, 1, 1), **kw)
        self.decoder = Decoder(config, **kw)

    def encode(self, video: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and log variance of the latents.

        Args:
          video: [B, T, height, width, 3] in [-1, 1]; T = 4k + 1 (temporal factor), sizes in multiples
            of the spatial factor.

        Returns:
          mean, logvar: [B, F, y, x, z] float32, raw (not normalised); logvar is clamped to [-30, 20] as published.

        Raises:
          ValueError: illegal sizes.
        """
        _, t, h, w, _ = video.shape
        ft, fs = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        if (t - 1) % ft or h % fs or w % fs:
            raise ValueError(
                f"a video to encode needs {ft}k+1 frames and sizes in multiples of {fs}, got {video.shape}"
            )
        return self._encode(video, None)[:2]

    def _encode(self, video: jax.Array, state: State | None) -> tuple[jax.Array, jax.Array, State]:
        with jax.named_scope("vae_encode"):
            carry = Carry(state)
            x = self.encoder(patchify(video.astype(self.dtype), self.config.patch_size or 1), carry)
            mean, logvar = jnp.split(self.quant_conv(x, carry).astype(jnp.float32), 2, axis=-1)
        return mean, jnp.clip(logvar, -30.0, 20.0), carry.state

    def encode_first(self, video: jax.Array) -> tuple[jax.Array, State]:
        """The first frame of a video, [B, 1, height, width, 3] in [-1, 1] -> (mean [B, 1, y, x, z] raw, state)."""
        mean, _, state = self._encode(video, None)
        return mean, state

    def encode_next(self, video: jax.Array, state: State) -> tuple[jax.Array, State]:
        """The frames of the next latent frame, [B, temporal factor, height, width, 3] -> (mean [B, 1, y, x, z] raw, state)."""
        mean, _, state = self._encode(video, state)
        return mean, state

    def _decode(self, z: jax.Array, state: State | None) -> tuple[jax.Array, State]:
        with jax.named_scope("vae_decode"):
            carry = Carry(state)
            x = self.decoder(self.post_quant_conv(z.astype(self.dtype), carry), carry)
            return unpatchify(x, self.config.patch_size or 1).astype(jnp.float32), carry.state

    def decode(self, z: jax.Array) -> jax.Array:
        """Raw latents [B, F, y, x, z] -> video [B, T, height, width, 3] float32, not clamped."""
        return self._decode(z, None)[0]

    def decode_first(self, z: jax.Array) -> tuple[jax.Array, State]:
        """The first latent frame(s) of a video; z [B, 1, y, x, z] raw -> ([B, 1, height, width, 3], state)."""
        return self._decode(z, None)

    def decode_next(self, z: jax.Array, state: State) -> tuple[jax.Array, State]:
        """The next latent frame(s); z [B, 1, y, x, z] raw -> ([B, temporal factor, height, width, 3], state)."""
        return self._decode(z, state)

    def normalize(self, raw: jax.Array) -> jax.Array:
        """Raw latents -> latents the transformer sees: (raw - mean) / std per channel."""
        mean, std = jnp.asarray(self.config.latents_mean), jnp.asarray(self.config.latents_std)
        return (raw - mean) / std

    def denormalize(self, latents: jax.Array) -> jax.Array:
        """The inverse of :meth:`normalize`."""
        return latents * jnp.asarray(self.config.latents_std) + jnp.asarray(self.config.latents_mean)

    def decode_latents(self, latents: jax.Array) -> jax.Array:
        """Normalised latents [B, F, y, x, z] -> video [B, T, height, width, 3] in [-1, 1], clamped."""
        return jnp.clip(self.decode(self.denormalize(latents)), -1.0, 1.0)
