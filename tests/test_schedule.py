"""Schedules: the shipped files keep their promises, mistakes are named, plans cover every layer of every step."""

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from videodiff.schedule import (
    Segment,
    Sparsity,
    StepPlan,
    compile_schedule,
    load_schedule,
    parse_schedule,
    resolution_sizes,
    shipped_schedules,
)

SIZES = resolution_sizes()
LIMITS = {"conservative": (0.60, 0.40), "moderate": (0.52, 0.30), "aggressive": (0.45, 0.25)}
LAYERS = {"tiny": 6, "wan2.1-t2v-1.3b": 30, "wan2.1-t2v-14b": 40}


def compiled(name, model, resolution, steps=8, **kw):
    height, width = SIZES[resolution]
    options = {"sigmas": np.linspace(1, 0, steps + 1), "num_layers": LAYERS[model], "guided": True} | kw
    return compile_schedule(load_schedule(name), model=model, height=height, width=width, **options)


def test_the_four_are_there():
    assert shipped_schedules() == ("aggressive", "conservative", "dense", "moderate")


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("model", LAYERS)
def test_shipped_limits(name, model):
    density, dense = LIMITS[name]
    for sparsity in load_schedule(name).entries[model].values():
        assert sparsity.density <= density
        assert sparsity.dense_steps is not None
        assert sparsity.dense_steps <= dense
        if model != "tiny":
            assert sparsity.dense_layers >= 1
    for steps in (4, 8, 20, 40, 50):
        program = compiled(name, model, "720p", steps)
        count = sum(p.densities == (1.0,) * LAYERS[model] for p in program.plans)
        assert count <= dense * steps
        assert len(program.phases) <= 2


def test_schedules_are_ordered():
    for model in LAYERS:
        for resolution in ("480p", "720p", "1080p", "1440p"):
            d = [
                load_schedule(n).entries[model][resolution].density for n in ("aggressive", "moderate", "conservative")
            ]
            assert d == sorted(d)


def test_dense_is_one_phase_for_any_model():
    program = compiled("dense", "tiny", "1440p")
    assert not program.sparse
    assert len(program.phases) == 1
    assert compile_schedule(
        load_schedule("dense"), model="never heard of", height=64, width=64, sigmas=[1, 0], num_layers=3, guided=False
    ).plans == (StepPlan((Segment(0, 3, 1.0),), False),)


def test_nearest_resolution_is_taken_and_said():
    args = {"model": "tiny", "sigmas": np.linspace(1, 0, 9), "num_layers": 6, "guided": True}
    program = compile_schedule(load_schedule("aggressive"), height=704, width=1280, **args)
    assert program.resolution == "720p"
    assert any("1280x704 takes the numbers of 720p" in n for n in program.notes)
    portrait = compile_schedule(load_schedule("aggressive"), height=1280, width=720, **args)
    assert portrait.resolution == "720p"
    assert not any("takes the numbers" in n for n in portrait.notes)


def test_a_schedule_for_another_model_warns():
    data = {"name": "x", "models": {"tiny": {"resolutions": {"256p": {"density": 0.5}}}}}
    program = compile_schedule(
        parse_schedule(data, SIZES, "x.yaml"), model="wan2.1-t2v-14b", height=480, width=832, sigmas=[1, 0.5, 0],
        num_layers=40, guided=True,
    )  # fmt: skip
    assert any("made for tiny and not for wan2.1-t2v-14b" in n for n in program.notes)


@given(
    steps=st.integers(1, 60), layers=st.integers(1, 40), dense_layers=st.integers(0, 40), share=st.floats(0, 1),
    density=st.floats(0.01, 1), by_sigma=st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_every_layer_of_every_step_is_planned(steps, layers, dense_layers, share, density, by_sigma):
    key = "sigma" if by_sigma else "share"
    body = {
        "dense_steps": {key: share},
        "dense_layers": min(dense_layers, layers),
        "resolutions": {"480p": {"density": density}},
    }
    schedule = parse_schedule({"name": "x", "models": {"m": body}}, SIZES, "x.yaml")
    sigmas = np.linspace(1, 0, steps + 1)
    program = compile_schedule(
        schedule, model="m", height=480, width=832, sigmas=sigmas, num_layers=layers, guided=True
    )
    assert len(program.plans) == steps
    assert all(p.layers == layers for p in program.plans)
    assert sum(p.stop - p.start for p in program.phases) == steps
    assert len(program.phases) <= 2
    if density < 1 and dense_layers < layers and not by_sigma:
        count = sum(p.densities[-1] == 1 for p in program.plans)
        assert share * steps - 1 < count <= share * steps + 1e-6


GOOD = {"name": "x", "models": {"tiny": {"sink": "none", "resolutions": {"256p": {"density": 0.5}}}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("resolutions: {256p: {densty: 0.5}}", "unknown key 'densty'; did you mean 'density'"),
        ("resolutions: {257p: {density: 0.5}}", "unknown resolution '257p'; did you mean '256p'"),
        ("resolutions: {256p: {density: 0}}", r"density=0 must be in \(0, 1\]"),
        ("resolutions: {256p: {density: 1.2}}", r"density=1.2 must be in \(0, 1\]"),
        ("resolutions: {256p: {density: 40%}}", r"density='40%' must be in \(0, 1\]"),
        ("resolutions: {256p: {density: true}}", "density=True"),
        ("sink: prefx\n    resolutions: {256p: {density: 0.5}}", "sink='prefx' is unknown; did you mean 'prefix'"),
        ("dense_steps: 0.25\n    resolutions: {256p: {density: 0.5}}", "dense_steps must be a mapping with the keys share, sigma"),
        ("dense_steps: {share: 0.2, sigma: 0.9}\n    resolutions: {256p: {density: 0.5}}", "not both and not neither"),
        ("dense_steps: {share: 25}\n    resolutions: {256p: {density: 0.5}}", r"dense_steps=25 must be in \[0, 1\]"),
        ("dense_layers: 0.03\n    resolutions: {256p: {density: 0.5}}", "dense_layers=0.03 must be a whole number"),
        ("routing: {rows: 64}\n    resolutions: {256p: {density: 0.5}}", "unknown key 'rows'; did you mean 'probe_rows'"),
        ("density: 0.5", "resolutions are missing"),
        ("flow_shift: 0\n    resolutions: {256p: {density: 0.5}}", "flow_shift=0 must be a positive number"),
        ("sink: 3\n    resolutions: {256p: {density: 0.5}}", "sink=3 is unknown"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path, change, words):
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\nmodels:\n  tiny:\n    {change}\n")
    with pytest.raises(ValueError, match=words) as error:
        load_schedule(str(file))
    assert "mine.yaml" in str(error.value)


def test_files_that_are_not_schedules(tmp_path):
    with pytest.raises(ValueError, match="schedule='agressive' is unknown; did you mean 'aggressive'"):
        load_schedule("agressive")
    with pytest.raises(ValueError, match="does not exist"):
        load_schedule(str(tmp_path / "no.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_schedule(str(tmp_path / "bad.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="must be a mapping"):
        load_schedule(str(tmp_path / "list.yaml"))


def test_own_file_and_digest(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    one = load_schedule(str(file))
    assert one.entries["tiny"]["256p"] == Sparsity(density=0.5, sink="none")
    changed = {"name": "x", "models": {"tiny": {"sink": "none", "resolutions": {"256p": {"density": 0.6}}}}}
    file.write_text(yaml.safe_dump(changed))
    assert load_schedule(str(file)).digest != one.digest


def test_few_steps_lose_the_warm_up_and_say_so():
    notes = compiled("aggressive", "tiny", "720p", 3).notes
    assert any("0.25 of 3 steps is less than one step" in n and "use at least 4 steps" in n for n in notes)
    assert not any("less than one step" in n for n in compiled("aggressive", "tiny", "720p", 4).notes)


@pytest.mark.parametrize("share", [1e-300, 2.3e-309])
def test_a_share_no_number_of_steps_can_meet_asks_for_a_larger_share(share):
    body = {"dense_steps": {"share": share}, "resolutions": {"480p": {"density": 0.5}}}
    schedule = parse_schedule({"name": "x", "models": {"m": body}}, SIZES, "x.yaml")
    program = compile_schedule(
        schedule, model="m", height=480, width=832, sigmas=np.linspace(1, 0, 9), num_layers=2, guided=True
    )
    assert any("use a share of at least 0.125" in n for n in program.notes)


def test_sigma_threshold_counts_steps_at_or_above_it():
    """A flow shift g makes the first g x / (1 + (g - 1) x) of unshifted steps those with t > 1000 (1 - x)."""
    body = {"dense_steps": {"sigma": 0.9}, "resolutions": {"480p": {"density": 0.5}}}
    schedule = parse_schedule({"name": "x", "models": {"m": body}}, SIZES, "x.yaml")
    for shift in (1.0, 5.0):
        even = np.linspace(1, 0, 101)
        sigmas = shift * even / (1 + (shift - 1) * even)
        program = compile_schedule(schedule, model="m", height=480, width=832, sigmas=sigmas, num_layers=4, guided=True)
        count = sum(p.densities == (1.0,) * 4 for p in program.plans)
        assert count == pytest.approx(100 * shift * 0.1 / (1 + (shift - 1) * 0.1), abs=1.01)
        assert (sigmas[:count] >= 0.9 - 1e-12).all()
        assert (sigmas[count:] < 0.9).all()


def test_pick_agrees_with_the_program():
    schedule = load_schedule("moderate")
    for model in LAYERS:
        for height, width in ((480, 832), (1000, 1000), (64, 64), (2160, 3840)):
            resolution, sparsity, _ = schedule.pick(model, height, width)
            program = compile_schedule(
                schedule, model=model, height=height, width=width, sigmas=[1, 0.5, 0], num_layers=40, guided=True
            )
            assert (program.resolution, program.sparsity) == (resolution, sparsity)
            distance = {r: abs(np.log(SIZES[r][0] * SIZES[r][1] / (height * width))) for r in schedule.entries[model]}
            assert distance[resolution] == min(distance.values())


def test_too_many_dense_layers():
    data = {"name": "x", "models": {"m": {"dense_layers": 9, "resolutions": {"480p": {"density": 0.5}}}}}
    with pytest.raises(ValueError, match="dense_layers=9 is more than the model's 6 layers"):
        compile_schedule(
            parse_schedule(data, SIZES, "x"), model="m", height=480, width=832, sigmas=[1, 0], num_layers=6, guided=True
        )
