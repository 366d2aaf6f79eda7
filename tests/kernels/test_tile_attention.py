"""The tile kernel against plain softmax over the visited keys, run by Pallas's interpreters on the host.

Whole tiles run under the TPU interpreter with memory that starts as NaN. It refuses blocks that stick out of an output, so
ragged grids run under the generic one, which fills what sticks out with NaN too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from videodiff.kernels.tile_attention import Work, reference, work_of
from videodiff.kernels.tile_attention.tpu import bounds, tile_attention


def make_work(frames: int, patches: int, query: int, key: int, seed: int = 0, *, own: bool = True) -> Work:
    rng = np.random.default_rng(seed)
    visited = rng.random((-(-patches // query), -(-patches // key))) < 0.5
    for i, row in enumerate(visited):
        row[i * query // key : -(-min((i + 1) * query, patches) // key) if own else i * query // key + 1] = True
    return work_of(visited, frames, patches, query, key)


def inputs(work: Work, heads: int, dim: int, dtype, seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(heads, work.tokens, dim)), dtype) for _ in range(3)]


def run(q, k, v, temporal, work: Work, chunk: int | None = None) -> np.ndarray:
    ragged = work.patches % work.query_patches or work.patches % work.key_patches
    interpret = True if ragged else pltpu.InterpretParams(uninitialized_memory="nan")
    chunk = chunk or work.frames * work.key_patches
    return np.asarray(
        tile_attention(q, k, v, temporal, work, chunk=chunk, vmem_bytes=2**26, interpret=interpret), np.float64
    )


def distance(a: np.ndarray, b: jax.Array) -> float:
    return float(np.linalg.norm(a - np.asarray(b, np.float64)) / np.linalg.norm(np.asarray(b, np.float64)))


@pytest.mark.parametrize(
    ("frames", "patches", "query", "key", "dim"),
    [(3, 32, 16, 8, 64), (1, 16, 16, 8, 128), (2, 48, 8, 16, 64), (3, 20, 16, 8, 64), (1, 7, 8, 8, 64), (1, 1, 8, 8, 64)],
)  # fmt: skip
def test_spatial_and_temporal_heads(frames: int, patches: int, query: int, key: int, dim: int) -> None:
    work = make_work(frames, patches, query, key)
    q, k, v = inputs(work, 3, dim, jnp.float32)
    temporal = jnp.array([True, False, True])
    assert distance(run(q, k, v, temporal, work), reference(q, k, v, temporal, work)) < 2e-6


def test_bfloat16_in_chunks() -> None:
    work = make_work(4, 32, 16, 16)
    q, k, v = inputs(work, 2, 128, jnp.bfloat16)
    temporal = jnp.array([False, True])
    assert distance(run(q, k, v, temporal, work, chunk=32), reference(q, k, v, temporal, work)) < 6e-3


def test_every_route_of_one_kind_leaves_nothing_unwritten() -> None:
    work = make_work(2, 32, 16, 16)
    q, k, v = inputs(work, 2, 64, jnp.float32)
    for temporal in (jnp.zeros(2, bool), jnp.ones(2, bool)):
        assert distance(run(q, k, v, temporal, work), reference(q, k, v, temporal, work)) < 2e-6


def test_full_work_is_dense_attention() -> None:
    work = work_of(np.ones((2, 2), bool), 2, 32, 16, 16)
    q, k, v = inputs(work, 2, 64, jnp.float32)
    oracle = jax.nn.dot_product_attention(*(x.transpose(1, 0, 2)[None] for x in (q, k, v)))[0].transpose(1, 0, 2)
    assert distance(run(q, k, v, None, work), oracle) < 2e-6


ADVERSARIAL = {
    "huge norms": lambda q, k: (q * 100, k * 100),
    "tiny norms": lambda q, k: (q * 1e-6, k * 1e-6),
    "all equal": lambda q, k: (jnp.ones_like(q), jnp.ones_like(k)),
    "spike up": lambda q, k: (q, k.at[:, 37].set(q[:, 5] * 200)),
    "spike down": lambda q, k: (q, k.at[:, 37].set(q[:, 5] * -200)),
    "first tile far below": lambda q, k: (q.at[..., 0].set(30.0), k.at[:, :16, 0].set(-30.0)),
    "own key far below": lambda q, k: (q.at[..., 0].set(40.0), k.at[..., 0].set(-40.0)),
}


@pytest.mark.parametrize("case", ADVERSARIAL)
@pytest.mark.parametrize("patches", [32, 29])
def test_adversarial_scores(case: str, patches: int) -> None:
    """Spikes of several 1e4 before scaling, rows whose bound says nothing: exact, and never NaN."""
    work = make_work(2, patches, 16, 8)
    q, k, v = inputs(work, 2, 64, jnp.float32)
    q, k = ADVERSARIAL[case](q, k)
    temporal = jnp.array([False, True])
    out = run(q, k, v, temporal, work)
    assert np.isfinite(out).all()
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v)]
        exact = np.asarray(reference(*wide, temporal, work, dtype=jnp.float64))
    largest = float(jnp.abs(jnp.einsum("hqd,hkd->hqk", q, k)).max()) / 8
    assert distance(out, exact) < 2e-6 + 2**-22 * largest  # a score's own rounding in f32, twice


def test_a_head_beyond_the_bound_takes_the_running_maximum() -> None:
    q, k, _ = inputs(make_work(2, 32, 16, 8), 2, 64, jnp.float32)
    _, exact = bounds(q.at[0].multiply(0.2), k.at[1].multiply(100), own=True)
    assert exact.tolist() == [True, False]
    _, exact = bounds(q.at[1].multiply(0.2).at[0, 0, 0].set(jnp.nan), k, own=True)
    assert exact.tolist() == [False, True]


def test_rows_without_their_own_key_are_judged_by_norms_alone() -> None:
    work = make_work(2, 32, 16, 8, own=False)
    assert not work.own
    assert make_work(2, 32, 16, 8).own
    q, k, v = inputs(work, 2, 64, jnp.float32)
    same = jnp.stack([q[0], q[0]])
    assert bounds(same, same, own=True)[1].all()
    assert not bounds(same, same, own=False)[1].any()
    assert distance(run(q * 3, k * 3, v, None, work), reference(q * 3, k * 3, v, jnp.zeros(2, bool), work)) < 1e-5


def test_words_and_their_limits() -> None:
    visited = np.array([[True, False, True], [False, True, False]])
    work = work_of(visited, 2, 24, 16, 8)
    assert (work.visited() == visited).all()
    assert [w & 3 for w in work.words.tolist()] == [1, 2, 3]
    with pytest.raises(ValueError, match="every query tile must visit a key tile; 1 visit none"):
        work_of(np.array([[True], [False]]), 1, 16, 8, 16)
    with pytest.raises(ValueError, match="make \\(2, 3\\) tiles"):
        work_of(visited.T, 2, 24, 16, 8)
