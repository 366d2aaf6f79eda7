"""Which layers of which step are dense, sparse, guided.

Owns: the frozen plan of one step. Does not own: attention patterns, kernels.
Invariant: the segments of a plan follow one another without gaps, from layer 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Layers start <= layer < stop at one density (1.0 is dense)."""

    start: int
    stop: int
    density: float


@dataclass(frozen=True)
class StepPlan:
    """One step: its layer segments in order, and whether the unconditional branch runs."""

    segments: tuple[Segment, ...]
    guided: bool
