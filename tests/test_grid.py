"""Token orders and pixel arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from videodiff.grid import LatentLayout, TokenGrid, VideoGeometry

WAN = LatentLayout(spatial_factor=8, temporal_factor=4, patch=(1, 2, 2), latent_channels=16)
SMALL = LatentLayout(spatial_factor=16, temporal_factor=4, patch=(1, 2, 2), latent_channels=16)


def test_published_permutation() -> None:
    grid = TokenGrid(3, 2, 2)
    assert grid.token_major_gather().tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert grid.frame_major_gather().tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_orders_are_inverse(frames: int, rows: int, cols: int) -> None:
    grid = TokenGrid(frames, rows, cols)
    x = np.arange(grid.tokens)
    there = x[grid.token_major_gather()]
    np.testing.assert_array_equal(there[grid.frame_major_gather()], x)
    # token j of the token-major order is patch j // F of frame j % F
    np.testing.assert_array_equal(there, x.reshape(frames, -1).T.ravel())


@pytest.mark.parametrize(
    ("layout", "height", "width", "frames", "grid"),
    [
        (WAN, 480, 832, 81, (21, 30, 52)),
        (WAN, 720, 1280, 81, (21, 45, 80)),
        (WAN, 1080, 1920, 81, (21, 68, 120)),  # computed at 1088 rows
        (WAN, 1440, 2560, 81, (21, 90, 160)),
        (SMALL, 1440, 2560, 17, (5, 45, 80)),
        (SMALL, 256, 256, 1, (1, 8, 8)),
    ],
)
def test_geometry(layout: LatentLayout, height: int, width: int, frames: int, grid: tuple[int, int, int]) -> None:
    geometry = VideoGeometry(height, width, frames, layout)
    assert geometry.token_grid == TokenGrid(*grid)
    assert geometry.token_grid.tokens == grid[0] * grid[1] * grid[2]
    assert geometry.computed_height >= height
    assert geometry.computed_height - height < layout.size_multiple_px


@pytest.mark.parametrize(("frames", "near"), [(16, "13 and 17"), (2, "1 and 5"), (0, "1")])
def test_illegal_frame_counts_name_the_nearest(frames: int, near: str) -> None:
    with pytest.raises(ValueError, match=rf"num_frames={frames} must be 4k\+1.*{near}"):
        VideoGeometry(480, 832, frames, WAN)


def test_illegal_sizes() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        VideoGeometry(0, 832, 81, WAN)
    with pytest.raises(ValueError, match="at least 1"):
        TokenGrid(0, 1, 1)
