"""Guidance, the dtype border and layer segments of the denoiser, on a small random transformer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from videodiff.attention.api import HeadStats
from videodiff.attention.dense import plain_attention
from videodiff.configs import TransformerConfig
from videodiff.denoiser import Denoiser, Operands, is_guided, join_context, velocity
from videodiff.grid import TokenGrid
from videodiff.models.transformer import Context, WanTransformer
from videodiff.sampling.loop import StepPrograms, run, start
from videodiff.sampling.solvers import make_solver
from videodiff.schedule import Segment, StepPlan

CONFIG = TransformerConfig(
    num_attention_heads=2, attention_head_dim=12, in_channels=3, out_channels=3, text_dim=8, freq_dim=16, ffn_dim=20,
    num_layers=3, rope_max_seq_len=32,
)  # fmt: skip
B, LAYERS = 2, CONFIG.num_layers
WHOLE = (Segment(0, LAYERS, 1.0),)
STEP = jnp.int32(3)


def attend_with(density: float):
    """Dense attention that scales v by the density and reports it, so that a segment shows in result and statistics."""

    def attend(q, k, v, *, layer, step):
        error = jnp.full(q.shape[:1] + q.shape[2:3], density * 100 + layer * 10 + step, jnp.float32)
        return plain_attention(q, k, density * v), HeadStats(error.astype(jnp.int32), error)

    return attend


ATTENDS = {1.0: attend_with(1.0), 0.3: attend_with(0.3)}


def random_model(dtype=jnp.float32) -> WanTransformer:
    """Random everywhere: a fresh model's gates and biases would leave parts of the forward pass unseen."""
    abstract = nnx.eval_shape(lambda: WanTransformer(CONFIG, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(abstract)
    state = jax.tree.map(lambda a: jnp.asarray(0.3 * rng.standard_normal(a.shape), a.dtype), state)
    return nnx.merge(graphdef, state)


@pytest.fixture(scope="module")
def model() -> WanTransformer:
    return random_model()


@pytest.fixture(scope="module")
def inputs(model: WanTransformer):
    rng = np.random.default_rng(1)
    latents = jnp.asarray(rng.standard_normal((B, 2, 4, 6, 3)), jnp.float32)
    text = jnp.asarray(rng.standard_normal((2, B, 5, CONFIG.text_dim)), jnp.float32)
    return latents, model.encode_context(text[0]), model.encode_context(text[1])


@functools.partial(nnx.jit, static_argnames="plan")
def compiled(model, latents, timestep, context, scale, plan):
    return velocity(model, latents, timestep, context, plan, ATTENDS, scale, STEP)


@nnx.jit
def whole_forward(model, latents, context):
    """The model's own forward pass at timestep 900.5, dense."""
    return model(latents, jnp.full(latents.shape[:1], 900.5, jnp.float32), context, ATTENDS[1.0], STEP)


def ask(model, latents, context, *, segments=WHOLE, guided=True, scale=5.0, timestep=900.5):
    return compiled(model, latents, jnp.float32(timestep), context, jnp.float32(scale), StepPlan(segments, guided))


def test_guidance(model, inputs) -> None:
    latents, cond, uncond = inputs
    v_cond, v_uncond = whole_forward(model, latents, cond), whole_forward(model, latents, uncond)
    assert np.abs(v_cond - v_uncond).max() > 0.01
    v, _ = ask(model, latents, join_context(cond, uncond), scale=5.0)
    assert v.dtype == jnp.float32
    np.testing.assert_allclose(v, v_uncond + 5 * (v_cond - v_uncond), rtol=0, atol=2e-5)


def test_one_branch_is_the_conditional_half(model, inputs) -> None:
    latents, cond, uncond = inputs
    both = join_context(cond, uncond)
    alone, stats = ask(model, latents, cond, guided=False, scale=7.0)
    np.testing.assert_allclose(alone, whole_forward(model, latents, cond), rtol=0, atol=2e-6)
    np.testing.assert_array_equal(alone, ask(model, latents, both, guided=False)[0])
    guided_by_one, stats_of_two = ask(model, latents, both, scale=1.0)
    np.testing.assert_allclose(alone, guided_by_one, rtol=0, atol=2e-6)
    assert stats.error.shape == (LAYERS, B, 2)
    assert stats_of_two.error.shape == (LAYERS, 2 * B, 2)


def test_scale_zero_is_unconditional(model, inputs) -> None:
    latents, cond, uncond = inputs
    v, _ = ask(model, latents, join_context(cond, uncond), scale=0.0)
    np.testing.assert_allclose(v, ask(model, latents, uncond, guided=False)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("scale", "guided"), [(5.0, True), (1.0001, True), (1.0, False), (0.0, False)])
def test_when_guidance_runs(scale: float, guided: bool) -> None:
    assert is_guided(scale) is guided


def test_batch_entry_equals_itself_alone(model, inputs) -> None:
    latents, cond, uncond = inputs
    whole, _ = ask(model, latents, join_context(cond, uncond))
    for b in range(B):
        one = slice(b, b + 1)
        alone_context = jax.tree.map(lambda a, one=one: a[one], (cond, uncond))
        alone, _ = ask(model, latents[one], join_context(*alone_context))
        np.testing.assert_allclose(whole[one], alone, rtol=0, atol=2e-5)


def test_segments(model, inputs) -> None:
    latents, cond, _ = inputs

    @nnx.jit
    def by_hand(model, latents, context):
        x, mod = model.embed(latents, jnp.full((B,), 900.5))
        x, _ = model.blocks(x, mod, context, 0, 1, ATTENDS[1.0], STEP)
        x, _ = model.blocks(x, mod, context, 1, 3, ATTENDS[0.3], STEP)
        return model.head(x, mod, TokenGrid(2, 2, 3))

    v, stats = ask(model, latents, cond, segments=(Segment(0, 1, 1.0), Segment(1, 3, 0.3)), guided=False)
    # layer and step reach the attention; statistics are stacked in layer order
    np.testing.assert_allclose(stats.error[:, 0, 0], [103, 43, 53], rtol=1e-6)
    np.testing.assert_allclose(v, by_hand(model, latents, cond), rtol=0, atol=2e-6)
    dense, _ = ask(model, latents, cond, guided=False)
    assert np.abs(v - dense).max() > 1e-3


def test_dtype_border() -> None:
    """Latents are cast for the model; velocity and timestep are float32."""
    given: dict = {}

    class Spy:
        """Records what reaches the model, and answers in bfloat16."""

        config, dtype = CONFIG, jnp.bfloat16

        def embed(self, latents, timestep):
            given.update(latents=latents, timestep=timestep)
            return latents, None

        def blocks(self, x, mod, context, start, stop, attend, step):
            return x, HeadStats(jnp.zeros((stop - start, 2, 2), jnp.int32), jnp.zeros((stop - start, 2, 2)))

        def head(self, x, mod, grid):
            given.update(grid=grid)
            return x * jnp.bfloat16([[[[[3]]]], [[[[1]]]]])  # conditional 3x, unconditional x

    context = Context(jnp.ones((2, 5, 8), jnp.bfloat16), None)
    latents = jnp.full((1, 2, 4, 6, 3), 1 / 3, jnp.float32)
    plan, scale = StepPlan(WHOLE, True), jnp.float32(1.001)
    v, _ = velocity(Spy(), latents, jnp.float32(998.4), context, plan, ATTENDS, scale, STEP)  # type: ignore[arg-type]
    assert given["latents"].dtype == jnp.bfloat16
    assert given["latents"].shape == (2, 2, 4, 6, 3)
    assert given["grid"] == TokenGrid(2, 2, 3)
    assert given["timestep"].dtype == jnp.float32
    np.testing.assert_array_equal(given["timestep"], np.float32([998.4, 998.4]))
    assert v.dtype == jnp.float32
    # guidance is float32 arithmetic: in bfloat16 1 + 1.001 * 2 would be 3
    third = float(jnp.bfloat16(1 / 3))
    np.testing.assert_allclose(v, third + 1.001 * (float(jnp.bfloat16(3 * third)) - third), rtol=1e-6)


def test_timestep_per_video(model, inputs) -> None:
    latents, cond, uncond = inputs
    both = join_context(cond, uncond)
    v, _ = ask(model, latents, both, timestep=[900.5, 20.0])
    np.testing.assert_allclose(v[:1], ask(model, latents, both, timestep=900.5)[0][:1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(v[1:], ask(model, latents, both, timestep=20.0)[0][1:], rtol=0, atol=2e-6)


def test_join_context(inputs) -> None:
    _, cond, uncond = inputs
    bias = [jnp.zeros((B, 5)), jnp.full((B, 5), -1.0)]
    both = join_context(Context(cond.tokens, bias[0]), Context(uncond.tokens, bias[1]))
    np.testing.assert_array_equal(both.tokens[:B], cond.tokens)
    np.testing.assert_array_equal(both.tokens[B:], uncond.tokens)
    np.testing.assert_array_equal(both.logit_bias, np.concatenate(bias))
    with pytest.raises(ValueError, match="None"):
        join_context(cond, Context(uncond.tokens, bias[1]))


def test_errors(model, inputs) -> None:
    latents, cond, uncond = inputs
    both = join_context(cond, uncond)
    with pytest.raises(ValueError, match=r"guided step on a batch of 2 needs a context of 4 rows.*got 2"):
        ask(model, latents, cond)
    with pytest.raises(ValueError, match=r"single-branch step on a batch of 1 needs a context of 1 or 2 rows.*got 4"):
        ask(model, latents[:1], both, guided=False)
    with pytest.raises(ValueError, match=r"density \[0.5\].*built for \[0.3, 1.0\]"):
        ask(model, latents, both, segments=(Segment(0, LAYERS, 0.5),))
    with pytest.raises(ValueError, match="covers 2 layers and the model has 3"):
        ask(model, latents, both, segments=(Segment(0, 2, 1.0),))


def test_denoiser_traces_scale_and_step(model, inputs) -> None:
    """Weights, text, scale, timestep and step are arguments of the program: one compilation for all of them."""
    latents, cond, uncond = inputs
    graphdef, weights = nnx.split(model)
    denoise = Denoiser(graphdef, ATTENDS)
    program = jax.jit(denoise, static_argnames="plan")
    both = join_context(cond, uncond)
    for scale, timestep in ((5.0, 900.5), (2.0, 10.0)):
        operands = Operands(weights, both, jnp.float32(scale))
        v, stats = program(operands, latents, jnp.float32(timestep), STEP, plan=StepPlan(WHOLE, True))
        expected, _ = ask(model, latents, both, scale=scale, timestep=timestep)
        np.testing.assert_allclose(v, expected, rtol=0, atol=5e-5)
        assert stats.route.shape == (LAYERS, 2 * B, 2)
    assert program._cache_size() == 1


def test_in_the_sampling_loop(model, inputs) -> None:
    """Two phases, guided and not, with the real pytrees: two programs, weights as arguments, statistics on the host."""
    latents, cond, uncond = inputs
    graphdef, weights = nnx.split(model)
    programs = StepPrograms(Denoiser(graphdef, ATTENDS))
    plans = (StepPlan(WHOLE, True),) * 2 + (StepPlan((Segment(0, LAYERS, 0.3),), False),) * 2
    operands = Operands(weights, join_context(cond, uncond), jnp.float32(4.0))
    solver = make_solver("unipc", 4, 3.0)
    result = run(programs, operands, solver, plans, start(solver, latents))
    assert (result.compilations, result.evaluations) == (2, 4)
    assert [r.stats.error.shape for r in result.records] == [(LAYERS, 2 * B, 2)] * 2 + [(LAYERS, B, 2)] * 2
    np.testing.assert_allclose(result.records[3].stats.error[:, 0, 0], [33, 43, 53], rtol=1e-6)
    fresh = nnx.split(random_model())  # as after the weights were freed and loaded again
    assert fresh[0] == graphdef
    again = run(programs, dataclasses.replace(operands, weights=fresh[1]), solver, plans, start(solver, latents))
    assert again.compilations == 0
    np.testing.assert_array_equal(again.latents, result.latents)
