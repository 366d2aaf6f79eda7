"""Three-axis rotary position embedding of Wan.

Owns: how a head dim is split over (frame, row, column), the tables, the rotation of adjacent pairs. Not: attention.
Invariant: tables are built in float64 on the host and stored float32; positions are integers from 0 on every axis.
Source: diffusers 0.42.1 ``WanRotaryPosEmbed``; RoPE is arXiv 2104.09864.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from videodiff.grid import TokenGrid

THETA = 10000.0


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head given to (frame, row, column): (44, 42, 42) for 128."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def rope_tables(grid: TokenGrid, head_dim: int, max_len: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for every token in frame-major order.

    Only the three tables of one axis each are constants of a traced program; they are spread over the grid on the
    device. Whole tables would put 155 MB into every compiled program at 1440p.

    Args:
      grid: the token grid.
      head_dim: D, even.
      max_len: rope_max_seq_len; no axis may be longer.

    Returns:
      cos, sin: [N, D/2] float32, pairs of the frame axis first, then rows, then columns.

    Raises:
      ValueError: an axis of the grid is longer than max_len.
    """
    shape = (grid.frames, grid.rows, grid.cols)
    if max(shape) > max_len:
        raise ValueError(
            f"rope_max_seq_len={max_len} limits every axis of the token grid, got frames={grid.frames}, "
            f"rows={grid.rows}, cols={grid.cols}; use a smaller size or fewer frames"
        )
    angles = [
        np.outer(np.arange(n, dtype=np.float64), THETA ** (-np.arange(0, dim, 2, dtype=np.float64) / dim))
        for n, dim in zip(shape, axis_dims(head_dim), strict=True)
    ]

    def spread(function: np.ufunc) -> jax.Array:
        parts = []
        for axis, angle in enumerate(angles):
            table = jnp.asarray(function(angle).astype(np.float32))  # [n, pairs of the axis]
            table = jnp.expand_dims(table, [a for a in range(3) if a != axis])  # one of F, Y, X is n, the others 1
            parts.append(jnp.broadcast_to(table, (*shape, table.shape[-1])))
        return jnp.concatenate(parts, axis=-1).reshape(grid.tokens, head_dim // 2)

    return spread(np.cos), spread(np.sin)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate adjacent channel pairs (2i, 2i+1).

    Args:
      x: [B, N, H, D].
      cos, sin: [N, D/2] float32.

    Returns:
      [B, N, H, D] in x's dtype; the products are float32.
    """
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return jnp.stack([even * c - odd * s, even * s + odd * c], axis=-1).reshape(x.shape).astype(x.dtype)
