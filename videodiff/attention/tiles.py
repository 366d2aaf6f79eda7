"""From a pattern to lists of key tiles: the host-side compiler of sparse attention.

Owns: which key tiles a query tile visits, the window of a density, and the density that is really executed. Does not
own: which pattern a head follows, arithmetic on q, k, v. Plain numpy and exact integers.
Invariant: executed_density is counted in pairs of real tokens, whole tiles, padding excluded; nothing is masked later.

The pattern, in the order of the head (Sparse VideoGen, arXiv 2502.01776): keep(q, k) <=> |q - k| <= W or k < sink keys.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from fractions import Fraction

import jax
import numpy as np

from videodiff.grid import TokenGrid, TokenOrder

WINDOW_BLOCK = 128  # the published window is a multiple of this
QUERY_TILE = 1024  # tokens, about; the real ones divide the grid
KEY_TILE = 1024
SMALL_TILE = 512


class Sink(enum.Enum):
    """Keys that every query keeps, besides its window."""

    PREFIX = "prefix"  # the first P keys in the head's own order, as published
    NONE = "none"
    FIRST_FRAME = "first_frame"  # the P keys of frame 0; spread over all tiles of a token-major head


class TileClass(enum.IntEnum):
    """How a tile meets the pattern."""

    OUT = 0
    BOUNDARY = 1
    FULL = 2


@dataclass(frozen=True, eq=False)
class TilePlan:
    """The key tiles every query tile visits, in the order of the head.

    Args:
      tiles: [query tiles, longest list] int32 key-tile indices; the tile on the diagonal first, the rest ascending;
        entries after ``counts`` repeat the first and are never visited.
      counts: [query tiles] int32, at least 1.
      grid: the token grid.
      order: the token order in which tiles are neighbours.
      tile: tokens of a (query, key) tile; the last tile of an axis may be padded.
      window: W of the pattern before rounding to tiles; N - 1 for a full plan.
      sink: the keys every query keeps.
      requested_density: what was asked for: a density, or the exact density of a given window.
      exact_density: kept share of pairs of the pattern before rounding to tiles.
      executed_density: executed share of pairs.
    """

    tiles: np.ndarray
    counts: np.ndarray
    grid: TokenGrid
    order: TokenOrder
    tile: tuple[int, int]
    window: int
    sink: Sink
    requested_density: float
    exact_density: float
    executed_density: float

    @property
    def full(self) -> bool:
        """Every pair is executed."""
        return self.executed_density == 1.0

    def visited(self) -> np.ndarray:
        """[query tiles, key tiles] bool."""
        table = np.zeros((len(self.counts), -(-self.grid.tokens // self.tile[1])), bool)
        np.put_along_axis(table, np.asarray(self.tiles), True, axis=1)  # entries after the count repeat the first
        return table


jax.tree_util.register_dataclass(
    TilePlan,
    data_fields=["tiles", "counts"],
    meta_fields=[f.name for f in fields(TilePlan) if f.name not in ("tiles", "counts")],
)


def nominal_window(tokens: int, nominal: float, block: int = WINDOW_BLOCK) -> int:
    """The published window W = block * ceil(N * (1 - sqrt(1 - s)) / block), in exact arithmetic.

    Args:
      tokens: N.
      nominal: s in [0, 1], the published parameter: the density of the band alone, before rounding.
      block: W is a multiple of this.

    Raises:
      ValueError: s outside [0, 1].
    """
    if not 0 <= nominal <= 1:
        raise ValueError(f"a nominal density must be in [0, 1], got {nominal=}")
    left = (1 - Fraction(repr(float(nominal)))) * tokens**2  # (N sqrt(1 - s))^2
    steps = max(0, int(tokens * (1 - math.sqrt(1 - nominal)) / block) - 1)
    while steps * block < tokens and left < (tokens - steps * block) ** 2:
        steps += 1
    return steps * block


def exact_pairs(tokens: int, window: int, sink_keys: int = 0) -> int:
    """Pairs of the pattern: N(2W+1) - W(W+1) in the band, and what the sink adds outside it."""
    w = min(window, tokens - 1)
    k = np.arange(min(sink_keys, tokens), dtype=np.int64)
    outside = np.maximum(0, tokens - 1 - k - w) + np.maximum(0, k - w)
    return tokens * (2 * w + 1) - w * (w + 1) + int(outside.sum())


def sink_keys(grid: TokenGrid, sink: Sink) -> int:
    """Keys of the sink: P, or none."""
    return 0 if sink is Sink.NONE else grid.patches


def window_for_pairs(tokens: int, budget: int, sinks: int) -> int:
    """The largest W whose pattern has at most ``budget`` pairs; 0 if there is none."""
    low, high = 0, tokens - 1
    while low < high:
        middle = (low + high + 1) // 2
        if exact_pairs(tokens, middle, sinks) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _below(a: np.ndarray, b: np.ndarray, t: int) -> np.ndarray:
    """Number of pairs 0 <= q < a, 0 <= k < b with k - q <= t."""

    def total(n: np.ndarray) -> np.ndarray:  # sum of clip(x, 0, b) over x <= n
        n = np.maximum(n, 0)
        return np.where(n <= b, n * (n + 1) // 2, b * (b + 1) // 2 + (n - b) * b)

    return total(a + t) - total(np.full_like(a, t))


def kept_pairs(tokens: int, window: int, sinks: int, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of the pattern in each tile.

    Args:
      tokens: N.
      window: W.
      sinks: keys of the sink, the first ones.
      tile: tokens of a (query, key) tile.

    Returns:
      kept, area: [query tiles, key tiles] int64, the pairs kept and the pairs there are; padding counts as neither.
    """

    def edges(size: int) -> tuple[np.ndarray, np.ndarray]:
        start = np.arange(0, tokens, size, dtype=np.int64)
        return start, np.minimum(start + size, tokens)

    (q0, q1), (k0, k1) = edges(tile[0]), edges(tile[1])
    area = (q1 - q0)[:, None] * (k1 - k0)
    sink = (q1 - q0)[:, None] * (np.minimum(k1, max(sinks, 0)) - k0).clip(0)
    k0 = np.maximum(k0, np.minimum(k1, sinks))  # the band counts keys after the sink

    def corner(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        a, b = np.broadcast_arrays(q[:, None], k)
        return _below(a, b, window) - _below(a, b, -window - 1)

    return sink + corner(q1, k1) - corner(q0, k1) - corner(q1, k0) + corner(q0, k0), area


def classify(kept: np.ndarray, area: np.ndarray) -> np.ndarray:
    """[query tiles, key tiles] of :class:`TileClass` values."""
    return np.where(kept == area, TileClass.FULL, np.where(kept > 0, TileClass.BOUNDARY, TileClass.OUT))


def _diagonal(rows: int, tile: tuple[int, int], tokens: int) -> np.ndarray:
    """[query tiles] the key tile that holds the middle of each query tile."""
    start = np.arange(rows) * tile[0]
    return (start + np.minimum(start + tile[0], tokens) - 1) // 2 // tile[1]


def round_to_tiles(kept: np.ndarray, area: np.ndarray, diagonal: np.ndarray, *, up: bool) -> np.ndarray:
    """Round boundary tiles up or down so that executed pairs follow the exact pairs, query row by query row.

    Every row takes its full tiles, its tile on the diagonal, and the boundary tiles that are kept most, until the pairs
    executed so far reach the exact pairs so far: what one row rounds away, the next may use.

    Args:
      kept, area: of :func:`kept_pairs`.
      diagonal: [query tiles] a key tile that each row visits whatever is kept of it.
      up: the pairs so far are met to the nearest tile; otherwise they are never exceeded.

    Returns:
      [query tiles, key tiles] bool.
    """
    classes = classify(kept, area)
    visited = classes == TileClass.FULL
    visited[np.arange(len(visited)), diagonal] = True
    debt = 0
    for row, chosen in enumerate(visited):
        debt += int(kept[row].sum()) - int(area[row][chosen].sum())
        open_ = np.flatnonzero((classes[row] == TileClass.BOUNDARY) & ~chosen)
        side = np.sign(open_ - diagonal[row]) * (-1) ** row  # equals on both sides of the band take turns
        order = open_[np.lexsort((side, np.abs(open_ - diagonal[row]), -kept[row][open_] / area[row][open_]))]
        for tile in order:
            size = int(area[row, tile])
            if debt < (size / 2 if up else size):
                break
            chosen[tile] = True
            debt -= size
    return visited


def _lists(visited: np.ndarray, diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = visited.sum(1).astype(np.int32)
    tiles = np.repeat(diagonal[:, None], int(counts.max()), 1).astype(np.int32)
    for row, keys in enumerate(visited):
        rest = np.flatnonzero(keys)
        rest = rest[rest != diagonal[row]]
        tiles[row, 1 : 1 + len(rest)] = rest
    return tiles, counts


def _patches_per_tile(patches: int, frames: int, target: int) -> int:
    """Patches of a tile of about ``target`` tokens: near it, and with little padding in the last one."""
    wanted = max(1.0, target / frames)
    middle = patches / wanted
    best = min(
        range(max(1, math.floor(middle * 0.75)), max(1, math.ceil(middle * 1.34)) + 1),
        key=lambda n: -(-patches // n) * -(-patches // -(-patches // n)) / patches + 0.05 * abs(math.log(n / middle)),
    )
    return -(-patches // best)


def choose_tile(grid: TokenGrid) -> tuple[int, int]:
    """Tokens of a (query, key) tile, multiples of F so that both token orders share one shape.

    Large grids follow the band in about 32 key tiles. Small ones get tiles of SMALL_TILE tokens, below which a tile costs more
    to start than to compute, as long as that still makes 4 query tiles and 8 key tiles.
    """
    n = grid.tokens
    q = min(QUERY_TILE, max(n // 16, min(SMALL_TILE, n // 4)))
    k = min(KEY_TILE, max(n // 32, min(SMALL_TILE, n // 8)))
    per = [_patches_per_tile(grid.patches, grid.frames, target) for target in (q, k)]
    return grid.frames * per[0], grid.frames * per[1]


def _check(grid: TokenGrid, order: TokenOrder, sink: Sink, tile: tuple[int, int]) -> None:
    if min(tile) < 1:
        raise ValueError(f"a tile needs at least one token on each side, got {tile=}")
    if order is TokenOrder.TOKEN_MAJOR:
        if tile[0] % grid.frames or tile[1] % grid.frames:
            raise ValueError(
                f"a token-major tile takes whole patches over all frames: {tile=} must be multiples of {grid.frames=}"
            )
        if sink is Sink.FIRST_FRAME:
            raise NotImplementedError(
                "sink=first_frame touches every tile of a token-major head, so tiles cannot execute it; use prefix or none"
            )


def _plan(
    grid: TokenGrid, order: TokenOrder, sink: Sink, tile: tuple[int, int], window: int, requested: float, *, up: bool
) -> TilePlan:
    n = grid.tokens
    kept, area = kept_pairs(n, window, sink_keys(grid, sink), tile)
    diagonal = _diagonal(len(kept), tile, n)
    visited = round_to_tiles(kept, area, diagonal, up=up)
    tiles, counts = _lists(visited, diagonal)
    return TilePlan(
        tiles=tiles,
        counts=counts,
        grid=grid,
        order=order,
        tile=tile,
        window=window,
        sink=sink,
        requested_density=requested,
        exact_density=int(kept.sum()) / n**2,
        executed_density=int(area[visited].sum()) / n**2,
    )


def plan_window(
    grid: TokenGrid,
    window: int,
    *,
    sink: Sink = Sink.PREFIX,
    order: TokenOrder = TokenOrder.FRAME_MAJOR,
    tile: tuple[int, int] | None = None,
) -> TilePlan:
    """The plan of a given window: executed pairs as near the exact pairs as whole tiles allow.

    Args:
      grid: the token grid.
      window: W in tokens, at least 0; see :func:`nominal_window` for published settings.
      sink, order: of the pattern.
      tile: tokens of a (query, key) tile; by default :func:`choose_tile`.

    Raises:
      ValueError: a negative window or an impossible tile.
      NotImplementedError: a first-frame sink in token-major order.
    """
    if window < 0:
        raise ValueError(f"a window must be at least 0, got {window=}")
    tile = tile or choose_tile(grid)
    _check(grid, order, sink, tile)
    window = min(window, grid.tokens - 1)
    exact = exact_pairs(grid.tokens, window, sink_keys(grid, sink)) / grid.tokens**2
    return _plan(grid, order, sink, tile, window, exact, up=True)


def plan_tiles(
    grid: TokenGrid,
    density: float,
    *,
    sink: Sink = Sink.PREFIX,
    order: TokenOrder = TokenOrder.FRAME_MAJOR,
    tile: tuple[int, int] | None = None,
) -> TilePlan:
    """The plan of a density: the widest window whose executed density does not exceed it.

    Args:
      grid: the token grid.
      density: kept share of pairs in (0, 1], sink included; 1 gives the full plan.
      sink, order: of the pattern.
      tile: tokens of a (query, key) tile; by default :func:`choose_tile`.

    Raises:
      ValueError: a density outside (0, 1], one below what sink and diagonal execute by themselves, an impossible tile.
      NotImplementedError: a first-frame sink in token-major order.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1]: the kept share of pairs, sink included; got {density=}")
    tile = tile or choose_tile(grid)
    n = grid.tokens
    if density == 1:
        _check(grid, order, Sink.NONE, tile)
        return _plan(grid, order, sink, tile, n - 1, 1.0, up=False)
    _check(grid, order, sink, tile)
    sinks = sink_keys(grid, sink)
    fits, above = -1, window_for_pairs(n, math.floor(density * n**2), sinks) + 1
    plan = _plan(grid, order, sink, tile, above - 1, density, up=False)
    while plan.executed_density > density and above - fits > 1:  # only where the diagonal tiles outweigh the window
        middle = (fits + above) // 2
        trial = _plan(grid, order, sink, tile, middle, density, up=False)
        if trial.executed_density <= density:
            fits, plan = middle, trial
        else:
            above = middle
    if plan.executed_density > density:
        smallest = _plan(grid, order, sink, tile, 0, density, up=False).executed_density
        raise ValueError(
            f"{density=} is below {smallest:.4f}, which the {sink.value} sink and the diagonal tiles alone execute on "
            f"{grid.frames} x {grid.patches} tokens in tiles of {tile}; raise the density or use sink 'none'"
        )
    return plan
