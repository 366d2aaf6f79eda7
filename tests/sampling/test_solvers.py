"""Solvers against stored trajectories of diffusers 0.42.1 and on ODEs with closed solutions. No model anywhere."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from videodiff.sampling.sigmas import GridRule, dpmpp_grid, euler_grid, explicit_grid, unipc_grid
from videodiff.sampling.solvers import (
    DPMSolverPP,
    FlowEuler,
    Solver,
    SolverKind,
    SolverSpec,
    UniPC,
    UniPCVariant,
    make_solver,
    solver_names,
    solver_spec,
    spec_from_config,
)

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "goldens" / "sampling.npz")
NOISE = GOLDEN["noise"]
PROGRAMS: dict[tuple, object] = {}


def step_of(solver: Solver):
    """The compiled step, shared by all solvers of one signature: the coefficients are data."""
    return PROGRAMS.setdefault(solver.signature, jax.jit(solver.step))


def field(x, sigma):
    """The velocity of tests/goldens/make_sampling.py."""
    return jnp.tanh(1.3 * x + 0.7 * sigma) - 0.4 * x * sigma + 0.3 * jnp.cos(2 * x)


def run(solver: Solver, velocity=field, x=NOISE, dtype=np.float32) -> list[np.ndarray]:
    """Latents after every step."""
    x = jnp.asarray(x, dtype)
    state, step, out = solver.init(x), step_of(solver), []
    for i in range(solver.steps):
        x, state = step(state, np.int32(i), x, velocity(x, solver.sigmas[i].astype(dtype)))
        out.append(np.asarray(x))
    return out


def kept(states: list[np.ndarray]) -> list[np.ndarray]:
    n = len(states)
    return states if n <= 8 else [states[i] for i in [*range(9, n - 1, 10), n - 1]]


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def build(name: str, order: str, variant: str, steps: int, shift: float) -> Solver:
    if name == "unipc":
        return UniPC(unipc_grid(steps, shift), int(order), UniPCVariant(variant))
    if name == "dpm++":
        return DPMSolverPP(dpmpp_grid(steps, shift), int(order))
    return FlowEuler(euler_grid(steps, shift, twice=name == "euler_twice"))


RUNS = sorted({k.rsplit("/", 2)[0] for k in GOLDEN.files if k.startswith("run/")})


@pytest.mark.parametrize("family", RUNS)
def test_stored_trajectories(family: str) -> None:
    _, name, order, variant = family.split("/")
    keys = [k for k in GOLDEN.files if k.startswith(family + "/")]
    assert len(keys) == 28  # steps 1, 2, 3, 4, 8, 20, 50 x four shifts
    for key in keys:
        steps, shift = key.split("/")[-2:]
        ours = kept(run(build(name, order, variant, int(steps), float(shift))))
        assert len(ours) == len(GOLDEN[key])
        for a, b in zip(ours, GOLDEN[key], strict=True):
            assert relative(a, b) <= 2e-6, key


def test_every_solver_is_covered() -> None:
    assert len(RUNS) == 6 + 2 + 2
    finals = [GOLDEN[f"{family}/8/3"][-1] for family in RUNS]
    for i, a in enumerate(finals):
        for j, b in enumerate(finals[:i]):
            assert relative(a, b) > 4e-6, f"{RUNS[i]} and {RUNS[j]} could not be told apart"


def test_disabled_corrector() -> None:
    ours = run(UniPC(unipc_grid(8, 3.0), disable_corrector=(0, 1, 2)))
    for a, b in zip(ours, GOLDEN["corrector_off"], strict=True):
        assert relative(a, b) <= 2e-6
    assert relative(ours[-1], run(UniPC(unipc_grid(8, 3.0)))[-1]) > 1e-5


ALL = [
    *(UniPC(unipc_grid(6, 5.0), o, v) for o in (1, 2, 3) for v in UniPCVariant),
    DPMSolverPP(dpmpp_grid(6, 5.0)),
    DPMSolverPP(dpmpp_grid(6, 5.0, official=True)),
    DPMSolverPP(dpmpp_grid(6, 5.0), 1),
    FlowEuler(euler_grid(6, 5.0)),
    FlowEuler(euler_grid(6, 5.0, twice=True)),
]


def label(solver) -> str:
    return "-".join(str(p) for p in (*solver.signature, getattr(solver, "variant", ""), solver.grid.name))


@pytest.mark.parametrize("solver", ALL, ids=label)
def test_straight_paths_are_exact(solver: Solver) -> None:
    """x = (1 - sigma) * data + sigma * noise: the velocity is constant, and every solver ends at the data."""
    data = np.random.default_rng(1).standard_normal(NOISE.shape).astype(np.float32)
    s0 = np.float32(solver.sigmas[0])
    states = run(solver, lambda x, sigma: jnp.asarray(NOISE - data), (1 - s0) * data + s0 * NOISE)
    for state, sigma in zip(states, solver.sigmas[1:], strict=True):
        np.testing.assert_allclose(state, (1 - sigma) * data + sigma * NOISE, rtol=0, atol=3e-6)


@pytest.mark.parametrize("solver", ALL, ids=label)
def test_traced_step_equals_eager(solver: Solver) -> None:
    x = jnp.asarray(NOISE)
    eager_state, jit_state = solver.init(x), solver.init(x)
    eager_x = jit_x = x
    step = jax.jit(solver.step)
    for i in range(solver.steps):
        eager_x, eager_state = solver.step(eager_state, i, eager_x, field(eager_x, np.float32(solver.sigmas[i])))
        jit_x, jit_state = step(jit_state, np.int32(i), jit_x, field(jit_x, np.float32(solver.sigmas[i])))
        for a, b in zip(jax.tree.leaves((eager_x, eager_state)), jax.tree.leaves((jit_x, jit_state)), strict=True):
            assert a.dtype == b.dtype == jnp.float32
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    assert step._cache_size() == 1


def test_one_program_for_every_step_shift_and_count() -> None:
    first = make_solver("unipc", 8, 3.0)
    step, x = jax.jit(first.step), jnp.asarray(NOISE)
    for solver in (first, make_solver("unipc", 50, 12.0), make_solver("unipc_official", 4, 1.0)):
        state, y = solver.init(x), x
        for i in range(3):
            y, state = step(state, np.int32(i), y, field(y, np.float32(solver.sigmas[i])))
    assert step._cache_size() == 1


@pytest.mark.parametrize("name", solver_names())
@pytest.mark.parametrize("steps", [1, 2, 3, 64, 65, 130])
def test_coefficients_are_finite(name: str, steps: int) -> None:
    for order in (1, 2, 3) if "unipc" in name else (2,):
        spec = solver_spec(name)
        spec = SolverSpec(spec.kind, spec.rule, 16.0, order, UniPCVariant.BH1)
        solver = make_solver(spec, steps)
        assert np.isfinite(solver.coefficients()).all()
        assert solver.init(jnp.asarray(NOISE)).table.shape[0] == -(-steps // 64) * 64


@pytest.mark.parametrize("solver", ALL, ids=label)
def test_last_step_is_the_data_prediction(solver: Solver) -> None:
    """At sigma = 0 nothing of the noise is left: x - sigma * v, bit for bit up to one rounding."""
    x = jnp.asarray(NOISE)
    state = solver.init(x)
    for i in range(solver.steps):
        before, v = x, field(x, np.float32(solver.sigmas[i]))
        x, state = solver.step(state, i, x, v)
    expected = before - np.float32(solver.sigmas[-2]) * v
    np.testing.assert_allclose(x, expected, rtol=0, atol=5e-7)


# Gaussian data N(MEAN, STD^2): x at sigma is N((1 - sigma) * MEAN, (1 - sigma)^2 STD^2 + sigma^2), and the exact
# velocity keeps every point at its quantile.
MEAN, STD = 0.7, 0.4


def scale(sigma):
    return np.sqrt((1 - sigma) ** 2 * STD**2 + sigma**2)


def gaussian_velocity(x, sigma):
    slope = (sigma - (1 - sigma) * STD**2) / scale(sigma) ** 2
    return -MEAN + slope * (x - (1 - sigma) * MEAN)


def gaussian_error(solver: Solver, tail: int) -> float:
    """Error `tail` steps before the end, in float64."""
    z = np.linspace(-2, 2, 9).reshape(1, 1, 1, 1, 9)
    s = solver.sigmas
    with jax.enable_x64(True):
        x = (1 - s[0]) * MEAN + scale(s[0]) * z
        states = run(solver, gaussian_velocity, x, np.float64)
    at = s[-1 - tail]
    return float(np.abs(states[-1 - tail] - ((1 - at) * MEAN + scale(at) * z)).max())


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (lambda g: FlowEuler(g), 1),
        (lambda g: DPMSolverPP(g, 1), 1),
        (lambda g: DPMSolverPP(g, 2), 2),
        (lambda g: UniPC(g, 1), 2),
        (lambda g: UniPC(g, 2), 3),
        (lambda g: UniPC(g, 3), 4),
        (lambda g: UniPC(g, 1, UniPCVariant.BH1), 2),
        (lambda g: UniPC(g, 2, UniPCVariant.BH1), 3),
    ],
    ids=["euler", "dpm1", "dpm2", "unipc1", "unipc2", "unipc3", "unipc1-bh1", "unipc2-bh1"],
)
def test_order_of_convergence(make, order: int) -> None:
    """Halving the steps divides the error by 2^order; the corrector gains UniPC one order.

    Measured at sigma = 0.1, four steps before the end, where the falling orders of the last steps play no part.
    """
    errors = []
    for n in (40, 80, 160):
        grid = explicit_grid([*np.linspace(0.6, 0.1, n + 1), 0.05, 0.04, 0.03])
        errors.append(gaussian_error(make(grid), tail=4))
    slopes = np.log2(np.array(errors[:-1]) / errors[1:])
    assert (slopes > order - 0.3).all(), (errors, slopes)
    assert (slopes < order + 0.3).all(), (errors, slopes)


def test_higher_orders_win_on_a_sampling_grid() -> None:
    grid = unipc_grid(20, 1.0)
    errors = {o: gaussian_error(UniPC(grid, o), tail=0) for o in (1, 2, 3)}
    euler = gaussian_error(FlowEuler(euler_grid(20, 1.0)), tail=0)
    assert 4 * errors[3] < 2 * errors[2] < errors[1] < euler / 2, (errors, euler)


def test_state_is_float32_and_starts_empty() -> None:
    state = make_solver("unipc", 4, 3.0).init(jnp.asarray(NOISE))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    assert len(state.history) == 2
    assert not any(np.any(h) for h in (state.sample, *state.history))


class TestMakeSolver:
    def test_names(self) -> None:
        kinds = {name: type(make_solver(name, 4, 3.0)) for name in solver_names()}
        assert kinds == {
            "unipc": UniPC, "unipc_official": UniPC, "euler": FlowEuler, "euler_twice": FlowEuler,
            "dpm++": DPMSolverPP, "dpm++_official": DPMSolverPP,
        }  # fmt: skip

    def test_shift_of_the_spec_unless_given(self) -> None:
        spec = SolverSpec(shift=5.0)
        np.testing.assert_array_equal(make_solver(spec, 8).grid.sigmas, unipc_grid(8, 5.0).sigmas)
        np.testing.assert_array_equal(make_solver(spec, 8, 3.0).grid.sigmas, unipc_grid(8, 3.0).sigmas)

    def test_explicit_lists(self) -> None:
        solver = make_solver("euler", timesteps=[1000, 750, 500, 250], shift=5.0)
        np.testing.assert_allclose(solver.grid.timesteps, [1000, 937.5, 833.3333, 625], rtol=1e-6)
        assert make_solver("unipc", sigmas=[1.0, 0.5]).sigmas[0] < 1
        # the spec's own shift never warps a list behind the caller's back
        assert make_solver(SolverSpec(SolverKind.EULER, shift=5.0), sigmas=[0.9, 0.5]).grid.sigmas[1] == 0.5

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: make_solver("unipcc", 8, 3.0), "did you mean 'unipc'"),
            (lambda: make_solver("unipc", 0, 3.0), "num_inference_steps=0"),
            (lambda: make_solver("unipc", 8, 0.0), "flow_shift=0"),
            (lambda: make_solver("unipc"), "needs num_inference_steps or an explicit list"),
            (lambda: make_solver("euler", 3, sigmas=[0.9, 0.5]), "does not fit the explicit list of 2"),
            (lambda: UniPC(unipc_grid(4, 3.0), 4), "solver_order=4 must be 1, 2 or 3"),
            (lambda: UniPC(dpmpp_grid(4, 3.0, official=True)), "UniPC cannot start at sigma = 1"),
            (lambda: DPMSolverPP(dpmpp_grid(4, 3.0), 3), "solver_order=3 must be 1 or 2"),
            (lambda: SolverSpec(order=0), "solver_order=0"),
            (lambda: SolverSpec(shift=-1.0), "flow_shift=-1"),
            (lambda: SolverSpec(num_train_timesteps=1), "num_train_timesteps=1"),
        ],
    )
    def test_errors(self, call, message) -> None:
        with pytest.raises(ValueError, match=message):
            call()


# The scheduler config the published Wan folders carry.
PUBLISHED = {
    "_class_name": "UniPCMultistepScheduler", "_diffusers_version": "0.33.0.dev0", "beta_end": 0.02,
    "beta_schedule": "linear", "beta_start": 0.0001, "disable_corrector": [], "dynamic_thresholding_ratio": 0.995,
    "final_sigmas_type": "zero", "flow_shift": 3.0, "lower_order_final": True, "num_train_timesteps": 1000,
    "predict_x0": True, "prediction_type": "flow_prediction", "rescale_betas_zero_snr": False, "sample_max_value": 1.0,
    "solver_order": 2, "solver_p": None, "solver_type": "bh2", "steps_offset": 0, "thresholding": False,
    "timestep_spacing": "linspace", "trained_betas": None, "use_beta_sigmas": False, "use_exponential_sigmas": False,
    "use_flow_sigmas": True, "use_karras_sigmas": False,
}  # fmt: skip
DPM = {
    "_class_name": "DPMSolverMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True,
    "flow_shift": 5.0,
}  # fmt: skip
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0}


class TestConfigs:
    def test_published(self) -> None:
        assert spec_from_config(PUBLISHED) == SolverSpec(shift=3.0)
        assert spec_from_config(EULER) == SolverSpec(SolverKind.EULER, GridRule.EULER, 7.0)
        assert spec_from_config(DPM) == SolverSpec(SolverKind.DPMPP, GridRule.UNIPC_OFFICIAL, 5.0)

    @pytest.mark.parametrize(
        ("change", "field", "value"),
        [
            ({"flow_shift": 8.0}, "shift", 8.0),
            ({"solver_order": 3}, "order", 3),
            ({"solver_type": "bh1"}, "variant", UniPCVariant.BH1),
            ({"solver_type": "midpoint"}, "variant", UniPCVariant.BH2),  # as the class reads it
            ({"disable_corrector": [0, 1]}, "disable_corrector", (0, 1)),
            ({"num_train_timesteps": 500}, "num_train_timesteps", 500),
        ],
    )
    def test_honoured(self, change, field, value) -> None:
        assert getattr(spec_from_config(PUBLISHED | change), field) == value

    @pytest.mark.parametrize(
        ("config", "change"),
        [
            *((PUBLISHED, {key: value}) for key, value in {
                "prediction_type": "epsilon", "use_flow_sigmas": False, "predict_x0": False, "thresholding": True,
                "final_sigmas_type": "sigma_min", "lower_order_final": False, "use_karras_sigmas": True,
                "use_exponential_sigmas": True, "use_beta_sigmas": True, "use_dynamic_shifting": True,
                "shift_terminal": 0.1, "solver_p": {"_class_name": "DDIMScheduler"}, "solver_order": 4,
                "solver_type": "heun2", "flow_shift": 0.0,
            }.items()),
            *((DPM, {key: value}) for key, value in {
                "algorithm_type": "sde-dpmsolver++", "solver_type": "heun", "solver_order": 3, "use_lu_lambdas": True,
                "final_sigmas_type": "sigma_min", "prediction_type": "v_prediction",
            }.items()),
            *((EULER, {key: value}) for key, value in {
                "use_dynamic_shifting": True, "invert_sigmas": True, "shift_terminal": 0.02, "use_karras_sigmas": True,
                "stochastic_sampling": True, "shift": -2.0,
            }.items()),
        ],
        ids=lambda v: next(iter(v)) if len(v) == 1 else "",
    )  # fmt: skip
    def test_refused_by_name(self, config, change) -> None:
        key = next(iter(change)).removeprefix("flow_")
        with pytest.raises(ValueError, match=rf"scheduler_config.json: {config['_class_name']}: .*{key}"):
            spec_from_config(config | change)

    def test_absent_fields_have_the_class_default(self) -> None:
        """epsilon prediction and no flow sigmas: such a file is not a flow model's."""
        with pytest.raises(ValueError, match=r"prediction_type='epsilon' \(absent.*use_flow_sigmas=False \(absent"):
            spec_from_config({"_class_name": "UniPCMultistepScheduler"})

    def test_unknown_fields_and_classes(self) -> None:
        with pytest.raises(ValueError, match=r"unknown field 'flow_shif'; did you mean 'flow_shift'"):
            spec_from_config(PUBLISHED | {"flow_shif": 3.0})
        with pytest.raises(ValueError, match="'EulerDiscreteScheduler' is not supported; did you mean"):
            spec_from_config({"_class_name": "EulerDiscreteScheduler"})
        with pytest.raises(ValueError, match="_class_name=None"):
            spec_from_config({})

    def test_all_problems_at_once(self) -> None:
        with pytest.raises(ValueError, match=r"new_field.*thresholding.*use_karras_sigmas"):
            spec_from_config(PUBLISHED | {"thresholding": True, "use_karras_sigmas": True, "new_field": 1})
