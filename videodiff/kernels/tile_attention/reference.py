"""Plain jnp: what the kernels of this folder compute."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from videodiff.kernels.tile_attention.work import Work


def token_mask(work: Work, temporal: bool) -> jax.Array:
    """[N, N] bool: the keys that the tiles give to each query, both frame-major."""
    index = jnp.arange(work.tokens)
    order = index % work.patches * work.frames + index // work.patches if temporal else index
    queries, keys = (order // (work.frames * wide) for wide in (work.query_patches, work.key_patches))
    return jnp.asarray(work.visited())[queries][:, keys]


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, temporal: jax.Array, work: Work, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """Softmax attention over visited keys.

    Args:
      q, k, v: [H, N, D], frame-major.
      temporal: [H] bool, the heads that follow token-major order.
      work: the tiles to visit.
      dtype: of the arithmetic.

    Returns:
      [H, N, D] in ``dtype``.
    """
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    scores = jnp.einsum("hqd,hkd->hqk", q, k, precision="highest") / math.sqrt(q.shape[-1])
    mask = jnp.where(temporal[:, None, None], token_mask(work, True), token_mask(work, False))
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v, precision="highest")
