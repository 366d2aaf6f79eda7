"""The vocabulary of key tables: which checkpoint tensors make one parameter, and how their axes move.

Owns: ``KeyRule`` and ``Layout``. Does not own: reading files (`load`), the tables themselves (`keys_*`).
Invariant: a table names every parameter of its model exactly once and every checkpoint tensor exactly once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np


class Layout(enum.Enum):
    """How one checkpoint tensor's axes become a parameter's axes (torch -> channels-last)."""

    SAME = "same"
    LINEAR = "linear"  # [out, in] -> [in, out]
    CONV3D = "conv3d"  # [O, I, t, h, w] -> [t, h, w, I, O]
    CONV2D = "conv2d"  # [O, I, h, w] -> [h, w, I, O]
    FLATTEN_GAMMA = "flatten_gamma"  # [C, 1, ...] -> [C]

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Move the axes of ``x``; a view where numpy can give one."""
        if self is Layout.LINEAR:
            return x.T
        if self is Layout.CONV3D:
            return x.transpose(2, 3, 4, 1, 0)
        if self is Layout.CONV2D:
            return x.transpose(2, 3, 1, 0)
        if self is Layout.FLATTEN_GAMMA:
            return x.reshape(x.shape[0])
        return x

    def invert(self, x: np.ndarray, trailing_ones: int = 3) -> np.ndarray:
        """The inverse of :meth:`apply`, always a view; ``trailing_ones`` restores a flattened gamma's shape."""
        if self is Layout.LINEAR:
            return x.T
        if self is Layout.CONV3D:
            return x.transpose(4, 3, 0, 1, 2)
        if self is Layout.CONV2D:
            return x.transpose(3, 2, 0, 1)
        if self is Layout.FLATTEN_GAMMA:
            return x.reshape(x.shape[0], *([1] * trailing_ones))
        return x


@dataclass(frozen=True)
class KeyRule:
    """One parameter of the model and where it comes from.

    Args:
      target: path in the NNX state, for example ("blocks", "attn1", "to_q", "kernel").
      sources: checkpoint tensor names; several are stacked along a new leading axis, in order.
      layout: how each source's axes move before stacking.
      aliases: other names under which the one source may appear. The checkpoint must hold at least one of the
        names, and those it holds must be equal byte for byte (UMT5's shared embedding). Saving writes ``sources``.
      trailing_ones: FLATTEN_GAMMA only: axes of length 1 after the first in the checkpoint: 3 for the norms of the
        VAE ([C, 1, 1, 1]), 2 inside its attention ([C, 1, 1]).
      stack: set it for layer stacks, so that a stack of one layer still gets its leading axis. Implied by several
        sources.
    """

    target: tuple[str | int, ...]
    sources: tuple[str, ...]
    layout: Layout = Layout.SAME
    aliases: tuple[str, ...] = ()
    trailing_ones: int = 3
    stack: bool = False

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(f"rule for {self.target} has no source")
        if self.aliases and len(self.sources) != 1:
            raise ValueError(f"aliases need exactly one source, {self.target} has {len(self.sources)}")

    @property
    def stacked(self) -> bool:
        """Whether the parameter carries a leading layer axis."""
        return self.stack or len(self.sources) > 1

    def source_view(self, target: np.ndarray, index: int) -> np.ndarray:
        """The part of a target array that source ``index`` fills, as a view with the source's own axes."""
        return self.layout.invert(target[index] if self.stacked else target, self.trailing_ones)
