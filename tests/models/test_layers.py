"""Norms, the timestep sinusoid and cross-attention against float64 formulas; what rounds where; memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from videodiff.models.layers import (
    CROSS_CHUNK,
    LayerNorm,
    Linear,
    RMSNorm,
    cross_attention,
    layer_norm,
    take_layer,
    timestep_sinusoid,
)

R = np.random.default_rng(0)


def rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_rms_norm(size: float) -> None:
    """At 1e-3 the epsilon is as large as the mean square: it belongs inside the root."""
    norm = RMSNorm(24, eps=1e-6, param_dtype=jnp.float32)
    norm.scale[...] = jnp.asarray(R.standard_normal(24), jnp.float32)
    x = (size * R.standard_normal((3, 5, 24))).astype(np.float32)
    np.testing.assert_allclose(norm(jnp.asarray(x)), rms(x, np.asarray(norm.scale[...]), 1e-6), rtol=2e-6, atol=1e-7)


def test_rms_norm_rounds_once() -> None:
    """In bfloat16 as torch's module does: statistics and the product with the scale in float32."""
    norm = RMSNorm(512, eps=1e-6, param_dtype=jnp.bfloat16)
    norm.scale[...] = jnp.asarray(1 + 0.3 * R.standard_normal(512), jnp.bfloat16)
    x = jnp.asarray(R.standard_normal((64, 512)), jnp.bfloat16)
    out = norm(x)
    assert out.dtype == jnp.bfloat16
    scale = np.asarray(norm.scale[...], np.float64)
    exact = rms(np.asarray(x), scale, 1e-6)
    once = jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)
    twice = jnp.asarray(exact / scale, jnp.float32).astype(jnp.bfloat16) * norm.scale[...]
    assert np.mean(np.asarray(out == once)) > 0.999
    assert np.mean(np.asarray(twice == once)) < 0.9  # so the difference can be seen


def test_layer_norm_on_a_large_mean() -> None:
    """E[x^2] - E[x]^2 would lose every digit here."""
    x = (1000 + R.standard_normal((4, 256))).astype(np.float32)
    exact = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(layer_norm(jnp.asarray(x), 1e-6), exact, atol=2e-4)
    norm = LayerNorm(256, eps=1e-6)
    norm.scale[...] = jnp.asarray(R.standard_normal(256), jnp.float32)
    norm.bias[...] = jnp.asarray(R.standard_normal(256), jnp.float32)
    want = exact * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, atol=1e-3)
    low = jnp.asarray(x, jnp.bfloat16)
    assert layer_norm(low, 1e-6).dtype == norm(low).dtype == jnp.float32


@pytest.mark.parametrize("dim", [256, 32, 2])
def test_timestep_sinusoid(dim: int) -> None:
    t = np.array([0.0, 1.0, 123.4, 998.4, 1000.0], np.float32)
    out = timestep_sinusoid(jnp.asarray(t), dim)
    assert out.dtype == jnp.float32
    angle = np.outer(t.astype(np.float64), 10000.0 ** (-np.arange(dim // 2) / (dim // 2)))
    # a float32 angle near 1000 is off by up to 3e-5, a float32 frequency moves it by as much again
    np.testing.assert_allclose(out, np.concatenate([np.cos(angle), np.sin(angle)], -1), atol=8e-5)
    np.testing.assert_array_equal(out[0], [1.0] * (dim // 2) + [0.0] * (dim // 2))  # cosines first
    assert np.abs(out[3] - out[4]).max() > 0.1


def test_linear_takes_any_input_dtype_and_gives_its_own() -> None:
    linear = Linear(7, 5, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    linear.bias[...] = jnp.arange(5.0)
    x = R.standard_normal((3, 7)).astype(np.float32)
    out = linear(jnp.asarray(x))
    assert out.dtype == jnp.bfloat16
    want = x.astype(np.float64) @ np.asarray(linear.kernel[...], np.float64) + np.arange(5)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=0.05)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_take_layer(dtype: jnp.dtype) -> None:
    stack = jnp.asarray(R.standard_normal((4, 3, 2)), dtype)
    take = jax.jit(take_layer)
    for i in range(4):
        np.testing.assert_array_equal(take(stack, i), stack[i])
    grad = jax.grad(lambda s: (take_layer(s, jnp.int32(2)) ** 2).sum())(stack)
    want = np.zeros(stack.shape)
    want[2] = 2 * np.asarray(stack[2], np.float64)
    np.testing.assert_array_equal(np.asarray(grad, np.float64), want)


def test_cross_attention_bias_counts_rows() -> None:
    """log(n) on a row is n copies of it; -inf takes a row away."""
    q, k, v = (jnp.asarray(R.standard_normal((2, n, 3, 8)), jnp.float32) for n in (6, 5, 5))
    copies = (1, 4, 2, 1, 7)
    many = [jnp.repeat(a, jnp.array(copies), axis=1) for a in (k, v)]
    bias = jnp.tile(jnp.log(jnp.array(copies, jnp.float32)), (2, 1))
    attend = jax.jit(cross_attention)
    np.testing.assert_allclose(attend(q, k, v, bias), attend(q, *many, None), atol=1e-6)
    gone = jnp.zeros((2, 5)).at[:, 3].set(-jnp.inf)
    keep = jnp.array([0, 1, 2, 4])
    np.testing.assert_allclose(attend(q, k, v, gone), attend(q, k[:, keep], v[:, keep], None), atol=1e-6)


def test_cross_attention_with_huge_logits() -> None:
    """Softmax subtracts the maximum: logits of 1e5 pick one row."""
    q = jnp.full((1, 4, 1, 8), 300.0)
    k = jnp.zeros((1, 3, 1, 8)).at[0, 1].set(300.0)
    v = jnp.asarray(R.standard_normal((1, 3, 1, 8)), jnp.float32)
    np.testing.assert_allclose(cross_attention(q, k, v, None), jnp.broadcast_to(v[:, 1:2], q.shape), atol=1e-6)


def test_cross_attention_memory_is_linear_in_tokens() -> None:
    shape = lambda n: jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32)  # noqa: E731
    text = 512

    def temporaries(n: int) -> int:
        run = jax.jit(lambda q, k, v: cross_attention(q, k, v, None))
        return run.lower(shape(n), shape(text), shape(text)).compile().memory_analysis().temp_size_in_bytes

    small, large = 2 * CROSS_CHUNK + 5, 16 * CROSS_CHUNK + 5
    scores = 2 * text * 4  # bytes a token
    grown = (temporaries(large) - temporaries(small)) / (large - small)
    assert grown < scores / 8, (grown, scores)  # per token only padded copies of q and o, no row of scores
