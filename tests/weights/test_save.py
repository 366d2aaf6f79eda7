"""Saving: the published layout again, bit for bit, in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from weights_support import RULES, Toy, toy_tensors, write_toy

from videodiff.weights.keys import KeyRule
from videodiff.weights.load import load_module, load_state
from videodiff.weights.problems import Kind, WeightsError
from videodiff.weights.save import save_component, save_pipeline_index, unipc_scheduler_json


def toy(tmp_path: Path) -> nnx.State:
    return nnx.state(load_module(Toy, RULES, write_toy(tmp_path / "source")), nnx.Param)


def test_saved_tensors_equal_the_source(tmp_path: Path) -> None:
    files = save_component(tmp_path / "out", toy(tmp_path), RULES, {"_class_name": "Toy"})
    assert [f.name for f in files] == ["diffusion_pytorch_model.safetensors"]
    back = load_file(files[0])
    want = toy_tensors()
    assert back.keys() == want.keys()
    for name, tensor in want.items():
        assert back[name].shape == tensor.shape
        np.testing.assert_array_equal(back[name], tensor.astype(np.float32), err_msg=name)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"_class_name": "Toy"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_chosen_dtype_on_disk(tmp_path: Path, dtype) -> None:
    (file,) = save_component(tmp_path / "out", toy(tmp_path), RULES, {}, dtype, base="model")
    assert file.name == "model.safetensors"
    want = toy_tensors()
    for name, tensor in load_file(file).items():
        assert tensor.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(tensor, want[name].astype(np.float32).astype(dtype))


def test_dtype_by_path_and_alignment(tmp_path: Path) -> None:
    def dtype_for(path):
        return jnp.float32 if path[-1] == "gamma" else jnp.float16

    (file,) = save_component(tmp_path / "out", toy(tmp_path), RULES, {}, dtype_for)
    back = load_file(file)
    assert {n for n, t in back.items() if t.dtype == np.float32} == {"norm.gamma"}
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for name, entry in header.items():
        if name != "__metadata__":
            assert (start + entry["data_offsets"][0]) % back[name].dtype.itemsize == 0


@pytest.mark.parametrize("limit", [1, 300, 700])
def test_shards_load_again(tmp_path: Path, limit: int) -> None:
    state = toy(tmp_path)
    files = save_component(tmp_path / "out", state, RULES, {}, max_shard_bytes=limit)
    assert len(files) > 1
    index = json.loads((tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for f in files for t in load_file(f).values())
    for file in files:
        sizes = [t.nbytes for t in load_file(file).values()]
        assert len(sizes) == 1 or sum(sizes) <= limit
    again = load_state(nnx.state(nnx.eval_shape(Toy), nnx.Param), RULES, tmp_path / "out")
    for (p, a), (q, b) in zip(nnx.to_flat_state(state), nnx.to_flat_state(again), strict=True):
        assert p == q
        np.testing.assert_array_equal(a.get_value(), b.get_value())


def test_saving_again_in_another_form_leaves_one_set(tmp_path: Path) -> None:
    state = toy(tmp_path)
    save_component(tmp_path / "out", state, RULES, {}, max_shard_bytes=300)
    save_component(tmp_path / "out", state, RULES, {})
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    save_component(tmp_path / "out", state, RULES, {}, max_shard_bytes=300)
    load_state(nnx.state(nnx.eval_shape(Toy), nnx.Param), RULES, tmp_path / "out")


def test_a_stack_of_one_layer_loses_its_axis_on_disk(tmp_path: Path) -> None:
    class One(nnx.Module):
        def __init__(self) -> None:
            self.bias = nnx.Param(jnp.arange(7.0)[None])

    (file,) = save_component(tmp_path, nnx.state(One(), nnx.Param), [KeyRule(("bias",), ("b",), stack=True)], {})
    np.testing.assert_array_equal(load_file(file)["b"], np.arange(7.0))


def test_nothing_is_written_when_weights_are_not_finite(tmp_path: Path) -> None:
    state = toy(tmp_path)
    state["embed"] = state["embed"].replace(state["embed"].get_value().at[3, 1].set(jnp.nan))
    with pytest.raises(WeightsError, match="NaN or infinite") as e:
        save_component(tmp_path / "out", state, RULES, {})
    assert [(p.kind, p.what) for p in e.value.problems] == [(Kind.NON_FINITE, "embed")]
    assert not (tmp_path / "out").exists()


def test_a_table_that_does_not_cover_the_state_is_refused(tmp_path: Path) -> None:
    state = toy(tmp_path)
    with pytest.raises(WeightsError, match="embed"):
        save_component(tmp_path / "out", state, [r for r in RULES if r.target != ("embed",)], {})
    with pytest.raises(WeightsError, match="nowhere"):
        save_component(tmp_path / "out", state, [*RULES, KeyRule(("nowhere",), ("x",))], {})
    assert not (tmp_path / "out").exists()


def test_pipeline_index(tmp_path: Path) -> None:
    save_pipeline_index(tmp_path, unipc_scheduler_json(flow_shift=3.0))
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    assert index["transformer_2"] == [None, None]
    scheduler = json.loads((tmp_path / "scheduler" / "scheduler_config.json").read_text())
    assert (scheduler["flow_shift"], scheduler["prediction_type"], scheduler["use_flow_sigmas"]) == (
        3.0,
        "flow_prediction",
        True,
    )


def test_bfloat16_state_round_trips_bit_for_bit(tmp_path: Path) -> None:
    write_toy(tmp_path / "source")
    abstract = nnx.state(nnx.eval_shape(Toy), nnx.Param)
    state = load_state(abstract, RULES, tmp_path / "source", lambda _: jnp.bfloat16)
    (file,) = save_component(tmp_path / "out", state, RULES, {})
    assert {t.dtype for t in load_file(file).values()} == {np.dtype(ml_dtypes.bfloat16)}
    again = load_state(abstract, RULES, tmp_path / "out", lambda _: jnp.bfloat16)
    for (_, a), (_, b) in zip(nnx.to_flat_state(state), nnx.to_flat_state(again), strict=True):
        assert np.asarray(a.get_value()).tobytes() == np.asarray(b.get_value()).tobytes()
