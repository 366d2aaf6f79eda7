"""The optimiser of the shipped model: Muon for matrices, Adam for the rest.

Owns: which parameter gets which, unit-scale updates, the moving average. Does not own: learning rates over time (`train`).
Muon: momentum, then the nearest orthogonal matrix by five Newton-Schulz iterations (Jordan et al.,
kellerjordan.github.io/posts/muon). optax.contrib.muon runs them matrix by matrix; here matrices of one shape go through
together, which matters on a CPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

STACKS = ("block_stack", "blocks")  # parameters below carry a leading layer axis
ADAM_ONLY = ("embedding", "proj_out", "patch_embedding")
NS = (3.4445, -4.7750, 2.0315)


def is_matrix(name: str, x: jax.Array) -> bool:
    """Whether Muon updates this parameter: kernels of dense and convolution layers."""
    parts = name.split("/")
    return parts[-1] == "kernel" and not set(parts) & set(ADAM_ONLY) and min(_matrix_shape(name, x)) >= 8


def _matrix_shape(name: str, x: jax.Array) -> tuple[int, int]:
    shape = x.shape[1:] if set(name.split("/")) & set(STACKS) else x.shape
    return math.prod(shape[:-1]), shape[-1]


def orthogonalise(x: jax.Array, steps: int = 5) -> jax.Array:
    """[n, rows, cols] -> the same with singular values near 1; rows <= cols."""
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    a, b, c = NS
    for _ in range(steps):
        s = x @ x.swapaxes(1, 2)
        x = a * x + (b * s + c * (s @ s)) @ x
    return x


class MuonState(NamedTuple):
    """Momentum, a tree like the parameters."""

    momentum: Any


def scale_by_muon(momentum: float = 0.95, steps: int = 5) -> optax.GradientTransformation:
    """Updates of root-mean-square size 0.2, like Adam's; equal shapes are orthogonalised together."""

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        m = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, grads)
        nesterov = jax.tree.map(lambda m, g: g + momentum * m, m, grads)
        flat, structure = jax.tree_util.tree_flatten_with_path(nesterov)
        groups: dict[tuple[int, int], list[tuple[int, jax.Array, bool]]] = defaultdict(list)
        for i, (path, g) in enumerate(flat):
            rows, cols = _matrix_shape(path[-1].key, g)
            batch = g.reshape(-1, rows, cols)
            turned = rows > cols
            batch = batch.swapaxes(1, 2) if turned else batch
            groups[batch.shape[1:]].append((i, batch, turned))
        out: list[Any] = [None] * len(flat)
        for shape, members in groups.items():
            done = orthogonalise(jnp.concatenate([b for _, b, _ in members]), steps) * (0.2 * math.sqrt(max(shape)))
            at = 0
            for i, batch, turned in members:
                piece = done[at : at + len(batch)]
                at += len(batch)
                out[i] = (piece.swapaxes(1, 2) if turned else piece).reshape(flat[i][1].shape)
        return jax.tree.unflatten(structure, out), MuonState(m)

    return optax.GradientTransformation(init, update)


def labels(params: dict[str, jax.Array]) -> dict[str, str]:
    """ "muon" or "adam" for every parameter of a flat dict."""
    return {p: "muon" if is_matrix(p, x) else "adam" for p, x in params.items()}


def make(params: dict[str, jax.Array], clip: float = 1.0) -> optax.GradientTransformation:
    """Unit-scale optimiser over a flat dict of parameters; the caller multiplies by learning rates."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.partition({"muon": scale_by_muon(), "adam": optax.scale_by_adam(0.9, 0.99)}, labels(params)),
    )
