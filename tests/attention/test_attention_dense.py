"""Dense attention against float64, for every length, dtype and kind of logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import attention_f64, normal, relative

from videodiff.attention import AttentionSpec, backends, dense, make_attend
from videodiff.attention.api import ROUTE_DENSE
from videodiff.grid import TokenGrid


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocked form at sizes a test can afford."""
    monkeypatch.setattr(dense, "PLAIN_TOKENS", 0)
    monkeypatch.setattr(dense, "QUERY_TILE", 64)
    monkeypatch.setattr(dense, "KEY_TILE", 32)


def jitted():
    """A fresh program: tests change tile sizes, which a cached one would not see."""
    return jax.jit(lambda q, k, v: dense.dense_attention(q, k, v))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("tokens", [1, 31, 33, 64, 65, 200])
def test_blocked_any_length(tokens: int) -> None:
    q, k, v = normal(tokens, 2, tokens, 2, 8)
    o = jitted()(q, k, v)
    assert o.shape == q.shape
    assert o.dtype == jnp.float32
    assert relative(o, attention_f64(q, k, v)) <= 1e-6


@pytest.mark.parametrize("tokens", [1, 320, 1281])
def test_real_tiles(tokens: int) -> None:
    q, k, v = normal(tokens, 1, tokens, 2, 64)
    assert relative(jitted()(q, k, v), attention_f64(q, k, v)) <= 1e-6


def test_plain_in_chunks_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal(0, 7, 40, 2, 8)
    whole = jitted()(q, k, v)
    monkeypatch.setattr(dense, "PLAIN_BYTES", 3 * 4 * 2 * 40 * 40)  # three entries at a time, one left over
    np.testing.assert_allclose(jitted()(q, k, v), whole, rtol=1e-6, atol=1e-6)


def adversarial(kind: str, tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits that break careless softmax; products are exact in float32 where their size would cost digits."""
    q, k, v = normal(5, 1, tokens, 2, dim)
    rng = np.random.default_rng(6)
    root = np.float32(np.sqrt(dim))
    if kind == "all equal":
        k[:] = k[:, :1]
    elif kind == "all zero":
        q[:] = k[:] = 0
    elif kind == "huge norms":
        q, k = q * np.float32(2.0**40), k * np.float32(2.0**40)
    elif kind == "tiny norms":
        q, k = q * np.float32(1e-20), k * np.float32(1e-20)
    elif kind in ("spikes up", "spikes down", "spikes both"):
        q[..., :] = 0
        q[..., 0] = root * 100
        low, high = {"spikes up": (0, 1), "spikes down": (-1, 0), "spikes both": (-1, 1)}[kind]
        k[..., 0] = 100.0 * rng.integers(low, high + 1, k.shape[:-1]) * (rng.random(k.shape[:-1]) < 0.05)
    elif kind == "first tile far below":  # and so for every query tile's first, diagonal one: overflow for sure
        q[:] = 0
        q[..., 0] = root * 100
        k[..., 0] = -100.0
        k[:, tokens // 2, :, 0] = 100.0
    elif kind == "just above the limit":  # sums of e^60 and e^80: near where the fixed shift gives up, both sides
        q[:] = 0
        q[..., 0] = root
        k[..., 0] = 0
        k[:, tokens // 3, 0, 0] = 60.0
        k[:, tokens // 2, 1, 0] = 80.0
    elif kind == "large values":
        v *= np.float32(1e18)
        q[..., 0], k[..., 0] = root, 0
        k[:, tokens // 2, :, 0] = 40.0
    elif kind == "rising":
        q[:] = 0
        q[..., 0] = root
        k[..., 0] = 32.0 * np.arange(tokens)[None, :, None]
    return q, k, v


KINDS = (
    "all equal", "all zero", "huge norms", "tiny norms", "spikes up", "spikes down", "spikes both", "first tile far below",
    "just above the limit", "large values", "rising",
)  # fmt: skip


@pytest.mark.usefixtures("small_tiles")
def test_adversarial_logits() -> None:
    cases = [adversarial(kind, 200, 16) for kind in KINDS]
    q, k, v = (np.concatenate(x) for x in zip(*cases, strict=True))
    o = np.asarray(jitted()(q, k, v))
    assert np.isfinite(o).all()
    wrong = {
        kind: error
        for i, kind in enumerate(KINDS)
        if (error := relative(o[i], attention_f64(*(x[i : i + 1] for x in (q, k, v)))[0])) > 1e-5
    }
    assert not wrong


@pytest.mark.usefixtures("small_tiles")
def test_nan_stays_visible() -> None:
    """A broken input must not come out as a plausible number."""
    q, k, v = normal(0, 1, 100, 1, 8)
    q[0, 17] = np.nan
    o = np.asarray(jitted()(q, k, v))
    assert np.isnan(o[0, 17]).all()


@pytest.mark.parametrize("plain", [True, False])
def test_bf16(plain: bool, request: pytest.FixtureRequest) -> None:
    if not plain:
        request.getfixturevalue("small_tiles")
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in normal(1, 2, 150, 2, 32))
    o = jitted()(q, k, v)
    assert o.dtype == jnp.bfloat16
    exact = attention_f64(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert relative(o.astype(jnp.float32), exact) <= 2.0**-8  # half a unit in the last place of bf16, and little else


@pytest.mark.usefixtures("small_tiles")
def test_batch_entries_do_not_see_each_other() -> None:
    q, k, v = normal(2, 3, 150, 2, 8)
    f = jitted()
    together = np.asarray(f(q, k, v))
    for i in (0, 2):
        np.testing.assert_array_equal(together[i : i + 1], f(q[i : i + 1], k[i : i + 1], v[i : i + 1]))


@pytest.mark.parametrize("plain", [True, False])
def test_gradients(plain: bool, request: pytest.FixtureRequest) -> None:
    if not plain:
        request.getfixturevalue("small_tiles")
    q, k, v = normal(3, 1, 100, 2, 8)
    w = normal(4, 1, 100, 2, 8)[0]

    def through(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(f(*x) * w)))((q, k, v))

    def oracle(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v)

    for ours, theirs in zip(through(dense.dense_attention), through(oracle), strict=True):
        assert relative(ours, theirs) <= 1e-5


def temporaries(tokens: int) -> int:
    x = jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.float32)
    return jitted().lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear() -> None:
    small, large = temporaries(8192), temporaries(32768)
    assert large < 4.5 * small
    assert (
        large < 8 * (32768 * 2 * 64 * 4) + 3 * 4 * dense.QUERY_TILE * dense.KEY_TILE
    )  # a few copies of q and a few tiles


def test_registry() -> None:
    assert {"dense", "svg"} <= set(backends())
    grid = TokenGrid(2, 3, 4)
    attend = make_attend("dense", AttentionSpec(grid))
    q, k, v = normal(0, 2, grid.tokens, 3, 8)
    o, stats = attend(q, k, v, layer=jnp.int32(0), step=jnp.int32(0))
    assert relative(o, attention_f64(q, k, v)) <= 1e-6
    assert stats.route.shape == stats.error.shape == (2, 3)
    assert (stats.route == ROUTE_DENSE).all()
    assert (stats.error == 0).all()
    with pytest.raises(ValueError, match="attention_backend='dens' is unknown; did you mean 'dense'"):
        make_attend("dens", AttentionSpec(grid))
    with pytest.raises(ValueError, match="every pair"):
        make_attend("dense", AttentionSpec(grid, density=0.5))
