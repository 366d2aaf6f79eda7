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

# Row sums above this redo the tile. Values up to 2**63 in v then still cannot overflow the accumulator.
SUM_LIMIT = 2.0**64

Loader = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array | None]]


def operand_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Type of the matrix products' operands: CPUs have no bf16 units, so there tiles are widened as they are read."""
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else jnp.dtype(dtype)


@dataclass(frozen=True)
class Tiling:
    """How one head, [N, D] frame-major, is cut into tiles of ``size`` tokens.

    A spatial head's tile is ``size`` neighbouring tokens. A temporal head's is ``size // F`` neighbouring patches of all
    F frames, read as a strided block of [F, P, D]: inside the tile the order is frame by frame, which attention cannot
    tell from token-major. Where the last tile would stick out, it is moved back over its neighbour: nothing is padded.

    Args:
      frames, patches: F and P.
      size: tokens of a tile; a multiple of F if a temporal head is ever read.
      temporal: scalar bool, may be traced; a Python bool settles it while tracing.
    """

    frames: int
    patches: int
    size: int
    temporal: jax.Array | bool = False

    @property
    def tokens(self) -> int:
        return self.frames * self.patches

    @property
    def count(self) -> int:
        return -(-self.tokens // self.size)

    @property
    def overlaps(self) -> bool:
        """The last tile holds tokens of the one before it."""
        return self.count * self.size != self.tokens

    def _branch(
        self, temporal: Callable[..., jax.Array], spatial: Callable[..., jax.Array], *args: jax.Array
    ) -> jax.Array:
        if isinstance(self.temporal, bool):
            return (temporal if self.temporal else spatial)(*args)
        return lax.cond(self.temporal, temporal, spatial, *args)

    def read(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Tile ``index`` of a head [N, D]: [size, D]."""
        wide = self.size // self.frames

        def block(x: jax.Array, index: jax.Array) -> jax.Array:
            x = x.reshape(self.frames, self.patches, -1)
            return lax.dynamic_slice_in_dim(x, index * wide, wide, 1).reshape(self.size, -1)

        def stretch(x: jax.Array, index: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, index * self.size, self.size, 0)

        return self._branch(block, stretch, x, index)

    def write(self, x: jax.Array, tile: jax.Array, index: jax.Array) -> jax.Array:
        """A head with tile ``index`` replaced; where tiles overlap, write the last one first.

        Either kind of tile is F stretches of size // F tokens at equal distances. Written one by one they stay in place;
        a branch around the update would copy the whole head.
        """
        if self.temporal is False:
            return lax.dynamic_update_slice_in_dim(x, tile, index * self.size, 0)
        wide = self.size // self.frames
        first = jnp.where(
            self.temporal,
            jnp.minimum(index * wide, self.patches - wide),
            jnp.minimum(index * self.size, self.tokens - self.size),
        )
        distance = jnp.where(self.temporal, self.patches, wide)
        stretches = tile.reshape(self.frames, wide, -1)

        def put(f: jax.Array, x: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(x, stretches[f], first + f * distance, 0)

        return lax.fori_loop(0, self.frames, put, x)

    def bias(self, index: jax.Array) -> jax.Array | None:
        """[1, size] f32 added to the scores of key tile ``index``: -inf on tokens that an earlier tile holds."""
        if not self.overlaps:
            return None
        surplus = jnp.where(index == self.count - 1, self.count * self.size - self.tokens, 0)
        position, wide = jnp.arange(self.size), self.size // self.frames
        shared = self._branch(
            lambda surplus: position % wide < surplus // self.frames, lambda surplus: position < surplus, surplus
        )
        return jnp.where(shared, -jnp.inf, 0.0).astype(jnp.float32)[None]


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
    queries: Tiling,
    keys: Tiling,
    tiles: Callable[[jax.Array, jax.Array], jax.Array],
    count: Callable[[jax.Array], jax.Array | int],
) -> jax.Array:
    """One head, each query tile over its own list of key tiles.

    Args:
      q, k, v: [N, D] frame-major.
      queries, keys: how they are cut.
      tiles: (query tile, position in its list) -> key tile.
      count: query tile -> length of its list.

    Returns:
      [N, D] in q's dtype.
    """
    dtype = operand_dtype(q.dtype)

    def load(j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        return keys.read(k, j).astype(dtype), keys.read(v, j).astype(dtype), keys.bias(j)

    def row(step: jax.Array, out: jax.Array) -> jax.Array:
        i = queries.count - 1 - step  # the last first: where it overlaps, its neighbour has the last word
        o = attend_tile(queries.read(q, i).astype(dtype), load, lambda n: tiles(i, n), count(i))
        return queries.write(out, o.astype(q.dtype), i)

    return lax.fori_loop(0, queries.count, row, jnp.zeros_like(q))


def to_heads(x: jax.Array) -> jax.Array:
    """[B, N, H, D] -> [B*H, N, D]."""
    b, n, h, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b * h, n, d)


def from_heads(x: jax.Array, batch: int) -> jax.Array:
    """[B*H, N, D] -> [B, N, H, D]."""
    bh, n, d = x.shape
    return x.reshape(batch, bh // batch, n, d).transpose(0, 2, 1, 3)
