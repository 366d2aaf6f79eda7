"""The transformer against diffusers' goldens, and what its callers rely on: splitting, batching, dtypes, memory."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import models_support as support
import numpy as np
import pytest
from flax import nnx

from videodiff.attention.api import Attend, AttentionSpec, HeadStats, make_attend
from videodiff.configs import TransformerConfig
from videodiff.grid import TokenGrid
from videodiff.models import layers
from videodiff.models.transformer import WanTransformer, param_dtype_for

GOLDEN = np.load(support.GOLDENS / "models.npz")


def dense(config: TransformerConfig, shape: tuple[int, ...]) -> Attend:
    _, f, y, x, _ = shape
    return make_attend("dense", AttentionSpec(TokenGrid(f, y // 2, x // 2), head_dim=config.attention_head_dim))


@functools.cache
def program(config: TransformerConfig, shape: tuple[int, ...]):
    attend = dense(config, shape)
    return jax.jit(lambda m, a, t, c, b: m(a, t, m.encode_context(c, b), attend))


def forward(model: WanTransformer, latents, t, text, logit_bias=None) -> np.ndarray:
    return np.asarray(program(model.config, latents.shape)(model, latents, t, text, logit_bias))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = support.write(tmp_path_factory.mktemp(name), support.TRANSFORMERS[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", support.TRANSFORMERS)
def test_equals_diffusers(name: str, folders) -> None:
    model = support.load(folders(name), support.TRANSFORMERS[name])
    out = forward(model, *support.transformer_inputs(name))
    assert out.dtype == np.float32
    assert support.relative_l2(out, GOLDEN[f"transformer_{name}"]) <= 1e-5


def test_items_of_a_batch_do_not_meet(folders) -> None:
    config = support.TRANSFORMERS["plain"]
    model = support.load(folders("plain"), config)
    latents, t, text = support.transformer_inputs("plain")
    for i in range(2):
        alone = forward(model, latents[i : i + 1], t[i : i + 1], text[i : i + 1])
        assert support.relative_l2(alone[0], GOLDEN["transformer_plain"][i]) <= 1e-5


def test_blocks_split_anywhere_bit_for_bit(folders) -> None:
    config = support.TRANSFORMERS["long"]
    model = support.load(folders("long"), config)
    latents, t, text = support.transformer_inputs("long")
    attend = dense(config, latents.shape)

    @jax.jit
    def start(m):
        return *m.embed(latents, t), m.encode_context(text)

    x, mod, context = start(model)
    run = jax.jit(lambda m, x, a, b: m.blocks(x, mod, context, a, b, attend, 0), static_argnums=(2, 3))
    whole, stats = run(model, x, 0, 5)
    assert stats.route.shape == stats.error.shape == (5, 1, config.num_attention_heads)
    for k in (1, 3):
        half, first = run(model, x, 0, k)
        both, second = run(model, half, k, 5)
        np.testing.assert_array_equal(both, whole)
        assert (len(first.route), len(second.route)) == (k, 5 - k)
        assert support.relative_l2(half, whole) > 1e-2
    for bad in ((2, 2), (-1, 2), (0, 6)):
        with pytest.raises(ValueError, match="layers"):
            model.blocks(x, mod, context, *bad, attend, 0)


def test_attention_hears_its_layer_and_step(folders) -> None:
    config = support.TRANSFORMERS["long"]
    model = support.load(folders("long"), config)
    latents, t, text = support.transformer_inputs("long")

    def attend(q, k, v, *, layer, step):
        heads = jnp.zeros((q.shape[0], q.shape[2]))
        return v, HeadStats(heads.astype(jnp.int32) + layer, heads + step)

    @jax.jit
    def run(m, step):
        x, mod = m.embed(latents, t)
        return m.blocks(x, mod, m.encode_context(text), 1, 4, attend, step)[1]

    stats = run(model, 17)
    np.testing.assert_array_equal(stats.route[:, 0, 0], [1, 2, 3])
    np.testing.assert_array_equal(stats.error, np.full((3, 1, 5), 17))


def test_bfloat16_keeps_what_must_stay_float32(folders) -> None:
    config = support.TRANSFORMERS["odd"]
    model = support.load(folders("odd"), config, lambda path: param_dtype_for(path, jnp.bfloat16), dtype=jnp.bfloat16)
    kept = {".".join(map(str, path)) for path, p in nnx.to_flat_state(nnx.state(model)) if p[...].dtype == jnp.float32}
    assert kept == {
        "scale_shift_table", "block_stack.scale_shift_table", "block_stack.norm2.scale", "block_stack.norm2.bias",
        *(f"time_embedder.linear_{i}.{p}" for i in (1, 2) for p in ("kernel", "bias")),
    }  # fmt: skip
    built = nnx.state(nnx.eval_shape(lambda: WanTransformer(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    for path, p in nnx.to_flat_state(built):
        assert p.dtype == param_dtype_for(path, jnp.bfloat16), path  # a fresh module follows the same rule
    out = forward(model, *support.transformer_inputs("odd"))
    assert out.dtype == np.float32
    assert 1e-4 < support.relative_l2(out, GOLDEN["transformer_odd"]) < 5e-2


def test_folded_padding_equals_padded_text(folders) -> None:
    """One zero row with log(n) on its logits stands for the n zero rows up to 512."""
    model = support.load(folders("plain"), support.TRANSFORMERS["plain"])
    latents, t, text = support.transformer_inputs("plain")
    n = text.shape[1]
    padded = np.pad(text, ((0, 0), (0, 512 - n), (0, 0)))
    bias = np.zeros((2, n + 1), np.float32)
    bias[:, n] = math.log(512 - n)
    want = forward(model, latents, t, padded)
    got = forward(model, latents, t, padded[:, : n + 1], bias)
    assert support.relative_l2(got, want) <= 1e-5
    assert support.relative_l2(GOLDEN["transformer_plain"], want) > 1e-3  # the padding counts


def test_cross_attention_in_chunks(monkeypatch) -> None:
    r = np.random.default_rng(0)
    q, k, v = (jnp.asarray(r.standard_normal((2, n, 3, 8)), jnp.float32) for n in (23, 7, 7))
    bias = jnp.asarray(r.standard_normal((2, 7)), jnp.float32)
    whole = layers.cross_attention(q, k, v, bias)
    p = np.exp(np.einsum("bnhd,blhd->bhnl", q, k) / math.sqrt(8) + np.asarray(bias)[:, None, None])
    want = np.einsum("bhnl,blhd->bnhd", p / p.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(whole, want, atol=5e-6)
    for chunk in (5, 23, 8):  # a rest, none, another rest
        monkeypatch.setattr(layers, "CROSS_CHUNK", chunk)
        np.testing.assert_allclose(layers.cross_attention(q, k, v, bias), whole, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_scan_never_copies_the_stack(dtype) -> None:
    """Working memory is about one layer's, although XLA for CPU computes bfloat16 products in float32."""
    config = TransformerConfig(
        num_attention_heads=2, attention_head_dim=64, text_dim=16, freq_dim=16, ffn_dim=512, num_layers=48
    )
    make = lambda: WanTransformer(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))  # noqa: E731
    graph, state = nnx.split(nnx.eval_shape(make))
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    latents = shape(1, 1, 8, 8, 16)
    attend = make_attend("dense", AttentionSpec(TokenGrid(1, 4, 4), head_dim=64))

    def run(state, latents, t, text):
        m = nnx.merge(graph, state)
        return m(latents, t, m.encode_context(text), attend)

    memory = jax.jit(run).lower(state, latents, shape(1), shape(1, 8, 16)).compile().memory_analysis()
    stack = sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(state["block_stack"]))
    assert memory.argument_size_in_bytes >= stack
    assert memory.temp_size_in_bytes < stack / 8, (memory.temp_size_in_bytes, stack)


def test_illegal_sizes_are_refused() -> None:
    config = support.TRANSFORMERS["plain"]
    graph, state = nnx.split(nnx.eval_shape(lambda: WanTransformer(config, rngs=nnx.Rngs(0))))

    def embed(*shape: int):
        return jax.eval_shape(lambda s: nnx.merge(graph, s).embed(jnp.zeros(shape), jnp.zeros(1))[0], state)

    assert embed(1, 2, 4, 6, 16).shape == (1, 12, 128)
    for shape in ((1, 2, 5, 6, 16), (1, 2, 4, 7, 16), (1, 2, 4, 6, 15)):
        with pytest.raises(ValueError, match="multiples of 2 and 16 channels"):
            embed(*shape)
    with pytest.raises(ValueError, match="rope_max_seq_len=64"):
        embed(1, 65, 4, 6, 16)
