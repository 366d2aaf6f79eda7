"""Weights between this package, diffusers and transformers, both ways, in the exact published layout."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from videodiff.configs import TextEncoderConfig, TransformerConfig, VaeConfig
from videodiff.memory import text_parameters, transformer_parameters, vae_parameters
from videodiff.models.transformer import WanTransformer, param_dtype_for
from videodiff.models.vae import WanVAE
from videodiff.text.umt5 import UMT5Encoder
from videodiff.weights import keys_text, keys_transformer, keys_vae
from videodiff.weights.folder import open_folder
from videodiff.weights.load import check_state, load_module
from videodiff.weights.safetensors_files import Checkpoint, TensorInfo
from videodiff.weights.save import TRANSFORMERS_BASE, save_component, save_pipeline_index, unipc_scheduler_json

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

TRANSFORMER = TransformerConfig(
    num_attention_heads=3, attention_head_dim=20, text_dim=24, freq_dim=32, ffn_dim=56, num_layers=3
)
VAE_2_1 = VaeConfig(latents_mean=tuple(np.linspace(-1, 1, 16)), latents_std=tuple(np.linspace(1, 3, 16)), base_dim=8)
VAE_2_2 = VaeConfig(
    latents_mean=(0.5,) * 12,
    latents_std=(2.0,) * 12,
    base_dim=8,
    decoder_base_dim=12,
    z_dim=12,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
)
TEXT = TextEncoderConfig(vocab_size=300, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_heads=5)

MAKE = {
    TransformerConfig: lambda c, **kw: WanTransformer(c, rngs=nnx.Rngs(0), **kw),
    VaeConfig: lambda c, **kw: WanVAE(c, rngs=nnx.Rngs(0), **kw),
    TextEncoderConfig: lambda c, **kw: UMT5Encoder(c, rngs=nnx.Rngs(0), **kw),
}
TABLE = {TransformerConfig: keys_transformer.table, VaeConfig: keys_vae.table, TextEncoderConfig: keys_text.table}


def reference(config):
    """The reference implementation's module for a config, from the JSON this package writes."""
    data = config.to_json()
    if isinstance(config, TextEncoderConfig):
        return transformers.UMT5EncoderModel(transformers.UMT5Config.from_dict(data))
    cls = getattr(diffusers, data["_class_name"])
    return cls.from_config(data)


def randomised(config, seed: int = 0):
    """The reference module with every parameter random, also those whose initial value is constant."""
    torch.manual_seed(seed)
    model = reference(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model


def load(config, folder: Path, dtype_for=None):
    return load_module(lambda: MAKE[type(config)](config), TABLE[type(config)](config), folder, dtype_for)


def tensors_of(model) -> dict[str, np.ndarray]:
    """Published names -> values; the tied embedding once."""
    state = {n: t.float().numpy() for n, t in model.state_dict().items()}
    if "shared.weight" in state:
        state.pop("encoder.embed_tokens.weight", None)
    return state


SMALL = {"transformer": TRANSFORMER, "vae_2_1": VAE_2_1, "vae_2_2": VAE_2_2, "text": TEXT}


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_reference_files_load_and_come_back(tmp_path: Path, name: str, shards: bool) -> None:
    """save_pretrained -> load -> save: every tensor is back under its name, bit for bit; one file or several."""
    config = SMALL[name]
    model = randomised(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB" if shards else "10GB")
    assert (len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1) is shards
    assert type(config).from_json(json.loads((tmp_path / "theirs" / "config.json").read_text())) == config
    module = load(config, tmp_path / "theirs")
    base = TRANSFORMERS_BASE if name == "text" else "diffusion_pytorch_model"
    kw = {"base": base, "max_shard_bytes": 40_000 if shards else None}
    state = nnx.state(module, nnx.Param)
    save_component(tmp_path / "ours", state, TABLE[type(config)](config), config.to_json(), **kw)
    again = type(model).from_pretrained(tmp_path / "ours")
    want, got = tensors_of(model), tensors_of(again)
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        np.testing.assert_array_equal(got[key], tensor, err_msg=key)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SMALL)
def test_half_precision_files(tmp_path: Path, name: str, dtype: str) -> None:
    """Files in bfloat16 or float16 load into float32 exactly, and into their own dtype exactly."""
    config = SMALL[name]
    model = randomised(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs")
    want = tensors_of(model)
    own = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    for i, target in enumerate((np.dtype(np.float32), own)):
        module = load(config, tmp_path / "theirs", lambda _, target=target: target)
        (file,) = save_component(tmp_path / str(i), nnx.state(module, nnx.Param), TABLE[type(config)](config), {})
        got = safetensors_as_float32(file)
        assert got.keys() == want.keys()
        for key, tensor in want.items():
            np.testing.assert_array_equal(got[key], tensor, err_msg=key)


def safetensors_as_float32(file: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    return {n: t.float().numpy() for n, t in load_file(file).items()}


def test_the_old_duplicate_of_the_embedding_loads(tmp_path: Path) -> None:
    """Files of older transformers hold the shared embedding under both names."""
    from safetensors.torch import save_file

    model = randomised(TEXT)
    state = {n: t.clone() for n, t in tensors_state(model).items()}
    save_file({**state, "encoder.embed_tokens.weight": state["shared.weight"].clone()}, tmp_path / "model.safetensors")
    module = load(TEXT, tmp_path)
    np.testing.assert_array_equal(module.embedding.get_value(), state["shared.weight"].numpy())


def tensors_state(model):
    state = dict(model.state_dict())
    state.pop("encoder.embed_tokens.weight", None)
    return state


def test_a_whole_pipeline_folder_both_ways(tmp_path: Path) -> None:
    """What diffusers saves opens here; what is saved here opens in WanPipeline with the same weights and shift."""
    tokenizer = transformers.T5TokenizerFast(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -1.0)])
    models = {
        "transformer": randomised(TRANSFORMER, 1),
        "vae": randomised(VAE_2_1, 2),
        "text_encoder": randomised(TEXT, 3),
    }
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=7.0
    )
    theirs = diffusers.WanPipeline(tokenizer=tokenizer, scheduler=scheduler, **models)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    folder = open_folder(tmp_path / "theirs")
    assert (folder.transformer, folder.vae, folder.text_encoder) == (TRANSFORMER, VAE_2_1, TEXT)
    assert folder.scheduler["flow_shift"] == 7.0

    ours = tmp_path / "ours"
    save_pipeline_index(ours, unipc_scheduler_json(7.0))
    tokenizer.save_pretrained(ours / "tokenizer")
    for name, config in (("transformer", TRANSFORMER), ("vae", VAE_2_1), ("text_encoder", TEXT)):
        module = load(config, folder.components[name].path)
        base = TRANSFORMERS_BASE if name == "text_encoder" else "diffusion_pytorch_model"
        state = nnx.state(module, nnx.Param)
        save_component(ours / name, state, TABLE[type(config)](config), config.to_json(), base=base)
    assert open_folder(ours).transformer == TRANSFORMER
    back = diffusers.WanPipeline.from_pretrained(ours)
    assert (
        dict(back.scheduler.config).items()
        >= {k: v for k, v in unipc_scheduler_json(7.0).items() if k[0] != "_"}.items()
    )
    assert back.config.boundary_ratio is None
    assert back.config.expand_timesteps is False
    for name, model in models.items():
        want, got = tensors_of(model), tensors_of(getattr(back, name))
        assert want.keys() == got.keys()
        for key, tensor in want.items():
            np.testing.assert_array_equal(got[key], tensor, err_msg=f"{name} {key}")


def test_written_index_and_scheduler_equal_diffusers_own(tmp_path: Path) -> None:
    """Field by field, but for what the library version adds by itself."""
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    theirs = json.loads(scheduler.to_json_string())
    ours = unipc_scheduler_json(3.0)
    assert {k: theirs[k] for k in ours} == ours
    added = theirs.keys() - ours.keys()
    assert added == {"shift_terminal", "sigma_max", "sigma_min", "time_shift_type", "use_dynamic_shifting"}


PUBLISHED = {
    "1.3B": (TransformerConfig(num_attention_heads=12, ffn_dim=8960, num_layers=30), 1_418_996_800, 825),
    "14B": (TransformerConfig(), 14_288_491_584, 1095),
    "UMT5-XXL": (TextEncoderConfig(), 5_680_910_336, 242),
    "VAE 2.1": (VaeConfig(latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16), 126_892_531, 194),
    "VAE 2.2": (
        VaeConfig(
            latents_mean=(0.0,) * 48,
            latents_std=(1.0,) * 48,
            base_dim=160,
            decoder_base_dim=256,
            z_dim=48,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
        ),
        704_688_668,
        196,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_consumed_exactly_once(name: str) -> None:
    """Every key and shape of the reference class on the meta device, against eval_shape of ours: no array is made."""
    config, parameters, count = PUBLISHED[name]
    with torch.device("meta"):
        model = reference(config)
    shapes = {n: tuple(t.shape) for n, t in tensors_state(model).items()}
    assert len(shapes) == count
    assert sum(int(np.prod(s)) for s in shapes.values()) == parameters
    infos = {n: TensorInfo(n, Path("x.safetensors"), "F32", s, 0, 4 * int(np.prod(s))) for n, s in shapes.items()}
    abstract = nnx.eval_shape(lambda: MAKE[type(config)](config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    state = nnx.state(abstract, nnx.Param)
    assert check_state(state, TABLE[type(config)](config), Checkpoint(Path("x"), (), infos)) == []
    planned = {
        TransformerConfig: lambda c: transformer_parameters(c)[0],
        VaeConfig: lambda c: sum(vae_parameters(c)),
        TextEncoderConfig: text_parameters,
    }
    assert planned[type(config)](config) == parameters


@pytest.mark.parametrize("name", ["1.3B", "14B"])
def test_parameters_kept_in_float32_are_those_of_diffusers(name: str) -> None:
    config, _, _ = PUBLISHED[name]
    with torch.device("meta"):
        model = reference(config)
    kept = model._keep_in_fp32_modules
    theirs = sum(t.numel() for n, t in model.named_parameters() if any(part in n.split(".") for part in kept))
    abstract = nnx.eval_shape(lambda: MAKE[TransformerConfig](config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    flat = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    ours = sum(v.get_value().size for p, v in flat if param_dtype_for(p, jnp.bfloat16) == jnp.float32)
    assert ours == theirs == transformer_parameters(config)[1]
    assert all(v.get_value().dtype == param_dtype_for(p, jnp.bfloat16) for p, v in flat)
