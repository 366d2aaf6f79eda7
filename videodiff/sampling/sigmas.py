"""Sigma grids: which noise levels a sampler visits, and the timesteps the model is told.

Owns: every published grid rule for flow-matching Wan models, and explicit lists. Does not own: solver arithmetic.
Numpy only. Definitions: x_t = (1 - sigma) * x0 + sigma * noise, shift(s) = shift * s / (1 + (shift - 1) * s).
Invariant: sigmas fall strictly from at most 1 to exactly 0, also after rounding to float32, and the shift is applied
once (EULER_TWICE is the published exception, by name).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

TRAIN_TIMESTEPS = 1000
NUDGE = 1e-6  # diffusers' distance from sigma = 1, where log(1 - sigma) is -inf


class GridRule(enum.Enum):
    """How sigmas are spaced. The letters are common shorthand for the published variants."""

    UNIPC = "unipc"  # A: UniPC in diffusers >= 0.37
    UNIPC_OFFICIAL = "unipc_official"  # B: official FlowUniPC, diffusers <= 0.36, diffusers' flow DPM++
    DPMPP_OFFICIAL = "dpmpp_official"  # C: official flow DPM++, starts at exactly 1
    EULER_TWICE = "euler_twice"  # D: FlowMatchEuler's default call; its last sigma is shifted twice
    EULER = "euler"  # E: FlowMatchEuler on linspace(1, 1/n, n), shifted once


@dataclass(frozen=True, eq=False)
class SigmaGrid:
    """The noise levels of one run.

    Args:
      sigmas: [n + 1] float64 in [0, 1], falling, the last one 0.
      timesteps: [n] float32 in [0, num_train_timesteps], as the model sees them (some rules truncate them to integers;
        the sigmas never are).
      name: for reports.

    Raises:
      ValueError: fewer than one step, sigmas outside [0, 1] or not falling (in float32), lengths that do not fit.
    """

    sigmas: np.ndarray
    timesteps: np.ndarray
    name: str

    def __post_init__(self) -> None:
        sigmas = np.array(self.sigmas, np.float64)
        timesteps = np.array(self.timesteps, np.float32)
        if sigmas.ndim != 1 or len(sigmas) < 2:
            raise ValueError(f"a sigma grid needs at least one step and a final 0, got {len(sigmas)} sigmas")
        if timesteps.shape != (len(sigmas) - 1,):
            raise ValueError(f"a sigma grid needs one timestep a step: {len(sigmas) - 1} steps, {timesteps.shape=}")
        if not (np.isfinite(sigmas).all() and np.isfinite(timesteps).all()):
            raise ValueError(f"sigmas and timesteps must be finite, got {sigmas=}, {timesteps=}")
        if sigmas[0] > 1 or sigmas[-1] != 0:
            raise ValueError(f"sigmas must start at 1 or below and end at 0, got {sigmas[0]} ... {sigmas[-1]}")
        stuck = np.flatnonzero(np.diff(sigmas.astype(np.float32)) >= 0)
        if stuck.size:
            i = int(stuck[0])
            raise ValueError(
                f"sigmas must fall strictly, also in float32: sigmas[{i}]={sigmas[i]}, "
                f"sigmas[{i + 1}]={sigmas[i + 1]}; use fewer steps, a shift closer to 1, or a list without repeats"
            )
        for array in (sigmas, timesteps):
            array.setflags(write=False)
        object.__setattr__(self, "sigmas", sigmas)
        object.__setattr__(self, "timesteps", timesteps)

    @property
    def steps(self) -> int:
        """n, the number of model evaluations."""
        return len(self.timesteps)


def shifted(sigma: np.ndarray, shift: float) -> np.ndarray:
    """shift * s / (1 + (shift - 1) * s), in this order of operations: truncated timesteps depend on the last bit."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def _check(steps: int, shift: float, num_train_timesteps: int) -> None:
    if isinstance(steps, bool) or int(steps) != steps or steps < 1:
        raise ValueError(f"num_inference_steps={steps} must be a whole number, at least 1")
    check_shift(shift)
    if num_train_timesteps < 2:
        raise ValueError(f"num_train_timesteps={num_train_timesteps} must be at least 2")


def check_shift(shift: float) -> None:
    """Raises ValueError unless shift is finite and positive."""
    if not (np.isfinite(shift) and shift > 0):
        raise ValueError(
            f"flow_shift={shift} must be a finite number above 0; 1 leaves the grid as it is, Wan uses 3 to 16"
        )


def _below_one(sigmas: np.ndarray) -> np.ndarray:
    """diffusers' guard for UniPC: a first sigma within 1e-6 of 1 is lowered by 1e-6."""
    sigmas = sigmas.copy()
    if abs(sigmas[0] - 1) < NUDGE:
        sigmas[0] -= NUDGE
    return sigmas


def _unipc(steps: int, shift: float, train: int) -> np.ndarray:
    return _below_one(shifted(np.linspace(1, 1 / train, steps + 1)[:-1], shift))


def _unipc_official(steps: int, shift: float, train: int) -> np.ndarray:
    rising = 1.0 - np.linspace(1, 1 / train, steps + 1)
    return np.flip(shifted(rising, shift))[:-1]


def _dpmpp_official(steps: int, shift: float, train: int) -> np.ndarray:
    return shifted(np.linspace(1, 0, steps + 1)[:-1], shift)


def _euler_twice(steps: int, shift: float, train: int) -> np.ndarray:
    # The published class shifts its training table in float32 and reads the ends of the new grid from it.
    first = np.array([1 / np.float32(train)], np.float32)
    last = float(shifted(first, shift)[0])
    return shifted(np.linspace(1.0 * train, last * train, steps) / train, shift)


def _euler(steps: int, shift: float, train: int) -> np.ndarray:
    return shifted(np.linspace(1, 1 / steps, steps), shift)


_RULES: dict[GridRule, tuple[Callable[[int, float, int], np.ndarray], bool]] = {
    # rule: (sigmas without the final 0, are timesteps truncated to integers)
    GridRule.UNIPC: (_unipc, True),
    GridRule.UNIPC_OFFICIAL: (_unipc_official, True),
    GridRule.DPMPP_OFFICIAL: (_dpmpp_official, True),
    GridRule.EULER_TWICE: (_euler_twice, False),
    GridRule.EULER: (_euler, False),
}


def _timesteps(sigmas: np.ndarray, train: int, truncate: bool) -> np.ndarray:
    """Timesteps of sigmas [n]: truncated from the float64 product, or the float32 product of the float32 sigmas."""
    if truncate:
        return np.trunc(sigmas * train).astype(np.float32)
    return sigmas.astype(np.float32) * np.float32(train)


def make_grid(rule: GridRule, steps: int, shift: float, *, num_train_timesteps: int = TRAIN_TIMESTEPS) -> SigmaGrid:
    """A grid by rule.

    Args:
      rule: the spacing.
      steps: number of model evaluations, at least 1.
      shift: flow shift, above 0.
      num_train_timesteps: what sigma = 1 is called.

    Raises:
      ValueError: steps < 1, shift <= 0, or a grid so fine that float32 cannot tell neighbours apart.
    """
    _check(steps, shift, num_train_timesteps)
    spacing, truncate = _RULES[rule]
    sigmas = spacing(steps, float(shift), num_train_timesteps)
    return SigmaGrid(
        sigmas=np.append(sigmas, 0.0),
        timesteps=_timesteps(sigmas, num_train_timesteps, truncate),
        name=f"{rule.value} steps={steps} shift={shift:g}",
    )


def unipc_grid(
    steps: int, shift: float, *, official: bool = False, num_train_timesteps: int = TRAIN_TIMESTEPS
) -> SigmaGrid:
    """UniPC: diffusers 0.42.1 (grid A), or ``official`` for Wan's own code and diffusers <= 0.36 (grid B)."""
    rule = GridRule.UNIPC_OFFICIAL if official else GridRule.UNIPC
    return make_grid(rule, steps, shift, num_train_timesteps=num_train_timesteps)


def euler_grid(
    steps: int, shift: float, *, twice: bool = False, num_train_timesteps: int = TRAIN_TIMESTEPS
) -> SigmaGrid:
    """Flow-match Euler: shifted once (grid E), or ``twice`` as diffusers' default call does (grid D)."""
    rule = GridRule.EULER_TWICE if twice else GridRule.EULER
    return make_grid(rule, steps, shift, num_train_timesteps=num_train_timesteps)


def dpmpp_grid(
    steps: int, shift: float, *, official: bool = False, num_train_timesteps: int = TRAIN_TIMESTEPS
) -> SigmaGrid:
    """Flow DPM++: diffusers (grid B), or ``official`` for Wan's own code (grid C)."""
    rule = GridRule.DPMPP_OFFICIAL if official else GridRule.UNIPC_OFFICIAL
    return make_grid(rule, steps, shift, num_train_timesteps=num_train_timesteps)


def explicit_grid(
    sigmas: Sequence[float] | np.ndarray | None = None,
    timesteps: Sequence[float] | np.ndarray | None = None,
    *,
    shift: float | None = None,
    below_one: bool = False,
    num_train_timesteps: int = TRAIN_TIMESTEPS,
) -> SigmaGrid:
    """A grid from a list, with float timesteps: distilled few-step recipes.

    Args:
      sigmas: [n] falling, without the final 0. None reads them as timesteps / num_train_timesteps.
      timesteps: [n] what the model is told; None derives them from the sigmas as floats. When both are given, each is
        used as given.
      shift: None when the list is already warped (1000, 757, 522); a number when it is to be warped here, once
        ([1000, 750, 500, 250] with shift 5). Not allowed when both lists are given.
      below_one: lower a first sigma of 1 by 1e-6, as UniPC needs.
      num_train_timesteps: what sigma = 1 is called.

    Raises:
      ValueError: no list, an empty one, sigmas that do not fall or leave (0, 1], an illegal shift.
    """
    if sigmas is None and timesteps is None:
        raise ValueError("an explicit grid needs a list of sigmas or of timesteps")
    if sigmas is not None and timesteps is not None and shift is not None:
        raise ValueError(f"sigmas and timesteps are both given, so there is nothing to warp: drop {shift=}")
    given = np.array(sigmas if sigmas is not None else timesteps, np.float64)
    if given.ndim != 1 or not len(given):
        raise ValueError(f"an explicit grid needs a flat list of at least one value, got shape {given.shape}")
    values = given if sigmas is not None else given / num_train_timesteps
    if not ((values > 0) & (values <= 1)).all():
        what = "sigmas must be in (0, 1]" if sigmas is not None else f"timesteps must be in (0, {num_train_timesteps}]"
        raise ValueError(f"{what}, without the final 0, got {given.tolist()}")
    if shift is not None:
        check_shift(shift)
        values = shifted(values, float(shift))
    if below_one:
        values = _below_one(values)
    if sigmas is not None and timesteps is not None:
        told = np.array(timesteps, np.float32)
    else:
        told = _timesteps(values, num_train_timesteps, truncate=False)
    return SigmaGrid(np.append(values, 0.0), told, name=f"explicit steps={len(values)}")


def refinement_sigmas(steps: int, shift: float, strength: float) -> np.ndarray:
    """Noise levels of a refinement: spaced as the whole grid is, from ``strength`` down.

    Args:
      steps: number of model evaluations, at least 1.
      shift: flow shift, above 0.
      strength: the first level, in (0, 1).

    Returns:
      [steps] float64, without the final 0, for :func:`explicit_grid`.

    Raises:
      ValueError: a value out of range.
    """
    _check(steps, shift, TRAIN_TIMESTEPS)
    if not 0 < strength < 1:
        raise ValueError(f"denoise_strength={strength} must be in (0, 1): the noise level at which refinement begins")
    unshifted = strength / (shift - (shift - 1) * strength)  # the inverse of `shifted`
    return shifted(np.linspace(unshifted, 0, steps + 1)[:-1], shift)
