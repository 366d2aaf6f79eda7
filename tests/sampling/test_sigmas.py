"""Sigma grids against published tables and against stored arrays of diffusers 0.42.1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from videodiff.sampling.sigmas import (
    GridRule,
    SigmaGrid,
    dpmpp_grid,
    euler_grid,
    explicit_grid,
    make_grid,
    refinement_sigmas,
    shifted,
    unipc_grid,
)

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "goldens" / "sampling.npz")

# Seven digits, as published: (steps, shift), first three sigmas, last three sigmas, first three t, last three t.
TABLE_A = [
    (50, 5, (0.9999990, 0.9959391, 0.9917441), (0.2449830, 0.1759692, 0.0967784), (999, 995, 991), (244, 175, 96)),
    (40, 12, (0.9999990, 0.9978700, 0.9956378), (0.4964649, 0.3918101, 0.2424313), (999, 997, 995), (496, 391, 242)),
    (8, 3, (0.9999990, 0.9545950, 0.9001200), (0.6434690, 0.5009990, 0.3016776), (999, 954, 900), (643, 500, 301)),
    (40, 5, (0.9999990, 0.9949031, 0.9895942), (0.2911904, 0.2116215, 0.1176511), (999, 994, 989), (291, 211, 117)),
    (50, 3, (0.9999990, 0.9932501, 0.9863154), (0.1629586, 0.1135759, 0.0604054), (999, 993, 986), (162, 113, 60)),
    (50, 16, (0.9999990, 0.9987274, 0.9974053), (0.5093987, 0.4059465, 0.2553282), (999, 998, 997), (509, 405, 255)),
    (4, 5, (0.9999990, 0.9375781, 0.8336110), (0.9375781, 0.8336110, 0.6259361), (999, 937, 833), (937, 833, 625)),
]
TABLE_B = [
    (50, 5, (0.9997998, 0.9957324, 0.9915305), (0.2417403, 0.1722651, 0.0925069), (999, 995, 991), (241, 172, 92)),
    (40, 12, (0.9999166, 0.9977826, 0.9955462), (0.4928803, 0.3868470, 0.2351095), (999, 997, 995), (492, 386, 235)),
    (8, 3, (0.9996665, 0.9541981, 0.8996398), (0.6424896, 0.4996665, 0.2997600), (999, 954, 899), (642, 499, 299)),
    (40, 5, (0.9997998, 0.9946948, 0.9893770), (0.2882396, 0.2081597, 0.1135330), (999, 994, 989), (288, 208, 113)),
    (50, 3, (0.9996665, 0.9929075, 0.9859633), (0.1605708, 0.1110082, 0.0576368), (999, 992, 985), (160, 111, 57)),
    (50, 16, (0.9999374, 0.9986624, 0.9973378), (0.5049971, 0.3997499, 0.2459645), (999, 998, 997), (504, 399, 245)),
]
TABLE_C = [  # sigmas are those of table E
    (50, 5, (1, 0.9959350, 0.9917355), (0.2419355, 0.1724138, 0.0925926), (1000, 995, 991), (241, 172, 92)),
    (40, 12, (1, 0.9978678, 0.9956332), (0.4931507, 0.3870968, 0.2352941), (1000, 997, 995), (493, 387, 235)),
    (8, 3, (1, 0.9545454, 0.9), (0.6428571, 0.5, 0.3), (1000, 954, 900), (642, 500, 300)),
]
TABLE_D = [
    (50, 5, (1, 0.9958716, 0.9916046), (0.1928036, 0.1148195, 0.0244141)),
    (40, 12, (1, 0.9978384, 0.9955715), (0.4446248, 0.3168124, 0.1259843)),
    (8, 3, (1, 0.9475425, 0.8827878), (0.5480456, 0.3379722, 0.0089286)),
    (4, 5, (1, 0.9097071, 0.7173175), (0.9097071, 0.7173175, 0.0244141)),
]
TABLE_E = [row[:4] for row in TABLE_C] + [(4, 5, (1, 0.9375, 0.8333333), (0.9375, 0.8333333, 0.625))]

TABLES = [
    *((GridRule.UNIPC, *row) for row in TABLE_A),
    *((GridRule.UNIPC_OFFICIAL, *row) for row in TABLE_B),
    *((GridRule.DPMPP_OFFICIAL, *row) for row in TABLE_C),
    *((GridRule.EULER_TWICE, *row, None, None) for row in TABLE_D),
    *((GridRule.EULER, *row, None, None) for row in TABLE_E),
]


@pytest.mark.parametrize(
    ("rule", "steps", "shift", "first", "last", "first_t", "last_t"),
    TABLES,
    ids=lambda v: v.value if isinstance(v, GridRule) else None,
)
def test_published_tables(rule, steps, shift, first, last, first_t, last_t) -> None:
    grid = make_grid(rule, steps, shift)
    assert grid.steps == steps
    assert grid.sigmas.dtype == np.float64
    assert grid.sigmas[-1] == 0
    np.testing.assert_allclose(grid.sigmas[:3], first, rtol=0, atol=1e-7)
    np.testing.assert_allclose(grid.sigmas[-4:-1], last, rtol=0, atol=1e-7)
    if first_t is None:
        np.testing.assert_allclose(grid.timesteps, grid.sigmas[:-1] * 1000, rtol=0, atol=1e-4)
    else:
        np.testing.assert_array_equal(grid.timesteps[:3], first_t)
        np.testing.assert_array_equal(grid.timesteps[-3:], last_t)


def test_published_grids_in_full() -> None:
    eight = unipc_grid(8, 3)
    sigmas = [0.999999, 0.954595, 0.900120, 0.8335555, 0.7503748, 0.643469, 0.500999, 0.3016776, 0]
    np.testing.assert_allclose(eight.sigmas, sigmas, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(eight.timesteps, [999, 954, 900, 833, 750, 643, 500, 301])
    twenty = "999 989 978 965 952 937 921 902 882 859 833 803 769 729 682 625 556 470 359 211"
    np.testing.assert_array_equal(unipc_grid(20, 5).timesteps, [int(t) for t in twenty.split()])
    euler = euler_grid(50, 5, twice=True).timesteps
    np.testing.assert_allclose(euler[:3], [1000, 995.8716, 991.6046], rtol=0, atol=1e-4)
    np.testing.assert_allclose(euler[-3:], [192.8036, 114.8195, 24.4141], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("steps", "shift", "boundary", "new", "old"),
    [
        (40, 12, 0.875, 26, 26), (40, 3, 0.875, 13, 12), (40, 5, 0.9, 15, 15), (40, 3, 0.9, 11, 10), (20, 5, 0.9, 8, 8),
        (20, 12, 0.875, 13, 13), (8, 5, 0.9, 3, 3), (4, 5, 0.875, 2, 2), (4, 5, 0.9, 2, 2),
    ],
)  # fmt: skip
def test_steps_above_the_expert_boundary(steps, shift, boundary, new, old) -> None:
    assert (unipc_grid(steps, shift).timesteps >= boundary * 1000).sum() == new
    assert (unipc_grid(steps, shift, official=True).timesteps >= boundary * 1000).sum() == old


MAKERS = {
    "unipc": unipc_grid,
    "dpm++": dpmpp_grid,
    "euler": euler_grid,
    "euler_twice": lambda steps, shift: euler_grid(steps, shift, twice=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_stored_grids_of_diffusers(name: str) -> None:
    keys = [k for k in GOLDEN.files if k.startswith(f"grid/{name}/") and k.endswith("/sigmas")]
    assert len(keys) == 28
    for key in keys:
        _, _, steps, shift, _ = key.split("/")
        grid = MAKERS[name](int(steps), float(shift))
        np.testing.assert_allclose(grid.sigmas, GOLDEN[key], rtol=0, atol=1e-6, err_msg=key)
        told = GOLDEN[key.replace("sigmas", "timesteps")]
        if np.issubdtype(told.dtype, np.integer):
            np.testing.assert_array_equal(grid.timesteps, told, err_msg=key)
        else:
            np.testing.assert_allclose(grid.timesteps, told, rtol=0, atol=1e-3, err_msg=key)


def test_the_variants_differ() -> None:
    assert abs(unipc_grid(8, 3).sigmas - unipc_grid(8, 3, official=True).sigmas).max() > 1e-3
    assert abs(euler_grid(8, 3).sigmas - euler_grid(8, 3, twice=True).sigmas).max() > 0.1
    assert dpmpp_grid(8, 3).sigmas[0] < 1 == dpmpp_grid(8, 3, official=True).sigmas[0]


@pytest.mark.parametrize("rule", GridRule)
def test_fine_grids(rule: GridRule) -> None:
    """Many steps at a high shift still fall strictly in float32; what cannot is refused, not bent."""
    grid = make_grid(rule, 200, 16)
    assert (np.diff(grid.sigmas.astype(np.float32)) < 0).all()
    with pytest.raises(ValueError, match=r"fall strictly.*fewer steps, a shift closer to 1"):
        make_grid(rule, 1000, 1e6)


@pytest.mark.parametrize("rule", GridRule)
@pytest.mark.parametrize("steps", [0, -3, 2.5, True])
def test_bad_steps(rule: GridRule, steps) -> None:
    with pytest.raises(ValueError, match=r"num_inference_steps=.* must be a whole number, at least 1"):
        make_grid(rule, steps, 3.0)


@pytest.mark.parametrize("rule", GridRule)
@pytest.mark.parametrize("shift", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_shift(rule: GridRule, shift: float) -> None:
    with pytest.raises(ValueError, match=r"flow_shift=.* must be a finite number above 0"):
        make_grid(rule, 8, shift)


def test_grids_are_frozen() -> None:
    grid = unipc_grid(4, 3)
    with pytest.raises(ValueError, match="read-only"):
        grid.sigmas[0] = 0.5
    with pytest.raises(ValueError, match="read-only"):
        grid.timesteps[0] = 5


class TestExplicit:
    """The lists of published few-step recipes."""

    def test_warped_here(self) -> None:
        """Self-Forcing and the 4-step distilled Wan: [1000, 750, 500, 250] warped by shift 5."""
        grid = explicit_grid(timesteps=[1000, 750, 500, 250], shift=5)
        np.testing.assert_allclose(grid.sigmas, [1, 0.9375, 5 / 6, 0.625, 0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(grid.timesteps, [1000, 937.5, 833.33333, 625], rtol=1e-7)
        assert grid.timesteps.dtype == np.float32

    def test_already_warped(self) -> None:
        """DMD lists are values on the shifted table: a second warp would be the common mistake."""
        grid = explicit_grid(timesteps=[1000, 757, 522])
        np.testing.assert_allclose(grid.sigmas, [1, 0.757, 0.522, 0], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(grid.timesteps, np.float32([1000, 757, 522]))

    def test_float_sigmas(self) -> None:
        """rCM: flow time t = sin a / (cos a + sin a) for a = atan(80), 1.5, 1.4, 1.0."""
        a = np.array([np.arctan(80), 1.5, 1.4, 1.0])
        t = np.sin(a) / (np.cos(a) + np.sin(a))
        grid = explicit_grid(t)
        np.testing.assert_allclose(grid.timesteps, [987.65, 933.78, 852.90, 608.98], rtol=0, atol=0.01)
        assert (grid.timesteps % 1 != 0).all()

    def test_both_lists(self) -> None:
        grid = explicit_grid([0.9, 0.4], [899, 400.5])
        np.testing.assert_array_equal(grid.timesteps, np.float32([899, 400.5]))
        np.testing.assert_array_equal(grid.sigmas, [0.9, 0.4, 0])

    def test_below_one(self) -> None:
        assert explicit_grid([1.0, 0.5], below_one=True).sigmas[0] == 1 - 1e-6
        assert explicit_grid([0.99, 0.5], below_one=True).sigmas[0] == 0.99

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({}, "needs a list"),
            ({"sigmas": []}, "at least one value"),
            ({"sigmas": [[1.0, 0.5]]}, "flat list"),
            ({"sigmas": [1.5, 0.5]}, r"sigmas must be in \(0, 1\]"),
            ({"sigmas": [1.0, 0.5, 0.0]}, "without the final 0"),
            ({"sigmas": [1.0, float("nan")]}, r"must be in \(0, 1\]"),
            ({"timesteps": [1001, 5]}, r"timesteps must be in \(0, 1000\]"),
            ({"sigmas": [0.5, 0.9]}, "fall strictly"),
            ({"sigmas": [0.9, 0.9]}, "fall strictly"),
            ({"sigmas": [0.9, 0.5], "shift": 0}, "flow_shift=0"),
            ({"sigmas": [0.9, 0.5], "timesteps": [900, 500], "shift": 3}, "nothing to warp"),
            ({"sigmas": [0.9, 0.5], "timesteps": [900]}, "one timestep a step"),
        ],
    )
    def test_bad_lists(self, kwargs, message) -> None:
        with pytest.raises(ValueError, match=message):
            explicit_grid(**kwargs)


@pytest.mark.parametrize(
    ("sigmas", "timesteps", "message"),
    [
        ([0.0], [], "at least one step"),
        ([0.9, 0.1], [900], "end at 0"),
        ([1.1, 0.0], [900], "start at 1 or below"),
        ([0.9, 0.0], [np.nan], "finite"),
        ([0.9, 0.9 - 1e-9, 0.0], [900, 900], "fall strictly"),
    ],
)
def test_bad_grids(sigmas, timesteps, message) -> None:
    with pytest.raises(ValueError, match=message):
        SigmaGrid(np.array(sigmas), np.array(timesteps), "test")


def test_refinement_is_the_end_of_the_whole_grid():
    """Started at a level of the whole grid, it goes on as the grid does."""
    levels = shifted(np.linspace(1, 0, 9), 5.0)
    tail = refinement_sigmas(3, 5.0, float(levels[5]))
    np.testing.assert_allclose(tail, levels[5:8], rtol=1e-12)
    np.testing.assert_allclose(refinement_sigmas(4, 1.0, 0.8), [0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("strength", [0.0, 1.0, -0.5, float("nan")])
def test_a_refinement_begins_between_noise_and_picture(strength):
    with pytest.raises(ValueError, match=r"denoise_strength=.* must be in \(0, 1\)"):
        refinement_sigmas(4, 5.0, strength)
