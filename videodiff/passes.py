"""The passes of a run: the sampler loop over the final size alone, or over a smaller size first and then a refinement.

Owns: which pass runs over which size, with which steps, schedule and attention, and how a refinement begins. Does not own: which
sizes a request means (`request`), running the loop (`pipeline`), enlarging (`stages`).
Invariant: the pass at the smaller size does not depend on the schedule, so runs that differ in it refine the same video.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from videodiff import noise
from videodiff.grid import VideoGeometry
from videodiff.request import ResolvedRequest
from videodiff.sampling.sigmas import refinement_sigmas
from videodiff.sampling.solvers import Solver, SolverSpec, make_solver
from videodiff.schedule import DENSE, ScheduleProgram, compile_schedule, load_schedule


@dataclass(frozen=True)
class Pass:
    """One run of the sampler loop over one size.

    Args:
      name: "denoise" when it is the only one, else "base" and "refine".
      geometry: the size.
      solver: on its noise levels.
      program: one plan a step.
      backends: density -> attention that runs it.
    """

    name: str
    geometry: VideoGeometry
    solver: Solver
    program: ScheduleProgram
    backends: Mapping[float, str]

    def report(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "height": self.geometry.height,
            "width": self.geometry.width,
            "tokens": self.geometry.token_grid.tokens,
            "steps": self.solver.steps,
            "first_sigma": round(float(self.solver.grid.sigmas[0]), 7),
            "schedule": self.program.name,
        }


def plan_passes(request: ResolvedRequest, spec: SolverSpec, num_layers: int) -> tuple[Pass, ...]:
    """What will run.

    Args:
      request: what is asked for.
      spec: the solver.
      num_layers: of the transformer.

    Raises:
      ValueError: a solver or schedule that this request cannot follow.
    """
    whole = make_solver(spec, request.num_inference_steps, request.flow_shift)
    parts = [("denoise", request.geometry, whole, request.schedule, request.attention_backend)]
    if request.base is not None:
        levels = refinement_sigmas(request.refine_steps, request.flow_shift, request.denoise_strength)
        rest = make_solver(spec, sigmas=list(levels))
        parts = [
            ("base", request.base, whole, "dense", "auto"),
            ("refine", request.geometry, rest, request.schedule, request.attention_backend),
        ]
    passes = []
    for title, geometry, solver, schedule, backend in parts:
        program = compile_schedule(
            load_schedule(schedule),
            model=request.model,
            height=geometry.height,
            width=geometry.width,
            sigmas=[float(s) for s in solver.grid.sigmas],
            num_layers=num_layers,
            guided=request.guided,
        )
        passes.append(Pass(title, geometry, solver, program, choose_backends(backend, program)))
    return tuple(passes)


def renoised(clean: np.ndarray, seeds: Sequence[int], part: Pass) -> jax.Array:
    """Enlarged latents at the noise level a refinement begins with.

    Args:
      clean: [B, F, Y, X, C] float32, normalised.
      seeds: one a video; the noise is another than the one its first pass began with.
      part: the refinement.
    """
    level = float(part.solver.sigmas[0])
    fresh = noise.initial_noise(seeds, part.geometry.latent_shape, stream=1)
    return (1 - level) * jnp.asarray(clean) + level * fresh


def choose_backends(requested: str, program: ScheduleProgram) -> dict[float, str]:
    """Which attention runs each density of a schedule.

    The request has refused a backend that contradicts its schedule; what is left to see here is a sparse schedule that comes
    out dense for this model and number of steps.

    Args:
      requested: "auto" (dense where the schedule is dense, svg where it is sparse), "dense" or "svg".
      program: the compiled schedule.

    Raises:
      ValueError: svg by name, and no step of this run is sparse; nothing falls back.
    """
    assert not (requested == "dense" and program.sparse), "a request checks this"
    if requested == "svg" and not program.sparse:
        raise ValueError(
            f"attention_backend=svg has nothing to do: schedule {program.name} is dense in every step of this run; use more steps, "
            f"another schedule, or attention_backend auto"
        )
    return {d: "dense" if d == DENSE else "svg" for d in program.densities}
