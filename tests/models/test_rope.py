"""Rotary tables and rotation against the formula, token by token."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from videodiff.grid import TokenGrid
from videodiff.models.rope import axis_dims, rope_tables, rotate


@pytest.mark.parametrize(
    ("head_dim", "split"), [(128, (44, 42, 42)), (64, (24, 20, 20)), (32, (12, 10, 10)), (24, (8, 8, 8))]
)
def test_axis_split(head_dim: int, split: tuple[int, int, int]) -> None:
    assert axis_dims(head_dim) == split


@pytest.mark.parametrize(
    ("grid", "head_dim"), [(TokenGrid(3, 2, 5), 32), (TokenGrid(1, 7, 3), 128), (TokenGrid(4, 1, 2), 24)]
)
def test_tables_token_by_token(grid: TokenGrid, head_dim: int) -> None:
    cos, sin = rope_tables(grid, head_dim, 64)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (grid.tokens, head_dim // 2)
    side = 2 * (head_dim // 6)
    for token in range(grid.tokens):
        frame, rest = divmod(token, grid.rows * grid.cols)
        row, col = divmod(rest, grid.cols)
        angles = [
            position * 10000.0 ** (-2 * i / dim)
            for position, dim in ((frame, head_dim - 2 * side), (row, side), (col, side))
            for i in range(dim // 2)
        ]
        np.testing.assert_allclose(cos[token], [math.cos(a) for a in angles], rtol=0, atol=1e-7)
        np.testing.assert_allclose(sin[token], [math.sin(a) for a in angles], rtol=0, atol=1e-7)


def test_rotation_of_adjacent_pairs_is_a_complex_product() -> None:
    grid, d = TokenGrid(2, 3, 2), 24
    cos, sin = rope_tables(grid, d, 64)
    x = np.random.default_rng(0).standard_normal((2, grid.tokens, 3, d)).astype(np.float32)
    want = (x[..., 0::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)[None, :, None]
    got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    np.testing.assert_allclose(got[..., 0::2], want.real, atol=1e-6)
    np.testing.assert_allclose(got[..., 1::2], want.imag, atol=1e-6)
    low = rotate(jnp.asarray(x, jnp.bfloat16), cos, sin)
    assert low.dtype == jnp.bfloat16


def test_logits_depend_on_distance_only() -> None:
    grid, d = TokenGrid(5, 4, 6), 32
    cos, sin = rope_tables(grid, d, 64)
    r = np.random.default_rng(1)
    q, k = (np.broadcast_to(r.standard_normal(d), (1, grid.tokens, 1, d)).astype(np.float32) for _ in range(2))
    rotated = [np.asarray(rotate(jnp.asarray(a), cos, sin))[0, :, 0].reshape(5, 4, 6, d) for a in (q, k)]
    logit = lambda a, b: float(rotated[0][a] @ rotated[1][b])  # noqa: E731
    assert abs(logit((0, 0, 0), (2, 1, 3)) - logit((2, 2, 1), (4, 3, 4))) < 1e-4
    for other in ((2, 1, 4), (2, 2, 3), (3, 1, 3)):  # every axis matters
        assert abs(logit((0, 0, 0), (2, 1, 3)) - logit((0, 0, 0), other)) > 1e-3


@pytest.mark.parametrize("size", [(9, 1, 1), (1, 9, 1), (1, 1, 9)])
def test_grid_longer_than_the_limit_is_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="rope_max_seq_len=8"):
        rope_tables(TokenGrid(*size), 32, 8)
    assert rope_tables(TokenGrid(*(min(n, 8) for n in size)), 32, 8)[0].shape[0] == 8
