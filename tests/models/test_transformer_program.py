"""The transformer as a program: gradients, strict dtypes, constants, published sizes traced end to end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import models_support as support
import numpy as np
import pytest
from flax import nnx

from videodiff.attention.api import HeadStats
from videodiff.configs import TransformerConfig
from videodiff.models.transformer import WanTransformer, param_dtype_for


def attend(q, k, v, *, layer, step):
    """Every token sees every token; by jax.nn, not by this package."""
    with jax.numpy_dtype_promotion("standard"):  # jax.nn promotes inside
        o = jax.nn.dot_product_attention(q, k, v)
    b, _, h, _ = q.shape
    return o, HeadStats(jnp.full((b, h), layer, jnp.int32), jnp.zeros((b, h), jnp.float32))


def forward(model: WanTransformer, latents, t, text) -> jax.Array:
    return model(latents, t, model.encode_context(text), attend)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """(graph, state, loss of a state, its gradient) on config "odd"."""
    config = support.TRANSFORMERS["odd"]
    graph, state = nnx.split(support.load(support.write(tmp_path_factory.mktemp("odd"), config), config))
    inputs = [jnp.asarray(a) for a in support.transformer_inputs("odd")]
    weight = np.random.default_rng(3).standard_normal(inputs[0].shape).astype(np.float32)

    @jax.jit
    def loss(state):
        return (forward(nnx.merge(graph, state), *inputs) * weight).sum()

    return state, loss, jax.jit(jax.grad(loss))(state)


def test_every_parameter_of_every_layer_gets_a_gradient(gradients) -> None:
    state, _, grad = gradients
    flat = dict(nnx.to_flat_state(grad))
    assert flat.keys() == dict(nnx.to_flat_state(state)).keys()
    for path, g in flat.items():
        stacked = np.asarray(g[...]) if path[0] == "block_stack" else np.asarray(g[...])[None]
        assert np.isfinite(stacked).all(), path
        for i, layer in enumerate(stacked):
            assert np.linalg.norm(layer) > 1e-2, (path, i)


@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_is_the_slope(gradients, seed: int) -> None:
    """Along a random direction, against central differences of two step sizes (Richardson)."""
    state, loss, grad = gradients
    leaves, structure = jax.tree.flatten(state)
    r = np.random.default_rng(seed)
    direction = jax.tree.unflatten(
        structure, [jnp.asarray(r.standard_normal(a.shape) * np.std(a), jnp.float32) for a in leaves]
    )
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(jax.tree.leaves(grad), jax.tree.leaves(direction), strict=True))

    def difference(h: float) -> float:
        moved = [loss(jax.tree.map(lambda a, d, s=s: a + s * h * d, state, direction)) for s in (1, -1)]
        return float(moved[0] - moved[1]) / (2 * h)

    want = (4 * difference(2.5e-3) - difference(5e-3)) / 3
    assert abs(slope) > 1
    assert abs(slope - want) < 5e-3 * abs(want), (slope, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_implicit_promotion(dtype) -> None:
    """Every change of dtype in the forward pass is written down; activations between blocks are the model's dtype."""
    config = support.TRANSFORMERS["odd"]
    latents, t, text = (jnp.asarray(a) for a in support.transformer_inputs("odd"))

    def run():
        model = WanTransformer(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        context = model.encode_context(text.astype(dtype), jnp.zeros(text.shape[:2], jnp.float32))
        x, mod = model.embed(latents.astype(dtype), t)
        y, stats = model.blocks(x, mod, context, 0, config.num_layers, attend, 3)
        return context, x, mod, y, stats, model(latents.astype(dtype), t, context, attend)

    with jax.numpy_dtype_promotion("strict"):
        context, x, mod, y, stats, velocity = jax.eval_shape(run)
    assert context.tokens.dtype == x.dtype == y.dtype == dtype
    assert {a.dtype for a in jax.tree.leaves(mod)} == {jnp.dtype(jnp.float32)}
    assert velocity.dtype == jnp.float32
    assert stats.route.shape == (config.num_layers, 2, config.num_attention_heads)


def test_timestep_is_not_rounded_to_the_models_dtype(tmp_path) -> None:
    """998.4 is 1000 in bfloat16. Embedding and modulation of a bfloat16 model keep the two apart."""
    config = support.TRANSFORMERS["odd"]
    folder = support.write(tmp_path, config)
    low = support.load(folder, config, lambda path: param_dtype_for(path, jnp.bfloat16), dtype=jnp.bfloat16)
    exact = support.load(folder, config)
    latents, t = jnp.zeros((2, 1, 2, 2, 16)), jnp.array([998.4, 1000.0])
    got, want = low.embed(latents, t)[1], exact.embed(latents, t)[1]
    np.testing.assert_array_equal(got.temb, want.temb)
    step = want.proj[0] - want.proj[1]
    assert support.relative_l2(got.proj[0] - got.proj[1], step) < 5e-3  # only the weights of time_proj are rounded


def test_context_does_not_depend_on_the_timestep(tmp_path) -> None:
    """encode_context runs once a prompt: two evaluations with one context equal two fresh ones."""
    config = support.TRANSFORMERS["plain"]
    model = support.load(support.write(tmp_path, config), config)
    latents, t, text = support.transformer_inputs("plain")
    run = jax.jit(lambda m, c, t: m(latents, t, c, attend))
    context = model.encode_context(jnp.asarray(text))
    first, second = run(model, context, t), run(model, context, t[::-1])
    assert support.relative_l2(first, second) > 0.1
    np.testing.assert_array_equal(first, run(model, model.encode_context(jnp.asarray(text)), t))  # and two runs agree


@pytest.mark.parametrize("name", ["t2v_1_3b", "t2v_14b"])
def test_published_sizes_trace(name: str) -> None:
    """720p, 81 frames, bfloat16, no array made: shapes, and no large constant in the program."""
    config = support.PUBLISHED[name][0]
    assert isinstance(config, TransformerConfig)
    graph, state = nnx.split(
        nnx.eval_shape(lambda: WanTransformer(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    )
    shape = jax.ShapeDtypeStruct

    def run(state, latents, t, text):
        return forward(nnx.merge(graph, state), latents, t, text)

    args = (shape((1, 21, 90, 160, 16), jnp.bfloat16), shape((1,), jnp.float32), shape((1, 512, 4096), jnp.bfloat16))
    program, out = jax.make_jaxpr(run, return_shape=True)(state, *args)
    assert (out.shape, out.dtype) == ((1, 21, 90, 160, 16), jnp.float32)
    assert sum(np.asarray(c).nbytes for c in program.consts) < 1 << 20  # 75600 rows of rotary tables would be 39 MB
