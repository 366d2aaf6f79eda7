"""Descriptions: arithmetic against the program itself and published shares, promises of shipped schedules, both output forms."""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from videodiff import cli
from videodiff.attention import AttentionSpec, make_attend
from videodiff.attention.routing import route_heads, visited_keys
from videodiff.attention.tiles import Sink, plan_tiles
from videodiff.configs import TransformerConfig
from videodiff.describe import describe_density, describe_run, forward_flops, ideal_speedup, probe_flops
from videodiff.grid import TokenGrid, TokenOrder
from videodiff.known import known_models, model_info
from videodiff.models.transformer import WanTransformer
from videodiff.request import make_request
from videodiff.schedule import resolution_sizes

LIMITS = {"conservative": (0.60, 0.40), "moderate": (0.52, 0.30), "aggressive": (0.45, 0.25)}


def described(model="tiny", schedule="aggressive", **options):
    info = model_info(model)
    request = make_request(prompt="x", seed=0, schedule=schedule, **options).resolve(info)
    return describe_run(info, request)


# --- arithmetic --------------------------------------------------------------------------------------------------------


def dot_flops(jaxpr) -> int:
    """Operations of all matrix products of a program, loops unrolled."""
    total = 0
    for eqn in jaxpr.eqns:
        assert eqn.primitive.name not in ("while", "conv_general_dilated"), "cannot be counted here"
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += times * dot_flops(inner)
    return total


@pytest.mark.parametrize(("layers", "text"), [(1, 7), (3, 5)])
def test_forward_count_is_that_of_the_program(layers, text):
    config = TransformerConfig(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=6, text_dim=24, freq_dim=32, ffn_dim=48,
        num_layers=layers,
    )  # fmt: skip
    grid = TokenGrid(3, 4, 5)
    attend = make_attend("dense", AttentionSpec(grid, head_dim=16))
    graph, weights = nnx.split(nnx.eval_shape(lambda: WanTransformer(config, rngs=nnx.Rngs(0))))
    shape = jax.ShapeDtypeStruct
    args = (shape((1, 3, 8, 10, 4), jnp.float32), shape((1,), jnp.float32), shape((1, text, 24), jnp.float32))

    def context(weights, prompt):
        return nnx.merge(graph, weights).encode_context(prompt, None)

    def forward(weights, latents, timestep, prompt):
        return nnx.merge(graph, weights)(latents, timestep, context(weights, prompt), attend)

    program = dot_flops(jax.make_jaxpr(forward)(weights, *args).jaxpr)
    once = dot_flops(jax.make_jaxpr(context)(weights, args[2]).jaxpr)  # the text is projected once a run
    width = config.width
    embedded_time = 2 * (config.freq_dim * width + width * width + 6 * width * width)  # one row, whatever the size
    flops = forward_flops(config, grid.tokens, text)
    assert flops.attention + flops.other == program - once - embedded_time
    assert flops.attention == 4 * 60**2 * width * layers


def test_probe_count_is_that_of_the_program():
    config = TransformerConfig(num_attention_heads=3, attention_head_dim=8)
    grid, rows = TokenGrid(2, 12, 16), 16
    plans = [plan_tiles(grid, 0.5, sink=Sink.NONE, order=order, tile=(16, 16)) for order in TokenOrder]
    head = jax.ShapeDtypeStruct((1, 3, grid.tokens, 8), jnp.float32)
    drawn = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def probe(q, k, v, r):
        return route_heads(q, k, v, r, *(visited_keys(p, r) for p in plans))

    program = jax.make_jaxpr(probe)(head, head, head, drawn)
    assert probe_flops(config, grid.tokens, rows) == dot_flops(program.jaxpr)
    assert probe_flops(config, 4, 64) == 8 * 4 * 4 * config.width  # no more rows than tokens


@pytest.mark.parametrize(("res", "share"), [("480p", 0.52), ("720p", 0.72), ("1080p", 0.85), ("1440p", 0.91)])
def test_attention_share_of_14b(res, share):
    """The shares that Sparse VideoGen's ideal speed-ups rest on."""
    assert round(described("wan2.1-t2v-14b", res=res).flops.share, 2) == share


def test_ideal_speedup():
    assert ideal_speedup(0.5, 1.0, 0.1) == ideal_speedup(0.5, 0.0, 1.0) == 1
    assert ideal_speedup(1.0, 0.0, 0.25) == 4
    assert ideal_speedup(0.91, 0.25, 0.39) == pytest.approx(1 / (1 - 0.91 * 0.75 * 0.61))


def test_dense_saves_nothing():
    d = described("tiny", "dense", res="480p")
    assert (d.speedup, d.attention_saved, d.kept, d.dense_share, d.densities) == (1, 0, 1, 1, ())
    assert d.total_flops[0] == d.total_flops[1]


def test_dense_layers_count_as_dense():
    d = described("wan2.1-t2v-1.3b", num_inference_steps=20)
    assert d.dense_steps == 5
    assert d.dense_share == pytest.approx((5 + 15 * 1 / 30) / 20)
    saved = (1 - d.dense_share) * (1 - d.kept)
    dense, sparse = d.total_flops
    assert sparse - d.probe == pytest.approx(dense * (1 - d.flops.share * saved))
    assert d.speedup == pytest.approx(dense / (sparse - d.probe))


# --- promises of the shipped schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", LIMITS)
@pytest.mark.parametrize("model", known_models())
def test_every_shipped_schedule_keeps_its_promise(model, schedule):
    density, dense_share = LIMITS[schedule]
    layers = model_info(model).transformer.num_layers
    for res in resolution_sizes():
        d = described(model, schedule, res=res)
        assert all(p.executed <= p.requested <= density for p in d.densities)
        assert d.dense_steps <= dense_share * len(d.steps)
        assert d.dense_steps >= 1
        assert [s.step for s in d.steps] == list(range(1, len(d.program.plans) + 1))
        expected = d.request.num_inference_steps if d.request.base is None else d.request.refine_steps
        assert len(d.steps) == expected
        assert all(s.layers_dense + s.layers_sparse == layers for s in d.steps)
        warm = [s.layers_sparse == 0 for s in d.steps]
        assert warm == sorted(warm, reverse=True), "the first steps are the dense ones"
        assert len(d.program.phases) == 2
        assert d.speedup > 1
        for p in d.densities:
            assert p.band + p.sink == pytest.approx(p.requested, rel=0.02)
            # Whole tiles cost little: a density that cannot be reached would waste quality for nothing.
            assert p.executed > 0.9 * p.requested, (res, p)


def test_the_shipped_model_is_fast_enough_at_1440p():
    """1.5x is the target; routing and kernels need room, so the ideal must be well above it."""
    d = described(res="1440p")
    dense, sparse = d.total_flops
    assert d.speedup > 1.65
    assert dense / sparse > 1.6


def test_band_and_sink_apart():
    grid = TokenGrid(5, 45, 80)
    prefix, none = describe_density(grid, 0.365, "prefix"), describe_density(grid, 0.365, "none")
    assert none.sink == 0
    # svg.md: five frames, s = .20 keeps .365 in all; the band alone is .20 and a little more from rounding W
    assert prefix.window == pytest.approx(1920, abs=64)
    assert prefix.band == pytest.approx(0.202, abs=0.006)
    assert prefix.sink == pytest.approx(0.365 - prefix.band, abs=1e-3)


def test_sink_that_tiles_cannot_execute(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("{name: x, models: {tiny: {sink: first_frame, resolutions: {480p: {density: 0.5}}}}}")
    with pytest.raises(NotImplementedError, match="first_frame"):
        described("tiny", str(file), res="480p")


# --- what is shown -------------------------------------------------------------------------------------------------------


def test_text_says_everything():
    d = described("tiny", res="1440p")
    text, p = d.text(), d.densities[0]
    for part in (
        "2560x1440", "5 frames x 45 x 80 = 18000", "schedule  aggressive", d.program.digest, "phases, each one compiled program: 2",
        f"requested  {p.requested:.4f}", f"executed   {p.executed:.4f}", "sink       0.0000", f"band       {p.band:.4f}",
        f"ideal speed-up            {d.speedup:.2f}x", f"attention FLOPs saved     {d.attention_saved:.1%}", "sink none",
        f"dense steps               {d.dense_steps} of {len(d.steps)}",
    ):  # fmt: skip
        assert part in text, part
    table = text.splitlines()[text.splitlines().index("") + 1 :][1 : 1 + len(d.steps)]
    assert [int(line.split()[0]) for line in table] == [s.step for s in d.steps]


def test_nearest_resolution_and_crop_are_said():
    text = described("wan2.1-t2v-1.3b", size="848x480", num_frames=9).text()
    assert "848x480 takes the numbers of 480p" in text
    assert "computed at 1920x1088" in described("tiny", res="1080p").text()


def test_json_holds_what_the_text_says():
    d = described("wan2.1-t2v-14b", res="720p")
    data = json.loads(json.dumps(d.json()))
    assert data["tokens"]["all"] == 75600
    assert len(data["steps"]) == data["sampling"]["steps"] == 50
    assert data["sampling"]["evaluations"] == 100
    assert data["densities"] == [{**dataclasses.asdict(p), "tile": list(p.tile)} for p in d.densities]
    assert data["phases"][-1]["stop"] == 50
    assert sum(s["stop"] - s["start"] for s in data["phases"][-1]["segments"]) == 40
    assert data["ideal_speedup"] == pytest.approx(
        1 / (1 - data["flops"]["attention_share"] * (1 - data["dense_share"]) * (1 - data["kept"]))
    )


def test_command(capsys):
    assert cli.main(["describe", "--res", "1440p", "--schedule", "aggressive", "--model", "wan2.1-t2v-14b"]) == 0
    out = capsys.readouterr().out
    assert "302400" in out
    assert "example prompt" not in out  # a description needs no prompt
    assert cli.main(["describe", "--res", "720p", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"]["name"] == "dense"


def test_command_names_mistakes(capsys):
    assert cli.main(["describe", "--schedule", "agressive"]) == 2
    assert "did you mean 'aggressive'" in capsys.readouterr().err


def test_a_folder_is_described_with_its_own_solver(tmp_path, capsys):
    info = model_info("wan2.1-t2v-1.3b")
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    parts = {
        "transformer/config.json": info.transformer.to_json(),
        "vae/config.json": {},
        "scheduler/scheduler_config.json": scheduler,
    }
    for name, body in parts.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(body))
    words = ["describe", "--model", str(tmp_path), "--num_inference_steps", "4", "--json"]
    assert cli.main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["model"], data["sampling"]["solver"]) == ("wan2.1-t2v-1.3b", "euler")
    assert [s["sigma"] for s in data["steps"]] == pytest.approx([3 * s / (1 + 2 * s) for s in (1, 0.75, 0.5, 0.25)])
    assert cli.main([*words, "--solver", "unipc"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling"]["solver"] == "unipc"


def test_no_weights_are_needed(tmp_path):
    """Neither Flax nor the loader of weights is imported."""
    code = (
        "import sys; from videodiff import cli; code = cli.main(['describe', '--res', '480p', '--schedule', 'moderate']); "
        "print('loaded', [m for m in ('flax', 'videodiff.pipeline', 'videodiff.weights.load', 'torch') if m in sys.modules]); "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_a_refined_run_shows_the_table_of_the_refinement_and_counts_the_pass_before():
    d = described("tiny", "aggressive", res="1440p")
    direct = described("tiny", "aggressive", res="1440p", base_res="none")
    assert d.steps[0].sigma == pytest.approx(0.75)
    assert len(d.steps) == 8
    assert direct.base == 0 < d.base
    dense, sparse = d.total_flops
    assert d.speedup == pytest.approx(dense / (sparse - d.probe))
    assert d.speedup < direct.speedup or len(direct.steps) != 8
    assert d.json()["base"]["tokens"] == 560
    assert direct.json()["base"] is None
    assert "first     12 steps at 448x256 (560 tokens, dense)" in d.text()
    assert "first " not in direct.text()
