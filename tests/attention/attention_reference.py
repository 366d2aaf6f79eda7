"""Softmax attention in float64 numpy, written pair by pair of einsums: the oracle of this room's tests."""

from __future__ import annotations

import numpy as np


def attention_f64(q, k, v, mask=None) -> np.ndarray:
    """q, k, v: [B, N, H, D]; mask broadcastable to [B, H, N, N] or None -> [B, N, H, D] float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


def relative(x, y) -> float:
    """Relative L2 distance of x from y."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))


def normal(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of a standard normal, float32."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, *shape)).astype(np.float32)
    return q, k, v
