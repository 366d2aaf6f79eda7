"""Attention against PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from videodiff.attention import dense, svg
from videodiff.attention.patterns import plan_mask
from videodiff.attention.tiles import plan_tiles
from videodiff.grid import TokenGrid, TokenOrder

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity


def sdpa(q, k, v, mask=None) -> np.ndarray:
    """[B, N, H, D] through PyTorch's [B, H, N, D]."""
    x = [torch.from_numpy(np.ascontiguousarray(np.asarray(y).transpose(0, 2, 1, 3))) for y in (q, k, v)]
    mask = None if mask is None else torch.from_numpy(mask)
    return torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=mask).numpy().transpose(0, 2, 1, 3)


def relative(x, y) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y))


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(320, 2, 64), (1281, 2, 64), (2100, 1, 128)])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_dense(tokens: int, heads: int, dim: int, scale: float) -> None:
    q, k, v = np.random.default_rng(tokens).standard_normal((3, 2, tokens, heads, dim)).astype(np.float32)
    q *= scale
    assert relative(jax.jit(dense.dense_attention)(q, k, v), sdpa(q, k, v)) <= 2e-6


def test_sparse_is_masked_sdpa() -> None:
    grid = TokenGrid(5, 9, 13)
    spatial, temporal = (plan_tiles(grid, 0.45, order=order) for order in TokenOrder)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, grid.tokens, 2, 64)).astype(np.float32)
    route = np.array([[0, 1]], np.int32)
    heads = [jnp.asarray(x).transpose(0, 2, 1, 3) for x in (q, k, v)]
    o = jax.jit(lambda q, k, v: svg.routed_attention(q, k, v, route, spatial))(*heads).transpose(0, 2, 1, 3)
    mask = np.stack([plan_mask(spatial), plan_mask(temporal)])[None]
    assert relative(o, sdpa(q, k, v, mask)) <= 2e-6


def test_gradients() -> None:
    q, k, v, w = np.random.default_rng(3).standard_normal((4, 2, 320, 2, 64)).astype(np.float32)
    ours = jax.jit(jax.grad(lambda x: jnp.sum(dense.dense_attention(*x) * w)))((q, k, v))
    x = [torch.from_numpy(np.ascontiguousarray(y.transpose(0, 2, 1, 3))).requires_grad_() for y in (q, k, v)]
    loss = torch.nn.functional.scaled_dot_product_attention(*x) * torch.from_numpy(w.transpose(0, 2, 1, 3))
    loss.sum().backward()
    for a, b in zip(ours, x, strict=True):
        assert relative(a, b.grad.numpy().transpose(0, 2, 1, 3)) <= 1e-5
