"""The UMT5 encoder against transformers' goldens, its key table, its memory, its gradients."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from text_support import BUCKET_RANGE, CONFIGS, GOLDENS, batch, load_encoder, relative_l2, run, weights, write_encoder

from videodiff.configs import TextEncoderConfig
from videodiff.text import encode
from videodiff.text.umt5 import UMT5Encoder, position_buckets
from videodiff.weights.keys_text import table

GOLDEN = np.load(GOLDENS)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    encoder = load_encoder(write_encoder(tmp_path, config), config)
    ids, mask = batch(config)
    out = np.asarray(run(encoder, ids, mask))
    assert out.dtype == np.float32
    assert relative_l2(out[mask == 1], GOLDEN[f"{name}_hidden"]) <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_buckets_equal_transformers(name: str) -> None:
    n = BUCKET_RANGE + 1
    buckets = position_buckets(n, CONFIGS[name])
    want = GOLDEN[f"{name}_buckets"]
    np.testing.assert_array_equal(np.concatenate([buckets[-1, :-1], buckets[0]]), want)  # distances -600..0..600
    np.testing.assert_array_equal(buckets[n // 2], want[n - 1 - n // 2 :][:n])  # depends on key - query only


def test_padding_never_reaches_a_token(tmp_path: Path) -> None:
    config = CONFIGS["wide"]
    encoder = load_encoder(write_encoder(tmp_path, config), config)
    ids, mask = batch(config)
    out = np.asarray(run(encoder, ids, mask))
    other = np.where(mask, ids, np.random.default_rng(1).integers(0, config.vocab_size, ids.shape))
    again = np.asarray(run(encoder, other, mask))
    np.testing.assert_array_equal(again[mask == 1], out[mask == 1])
    unmasked = np.asarray(run(encoder, ids, np.ones_like(mask)))
    assert relative_l2(unmasked[mask == 1], out[mask == 1]) > 1e-2  # the mask does something


def test_ids_outside_the_table_are_not_clamped(tmp_path: Path) -> None:
    config = CONFIGS["wide"]
    encoder = load_encoder(write_encoder(tmp_path, config), config)
    out = encoder(jnp.array([[config.vocab_size]]), jnp.ones((1, 1)))
    assert np.isnan(np.asarray(out)).all()


def test_bfloat16_weights_upcast_layer_by_layer_lose_nothing_more(tmp_path: Path) -> None:
    """Weights stored in bfloat16 and computed in float32 equal a float32 encoder with the rounded weights."""
    config = CONFIGS["deep"]
    stored = {k: v.astype(ml_dtypes.bfloat16) for k, v in weights(config).items()}
    for name, dtype in (("bf16", ml_dtypes.bfloat16), ("f32", np.float32)):
        (tmp_path / name).mkdir()
        save_file({k: v.astype(dtype) for k, v in stored.items()}, tmp_path / name / "model.safetensors")
    ids, mask = batch(config)
    low = load_encoder(tmp_path / "bf16", config, param_dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(low))} == {jnp.dtype(jnp.bfloat16)}
    high = load_encoder(tmp_path / "f32", config)
    a, b = (np.asarray(run(m, ids, mask)) for m in (low, high))
    assert a.dtype == np.float32
    assert relative_l2(a, b) <= 2e-6


def test_bfloat16_compute_stays_close(tmp_path: Path) -> None:
    config = CONFIGS["deep"]
    encoder = load_encoder(write_encoder(tmp_path, config), config, jnp.bfloat16, jnp.bfloat16)
    ids, mask = batch(config)
    out = np.asarray(run(encoder, ids, mask))
    assert out.dtype == jnp.bfloat16
    assert relative_l2(out[mask == 1], GOLDEN["deep_hidden"]) < 0.08


def test_every_parameter_has_its_gradient() -> None:
    """Also through weights stored in bfloat16, whose slices pass an optimisation barrier."""
    config = CONFIGS["wide"]
    low = UMT5Encoder(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    high = nnx.merge(nnx.split(low)[0], jax.tree.map(lambda p: p.astype(jnp.float32), nnx.state(low)))
    ids, mask = (jnp.asarray(a[:, :20]) for a in batch(config))

    @nnx.jit
    @nnx.grad
    def gradient(m):
        return jnp.mean(jnp.where(mask[..., None] != 0, m(ids, mask), 0) ** 4)

    want = dict(nnx.to_flat_state(gradient(high)))
    for path, g in nnx.to_flat_state(gradient(low)):
        assert g.dtype == jnp.bfloat16, path
        got, exact = (np.asarray(x[...], np.float32) for x in (g, want[path]))
        assert relative_l2(got, exact) < 1e-2, path
        largest = np.abs(exact.reshape(config.num_layers, -1)).max(1) if path[0] == "blocks" else np.abs(exact).max()
        assert (largest > 0).all(), path


def test_xxl_has_the_published_number_of_tensors_and_parameters() -> None:
    abstract = nnx.eval_shape(lambda: UMT5Encoder(TextEncoderConfig(), rngs=nnx.Rngs(0)))
    leaves = dict(nnx.to_flat_state(nnx.state(abstract)))
    rules = table(TextEncoderConfig())
    assert sorted(leaves) == sorted(rule.target for rule in rules)
    assert sum(len(rule.sources) for rule in rules) == 242
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves.values()) == 5_680_910_336


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_xxl_fits_a_cpu_host(dtype) -> None:
    """Stored in bfloat16 it needs its weights and about one layer in float32: 14 GiB is the promise."""
    if jax.default_backend() != "cpu":
        pytest.skip("the figure is of XLA for CPU")
    make = lambda: UMT5Encoder(TextEncoderConfig(), dtype=dtype, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))  # noqa: E731
    graph, state = nnx.split(nnx.eval_shape(make))
    tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    memory = encode._encode.lower(graph, state, tokens, tokens, 512).compile().memory_analysis()
    assert memory.argument_size_in_bytes >= 2 * 5_680_910_336
    layer = 4 * (4 * 4096 * 4096 + 3 * 4096 * 10240)  # bytes in float32
    assert memory.temp_size_in_bytes <= 1.5 * layer
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert total <= 14 * 2**30


@pytest.mark.parametrize("stored", ["shared", "alias", "both"])
def test_embedding_loads_under_either_name(stored: str, tmp_path: Path) -> None:
    config = CONFIGS["flat"]
    tensors = weights(config)
    if stored != "shared":
        tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].copy()
    if stored == "alias":
        del tensors["shared.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    encoder = load_encoder(tmp_path, config)
    np.testing.assert_array_equal(encoder.embedding[...], weights(config)["shared.weight"])


def test_embeddings_that_differ_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["flat"]
    tensors = weights(config)
    tensors["encoder.embed_tokens.weight"] = np.zeros_like(tensors["shared.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"encoder\.embed_tokens\.weight"):
        load_encoder(tmp_path, config)
