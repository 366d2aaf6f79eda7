"""Small random models in the published folder layout, made without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from videodiff.configs import TextEncoderConfig, TransformerConfig, VaeConfig
from videodiff.models.transformer import WanTransformer
from videodiff.models.vae import WanVAE
from videodiff.text.build_tokenizer import build_tokenizer
from videodiff.text.umt5 import UMT5Encoder
from videodiff.weights import keys_text, keys_transformer, keys_vae
from videodiff.weights.save import TRANSFORMERS_BASE, save_component, save_pipeline_index, unipc_scheduler_json

WORDS = "a red blue green ball star cat dog moves jumps over the grass at night"


def randomised(module: nnx.Module, seed: int, scale: float) -> nnx.State:
    """The module's state with noise on every parameter, so that no table is zero and no norm is one."""
    state = nnx.state(module, nnx.Param)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [x + scale * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def make_folder(
    path: Path, *, seed: int = 0, heads: int = 2, head_dim: int = 24, layers: int = 2, residual: bool = True, z: int = 4
) -> Path:
    """A whole pipeline folder: transformer, VAE, UMT5, tokenizer, UniPC scheduler."""
    build_tokenizer(path / "tokenizer", [WORDS])
    text = TextEncoderConfig(vocab_size=40, d_model=20, d_kv=8, d_ff=24, num_layers=2, num_heads=3)
    encoder = UMT5Encoder(text, rngs=nnx.Rngs(seed))
    save_component(
        path / "text_encoder",
        randomised(encoder, seed, 0.05),
        keys_text.table(text),
        text.to_json(),
        base=TRANSFORMERS_BASE,
    )
    dit = TransformerConfig(
        num_attention_heads=heads, attention_head_dim=head_dim, in_channels=z, out_channels=z, text_dim=20, freq_dim=32,
        ffn_dim=64, num_layers=layers, rope_max_seq_len=256,
    )  # fmt: skip
    model = WanTransformer(dit, rngs=nnx.Rngs(seed + 1))
    save_component(path / "transformer", randomised(model, seed + 1, 0.1), keys_transformer.table(dit), dit.to_json())
    rng = np.random.default_rng(seed)
    own: dict[str, Any] = {
        "latents_mean": tuple(rng.normal(size=z).round(3)),
        "latents_std": tuple(rng.uniform(0.5, 2, z).round(3)),
    }
    if residual:
        vae = VaeConfig(
            **own, base_dim=8, z_dim=z, dim_mult=(1, 2, 2), num_res_blocks=1, temperal_downsample=(True, True), is_residual=True,
            in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=8,
        )  # fmt: skip
    else:
        vae = VaeConfig(**own, base_dim=4, z_dim=z, num_res_blocks=1)
    decoder = WanVAE(vae, rngs=nnx.Rngs(seed + 2))
    save_component(path / "vae", randomised(decoder, seed + 2, 0.05), keys_vae.table(vae), vae.to_json(), jnp.float32)
    save_pipeline_index(path, unipc_scheduler_json(3.0))
    return path
