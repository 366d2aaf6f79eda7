"""Key table of the text encoder: transformers' UMT5EncoderModel -> UMT5Encoder.

Owns: the names. Does not own: reading (`load`). Invariant: the 10 tensors of every layer, the final norm and the
embedding, each exactly once; the embedding may be stored under either of its two names, or both.
"""

from __future__ import annotations

from videodiff.configs import TextEncoderConfig
from videodiff.weights.keys import KeyRule, Layout

# Path below "blocks" -> name below "encoder.block.N.layer.", layout.
_LAYER: tuple[tuple[tuple[str, ...], str, Layout], ...] = (
    (("norm1", "scale"), "0.layer_norm.weight", Layout.SAME),
    (("attn", "q", "kernel"), "0.SelfAttention.q.weight", Layout.LINEAR),
    (("attn", "k", "kernel"), "0.SelfAttention.k.weight", Layout.LINEAR),
    (("attn", "v", "kernel"), "0.SelfAttention.v.weight", Layout.LINEAR),
    (("attn", "o", "kernel"), "0.SelfAttention.o.weight", Layout.LINEAR),
    (("attn", "relative_bias"), "0.SelfAttention.relative_attention_bias.weight", Layout.SAME),
    (("norm2", "scale"), "1.layer_norm.weight", Layout.SAME),
    (("ffn", "wi_0", "kernel"), "1.DenseReluDense.wi_0.weight", Layout.LINEAR),
    (("ffn", "wi_1", "kernel"), "1.DenseReluDense.wi_1.weight", Layout.LINEAR),
    (("ffn", "wo", "kernel"), "1.DenseReluDense.wo.weight", Layout.LINEAR),
)


def table(config: TextEncoderConfig) -> list[KeyRule]:
    """One rule a parameter. Every layer has its own relative bias table (plain T5 shares the first layer's)."""
    rules = [
        KeyRule(("embedding",), ("shared.weight",), aliases=("encoder.embed_tokens.weight",)),
        KeyRule(("final_norm", "scale"), ("encoder.final_layer_norm.weight",)),
    ]
    for path, name, layout in _LAYER:
        sources = tuple(f"encoder.block.{i}.layer.{name}" for i in range(config.num_layers))
        rules.append(KeyRule(("blocks", *path), sources, layout, stack=True))
    return rules
