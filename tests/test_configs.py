"""Component configs: every published field is read, honoured or refused by name; what is written reads back."""

from __future__ import annotations

import dataclasses
import json

import pytest

from videodiff.configs import TextEncoderConfig, TransformerConfig, VaeConfig

# transformer/config.json of the published text-to-video models (models.md 1.1), as diffusers writes it
WAN_1_3B = {
    "_class_name": "WanTransformer3DModel",
    "_diffusers_version": "0.33.0.dev0",
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-06,
    "ffn_dim": 8960,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "num_attention_heads": 12,
    "num_layers": 30,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
WAN_14B = WAN_1_3B | {"ffn_dim": 13824, "num_attention_heads": 40, "num_layers": 40}
MEAN_2_1 = [
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
]
STD_2_1 = [
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
]
# vae/config.json of Wan 2.1: the file is older than the fields with defaults
VAE_2_1 = {
    "_class_name": "AutoencoderKLWan",
    "_diffusers_version": "0.33.0.dev0",
    "attn_scales": [],
    "base_dim": 96,
    "dim_mult": [1, 2, 4, 4],
    "dropout": 0.0,
    "latents_mean": MEAN_2_1,
    "latents_std": STD_2_1,
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "z_dim": 16,
}
VAE_2_2 = VAE_2_1 | {
    "base_dim": 160,
    "clip_output": False,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "is_residual": True,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "z_dim": 48,
}
# text_encoder/config.json of UMT5-XXL as transformers 4 wrote it
UMT5_XXL = {
    "architectures": ["UMT5EncoderModel"],
    "classifier_dropout": 0.0,
    "d_ff": 10240,
    "d_kv": 64,
    "d_model": 4096,
    "decoder_start_token_id": 0,
    "dense_act_fn": "gelu_new",
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "is_gated_act": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "umt5",
    "num_decoder_layers": 24,
    "num_heads": 64,
    "num_layers": 24,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "scalable_attention": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "T5Tokenizer",
    "torch_dtype": "float32",
    "transformers_version": "4.49.0.dev0",
    "use_cache": True,
    "vocab_size": 256384,
}


def test_published_transformers() -> None:
    assert TransformerConfig.from_json(WAN_1_3B) == TransformerConfig(
        num_attention_heads=12, ffn_dim=8960, num_layers=30
    )
    big = TransformerConfig.from_json(WAN_14B | {"pos_embed_seq_len": None})
    assert big == TransformerConfig()
    assert (big.width, big.patch_size) == (5120, (1, 2, 2))


def test_published_vaes() -> None:
    old = VaeConfig.from_json(VAE_2_1)
    assert (old.base_dim, old.z_dim, old.scale_factor_spatial, old.is_residual) == (96, 16, 8, False)
    assert old.latents_mean == tuple(MEAN_2_1)
    new = VaeConfig.from_json(VAE_2_2)
    assert (new.decoder_base_dim, new.patch_size, new.scale_factor_spatial, new.is_residual) == (256, 2, 16, True)


def test_published_text_encoder() -> None:
    assert TextEncoderConfig.from_json(UMT5_XXL) == TextEncoderConfig()


def test_text_encoder_as_transformers_5_writes_it() -> None:
    gone = ("output_past", "scalable_attention", "tokenizer_class", "torch_dtype")
    fields = {k: v for k, v in UMT5_XXL.items() if k not in gone}
    fields |= {"dtype": "bfloat16", "is_decoder": False, "scale_decoder_outputs": True, "tie_word_embeddings": True}
    assert TextEncoderConfig.from_json(fields) == TextEncoderConfig()


@pytest.mark.parametrize(
    "config",
    [
        TransformerConfig(num_attention_heads=3, attention_head_dim=20, num_layers=5, cross_attn_norm=False, eps=1e-5),
        VaeConfig.from_json(VAE_2_1),
        VaeConfig.from_json(VAE_2_2),
        TextEncoderConfig(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    ],
    ids=lambda c: type(c).__name__,
)
def test_what_is_written_reads_back(config) -> None:
    text = json.dumps(config.to_json())
    assert type(config).from_json(json.loads(text)) == config


def test_an_unknown_out_channels_follows_in_channels() -> None:
    assert TransformerConfig.from_json({"in_channels": 48, "out_channels": None}).out_channels == 48


def refused(cls, fields: dict[str, object]) -> str:
    with pytest.raises(ValueError, match=r".") as e:
        cls.from_json(fields)
    return str(e.value)


@pytest.mark.parametrize(
    ("base", "fields", "words"),
    [
        (WAN_1_3B, {"image_dim": 1280}, "image_dim=1280 is not supported by this engine; it runs image_dim=None"),
        (WAN_1_3B, {"added_kv_proj_dim": 5120}, "added_kv_proj_dim=5120 is not supported"),
        (WAN_1_3B, {"pos_embed_seq_len": 514}, "pos_embed_seq_len=514 is not supported"),
        (WAN_1_3B, {"qk_norm": "layer_norm"}, "it runs qk_norm='rms_norm_across_heads'"),
        (WAN_1_3B, {"vace_layers": [0, 2]}, "unknown field 'vace_layers' for TransformerConfig"),
        (WAN_1_3B, {"num_layer": 3}, "unknown field 'num_layer' for TransformerConfig; did you mean 'num_layers'?"),
        (WAN_1_3B, {"num_layers": "30"}, "num_layers='30' must be of type int"),
        (WAN_1_3B, {"num_layers": True}, "num_layers=True must be of type int"),
        (WAN_1_3B, {"cross_attn_norm": 1}, "cross_attn_norm=1 must be of type bool"),
        (WAN_1_3B, {"patch_size": [1, 2]}, "patch_size=[1, 2] must be of type tuple[int, int, int]"),
        (WAN_1_3B, {"patch_size": [2, 2, 2]}, "patch_size must be (1, p, p)"),
        (WAN_1_3B, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (WAN_1_3B, {"num_attention_heads": -1}, "num_attention_heads must be at least 1"),
        (WAN_1_3B, {"attention_head_dim": 63}, "must be even, got self.attention_head_dim=63"),
        (WAN_1_3B, {"eps": 0.0}, "eps must be positive"),
        (VAE_2_1, {"latents_mean": None}, "latents_mean is missing; latents cannot be denormalised without it"),
        (VAE_2_1, {"latents_std": MEAN_2_1}, "latents_std must be positive"),
        (VAE_2_1, {"latents_std": [1.0]}, "need z_dim=16 values, got 16 and 1"),
        (VAE_2_1, {"attn_scales": [0.5]}, "attn_scales=[0.5] is not supported"),
        (VAE_2_1, {"temperal_downsample": [True]}, "needs one entry fewer than dim_mult=(1, 2, 4, 4)"),
        (VAE_2_1, {"scale_factor_spatial": 16}, "do not agree with the layers, which give 8 and 4"),
        (VAE_2_1, {"in_channels": 4}, "must be 3 * patch_size^2 = 3, got 4 and 3"),
        (VAE_2_1, {"base_dim": 0}, "must be positive, got self.base_dim=0"),
        (VAE_2_2, {"patch_size": 4}, "do not agree with the layers, which give 32 and 4"),
        (UMT5_XXL, {"feed_forward_proj": "relu"}, "feed_forward_proj='relu' is not supported"),
        (UMT5_XXL, {"is_gated_act": False}, "is_gated_act=False is not supported"),
        (UMT5_XXL, {"model_type": "t5"}, "model_type='t5' is not supported by this engine; it runs model_type='umt5'"),
        (UMT5_XXL, {"is_decoder": True}, "is_decoder=True is not supported"),
        (UMT5_XXL, {"quantization_config": {}}, "unknown field 'quantization_config' for TextEncoderConfig"),
        (UMT5_XXL, {"d_model": 0}, "d_model must be positive, got 0"),
        (UMT5_XXL, {"eos_token_id": [1, 2]}, "eos_token_id=[1, 2] must be of type int"),
    ],
)
def test_refusals(base: dict[str, object], fields: dict[str, object], words: str) -> None:
    cls = {"d_model": TextEncoderConfig, "z_dim": VaeConfig, "ffn_dim": TransformerConfig}
    assert words in refused(next(c for key, c in cls.items() if key in base), base | fields)


def test_messages_name_the_file() -> None:
    assert refused(TransformerConfig, {"eps": -1.0}).startswith("transformer/config.json: ")
    assert refused(VaeConfig, VAE_2_1 | {"z_dim": 4}).startswith("vae/config.json: ")
    assert refused(TextEncoderConfig, {"d_ff": -1}).startswith("text_encoder/config.json: ")


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TransformerConfig().num_layers = 3  # type: ignore[misc]
