"""Known models: their defaults and the shapes needed before any weight is read.

Owns: configs/models, and which known model a checkpoint folder is. Does not own: requests (`request`), weights (`weights`).
Invariant: a folder is a known model only when every shape of its transformer and its VAE's factors agree.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from videodiff.configs import TransformerConfig, VaeConfig
from videodiff.errors import closest
from videodiff.grid import LatentLayout
from videodiff.resources import config_dir
from videodiff.schedule import resolution_sizes

SHIPPED = "tiny"


@dataclass(frozen=True)
class ModelInfo:
    """A model's defaults and the shapes needed before its weights are read.

    Args:
      name: known name, or the folder's name.
      describe: one line.
      resolution: default, a name of configs/resolutions.yaml.
      num_frames, fps, num_inference_steps, flow_shift, guidance_scale, negative_prompt: defaults.
      example_prompt: used when a caller gives none.
      transformer: its config.
      spatial_factor, temporal_factor: pixels and frames a latent.
      flow_shift_up_to: resolution -> shift for sizes of at most its pixels; the smallest that fits wins.
      solver: what its scheduler config names, for descriptions made without a folder.
      repository: where its weights are published, "" when they ship or are unknown.
      note: what the user should know about how these were found.
      flow_shift_source: who says flow_shift.
      scheduler: fields of a folder's scheduler_config.json, {} without a folder.
      base_side: short side in pixels of the size at which larger videos are sampled first; 0 samples every size directly.
      denoise_strength, refine_steps: of the refinement after that.
    """

    name: str
    describe: str
    resolution: str
    num_frames: int
    fps: float
    num_inference_steps: int
    flow_shift: float
    guidance_scale: float
    negative_prompt: str
    example_prompt: str
    transformer: TransformerConfig
    spatial_factor: int = 8
    temporal_factor: int = 4
    flow_shift_up_to: Mapping[str, float] = field(default_factory=dict)
    solver: str = "unipc"
    repository: str = ""
    note: str = ""
    flow_shift_source: str = ""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    base_side: int = 0
    denoise_strength: float = 0.75
    refine_steps: int = 8

    @property
    def layout(self) -> LatentLayout:
        t = self.transformer
        return LatentLayout(self.spatial_factor, self.temporal_factor, t.patch_size, t.in_channels)

    @property
    def shipped(self) -> bool:
        return self.name == SHIPPED

    def default_flow_shift(self, height: int, width: int) -> float:
        """The shift for a size in pixels."""
        sizes = resolution_sizes()
        fits = [(sizes[r][0] * sizes[r][1], s) for r, s in self.flow_shift_up_to.items()]
        fits = [(area, shift) for area, shift in fits if height * width <= area]
        return min(fits)[1] if fits else self.flow_shift


def known_models() -> tuple[str, ...]:
    """Names of configs/models, the shipped model first."""
    names = sorted(p.stem for p in (config_dir() / "models").glob("*.yaml"))
    return tuple(sorted(names, key=lambda n: (n != SHIPPED, n)))


@functools.cache
def model_info(name: str) -> ModelInfo:
    """A known model.

    Raises:
      ValueError: unknown name, or a config file with mistakes.
    """
    if name not in known_models():
        raise ValueError(
            f"model={name!r} is neither a known model nor a checkpoint folder; {closest(name, known_models())}"
        )
    path = config_dir() / "models" / f"{name}.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    known = {f.name for f in dataclasses.fields(ModelInfo)}
    for key in data:
        if key not in known:
            raise ValueError(f"{path.name}: unknown key {key!r}; {closest(str(key), known)}")
    return ModelInfo(**{**data, "transformer": TransformerConfig.from_json(data["transformer"], path.name)})


_SHAPES = (
    "patch_size", "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim",
    "ffn_dim", "num_layers",
)  # fmt: skip


class CheckedFolder(Protocol):
    """What `info_for_folder` reads of `weights.folder.ModelFolder`."""

    @property
    def path(self) -> Path: ...
    @property
    def transformer(self) -> TransformerConfig: ...
    @property
    def vae(self) -> VaeConfig: ...
    @property
    def scheduler(self) -> Mapping[str, Any]: ...


def info_for_folder(folder: CheckedFolder) -> ModelInfo:
    """Which known model a checked folder is, see `info_for_shapes`."""
    return info_for_shapes(
        folder.path.resolve().name,
        folder.transformer,
        spatial_factor=folder.vae.scale_factor_spatial,
        temporal_factor=folder.vae.scale_factor_temporal,
        scheduler=folder.scheduler,
    )


def info_for_shapes(
    name: str,
    transformer: TransformerConfig,
    *,
    spatial_factor: int = 8,
    temporal_factor: int = 4,
    scheduler: Mapping[str, Any] | None = None,
) -> ModelInfo:
    """Which known model a folder is, by its shapes; unknown shapes get Wan's general defaults and a note.

    Args:
      name: of the folder, for a model that is not known.
      transformer: its config.
      spatial_factor, temporal_factor: of its VAE.
      scheduler: fields of its scheduler_config.json; an unknown model takes its shift from there.
    """
    fields = dict(scheduler or {})
    for known in map(model_info, known_models()):
        same = all(getattr(known.transformer, s) == getattr(transformer, s) for s in _SHAPES)
        if same and (known.spatial_factor, known.temporal_factor) == (spatial_factor, temporal_factor):
            return dataclasses.replace(known, transformer=transformer, scheduler=fields)
    shift, source = 5.0, "general Wan default"
    for key in ("flow_shift", "shift"):
        if isinstance(fields.get(key), int | float):
            shift, source = float(fields[key]), "scheduler_config.json"
            break
    general = model_info("wan2.1-t2v-14b")
    return dataclasses.replace(
        general,
        name=name,
        describe="a checkpoint with shapes that are not among the known models",
        resolution="480p",
        flow_shift=shift,
        flow_shift_up_to={},
        flow_shift_source=source,
        base_side=0,
        scheduler=fields,
        transformer=transformer,
        spatial_factor=spatial_factor,
        temporal_factor=temporal_factor,
        repository="",
        note=f"{name} has shapes that are none of {', '.join(known_models())}; Wan's general defaults apply",
    )


def read_folder_info(folder: str | Path) -> ModelInfo:
    """`info_for_shapes` of a checkpoint folder, from its small config files alone.

    Raises:
      ValueError: not a checkpoint folder, or a config that this engine does not run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"model_path={str(folder)!r} is not a folder")

    def fields(component: str, file: str, needed: bool) -> dict[str, Any]:
        path = folder / component / file
        if not path.is_file():
            if needed:
                raise ValueError(
                    f"{folder} is not a checkpoint folder in the diffusers layout: {component}/{file} is missing; "
                    f"weights.md tells how to lay one out"
                )
            return {}
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path} holds no JSON object")
        return data

    transformer = TransformerConfig.from_json(fields("transformer", "config.json", True))
    vae = fields("vae", "config.json", True)
    return info_for_shapes(
        folder.resolve().name,
        transformer,
        spatial_factor=int(vae.get("scale_factor_spatial", 8)),
        temporal_factor=int(vae.get("scale_factor_temporal", 4)),
        scheduler=fields("scheduler", "scheduler_config.json", False),
    )
