"""Layers of the causal video VAE, each able to run a video in chunks.

Owns: causal convolutions, the norm, residual blocks, per-frame attention, the four resamplers, the residual bypasses,
and the carry that lets a chunk continue where the last one stopped. Does not own: the order of layers (`vae`).
Invariant: running chunks one after the other equals running the whole video, for any chunk lengths.
Source: diffusers 0.42.1 ``autoencoder_kl_wan.py``; Wan2.1 ``wan/modules/vae.py``, Wan2.2 ``vae2_2.py``.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

ATTENTION_SCORES = 16 * 2**20  # scores held at once by the per-frame attention
State = tuple[jax.Array, ...]


class Carry:
    """What causal layers keep between chunks: visited in the same order by every chunk.

    Args:
      state: what the last chunk left, or None for the first chunk of a video.
    """

    def __init__(self, state: State | None = None) -> None:
        self.first = state is None
        self._old = iter(state or ())
        self.new: list[jax.Array] = []

    def extend(self, x: jax.Array, frames: int) -> jax.Array:
        """``x`` with the ``frames`` frames before it: zeros in the first chunk.

        Args:
          x: [B, T, ...]; T may be 0.

        Returns:
          [B, frames + T, ...]; its last ``frames`` frames are kept for the next chunk.
        """
        if self.first:
            past = jnp.zeros((x.shape[0], frames, *x.shape[2:]), x.dtype)
        else:
            past = next(self._old)
        full = jnp.concatenate([past, x], axis=1)
        self.new.append(full[:, full.shape[1] - frames :])
        return full

    @property
    def state(self) -> State:
        return tuple(self.new)


def conv2d(x: jax.Array, kernel: jax.Array, *, stride: int = 1, padding: Any = "SAME") -> jax.Array:
    """x [..., h, w, I], kernel [kh, kw, I, O] -> [..., h', w', O]."""
    lead = x.shape[:-3]
    y = lax.conv_general_dilated(
        x.reshape(-1, *x.shape[-3:]), kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y.reshape(*lead, *y.shape[1:])


def conv3d_valid_time(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution that pads space but not time.

    XLA's CPU conv3d reaches 10 to 38 GFLOP/s forward and 4 to 35 with gradients at 32 to 64 channels, a sum of kt
    conv2d 31 to 69 and 20 to 38 (two AVX2 cores, jax 0.10.2, crops of 12 to 48 px), so CPU takes the sum;
    accelerators take the one operation.

    Args:
      x: [B, kt - 1 + T, h, w, I].
      kernel: [kt, kh, kw, I, O].

    Returns:
      [B, T, h, w, O].
    """
    taps, kh, kw, _, _ = kernel.shape
    frames = x.shape[1] - taps + 1
    if jax.default_backend() == "cpu":
        return sum(conv2d(x[:, t : t + frames], kernel[t]) for t in range(taps))  # type: ignore[return-value]
    padding = [(0, 0), (kh // 2, kh // 2), (kw // 2, kw // 2)]
    return lax.conv_general_dilated(x, kernel, (1, 1, 1), padding, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))


def _init(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    fan_in = math.prod(shape[:-1])
    return (jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)).astype(dtype)


class CausalConv(nnx.Module):
    """Convolution over (time, height, width) that sees the past only.

    Args:
      i, o: channels in and out.
      size: (kt, kh, kw), odd in space.
    """

    def __init__(
        self, i: int, o: int, size: tuple[int, int, int], *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.dtype = dtype
        self.kernel = nnx.Param(_init(rngs, (*size, i, o), param_dtype))
        self.bias = nnx.Param(jnp.zeros((o,), param_dtype))

    def weights(self) -> tuple[jax.Array, jax.Array]:
        return self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)

    def __call__(self, x: jax.Array, carry: Carry) -> jax.Array:
        """[B, T, h, w, I] -> [B, T, h, w, O]."""
        kernel, bias = self.weights()
        taps, kh, kw = kernel.shape[:3]
        x = x.astype(self.dtype)
        if (taps, kh, kw) == (1, 1, 1):
            return x @ kernel[0, 0, 0] + bias
        if taps == 1:
            return conv2d(x, kernel[0]) + bias
        alone = carry.first and x.shape[1] == 1  # the taps on the past would multiply zeros
        full = carry.extend(x, taps - 1)
        return (conv2d(x, kernel[-1]) if alone else conv3d_valid_time(full, kernel)) + bias

    def strided(self, x: jax.Array) -> jax.Array:
        """Temporal stride 2 without padding, (3, 1, 1) kernels: frames (2k, 2k + 1, 2k + 2) -> frame k."""
        kernel, bias = self.weights()
        out = (x.shape[1] - 1) // 2
        parts = [x[:, t : t + 2 * out - 1 : 2] @ kernel[t, 0, 0] for t in range(3)]
        return parts[0] + parts[1] + parts[2] + bias


class Conv2d(nnx.Module):
    """A per-frame convolution; kernel [kh, kw, I, O]."""

    def __init__(self, i: int, o: int, size: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        self.dtype = dtype
        self.kernel = nnx.Param(_init(rngs, (size, size, i, o), param_dtype))
        self.bias = nnx.Param(jnp.zeros((o,), param_dtype))

    def __call__(self, x: jax.Array, *, stride: int = 1, padding: Any = "SAME") -> jax.Array:
        """[B, T, h, w, I] -> [B, T, h', w', O]."""
        kernel, bias = self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        x = x.astype(self.dtype)
        if kernel.shape[:2] == (1, 1):
            return x @ kernel[0, 0] + bias
        return conv2d(x, kernel, stride=stride, padding=padding) + bias


class RMSNorm(nnx.Module):
    """Channels divided by their L2 norm, times sqrt(C) and gamma; float32 inside."""

    def __init__(self, channels: int, *, param_dtype: Any) -> None:
        self.gamma = nnx.Param(jnp.ones((channels,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        f = x.astype(jnp.float32)
        squares = jnp.sum(f * f, axis=-1, keepdims=True)
        # torch's normalize divides by max(norm, 1e-12); the maximum inside the root keeps the gradient finite at 0
        f = f * lax.rsqrt(jnp.maximum(squares, 1e-24)) * math.sqrt(x.shape[-1])
        return (f * self.gamma[...].astype(jnp.float32)).astype(x.dtype)


class ResidualBlock(nnx.Module):
    """norm, SiLU, conv, norm, SiLU, conv; a 1x1x1 shortcut where channels change."""

    def __init__(self, i: int, o: int, **kw: Any) -> None:
        self.norm1 = RMSNorm(i, param_dtype=kw["param_dtype"])
        self.conv1 = CausalConv(i, o, (3, 3, 3), **kw)
        self.norm2 = RMSNorm(o, param_dtype=kw["param_dtype"])
        self.conv2 = CausalConv(o, o, (3, 3, 3), **kw)
        self.conv_shortcut = CausalConv(i, o, (1, 1, 1), **kw) if i != o else None

    def __call__(self, x: jax.Array, carry: Carry) -> jax.Array:
        h = self.conv1(jax.nn.silu(self.norm1(x)), carry)
        h = self.conv2(jax.nn.silu(self.norm2(h)), carry)
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x, carry))


class FrameAttention(nnx.Module):
    """Single-head self-attention within each frame, memory linear in positions."""

    def __init__(self, channels: int, **kw: Any) -> None:
        self.norm = RMSNorm(channels, param_dtype=kw["param_dtype"])
        self.to_qkv = Conv2d(channels, 3 * channels, 1, **kw)
        self.proj = Conv2d(channels, channels, 1, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, h, w, c = x.shape
        n = h * w
        q, k, v = jnp.split(self.to_qkv(self.norm(x)).reshape(b * t, n, 3 * c), 3, axis=-1)  # [B*T, n, C]
        rows = max(1, min(n, ATTENTION_SCORES // n))
        chunks = -(-n // rows)

        def frame(qkv: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, k, v = qkv

            def part(q: jax.Array) -> jax.Array:
                s = jnp.dot(q, k.T, preferred_element_type=jnp.float32) / math.sqrt(c)
                return jnp.dot(jax.nn.softmax(s, axis=-1).astype(v.dtype), v)

            if chunks == 1:
                return part(q)
            padded = jnp.pad(q, ((0, chunks * rows - n), (0, 0))).reshape(chunks, rows, c)
            return lax.map(part, padded).reshape(chunks * rows, c)[:n]

        o = jax.vmap(frame)((q, k, v)) if chunks == 1 else lax.map(frame, (q, k, v))
        return x + self.proj(o.reshape(b, t, h, w, c))


class Resample(nnx.Module):
    """One of downsample2d, downsample3d, upsample2d, upsample3d.

    Args:
      mode: which.
      i: channels in.
      o: channels out of the spatial convolution.
    """

    def __init__(self, mode: str, i: int, o: int, **kw: Any) -> None:
        assert mode in ("downsample2d", "downsample3d", "upsample2d", "upsample3d"), mode
        self.mode = mode
        self.conv = Conv2d(i, o, 3, **kw)
        if mode == "upsample3d":
            self.time_conv = CausalConv(i, 2 * i, (3, 1, 1), **kw)
        elif mode == "downsample3d":
            self.time_conv = CausalConv(o, o, (3, 1, 1), **kw)

    def __call__(self, x: jax.Array, carry: Carry) -> jax.Array:
        if self.mode.startswith("down"):
            x = self.conv(x, stride=2, padding=((0, 1), (0, 1)))
            return self._halve_time(x, carry) if self.mode == "downsample3d" else x
        if self.mode == "upsample3d":
            x = self._double_time(x, carry)
        b, t, h, w, c = x.shape
        x = jnp.broadcast_to(x[:, :, :, None, :, None], (b, t, h, 2, w, 2, c)).reshape(b, t, 2 * h, 2 * w, c)
        return self.conv(x)

    def _halve_time(self, x: jax.Array, carry: Carry) -> jax.Array:
        """Frame 0 untouched, then one frame for every two: the convolution's windows overlap by one frame."""
        if carry.first:
            carry.new.append(x[:, -1:])
            return x if x.shape[1] == 1 else jnp.concatenate([x[:, :1], self.time_conv.strided(x)], axis=1)
        return self.time_conv.strided(carry.extend(x, 1))

    def _double_time(self, x: jax.Array, carry: Carry) -> jax.Array:
        """Frame 0 passes once; the rest go through a convolution that never saw it and come out twice as many."""
        head, rest = (x[:, :1], x[:, 1:]) if carry.first else (x[:, :0], x)
        if rest.shape[1] == 0:
            carry.extend(rest, 2)
            return head
        b, t, h, w, c = rest.shape
        two = self.time_conv(rest, carry).reshape(b, t, h, w, 2, c)  # the first C channels are the earlier frame
        return jnp.concatenate([head, two.transpose(0, 1, 4, 2, 3, 5).reshape(b, 2 * t, h, w, c)], axis=1)


def avg_down(x: jax.Array, out: int, factor_t: int, factor_s: int) -> jax.Array:
    """Residual bypass of a downsampling level: pixels move into channels, groups of channels are averaged.

    Args:
      x: [B, T, h, w, I]; a frame count that is no multiple of ``factor_t`` is padded with zero frames in front.

    Returns:
      [B, T / factor_t, h / factor_s, w / factor_s, out].
    """
    x = jnp.pad(x, ((0, 0), (-x.shape[1] % factor_t, 0), (0, 0), (0, 0), (0, 0)))
    b, t, h, w, c = x.shape
    x = x.reshape(b, t // factor_t, factor_t, h // factor_s, factor_s, w // factor_s, factor_s, c)
    x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)  # [B, T, h, w, c, t offset, y offset, x offset]
    return x.reshape(*x.shape[:4], out, -1).mean(axis=-1)


def dup_up(x: jax.Array, out: int, factor_t: int, factor_s: int, first: bool) -> jax.Array:
    """Residual bypass of an upsampling level: channels repeat and unfold into pixels.

    Args:
      x: [B, T, h, w, I].
      first: on the first chunk the first factor_t - 1 frames are dropped.

    Returns:
      [B, T * factor_t (- factor_t + 1), h * factor_s, w * factor_s, out].
    """
    b, t, h, w, c = x.shape
    x = jnp.repeat(x, out * factor_t * factor_s**2 // c, axis=-1)
    x = x.reshape(b, t, h, w, out, factor_t, factor_s, factor_s).transpose(0, 1, 5, 2, 6, 3, 7, 4)
    x = x.reshape(b, t * factor_t, h * factor_s, w * factor_s, out)
    return x[:, factor_t - 1 :] if first else x
