"""Model folders: what a good one says about itself, and what every bad one is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from videodiff.configs import TextEncoderConfig, TransformerConfig, VaeConfig
from videodiff.weights.folder import open_folder
from videodiff.weights.problems import Kind, WeightsError
from videodiff.weights.save import save_pipeline_index, unipc_scheduler_json

TRANSFORMER = TransformerConfig(num_attention_heads=2, attention_head_dim=24, text_dim=32, ffn_dim=64, num_layers=2)
VAE = VaeConfig(latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16, base_dim=8)
TEXT = TextEncoderConfig(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16837417\n"


def write(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def change(path: Path, **fields: object) -> None:
    write(path, json.loads(path.read_text()) | fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all parts; its tensors are stand-ins, for only headers are read here."""
    path = tmp_path / "model"
    save_pipeline_index(path, unipc_scheduler_json(3.0))
    for name, config in (("transformer", TRANSFORMER), ("vae", VAE), ("text_encoder", TEXT)):
        write(path / name / "config.json", config.to_json())
        base = "model" if name == "text_encoder" else "diffusion_pytorch_model"
        save_file(
            {"w": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}, path / name / f"{base}.safetensors"
        )
    write(path / "tokenizer" / "tokenizer.json", {})
    return path


def refused(path: Path) -> WeightsError:
    with pytest.raises(WeightsError) as e:
        open_folder(path)
    return e.value


def kinds(error: WeightsError) -> list[Kind]:
    return [p.kind for p in error.problems]


def test_a_good_folder(folder: Path) -> None:
    model = open_folder(str(folder))
    assert (model.transformer, model.vae, model.text_encoder) == (TRANSFORMER, VAE, TEXT)
    assert model.scheduler["flow_shift"] == 3.0
    assert model.tokenizer_path == folder / "tokenizer"
    assert model.components["scheduler"].class_name == "UniPCMultistepScheduler"
    assert model.checkpoints["transformer"].parameters == 17
    assert model.checkpoints["text_encoder"].dtypes == ("F16", "F32")
    text = model.describe()
    assert "WanPipeline in" in text
    assert "AutoencoderKLWan" in text
    assert "17 parameters" in text
    assert "F16/F32" in text


@pytest.mark.parametrize("cls", ["T5TokenizerFast", "T5Tokenizer"])
@pytest.mark.parametrize("scheduler", ["UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_class_names_that_are_published(folder: Path, cls: str, scheduler: str) -> None:
    change(folder / "model_index.json", tokenizer=["transformers", cls], scheduler=["diffusers", scheduler])
    assert open_folder(folder).components["tokenizer"].class_name == cls


def test_fields_that_old_indices_lack(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    for key in ("boundary_ratio", "expand_timesteps", "transformer_2"):
        del index[key]
    write(folder / "model_index.json", index)
    open_folder(folder)


def test_no_such_folder(tmp_path: Path) -> None:
    error = refused(tmp_path / "nowhere")
    assert kinds(error) == [Kind.NO_FOLDER]
    assert "check the path" in str(error)


def test_a_folder_without_index(tmp_path: Path) -> None:
    (tmp_path / "readme").touch()
    error = refused(tmp_path)
    assert kinds(error) == [Kind.NOT_A_MODEL]
    assert "no model_index.json in" in str(error)
    assert "-Diffusers" in str(error)


def test_the_download_cache(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "0fad780a").mkdir(parents=True)
    assert "the model is in snapshots/0fad780a" in str(refused(tmp_path))


def test_a_single_component(folder: Path) -> None:
    error = refused(folder / "transformer")
    assert kinds(error) == [Kind.NOT_A_MODEL]
    assert "a single component (WanTransformer3DModel): give the folder above it" in str(error)


def test_the_original_layout(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"_class_name": "WanModel", "model_type": "t2v", "dim": 1536})
    (tmp_path / "Wan2.1_VAE.pth").touch()
    (tmp_path / "models_t5_umt5-xxl-enc-bf16.pth").touch()
    error = refused(tmp_path)
    assert kinds(error) == [Kind.NOT_A_MODEL]
    assert "original layout (config.json of class WanModel of model_type 't2v', Wan2.1_VAE.pth" in str(error)
    assert "repositories whose names end in -Diffusers" in str(error)


def test_the_original_layout_of_two_experts(tmp_path: Path) -> None:
    write(tmp_path / "high_noise_model" / "config.json", {"_class_name": "WanModel"})
    write(tmp_path / "low_noise_model" / "config.json", {"_class_name": "WanModel"})
    assert "original layout (high_noise_model, low_noise_model)" in str(refused(tmp_path))


def test_a_single_file_is_named(tmp_path: Path) -> None:
    tensors = {
        "model.diffusion_model.head.modulation": np.zeros((1, 2, 8), np.float16),
        "model.diffusion_model.patch_embedding.weight": np.zeros((8, 16, 1, 2, 2), np.float16),
        "model.diffusion_model.blocks.0.modulation": np.zeros((1, 6, 8), np.float16),
        "model.diffusion_model.blocks.1.modulation": np.zeros((1, 6, 8), np.float16),
    }
    save_file(tensors, tmp_path / "wan.safetensors")
    error = refused(tmp_path / "wan.safetensors")
    assert kinds(error) == [Kind.NOT_A_MODEL]
    assert "a Wan text-to-video transformer (2 layers, width 8) in the original layout" in str(error)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"expand_timesteps": True}, "TI2V-5B (expand_timesteps is set)"),
        ({"boundary_ratio": 0.875}, "two experts (boundary_ratio=0.875"),
        ({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, "two experts (boundary_ratio=None, transformer_2)"),
        ({"_class_name": "WanImageToVideoPipeline"}, "Wan image-to-video (WanImageToVideoPipeline)"),
        ({"_class_name": "WanImageToVideoPipeline", "boundary_ratio": 0.9}, "Wan 2.2 image-to-video with two experts"),
        ({"_class_name": "WanVACEPipeline"}, "Wan VACE"),
        ({"_class_name": "WanAnimatePipeline"}, "Wan Animate"),
        ({"_class_name": "FluxPipeline"}, "FluxPipeline, which is not a Wan pipeline"),
        ({"_class_name": None}, "a file without _class_name"),
        ({"image_encoder": ["transformers", "CLIPVisionModel"]}, "a component 'image_encoder'"),
        ({"vae": ["diffusers", "AutoencoderKL"]}, "vae is ['diffusers', 'AutoencoderKL'], this engine runs"),
        ({"scheduler": ["diffusers", "DDIMScheduler"]}, "UniPCMultistepScheduler or FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_other_models_are_refused_by_name(folder: Path, fields: dict[str, object], words: str) -> None:
    change(folder / "model_index.json", **fields)
    error = refused(folder)
    assert kinds(error) == [Kind.UNSUPPORTED_MODEL]
    assert words in str(error)
    assert "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in str(error)


def test_everything_wrong_comes_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer")
    (folder / "vae" / "config.json").unlink()
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_text(LFS)
    (folder / "scheduler" / "scheduler_config.json").write_text("{")
    change(folder / "transformer" / "config.json", image_dim=1280)
    error = refused(folder)
    assert sorted(k.name for k in kinds(error)) == [
        "BAD_CONFIG",
        "BAD_CONFIG",
        "LFS_POINTER",
        "MISSING_COMPONENT",
        "MISSING_COMPONENT",
    ]
    text = str(error)
    assert "tokenizer/ does not exist" in text
    assert "vae/config.json does not exist" in text
    assert "vae/: diffusion_pytorch_model.safetensors (" in text
    assert "scheduler/scheduler_config.json is not JSON" in text
    assert "transformer/config.json: image_dim=1280 is not supported by this engine; it runs image_dim=None" in text


@pytest.mark.parametrize("name", ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"])
def test_a_component_the_index_does_not_name(folder: Path, name: str) -> None:
    change(folder / "model_index.json", **{name: [None, None]})
    error = refused(folder)
    assert [(p.kind, p.what) for p in error.problems] == [(Kind.MISSING_COMPONENT, f"model_index.json names no {name}")]


def test_tokenizer_pointer_and_sentencepiece_alone(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text(LFS)
    error = refused(folder)
    assert kinds(error) == [Kind.LFS_POINTER]
    assert "tokenizer/: tokenizer.json (" in str(error)
    (folder / "tokenizer" / "tokenizer.json").unlink()
    (folder / "tokenizer" / "spiece.model").touch()
    assert "spiece.model alone is not read" in str(refused(folder))


def test_index_that_is_a_pointer(folder: Path) -> None:
    (folder / "model_index.json").write_text(LFS)
    assert kinds(refused(folder)) == [Kind.LFS_POINTER]


def test_components_of_two_repositories(folder: Path) -> None:
    change(folder / "text_encoder" / "config.json", d_model=64)
    change(folder / "transformer" / "config.json", in_channels=48, out_channels=48)
    error = refused(folder)
    assert kinds(error) == [Kind.MISMATCH] * 2
    assert "transformer in_channels=48, out_channels=48, vae z_dim=16 must be equal" in str(error)
    assert "transformer text_dim=32, text_encoder d_model=64 must be equal" in str(error)


def test_unknown_config_field_names_the_closest(folder: Path) -> None:
    change(folder / "transformer" / "config.json", num_layer=3)
    error = refused(folder)
    assert kinds(error) == [Kind.BAD_CONFIG]
    assert "unknown field 'num_layer' for TransformerConfig; did you mean 'num_layers'?" in str(error)


def test_missing_latent_statistics(folder: Path) -> None:
    config = json.loads((folder / "vae" / "config.json").read_text())
    del config["latents_mean"]
    write(folder / "vae" / "config.json", config)
    assert "vae/config.json: latents_mean is missing" in str(refused(folder))
