"""Strict loading: right values, every error named and collected, and the promised peak of memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from weights_support import LAYERS, RULES, Toy, toy_tensors, write_toy

from videodiff.weights import load as load_module_file
from videodiff.weights.keys import KeyRule, Layout
from videodiff.weights.load import adopt, aligned_empty, check_state, largest_magnitude, load_module, load_state
from videodiff.weights.problems import Kind, WeightsError
from videodiff.weights.safetensors_files import open_checkpoint

BF16 = ml_dtypes.bfloat16


def abstract() -> nnx.State:
    return nnx.state(nnx.eval_shape(Toy), nnx.Param)


def expected(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the toy's parameters must be, written out by hand with einsum."""
    as32 = {n: t.astype(np.float32) for n, t in tensors.items()}
    return {
        "blocks.kernel": np.stack([np.einsum("oi->io", as32[f"blocks.{i}.weight"]) for i in range(LAYERS)]),
        "blocks.bias": np.stack([as32[f"blocks.{i}.bias"] for i in range(LAYERS)]),
        "gamma": as32["norm.gamma"][:, 0, 0],
        "video_conv": np.einsum("oithw->thwio", as32["video.weight"]),
        "image_conv": np.einsum("oihw->hwio", as32["image.weight"]),
        "embed": as32["shared.weight"],
        "heads.0": as32["heads.0"],
    }


def flat(state: nnx.State) -> dict[str, jax.Array]:
    return {".".join(map(str, p)): v.get_value() for p, v in nnx.to_flat_state(state)}


def refused(folder: Path, rules: list[KeyRule] = RULES, dtype_for=None) -> WeightsError:
    with pytest.raises(WeightsError) as e:
        load_state(abstract(), rules, folder, dtype_for)
    return e.value


def named(error: WeightsError) -> list[tuple[Kind, str]]:
    return [(p.kind, p.what) for p in error.problems]


@pytest.mark.parametrize("buffer", [1, 64, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_values_of_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int, threads: int) -> None:
    """Any chunk size gives the same: one row at a time, a few rows, everything at once."""
    monkeypatch.setattr(load_module_file, "BUFFER_BYTES", buffer)
    got = flat(load_state(abstract(), RULES, write_toy(tmp_path), threads=threads))
    want = expected(toy_tensors())
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(got[name]), array, err_msg=name)


def test_dtypes_are_chosen_by_path(tmp_path: Path) -> None:
    def dtype_for(path):
        return jnp.bfloat16 if path[0] == "blocks" else jnp.float32

    got = flat(load_state(abstract(), RULES, write_toy(tmp_path), dtype_for))
    want = expected(toy_tensors())
    assert {n: a.dtype for n, a in got.items()} == {
        n: jnp.bfloat16 if n.startswith("blocks") else jnp.float32 for n in want
    }
    for name, array in got.items():
        np.testing.assert_array_equal(np.asarray(array), want[name].astype(array.dtype))


def test_headers_alone_tell_what_would_fail(tmp_path: Path) -> None:
    good = open_checkpoint(write_toy(tmp_path / "good"))
    bad = open_checkpoint(write_toy(tmp_path / "bad", heads__0=np.zeros(3, np.float32)))
    assert check_state(abstract(), RULES, good) == []
    assert [p.kind for p in check_state(abstract(), RULES, bad)] == [Kind.SHAPE]


def test_a_stack_of_one_layer_keeps_its_axis(tmp_path: Path) -> None:
    class One(nnx.Module):
        def __init__(self) -> None:
            self.bias = nnx.Param(jnp.zeros((1, 7)))

    save_file({"b": np.arange(7, dtype=np.float32)}, tmp_path / "model.safetensors")
    module = load_module(One, [KeyRule(("bias",), ("b",), stack=True)], tmp_path)
    np.testing.assert_array_equal(module.bias.get_value(), np.arange(7)[None])


def test_load_module_never_runs_the_initialiser(tmp_path: Path) -> None:
    traced = []

    def make() -> Toy:
        toy = Toy()
        traced.append(isinstance(toy.embed.get_value(), jax.core.Tracer))
        return toy

    module = load_module(make, RULES, write_toy(tmp_path))
    assert all(traced)
    np.testing.assert_array_equal(module.embed.get_value(), toy_tensors()["shared.weight"])


def test_on_cpu_the_filled_array_is_adopted_without_a_copy() -> None:
    for dtype in (np.float32, np.float16, BF16):
        array = aligned_empty((1000, 37), np.dtype(dtype))
        array[...] = 3
        assert adopt(("x",), array).unsafe_buffer_pointer() == array.ctypes.data


def test_alias_may_stand_alone_or_repeat_the_same_bytes(tmp_path: Path) -> None:
    shared = toy_tensors()["shared.weight"]
    alone = write_toy(tmp_path / "alone", shared__weight=None, encoder__embed_tokens__weight=shared)
    both = write_toy(tmp_path / "both", encoder__embed_tokens__weight=shared)
    for folder in (alone, both):
        np.testing.assert_array_equal(flat(load_state(abstract(), RULES, folder))["embed"], shared)


def test_alias_that_differs_in_one_bit_is_an_error(tmp_path: Path) -> None:
    other = toy_tensors()["shared.weight"].copy()
    other.view(np.uint32)[-1, -1] ^= 1
    error = refused(write_toy(tmp_path, encoder__embed_tokens__weight=other))
    assert named(error) == [(Kind.ALIAS, "shared.weight and encoder.embed_tokens.weight")]
    error = refused(write_toy(tmp_path, encoder__embed_tokens__weight=other.astype(BF16)))
    assert named(error) == [(Kind.ALIAS, "shared.weight and encoder.embed_tokens.weight")]


def test_all_errors_come_at_once(tmp_path: Path) -> None:
    folder = write_toy(
        tmp_path,
        blocks__1__weight=None,
        blocks__2__bias=np.zeros((8,), np.float32),
        heads__0=np.zeros(2, np.int32),
        head__extra=np.zeros((2, 3), np.float32),
        blocks__0__scale_weight=np.ones((), np.float32),
    )
    error = refused(folder)
    assert named(error) == [
        (Kind.DTYPE, "heads.0 is I32 in model.safetensors"),
        (Kind.EXTRA_TENSOR, "head.extra [2, 3] F32 in model.safetensors"),
        (Kind.MISSING_TENSOR, "blocks.1.weight [7, 5]"),
        (Kind.QUANTISED, "blocks.0.scale_weight [] F32 in model.safetensors"),
        (Kind.SHAPE, "blocks.2.bias is [8] in model.safetensors, the model needs [7]"),
    ]
    text = str(error)
    assert str(folder) in text
    assert all(what in text for _, what in named(error))
    assert text.count("remedy:") == 5


@pytest.mark.parametrize(
    ("name", "shape"), [("norm.gamma", (4, 1, 1, 1)), ("norm.gamma", (4,)), ("blocks.0.weight", (5, 7))]
)
def test_shapes_are_exact(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    """A gamma with one axis too many and a transposed kernel hold the right number of values and are still refused."""
    folder = write_toy(tmp_path, **{name.replace(".", "__"): np.zeros(shape, np.float32)})
    assert [k for k, _ in named(refused(folder))] == [Kind.SHAPE]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_plain_fp8_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    x = toy_tensors()["shared.weight"].astype(getattr(ml_dtypes, dtype))
    error = refused(write_toy(tmp_path, shared__weight=x))
    assert [k for k, _ in named(error)] == [Kind.DTYPE]
    assert "bfloat16 or float16 release" in str(error)


@pytest.mark.parametrize(
    "name",
    [
        "scaled_fp8",
        "blocks.0.scale_weight",
        "blocks.0.scale_input",
        "blocks.0.weight_scale",
        "blocks.0.weight_scale_2",
        "blocks.0.pre_quant_scale",
        "blocks.0.comfy_quant",
    ],
)
def test_scale_tensors_are_called_quantised(tmp_path: Path, name: str) -> None:
    folder = write_toy(tmp_path, **{name.replace(".", "__"): np.ones(1, np.float32)})
    assert [k for k, _ in named(refused(folder))] == [Kind.QUANTISED]


def test_quantisation_metadata_is_refused(tmp_path: Path) -> None:
    save_file(toy_tensors(), tmp_path / "model.safetensors", metadata={"_quantization_metadata": "{}"})
    assert [k for k, _ in named(refused(tmp_path))] == [Kind.QUANTISED]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blocks.1.weight", "image.weight", "video.weight"])
def test_non_finite_weights_are_named(tmp_path: Path, name: str, bad: float) -> None:
    """In float32, float16 and bfloat16; two bad tensors are both named."""
    tensors = toy_tensors()
    x = tensors[name].copy()
    x.reshape(-1)[-1] = bad
    y = tensors["heads.0"].copy()
    y[0] = bad
    error = refused(write_toy(tmp_path, **{name.replace(".", "__"): x, "heads__0": y}))
    want = sorted([f"{name} in model.safetensors", "heads.0 in model.safetensors"])
    assert {kind for kind, _ in named(error)} == {Kind.NON_FINITE}
    assert sorted(what for _, what in named(error)) == want
    assert "NaN or infinite" in str(error)


def test_values_that_do_not_fit_the_target(tmp_path: Path) -> None:
    x = toy_tensors()["heads.0"]
    x[1] = -70000.0
    folder = write_toy(tmp_path, heads__0=x)
    assert float(flat(load_state(abstract(), RULES, folder, lambda _: jnp.bfloat16))["heads.0"][1]) == -70144.0
    error = refused(folder, dtype_for=lambda _: jnp.float16)
    assert named(error) == [(Kind.OVERFLOW, "heads.0 reaches 7e+04, float16 ends at 6.55e+04")]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
def test_largest_magnitude_sees_every_kind_of_number(dtype) -> None:
    r = np.random.default_rng(0)
    for sign in (-1, 0, 1):  # all negative, mixed, all positive
        x = r.normal(size=1001).astype(dtype)
        x = x if sign == 0 else sign * np.abs(x)
        assert largest_magnitude(x) == float(np.abs(x.astype(np.float64)).max())
        for bad in (np.inf, -np.inf, np.nan):
            y = x.copy()
            y[500] = bad
            assert not np.isfinite(largest_magnitude(y))
    assert largest_magnitude(np.zeros((0,), dtype)) == 0.0


def test_mistakes_in_a_key_table_are_named(tmp_path: Path) -> None:
    folder = write_toy(tmp_path)
    error = refused(folder, RULES[1:])
    assert named(error)[-1] == (Kind.UNASSIGNED, "blocks.kernel")
    error = refused(folder, [*RULES, KeyRule(("nowhere",), ("ghost",))])
    assert named(error) == [(Kind.NO_PARAMETER, "nowhere")]
    error = refused(folder, [*RULES, RULES[-1]])
    assert {what for _, what in named(error)} == {"parameter heads.0, 2 times", "tensor heads.0, 2 times"}
    error = refused(folder, [KeyRule(("blocks", "kernel"), RULES[0].sources[:2], Layout.LINEAR), *RULES[1:]])
    assert (Kind.SHAPE, "parameter blocks.kernel is [3, 5, 7], its rule is LINEAR with 2 sources") in named(error)


def test_rules_refuse_what_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="has no source"):
        KeyRule(("x",), ())
    with pytest.raises(ValueError, match="aliases need exactly one source"):
        KeyRule(("x",), ("a", "b"), aliases=("c",))


PEAK = """
import jax, jax.numpy as jnp
from flax import nnx
from videodiff.weights.keys import KeyRule, Layout
from videodiff.weights.load import load_module

L, O, I = {shape}
class Stack(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.zeros((L, I, O), jnp.bfloat16))
rules = [KeyRule(("kernel",), tuple(f"b.{{i}}" for i in range(L)), Layout.LINEAR)]
jnp.zeros(3).block_until_ready()
def peak_kib():  # ru_maxrss would start at the peak of the process that forked this one
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])
before = peak_kib()
module = load_module(Stack, rules, {path!r})
assert float(module.kernel[L - 1, 0, 0]) == 0.0
print(peak_kib() - before)
"""


def test_peak_memory_of_a_stacked_parameter(tmp_path: Path) -> None:
    """40 layers, 480 MiB of float32 zeros (a sparse file) to 240 MiB of bfloat16: no second copy of anything."""
    shape = layers, out, inner = 40, 1536, 2048
    each = out * inner * 4
    header = {
        f"b.{i}": {"dtype": "F32", "shape": [out, inner], "data_offsets": [i * each, (i + 1) * each]}
        for i in range(layers)
    }
    raw = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with file.open("r+b") as f:
        f.truncate(8 + len(raw) + layers * each)
    code = PEAK.format(shape=shape, path=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    grown = int(run.stdout) * 1024
    target = layers * out * inner * 2
    assert target * 0.9 < grown < target + 4 * load_module_file.BUFFER_BYTES + (48 << 20), f"{grown / 2**20:.0f} MiB"


def test_reading_allocates_only_target_and_buffers(tmp_path: Path) -> None:
    """tracemalloc sees numpy's allocations: the target array, one buffer a thread, nothing else of that order."""
    x = np.random.default_rng(0).normal(size=(512, 4096)).astype(np.float32)  # 8 MiB
    save_file({"w": x}, tmp_path / "model.safetensors")

    class One(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros((4096, 512), jnp.bfloat16))

    state = nnx.state(nnx.eval_shape(One), nnx.Param)
    tracemalloc.start()
    try:
        load_state(state, [KeyRule(("w",), ("w",), Layout.LINEAR)], tmp_path, threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes // 2 + min(load_module_file.BUFFER_BYTES, x.nbytes) + (1 << 20)
