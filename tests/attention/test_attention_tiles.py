"""The tile compiler against published numbers and against masks counted pair by pair."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from videodiff.attention.patterns import pattern_mask, plan_mask, to_frame_major
from videodiff.attention.tiles import (
    Sink,
    TileClass,
    TilePlan,
    choose_tile,
    classify,
    exact_pairs,
    kept_pairs,
    nominal_window,
    plan_tiles,
    plan_window,
    window_for_pairs,
)
from videodiff.grid import TokenGrid, TokenOrder

ORDERS = tuple(TokenOrder)

NOMINAL = (0.20, 0.25, 0.30, 0.39, 0.50)
# P -> window and kept share at each nominal density, 21 latent frames
PUBLISHED = {
    1560: ((3584, 4480, 5376, 7296, 9600), (0.248137, 0.294802, 0.339971, 0.431724, 0.532760)),
    3600: ((8064, 10240, 12416, 16640, 22144), (0.243373, 0.292599, 0.340169, 0.427779, 0.532570)),
    8160: ((18176, 23040, 28032, 37632, 50304), (0.242327, 0.290917, 0.339111, 0.427020, 0.533449)),
    14400: ((32000, 40576, 49408, 66304, 88576), (0.241891, 0.290454, 0.338785, 0.426491, 0.532563)),
}


@pytest.mark.parametrize("patches", PUBLISHED)
def test_published_windows_and_kept_shares(patches: int) -> None:
    n = 21 * patches
    for nominal, window, kept in zip(NOMINAL, *PUBLISHED[patches], strict=True):
        assert nominal_window(n, nominal) == window
        assert round(exact_pairs(n, window, patches) / n**2, 6) == kept


def test_published_exact_pairs() -> None:
    assert exact_pairs(75600, 10240, 3600) == 1672309960
    assert round(exact_pairs(18000, nominal_window(18000, 0.20), 3600) / 18000**2, 3) == 0.365


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("frames", "patches", "window", "pairs"), [(3, 4, 2, 85), (3, 4, 4, 110), (4, 6, 6, 357), (5, 8, 10, 934)]
)
def test_published_small_vectors(frames: int, patches: int, window: int, pairs: int, order: TokenOrder) -> None:
    grid = TokenGrid(frames, 1, patches)
    assert exact_pairs(grid.tokens, window, patches) == pairs
    assert pattern_mask(grid, window, Sink.PREFIX, order).sum() == pairs
    kept, _ = kept_pairs(grid.tokens, window, patches, (frames, 2 * frames))
    assert kept.sum() == pairs


@pytest.mark.parametrize(
    ("tile", "nominal", "touched", "total"),
    [
        (128, 0.25, 103055, 349281),
        (128, 0.30, 119630, 349281),
        (512, 0.25, 6636, 21904),
        (512, 0.30, 7846, 21904),
        (1024, 0.25, 1690, 5476),
        (1024, 0.30, 2050, 5476),
    ],
)
def test_published_tile_counts(tile: int, nominal: float, touched: int, total: int) -> None:
    n = 75600
    kept, area = kept_pairs(n, nominal_window(n, nominal), 3600, (tile, tile))
    assert kept.size == total
    assert (classify(kept, area) != TileClass.OUT).sum() == touched
    assert area.sum() == n**2


@given(st.integers(1, 400000), st.floats(0, 1))
def test_nominal_window_rounds_up_to_the_block(tokens: int, nominal: float) -> None:
    window = nominal_window(tokens, nominal)
    exact = tokens * (1 - math.sqrt(1 - nominal))
    assert window % 128 == 0
    assert -1e-6 * tokens <= window - exact < 128 + 1e-6 * tokens


grids = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9)).map(lambda s: TokenGrid(*s))


@given(grids, st.integers(0, 300), st.sampled_from([Sink.PREFIX, Sink.NONE]), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_kept_pairs_by_brute_force(grid: TokenGrid, window: int, sink: Sink, tq: int, tk: int) -> None:
    n = grid.tokens
    sinks = grid.patches if sink is Sink.PREFIX else 0
    mask = pattern_mask(grid, window, sink, TokenOrder.FRAME_MAJOR)
    assert mask.sum() == exact_pairs(n, window, sinks)
    rows, cols = -(-n // tq), -(-n // tk)

    def by_tile(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x.astype(np.int64), ((0, rows * tq - n), (0, cols * tk - n)))
        return padded.reshape(rows, tq, cols, tk).sum((1, 3))

    kept, area = kept_pairs(n, window, sinks, (tq, tk))
    np.testing.assert_array_equal(kept, by_tile(mask))
    np.testing.assert_array_equal(area, by_tile(np.ones_like(mask)))
    classes = classify(kept, area)
    np.testing.assert_array_equal(classes == TileClass.FULL, by_tile(~mask) == 0)
    np.testing.assert_array_equal(classes == TileClass.OUT, by_tile(mask) == 0)


def check_lists(plan: TilePlan) -> None:
    """Every list: distinct tiles, the diagonal first, the rest ascending; density counted from the expanded mask."""
    n = plan.grid.tokens
    for row in range(len(plan.counts)):
        tiles = plan.tiles[row, : plan.counts[row]]
        middle = (row * plan.tile[0] + min(n, (row + 1) * plan.tile[0]) - 1) // 2
        assert tiles[0] == middle // plan.tile[1]
        assert (np.diff(tiles[1:]) > 0).all()
        assert tiles[0] not in tiles[1:]
        assert (plan.tiles[row] < -(-n // plan.tile[1])).all()
    mask = plan_mask(plan)
    assert mask.shape == (n, n)
    assert mask.sum() == round(plan.executed_density * n**2)


tiles_in_patches = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(grids, st.integers(0, 300), st.sampled_from([Sink.PREFIX, Sink.NONE]), tiles_in_patches, st.sampled_from(ORDERS))
@settings(max_examples=80, deadline=None)
def test_window_plans_follow_the_mask(
    grid: TokenGrid, window: int, sink: Sink, in_patches: tuple[int, int], order: TokenOrder
) -> None:
    tile = (in_patches[0] * grid.frames, in_patches[1] * grid.frames)
    plan = plan_window(grid, window, sink=sink, order=order, tile=tile)
    check_lists(plan)
    mask = pattern_mask(grid, window, sink, order)
    executed = plan_mask(plan)
    n, largest = grid.tokens, tile[0] * tile[1]
    # every full tile is executed, no tile outside the pattern is (but the diagonal, which is inside for any W >= 0)
    kept, area = kept_pairs(n, window, grid.patches if sink is Sink.PREFIX else 0, tile)
    classes = classify(kept, area)
    visited = plan.visited()
    assert visited[classes == TileClass.FULL].all()
    assert not visited[classes == TileClass.OUT].any()
    # rounding is paid back row by row: after every row the pairs executed so far are right to half a tile, but for
    # rows whose full tiles and diagonal are more than the pattern has
    drift = np.cumsum((area * visited).sum(1) - kept.sum(1))
    must = classes == TileClass.FULL
    must[np.arange(len(must)), plan.tiles[:, 0]] = True
    forced = np.cumsum(np.maximum(0, (area * must).sum(1) - kept.sum(1)))
    assert (drift <= largest / 2 + forced).all()
    assert (drift >= -largest / 2).all()
    assert mask.sum() == kept.sum() == round(plan.exact_density * n**2)
    assert abs(int(executed.sum()) - int(mask.sum())) <= largest / 2 + forced[-1]


@given(grids, st.floats(0.05, 1.0), st.sampled_from([Sink.PREFIX, Sink.NONE]), st.sampled_from(ORDERS))
@settings(max_examples=100, deadline=None)
def test_density_plans_never_exceed_the_request(grid: TokenGrid, density: float, sink: Sink, order: TokenOrder) -> None:
    tile = (3 * grid.frames, 2 * grid.frames)
    kept, area = kept_pairs(grid.tokens, 0, grid.patches if sink is Sink.PREFIX else 0, tile)
    must = kept == area
    must[np.arange(len(must)), plan_tiles(grid, 1.0, order=order, tile=tile).tiles[:, 0]] = True
    if area[must].sum() > density * grid.tokens**2:
        with pytest.raises(ValueError, match="alone execute"):
            plan_tiles(grid, density, sink=sink, order=order, tile=tile)
        return
    plan = plan_tiles(grid, density, sink=sink, order=order, tile=tile)
    check_lists(plan)
    assert plan.executed_density <= density == plan.requested_density
    if plan.exact_density > density - 1 / grid.tokens**2 - 2 / grid.tokens:  # the window was not cut for the diagonal
        assert density - plan.executed_density < (tile[0] * tile[1] + 2 * grid.tokens) / grid.tokens**2


@pytest.mark.parametrize("sink", [Sink.PREFIX, Sink.NONE])
@pytest.mark.parametrize("density", [0.24, 0.29, 0.39, 0.52])
@pytest.mark.parametrize("shape", [(21, 30, 52), (21, 45, 80), (5, 45, 80)])
def test_density_at_real_sizes(shape: tuple[int, int, int], density: float, sink: Sink) -> None:
    grid = TokenGrid(*shape)
    spatial, temporal = (plan_tiles(grid, density, sink=sink, order=order) for order in ORDERS)
    assert 0 <= density - spatial.executed_density < spatial.tile[0] * spatial.tile[1] / grid.tokens**2 + 1e-3
    # both kinds of heads cost the same
    assert spatial.executed_density == temporal.executed_density
    np.testing.assert_array_equal(spatial.counts, temporal.counts)
    # balanced: no query row is more than a tile and a half from its own exact pairs
    kept, area = kept_pairs(grid.tokens, spatial.window, grid.patches if sink is Sink.PREFIX else 0, spatial.tile)
    rows = (area * spatial.visited()).sum(1) - kept.sum(1)
    assert np.abs(rows).max() <= 1.5 * spatial.tile[0] * spatial.tile[1]


def test_rows_are_balanced_at_720p() -> None:
    """A global sort of boundary tiles would favour early rows; inner rows of equal pairs must have equal lists."""
    grid = TokenGrid(21, 45, 80)
    plan = plan_window(grid, 10240, tile=(1008, 1008))
    inner = plan.counts[15:60]
    assert inner.max() - inner.min() <= 1
    assert abs(inner[:20].mean() - inner[-20:].mean()) <= 0.2


def test_window_for_pairs_is_the_largest() -> None:
    for n, sinks in ((97, 0), (97, 20), (1000, 333)):
        for budget in range(exact_pairs(n, 0, sinks), n * n, n * n // 37):
            window = window_for_pairs(n, budget, sinks)
            assert exact_pairs(n, window, sinks) <= budget
            assert window == n - 1 or exact_pairs(n, window + 1, sinks) > budget


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 5), (4, 1, 1), (5, 8, 8)])
def test_density_one_is_every_pair(shape: tuple[int, int, int], order: TokenOrder) -> None:
    for sink in Sink:
        plan = plan_tiles(TokenGrid(*shape), 1.0, sink=sink, order=order)
        assert plan.full
        assert plan.executed_density == plan.exact_density == 1.0
        assert plan.visited().all()


@given(st.tuples(st.integers(1, 30), st.integers(1, 90), st.integers(1, 160)).map(lambda s: TokenGrid(*s)))
def test_chosen_tiles_fit_both_orders(grid: TokenGrid) -> None:
    for tile in choose_tile(grid):
        assert tile % grid.frames == 0
        padded = -(-grid.tokens // tile) * tile
        assert padded - grid.tokens <= tile // 2 or tile == grid.frames or padded < 1.2 * grid.tokens


def test_first_frame_sink() -> None:
    grid = TokenGrid(4, 3, 5)
    plan = plan_tiles(grid, 0.7, sink=Sink.FIRST_FRAME, tile=(12, 4))
    np.testing.assert_array_equal(
        plan.visited(), plan_tiles(grid, 0.7, sink=Sink.PREFIX, tile=(12, 4)).visited()
    )  # frame-major: the first frame is the prefix
    with pytest.raises(NotImplementedError, match=r"first_frame.*use prefix or none"):
        plan_tiles(grid, 0.7, sink=Sink.FIRST_FRAME, order=TokenOrder.TOKEN_MAJOR, tile=(12, 4))
    reference = pattern_mask(grid, 2, Sink.FIRST_FRAME, TokenOrder.TOKEN_MAJOR)
    assert reference[:, : grid.patches].all()
    band = to_frame_major(np.abs(np.subtract.outer(np.arange(60), np.arange(60))) <= 2, grid, TokenOrder.TOKEN_MAJOR)
    np.testing.assert_array_equal(reference[:, grid.patches :], band[:, grid.patches :])


def test_temporal_sink_is_the_top_of_all_frames() -> None:
    """The published prefix sink of a temporal head is P/F patches of every frame, not frame 0."""
    grid = TokenGrid(4, 2, 4)
    sink = pattern_mask(grid, 0, Sink.PREFIX, TokenOrder.TOKEN_MAJOR)[-1].reshape(4, 8)
    np.testing.assert_array_equal(sink[:, :2], True)
    np.testing.assert_array_equal(sink[:, 2:], np.eye(32, dtype=bool)[-1].reshape(4, 8)[:, 2:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: plan_tiles(g, 0.0), "density must be in"),
        (lambda g: plan_tiles(g, 1.5), "density must be in"),
        (lambda g: plan_tiles(g, float("nan")), "density must be in"),
        (lambda g: plan_tiles(g, 0.05), "the prefix sink and the diagonal tiles alone execute"),
        (lambda g: plan_tiles(g, 0.5, tile=(0, 4)), "at least one token"),
        (lambda g: plan_tiles(g, 0.5, order=TokenOrder.TOKEN_MAJOR, tile=(7, 5)), "multiples of grid.frames=5"),
        (lambda g: plan_window(g, -1), "at least 0"),
        (lambda g: nominal_window(g.tokens, 1.2), "must be in"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(TokenGrid(5, 8, 8))


def test_plan_is_a_pytree() -> None:
    plan = plan_tiles(TokenGrid(5, 8, 8), 0.5, sink=Sink.NONE)
    leaves, structure = jax.tree.flatten(plan)
    assert len(leaves) == 2
    again = jax.tree.unflatten(structure, leaves)
    assert again.executed_density == plan.executed_density
    assert again.order is plan.order
    np.testing.assert_array_equal(jax.jit(lambda p: p.tiles + 0)(plan), plan.tiles)
