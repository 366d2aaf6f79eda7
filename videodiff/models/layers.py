"""Layers shared by the transformer's parts: linear maps, norms, the timestep sinusoid, cross-attention.

Owns: their arithmetic and parameter names, and reading one layer of a stack. Does not own: self-attention (injected),
the order of a block. Invariant: norms and their statistics are float32 whatever the dtype of the model.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

CROSS_CHUNK = 4096  # queries a cross-attention score block holds on long sequences


def take_layer(stack: jax.Array, i: jax.Array) -> jax.Array:
    """Layer ``i`` of a stacked parameter, inside a scan.

    XLA for CPU computes in float32 what it has no bfloat16 code for. It turns slice-then-cast into cast-then-slice and,
    as the stack does not change, moves the cast of the whole stack out of the loop: 18 GiB for UMT5-XXL. The barrier
    ties the stack to the loop index, so the cast stays inside and fuses with the slice.
    """
    if stack.dtype.itemsize < 4:
        stack, i = lax.optimization_barrier((stack, i))
    return lax.dynamic_index_in_dim(stack, i, keepdims=False)


class Linear(nnx.Module):
    """y = x @ kernel + bias in ``dtype``; kernel [in, out].

    Args:
      features_in, features_out: widths.
      dtype: of the product.
      param_dtype: of the stored parameters.
      precision: of the product; None is the platform's default, which on GPU and TPU is less than float32's.
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        *,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
        precision: lax.Precision | None = None,
    ) -> None:
        self.dtype, self.precision = dtype, precision
        scale = 1.0 / math.sqrt(features_in)
        kernel = jax.random.normal(rngs.params(), (features_in, features_out), jnp.float32) * scale
        self.kernel = nnx.Param(kernel.astype(param_dtype))
        self.bias = nnx.Param(jnp.zeros((features_out,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out] in ``dtype``."""
        product = jnp.matmul(x.astype(self.dtype), self.kernel[...].astype(self.dtype), precision=self.precision)
        return product + self.bias[...].astype(self.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, float32 inside, rounded once (torch's order)."""

    def __init__(self, features: int, *, eps: float, param_dtype: jnp.dtype) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        f = x.astype(jnp.float32)
        f = f * lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + self.eps)
        return (f * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, eps: float) -> jax.Array:
    """Layer norm without parameters over the last axis; float32 out."""
    f = x.astype(jnp.float32)
    f = f - jnp.mean(f, axis=-1, keepdims=True)
    return f * lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + eps)


class LayerNorm(nnx.Module):
    """Layer norm with scale and bias, all float32; the caller casts."""

    def __init__(self, features: int, *, eps: float) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.eps) * self.scale[...] + self.bias[...]


def timestep_sinusoid(timestep: jax.Array, dim: int) -> jax.Array:
    """[..., dim] float32: cosines first, then sines, frequencies 10000^(-i / (dim/2)).

    Args:
      timestep: [...] float32 in [0, 1000].
      dim: even.
    """
    half = dim // 2
    # On the host, as exp differs between platforms and an angle is up to 1000 frequencies. The exponent is rounded to
    # float32 as in diffusers: exact exponents alone move the velocity by up to 7e-6 (relative L2).
    exponent = -math.log(10000.0) * np.arange(half, dtype=np.float32) / half
    frequencies = np.exp(exponent.astype(np.float64)).astype(np.float32)
    angle = timestep.astype(jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def cross_attention(q: jax.Array, k: jax.Array, v: jax.Array, logit_bias: jax.Array | None) -> jax.Array:
    """Dense attention from video tokens to text tokens, memory linear in N.

    Args:
      q: [B, N, H, D].
      k, v: [B, L, H, D].
      logit_bias: [B, L] float32 added to the logits, or None. log(n) on one row stands for n equal rows.

    Returns:
      [B, N, H, D] in q's dtype; softmax in float32.
    """
    scale = 1.0 / math.sqrt(q.shape[-1])

    def attend(q: jax.Array) -> jax.Array:
        s = jnp.einsum("bnhd,blhd->bhnl", q, k, preferred_element_type=jnp.float32) * scale
        if logit_bias is not None:
            s = s + logit_bias[:, None, None, :]
        p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
        return jnp.einsum("bhnl,blhd->bnhd", p, v, preferred_element_type=jnp.float32).astype(q.dtype)

    b, n, h, d = q.shape
    if n <= CROSS_CHUNK:
        return attend(q)
    chunks = -(-n // CROSS_CHUNK)
    padded = jnp.pad(q, ((0, 0), (0, chunks * CROSS_CHUNK - n), (0, 0), (0, 0)))
    parts = padded.reshape(b, chunks, CROSS_CHUNK, h, d).swapaxes(0, 1)  # [chunks, B, n, H, D]
    out = lax.map(attend, parts).swapaxes(0, 1).reshape(b, chunks * CROSS_CHUNK, h, d)
    return out[:, :n]
