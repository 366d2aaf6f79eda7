"""Key table of the Wan transformer, published diffusers names.

Owns: which tensor of transformer/*.safetensors is which parameter. Does not own: reading, shapes.
Invariant: every tensor of WanTransformer3DModel (text-to-video) appears once.
"""

from __future__ import annotations

from videodiff.configs import TransformerConfig
from videodiff.weights.keys import KeyRule, Layout

_EMBEDDERS = {
    ("time_embedder", "linear_1"): "condition_embedder.time_embedder.linear_1",
    ("time_embedder", "linear_2"): "condition_embedder.time_embedder.linear_2",
    ("time_proj",): "condition_embedder.time_proj",
    ("text_embedder", "linear_1"): "condition_embedder.text_embedder.linear_1",
    ("text_embedder", "linear_2"): "condition_embedder.text_embedder.linear_2",
    ("proj_out",): "proj_out",
}
_BLOCK_LINEAR = {
    **{
        (attn, part): f"{attn}.{name}"
        for attn in ("attn1", "attn2")
        for part, name in (("to_q", "to_q"), ("to_k", "to_k"), ("to_v", "to_v"), ("to_out", "to_out.0"))
    },
    ("ffn", "linear_1"): "ffn.net.0.proj",
    ("ffn", "linear_2"): "ffn.net.2",
}


def table(config: TransformerConfig) -> list[KeyRule]:
    """Rules for a transformer of this config: 825 tensors for the 1.3B model, 1095 for the 14B one."""
    rules = [
        KeyRule(("patch_embedding", "kernel"), ("patch_embedding.weight",), Layout.CONV3D),
        KeyRule(("patch_embedding", "bias"), ("patch_embedding.bias",)),
        KeyRule(("scale_shift_table",), ("scale_shift_table",)),
    ]
    for target, name in _EMBEDDERS.items():
        rules.append(KeyRule((*target, "kernel"), (f"{name}.weight",), Layout.LINEAR))
        rules.append(KeyRule((*target, "bias"), (f"{name}.bias",)))

    def block(target: tuple[str, ...], name: str, layout: Layout = Layout.SAME) -> KeyRule:
        sources = tuple(f"blocks.{i}.{name}" for i in range(config.num_layers))
        return KeyRule(("block_stack", *target), sources, layout, stack=True)

    for target, name in _BLOCK_LINEAR.items():
        rules.append(block((*target, "kernel"), f"{name}.weight", Layout.LINEAR))
        rules.append(block((*target, "bias"), f"{name}.bias"))
    for attn in ("attn1", "attn2"):
        rules += [block((attn, norm, "scale"), f"{attn}.{norm}.weight") for norm in ("norm_q", "norm_k")]
    if config.cross_attn_norm:
        rules.append(block(("norm2", "scale"), "norm2.weight"))
        rules.append(block(("norm2", "bias"), "norm2.bias"))
    rules.append(block(("scale_shift_table",), "scale_shift_table"))
    return rules
