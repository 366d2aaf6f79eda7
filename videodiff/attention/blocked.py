"""Softmax attention of one query tile over a list of key tiles: the arithmetic every XLA backend shares.

Owns: the numerically safe softmax over tiles, how a head is cut into tiles in either token order. Does not own:
which tiles are visited. Invariant: the result is that of softmax over the visited keys for every finite input.

The shift of the exponent is the row maximum over the first visited tile, kept unchanged afterwards, which saves a
pass over the scores per tile. The first tile makes every row sum at least 1, so nothing that matters underflows. A
later logit may exceed the shift; the row sum then tells, and only that query tile is redone with a running maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from videodiff.grid import TokenOrder

# Row sums above this redo the tile. Values up to 2**63 in v then still cannot overflow the accumulator.
SUM_LIMIT = 2.0**64

Loader = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array | None]]


def operand_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Type of the matrix products' operands: CPUs have no bf16 units, so there tiles are widened as they are read."""
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else jnp.dtype(dtype)


@dataclass(frozen=True)
class Tiling:
    """How one head of [N, D] is cut into tiles of ``size`` tokens.

    In frame-major order a tile is ``size`` neighbouring tokens. In token-major order it is ``size // F`` neighbouring
    patches of all F frames, read as a strided block of [F, P, D]; inside the tile the order is frame by frame,
    which attention cannot tell from token-major.

    Args:
      order: the order in which neighbours are taken.
      frames, patches: F and P.
      size: tokens of a tile, a multiple of F in token-major order.
    """

    order: TokenOrder
    frames: int
    patches: int
    size: int

    @property
    def tokens(self) -> int:
        return self.frames * self.patches

    @property
    def _extent(self) -> tuple[int, int]:
        """Length of the cut axis and how much of it one tile takes."""
        if self.order is TokenOrder.TOKEN_MAJOR:
            return self.patches, self.size // self.frames
        return self.tokens, self.size

    @property
    def count(self) -> int:
        """Tiles per head, the last one padded when it does not divide."""
        extent, step = self._extent
        return -(-extent // step)

    def cut(self, x: jax.Array) -> jax.Array:
        """[N, D] -> [1 or F, padded extent, D]; the padding is zero."""
        extent, step = self._extent
        x = x.reshape(-1, extent, x.shape[-1])
        return jnp.pad(x, ((0, 0), (0, self.count * step - extent), (0, 0)))

    def join(self, x: jax.Array) -> jax.Array:
        """The inverse of :meth:`cut`."""
        extent, _ = self._extent
        return x[:, :extent].reshape(self.tokens, x.shape[-1])

    def read(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Tile ``index`` of a cut head: [size, D]."""
        _, step = self._extent
        return lax.dynamic_slice_in_dim(x, index * step, step, 1).reshape(self.size, x.shape[-1])

    def write(self, x: jax.Array, tile: jax.Array, index: jax.Array) -> jax.Array:
        """A cut head with tile ``index`` replaced."""
        _, step = self._extent
        return lax.dynamic_update_slice_in_dim(x, tile.reshape(x.shape[0], step, x.shape[-1]), index * step, 1)

    def bias(self, index: jax.Array) -> jax.Array | None:
        """[1, size] f32 added to the scores of key tile ``index``: -inf on padding; None when nothing is padded."""
        extent, step = self._extent
        if self.count * step == extent:
            return None
        place = index * step + jnp.arange(self.size) % step
        return jnp.where(place < extent, 0.0, -jnp.inf).astype(jnp.float32)[None]


def _scores(q: jax.Array, k: jax.Array, bias: jax.Array | None) -> jax.Array:
    s = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)  # [tq, tk]
    return s if bias is None else s + bias


def _weighted(p: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)  # [tq, D]


def attend_tile(
    q: jax.Array, load: Loader, tiles: Callable[[jax.Array], jax.Array], count: jax.Array | int
) -> jax.Array:
    """Softmax attention of one query tile over ``count`` key tiles.

    Args:
      q: [tq, D].
      load: key tile index -> (k [tk, D], v [tk, D], bias [1, tk] or None).
      tiles: position in the list (0 .. count - 1) -> key tile index. The first should be the likeliest to hold the
        row maximum (the diagonal): speed, not the result, depends on it.
      count: number of visited tiles, at least 1; may be traced.

    Returns:
      [tq, D] float32.
    """
    scale = 1.0 / math.sqrt(q.shape[-1])

    def fixed() -> tuple[jax.Array, jax.Array]:
        k, v, bias = load(tiles(jnp.int32(0)))
        s = _scores(q, k, bias)
        m = jnp.max(s, axis=1, keepdims=True)
        p = jnp.exp((s - m) * scale)

        def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            o, l = carry
            k, v, bias = load(tiles(i))
            p = jnp.exp((_scores(q, k, bias) - m) * scale)
            return o + _weighted(p, v), l + jnp.sum(p, axis=1, keepdims=True)

        return lax.fori_loop(1, count, body, (_weighted(p, v), jnp.sum(p, axis=1, keepdims=True)))

    def running(_: None) -> tuple[jax.Array, jax.Array]:
        def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            o, l, m = carry
            k, v, bias = load(tiles(i))
            s = _scores(q, k, bias)
            m_new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
            p, c = jnp.exp((s - m_new) * scale), jnp.exp((m - m_new) * scale)
            return o * c + _weighted(p, v), l * c + jnp.sum(p, axis=1, keepdims=True), m_new

        rows = q.shape[0]
        init = (jnp.zeros(q.shape, jnp.float32), jnp.zeros((rows, 1)), jnp.full((rows, 1), -jnp.inf))
        o, l, _ = lax.fori_loop(0, count, body, init)
        return o, l

    o, l = fixed()
    o, l = lax.cond(jnp.all(l < SUM_LIMIT), lambda _: (o, l), running, None)
    return o / l


def attend_head(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_tiling: Tiling,
    key_tiling: Tiling,
    tiles: Callable[[jax.Array, jax.Array], jax.Array],
    count: Callable[[jax.Array], jax.Array | int],
) -> jax.Array:
    """One head, each query tile over its own list of key tiles.

    Args:
      q, k, v: [N, D] frame-major.
      query_tiling, key_tiling: how queries and keys are cut, in one token order.
      tiles: (query tile, position in its list) -> key tile.
      count: query tile -> length of its list.

    Returns:
      [N, D] in q's dtype.
    """
    dtype = operand_dtype(q.dtype)
    qc, kc, vc = query_tiling.cut(q), key_tiling.cut(k), key_tiling.cut(v)

    def load(j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        return key_tiling.read(kc, j).astype(dtype), key_tiling.read(vc, j).astype(dtype), key_tiling.bias(j)

    def row(i: jax.Array, out: jax.Array) -> jax.Array:
        tile = query_tiling.read(qc, i).astype(dtype)
        o = attend_tile(tile, load, lambda n: tiles(i, n), count(i))
        return query_tiling.write(out, o.astype(q.dtype), i)

    out = lax.fori_loop(0, query_tiling.count, row, jnp.zeros_like(qc))
    return query_tiling.join(out)


def to_heads(x: jax.Array) -> jax.Array:
    """[B, N, H, D] -> [B*H, N, D]."""
    b, n, h, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b * h, n, d)


def from_heads(x: jax.Array, batch: int) -> jax.Array:
    """[B*H, N, D] -> [B, N, H, D]."""
    bh, n, d = x.shape
    return x.reshape(batch, bh // batch, n, d).transpose(0, 2, 1, 3)
