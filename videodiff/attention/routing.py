"""Which pattern a head follows, found by computing a few query rows both ways.

Owns: the rows that are drawn, the errors, the choice. Does not own: the plans (`tiles`), the execution (`svg`).
Invariant: the probe judges the tiles that would be executed, and a batch entry's route depends on no other entry.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from videodiff.attention.api import ROUTE_SPATIAL, ROUTE_TEMPORAL, HeadStats
from videodiff.attention.blocked import operand_dtype
from videodiff.attention.tiles import TilePlan
from videodiff.grid import TokenOrder

PUBLISHED_ROWS = 10000  # of the public Sparse VideoGen code
PUBLISHED_FRAMES = 2


def probe_rows(tokens: int, rows: int, seed: int, layer: jax.Array | int, step: jax.Array | int) -> jax.Array:
    """Query rows of a probe: one drawn from each of ``rows`` equal stretches of the sequence.

    Args:
      tokens: N.
      rows: how many; at most N are drawn.
      seed: of the request's routing.
      layer, step: int32 scalars, may be traced; each pair draws its own rows.

    Returns:
      [min(rows, N)] int32, ascending, in [0, N).
    """
    rows = min(rows, tokens)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), layer), step)
    edges = np.arange(rows + 1, dtype=np.int64) * tokens // rows
    start, length = edges[:-1].astype(np.int32), np.diff(edges).astype(np.int32)
    drawn = (jax.random.uniform(key, (rows,)) * length).astype(jnp.int32)
    return jnp.asarray(start) + jnp.minimum(drawn, length - 1)


def published_rows(tokens: int, rows: int, seed: int, layer: jax.Array | int, step: jax.Array | int) -> jax.Array:
    """Query rows as published: anywhere among the first 10000 tokens, which may be less than one frame."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), layer), step)
    return jax.random.randint(key, (min(rows, tokens),), 0, min(PUBLISHED_ROWS, tokens), jnp.int32)


def _position(plan: TilePlan, index: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Where a frame-major token stands in the order of the plan."""
    if plan.order is TokenOrder.FRAME_MAJOR:
        return index
    return index % plan.grid.patches * plan.grid.frames + index // plan.grid.patches


def visited_keys(plan: TilePlan, rows: jax.Array) -> jax.Array:
    """[R, N] bool: the frame-major keys that the plan's tiles give to frame-major query rows."""
    key_tile = _position(plan, np.arange(plan.grid.tokens)) // plan.tile[1]
    return jnp.asarray(plan.visited())[_position(plan, rows) // plan.tile[0]][:, key_tile]


def published_keys(plan: TilePlan, rows: jax.Array) -> jax.Array:
    """[R, N] bool: keys within two frames' worth of tokens, the fixed probe that is published; no tiles, no sink."""
    distance = _position(plan, rows)[:, None] - _position(plan, np.arange(plan.grid.tokens))
    return jnp.abs(distance) <= PUBLISHED_FRAMES * plan.grid.patches


def _probe_head(
    q: jax.Array, k: jax.Array, v: jax.Array, keys: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """One head. q: [R, D]; k, v: [N, D]; keys: [R, N] bool per pattern -> mean squared errors [2], energy of dense []."""
    dtype = operand_dtype(q.dtype)
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    s = jnp.dot(q, k.T, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])  # [R, N]

    def output(scores: jax.Array) -> jax.Array:
        p = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
        o = jnp.dot(p.astype(dtype), v, preferred_element_type=jnp.float32)
        return o / jnp.sum(p, axis=1, keepdims=True)

    dense = output(s)
    errors = [jnp.mean((output(jnp.where(kept, s, -jnp.inf)) - dense) ** 2) for kept in keys]
    return jnp.stack(errors), jnp.mean(dense**2)


def route_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, spatial: jax.Array, temporal: jax.Array
) -> HeadStats:
    """Choose the pattern with the smaller mean squared error on the drawn rows; spatial if they tie.

    Scores exist for one head at a time: [R, N].

    Args:
      q, k, v: [B, H, N, D], frame-major.
      rows: [R] int32 frame-major query rows.
      spatial, temporal: [R, N] bool, the frame-major keys each pattern gives those rows, at least one per row.

    Returns:
      Route and relative error, [B, H] each.
    """
    b, h, n, d = q.shape

    def head(x: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _probe_head(*x, (spatial, temporal))

    errors, energy = lax.map(
        head, (q[:, :, rows].reshape(b * h, -1, d), k.reshape(b * h, n, d), v.reshape(b * h, n, d))
    )
    route = jnp.where(errors[:, 1] < errors[:, 0], ROUTE_TEMPORAL, ROUTE_SPATIAL).astype(jnp.int32)
    chosen = jnp.min(errors, axis=1)
    relative = jnp.where(chosen > 0, chosen / jnp.maximum(energy, jnp.finfo(jnp.float32).tiny), 0.0)
    return HeadStats(route.reshape(b, h), relative.reshape(b, h))
