"""Naming what somebody else's checkpoint is, from tensor names and shapes, for error messages.

Owns: recognising Wan variants and layouts that are not loaded here. Does not own: loading any of them.
Invariant: never guesses silently: what is not recognised is called unrecognised. Rules: ComfyUI's model detection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
# Tensor-name beginnings that mark a variant, most specific first.
_MARKS = (
    ("vace_patch_embedding.", "VACE"),
    ("face_adapter.", "Animate"),
    ("casual_audio_encoder.", "speech-to-video"),  # the published spelling
    ("control_adapter.", "camera control"),
    ("img_emb.emb_pos", "first-last-frame-to-video"),
    ("condition_embedder.image_embedder.pos_embed", "first-last-frame-to-video"),
    ("img_emb.proj.0.", "image-to-video with a CLIP branch"),
    ("condition_embedder.image_embedder.", "image-to-video with a CLIP branch"),
)


def _count(names: Mapping[str, object], pattern: str) -> int:
    return len({m[1] for n in names if (m := re.match(pattern, n))})


def identify_tensors(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a set of tensors is, in words.

    Args:
      shapes: tensor name -> shape, as in the file.

    Returns:
      For example "a Wan text-to-video transformer (40 layers, width 5120) in the original layout".
    """
    names = {re.sub(f"^({'|'.join(map(re.escape, _PREFIXES))})", "", n): s for n, s in shapes.items()}
    if any("lora_" in n or ".lora" in n or n.endswith((".diff", ".diff_b")) for n in names):
        return "a LoRA adapter"
    if "decoder.middle.0.residual.0.gamma" in names:
        form = "2.2" if "decoder.upsamples.0.upsamples.0.residual.2.weight" in names else "2.1"
        return f"a Wan {form} VAE in the original layout"
    if "decoder.mid_block.resnets.0.norm1.gamma" in names:
        return "a Wan VAE in the diffusers layout"
    if any(re.match(r"(encoder\.block|blocks)\.\d+\.(layer\.0\.SelfAttention|attn)\.q", n) for n in names):
        return "a T5-family text encoder"
    original = names.get("head.modulation")
    if original is None and "condition_embedder.time_embedder.linear_1.weight" not in names:
        return f"unrecognised ({len(names)} tensors, for example {min(names)!r})" if names else "empty"
    patch = names.get("patch_embedding.weight", (0, 0))
    width = original[-1] if original else patch[0]
    layers = _count(names, r"blocks\.(\d+)\.")
    variant = next((label for mark, label in _MARKS if any(n.startswith(mark) for n in names)), "")
    if not variant:
        by_inputs = {36: "image-to-video (2.2 expert)", 48: "TI2V-5B"}
        variant = by_inputs.get(patch[1] if len(patch) > 1 else 0, "text-to-video")
    layout = "original" if original else "diffusers"
    return f"a Wan {variant} transformer ({layers} layers, width {width}) in the {layout} layout"


def identify_pipeline(index: Mapping[str, object]) -> str | None:
    """What a model_index.json describes when it is not a plain Wan 2.1 text-to-video pipeline; None when it is."""
    name = str(index.get("_class_name"))
    experts = index.get("boundary_ratio") is not None or _present(index.get("transformer_2"))
    known = {
        "WanImageToVideoPipeline": "Wan 2.2 image-to-video with two experts" if experts else "Wan image-to-video",
        "WanVACEPipeline": "Wan VACE",
        "WanVideoToVideoPipeline": "Wan video-to-video",
        "WanAnimatePipeline": "Wan Animate",
        "WanSpeechToVideoPipeline": "Wan speech-to-video",
    }
    if name in known:
        return f"{known[name]} ({name})"
    if name != "WanPipeline":
        return f"{name}, which is not a Wan pipeline known here" if name != "None" else "a file without _class_name"
    if index.get("expand_timesteps"):
        return "Wan 2.2 TI2V-5B (expand_timesteps is set)"
    if experts:
        return f"Wan 2.2 with two experts (boundary_ratio={index.get('boundary_ratio')}, transformer_2)"
    return None


def _present(entry: object) -> bool:
    """Whether a model_index.json entry names a component ([null, null] does not)."""
    return isinstance(entry, list) and any(x is not None for x in entry)
