"""A model folder in the diffusers layout: what it holds, checked, without loading a tensor.

Owns: model_index.json, the component configs, which files and dtypes there are, refusing other kinds of folders by
name. Does not own: reading tensors (`load`), what scheduler or tokenizer files mean (`sampling`, `text`).
Invariant: a :class:`ModelFolder` describes a pipeline this engine runs; everything else raised, all problems at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from videodiff.configs import TextEncoderConfig, TransformerConfig, VaeConfig
from videodiff.weights.identify import identify_pipeline, identify_tensors
from videodiff.weights.problems import Kind, Problem, WeightsError, raise_if
from videodiff.weights.safetensors_files import BASE_NAMES, Checkpoint, foreign_file, open_checkpoint

INDEX = "model_index.json"
COMPONENT_CLASSES = {
    "transformer": ("WanTransformer3DModel",),
    "vae": ("AutoencoderKLWan",),
    "text_encoder": ("UMT5EncoderModel",),
    "tokenizer": ("T5TokenizerFast", "T5Tokenizer"),  # transformers 5 writes the latter for both
    "scheduler": ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
}
WEIGHTED = ("transformer", "vae", "text_encoder")
C = TypeVar("C", TransformerConfig, VaeConfig, TextEncoderConfig)
SAMPLES, SAMPLE_BYTES = 16, 64 << 10  # of a fingerprint


@dataclass(frozen=True)
class Component:
    """One entry of model_index.json.

    Args:
      library: "diffusers" or "transformers".
      class_name: the class that wrote it.
      path: its folder.
    """

    library: str
    class_name: str
    path: Path


@dataclass(frozen=True)
class ModelFolder:
    """A checked Wan text-to-video folder.

    Args:
      path: the folder.
      pipeline_class: ``_class_name`` of model_index.json.
      components: by name: transformer, vae, text_encoder, tokenizer, scheduler.
      transformer, vae, text_encoder: the components' configs.
      scheduler: the fields of scheduler/scheduler_config.json, as they are.
      checkpoints: headers of the weights of transformer, vae and text_encoder.
    """

    path: Path
    pipeline_class: str
    components: Mapping[str, Component]
    transformer: TransformerConfig
    vae: VaeConfig
    text_encoder: TextEncoderConfig
    scheduler: Mapping[str, Any]
    checkpoints: Mapping[str, Checkpoint]

    @property
    def tokenizer_path(self) -> Path:
        return self.components["tokenizer"].path

    def fingerprint(self) -> str:
        """Twelve hex digits that tell these weights from others: sizes and evenly spread samples of every file.

        A copy of the folder anywhere has the same one. 16 samples of 64 KiB a file, so it takes no time at any size.
        """
        digest = hashlib.sha256()
        for name in WEIGHTED:
            for path in sorted(self.checkpoints[name].files):
                size = path.stat().st_size
                digest.update(f"{name}/{path.name} {size} ".encode())
                with path.open("rb") as file:
                    for i in range(SAMPLES):
                        file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                        digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()[:12]

    def check_made(self, file: str | os.PathLike[str], about: Mapping[str, Any]) -> None:
        """Refuse to go on with, or repeat, a run that other weights made.

        Args:
          file: what the run left, for the message.
          about: its metadata; without "weights" (earlier versions) nothing is known and nothing refused.

        Raises:
          ValueError: it names another fingerprint.
        """
        if "weights" in about and about["weights"] != (ours := self.fingerprint()):
            raise ValueError(
                f"{file} was made with other weights ({about['weights']}) than those of {self.path} ({ours}); name their "
                f"folder with --model_path, or Pipeline.from_pretrained(folder)"
            )

    def describe(self) -> str:
        """A short table: component, class, files, parameters, size, dtypes on disk."""
        lines = [f"{self.pipeline_class} in {self.path}"]
        for name in WEIGHTED:
            c = self.checkpoints[name]
            files = f"{len(c.files)} file{'s' if len(c.files) != 1 else ''}"
            lines.append(
                f"  {name:13s}{self.components[name].class_name:23s}{files:>9s}{c.parameters:>15,d} parameters"
                f"{c.nbytes / 2**30:9.2f} GiB  {'/'.join(c.dtypes)}"
            )
        lines += [f"  {name:13s}{self.components[name].class_name}" for name in ("tokenizer", "scheduler")]
        return "\n".join(lines)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder.

    Raises:
      WeightsError: missing, a Git-LFS pointer, or not a JSON object.
    """
    name = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise WeightsError(path, [Problem(Kind.MISSING_COMPONENT, f"{name} does not exist")])
    foreign = foreign_file(path)
    if foreign is not None:
        raise WeightsError(path, [foreign])
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise WeightsError(path, [Problem(Kind.BAD_CONFIG, f"{name} is not JSON: {e}")]) from None
    if not isinstance(data, dict):
        raise WeightsError(path, [Problem(Kind.BAD_CONFIG, f"{name} holds no JSON object")])
    return data


def _refuse_other_layouts(path: Path) -> None:
    """Raise with what the path is when it is no folder with a model_index.json."""

    def fail(kind: Kind, what: str) -> WeightsError:
        return WeightsError(path, [Problem(kind, what)])

    if not path.exists():
        raise fail(Kind.NO_FOLDER, str(path))
    if path.is_file():
        found = f"{path.name} is a file"
        if path.suffix == ".safetensors":
            tensors = open_checkpoint(path).tensors
            found += f": {identify_tensors({n: t.shape for n, t in tensors.items()})}"
        raise fail(Kind.NOT_A_MODEL, found)
    if (path / INDEX).exists():
        return
    if (path / "snapshots").is_dir():
        inside = sorted(p.name for p in (path / "snapshots").iterdir())
        raise fail(Kind.NOT_A_MODEL, f"this is a download cache: the model is in snapshots/{(inside or ['?'])[0]}")
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    inner = [p.parent.name for p in sorted(path.glob("*/config.json")) if "noise_model" in p.parent.name]
    pickles = sorted(p.name for p in path.glob("*.pth"))
    if config.get("_class_name") == "WanModel" or "model_type" in config or inner or pickles:
        signs = [*pickles[:3], *inner]
        if config.get("_class_name"):
            kind = f" of model_type {config['model_type']!r}" if "model_type" in config else ""
            signs.insert(0, f"config.json of class {config['_class_name']}{kind}")
        if signs:
            raise fail(Kind.NOT_A_MODEL, f"it is in the original layout ({', '.join(signs)})")
    if "_class_name" in config or "architectures" in config:
        one = config.get("_class_name") or config["architectures"]
        raise fail(Kind.NOT_A_MODEL, f"it is a single component ({one}): give the folder above it")
    single = next((f for b in BASE_NAMES if (f := path / f"{b}.safetensors").is_file()), None)
    beside = f"; {single.name} is in it" if single else f"; it holds {len(list(path.iterdir()))} entries"
    raise fail(Kind.NOT_A_MODEL, f"no {INDEX} in {path.name}/{beside}")


def _components(path: Path, index: Mapping[str, Any], problems: list[Problem]) -> dict[str, Component]:
    """The components model_index.json names; what is missing, foreign or of another class becomes a problem."""
    found: dict[str, Component] = {}
    for name, entry in index.items():
        if not isinstance(entry, list) or not any(entry):  # plain values, and [null, null]
            continue
        if name not in COMPONENT_CLASSES:
            problems.append(Problem(Kind.UNSUPPORTED_MODEL, f"{INDEX} names a component {name!r}: {entry}"))
        elif len(entry) != 2 or entry[1] not in COMPONENT_CLASSES[name]:
            runs = " or ".join(COMPONENT_CLASSES[name])
            problems.append(Problem(Kind.UNSUPPORTED_MODEL, f"{name} is {entry}, this engine runs {runs}"))
        else:
            found[name] = Component(str(entry[0]), str(entry[1]), path / name)
    for name in COMPONENT_CLASSES:
        if not any(index.get(name) or []):
            problems.append(Problem(Kind.MISSING_COMPONENT, f"{INDEX} names no {name}"))
        elif name in found and not found[name].path.is_dir():
            problems.append(Problem(Kind.MISSING_COMPONENT, f"{name}/ does not exist"))
            del found[name]
    return found


def _config(kind: type[C], component: Component | None, problems: list[Problem]) -> C | None:
    """One component's config, or None with its problems noted."""
    if component is None:
        return None
    try:
        return kind.from_json(read_json(component.path / "config.json"), f"{component.path.name}/config.json")
    except WeightsError as e:
        problems += e.problems
    except ValueError as e:
        problems.append(Problem(Kind.BAD_CONFIG, str(e)))
    return None


def _mismatches(
    transformer: TransformerConfig | None, vae: VaeConfig | None, text: TextEncoderConfig | None
) -> list[Problem]:
    """Widths that two components must share."""
    out = []
    if transformer and vae and not transformer.in_channels == transformer.out_channels == vae.z_dim:
        what = (
            f"transformer in_channels={transformer.in_channels}, out_channels={transformer.out_channels}, "
            f"vae z_dim={vae.z_dim} must be equal"
        )
        out.append(Problem(Kind.MISMATCH, what))
    if transformer and text and transformer.text_dim != text.d_model:
        what = f"transformer text_dim={transformer.text_dim}, text_encoder d_model={text.d_model} must be equal"
        out.append(Problem(Kind.MISMATCH, what))
    return out


def open_folder(path: str | os.PathLike[str]) -> ModelFolder:
    """Read and check a model folder: model_index.json, configs, and the headers of all weights. Loads no tensor.

    Args:
      path: a folder in the diffusers layout.

    Raises:
      WeightsError: the folder is none, is of another layout or pipeline (named), or its parts are missing, damaged
        or do not belong together; everything found at once.
    """
    where = Path(path)
    _refuse_other_layouts(where)
    index = read_json(where / INDEX)
    other = identify_pipeline(index)
    if other is not None:
        raise WeightsError(where, [Problem(Kind.UNSUPPORTED_MODEL, other)])
    problems: list[Problem] = []
    components = _components(where, index, problems)
    transformer = _config(TransformerConfig, components.get("transformer"), problems)
    vae = _config(VaeConfig, components.get("vae"), problems)
    text = _config(TextEncoderConfig, components.get("text_encoder"), problems)
    problems += _mismatches(transformer, vae, text)
    scheduler: dict[str, Any] = {}
    checkpoints: dict[str, Checkpoint] = {}
    for name, component in components.items():
        try:
            if name in WEIGHTED:
                checkpoints[name] = open_checkpoint(component.path)
            elif name == "scheduler":
                scheduler = read_json(component.path / "scheduler_config.json")
            else:
                _check_tokenizer(component.path)
        except WeightsError as e:
            problems += [
                Problem(p.kind, p.what if p.what.startswith(f"{name}/") else f"{name}/: {p.what}") for p in e.problems
            ]
    raise_if(where, problems)
    assert transformer is not None
    assert vae is not None
    assert text is not None
    return ModelFolder(where, str(index["_class_name"]), components, transformer, vae, text, scheduler, checkpoints)


def _check_tokenizer(folder: Path) -> None:
    """tokenizer.json must be there and be itself, not a pointer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        beside = "; spiece.model alone is not read" if (folder / "spiece.model").exists() else ""
        raise WeightsError(folder, [Problem(Kind.MISSING_COMPONENT, f"{folder.name}/tokenizer.json{beside}")])
    foreign = foreign_file(file)
    if foreign is not None:
        raise WeightsError(folder, [foreign])
