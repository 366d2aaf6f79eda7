"""Sparse attention against attention under the expanded mask, and routing of heads whose pattern is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import attention_f64, normal, relative

from videodiff.attention import AttentionSpec, make_attend, svg
from videodiff.attention.api import ROUTE_DENSE, ROUTE_SPATIAL, ROUTE_TEMPORAL
from videodiff.attention.patterns import masked_attention, pattern_mask, plan_mask
from videodiff.attention.routing import probe_rows, published_keys, published_rows, route_heads, visited_keys
from videodiff.attention.tiles import Sink, TilePlan, plan_tiles
from videodiff.grid import TokenGrid, TokenOrder


def plans(
    grid: TokenGrid, density: float, tile: tuple[int, int] | None = None, sink: Sink = Sink.NONE
) -> tuple[TilePlan, TilePlan]:
    spatial, temporal = (plan_tiles(grid, density, sink=sink, order=order, tile=tile) for order in TokenOrder)
    return spatial, temporal


def heads_first(*x) -> list[jax.Array]:
    """[B, N, H, D] -> [B, H, N, D]."""
    return [jnp.asarray(y).transpose(0, 2, 1, 3) for y in x]


def routed_mask(route, spatial: TilePlan, temporal: TilePlan) -> np.ndarray:
    """[B, H, N, N] bool."""
    return np.where((np.asarray(route) == ROUTE_TEMPORAL)[..., None, None], plan_mask(temporal), plan_mask(spatial))


ROUTE = np.array([[0, 1, 1], [1, 0, 1]], np.int32)  # every entry its own mix


@pytest.mark.parametrize(
    ("shape", "density", "sink", "per_tile"),
    [
        ((3, 4, 5), 0.6, Sink.PREFIX, (4, 3)),  # neither divides P = 20
        ((5, 3, 7), 0.5, Sink.NONE, (3, 7)),
        ((1, 9, 11), 0.5, Sink.NONE, (16, 8)),  # one frame
        ((7, 1, 13), 0.4, Sink.NONE, (2, 1)),  # one row
    ],
)
def test_equals_masked_attention(
    shape: tuple[int, int, int], density: float, sink: Sink, per_tile: tuple[int, int]
) -> None:
    grid = TokenGrid(*shape)
    spatial, temporal = plans(grid, density, (per_tile[0] * grid.frames, per_tile[1] * grid.frames), sink)
    assert spatial.executed_density < 0.9
    q, k, v = normal(0, 2, grid.tokens, 3, 8)
    (o,) = heads_first(jax.jit(svg.routed_attention)(*heads_first(q, k, v), ROUTE, spatial))
    mask = routed_mask(ROUTE, spatial, temporal)
    assert relative(o, attention_f64(q, k, v, mask)) <= 1e-6
    assert relative(masked_attention(q, k, v, mask), attention_f64(q, k, v, mask)) <= 1e-6  # the jnp reference too


def test_adversarial_logits_and_bf16() -> None:
    """Whatever lies outside the visited tiles must not matter, however large; inside, it must."""
    grid = TokenGrid(3, 4, 8)
    spatial, temporal = plans(grid, 0.5, (12, 12))
    route = np.array([[0, 1]], np.int32)
    f = jax.jit(svg.routed_attention)
    q, k, v = normal(1, 1, grid.tokens, 2, 8)
    mask = routed_mask(route, spatial, temporal)
    q[..., 0] = np.sqrt(8, dtype=np.float32) * 100
    q[..., 1:] = 0
    for value in (100.0, -100.0):
        k[..., 0] = 0
        k[:, ::17, :, 0] = value
        (o,) = heads_first(f(*heads_first(q, k, v), route, spatial))
        assert np.isfinite(o).all()
        assert relative(o, attention_f64(q, k, v, mask)) <= 1e-5
    half = [jnp.asarray(x, jnp.bfloat16) for x in normal(2, 1, grid.tokens, 2, 8)]
    (o,) = heads_first(f(*heads_first(*half), route, spatial))
    assert o.dtype == jnp.bfloat16
    exact = attention_f64(*(x.astype(jnp.float32) for x in half), mask)
    assert relative(o.astype(jnp.float32), exact) <= 2.0**-8


def test_density_one_is_the_dense_program() -> None:
    grid = TokenGrid(3, 5, 6)
    q, k, v = normal(0, 2, grid.tokens, 2, 8)
    step = {"layer": jnp.int32(0), "step": jnp.int32(0)}
    dense, stats = jax.jit(make_attend("dense", AttentionSpec(grid)))(q, k, v, **step)
    attend = make_attend("svg", AttentionSpec(grid, density=1.0))
    sparse, sparse_stats = jax.jit(attend)(q, k, v, **step)
    np.testing.assert_array_equal(dense, sparse)
    jax.tree.map(np.testing.assert_array_equal, stats, sparse_stats)
    assert (stats.route == ROUTE_DENSE).all()
    assert attend.executed_density == 1.0
    # and a full plan run tile by tile is dense too
    full, _ = plans(grid, 1.0, (9, 6))
    (o,) = heads_first(jax.jit(svg.routed_attention)(*heads_first(q, k, v), ROUTE[:, :2], full))
    assert relative(o, dense) <= 1e-6


def planted(kinds: list[list[int]], grid: TokenGrid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads whose weight falls off with the distance in one token order: exp(-(x_q - x_k)^2 / 2 w^2), w = 3 tokens."""
    batch, heads = np.shape(kinds)
    frame_major = np.arange(grid.tokens)
    token_major = grid.frame_major_gather()  # where token i of the frame-major order stands in the other
    q, k, v = (np.zeros((batch, grid.tokens, heads, 4), np.float32) for _ in range(3))
    v[:] = np.random.default_rng(0).standard_normal(v.shape)
    for b in range(batch):
        for h in range(heads):
            x = (token_major if kinds[b][h] == ROUTE_TEMPORAL else frame_major) - grid.tokens / 2
            q[b, :, h, 0], q[b, :, h, 1] = x, 1
            k[b, :, h, 0], k[b, :, h, 1] = (
                2 * x / 9,
                -(x**2) / 9,
            )  # times 1/sqrt(4): -(x_q - x_k)^2 / 18 + a row constant
    return q, k, v


def test_planted_heads_are_routed_right() -> None:
    grid = TokenGrid(5, 12, 16)
    kinds = [[0, 1, 1, 0], [1, 1, 0, 0]]
    attend = make_attend("svg", AttentionSpec(grid, density=0.4, sink="none"))
    assert attend.executed_density <= 0.4
    q, k, v = planted(kinds, grid)
    f = jax.jit(attend)
    o, stats = f(q, k, v, layer=jnp.int32(2), step=jnp.int32(1))
    np.testing.assert_array_equal(stats.route, kinds)
    assert stats.error.shape == (2, 4)
    assert (stats.error < 0.02).all()
    assert (
        relative(o, attention_f64(q, k, v)) < 0.15
    )  # the pattern holds what matters: close to dense without all pairs
    # a batch entry alone gives what it gave in the batch
    alone, alone_stats = f(q[1:], k[1:], v[1:], layer=jnp.int32(2), step=jnp.int32(1))
    np.testing.assert_array_equal(alone, o[1:])
    np.testing.assert_array_equal(alone_stats.error, stats.error[1:])


def test_error_is_that_of_the_executed_pattern() -> None:
    """Both errors recomputed from expanded masks in float64, on the rows that were drawn."""
    grid = TokenGrid(4, 5, 6)
    spatial, temporal = plans(grid, 0.5, (16, 8), Sink.PREFIX)
    q, k, v = normal(7, 2, grid.tokens, 3, 8)
    rows = probe_rows(grid.tokens, 16, seed=3, layer=1, step=2)
    for plan in (spatial, temporal):
        np.testing.assert_array_equal(visited_keys(plan, rows), plan_mask(plan)[rows])
    keys = [visited_keys(plan, rows) for plan in (spatial, temporal)]
    stats = jax.jit(route_heads)(*heads_first(q, k, v), rows, *keys)
    dense = attention_f64(q, k, v)[:, rows]
    errors = [((attention_f64(q, k, v, plan_mask(p))[:, rows] - dense) ** 2).mean((1, 3)) for p in (spatial, temporal)]
    np.testing.assert_array_equal(stats.route, np.argmin(errors, axis=0))
    assert relative(stats.error, np.min(errors, axis=0) / (dense**2).mean((1, 3))) <= 1e-5
    assert {ROUTE_SPATIAL, ROUTE_TEMPORAL} == set(np.asarray(stats.route).ravel().tolist())


def test_ties_are_spatial() -> None:
    grid = TokenGrid(1, 6, 8)  # one frame: both orders are the same
    rows = jnp.arange(0, 48, 6)
    keys = [visited_keys(plan, rows) for plan in plans(grid, 0.7, (16, 8))]
    q, k, v = heads_first(*normal(0, 1, grid.tokens, 2, 4))
    f = jax.jit(lambda q, k, v: route_heads(q, k, v, rows, *keys))
    stats = f(q, k, v)
    assert (stats.route == ROUTE_SPATIAL).all()
    assert (stats.error > 0).all()
    assert (f(q, k, 0 * v).error == 0).all()  # no energy at all


def test_probe_rows_are_stratified() -> None:
    n = 75600
    f = jax.jit(probe_rows, static_argnums=(0, 1, 2))
    rows = np.asarray(f(n, 64, 0, 3, 5))
    np.testing.assert_array_equal(rows * 64 // n, np.arange(64))  # one from each stretch of the whole sequence
    for other in (f(n, 64, 0, 4, 5), f(n, 64, 0, 3, 6), f(n, 64, 1, 3, 5)):
        assert (rows != np.asarray(other)).mean() > 0.9
    np.testing.assert_array_equal(f(5, 64, 0, 0, 0), np.arange(5))


def test_published_probe() -> None:
    grid = TokenGrid(6, 3, 4)
    spatial, temporal = plans(grid, 0.6, (12, 6))
    rows = published_rows(grid.tokens, 64, 0, 1, 2)
    assert rows.shape == (64,)
    assert (published_rows(75600, 64, 0, 1, 2) < 10000).all()
    for plan in (spatial, temporal):
        expected = pattern_mask(grid, 2 * grid.patches, Sink.NONE, plan.order)[rows]
        np.testing.assert_array_equal(published_keys(plan, rows), expected)
    kinds = [[0, 1]]
    attend = make_attend("svg", AttentionSpec(grid, density=0.7, sink="none", probe="published"))
    _, stats = jax.jit(attend)(*planted(kinds, grid), layer=jnp.int32(0), step=jnp.int32(0))
    np.testing.assert_array_equal(stats.route, kinds)


def equations(jaxpr) -> Iterator:
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(sub)


def test_temporal_heads_are_not_permuted() -> None:
    """Tiles are cut as blocks: nothing gathers or transposes tokens."""
    grid = TokenGrid(5, 8, 8)
    plan, _ = plans(grid, 0.5)
    x = jnp.zeros((grid.tokens, 16))
    head = lambda q, k, v, temporal: svg.planned_head(q, k, v, plan, temporal)  # noqa: E731
    names = [
        (e.primitive.name, max(v.aval.size for v in e.outvars))
        for e in equations(jax.make_jaxpr(head)(x, x, x, True).jaxpr)
    ]
    assert not [n for n in names if n[0] in ("gather", "transpose", "scatter", "sort") and n[1] >= 16]
    assert sum(n[0] == "dot_general" for n in names) >= 4


def test_memory_is_linear() -> None:
    def temporaries(rows: int) -> int:
        grid = TokenGrid(5, rows, 64)
        x = jax.ShapeDtypeStruct((1, grid.tokens, 2, 64), jnp.float32)
        attend = make_attend("svg", AttentionSpec(grid, density=0.4, sink="none"))
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(attend).lower(x, x, x, layer=scalar, step=scalar).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(32), temporaries(128)  # 10240 and 40960 tokens
    assert large < 4.5 * small


def test_refusals() -> None:
    spec = AttentionSpec(TokenGrid(5, 8, 8), density=0.5)
    with pytest.raises(NotImplementedError, match="first_frame"):
        make_attend("svg", dataclasses.replace(spec, sink="first_frame"))
    with pytest.raises(ValueError, match="sink='prefxi' is unknown; did you mean 'prefix'"):
        dataclasses.replace(spec, sink="prefxi")
    with pytest.raises(ValueError, match="probe='exec' is unknown; did you mean 'executed'"):
        dataclasses.replace(spec, probe="exec")
    with pytest.raises(ValueError, match="probe_rows"):
        dataclasses.replace(spec, probe_rows=0)
    with pytest.raises(ValueError, match="alone execute"):
        make_attend("svg", dataclasses.replace(spec, density=0.1))


def test_patterns_agree_with_plans_of_single_tokens() -> None:
    """A plan whose tiles are single patches is the pattern itself."""
    grid = TokenGrid(1, 5, 8)
    plan = plan_tiles(grid, 0.5, sink=Sink.NONE, tile=(1, 1))
    np.testing.assert_array_equal(plan_mask(plan), pattern_mask(grid, plan.window, Sink.NONE, TokenOrder.FRAME_MAJOR))
