"""Solvers for the flow-matching ODE dx/dsigma = v, as init/step with explicit state.

Owns: UniPC, flow-match Euler and DPM++ 2M as tables of per-step coefficients, and `SolverSpec` with the published
scheduler configs it is read from. Does not own: sigma spacing (`sigmas`), the loop, guidance.
Invariant: all coefficients are computed on the host in float64 and sit in the state as an array indexed by the traced
step, so one compiled step serves every step, shift and (up to padding) number of steps, with no branch and no inf * 0.
"""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from videodiff.errors import closest
from videodiff.sampling.sigmas import TRAIN_TIMESTEPS, GridRule, SigmaGrid, check_shift, explicit_grid, make_grid

TABLE_ROWS = 64  # tables are padded to a multiple of this, so that the number of steps does not change the program


class SolverKind(enum.Enum):
    UNIPC = "unipc"
    EULER = "euler"
    DPMPP = "dpm++"


class UniPCVariant(enum.Enum):
    """The function B(h) of the UniPC paper (arXiv 2302.04867): h itself, or expm1(h)."""

    BH1 = "bh1"
    BH2 = "bh2"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SolverState:
    """Everything a solver carries from step to step.

    Args:
      table: [rows, K] coefficients, in the latents' dtype.
      sample: the latents before the last prediction (UniPC's corrector starts there), or None.
      history: x0 predictions of past steps, newest first, each shaped like the latents; zeros until there are any.
    """

    table: jax.Array
    sample: jax.Array | None
    history: tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class Solver(abc.ABC):
    """A solver bound to a grid.

    Args:
      grid: the noise levels. Solvers work on its sigmas rounded to float32, which is what every published
        implementation stores: 1 - 0.999999 is 1.013e-6 there, and that shifts the first log-SNR by 0.013.
    """

    grid: SigmaGrid

    @cached_property
    def sigmas(self) -> np.ndarray:
        """[n + 1] float64, the float32 values of the grid."""
        return self.grid.sigmas.astype(np.float32).astype(np.float64)

    @property
    def steps(self) -> int:
        return self.grid.steps

    @property
    @abc.abstractmethod
    def signature(self) -> tuple:
        """What the compiled step depends on besides shapes."""

    @abc.abstractmethod
    def coefficients(self) -> np.ndarray:
        """[n, K] float64, all finite."""

    @abc.abstractmethod
    def init(self, latents: jax.Array) -> SolverState:
        """State before step 0.

        Args:
          latents: float32 of any shape (float64 is kept as float64, for studies of the order).
        """

    @abc.abstractmethod
    def step(
        self, state: SolverState, i: jax.Array, latents: jax.Array, velocity: jax.Array
    ) -> tuple[jax.Array, SolverState]:
        """One step from sigma_i to sigma_{i+1}.

        Args:
          state: from `init` or the step before.
          i: int32 scalar, may be traced, 0 <= i < n.
          latents: x at sigma_i.
          velocity: v(x, sigma_i), the shape and dtype of the latents.

        Returns:
          x at sigma_{i+1}, and the next state.
        """

    def table(self, dtype: Any) -> jax.Array:
        """[n rounded up to TABLE_ROWS, K] coefficients on the device; the padding is never read."""
        c = self.coefficients()
        assert np.isfinite(c).all(), f"{type(self).__name__} on {self.grid.name} has a coefficient that is not finite"
        return jnp.asarray(np.pad(c, ((0, -len(c) % TABLE_ROWS), (0, 0))), dtype)


def _row(state: SolverState, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(state.table, i, keepdims=False)  # [K]


def _log_snr(sigmas: np.ndarray) -> np.ndarray:
    """lambda = log(1 - sigma) - log(sigma): -inf at sigma = 1, +inf at 0."""
    with np.errstate(divide="ignore"):
        return np.log1p(-sigmas) - np.log(sigmas)


class FlowEuler(Solver):
    """x += (sigma_{i+1} - sigma_i) * v."""

    @property
    def signature(self) -> tuple:
        return ("euler",)

    def coefficients(self) -> np.ndarray:
        return np.diff(self.sigmas)[:, None]

    def init(self, latents: jax.Array) -> SolverState:
        return SolverState(self.table(latents.dtype), None, ())

    def step(self, state, i, latents, velocity):
        with jax.named_scope("euler_step"):
            return latents + _row(state, i)[0] * velocity, state


@dataclass(frozen=True, eq=False)
class DPMSolverPP(Solver):
    """DPM-Solver++(2M), midpoint form (arXiv 2211.01095, algorithm 2), data prediction.

    The first and the last step are first order. From sigma = 1 (log-SNR -inf) the second one is too: its difference
    term has weight h_1 / h_0 = 0.

    Args:
      order: 1 (DDIM in flow form) or 2.

    Raises:
      ValueError: another order.
    """

    order: int = 2

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise ValueError(f"solver_order={self.order} must be 1 or 2 for the dpm++ solver; unipc has order 3")

    @property
    def signature(self) -> tuple:
        return ("dpm++",)

    def coefficients(self) -> np.ndarray:
        """Columns: sigma_i, weight of x, of m, of m - m_prev."""
        s, lam = self.sigmas, _log_snr(self.sigmas)
        out = np.zeros((self.steps, 4))
        for i in range(self.steps):
            h = lam[i + 1] - lam[i]
            gain = -(1 - s[i + 1]) * np.expm1(-h)
            second = 0.0
            if self.order == 2 and 0 < i < self.steps - 1:
                second = 0.5 * gain * h / (lam[i] - lam[i - 1])
            out[i] = s[i], s[i + 1] / s[i], gain, second
        return out

    def init(self, latents: jax.Array) -> SolverState:
        return SolverState(self.table(latents.dtype), None, (jnp.zeros_like(latents),))

    def step(self, state, i, latents, velocity):
        with jax.named_scope("dpmpp_step"):
            sigma, keep, first, second = _row(state, i)
            m = latents - sigma * velocity
            x = keep * latents + first * m + second * (m - state.history[0])
            return x, SolverState(state.table, None, (m,))


def _phi(k: int, z: float) -> float:
    """phi_k(z) = sum_j z^j / (j + k)!, with phi_0 = exp: the exponential integrator functions."""
    if abs(z) < 1:  # the recurrence below loses k * log10(1/z) digits here; 20 terms reach float64
        return math.fsum(z**j / math.factorial(j + k) for j in range(20))
    value = math.exp(z)
    for j in range(k):
        value = (value - 1 / math.factorial(j)) / z
    return value


@dataclass(frozen=True, eq=False)
class UniPC(Solver):
    """UniPC multistep: UniP predictor and UniC corrector (arXiv 2302.04867), data prediction, as in diffusers 0.42.1.

    The corrector refines the sample the last prediction made, from the model output that prediction produced, so it
    costs no model call. Orders rise from 1 at the start and fall to 1 at the end.

    Args:
      order: 1 to 3, of the predictor; the corrector gains one.
      variant: B(h).
      disable_corrector: steps after which the corrector is skipped.

    Raises:
      ValueError: an order outside 1 to 3, or a grid that starts at sigma = 1.
    """

    order: int = 2
    variant: UniPCVariant = UniPCVariant.BH2
    disable_corrector: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.order not in (1, 2, 3):
            raise ValueError(f"solver_order={self.order} must be 1, 2 or 3")
        if self.sigmas[0] >= 1:
            raise ValueError(
                f"UniPC cannot start at sigma = 1, where log(1 - sigma) is infinite; got the grid {self.grid.name!r}; "
                f"use 0.999999 (explicit_grid(..., below_one=True)) or the euler or dpm++ solver"
            )

    @property
    def signature(self) -> tuple:
        return ("unipc", self.order)

    def _order_at(self, i: int) -> int:
        return min(self.order, self.steps - i, i + 1)

    def _weights(self, i0: int, i1: int, order: int, corrector: bool) -> tuple[float, float, float, list[float]]:
        """One update from sigma_i0 to sigma_i1 with past outputs m_{i0}, m_{i0-1}, ...

        Returns:
          weight of x, of m_{i0}, of the new output minus m_{i0} (0 for the predictor), of m_{i0-k} - m_{i0}, k >= 1.
        """
        s, lam = self.sigmas, _log_snr(self.sigmas)
        alpha, h = 1 - s[i1], lam[i1] - lam[i0]
        keep, gain = s[i1] / s[i0], -alpha * np.expm1(-h)
        if order == 1 and not corrector:
            return keep, gain, 0.0, []  # also the last step, where h is inf and gain is 1
        assert np.isfinite(h)
        b_h = -h if self.variant is UniPCVariant.BH1 else math.expm1(-h)
        ratios = [(lam[i0 - k] - lam[i0]) / h for k in range(1, order)]
        nodes = np.array([*ratios, 1.0])
        matrix = np.stack([nodes**j for j in range(order)])
        # diffusers' b_j = j! * phi-recurrence / B(h); with z = -h its h_phi_k is z * phi_{k+1}(z).
        rhs = np.array([math.factorial(j) * -h * _phi(j + 1, -h) / b_h for j in range(1, order + 1)])
        if corrector:
            rhos = np.linalg.solve(matrix, rhs) if order > 1 else np.array([0.5])
            new = float(rhos[-1])
        else:  # the reference fixes order 2 at 1/2
            rhos = np.linalg.solve(matrix[:-1, :-1], rhs[:-1]) if order > 2 else np.array([0.5])
            new = 0.0
        scale = -alpha * b_h
        return keep, gain, scale * new, [scale * float(rho) / r for rho, r in zip(rhos, ratios, strict=False)]

    def coefficients(self) -> np.ndarray:
        """Columns: sigma_i | corrector: weight of x, of the old sample, of m_{i-1}, of m_i - m_{i-1}, then of
        m_{i-1-k} - m_{i-1} for k = 1 .. order-1 | predictor: weight of x, of m_i, then of m_{i-k} - m_i."""
        p = self.order
        out = np.zeros((self.steps, 7 + 2 * (p - 1)))
        for i in range(self.steps):
            row = out[i]
            row[0] = self.sigmas[i]
            if i == 0 or i - 1 in self.disable_corrector:
                row[1] = 1.0
            else:
                row[2], row[3], row[4], past = self._weights(i - 1, i, self._order_at(i - 1), corrector=True)
                row[5 : 5 + len(past)] = past
            row[4 + p], row[5 + p], _, past = self._weights(i, i + 1, self._order_at(i), corrector=False)
            row[6 + p : 6 + p + len(past)] = past
        return out

    def init(self, latents: jax.Array) -> SolverState:
        return SolverState(
            self.table(latents.dtype),
            jnp.zeros_like(latents),
            tuple(jnp.zeros_like(latents) for _ in range(self.order)),
        )

    def step(self, state, i, latents, velocity):
        p, c = self.order, _row(state, i)
        with jax.named_scope("unipc_step"):
            m = latents - c[0] * velocity
            last, *older = state.history
            x = c[1] * latents + c[2] * state.sample + c[3] * last + c[4] * (m - last)
            for k, old in enumerate(older):
                x = x + c[5 + k] * (old - last)
            history = (m, *state.history[:-1])
            y = c[4 + p] * x + c[5 + p] * m
            for k, old in enumerate(history[1:]):
                y = y + c[6 + p + k] * (old - m)
            return y, SolverState(state.table, x, history)


@dataclass(frozen=True)
class SolverSpec:
    """Which solver on which grid, before the number of steps is known.

    Args:
      kind: the solver.
      rule: sigma spacing.
      shift: default flow shift; a request may override it.
      order: 1 to 3 for UniPC, 1 or 2 for DPM++; Euler has none.
      variant: UniPC's B(h).
      disable_corrector: UniPC steps after which the corrector is skipped.
      num_train_timesteps: what sigma = 1 is called.

    Raises:
      ValueError: an illegal order, shift or number of training timesteps.
    """

    kind: SolverKind = SolverKind.UNIPC
    rule: GridRule = GridRule.UNIPC
    shift: float = 1.0
    order: int = 2
    variant: UniPCVariant = UniPCVariant.BH2
    disable_corrector: tuple[int, ...] = ()
    num_train_timesteps: int = TRAIN_TIMESTEPS

    def __post_init__(self) -> None:
        orders = {SolverKind.UNIPC: (1, 2, 3), SolverKind.DPMPP: (1, 2)}.get(self.kind)
        if orders and self.order not in orders:
            raise ValueError(f"solver_order={self.order} must be one of {orders} for {self.kind.value}")
        check_shift(self.shift)
        if self.num_train_timesteps < 2:
            raise ValueError(f"num_train_timesteps={self.num_train_timesteps} must be at least 2")


_NAMED: dict[str, SolverSpec] = {
    "unipc": SolverSpec(),
    "unipc_official": SolverSpec(rule=GridRule.UNIPC_OFFICIAL),
    "euler": SolverSpec(SolverKind.EULER, GridRule.EULER),
    "euler_twice": SolverSpec(SolverKind.EULER, GridRule.EULER_TWICE),
    "dpm++": SolverSpec(SolverKind.DPMPP, GridRule.UNIPC_OFFICIAL),
    "dpm++_official": SolverSpec(SolverKind.DPMPP, GridRule.DPMPP_OFFICIAL),
}


def solver_names() -> tuple[str, ...]:
    """Names `solver_spec` and `make_solver` take; `_official` and `_twice` mean the other published grid."""
    return tuple(_NAMED)


def solver_spec(name: str) -> SolverSpec:
    """The spec of a named solver, at shift 1.

    Raises:
      ValueError: unknown name.
    """
    if name not in _NAMED:
        raise ValueError(f"solver={name!r} is unknown; {closest(name, _NAMED)}")
    return _NAMED[name]


def make_solver(
    which: str | SolverSpec,
    steps: int | None = None,
    shift: float | None = None,
    *,
    sigmas: Sequence[float] | None = None,
    timesteps: Sequence[float] | None = None,
) -> Solver:
    """Build a solver.

    Args:
      which: a name of `solver_names` or a spec.
      steps: number of model evaluations; not with a list.
      shift: flow shift; None is the spec's. With a list, None takes the list as it is and a number warps it once.
      sigmas, timesteps: an explicit list as in `explicit_grid`, for distilled recipes.

    Raises:
      ValueError: unknown name, steps < 1, shift <= 0, or a list together with a number of steps that differs.
    """
    spec = solver_spec(which) if isinstance(which, str) else which
    if sigmas is not None or timesteps is not None:
        grid = explicit_grid(
            sigmas, timesteps, shift=shift, below_one=spec.kind is SolverKind.UNIPC,
            num_train_timesteps=spec.num_train_timesteps,
        )  # fmt: skip
        if steps is not None and steps != grid.steps:
            raise ValueError(
                f"num_inference_steps={steps} does not fit the explicit list of {grid.steps}; leave it out"
            )
    elif steps is None:
        raise ValueError("a solver needs num_inference_steps or an explicit list of sigmas or timesteps")
    else:
        shift = spec.shift if shift is None else shift
        grid = make_grid(spec.rule, steps, shift, num_train_timesteps=spec.num_train_timesteps)
    if spec.kind is SolverKind.EULER:
        return FlowEuler(grid)
    if spec.kind is SolverKind.DPMPP:
        return DPMSolverPP(grid, spec.order)
    return UniPC(grid, spec.order, spec.variant, spec.disable_corrector)


# What a published scheduler_config.json may hold. Per class and field: the value the class assumes when the field is
# absent, and what this engine makes of it: the allowed values, _ANY for fields that change nothing under flow sigmas,
# or _READ for fields that end up in the spec.
_ANY, _READ = object(), object()
_BETAS: dict[str, tuple[Any, Any]] = {
    "beta_start": (0.0001, _ANY), "beta_end": (0.02, _ANY), "beta_schedule": ("linear", _ANY),
    "trained_betas": (None, _ANY),
    "rescale_betas_zero_snr": (False, _ANY), "timestep_spacing": ("linspace", _ANY), "steps_offset": (0, _ANY),
    "dynamic_thresholding_ratio": (0.995, _ANY), "sample_max_value": (1.0, _ANY),
    "time_shift_type": ("exponential", _ANY),
}  # fmt: skip
_FLOW: dict[str, tuple[Any, Any]] = {
    "num_train_timesteps": (1000, _READ), "solver_order": (2, _READ), "flow_shift": (1.0, _READ),
    "prediction_type": ("epsilon", ("flow_prediction",)), "use_flow_sigmas": (False, (True,)),
    "thresholding": (False, (False,)), "final_sigmas_type": ("zero", ("zero",)), "use_karras_sigmas": (False, (False,)),
    "use_exponential_sigmas": (False, (False,)), "use_beta_sigmas": (False, (False,)),
    "use_dynamic_shifting": (False, (False,)),
}  # fmt: skip
_FIELDS: dict[str, dict[str, tuple[Any, Any]]] = {
    "UniPCMultistepScheduler": _BETAS | _FLOW | {
        "predict_x0": (True, (True,)), "solver_type": ("bh2", _READ), "disable_corrector": ([], _READ),
        # false would ask for a second-order step to sigma = 0, which is 0/0 in the reference
        "lower_order_final": (True, (True,)), "solver_p": (None, (None,)), "shift_terminal": (None, (None,)),
        "sigma_min": (None, _ANY), "sigma_max": (None, _ANY),  # read by the other sigma kinds only
    },
    "DPMSolverMultistepScheduler": _BETAS | _FLOW | {
        "algorithm_type": ("dpmsolver++", ("dpmsolver++",)),
        "solver_type": ("midpoint", ("midpoint", "logrho", "bh1", "bh2")),  # the class reads the last three as midpoint
        # a final sigma of 0 makes the last step first order whatever these say, and order 2 has nothing else to lower
        "lower_order_final": (True, _ANY), "euler_at_final": (False, _ANY),
        "use_lu_lambdas": (False, (False,)), "lambda_min_clipped": (-math.inf, _ANY), "variance_type": (None, _ANY),
    },
    "FlowMatchEulerDiscreteScheduler": {
        "num_train_timesteps": (1000, _READ), "shift": (1.0, _READ), "use_dynamic_shifting": (False, (False,)),
        "invert_sigmas": (False, (False,)), "shift_terminal": (None, (None, 0)), "use_karras_sigmas": (False, (False,)),
        "use_exponential_sigmas": (False, (False,)), "use_beta_sigmas": (False, (False,)),
        "stochastic_sampling": (False, (False,)),
        "base_shift": (0.5, _ANY), "max_shift": (1.15, _ANY), "base_image_seq_len": (256, _ANY),
        "max_image_seq_len": (4096, _ANY), "time_shift_type": ("exponential", _ANY),  # dynamic shifting only
    },
}  # fmt: skip


def _allowed(value: Any, rule: Any) -> bool:
    # 0 == False and 1 == True in Python: accept them as each other, but nothing else
    return rule is _ANY or rule is _READ or any(value is a or (a is not None and value == a) for a in rule)


def spec_from_config(data: Mapping[str, Any], where: str = "scheduler/scheduler_config.json") -> SolverSpec:
    """Read a published scheduler config.

    Every field is honoured, or listed as changing nothing for flow sigmas, or refused by name. A field that is absent
    has the class's own default, so that a config without `use_flow_sigmas` is refused too.

    Args:
      data: the parsed JSON object.
      where: file name for messages.

    Raises:
      ValueError: an unknown scheduler class, unknown fields, or values this engine does not run; all named at once.
    """
    name = data.get("_class_name")
    if name not in _FIELDS:
        raise ValueError(f"{where}: _class_name={name!r} is not supported; {closest(str(name), _FIELDS)}")
    fields = _FIELDS[name]
    problems = [
        f"unknown field {key!r}; {closest(key, fields)}"
        for key in data
        if key not in fields and not key.startswith("_")
    ]
    values = {key: data.get(key, default) for key, (default, _) in fields.items()}
    for key, (_, rule) in fields.items():
        if not _allowed(values[key], rule):
            absent = "" if key in data else " (absent, so the class default)"
            problems.append(f"{key}={values[key]!r}{absent} is not supported; use {' or '.join(map(repr, rule))}")
    if problems:
        raise ValueError(f"{where}: {name}: " + "; ".join(problems))
    try:
        return _spec(name, values)
    except ValueError as error:
        raise ValueError(f"{where}: {name}: {error}") from error


def _spec(name: str, values: Mapping[str, Any]) -> SolverSpec:
    train = int(values["num_train_timesteps"])
    if name == "FlowMatchEulerDiscreteScheduler":
        return replace(_NAMED["euler"], shift=float(values["shift"]), num_train_timesteps=train)
    shift, order = float(values["flow_shift"]), int(values["solver_order"])
    if name == "DPMSolverMultistepScheduler":
        return replace(_NAMED["dpm++"], shift=shift, order=order, num_train_timesteps=train)
    solver_type = values["solver_type"]
    if solver_type in ("midpoint", "heun", "logrho"):  # the class reads these as bh2
        solver_type = "bh2"
    if solver_type not in ("bh1", "bh2"):
        raise ValueError(f"solver_type={solver_type!r} is not supported; use 'bh1' or 'bh2'")
    return SolverSpec(
        shift=shift,
        order=order,
        variant=UniPCVariant(solver_type),
        disable_corrector=tuple(values["disable_corrector"] or ()),
        num_train_timesteps=train,
    )
