"""What the tests, parity tests and goldens of the models share: small configs, reproducible weights and inputs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from videodiff.configs import TransformerConfig, VaeConfig
from videodiff.models.transformer import WanTransformer
from videodiff.models.vae import WanVAE
from videodiff.weights import keys_transformer, keys_vae
from videodiff.weights.keys import KeyRule
from videodiff.weights.load import load_module, source_shape

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
_T = {"in_channels": 16, "out_channels": 16, "text_dim": 40, "freq_dim": 64, "ffn_dim": 96, "rope_max_seq_len": 64}

# Odd heads and layers, head dims with every kind of axis split, with and without the norm before cross-attention.
TRANSFORMERS = {
    "odd": TransformerConfig(**_T, num_attention_heads=3, attention_head_dim=32, num_layers=2),
    "deep": TransformerConfig(**_T, num_attention_heads=2, attention_head_dim=64, num_layers=3),
    "plain": TransformerConfig(
        **_T, num_attention_heads=1, attention_head_dim=128, num_layers=1, cross_attn_norm=False
    ),
    "long": TransformerConfig(**_T, num_attention_heads=5, attention_head_dim=24, num_layers=5),
}
LATENTS = {"odd": (2, 1, 6, 10), "deep": (2, 3, 10, 6), "plain": (2, 2, 4, 4), "long": (1, 2, 8, 6)}  # B, F, Y, X

_STATISTICS = {
    "latents_mean": tuple(round(0.2 * (i % 5) - 0.3, 2) for i in range(16)),
    "latents_std": tuple(round(0.6 + 0.15 * (i % 7), 2) for i in range(16)),
}
VAES = {
    "plain": VaeConfig(**_STATISTICS, base_dim=8),
    "residual": VaeConfig(
        **_STATISTICS, base_dim=8, decoder_base_dim=16, is_residual=True, patch_size=2, in_channels=12, out_channels=12,
        scale_factor_spatial=16,
    ),
    "patch4": VaeConfig(
        **_STATISTICS, base_dim=8, dim_mult=(1, 2, 2), num_res_blocks=1, temperal_downsample=(True, True),
        is_residual=True, patch_size=4, in_channels=48, out_channels=48, scale_factor_spatial=16,
    ),
}  # fmt: skip
LATENT_SIZE = (3, 2)  # y, x of the VAE's tests

# The published shapes: transformer 1.3B and 14B, VAE 2.1 and 2.2.
_STATISTICS_48 = {"latents_mean": (0.0,) * 48, "latents_std": (1.0,) * 48}
PUBLISHED: dict[str, tuple[TransformerConfig | VaeConfig, int, int]] = {
    "t2v_1_3b": (TransformerConfig(num_attention_heads=12, num_layers=30, ffn_dim=8960), 825, 1_418_996_800),
    "t2v_14b": (TransformerConfig(), 1095, 14_288_491_584),
    "vae_2_1": (VaeConfig(**_STATISTICS), 194, 126_892_531),
    "vae_2_2": (
        VaeConfig(
            **_STATISTICS_48, base_dim=160, decoder_base_dim=256, z_dim=48, is_residual=True, patch_size=2,
            in_channels=12, out_channels=12, scale_factor_spatial=16,
        ),
        196,
        704_688_668,
    ),
}  # fmt: skip


def maker(config: TransformerConfig | VaeConfig, **kw: Any) -> tuple[Callable[[], Any], list[KeyRule]]:
    """(builds the module, its key table)."""
    if isinstance(config, TransformerConfig):
        return lambda: WanTransformer(config, rngs=nnx.Rngs(0), **kw), keys_transformer.table(config)
    return lambda: WanVAE(config, rngs=nnx.Rngs(0), **kw), keys_vae.table(config)


def source_shapes(config: TransformerConfig | VaeConfig) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor the key table asks for; fails when a parameter or a tensor occurs twice or never."""
    make, rules = maker(config)
    leaves = dict(nnx.to_flat_state(nnx.state(nnx.eval_shape(make), nnx.Param)))
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        shape = source_shape(rule, leaves.pop(rule.target).shape)
        assert shape is not None, rule
        for name in rule.sources:
            assert name not in shapes, name
            shapes[name] = shape
    assert not leaves, leaves
    return shapes


def weights(config: TransformerConfig | VaeConfig) -> dict[str, np.ndarray]:
    """Random weights under the published names; each depends on its name only. No norm is one, no bias zero."""

    def tensor(name: str, shape: Sequence[int]) -> np.ndarray:
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))
        last = name.split(".")[-1]
        if last == "gamma" or (".norm" in name and last == "weight"):
            noise = 1 + 0.3 * noise
        elif last == "weight":
            noise *= np.prod(shape[1:]) ** -0.5
            noise *= 0.4 if name == "decoder.conv_out.weight" else 1  # so that few pixels pass the clamp
        else:
            noise *= 0.3 if last == "scale_shift_table" else 0.1
        return noise.astype(np.float32)

    return {name: tensor(name, shape) for name, shape in source_shapes(config).items()}


def write(folder: Path, config: TransformerConfig | VaeConfig) -> Path:
    """A component folder as diffusers writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    save_file(weights(config), folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, config: TransformerConfig | VaeConfig, dtype_for: Any = None, **kw: Any) -> Any:
    """The module with the folder's weights, through the key table."""
    make, rules = maker(config, **kw)
    return load_module(make, rules, folder, dtype_for)


def transformer_inputs(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """latents [B, F, Y, X, Cin], timestep [B], text [B, 11, text_dim]."""
    config, (b, *size) = TRANSFORMERS[name], LATENTS[name]
    r = np.random.default_rng(7)
    latents = r.standard_normal((b, *size, config.in_channels)).astype(np.float32)
    text = r.standard_normal((b, 11, config.text_dim)).astype(np.float32)
    return latents, np.array([999.0, 123.4], np.float32)[:b], text


def video(name: str, frames: int) -> np.ndarray:
    """[1, T, height, width, 3] in [-1, 1]."""
    s = VAES[name].scale_factor_spatial
    y, x = LATENT_SIZE
    return np.random.default_rng(frames).uniform(-1, 1, (1, frames, y * s, x * s, 3)).astype(np.float32)


def raw_latents(name: str, frames: int) -> np.ndarray:
    """[1, F, y, x, z] for a video of so many frames."""
    shape = (1, (frames - 1) // 4 + 1, *LATENT_SIZE, VAES[name].z_dim)
    return np.random.default_rng(frames + 100).standard_normal(shape).astype(np.float32)


def relative_l2(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.linalg.norm(want) > 0
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
