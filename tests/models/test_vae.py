"""The VAE against diffusers' goldens, and what its callers rely on: streaming, frame counts, statistics, chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import models_support as support
import numpy as np
import pytest
from flax import nnx
from jax import lax

from videodiff.models import vae_layers
from videodiff.models.vae import WanVAE, patchify, unpatchify

GOLDEN = np.load(support.GOLDENS / "models.npz")
FRAMES = {"plain": 9, "residual": 5, "patch4": 9}  # of the goldens
ENCODE = jax.jit(lambda m, video: m.encode(video))
DECODE = jax.jit(lambda m, z: m.decode(z))
FIRST = jax.jit(lambda m, z: m.decode_first(z))
NEXT = jax.jit(lambda m, z, state: m.decode_next(z, state))
ENCODE_FIRST = jax.jit(lambda m, video: m.encode_first(video))
ENCODE_NEXT = jax.jit(lambda m, video, state: m.encode_next(video, state))


@pytest.fixture(scope="module")
def vaes(tmp_path_factory):
    made: dict[str, WanVAE] = {}

    def get(name: str) -> WanVAE:
        if name not in made:
            folder = support.write(tmp_path_factory.mktemp(name), support.VAES[name])
            made[name] = support.load(folder, support.VAES[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", support.VAES)
def test_encode_equals_diffusers(name: str, vaes) -> None:
    mean, logvar = ENCODE(vaes(name), support.video(name, FRAMES[name]))
    assert mean.dtype == logvar.dtype == jnp.float32
    assert support.relative_l2(mean, GOLDEN[f"vae_{name}_mean"]) <= 1e-5
    assert support.relative_l2(logvar, GOLDEN[f"vae_{name}_logvar"]) <= 1e-5


@pytest.mark.parametrize("name", support.VAES)
def test_decode_equals_diffusers(name: str, vaes) -> None:
    out = np.asarray(DECODE(vaes(name), support.raw_latents(name, FRAMES[name])))
    assert out.dtype == np.float32
    assert support.relative_l2(np.clip(out, -1, 1), GOLDEN[f"vae_{name}_video"]) <= 1e-5


@pytest.mark.parametrize("name", support.VAES)
def test_streamed_decode_equals_decode(name: str, vaes) -> None:
    model, z = vaes(name), support.raw_latents(name, FRAMES[name])
    whole = np.asarray(DECODE(model, z))
    frames, state = FIRST(model, z[:, :1])
    assert frames.shape[1] == 1
    parts = [frames]
    shapes = jax.tree.map(jnp.shape, state)
    for i in range(1, z.shape[1]):
        frames, state = NEXT(model, z[:, i : i + 1], state)
        assert frames.shape[1] == 4
        assert jax.tree.map(jnp.shape, state) == shapes  # one program serves a video of any length
        parts.append(frames)
    assert support.relative_l2(np.concatenate(parts, 1), whole) <= 1e-5
    lost = NEXT(model, z[:, 1:2], jax.tree.map(jnp.zeros_like, state))[0]
    assert support.relative_l2(lost, whole[:, 1:5]) > 1e-3  # the state is what carries the past


@pytest.mark.parametrize("name", support.VAES)
def test_streamed_encode_equals_encode(name: str, vaes) -> None:
    vae, video = vaes(name), support.video(name, FRAMES[name])
    whole, _ = ENCODE(vae, video)
    mean, state = ENCODE_FIRST(vae, video[:, :1])
    parts, factor = [mean], vae.config.scale_factor_temporal
    for at in range(1, video.shape[1], factor):
        mean, state = ENCODE_NEXT(vae, video[:, at : at + factor], state)
        parts.append(mean)
    assert support.relative_l2(jnp.concatenate(parts, axis=1), whole) <= 1e-6


def test_any_chunks_give_the_same_video(vaes) -> None:
    """First chunk of two frames; then a first chunk of one and a second of two."""
    model, z = vaes("patch4"), support.raw_latents("patch4", 9)
    whole = np.asarray(DECODE(model, z))
    for cut in (1, 2):
        head, state = FIRST(model, z[:, :cut])
        tail, _ = NEXT(model, z[:, cut:], state)
        assert support.relative_l2(np.concatenate([head, tail], 1), whole) <= 1e-5


def test_constant_latents_decode_to_a_constant_video_after_the_start(vaes) -> None:
    """Up to the phase in a latent frame: the temporal upsampling makes its four frames with different weights."""
    model = vaes("patch4")
    z = support.raw_latents("patch4", 1)
    frames, state = FIRST(model, z)
    groups = []
    for _ in range(40):  # the causal convolutions reach about 30 latent frames back
        frames, state = NEXT(model, z, state)
        groups.append(np.asarray(frames))
    assert support.relative_l2(groups[-1], groups[-2]) <= 1e-6
    assert support.relative_l2(groups[0], groups[-1]) > 1e-2


def shapes_of(name: str, method: str, shape: tuple[int, ...]):
    """Output shapes of a method, traced only."""
    graph, state = nnx.split(nnx.eval_shape(lambda: WanVAE(support.VAES[name], rngs=nnx.Rngs(0))))
    run = lambda s, x: getattr(nnx.merge(graph, s), method)(x)  # noqa: E731
    return jax.tree.map(jnp.shape, jax.eval_shape(run, state, jax.ShapeDtypeStruct(shape, jnp.float32)))


@pytest.mark.parametrize("frames", [1, 5, 9])
@pytest.mark.parametrize("name", support.VAES)
def test_frame_counts(name: str, frames: int) -> None:
    s = support.VAES[name].scale_factor_spatial
    assert shapes_of(name, "decode", (2, (frames - 1) // 4 + 1, 3, 5, 16)) == (2, frames, 3 * s, 5 * s, 3)


@pytest.mark.parametrize("name", support.VAES)
def test_encoded_frame_counts(name: str) -> None:
    s = support.VAES[name].scale_factor_spatial
    assert shapes_of(name, "encode", (2, 81, 3 * s, 5 * s, 3)) == ((2, 21, 3, 5, 16), (2, 21, 3, 5, 16))


def test_illegal_sizes_are_refused() -> None:
    for shape in ((1, 4, 32, 32, 3), (1, 0, 32, 32, 3), (1, 5, 24, 32, 3), (1, 5, 32, 40, 3)):
        with pytest.raises(ValueError, match=r"4k\+1 frames and sizes in multiples of 16"):
            shapes_of("residual", "encode", shape)


def test_latent_statistics(vaes, monkeypatch) -> None:
    model, config = vaes("plain"), support.VAES["plain"]
    raw = support.raw_latents("plain", 9)
    latents = np.asarray(model.normalize(raw))
    want = (raw - np.array(config.latents_mean)) / np.array(config.latents_std)
    np.testing.assert_allclose(latents, want, atol=5e-6)
    np.testing.assert_allclose(model.denormalize(latents), raw, atol=5e-6)
    monkeypatch.setattr(WanVAE, "decode", lambda self, z: z)
    np.testing.assert_allclose(model.decode_latents(latents), np.clip(raw, -1, 1), atol=5e-6)
    assert np.abs(raw).max() > 1


@pytest.mark.parametrize("p", [1, 2, 4])
def test_patches(p: int) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 12, 3)).astype(np.float32)
    y = np.asarray(patchify(jnp.asarray(x), p))
    assert y.shape == (1, 2, 8 // p, 12 // p, 3 * p * p)
    np.testing.assert_array_equal(unpatchify(jnp.asarray(y), p), x)
    for c, dx, dy in ((0, 0, 0), (2, p - 1, 0), (1, 0, p - 1)):  # width offset before height offset
        np.testing.assert_array_equal(y[..., (c * p + dx) * p + dy], x[:, :, dy::p, dx::p, c])


def test_frame_attention_in_chunks(monkeypatch) -> None:
    kw = {"dtype": jnp.float32, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    layer = vae_layers.FrameAttention(6, **kw)
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((2, 2, 5, 3, 6)), jnp.float32)
    whole = np.asarray(layer(x))
    assert support.relative_l2(whole - np.asarray(x), x) > 1e-2
    for scores in (15 * 4, 15 * 5, 1):  # chunks with a rest, without, of one row
        monkeypatch.setattr(vae_layers, "ATTENTION_SCORES", scores)
        np.testing.assert_allclose(layer(x), whole, atol=1e-5)
    alone = layer(x[:1, 1:])
    np.testing.assert_allclose(alone[0, 0], whole[0, 1], atol=1e-5)  # frames do not see each other


def test_convolution_of_cpu_equals_the_one_of_accelerators(monkeypatch) -> None:
    r = np.random.default_rng(0)
    x = jnp.asarray(r.standard_normal((2, 5, 6, 7, 4)), jnp.float32)
    kernel = jnp.asarray(r.standard_normal((3, 3, 3, 4, 5)), jnp.float32)
    dims = ("NDHWC", "DHWIO", "NDHWC")
    want = lax.conv_general_dilated(x, kernel, (1, 1, 1), [(0, 0), (1, 1), (1, 1)], dimension_numbers=dims)
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)  # noqa: B023
        got = vae_layers.conv3d_valid_time(x, kernel)
        assert support.relative_l2(got, want) <= 1e-6
