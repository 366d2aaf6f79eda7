"""Saving: a model's state becomes the published files again.

Owns: the inverse of a key table, component and pipeline folders in the diffusers layout. Does not own: training.
Invariant: what is saved here loads here bit for bit (same dtype), and loads in diffusers and transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from videodiff.files import atomic_path
from videodiff.weights.keys import KeyRule
from videodiff.weights.load import BUFFER_BYTES, DtypeFor, largest_magnitude, path_text, source_shape
from videodiff.weights.problems import Kind, Problem, raise_if
from videodiff.weights.safetensors_files import DTYPE_NAMES, write_safetensors

DIFFUSERS_BASE = "diffusion_pytorch_model"  # transformer, vae
TRANSFORMERS_BASE = "model"  # text_encoder


def _pieces(view: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
    """``view`` in element order, cast, in C-contiguous pieces of bounded size."""
    rows = view.reshape(1) if not view.ndim else view
    step = max(1, BUFFER_BYTES // max(1, rows[:1].size * dtype.itemsize))
    for first in range(0, len(rows), step):
        yield np.ascontiguousarray(rows[first : first + step]).astype(dtype, copy=False)


def published_tensors(state: nnx.State, rules: Iterable[KeyRule]) -> dict[str, np.ndarray]:
    """Every tensor of the published layout as a view of the state's arrays.

    Args:
      state: real arrays.
      rules: the model's key table.

    Returns:
      Checkpoint name -> array with the checkpoint's axes.

    Raises:
      WeightsError: the table does not cover the state, or weights are not finite.
    """
    arrays = {
        tuple(p): np.asarray(v.get_value() if isinstance(v, nnx.Variable) else v) for p, v in nnx.to_flat_state(state)
    }
    rules = list(rules)
    problems = [Problem(Kind.UNASSIGNED, path_text(p)) for p in arrays.keys() - {r.target for r in rules}]
    tensors: dict[str, np.ndarray] = {}
    for rule in rules:
        if rule.target not in arrays:
            problems.append(Problem(Kind.NO_PARAMETER, path_text(rule.target)))
            continue
        array = arrays[rule.target]
        if source_shape(rule, array.shape) is None:
            problems.append(Problem(Kind.SHAPE, f"{path_text(rule.target)} {array.shape} for {rule.layout.name}"))
            continue
        if not np.isfinite(largest_magnitude(np.ascontiguousarray(array))):
            problems.append(Problem(Kind.NON_FINITE, path_text(rule.target)))
        for i, name in enumerate(rule.sources):
            if name in tensors:
                problems.append(Problem(Kind.ASSIGNED_TWICE, f"tensor {name}"))
            tensors[name] = rule.source_view(array, i)
    raise_if("the model to save", problems)
    return tensors


def _shards(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Names grouped in order into files of at most ``limit`` bytes (a larger tensor gets a file of its own)."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, nbytes in sizes.items():
        if limit is not None and groups[-1] and used + nbytes > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += nbytes
    return groups


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_component(
    folder: str | os.PathLike[str],
    state: nnx.State,
    rules: Iterable[KeyRule],
    config_json: Mapping[str, Any],
    dtype: Any = None,
    *,
    base: str = DIFFUSERS_BASE,
    max_shard_bytes: int | None = None,
) -> list[Path]:
    """Write one component in the published layout: ``config.json`` and safetensors.

    Args:
      folder: made when missing; weights of an earlier save in it are replaced.
      state: real arrays of the module's parameters (``nnx.state(module, nnx.Param)``).
      rules: the model's key table.
      config_json: the fields of config.json, for example ``config.to_json()``.
      dtype: dtype on disk, or a function of the state path; None keeps the state's dtypes.
      base: file name without ending: DIFFUSERS_BASE, or TRANSFORMERS_BASE for a text encoder.
      max_shard_bytes: split into files of at most this many bytes, with an index.

    Returns:
      The safetensors files written.

    Raises:
      WeightsError: the table does not cover the state, or weights are not finite.
    """
    out = Path(folder)
    rules = list(rules)
    tensors = published_tensors(state, rules)
    target_of = {name: rule.target for rule in rules for name in rule.sources}
    choose: DtypeFor = dtype if callable(dtype) and not isinstance(dtype, type) else lambda _: dtype
    dtypes = {}
    for name, array in tensors.items():
        wanted = choose(target_of[name])
        dtypes[name] = array.dtype if wanted is None else np.dtype(wanted)
    names = sorted(tensors, key=lambda n: (-dtypes[n].itemsize, n))  # keeps every tensor aligned to its dtype
    sizes = {n: tensors[n].size * dtypes[n].itemsize for n in names}
    groups = _shards(sizes, max_shard_bytes)
    out.mkdir(parents=True, exist_ok=True)
    files = [
        out / (f"{base}.safetensors" if len(groups) == 1 else f"{base}-{i + 1:05d}-of-{len(groups):05d}.safetensors")
        for i in range(len(groups))
    ]
    for file, group in zip(files, groups, strict=True):
        specs = {n: (DTYPE_NAMES[dtypes[n]], tensors[n].shape) for n in group}
        write_safetensors(file, specs, {n: _pieces(tensors[n], dtypes[n]) for n in group})
    index = out / f"{base}.safetensors.index.json"
    for old in [*out.glob(f"{base}*.safetensors"), index]:
        if old not in files:
            old.unlink(missing_ok=True)
    if len(groups) > 1:
        table = {n: file.name for file, group in zip(files, groups, strict=True) for n in group}
        _write_json(index, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(table.items()))})
    _write_json(out / "config.json", config_json)
    return files


def save_pipeline_index(
    folder: str | os.PathLike[str],
    scheduler_config: Mapping[str, Any],
    *,
    diffusers_version: str = "0.42.1",
) -> None:
    """Write ``model_index.json`` and ``scheduler/scheduler_config.json`` of a Wan text-to-video pipeline.

    Args:
      folder: the pipeline's folder; components go to transformer/, vae/, text_encoder/ and tokenizer/ beside it.
      scheduler_config: fields of the scheduler, for example :func:`unipc_scheduler_json`.
      diffusers_version: version whose field names are written.
    """
    out = Path(folder)
    (out / "scheduler").mkdir(parents=True, exist_ok=True)
    _write_json(out / "scheduler" / "scheduler_config.json", scheduler_config)
    _write_json(
        out / "model_index.json",
        {
            "_class_name": "WanPipeline",
            "_diffusers_version": diffusers_version,
            "boundary_ratio": None,
            "expand_timesteps": False,
            "scheduler": ["diffusers", scheduler_config["_class_name"]],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "T5TokenizerFast"],
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "transformer_2": [None, None],
            "vae": ["diffusers", "AutoencoderKLWan"],
        },
    )


def unipc_scheduler_json(flow_shift: float, *, diffusers_version: str = "0.42.1") -> dict[str, Any]:
    """The scheduler config the published Wan folders carry, with a shift of one's own (models.md 1.6)."""
    return {
        "_class_name": "UniPCMultistepScheduler",
        "_diffusers_version": diffusers_version,
        "beta_end": 0.02,
        "beta_schedule": "linear",
        "beta_start": 0.0001,
        "disable_corrector": [],
        "dynamic_thresholding_ratio": 0.995,
        "final_sigmas_type": "zero",
        "flow_shift": flow_shift,
        "lower_order_final": True,
        "num_train_timesteps": 1000,
        "predict_x0": True,
        "prediction_type": "flow_prediction",
        "rescale_betas_zero_snr": False,
        "sample_max_value": 1.0,
        "solver_order": 2,
        "solver_p": None,
        "solver_type": "bh2",
        "steps_offset": 0,
        "thresholding": False,
        "timestep_spacing": "linspace",
        "trained_betas": None,
        "use_beta_sigmas": False,
        "use_exponential_sigmas": False,
        "use_flow_sigmas": True,
        "use_karras_sigmas": False,
    }
