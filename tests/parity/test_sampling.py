"""Sigma grids and solver trajectories against diffusers 0.42.1, live."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from videodiff.sampling import solvers
from videodiff.sampling.sigmas import GridRule, dpmpp_grid, euler_grid, make_grid, unipc_grid
from videodiff.sampling.solvers import (
    DPMSolverPP,
    FlowEuler,
    Solver,
    UniPC,
    UniPCVariant,
    make_solver,
    spec_from_config,
)

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
schedulers = pytest.importorskip("diffusers.schedulers")

STEPS = (1, 2, 3, 4, 5, 8, 9, 14, 15, 20, 25, 40, 50, 100)
SHIFTS = (0.5, 1.0, 3.0, 5.0, 7.0, 8.0, 12.0, 16.0)
RUN_STEPS = (1, 2, 3, 4, 8, 20, 50)
RUN_SHIFTS = (1.0, 3.0, 5.0, 12.0, 16.0)
NOISE = np.random.default_rng(5).standard_normal((2, 4, 3, 5, 6)).astype(np.float32)
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def field(xp, x, sigma):
    """A nonlinear velocity, for numpy-like namespaces."""
    return xp.tanh(1.3 * x + 0.7 * sigma) - 0.4 * x * sigma + 0.3 * xp.cos(2 * x)


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def reference_run(scheduler, double: bool = False) -> list[np.ndarray]:
    """Latents after every step of a diffusers scheduler."""
    scheduler.set_begin_index(0)
    if double:  # its own arithmetic, on the same sigmas, without float32 noise
        scheduler.sigmas = scheduler.sigmas.double()
    x, out = torch.from_numpy(NOISE).to(torch.float64 if double else torch.float32), []
    for i, t in enumerate(scheduler.timesteps):
        v = field(torch, x, scheduler.sigmas[i].to(x.dtype))
        x = scheduler.step(v, t, x, return_dict=False)[0]
        out.append(x.numpy())
    return out


@functools.cache
def compiled_step(signature: tuple):
    """One compiled step for all solvers of a signature; the solver that comes first lends its `step`."""
    return jax.jit(FIRST_OF[signature].step)


FIRST_OF: dict[tuple, Solver] = {}


def our_run(solver: Solver, double: bool = False) -> list[np.ndarray]:
    dtype = np.float64 if double else np.float32
    x = jnp.asarray(NOISE, dtype)
    FIRST_OF.setdefault(solver.signature, solver)
    state, step, out = solver.init(x), compiled_step(solver.signature), []
    for i in range(solver.steps):
        x, state = step(state, np.int32(i), x, field(jnp, x, solver.sigmas[i].astype(dtype)))
        out.append(np.asarray(x))
    return out


def unipc_reference(steps: int, shift: float, order: int = 2, variant: str = "bh2", **more):
    scheduler = schedulers.UniPCMultistepScheduler(
        **FLOW, flow_shift=shift, solver_order=order, solver_type=variant, **more
    )  # fmt: skip
    scheduler.set_timesteps(steps)
    if variant == "bh1":
        # With bh1 the published class returns NaN at sigma = 0 (inf * 0). Its limit is what it gives just above 0.
        scheduler.sigmas[-1] = 1e-30
    return scheduler


def dpmpp_reference(steps: int, shift: float, order: int = 2, **more):
    scheduler = schedulers.DPMSolverMultistepScheduler(**FLOW, flow_shift=shift, solver_order=order, **more)
    scheduler.set_timesteps(steps)
    return scheduler


def euler_reference(steps: int, shift: float, twice: bool):
    scheduler = schedulers.FlowMatchEulerDiscreteScheduler(shift=shift)
    if twice:
        scheduler.set_timesteps(steps)
    else:
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist())
    return scheduler


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("name", ["unipc", "dpm++", "euler", "euler_twice"])
def test_grids(name: str, shift: float) -> None:
    for steps in STEPS:
        if name == "unipc":
            ours, theirs = unipc_grid(steps, shift), unipc_reference(steps, shift)
        elif name == "dpm++":
            ours, theirs = dpmpp_grid(steps, shift), dpmpp_reference(steps, shift)
        else:
            twice = name == "euler_twice"
            ours, theirs = euler_grid(steps, shift, twice=twice), euler_reference(steps, shift, twice)
        np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=0, atol=1e-6, err_msg=f"{steps=}")
        told = theirs.timesteps.numpy()
        if np.issubdtype(told.dtype, np.integer):  # a truncation that goes the other way is a different input
            np.testing.assert_array_equal(ours.timesteps, told, err_msg=f"{steps=}")
        else:
            np.testing.assert_allclose(ours.timesteps, told, rtol=0, atol=1e-3, err_msg=f"{steps=}")


@pytest.mark.parametrize("train", [100, 500, 4000])
def test_grids_other_training_lengths(train: int) -> None:
    for rule, make in (
        (GridRule.UNIPC, lambda: schedulers.UniPCMultistepScheduler(**FLOW, flow_shift=4.0, num_train_timesteps=train)),
        (GridRule.EULER_TWICE, lambda: schedulers.FlowMatchEulerDiscreteScheduler(train, shift=4.0)),
    ):
        theirs = make()
        theirs.set_timesteps(12)
        ours = make_grid(rule, 12, 4.0, num_train_timesteps=train)
        np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), rtol=1e-6)


@pytest.mark.parametrize("steps", RUN_STEPS)
@pytest.mark.parametrize("variant", ["bh1", "bh2"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_unipc_trajectory(order: int, variant: str, steps: int) -> None:
    for shift in RUN_SHIFTS:
        theirs = reference_run(unipc_reference(steps, shift, order, variant))
        ours = our_run(UniPC(unipc_grid(steps, shift), order, UniPCVariant(variant)))
        assert np.std(theirs[-1]) > 0.1
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert relative(a, b) <= 2e-6, f"{shift=}, step {i}"


@pytest.mark.parametrize("variant", ["bh1", "bh2"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_unipc_formulas_in_float64(order: int, variant: str) -> None:
    """The same sigmas in double precision on both sides: what is left is algebra, not rounding."""
    with jax.enable_x64(True):
        for steps, shift in ((1, 3.0), (2, 5.0), (3, 1.0), (8, 3.0), (50, 5.0), (40, 12.0)):
            theirs = reference_run(unipc_reference(steps, shift, order, variant), double=True)
            ours = our_run(UniPC(unipc_grid(steps, shift), order, UniPCVariant(variant)), double=True)
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert relative(a, b) <= 1e-10, f"{steps=}, {shift=}, step {i}"


def test_unipc_bh1_is_nan_in_the_reference() -> None:
    """Why `unipc_reference` lifts the last sigma for bh1; drop that when this fails."""
    scheduler = schedulers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0, solver_type="bh1")
    scheduler.set_timesteps(4)
    assert np.isnan(reference_run(scheduler)[-1]).all()


@pytest.mark.parametrize("disable", [[0], [0, 1, 2], [3]])
def test_unipc_disable_corrector(disable: list[int]) -> None:
    theirs = unipc_reference(8, 3.0, disable_corrector=disable)
    ours = make_solver(spec_from_config({"_class_name": "UniPCMultistepScheduler", **theirs.config}), 8)
    a, b = our_run(ours)[-1], reference_run(theirs)[-1]
    assert relative(a, b) <= 2e-6
    assert relative(b, reference_run(unipc_reference(8, 3.0))[-1]) > 1e-5


@pytest.mark.parametrize("steps", RUN_STEPS)
@pytest.mark.parametrize("order", [1, 2])
def test_dpmpp_trajectory(order: int, steps: int) -> None:
    for shift in RUN_SHIFTS:
        theirs = reference_run(dpmpp_reference(steps, shift, order))
        ours = our_run(DPMSolverPP(dpmpp_grid(steps, shift), order))
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert relative(a, b) <= 2e-6, f"{shift=}, step {i}"


@pytest.mark.parametrize("order", [1, 2])
def test_dpmpp_formulas_in_float64(order: int) -> None:
    with jax.enable_x64(True):
        for steps, shift in ((1, 3.0), (2, 5.0), (3, 1.0), (8, 3.0), (50, 5.0), (40, 12.0)):
            scheduler = dpmpp_reference(steps, shift, order)
            scheduler.sigmas = scheduler.sigmas.double()
            ours = our_run(DPMSolverPP(dpmpp_grid(steps, shift), order), double=True)
            x, outputs = torch.from_numpy(NOISE).double(), []
            for i in range(steps):
                # `step` casts the sample to float32 first, so its update rules are called one by one.
                scheduler._step_index = i
                outputs.append(scheduler.convert_model_output(field(torch, x, scheduler.sigmas[i]), sample=x))
                if order == 1 or i in (0, steps - 1):
                    x = scheduler.dpm_solver_first_order_update(outputs[-1], sample=x)
                else:
                    x = scheduler.multistep_dpm_solver_second_order_update(outputs, sample=x)
                assert relative(ours[i], x.numpy()) <= 1e-10, f"{steps=}, {shift=}, step {i}"


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("steps", RUN_STEPS)
def test_euler_trajectory(steps: int, twice: bool) -> None:
    for shift in RUN_SHIFTS:
        theirs = reference_run(euler_reference(steps, shift, twice))
        ours = our_run(FlowEuler(euler_grid(steps, shift, twice=twice)))
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert relative(a, b) <= 2e-6, f"{shift=}, step {i}"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: schedulers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0), UniPC),
        (lambda: schedulers.UniPCMultistepScheduler(**FLOW, solver_order=3, solver_type="bh1", flow_shift=7.0), UniPC),
        (lambda: schedulers.DPMSolverMultistepScheduler(**FLOW, flow_shift=5.0, final_sigmas_type="zero"), DPMSolverPP),
        (lambda: schedulers.FlowMatchEulerDiscreteScheduler(shift=3.0), FlowEuler),
    ],
)
def test_configs_as_the_classes_save_them(make, kind, tmp_path) -> None:
    """Every field a class writes is known here."""
    make().save_pretrained(tmp_path)
    solver = make_solver(spec_from_config(json.loads((tmp_path / "scheduler_config.json").read_text())), 8)
    assert type(solver) is kind
    if kind is not FlowEuler:
        theirs = make()
        theirs.set_timesteps(8)
        if kind is UniPC and theirs.config.solver_type == "bh1":
            theirs.sigmas[-1] = 1e-30
        assert relative(our_run(solver)[-1], reference_run(theirs)[-1]) <= 2e-6


def test_config_defaults_are_the_classes_own() -> None:
    """The defaults assumed for absent fields, against the signatures."""
    for name, fields in solvers._FIELDS.items():
        signature = inspect.signature(getattr(schedulers, name).__init__).parameters
        assert set(fields) == set(signature) - {"self"}, name
        for key, (default, _) in fields.items():
            assert signature[key].default == default, f"{name}.{key}"


def test_spec_of_other_shift_changes_the_run() -> None:
    spec = spec_from_config({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})
    once = make_solver(spec, 8)
    twice = make_solver(dataclasses.replace(spec, rule=GridRule.EULER_TWICE), 8)
    assert relative(our_run(once)[-1], our_run(twice)[-1]) > 1e-3
