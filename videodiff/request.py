"""What a caller asks for, and how it becomes a run in which everything is decided.

Owns: option names and aliases, every check of a request, what a file must carry to repeat a run. Does not own: models' defaults
(`known`), flags (`cli`), schedules' content (`schedule`), anything that computes.
Invariant: a `ResolvedRequest` is legal and complete; nobody downstream checks it again or fills in a default. Imports no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from videodiff.errors import closest
from videodiff.grid import VideoGeometry
from videodiff.known import SHIPPED, ModelInfo, info_for_folder, known_models, model_info, read_folder_info
from videodiff.schedule import load_schedule
from videodiff.sizes import base_geometry, parse_size, video_geometry
from videodiff.version import __version__

__all__ = [
    "SHIPPED",
    "GenerateRequest",
    "ModelInfo",
    "ResolvedRequest",
    "info_for_folder",
    "known_models",
    "model_info",
    "read_folder_info",
]

OUTPUT_TYPES = ("uint8", "np", "latent")
BACKENDS = ("auto", "dense", "svg")
SOLVERS = (
    "auto",
    "unipc",
    "unipc_official",
    "euler",
    "euler_twice",
    "dpm++",
    "dpm++_official",
)  # auto, and those of sampling.solvers
DTYPES = ("auto", "float32", "bfloat16")

# Other engines' words for ours. --size becomes height and width.
ALIASES: Mapping[str, str] = {
    "frame_num": "num_frames",
    "sample_steps": "num_inference_steps",
    "infer_steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "sample_shift": "flow_shift",
    "sample_guide_scale": "guidance_scale",
    "base_seed": "seed",
    "save_file": "output_path",
    "ckpt_dir": "model_path",
    "image": "image_path",
}


def canonical(values: Mapping[str, Any], known: Sequence[str], what: str = "option") -> dict[str, Any]:
    """Option names as this project spells them: dashes, aliases and size resolved.

    Args:
      values: name -> value, as someone wrote them.
      known: canonical names that are legal here.
      what: how to call a name in messages.

    Raises:
      ValueError: an unknown name (with the closest match), or two names for one option.
    """
    out: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for written, value in values.items():
        name = str(written).lstrip("-").replace("-", "_")
        name = ALIASES.get(name, name)
        if name == "size" and {"height", "width"} <= set(known):
            pairs = dict(zip(("height", "width"), parse_size(value)))
        elif name in known:
            pairs = {name: value}
        else:
            legal = {*known, *(a for a, c in ALIASES.items() if c in known), "size"}
            raise ValueError(f"unknown {what} {written!r}; {closest(name, legal)}")
        for key, v in pairs.items():
            if key in out:
                raise ValueError(f"{spelled[key]!r} and {written!r} both set {key}; give one of them")
            out[key], spelled[key] = v, str(written)
    return out


# name -> (lowest legal value, whether it is legal itself, highest, remedy)
_WHOLE: Mapping[str, tuple[int, int | None]] = {
    "height": (1, None),
    "width": (1, None),
    "num_frames": (1, None),
    "num_inference_steps": (1, None),
    "refine_steps": (1, None),
    "num_videos_per_prompt": (1, None),
    "quality": (0, 51),
    "ulysses_degree": (1, None),
    "ring_degree": (1, None),
}
_REAL = ("fps", "guidance_scale", "guidance_scale_2", "flow_shift", "boundary_ratio", "denoise_strength")
_FLAGS = ("vae_tiling", "warmup", "gif", "contact_sheet", "keep_latents")
_CHOICES = {"output_type": OUTPUT_TYPES, "attention_backend": BACKENDS, "solver": SOLVERS, "dtype": DTYPES}


@dataclass(frozen=True)
class GenerateRequest:
    """What a caller asked for, in the names users know; None means the default of the model.

    Args:
      prompt: one text or several (a batch); None takes the model's example.
      negative_prompt: one for all; None takes the model's own.
      prompt_path: a text file, one prompt a line, instead of prompt.
      height, width: pixels; both or neither.
      res: a name of configs/resolutions.yaml or "WIDTHxHEIGHT", instead of height and width.
      num_frames: temporal_factor * k + 1.
      fps: frames a second of the file.
      num_inference_steps, guidance_scale (1 runs one branch), flow_shift, solver: sampling.
      base_res: a smaller size at which the video is sampled first, to be enlarged and refined: a name, WIDTHxHEIGHT, "none"
        (sample the final size directly) or "auto" (the model's own rule).
      denoise_strength: noise level in (0, 1) at which refinement begins.
      refine_steps: denoising steps of the refinement; num_inference_steps are those before it.
      seed: None or -1 picks one; one for all, or one a video.
      schedule: name or YAML file of a sparsity schedule.
      attention_backend: one of `BACKENDS`.
      num_videos_per_prompt: copies of every prompt, with seeds that count up.
      output_type: one of `OUTPUT_TYPES`.
      dtype: one of `DTYPES`; auto is float32 on CPU and bfloat16 elsewhere.
      model, model_path: a known name or a folder; a folder.
      output_path, quality, gif, frames_dir, contact_sheet, keep_latents: what is written where.
      resume: a saved state of an interrupted run.
      sources: option -> where its value came from, for the log; one that is not in it is an argument.
      guidance_scale_2, boundary_ratio, image_path, last_image, lora_path, vae_tiling, ulysses_degree, ring_degree, warmup:
        names of features that are not there yet; anything but the neutral value is refused.

    Raises:
      ValueError: a value of the wrong type or range, two options that exclude each other, or a feature that is not there.
    """

    prompt: str | Sequence[str] | None = None
    negative_prompt: str | None = None
    prompt_path: str | Path | None = None
    height: int | None = None
    width: int | None = None
    res: str | None = None
    num_frames: int | None = None
    fps: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
    base_res: str | None = None
    denoise_strength: float | None = None
    refine_steps: int | None = None
    boundary_ratio: float | None = None
    seed: int | Sequence[int] | None = None
    schedule: str = "dense"
    attention_backend: str = "auto"
    solver: str | None = None
    num_videos_per_prompt: int = 1
    output_type: str = "uint8"
    dtype: str = "auto"
    model: str | None = None
    model_path: str | Path | None = None
    output_path: str | Path | None = None
    quality: int | None = None
    gif: bool = False
    frames_dir: str | Path | None = None
    contact_sheet: bool = False
    keep_latents: bool = True
    resume: str | Path | None = None
    image_path: str | Path | None = None
    last_image: str | Path | None = None
    lora_path: str | Path | None = None
    vae_tiling: bool = False
    ulysses_degree: int = 1
    ring_degree: int = 1
    warmup: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            _check_number(name, getattr(self, name), Integral, low, high)
        for name in _REAL:
            _check_number(name, getattr(self, name), Real)
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise ValueError(f"negative_prompt={self.negative_prompt!r} must be one text; it serves every prompt")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        for name, legal in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in legal:
                raise ValueError(f"{name}={value!r} is unknown; {closest(str(value), legal)}")
        if self.fps is not None and not 0 < self.fps <= 1000:
            raise ValueError(f"fps={self.fps} must be above 0 and at most 1000")
        if self.flow_shift is not None and not self.flow_shift > 0:
            raise ValueError(f"flow_shift={self.flow_shift} must be positive; 1 leaves the noise levels as they are")
        if self.denoise_strength is not None and not 0 < self.denoise_strength < 1:
            raise ValueError(
                f"denoise_strength={self.denoise_strength} must be in (0, 1): the noise level at which refinement begins"
            )
        if self.guidance_scale is not None and self.guidance_scale < 1:
            raise ValueError(
                f"guidance_scale={self.guidance_scale} must be at least 1; 1 runs without guidance, in half the time"
            )
        self._check_seed()
        self._check_pairs()
        self._refuse_missing_features()

    def _check_seed(self) -> None:
        seeds = self.seed if _is_list(self.seed) else [self.seed]
        for s in seeds:  # type: ignore[union-attr]
            if s is not None and (not isinstance(s, Integral) or isinstance(s, bool)):
                raise ValueError(f"seed={s!r} must be a whole number, or -1 to pick one")

    def _check_pairs(self) -> None:
        if self.res is not None and not (self.height is None and self.width is None):
            raise ValueError(
                f"res={self.res!r} and height={self.height}, width={self.width} exclude each other; give one of them"
            )
        if (self.height is None) != (self.width is None):
            raise ValueError(f"height={self.height} and width={self.width} must be given together, or use res")
        if self.prompt is not None and self.prompt_path is not None:
            raise ValueError("prompt and prompt_path exclude each other; give one of them")

    def _refuse_missing_features(self) -> None:
        if self.guidance_scale_2 is not None and self.boundary_ratio is None:
            raise ValueError(
                f"guidance_scale_2={self.guidance_scale_2} needs boundary_ratio: it is the guidance of the low-noise "
                f"expert, below the boundary; models with one expert take guidance_scale alone"
            )
        neutral = {
            "boundary_ratio": None, "guidance_scale_2": None, "image_path": None, "last_image": None,
            "lora_path": None, "vae_tiling": False, "ulysses_degree": 1, "ring_degree": 1, "warmup": False,
        }  # fmt: skip
        for name, value in neutral.items():
            if getattr(self, name) != value:
                why = {"vae_tiling": "; decoding is streamed frame by frame, which bounds its memory already"}
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported yet{why.get(name, '')}; leave it out"
                )

    def resolve(self, info: ModelInfo, *, embedded: int | None = None) -> ResolvedRequest:
        """Decide everything.

        Args:
          info: of the model that will run.
          embedded: number of prompts that come as embeddings instead of texts.

        Raises:
          ValueError: illegal size or frame count (naming the nearest legal ones), empty prompt, unknown schedule, options
            that contradict each other.
        """
        from videodiff.noise import resolve_seeds  # its module stays free of jax until noise is drawn

        notes = [info.note] if info.note else []
        prompts, example = self._prompts(info, embedded)
        if example:
            notes.append(f"no prompt given: using the example prompt of {info.name}: {info.example_prompt!r}")
        geometry, name = video_geometry(info, self.height, self.width, self.res, self.num_frames)
        if (geometry.computed_height, geometry.computed_width) != (geometry.height, geometry.width):
            notes.append(
                f"{geometry.width}x{geometry.height} is computed at {geometry.computed_width}x{geometry.computed_height} "
                f"and cropped"
            )
        base = base_geometry(info, geometry, _or(self.base_res, "auto"))
        if base is None:
            for option in ("denoise_strength", "refine_steps"):
                if getattr(self, option) is not None:
                    raise ValueError(
                        f"{option}={getattr(self, option)} has nothing to do: {geometry.width}x{geometry.height} is sampled "
                        f"directly here; name a smaller size with base_res, or leave it out"
                    )
        strength = float(_or(self.denoise_strength, info.denoise_strength))
        refine_steps = int(_or(self.refine_steps, info.refine_steps))
        if base is not None:
            notes.append(
                f"sampled at {base.width}x{base.height} first, then enlarged and refined from noise level {strength:g} in "
                f"{refine_steps} steps; base_res none samples {geometry.width}x{geometry.height} directly"
            )
        schedule = load_schedule(str(self.schedule))
        sparse = any(s.density < 1 for per in schedule.entries.values() for s in per.values())
        if sparse and self.attention_backend == "dense":
            raise ValueError(
                f"attention_backend='dense' computes every pair, so schedule={self.schedule!r} would change nothing; "
                f"use attention_backend auto or svg, or schedule dense"
            )
        if not sparse and self.attention_backend == "svg":
            raise ValueError(
                f"attention_backend='svg' has nothing to do under schedule={self.schedule!r}, which is dense; name a sparse "
                f"schedule, or use attention_backend auto or dense"
            )
        if self.flow_shift is not None:
            shift, source = float(self.flow_shift), self.sources.get("flow_shift", "argument")
        elif (own := schedule.pick(info.name, geometry.height, geometry.width)[1].flow_shift) is not None:
            shift, source = float(own), f"schedule {schedule.name}"
        else:
            shift = float(info.default_flow_shift(geometry.height, geometry.width))
            source = info.flow_shift_source or f"default of {info.name}"
        guidance = float(_or(self.guidance_scale, info.guidance_scale))
        if guidance == 1 and self.negative_prompt:
            notes.append("guidance_scale is 1, so the negative prompt has no effect")
        seed = self.seed
        return ResolvedRequest(
            model=info.name,
            prompts=prompts,
            negative_prompt=_or(self.negative_prompt, info.negative_prompt),
            geometry=geometry,
            resolution=name,
            fps=float(_or(self.fps, info.fps)),
            num_inference_steps=int(_or(self.num_inference_steps, info.num_inference_steps)),
            base=base,
            denoise_strength=strength,
            refine_steps=refine_steps,
            guidance_scale=guidance,
            flow_shift=shift,
            flow_shift_source=source,
            solver=None if self.solver == "auto" else self.solver,
            schedule=str(self.schedule),
            schedule_digest=schedule.digest,
            attention_backend=self.attention_backend,
            seeds=tuple(resolve_seeds(seed, len(prompts), int(self.num_videos_per_prompt))),
            num_videos_per_prompt=int(self.num_videos_per_prompt),
            output_type=self.output_type,
            dtype=self.dtype,
            notes=tuple(notes),
        )

    def _prompts(self, info: ModelInfo, embedded: int | None) -> tuple[tuple[str, ...], bool]:
        """The texts, and whether they are the model's example."""
        if embedded is not None:
            if self.prompt is not None or self.prompt_path is not None:
                raise ValueError("prompt and prompt_embeds exclude each other; give one of them")
            return ("",) * embedded, False
        if self.prompt_path is not None:
            return read_prompts(self.prompt_path), False
        if self.prompt is None:
            return (info.example_prompt,), True
        texts = list(self.prompt) if _is_list(self.prompt) else [self.prompt]
        if not texts:
            raise ValueError("prompt is an empty list; give at least one text")
        for i, text in enumerate(texts):
            which = f"prompt {i + 1} of {len(texts)}" if len(texts) > 1 else "prompt"
            if not isinstance(text, str):
                raise ValueError(f"{which} must be a text, got {type(text).__name__}")
            if not text.strip():
                raise ValueError(
                    f"{which} is empty; describe what the video should show, or leave prompt out for an example"
                )
        return tuple(map(str, texts)), False


def make_request(**options: Any) -> GenerateRequest:
    """A request from options under any of their names, aliases and size included.

    Raises:
      ValueError: as `GenerateRequest`; an unknown name is answered with the closest one.
    """
    return GenerateRequest(**canonical(options, FIELDS))


def read_prompts(path: str | Path) -> tuple[str, ...]:
    """The prompts of a text file, one a line; blank lines are skipped.

    Raises:
      ValueError: no such file, not UTF-8, or no prompt in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt_path={str(path)!r} cannot be read: {error}") from None
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise ValueError(f"prompt_path={str(path)!r} holds no prompt; write one a line")
    return prompts


FIELDS = tuple(f.name for f in dataclasses.fields(GenerateRequest))


@dataclass(frozen=True)
class ResolvedRequest:
    """A run in which everything is decided; made by `GenerateRequest.resolve` only.

    Args:
      model: name of the model.
      prompts: what to show.
      negative_prompt: what not to show, for all of them.
      geometry: sizes from pixels to tokens.
      resolution: name of the size, "" when it has none.
      base: the size that is sampled first, or None.
      denoise_strength, refine_steps: of the refinement; without meaning when base is None.
      flow_shift_source: where the shift came from.
      solver: a name, or None for the one of the checkpoint's scheduler config.
      schedule, schedule_digest: name or file as asked for, and the hash of its content.
      seeds: one a video; videos of one prompt are neighbours.
      dtype: "auto", "float32" or "bfloat16".
      notes: what the user should be told once.
    """

    model: str
    prompts: tuple[str, ...]
    negative_prompt: str
    geometry: VideoGeometry
    resolution: str
    fps: float
    num_inference_steps: int
    base: VideoGeometry | None
    denoise_strength: float
    refine_steps: int
    guidance_scale: float
    flow_shift: float
    flow_shift_source: str
    solver: str | None
    schedule: str
    schedule_digest: str
    attention_backend: str
    seeds: tuple[int, ...]
    num_videos_per_prompt: int
    output_type: str
    dtype: str
    notes: tuple[str, ...] = ()

    @property
    def guided(self) -> bool:
        """Whether the unconditional branch runs."""
        return self.guidance_scale > 1

    @property
    def videos(self) -> int:
        return len(self.seeds)

    @property
    def video_prompts(self) -> tuple[str, ...]:
        """The prompt of every video."""
        return tuple(p for p in self.prompts for _ in range(self.num_videos_per_prompt))

    def summary(self) -> str:
        """One line for the log."""
        g, b = self.geometry, self.base
        steps = f"{self.num_inference_steps} steps"
        if b is not None:
            steps += f" at {b.width}x{b.height} and {self.refine_steps} of refinement"
        return (
            f"{self.model}: {g.width}x{g.height}, {g.num_frames} frames at {self.fps:g} fps, {steps}, "
            f"solver {self.solver or 'of the checkpoint'}, guidance {self.guidance_scale:g}, "
            f"flow_shift {self.flow_shift:g} ({self.flow_shift_source}), schedule {self.schedule}, "
            f"seed {', '.join(map(str, self.seeds))}"
        )

    def metadata(self) -> dict[str, Any]:
        """Everything that repeats the run, as plain JSON types; `request_from_metadata` reads it.

        ``prompt`` and ``seed`` are lists in a batch; the writer of a single video puts that video's own there.
        """
        g = self.geometry
        data: dict[str, Any] = {
            "prompt": self.prompts[0] if len(self.prompts) == 1 else list(self.prompts),
            "negative_prompt": self.negative_prompt,
            "seed": self.seeds[0] if self.videos == 1 else list(self.seeds),
            "model": self.model,
            "height": g.height,
            "width": g.width,
            "num_frames": g.num_frames,
            "fps": self.fps,
            "num_inference_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "flow_shift": self.flow_shift,
            "solver": self.solver,
            "schedule": self.schedule,
            "schedule_digest": self.schedule_digest,
            "attention_backend": self.attention_backend,
            "dtype": self.dtype,
            "version": __version__,
        }
        if self.base is None:
            data["base_res"] = "none"
        else:
            data["base_res"] = f"{self.base.width}x{self.base.height}"
            data |= {"denoise_strength": self.denoise_strength, "refine_steps": self.refine_steps}
        if self.num_videos_per_prompt > 1:
            data["num_videos_per_prompt"] = self.num_videos_per_prompt
        return data


_REPEATED = (
    "prompt", "negative_prompt", "seed", "height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale",
    "flow_shift", "solver", "schedule", "attention_backend", "dtype", "num_videos_per_prompt", "base_res", "denoise_strength",
    "refine_steps",
)  # fmt: skip


def request_from_metadata(data: Mapping[str, Any], **changes: Any) -> GenerateRequest:
    """The request that repeats a run.

    Args:
      data: what `ResolvedRequest.metadata` gave, possibly with more keys and with one video's prompt and seed.
      changes: fields of the request that are set or replaced.

    Raises:
      ValueError: it does not hold a run.
    """
    missing = [k for k in ("prompt", "seed", "height", "width", "num_frames", "num_inference_steps") if k not in data]
    if missing:
        raise ValueError(f"this is not the metadata of a run of videodiff: {', '.join(missing)} missing")
    fields = {k: data[k] for k in _REPEATED if data.get(k) is not None}
    fields.setdefault("base_res", "none")  # files from before there was one
    if not _is_list(fields["seed"]):
        fields.pop("num_videos_per_prompt", None)
    return GenerateRequest(**{**fields, **changes})


def _check_number(name: str, value: Any, kind: type, low: float | None = None, high: float | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name}={value!r} must be a {'whole ' if kind is Integral else ''}number")
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{name}={value!r} must be finite")
    if low is not None and (value < low or (high is not None and value > high)):  # type: ignore[operator]
        limits = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name}={value} must be {limits}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
