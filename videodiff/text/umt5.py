"""The UMT5 text encoder: token ids -> one vector a token.

Owns: the forward pass of transformers' UMT5EncoderModel. Does not own: tokens, zero padding afterwards (`encode`),
checkpoint names (`weights.keys_text`). Invariant: peak memory is the weights as stored plus one layer in the compute
dtype; neither the layer stack nor the embedding table is ever cast as a whole.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from videodiff.configs import TextEncoderConfig
from videodiff.models.layers import take_layer

Dtype = Any


class RMSNorm(nnx.Module):
    """x / rms(x) * scale; statistics in float32, no mean subtraction, the scale applied after the cast."""

    def __init__(self, width: int, *, eps: float, dtype: Dtype, param_dtype: Dtype) -> None:
        self.scale = nnx.Param(jnp.ones((width,), param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        f32 = x.astype(jnp.float32)
        variance = jnp.mean(f32 * f32, axis=-1, keepdims=True)
        return (f32 * lax.rsqrt(variance + self.eps)).astype(self.dtype) * self.scale[...].astype(self.dtype)


class Linear(nnx.Module):
    """x @ kernel, no bias; kernel [in, out] is cast to the compute dtype where it is used."""

    def __init__(
        self, size_in: int, size_out: int, *, std: float, dtype: Dtype, param_dtype: Dtype, rngs: nnx.Rngs
    ) -> None:
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (size_in, size_out), param_dtype))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype) @ self.kernel[...].astype(self.dtype)


class Attention(nnx.Module):
    """Self-attention with a learnt bias per relative-position bucket and head; no 1/sqrt(d) on the logits."""

    def __init__(self, config: TextEncoderConfig, *, dtype: Dtype, param_dtype: Dtype, rngs: nnx.Rngs) -> None:
        d, inner = config.d_model, config.num_heads * config.d_kv
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q = Linear(d, inner, std=(d * config.d_kv) ** -0.5, **kw)  # stds as transformers initialises UMT5
        self.k = Linear(d, inner, std=d**-0.5, **kw)
        self.v = Linear(d, inner, std=d**-0.5, **kw)
        self.o = Linear(inner, d, std=inner**-0.5, **kw)
        shape = (config.relative_attention_num_buckets, config.num_heads)
        self.relative_bias = nnx.Param(d**-0.5 * jax.random.normal(rngs.params(), shape, param_dtype))
        self.heads = config.num_heads

    def __call__(self, x: jax.Array, mask: jax.Array, buckets: jax.Array) -> jax.Array:
        """x [B, L, C], mask [B, L] bool (keys to attend to), buckets [L, L] int32 -> [B, L, C]."""
        b, n, _ = x.shape
        q, k, v = (f(x).reshape(b, n, self.heads, -1) for f in (self.q, self.k, self.v))  # [B, L, H, D]
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)  # [B, H, Lq, Lk]
        bias = self.relative_bias[...].astype(jnp.float32)[buckets].transpose(2, 0, 1)  # [H, Lq, Lk]
        logits = jnp.where(mask[:, None, None, :], logits + bias, jnp.finfo(jnp.float32).min)
        p = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
        return self.o(jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(b, n, -1))


class FeedForward(nnx.Module):
    """gelu_tanh(wi_0 x) * (wi_1 x), then wo."""

    def __init__(self, config: TextEncoderConfig, *, dtype: Dtype, param_dtype: Dtype, rngs: nnx.Rngs) -> None:
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.wi_0 = Linear(config.d_model, config.d_ff, std=config.d_model**-0.5, **kw)
        self.wi_1 = Linear(config.d_model, config.d_ff, std=config.d_model**-0.5, **kw)
        self.wo = Linear(config.d_ff, config.d_model, std=config.d_ff**-0.5, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(jax.nn.gelu(self.wi_0(x), approximate=True) * self.wi_1(x))


class Block(nnx.Module):
    """One pre-norm layer."""

    def __init__(self, config: TextEncoderConfig, *, dtype: Dtype, param_dtype: Dtype, rngs: nnx.Rngs) -> None:
        norm: dict[str, Any] = {"eps": config.layer_norm_epsilon, "dtype": dtype, "param_dtype": param_dtype}
        self.norm1 = RMSNorm(config.d_model, **norm)
        self.attn = Attention(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.norm2 = RMSNorm(config.d_model, **norm)
        self.ffn = FeedForward(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, buckets: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x), mask, buckets)
        return x + self.ffn(self.norm2(x))


class UMT5Encoder(nnx.Module):
    """UMT5EncoderModel.

    Args:
      config: shapes.
      dtype: compute dtype; norm and softmax statistics are float32 in any case.
      param_dtype: dtype the weights are created in. Loaded weights may have any float dtype; each layer is cast to
        ``dtype`` when it is its turn.
      rngs: "params" stream for initial weights.

    The parameters of all layers are stacked along a leading axis under ``blocks``.
    """

    def __init__(
        self,
        config: TextEncoderConfig,
        *,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        self.dtype = jnp.dtype(dtype)
        table = (config.vocab_size, config.d_model)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), table, param_dtype))

        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(key: jax.Array) -> Block:
            return Block(config, dtype=self.dtype, param_dtype=param_dtype, rngs=nnx.Rngs(params=key))

        self.blocks = stack(jax.random.split(rngs.params(), config.num_layers))
        self.final_norm = RMSNorm(
            config.d_model, eps=config.layer_norm_epsilon, dtype=self.dtype, param_dtype=param_dtype
        )

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Encode.

        Args:
          ids: [B, L] int in [0, vocab_size); an id outside gives NaN.
          mask: [B, L], non-zero on tokens, 0 on padding. At least one token a row.

        Returns:
          [B, L, d_model] in the compute dtype. Rows of padding hold values without meaning.
        """
        with jax.named_scope("umt5"):
            # Gather, then cast: the table of UMT5-XXL is 4 GiB in float32.
            x = self.embedding[...].at[ids].get(mode="fill", fill_value=jnp.nan).astype(self.dtype)  # [B, L, C]
            keep = mask.astype(bool)
            buckets = jnp.asarray(position_buckets(ids.shape[1], self.config))
            graph, stacked = nnx.split(self.blocks)

            def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
                one = jax.tree.map(lambda p: take_layer(p, i), stacked)
                with jax.named_scope("umt5_layer"):
                    return nnx.merge(graph, one)(x, keep, buckets), None

            x, _ = lax.scan(layer, x, jnp.arange(self.config.num_layers))
            return self.final_norm(x)


def position_buckets(length: int, config: TextEncoderConfig) -> np.ndarray:
    """The bucket of every (query, key) pair: [L, L] int32 in [0, relative_attention_num_buckets).

    Half of the buckets serve keys after the query. Of each half, the first half are single distances, the rest grow
    logarithmically up to relative_attention_max_distance; everything farther shares the last one.
    Source: ``_relative_position_bucket`` of transformers 5.24, ``models/umt5/modeling_umt5.py``, bidirectional.
    """
    half = config.relative_attention_num_buckets // 2
    exact = half // 2
    position = np.arange(length)
    relative = position[None, :] - position[:, None]  # key - query
    distance = np.abs(relative)
    # float32 steps, as the reference rounds; the logarithm in float64 is then right to the last float32 bit
    log = np.log(np.maximum(distance, 1) / exact).astype(np.float32)
    ratio = log / np.float32(math.log(config.relative_attention_max_distance / exact)) * np.float32(half - exact)
    far = np.minimum(exact + ratio.astype(np.int32), half - 1)
    return (np.where(relative > 0, half, 0) + np.where(distance < exact, distance, far)).astype(np.int32)
