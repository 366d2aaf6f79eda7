"""The one interface between transformer blocks and attention backends.

Owns: the call signature of an attention function, the statistics every call returns, and the registry of
backends. Does not own: any arithmetic. Invariant: a named backend that cannot run raises; nothing falls back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax

from videodiff.errors import closest
from videodiff.grid import TokenGrid

ROUTE_DENSE = -1
ROUTE_SPATIAL = 0
ROUTE_TEMPORAL = 1

SINKS = ("prefix", "none", "first_frame")
PROBES = ("executed", "published")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadStats:
    """What one attention call did, per batch entry and head.

    Args:
      route: [B, H] int32, ROUTE_DENSE, ROUTE_SPATIAL or ROUTE_TEMPORAL.
      error: [B, H] float32, error of the chosen pattern on the probed rows relative to the energy of their dense
        output (0 for dense).
    """

    route: jax.Array
    error: jax.Array


class Attend(Protocol):
    """Self-attention as the transformer sees it: bound to a grid, a backend and a density by the pipeline."""

    @property
    def executed_density(self) -> float:
        """Share of pairs that a call executes, sink included, for the report; 1 is dense."""
        ...

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, layer: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, HeadStats]:
        """Attend.

        Args:
          q, k, v: [B, N, H, D] after QK norm and RoPE, frame-major, any float dtype.
          layer: int32 scalar, may be traced.
          step: int32 scalar, may be traced.

        Returns:
          o: [B, N, H, D] in q's dtype, and the statistics.
        """
        ...


@dataclass(frozen=True)
class AttentionSpec:
    """Everything that fixes one attention program before it is traced.

    Args:
      grid: the token grid; N = grid.tokens.
      density: requested kept share of pairs, sink included, in (0, 1]; 1 is dense.
      sink: keys every query keeps: "prefix" (the first P of the head's own order), "none" or "first_frame"; a backend
        makes it the Sink of `tiles`.
      probe_rows: query rows drawn for routing, at least 1.
      probe: "executed" judges the tiles that would run, on rows from all over the video; "published" is the public
        code's probe, for comparison: rows of the first 10000 tokens, a fixed window of two frames.
      seed: of the routing rows.
      head_dim: D.

    Raises:
      ValueError: a field outside its range.
    """

    grid: TokenGrid
    density: float = 1.0
    sink: str = "prefix"
    probe_rows: int = 64
    seed: int = 0
    head_dim: int = 128
    probe: str = "executed"

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density!r} must be in (0, 1]: the kept share of pairs (1 is dense)")
        if self.sink not in SINKS:
            raise ValueError(f"sink={self.sink!r} is unknown; {closest(self.sink, SINKS)}")
        if self.probe not in PROBES:
            raise ValueError(f"probe={self.probe!r} is unknown; {closest(self.probe, PROBES)}")
        if self.probe_rows < 1:
            raise ValueError(f"probe_rows={self.probe_rows} must be at least 1: routing needs a row to look at")


Factory = Callable[[AttentionSpec], Attend]
_BACKENDS: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Register a backend factory under ``name``; a second registration of a name is a programming error."""

    def add(factory: Factory) -> Factory:
        assert name not in _BACKENDS, name
        _BACKENDS[name] = factory
        return factory

    return add


def backends() -> tuple[str, ...]:
    return tuple(sorted(_BACKENDS))


def make_attend(name: str, spec: AttentionSpec) -> Attend:
    """Build the attention function of backend ``name``.

    Raises:
      ValueError: unknown backend.
      NotImplementedError: the backend cannot run this spec on this platform.
    """
    if name not in _BACKENDS:
        raise ValueError(f"attention_backend={name!r} is unknown; {closest(name, _BACKENDS)}")
    return _BACKENDS[name](spec)
