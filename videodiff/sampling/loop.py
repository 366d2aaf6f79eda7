"""The host loop: from noise to latents, one compiled step per phase.

Owns: running the steps, checks, progress, callbacks, statistics, and the state that lets an interrupted run go on.
Does not own: what a step computes (`solvers`, the denoiser), prompts, decoding.
Invariant: the latents and the solver state are consistent between steps: a run that stopped, was saved, loaded and
resumed ends bit-equal to one that never stopped, and nothing that is not finite goes on to a next step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from videodiff.files import atomic_path
from videodiff.sampling.solvers import Solver, SolverState
from videodiff.schedule import StepPlan

log = logging.getLogger(__name__)
STATE_FORMAT = "videodiff.loop_state.1"


class NonFiniteError(ArithmeticError):
    """NaN or infinity in a run.

    Args:
      stage: where, for example "denoise".
      step: steps done before it, from 0.
      what: which array.
      detail: the sigma or timestep.
    """

    def __init__(self, stage: str, step: int, total: int, what: str, detail: str) -> None:
        self.stage, self.step = stage, step
        super().__init__(
            f"{stage} step {step + 1} of {total} ({detail}): {what} hold NaN or infinity; nothing was written. "
            f"Check the weights, or try dtype float32 if this was a lower precision"
        )


class Denoise(Protocol):
    """The right-hand side of the ODE; pure and traceable. `denoiser.Denoiser` is one."""

    def __call__(
        self, operands: Any, latents: jax.Array, timestep: jax.Array, step: jax.Array, plan: StepPlan
    ) -> tuple[jax.Array, Any]:
        """Velocity and statistics.

        Args:
          operands: a pytree the loop hands through unread: weights, text, guidance scale.
          latents: [B, F, Y, X, C] float32.
          timestep: float32 scalar, traced.
          step: int32 scalar, traced.
          plan: static.

        Returns:
          velocity, like the latents, and a pytree of statistics (or None).
        """
        ...


class Progress(Protocol):
    """Told after every step, and once with step 0 before the first."""

    def __call__(self, stage: str, step: int, total: int, elapsed_s: float) -> None:
        """``step`` steps of ``total`` are done after ``elapsed_s`` seconds of this stage."""
        ...


class StepEnd(Protocol):
    """`callback_on_step_end`, as in diffusers: called after every step, may replace the latents.

    As there, the solver's history is not touched by a replacement. The array handed in belongs to the callback: it is a
    copy that stays valid after the next step. Raising KeyboardInterrupt stops the run in a resumable way.
    """

    def __call__(self, step: int, timestep: float, latents: jax.Array) -> jax.Array | np.ndarray | None:
        """After step ``step`` (from 0) at ``timestep``: latents [B, F, Y, X, C] float32; return new ones or None."""
        ...


@dataclass(frozen=True)
class LoopState:
    """A run between two steps.

    Args:
      step: the next step to run; equal to the number of steps when the run is done.
      latents: [B, F, Y, X, C] float32.
      solver: the solver's own state.
    """

    step: int
    latents: jax.Array
    solver: SolverState


class SamplingInterrupted(KeyboardInterrupt):
    """Ctrl-C between two steps. ``state`` can be resumed or saved; ``records`` are those of the finished steps."""

    def __init__(self, state: LoopState, records: Sequence[StepRecord], total: int) -> None:
        self.state, self.records = state, tuple(records)
        super().__init__(f"interrupted after step {state.step} of {total}; the state can be saved and resumed")


@dataclass(frozen=True)
class StepRecord:
    """What one step did.

    Args:
      step: from 0.
      timestep: as the model saw it.
      sigma: before the step.
      seconds: run time, without compilation.
      compile_s: time to compile this step's program, 0 when it was there.
      plan: the step's plan.
      stats: the denoiser's statistics on the host: HeadStats with leaves [layers, B or 2B, H].
    """

    step: int
    timestep: float
    sigma: float
    seconds: float
    compile_s: float
    plan: StepPlan
    stats: Any


@dataclass(frozen=True)
class LoopResult:
    """A finished run.

    Args:
      latents: [B, F, Y, X, C] float32 at sigma = 0.
      records: one a step that ran here (a resumed run has those after the resume).
      compilations: programs compiled in this run.
      evaluations: calls of the denoiser in this run: one a step.
    """

    latents: jax.Array
    records: tuple[StepRecord, ...]
    compilations: int
    evaluations: int


class StepPrograms:
    """Compiled steps of one denoiser, kept between runs.

    A program depends on the step's plan, the kind and order of the solver, and on shapes, dtypes and shardings: not on
    the shift, the sigmas, the guidance scale or (up to 64) the number of steps.

    Args:
      denoise: the right-hand side.
    """

    def __init__(self, denoise: Denoise) -> None:
        self._denoise = denoise
        self._programs: dict[Any, Any] = {}

    @property
    def compilations(self) -> int:
        return len(self._programs)

    def get(self, solver: Solver, plan: StepPlan, args: tuple) -> tuple[Any, float]:
        """The program of this plan for these arguments, and the seconds spent compiling it now (0 if it was there)."""
        leaves, structure = jax.tree.flatten(args)
        kinds = tuple((np.shape(x), x.dtype, getattr(x, "sharding", None)) for x in leaves)
        key = (solver.signature, plan, structure, kinds)
        if key in self._programs:
            return self._programs[key], 0.0
        start = time.perf_counter()
        # The loop gives up its latents and solver state to every step: both are updated in place.
        jitted = jax.jit(self._step(solver, plan), donate_argnums=(1, 2))
        self._programs[key] = jitted.lower(*args).compile()
        return self._programs[key], time.perf_counter() - start

    def _step(self, solver: Solver, plan: StepPlan) -> Any:
        denoise = self._denoise

        def denoise_step(operands, latents, state, i, timestep):
            v, stats = denoise(operands, latents, timestep, i, plan)
            new, state = solver.step(state, i, latents, v)
            return new, state, stats, jnp.stack([jnp.isfinite(v).all(), jnp.isfinite(new).all()])

        return denoise_step


class _CtrlC:
    """Ctrl-C as a request that is answered between steps, when the state is whole; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def _handle(self, signum: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.warning("stopping after this step; press Ctrl-C again to stop at once")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals only reach the main thread
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def start(solver: Solver, latents: jax.Array | np.ndarray) -> LoopState:
    """The state before the first step.

    Args:
      latents: initial noise [B, F, Y, X, C], float32. Copied: the caller's array stays usable.

    Raises:
      ValueError: not float32.
      NonFiniteError: NaN or infinity in them.
    """
    if latents.dtype != np.float32:
        raise ValueError(f"latents stay float32 through the whole loop, got {latents.dtype}")
    own = jnp.array(latents, copy=True)
    if not bool(jnp.isfinite(own).all()):
        raise NonFiniteError("denoise", 0, solver.steps, "the initial latents", "before any model call")
    return LoopState(0, own, solver.init(own))


def _layout(state: SolverState) -> list[tuple]:
    return [(jax.tree_util.keystr(path), a.shape, a.dtype) for path, a in jax.tree_util.tree_leaves_with_path(state)]


def _check_resumable(state: LoopState, solver: Solver) -> None:
    fresh = jax.eval_shape(solver.init, jax.ShapeDtypeStruct(state.latents.shape, state.latents.dtype))
    same = _layout(fresh) == _layout(state.solver)
    if same:
        same = np.array_equal(np.asarray(state.solver.table), np.asarray(solver.table(state.latents.dtype)))
    if not same or not 0 <= state.step <= solver.steps:
        raise ValueError(
            f"the saved state does not belong to this solver ({type(solver).__name__} on {solver.grid.name}); resume "
            f"with the solver, steps and shift it was made with"
        )


def _copy(state: LoopState) -> LoopState:
    """Own buffers, since every step gives its own away."""
    return LoopState(state.step, *jax.tree.map(lambda a: jnp.array(a, copy=True), (state.latents, state.solver)))


def _replaced(new: Any, old: jax.Array, record: StepRecord, stage: str, total: int) -> jax.Array:
    """Latents returned by callback_on_step_end, checked."""
    if np.shape(new) != old.shape:
        raise ValueError(f"callback_on_step_end returned latents of shape {np.shape(new)}, expected {old.shape}")
    latents = jnp.array(new, old.dtype, copy=True)
    if not bool(jnp.isfinite(latents).all()):
        what = "the latents returned by callback_on_step_end"
        raise NonFiniteError(stage, record.step, total, what, f"timestep {record.timestep:g}")
    return latents


def _one_step(
    programs: StepPrograms, operands: Any, solver: Solver, plan: StepPlan, state: LoopState, stage: str
) -> tuple[LoopState, StepRecord]:
    """Run one step to its end, check it and fetch its statistics."""
    i, grid = state.step, solver.grid
    args = (operands, state.latents, state.solver, np.asarray(i, np.int32), grid.timesteps[i : i + 1].reshape(()))
    program, compile_s = programs.get(solver, plan, args)
    began = time.perf_counter()
    latents, solver_state, stats, finite = program(*args)
    velocity_ok, latents_ok = np.asarray(finite)  # waits for the step
    seconds = time.perf_counter() - began
    if not (velocity_ok and latents_ok):
        what = "the latents" if velocity_ok else "values of the predicted velocity"
        raise NonFiniteError(stage, i, solver.steps, what, f"timestep {grid.timesteps[i]:g}")
    record = StepRecord(
        i, float(grid.timesteps[i]), float(grid.sigmas[i]), seconds, compile_s, plan, jax.device_get(stats)
    )  # fmt: skip
    return LoopState(i + 1, latents, solver_state), record


def run(
    programs: StepPrograms,
    operands: Any,
    solver: Solver,
    plans: Sequence[StepPlan],
    state: LoopState,
    *,
    progress: Progress | None = None,
    callback_on_step_end: StepEnd | None = None,
    stage: str = "denoise",
) -> LoopResult:
    """Run the steps from ``state`` to sigma = 0.

    Args:
      programs: compiled steps, kept by the caller between runs.
      operands: handed to the denoiser unread.
      solver: solver on its grid.
      plans: one a step; equal neighbours are one phase and share a program.
      state: from `start`, from an interrupted run, or from `load_state`. Not consumed.
      progress, callback_on_step_end: see `Progress` and `StepEnd`.
      stage: name for progress and errors.

    Raises:
      ValueError: plans that do not fit the steps, a state of another solver or grid.
      NonFiniteError: NaN or infinity, naming step and stage; no later step runs.
      SamplingInterrupted: Ctrl-C; carries the state after the last whole step.
    """
    if len(plans) != solver.steps:
        raise ValueError(f"one plan a step: got {len(plans)} plans for {solver.steps} steps")
    _check_resumable(state, solver)
    total, compiled_before = solver.steps, programs.compilations
    state = _copy(state)
    records: list[StepRecord] = []
    began, ctrl_c = time.perf_counter(), _CtrlC()
    try:
        with ctrl_c.listening():
            if progress:
                progress(stage, state.step, total, 0.0)
            while state.step < total:
                state, record = _one_step(programs, operands, solver, plans[state.step], state, stage)
                records.append(record)
                if callback_on_step_end:
                    new = callback_on_step_end(record.step, record.timestep, jnp.array(state.latents, copy=True))
                    if new is not None:
                        latents = _replaced(new, state.latents, record, stage, total)
                        state = LoopState(state.step, latents, state.solver)
                if progress:
                    progress(stage, state.step, total, time.perf_counter() - began)
                if ctrl_c.asked:
                    raise SamplingInterrupted(state, records, total)
    except SamplingInterrupted:
        raise
    except KeyboardInterrupt as error:  # from a callback, or a second Ctrl-C in the middle of a step
        if any(leaf.is_deleted() for leaf in jax.tree.leaves((state.latents, state.solver))):
            raise  # the step has consumed its input: there is nothing whole to keep
        raise SamplingInterrupted(state, records, total) from error
    return LoopResult(state.latents, tuple(records), programs.compilations - compiled_before, len(records))


def save_state(path: str | os.PathLike[str], state: LoopState, request: Mapping[str, Any]) -> None:
    """Write a run between two steps to a safetensors file, whole or not at all.

    Args:
      path: the file.
      state: what to keep.
      request: everything needed to build the same run again, of JSON types.
    """
    tensors = {"latents": state.latents, "solver.table": state.solver.table}
    if state.solver.sample is not None:
        tensors["solver.sample"] = state.solver.sample
    tensors |= {f"solver.history.{k}": h for k, h in enumerate(state.solver.history)}
    metadata = {
        "format": STATE_FORMAT,
        "step": str(state.step),
        "history": str(len(state.solver.history)),
        "request": json.dumps(dict(request), ensure_ascii=False),
    }
    with atomic_path(path) as partial:
        save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, partial, metadata)


def load_state(path: str | os.PathLike[str]) -> tuple[LoopState, dict[str, Any]]:
    """Read what `save_state` wrote.

    Returns:
      The state and the request.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is damaged or holds something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no saved state at {path}")
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != STATE_FORMAT:
                raise ValueError(
                    f"{path} is not a saved run (format {metadata.get('format')!r}, expected {STATE_FORMAT!r}); "
                    f"finished latents are decoded, not resumed"
                )
            names = set(file.keys())
            history = tuple(
                jnp.asarray(file.get_tensor(f"solver.history.{k}")) for k in range(int(metadata["history"]))
            )
            sample = jnp.asarray(file.get_tensor("solver.sample")) if "solver.sample" in names else None
            solver = SolverState(jnp.asarray(file.get_tensor("solver.table")), sample, history)
            state = LoopState(int(metadata["step"]), jnp.asarray(file.get_tensor("latents")), solver)
            return state, json.loads(metadata["request"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged and cannot be resumed: {error}") from error
