"""What the text tests, their parity tests and their goldens share: small encoders and prompts, all reproducible."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from videodiff.configs import TextEncoderConfig
from videodiff.text.umt5 import UMT5Encoder
from videodiff.weights.keys_text import table
from videodiff.weights.load import load_module

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "text.npz"

# Odd heads and layers; inner width above, equal to and below d_model; one layer; few and many buckets.
CONFIGS = {
    "wide": TextEncoderConfig(vocab_size=97, d_model=24, d_kv=10, d_ff=36, num_layers=3, num_heads=3),
    "flat": TextEncoderConfig(
        vocab_size=300, d_model=40, d_kv=8, d_ff=56, num_layers=1, num_heads=5,
        relative_attention_num_buckets=16, relative_attention_max_distance=40,
    ),
    "deep": TextEncoderConfig(
        vocab_size=64, d_model=33, d_kv=7, d_ff=50, num_layers=5, num_heads=2,
        relative_attention_num_buckets=20, relative_attention_max_distance=33, layer_norm_epsilon=1e-4,
    ),
}  # fmt: skip
LENGTHS = (37, 1, 16, 50)  # of the rows of every batch
BUCKET_RANGE = 600  # distances that the golden bucket tables cover, to each side

CAPTIONS = (
    "A red circle moves left over a blue background.",
    "Two small green squares bounce under a sunset sky",
    "a large yellow star spins on white",
    "one purple triangle, growing slowly",
    "a tiny orange hexagon falls past a grey cloud at night",
)
PROMPTS = (
    "A RED circle moves left, over a blue background!",
    "",
    "two   small\tgreen squares &amp;amp; one star\n spin \U0001f680",
    "Der rote Kreis, r\u00e9d caf\u00e9 \u7ea2\u8272\u5706 circles",
    " ".join(["a yellow star and a purple triangle spin"] * 80),  # longer than 512 tokens
    " ".join(["a red star"] * 60),  # longer than 128 tokens
)
RAW_TEXTS = (
    "plain text",
    "",
    "   \t \n ",
    "  two  spaces\u00a0and\u2003odd\u200bones\u3000here\r\n\x0bend ",
    "caf\u00c3\u00a9 mis-decoded \u00e2\u20ac\u0153quotes\u00e2\u20ac\u009d",
    "Tom &amp; Jerry, &lt;b&gt;bold&lt;/b&gt;, &amp;lt;twice&amp;gt;, &amp;amp;amp; thrice, &nbsp;x&#39;y&#x4e2d;",
    "emoji \U0001f680\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f flags \U0001f1e9\U0001f1ea",
    "\u4e00\u53ea\u732b\u5728\u8349\u5730\u4e0a\u8dd1\uff0c\u955c\u5934\u8ddf\u968f\u3002",
    "\uff26\uff55\uff4c\uff4c\uff57\uff49\uff44\uff54\uff48 \uff8a\uff9d\uff76\uff78 \ud55c\uad6d\uc5b4 \u0627",
    "ligature \ufb01ne \u201ccurly\u201d \u2018quotes\u2019 \u2026 \u2014 dash",
    "control\x07char \x1b[31mred\x1b[0m \ufeffbom \ufffd",
    "e\u0301 combining, \u212b angstrom, \u00bd half",
    "UPPER lower MiXeD stays",
    "a < b & c > d &notanentity; &copy 2024 &ampere",
)


def weights(config: TextEncoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the published names, scaled so that attention, its bias and the gate all matter."""
    r = np.random.default_rng(seed)
    inner, d, f = config.num_heads * config.d_kv, config.d_model, config.d_ff

    def normal(*shape: int, std: float) -> np.ndarray:
        return (std * r.standard_normal(shape)).astype(np.float32)

    out = {"shared.weight": normal(config.vocab_size, d, std=1.0)}
    for i in range(config.num_layers):
        attn, ffn = f"encoder.block.{i}.layer.0.", f"encoder.block.{i}.layer.1."
        for name in "qkv":
            out[f"{attn}SelfAttention.{name}.weight"] = normal(inner, d, std=d**-0.5)
        out[f"{attn}SelfAttention.o.weight"] = normal(d, inner, std=inner**-0.5)
        bias = normal(config.relative_attention_num_buckets, config.num_heads, std=1.5)
        out[f"{attn}SelfAttention.relative_attention_bias.weight"] = bias
        out[f"{attn}layer_norm.weight"] = 1 + normal(d, std=0.3)
        out[f"{ffn}DenseReluDense.wi_0.weight"] = normal(f, d, std=d**-0.5)
        out[f"{ffn}DenseReluDense.wi_1.weight"] = normal(f, d, std=d**-0.5)
        out[f"{ffn}DenseReluDense.wo.weight"] = normal(d, f, std=f**-0.5)
        out[f"{ffn}layer_norm.weight"] = 1 + normal(d, std=0.3)
    out["encoder.final_layer_norm.weight"] = 1 + normal(d, std=0.3)
    return out


def write_encoder(folder: Path, config: TextEncoderConfig, seed: int = 0) -> Path:
    """A text_encoder folder as transformers writes it: config.json, model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    save_file(weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load_encoder(folder: Path, config: TextEncoderConfig, dtype=np.float32, param_dtype=None) -> UMT5Encoder:
    """Load that folder through the key table."""
    dtype_for = None if param_dtype is None else lambda path: param_dtype
    return load_module(lambda: UMT5Encoder(config, dtype=dtype, rngs=nnx.Rngs(0)), table(config), folder, dtype_for)


def batch(config: TextEncoderConfig) -> tuple[np.ndarray, np.ndarray]:
    """ids, mask [4, 50] of prompts of LENGTHS."""
    r = np.random.default_rng(5)
    ids = r.integers(3, config.vocab_size, (len(LENGTHS), max(LENGTHS))).astype(np.int32)
    mask = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int32)
    return np.where(mask, ids, config.pad_token_id).astype(np.int32), mask


@nnx.jit
def run(encoder: UMT5Encoder, ids, mask):
    return encoder(ids, mask)


def relative_l2(got: np.ndarray, want: np.ndarray) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.linalg.norm(want) > 0
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
