"""The Wan transformer (WanTransformer3DModel), text-to-video.

Owns: embedding, blocks, head and their parameters; layers are stored stacked and scanned by index. Does not own:
self-attention (injected as `attend`), guidance and dtypes at the border (`denoiser`), key names on disk (`weights`).
Invariant: blocks(0, k) then blocks(k, n) equals blocks(0, n) bit for bit.
Source: diffusers 0.42.1 ``transformer_wan.py``; Wan2.1 ``wan/modules/model.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from videodiff.attention.api import Attend, HeadStats
from videodiff.configs import TransformerConfig
from videodiff.grid import TokenGrid
from videodiff.models.layers import (
    LayerNorm,
    Linear,
    RMSNorm,
    cross_attention,
    layer_norm,
    take_layer,
    timestep_sinusoid,
)
from videodiff.models.rope import rope_tables, rotate

F32_MODULES = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")


def param_dtype_for(path: tuple[Any, ...], dtype: Any) -> jnp.dtype:
    """Storage dtype of a parameter: float32 for time embedder, modulation tables and block norms, else ``dtype``.

    Source: ``_keep_in_fp32_modules`` of diffusers' class.
    """
    return jnp.dtype(jnp.float32) if any(str(p) in F32_MODULES for p in path) else jnp.dtype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Encoded text, the same for every step.

    Args:
      tokens: [B, L, C] in the model's dtype.
      logit_bias: [B, L] float32 added to cross-attention logits, or None.
    """

    tokens: jax.Array
    logit_bias: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Modulation:
    """What a timestep and a grid give to every block.

    Args:
      temb: [B, C] float32, time embedding before its activation; the head uses it.
      proj: [B, 6, C] float32: shift, scale, gate of self-attention, then of the feed-forward.
      cos, sin: [N, D/2] float32 rotary tables.
    """

    temb: jax.Array
    proj: jax.Array
    cos: jax.Array
    sin: jax.Array


class PatchEmbedding(nnx.Module):
    """A patch of latents to a token: the published Conv3d with kernel = stride, as one matrix product."""

    def __init__(self, config: TransformerConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        self.patch, self.dtype = config.patch_size, dtype
        shape = (*config.patch_size, config.in_channels, config.width)
        kernel = jax.random.normal(rngs.params(), shape, jnp.float32) / (shape[1] * shape[2] * shape[3]) ** 0.5
        self.kernel = nnx.Param(kernel.astype(param_dtype))
        self.bias = nnx.Param(jnp.zeros((config.width,), param_dtype))

    def __call__(self, latents: jax.Array) -> jax.Array:
        """[B, F, Y, X, Cin] -> [B, N, C], Y and X in latents, tokens frame-major."""
        b, f, y, x, channels = latents.shape
        _, py, px = self.patch
        patches = latents.astype(self.dtype).reshape(b, f, y // py, py, x // px, px, channels)
        patches = patches.transpose(0, 1, 2, 4, 3, 5, 6).reshape(b, -1, py * px * channels)  # [B, N, dy dx c]
        kernel = self.kernel[...].astype(self.dtype).reshape(py * px * channels, -1)
        return patches @ kernel + self.bias[...].astype(self.dtype)


class Mlp(nnx.Module):
    """Linear, activation, Linear."""

    def __init__(self, i: int, hidden: int, o: int, activation: Any, **kw: Any) -> None:
        self.linear_1 = Linear(i, hidden, **kw)
        self.linear_2 = Linear(hidden, o, **kw)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_2(self.activation(self.linear_1(x)))


def gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


class Attention(nnx.Module):
    """Projections and QK norm of one attention; the norm runs over all heads (full width)."""

    def __init__(self, config: TransformerConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        c = config.width
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.heads = config.num_attention_heads
        self.to_q = Linear(c, c, **kw)
        self.to_k = Linear(c, c, **kw)
        self.to_v = Linear(c, c, **kw)
        self.to_out = Linear(c, c, **kw)
        self.norm_q = RMSNorm(c, eps=config.eps, param_dtype=param_dtype)
        self.norm_k = RMSNorm(c, eps=config.eps, param_dtype=param_dtype)

    def qkv(self, x: jax.Array, context: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, N, C], context [B, L, C] -> q [B, N, H, D], k, v [B, L, H, D]."""
        q, k, v = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(context)), self.to_v(context)
        return tuple(t.reshape(*t.shape[:2], self.heads, -1) for t in (q, k, v))  # type: ignore[return-value]

    def out(self, o: jax.Array) -> jax.Array:
        """[B, N, H, D] -> [B, N, C]."""
        return self.to_out(o.reshape(*o.shape[:2], -1))


class Block(nnx.Module):
    """Self-attention, cross-attention, feed-forward (models are read here from top to bottom)."""

    def __init__(self, config: TransformerConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        c = config.width
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.eps, self.dtype = config.eps, dtype
        self.attn1 = Attention(config, **kw)
        self.attn2 = Attention(config, **kw)
        # diffusers' names: norm2 is the affine norm before cross-attention; norm1 and norm3 have no parameters
        self.norm2 = LayerNorm(c, eps=config.eps) if config.cross_attn_norm else None
        self.ffn = Mlp(c, config.ffn_dim, c, gelu_tanh, **kw)
        self.scale_shift_table = nnx.Param(jax.random.normal(rngs.params(), (1, 6, c), jnp.float32) / c**0.5)

    def __call__(
        self, x: jax.Array, mod: Modulation, context: Context, attend: Attend, layer: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, HeadStats]:
        """x [B, N, C] in the model's dtype -> the same, and the attention's statistics."""
        dtype = self.dtype
        six = self.scale_shift_table[...] + mod.proj  # [B, 6, C] float32
        shift1, scale1, gate1, shift2, scale2, gate2 = (six[:, None, i] for i in range(6))  # [B, 1, C]
        with jax.named_scope("self_attention"):
            n = (layer_norm(x, self.eps) * (1 + scale1) + shift1).astype(dtype)
            q, k, v = self.attn1.qkv(n, n)
            o, stats = attend(rotate(q, mod.cos, mod.sin), rotate(k, mod.cos, mod.sin), v, layer=layer, step=step)
            x = (x.astype(jnp.float32) + self.attn1.out(o).astype(jnp.float32) * gate1).astype(dtype)
        with jax.named_scope("cross_attention"):
            n = self.norm2(x).astype(dtype) if self.norm2 is not None else x
            x = x + self.attn2.out(cross_attention(*self.attn2.qkv(n, context.tokens), context.logit_bias))
        with jax.named_scope("feed_forward"):
            n = (layer_norm(x, self.eps) * (1 + scale2) + shift2).astype(dtype)
            x = (x.astype(jnp.float32) + self.ffn(n).astype(jnp.float32) * gate2).astype(dtype)
        return x, stats


class WanTransformer(nnx.Module):
    """Wan 2.1 text-to-video transformer.

    Args:
      config: shapes.
      dtype: of activations and matrix products.
      param_dtype: of stored parameters, except those :func:`param_dtype_for` keeps in float32.
      rngs: initialisation; only training uses it.
    """

    def __init__(
        self, config: TransformerConfig, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.config, self.dtype = config, dtype
        c, p = config.width, config.patch_size[1]
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        # The timestep's way is float32 in full: a few rows, so its price is nothing, and every block scales by it.
        full: dict[str, Any] = {"dtype": jnp.float32, "precision": lax.Precision.HIGHEST, "rngs": rngs}
        self.patch_embedding = PatchEmbedding(config, **kw)
        self.time_embedder = Mlp(config.freq_dim, c, c, jax.nn.silu, param_dtype=jnp.float32, **full)
        self.time_proj = Linear(c, 6 * c, param_dtype=param_dtype, **full)
        self.text_embedder = Mlp(config.text_dim, c, c, gelu_tanh, **kw)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        self.block_stack = stack(rngs)
        self.proj_out = Linear(c, p * p * config.out_channels, **kw)
        self.scale_shift_table = nnx.Param(jax.random.normal(rngs.params(), (1, 2, c), jnp.float32) / c**0.5)

    def encode_context(self, text: jax.Array, logit_bias: jax.Array | None = None) -> Context:
        """Project encoded text; independent of the timestep, so once a prompt.

        Args:
          text: [B, L, text_dim].
          logit_bias: [B, L] float32, see :func:`videodiff.models.layers.cross_attention`.
        """
        with jax.named_scope("encode_context"):
            return Context(self.text_embedder(text), logit_bias)

    def embed(self, latents: jax.Array, timestep: jax.Array) -> tuple[jax.Array, Modulation]:
        """Patches to tokens, timestep to modulation.

        Args:
          latents: [B, F, Y, X, Cin], Y and X in latents.
          timestep: [B] float32 in [0, 1000].

        Returns:
          x: [B, N, C] in the model's dtype, and the modulation.

        Raises:
          ValueError: sizes that do not divide into patches, or a grid beyond rope_max_seq_len.
        """
        b, f, y, x, channels = latents.shape
        p = self.config.patch_size[1]
        if y % p or x % p or channels != self.config.in_channels:
            raise ValueError(
                f"latents must be [batch, frames, rows, columns, channels] with rows and columns multiples of {p} and "
                f"{self.config.in_channels} channels, got {latents.shape}"
            )
        grid = TokenGrid(f, y // p, x // p)
        cos, sin = rope_tables(grid, self.config.attention_head_dim, self.config.rope_max_seq_len)
        tokens = self.patch_embedding(latents)  # [B, N, C]
        # float32 to the end, as in the official code; diffusers rounds temb to the model's dtype and projects there.
        temb = self.time_embedder(timestep_sinusoid(timestep, self.config.freq_dim))  # [B, C]
        proj = self.time_proj(jax.nn.silu(temb)).reshape(b, 6, -1)
        return tokens, Modulation(temb, proj, cos, sin)

    def blocks(
        self,
        x: jax.Array,
        mod: Modulation,
        context: Context,
        start: int,
        stop: int,
        attend: Attend,
        step: jax.Array | int,
    ) -> tuple[jax.Array, HeadStats]:
        """Layers start <= layer < stop.

        Args:
          x: [B, N, C].
          mod, context: from :meth:`embed` and :meth:`encode_context`.
          start, stop: static.
          attend: self-attention.
          step: int32 scalar handed to ``attend``.

        Returns:
          x [B, N, C], and statistics with leaves [stop - start, B, H].

        Raises:
          ValueError: a range outside the layers.
        """
        if not 0 <= start < stop <= self.config.num_layers:
            raise ValueError(f"layers {start=} to {stop=} must lie in 0 to {self.config.num_layers}, at least one")
        graph, stack = nnx.split(self.block_stack)
        step = jnp.asarray(step, jnp.int32)

        def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, HeadStats]:
            # by index: scanning slices of the stack would copy it
            params = jax.tree.map(lambda a: take_layer(a, i), stack)
            return nnx.merge(graph, params)(x, mod, context, attend, i, step)

        with jax.named_scope("block"):
            return lax.scan(layer, x, jnp.arange(start, stop, dtype=jnp.int32))

    def head(self, x: jax.Array, mod: Modulation, grid: TokenGrid) -> jax.Array:
        """Tokens to velocity.

        Args:
          x: [B, N, C].
          mod: from :meth:`embed`; the head uses the raw time embedding.
          grid: the token grid.

        Returns:
          [B, F, Y, X, Cout] float32, Y and X in latents.
        """
        p, c_out = self.config.patch_size[1], self.config.out_channels
        two = self.scale_shift_table[...] + mod.temb.astype(jnp.float32)[:, None]  # [B, 2, C]
        n = (layer_norm(x, self.config.eps) * (1 + two[:, 1:2]) + two[:, 0:1]).astype(self.dtype)
        out = self.proj_out(n).astype(jnp.float32)
        out = out.reshape(-1, grid.frames, grid.rows, grid.cols, p, p, c_out)  # channel fastest
        out = out.transpose(0, 1, 2, 4, 3, 5, 6)  # [B, F, Y, dy, X, dx, C]
        return out.reshape(out.shape[0], grid.frames, grid.rows * p, grid.cols * p, c_out)

    def __call__(
        self, latents: jax.Array, timestep: jax.Array, context: Context, attend: Attend, step: jax.Array | int = 0
    ) -> jax.Array:
        """The whole forward pass with one attention function; see the parts for shapes."""
        p = self.config.patch_size[1]
        _, f, y, x, _ = latents.shape
        tokens, mod = self.embed(latents, timestep)
        tokens, _ = self.blocks(tokens, mod, context, 0, self.config.num_layers, attend, step)
        return self.head(tokens, mod, TokenGrid(f, y // p, x // p))
