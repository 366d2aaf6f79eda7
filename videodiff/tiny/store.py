"""Parameters as flat dictionaries, and checkpoints of a training phase.

Owns: module <-> dict of arrays named "a/b/kernel", atomic checkpoints, the loss log. Does not own: what is trained.
Invariant: a phase that was stopped goes on from its last checkpoint with the same optimiser state.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from videodiff.files import atomic_path

Params = dict[str, jax.Array]


class Model:
    """A module taken apart: a graph, and parameters by name."""

    def __init__(self, module: nnx.Module) -> None:
        self.graph, state = nnx.split(module)
        self._paths = {"/".join(map(str, p)): tuple(p) for p, _ in nnx.to_flat_state(state)}
        self._template = dict(nnx.to_flat_state(state))
        self.params: Params = {n: self._template[p].get_value() for n, p in self._paths.items()}

    def state(self, params: Params) -> nnx.State:
        """An NNX state with these parameters."""
        return nnx.from_flat_state({p: self._template[p].replace(params[n]) for n, p in self._paths.items()})

    def named(self, state: nnx.State) -> Params:
        """The parameters of an NNX state by name: the inverse of :meth:`state`."""
        flat = dict(nnx.to_flat_state(state))
        return {n: flat[p].get_value() for n, p in self._paths.items()}

    def module(self, params: Params) -> Any:
        """The module with these parameters; traceable."""
        return nnx.merge(self.graph, self.state(params))


def save(path: Path, trees: dict[str, Any], meta: dict[str, Any]) -> None:
    """Write pytrees (their leaves, in order) and JSON metadata, whole or not at all."""
    arrays = {f"{name}:{i}": np.asarray(x) for name, tree in trees.items() for i, x in enumerate(jax.tree.leaves(tree))}
    with atomic_path(path) as partial:
        np.savez(partial, **{"meta": np.array(json.dumps(meta))}, **arrays)  # type: ignore[arg-type]


def load(path: Path, like: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read trees of the structure of ``like``."""
    with np.load(path) as data:
        out = {}
        for name, tree in like.items():
            leaves, structure = jax.tree.flatten(tree)
            out[name] = jax.tree.unflatten(structure, [jnp.asarray(data[f"{name}:{i}"]) for i in range(len(leaves))])
        return out, json.loads(str(data["meta"]))


class Log:
    """One JSON object a line, and the same on the screen now and then."""

    def __init__(self, path: Path, every_s: float = 15.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._every, self._shown = path, every_s, 0.0

    def __call__(self, **values: Any) -> None:
        now = time.time()
        if now - self._shown < self._every:
            return
        self._shown = now
        values = {k: v if isinstance(v, int | str) else round(float(v), 5) for k, v in values.items()}
        with self._path.open("a") as f:
            f.write(json.dumps(values) + "\n")
        print(" ".join(f"{k} {v}" for k, v in values.items()), flush=True)
