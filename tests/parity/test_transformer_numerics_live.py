"""The transformer against diffusers' WanTransformer3DModel, live: unusual shapes, gradients, bfloat16, padded text."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from videodiff.attention.api import AttentionSpec, make_attend  # noqa: E402
from videodiff.configs import TransformerConfig  # noqa: E402
from videodiff.grid import TokenGrid  # noqa: E402
from videodiff.models.layers import timestep_sinusoid  # noqa: E402
from videodiff.models.rope import rope_tables  # noqa: E402
from videodiff.models.transformer import WanTransformer, param_dtype_for  # noqa: E402
from videodiff.weights import keys_transformer  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import models_support as support  # noqa: E402

_SMALL = {"text_dim": 20, "freq_dim": 48, "ffn_dim": 56, "rope_max_seq_len": 40}
# config, (B, F, Y, X): patches of 1 and 3, other channels out than in, head dims not divisible by 6, by 4, or too small
# for three axes; one to seven heads and layers; 1 to 9 frames; up to 345 patches a frame
CASES = {
    "patch_1": (
        TransformerConfig(
            **_SMALL, patch_size=(1, 1, 1), num_attention_heads=2, attention_head_dim=10, num_layers=1, in_channels=3,
            out_channels=5,
        ),
        (2, 3, 5, 7),
    ),
    "patch_3": (
        TransformerConfig(
            **_SMALL, patch_size=(1, 3, 3), num_attention_heads=7, attention_head_dim=14, num_layers=3, in_channels=4,
            out_channels=4, eps=1e-5,
        ),
        (1, 2, 9, 15),
    ),
    "one_axis": (
        TransformerConfig(**_SMALL, num_attention_heads=3, attention_head_dim=4, num_layers=2, cross_attn_norm=False),
        (1, 9, 6, 2),
    ),
    "wide": (TransformerConfig(**_SMALL, num_attention_heads=3, attention_head_dim=128, num_layers=3), (1, 1, 46, 30)),
    "seven": (TransformerConfig(**_SMALL, num_attention_heads=1, attention_head_dim=16, num_layers=7), (3, 5, 4, 2)),
}  # fmt: skip


def reference(config: TransformerConfig, folder: Path, seed: int = 1):
    """diffusers' module, every parameter with noise so that no table, norm or bias is neutral; saved in folder."""
    torch.manual_seed(seed)
    model = diffusers.WanTransformer3DModel.from_config(config.to_json()).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_((0.4 if name.endswith("scale_shift_table") else 0.1) * torch.randn_like(p))
    model.save_pretrained(folder)
    assert TransformerConfig.from_json(json.loads((folder / "config.json").read_text())) == config
    return model


def inputs(config: TransformerConfig, size: tuple[int, int, int, int], length: int = 13):
    """latents [B, F, Y, X, Cin], timestep [B], text [B, length, text_dim]."""
    r = np.random.default_rng(11)
    latents = r.standard_normal((*size, config.in_channels)).astype(np.float32)
    text = r.standard_normal((size[0], length, config.text_dim)).astype(np.float32)
    return latents, np.array([998.4, 3.0, 500.25], np.float32)[: size[0]], text


def theirs(model, latents, t, text) -> np.ndarray:
    dtype = model.patch_embedding.weight.dtype
    x = torch.from_numpy(latents).permute(0, 4, 1, 2, 3)
    with torch.no_grad():
        out = model(x.to(dtype), torch.from_numpy(t), torch.from_numpy(text).to(dtype)).sample
    return out.float().permute(0, 2, 3, 4, 1).numpy()


def forward(model: WanTransformer, latents, t, text, bias=None) -> jax.Array:
    config = model.config
    _, f, y, x, _ = latents.shape
    grid = TokenGrid(f, y // config.patch_size[1], x // config.patch_size[2])
    attend = make_attend("dense", AttentionSpec(grid, head_dim=config.attention_head_dim))
    return model(latents, t, model.encode_context(text, bias), attend)


ours = jax.jit(forward)


@pytest.mark.parametrize("name", CASES)
def test_unusual_shapes(name: str, tmp_path: Path) -> None:
    config, size = CASES[name]
    want = theirs(reference(config, tmp_path), *inputs(config, size))
    got = ours(support.load(tmp_path, config), *inputs(config, size))
    assert want.shape == (*size, config.out_channels)
    assert support.relative_l2(got, want) <= 1e-5


@pytest.mark.parametrize("dim", [256, 64, 48, 2])
def test_timestep_sinusoid(dim: int) -> None:
    """Every integer timestep and some between: within a float32 step of an angle near 1000."""
    t = np.concatenate([np.arange(1001), [0.5, 123.4, 998.4, 937.5]]).astype(np.float32)
    project = diffusers.models.embeddings.Timesteps(dim, flip_sin_to_cos=True, downscale_freq_shift=0)
    want = project(torch.from_numpy(t)).numpy()
    np.testing.assert_allclose(timestep_sinusoid(jnp.asarray(t), dim), want, rtol=0, atol=7e-5)


@pytest.mark.parametrize("head_dim", [128, 64, 32, 24, 10, 6, 4, 2])
def test_rotary_tables(head_dim: int) -> None:
    rope = diffusers.models.transformers.transformer_wan.WanRotaryPosEmbed(head_dim, (1, 2, 2), 64)
    for frames, rows, cols in ((1, 64, 3), (64, 1, 5), (2, 3, 64)):
        cos, sin = rope(torch.zeros(1, 1, frames, 2 * rows, 2 * cols))  # [1, N, 1, D], each value twice
        got = rope_tables(TokenGrid(frames, rows, cols), head_dim, 64)
        for ours_, theirs_ in zip(got, (cos, sin), strict=True):
            np.testing.assert_allclose(ours_, theirs_[0, :, 0, ::2].numpy(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["patch_3", "one_axis"])
def test_gradients(name: str, tmp_path: Path) -> None:
    """Of a weighted sum of the velocity, to every parameter, layer by layer, against torch's autograd."""
    config, size = CASES[name]
    model = reference(config, tmp_path)
    latents, t, text = inputs(config, size)
    weight = np.random.default_rng(2).standard_normal((*size, config.out_channels)).astype(np.float32)
    out = model(torch.from_numpy(latents).permute(0, 4, 1, 2, 3), torch.from_numpy(t), torch.from_numpy(text)).sample
    (out.permute(0, 2, 3, 4, 1) * torch.from_numpy(weight)).sum().backward()
    want = {n: p.grad.numpy() for n, p in model.named_parameters()}

    graph, state = nnx.split(support.load(tmp_path, config))
    loss = jax.jit(jax.grad(lambda s: (forward(nnx.merge(graph, s), latents, t, text) * weight).sum()))
    got = dict(nnx.to_flat_state(loss(state)))
    seen = set()
    for rule in keys_transformer.table(config):
        grad = np.asarray(got[rule.target][...])
        for i, source in enumerate(rule.sources):
            seen.add(source)
            assert support.relative_l2(rule.source_view(grad, i), want[source]) <= 2e-5, source
    assert seen == want.keys()


@pytest.mark.parametrize("name", ["wide", "patch_3"])
def test_bfloat16_is_as_near_to_float32_as_diffusers(name: str, tmp_path: Path) -> None:
    """Same tensors kept in float32, and no larger distance to the float32 result of the same rounded weights."""
    config, size = CASES[name]
    reference(config, tmp_path)
    low = diffusers.WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).eval()
    model = support.load(tmp_path, config, lambda path: param_dtype_for(path, jnp.bfloat16), dtype=jnp.bfloat16)
    dtypes = {n: str(p.dtype).removeprefix("torch.") for n, p in low.named_parameters()}
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for rule in keys_transformer.table(config):
        assert {dtypes.pop(n) for n in rule.sources} == {str(flat[rule.target][...].dtype)}, rule
    assert not dtypes
    data = inputs(config, size)
    theirs_low, ours_low = theirs(low, *data), ours(model, *data)
    exact = theirs(low.float(), *data)
    error, bound = support.relative_l2(ours_low, exact), support.relative_l2(theirs_low, exact)
    assert 1e-4 < error <= 1.1 * bound, (error, bound)
    assert bound < 3e-2


def test_text_padded_to_512_rows(tmp_path: Path) -> None:
    """diffusers sees 512 rows, zero after the prompt; here the zero rows are one row with log(n) on its logits."""
    config, size = CASES["seven"]
    config = dataclasses.replace(config, num_layers=3)
    model = reference(config, tmp_path)
    latents, t, text = inputs(config, size, 13)
    lengths = np.array([13, 5, 1])
    text *= np.arange(13)[:, None] < lengths[:, None, None]
    want = theirs(model, latents, t, np.pad(text, ((0, 0), (0, 512 - 13), (0, 0))))
    folded = np.pad(text, ((0, 0), (0, 1), (0, 0)))
    bias = np.where(np.arange(14) == lengths[:, None], np.log(512.0 - lengths)[:, None], -np.inf)
    bias = np.where(np.arange(14) < lengths[:, None], 0, bias).astype(np.float32)
    got = ours(support.load(tmp_path, config), latents, t, folded, bias)
    assert support.relative_l2(got, want) <= 1e-5
    plain = ours(support.load(tmp_path, config), latents, t, folded)
    assert support.relative_l2(plain, want) > 1e-2
    assert math.isclose(float(np.exp(bias).sum()), 3 * 512, rel_tol=1e-6)
