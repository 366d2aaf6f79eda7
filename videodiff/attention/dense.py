"""Dense softmax attention in XLA: the ``dense`` backend.

Owns: attention over all pairs with memory linear in N and float32 softmax statistics. Does not own: the patterns
of sparse heads, Pallas kernels. Invariant: the result does not depend on the tile sizes beyond rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from videodiff.attention.api import ROUTE_DENSE, Attend, AttentionSpec, HeadStats, register
from videodiff.attention.blocked import Tiling, attend_head, from_heads, operand_dtype, to_heads

PLAIN_TOKENS = 1280  # up to here one head's whole score matrix is no larger than one tile of the blocked form
PLAIN_BYTES = 32 * 2**20  # score matrices formed at once
QUERY_TILE = 1024
KEY_TILE = 1024


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention with the whole score matrix, for few tokens.

    Args:
      q: [B, Nq, H, D]; k, v: [B, Nk, H, D], any float dtype.

    Returns:
      [B, Nq, H, D] in q's dtype; products are summed and softmax is computed in float32.
    """
    scale = 1.0 / math.sqrt(q.shape[-1])
    dtype = operand_dtype(q.dtype)
    s = jnp.einsum("bqhd,bkhd->bhqk", q.astype(dtype), k.astype(dtype), preferred_element_type=jnp.float32)
    p = jax.nn.softmax(s * scale, axis=-1).astype(dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v.astype(dtype), preferred_element_type=jnp.float32).astype(q.dtype)


def _plain_in_chunks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Plain attention over as many batch entries at a time as PLAIN_BYTES of scores allow."""
    b, n, h, _ = q.shape
    chunk = max(1, min(b, PLAIN_BYTES // (4 * h * n * n)))
    if chunk >= b:
        return plain_attention(q, k, v)
    return lax.map(lambda x: plain_attention(*(y[None] for y in x))[0], (q, k, v), batch_size=chunk)


def _tile(tokens: int, target: int) -> int:
    """A tile near ``target`` that splits ``tokens`` evenly, so that tiles hardly overlap."""
    return -(-tokens // -(-tokens // target))


def _blocked_head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """One head, [N, D], over all key tiles, the one on the diagonal first."""
    n = q.shape[0]
    queries, keys = Tiling(1, n, _tile(n, QUERY_TILE)), Tiling(1, n, _tile(n, KEY_TILE))

    def tiles(i: jax.Array, position: jax.Array) -> jax.Array:
        return (i * queries.size // keys.size + position) % keys.count

    return attend_head(q, k, v, queries, keys, tiles, lambda _: keys.count)


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention over all pairs, memory linear in N.

    Args:
      q, k, v: [B, N, H, D], any float dtype.

    Returns:
      [B, N, H, D] in q's dtype.
    """
    b, n, _, _ = q.shape
    if n <= PLAIN_TOKENS:
        return _plain_in_chunks(q, k, v)
    o = lax.map(lambda x: _blocked_head(*x), (to_heads(q), to_heads(k), to_heads(v)))
    return from_heads(o, b)


def dense_stats(batch: int, heads: int) -> HeadStats:
    """The statistics of a dense call: every head dense, no error."""
    return HeadStats(jnp.full((batch, heads), ROUTE_DENSE, jnp.int32), jnp.zeros((batch, heads), jnp.float32))


@dataclass(frozen=True, eq=False)
class DenseAttend:
    """Attention over all pairs bound to one grid; an :class:`Attend`.

    Args:
      spec: what it was built from.
    """

    spec: AttentionSpec

    @property
    def executed_density(self) -> float:
        """1: every pair."""
        return 1.0

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, layer: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, HeadStats]:
        assert q.shape[1] == self.spec.grid.tokens, (q.shape, self.spec.grid)
        with jax.named_scope("attend_dense"):
            return dense_attention(q, k, v), dense_stats(q.shape[0], q.shape[2])


@register("dense")
def make_dense(spec: AttentionSpec) -> Attend:
    """Attention over all pairs; of ``spec`` only the grid matters, and that only to check sizes.

    Raises:
      ValueError: density below 1, which this backend would silently ignore.
    """
    if spec.density != 1.0:
        raise ValueError(f"the dense backend executes every pair, got density={spec.density}; use 1.0 or backend 'svg'")
    return DenseAttend(spec)
