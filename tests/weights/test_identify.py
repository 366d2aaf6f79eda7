"""Other people's checkpoints are called by their names."""

from __future__ import annotations

import pytest

from videodiff.weights.identify import identify_tensors

WAN = {
    "head.modulation": (1, 2, 1536),
    "patch_embedding.weight": (1536, 16, 1, 2, 2),
    "blocks.0.modulation": (1, 6, 1536),
}


def inputs(channels: int) -> dict[str, tuple[int, ...]]:
    return WAN | {"patch_embedding.weight": (1536, channels, 1, 2, 2)}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (WAN, "a Wan text-to-video transformer (1 layers, width 1536) in the original layout"),
        ({f"model.diffusion_model.{n}": s for n, s in WAN.items()}, "text-to-video"),
        ({f"diffusion_model.{n}": s for n, s in WAN.items()}, "text-to-video"),
        (inputs(36), "image-to-video (2.2 expert)"),
        (inputs(36) | {"img_emb.proj.0.weight": (1280,)}, "image-to-video with a CLIP branch"),
        (inputs(36) | {"img_emb.proj.0.weight": (1280,), "img_emb.emb_pos": (1, 514, 1280)}, "first-last-frame"),
        (inputs(48), "TI2V-5B"),
        (WAN | {"vace_patch_embedding.weight": (1536, 96, 1, 2, 2)}, "Wan VACE transformer"),
        (WAN | {"face_adapter.x": (1,)}, "Wan Animate transformer"),
        (WAN | {"casual_audio_encoder.x": (1,)}, "speech-to-video"),
        (WAN | {"control_adapter.x": (1,)}, "camera control"),
        (
            {
                "condition_embedder.time_embedder.linear_1.weight": (1536, 256),
                "patch_embedding.weight": (1536, 16, 1, 2, 2),
                "blocks.0.attn1.norm_q.weight": (1536,),
                "blocks.1.attn1.norm_q.weight": (1536,),
            },
            "text-to-video transformer (2 layers, width 1536) in the diffusers layout",
        ),
        ({"decoder.middle.0.residual.0.gamma": (384, 1, 1, 1)}, "a Wan 2.1 VAE in the original layout"),
        (
            {
                "decoder.middle.0.residual.0.gamma": (1024, 1, 1, 1),
                "decoder.upsamples.0.upsamples.0.residual.2.weight": (1024, 1024, 3, 3, 3),
            },
            "a Wan 2.2 VAE in the original layout",
        ),
        ({"decoder.mid_block.resnets.0.norm1.gamma": (384, 1, 1, 1)}, "a Wan VAE in the diffusers layout"),
        ({"encoder.block.0.layer.0.SelfAttention.q.weight": (4, 4)}, "a T5-family text encoder"),
        ({"blocks.0.attn.q.weight": (4, 4)}, "a T5-family text encoder"),
        ({"diffusion_model.blocks.0.self_attn.q.lora_A.weight": (4, 4)}, "a LoRA adapter"),
        ({"unet.conv_in.weight": (4, 4)}, "unrecognised (1 tensors, for example 'unet.conv_in.weight')"),
        ({}, "empty"),
    ],
)
def test_identify(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    assert words in identify_tensors(shapes)
