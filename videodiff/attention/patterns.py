"""Patterns and plans as masks, and attention under a mask: what every backend is tested against.

Owns: the reference meaning of a pattern, in plain numpy and jnp, quadratic in N. Does not own: anything a backend
imports; the product never builds a mask over all pairs. Invariant: a mask is [N, N] bool, frame-major, True is kept.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from videodiff.attention.tiles import Sink, TilePlan, sink_keys
from videodiff.grid import TokenGrid, TokenOrder


def to_frame_major(mask: np.ndarray, grid: TokenGrid, order: TokenOrder) -> np.ndarray:
    """A mask in the order of the head, with both axes brought to frame-major order."""
    if order is TokenOrder.FRAME_MAJOR:
        return mask
    gather = grid.frame_major_gather()
    return mask[np.ix_(gather, gather)]


def pattern_mask(grid: TokenGrid, window: int, sink: Sink, order: TokenOrder) -> np.ndarray:
    """keep(q, k) <=> |q - k| <= W or k in the sink, positions in the order of the head.

    Args:
      grid: the token grid.
      window: W in tokens.
      sink: any of :class:`Sink`; the first frame exists here for both orders.
      order: order of the head; token-major is the temporal head.

    Returns:
      [N, N] bool, frame-major.
    """
    position = np.arange(grid.tokens)
    mask = np.abs(position[:, None] - position) <= window
    if sink is not Sink.FIRST_FRAME:
        mask |= position < sink_keys(grid, sink)
    mask = to_frame_major(mask, grid, order)
    if sink is Sink.FIRST_FRAME:
        mask |= position < grid.patches
    return mask


def plan_mask(plan: TilePlan) -> np.ndarray:
    """What a plan executes: [N, N] bool, frame-major."""
    n = plan.grid.tokens
    mask = np.repeat(np.repeat(plan.visited(), plan.tile[0], 0), plan.tile[1], 1)[:n, :n]
    return to_frame_major(mask, plan.grid, plan.order)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: np.ndarray) -> jax.Array:
    """Softmax attention over kept pairs, float32.

    Args:
      q, k, v: [B, N, H, D].
      mask: broadcastable to [B, H, N, N] bool; every query keeps at least one key.

    Returns:
      [B, N, H, D] float32.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / math.sqrt(q.shape[-1])
    p = jax.nn.softmax(jnp.where(mask, s, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v, precision="highest")
