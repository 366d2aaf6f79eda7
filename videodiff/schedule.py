"""Sparsity schedules: which layers of which step are dense or sparse, by model and resolution.

Owns: the YAML format of configs/schedules, its checks, and compiling it for a run into one frozen plan a step. Pure Python.
Does not own: attention patterns, tiles, the density that is really executed (`attention.tiles`).
Invariant: the segments of a plan cover the layers without gaps, and there are never more phases than a schedule's modes ask for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from videodiff.errors import closest
from videodiff.resources import config_dir

SINKS = ("prefix", "none", "first_frame")
DENSE = 1.0
MOST_STEPS = 1000  # as many as the models were trained on: advice never asks for more


@dataclass(frozen=True)
class Segment:
    """Layers start <= layer < stop at one density (1.0 is dense)."""

    start: int
    stop: int
    density: float

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a segment needs 0 <= start < stop, got {self.start=}, {self.stop=}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}")


@dataclass(frozen=True)
class StepPlan:
    """One step: its layer segments in order, and whether the unconditional branch runs."""

    segments: tuple[Segment, ...]
    guided: bool

    def __post_init__(self) -> None:
        if not self.segments or self.segments[0].start != 0:
            raise ValueError("a step plan's segments must start at layer 0")
        for a, b in pairwise(self.segments):
            if a.stop != b.start:
                raise ValueError(f"a step plan's segments must follow one another, got {a} and {b}")

    @property
    def layers(self) -> int:
        return self.segments[-1].stop

    @property
    def densities(self) -> tuple[float, ...]:
        """The density of every layer."""
        return tuple(s.density for s in self.segments for _ in range(s.start, s.stop))


@dataclass(frozen=True)
class Phase:
    """Neighbouring steps with equal plans: one compiled program.

    Args:
      plan: of each of its steps.
      start, stop: steps start <= step < stop.
    """

    plan: StepPlan
    start: int
    stop: int


@dataclass(frozen=True)
class Sparsity:
    """What a schedule says for one model at one resolution.

    Args:
      density: requested kept share of pairs in sparse layers, sink included, in (0, 1]; 1 is dense.
      dense_steps: share of the steps that run dense, from the first one, in [0, 1], rounded down to whole steps; or None.
      dense_above_sigma: steps whose sigma is at least this run dense, in [0, 1]; or None. Exactly one of the two is set.
      dense_layers: first layers that stay dense in sparse steps; a whole number, so that a share never rounds to none unseen.
      sink: which keys every query keeps: prefix, none, first_frame.
      probe_rows: query rows drawn for routing.
      routing_seed: of those rows.
      flow_shift: that the numbers were found with, used unless a run names its own; None leaves the model's default.
    """

    density: float = DENSE
    dense_steps: float | None = 0.0
    dense_above_sigma: float | None = None
    dense_layers: int = 0
    sink: str = "prefix"
    probe_rows: int = 64
    routing_seed: int = 0
    flow_shift: float | None = None

    def __post_init__(self) -> None:
        def real(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool)

        if not real(self.density) or not 0 < self.density <= 1:
            raise ValueError(
                f"density={self.density!r} must be in (0, 1]: the share of pairs that is kept (1 is dense), not the share dropped"
            )
        if (self.dense_steps is None) == (self.dense_above_sigma is None):
            raise ValueError(
                "dense steps are given either as dense_steps: {share: x} or as dense_steps: {sigma: x}, not both and not neither"
            )
        for name in ("dense_steps", "dense_above_sigma"):
            value = getattr(self, name)
            if value is not None and (not real(value) or not 0 <= value <= 1):
                raise ValueError(f"{name}={value!r} must be in [0, 1]")
        for name, low in (("dense_layers", 0), ("probe_rows", 1), ("routing_seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {low}")
        if self.sink not in SINKS:
            raise ValueError(f"sink={self.sink!r} is unknown; {closest(str(self.sink), SINKS)}")
        if self.flow_shift is not None and (not real(self.flow_shift) or not 0 < self.flow_shift < math.inf):
            raise ValueError(f"flow_shift={self.flow_shift!r} must be a positive number")

    def dense_step_count(self, sigmas: Sequence[float]) -> int:
        """How many steps run dense; sigmas [n + 1]."""
        steps = len(sigmas) - 1
        if self.dense_above_sigma is not None:
            return sum(s >= self.dense_above_sigma for s in sigmas[:-1])
        assert self.dense_steps is not None
        return math.floor(self.dense_steps * steps + 1e-9)


@dataclass(frozen=True)
class Schedule:
    """A parsed schedule file.

    Args:
      name: of the schedule.
      entries: model -> resolution -> sparsity; model "*" serves every model.
      sizes: resolution -> (height, width) in pixels, for those that entries name.
      digest: first 12 hex digits of the SHA-256 of its content.
    """

    name: str
    entries: Mapping[str, Mapping[str, Sparsity]]
    sizes: Mapping[str, tuple[int, int]]
    digest: str
    source: str = ""

    def pick(self, model: str, height: int, width: int) -> tuple[str, Sparsity, tuple[str, ...]]:
        """What applies to a model at a size in pixels.

        Returns:
          the listed resolution ("any" where none are listed), its sparsity, and what the user should know about the choice.
        """
        notes: list[str] = []
        entry = self.entries.get(model) or self.entries.get("*")
        if entry is None:
            other = next(iter(self.entries))
            entry = self.entries[other]
            notes.append(
                f"schedule {self.name} was made for {', '.join(self.entries)} and not for {model}; it takes the numbers of "
                f"{other}: check the quality against --schedule dense"
            )
        if "any" in entry:
            return "any", entry["any"], tuple(notes)
        # At equal frames tokens go as the area.
        area_px = height * width
        nearest = min(entry, key=lambda r: abs(math.log(self.sizes[r][0] * self.sizes[r][1] / area_px)))
        if self.sizes[nearest] not in ((height, width), (width, height)):
            notes.append(
                f"schedule {self.name} lists {', '.join(entry)}; {width}x{height} takes the numbers of {nearest}, "
                f"the nearest by token count"
            )
        return nearest, entry[nearest], tuple(notes)


@dataclass(frozen=True)
class ScheduleProgram:
    """A schedule compiled for one run.

    Args:
      name, digest: of the schedule.
      resolution: the listed resolution it took its numbers from.
      sparsity: those numbers.
      plans: one a step.
      notes: what the user should know (nearest resolution taken, another model's schedule, rounding).
    """

    name: str
    digest: str
    resolution: str
    sparsity: Sparsity
    plans: tuple[StepPlan, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Runs of equal plans."""
        out: list[Phase] = []
        for i, plan in enumerate(self.plans):
            if out and out[-1].plan == plan:
                out[-1] = Phase(plan, out[-1].start, i + 1)
            else:
                out.append(Phase(plan, i, i + 1))
        return tuple(out)

    @property
    def densities(self) -> tuple[float, ...]:
        """The different densities that occur, dense first."""
        return tuple(sorted({d for p in self.plans for d in p.densities}, reverse=True))

    @property
    def sparse(self) -> bool:
        return min(self.densities) < DENSE


def shipped_schedules() -> tuple[str, ...]:
    """Names of the schedules that travel with the package."""
    return tuple(sorted(p.stem for p in (config_dir() / "schedules").glob("*.yaml")))


_TOP = ("name", "describe", "models")
_SETTINGS = ("density", "dense_steps", "dense_layers", "sink", "routing", "flow_shift")
_ROUTING = ("probe_rows", "seed")
_STEPS = ("share", "sigma")


def _keys(data: Any, known: Sequence[str], where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a mapping with the keys {', '.join(known)}, got {data!r}")
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; {closest(str(key), known)}")
    return data


def _sparsity(data: Mapping[str, Any], where: str) -> Sparsity:
    """One merged model-and-resolution mapping to its dataclass."""
    fields: dict[str, Any] = {}
    if "density" in data:
        fields["density"] = data["density"]
    if "dense_steps" in data:
        steps = _keys(data["dense_steps"], _STEPS, f"{where}: dense_steps")
        fields |= {"dense_steps": steps.get("share"), "dense_above_sigma": steps.get("sigma")}
    for key in ("dense_layers", "sink", "flow_shift"):
        if key in data:
            fields[key] = data[key]
    routing = _keys(data.get("routing", {}), _ROUTING, f"{where}: routing")
    fields |= {{"probe_rows": "probe_rows", "seed": "routing_seed"}[k]: v for k, v in routing.items()}
    try:
        return Sparsity(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def parse_schedule(data: Any, sizes: Mapping[str, tuple[int, int]], where: str) -> Schedule:
    """Check a schedule file's content.

    Args:
      data: the parsed YAML.
      sizes: known resolutions, name -> (height, width).
      where: file name for messages.

    Raises:
      ValueError: unknown keys (with the closest match), missing or impossible values.
    """
    top = _keys(data, _TOP, where)
    for key in ("name", "models"):
        if key not in top:
            raise ValueError(f"{where}: {key} is missing")
    if not isinstance(top["models"], Mapping) or not top["models"]:
        raise ValueError(f"{where}: models must map model names to settings, got {top['models']!r}")
    entries: dict[str, dict[str, Sparsity]] = {}
    for model, body in top["models"].items():
        at = f"{where}: models: {model}"
        body = _keys(body, (*_SETTINGS, "resolutions"), at)
        common = {k: v for k, v in body.items() if k != "resolutions"}
        listed = body.get("resolutions")
        if listed is None:
            if body.get("density") != DENSE:
                raise ValueError(f"{at}: resolutions are missing; only density: 1.0 may go without")
            entries[str(model)] = {"any": _sparsity(common, at)}
            continue
        if not isinstance(listed, Mapping) or not listed:
            raise ValueError(f"{at}: resolutions must map names to settings, got {listed!r}")
        per: dict[str, Sparsity] = {}
        for resolution, settings in listed.items():
            if resolution not in sizes:
                raise ValueError(f"{at}: unknown resolution {resolution!r}; {closest(str(resolution), sizes)}")
            here = f"{at}: {resolution}"
            per[str(resolution)] = _sparsity({**common, **_keys(settings, _SETTINGS, here)}, here)
        entries[str(model)] = per
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return Schedule(str(top["name"]), entries, dict(sizes), digest, where)


def resolution_sizes() -> dict[str, tuple[int, int]]:
    """configs/resolutions.yaml: name -> (height, width) in pixels."""
    data = yaml.safe_load((config_dir() / "resolutions.yaml").read_text(encoding="utf-8"))
    out = {}
    for name, text in data.items():
        width, height = str(text).split("x")
        out[str(name)] = (int(height), int(width))
    return out


def load_schedule(which: str) -> Schedule:
    """Load a schedule by name or from a YAML file.

    Args:
      which: a name of :func:`shipped_schedules`, or a path that ends in .yaml or .yml.

    Raises:
      ValueError: unknown name, no such file, or a file with mistakes.
    """
    if which.endswith((".yaml", ".yml")):
        path = Path(which)
        if not path.is_file():
            raise ValueError(
                f"schedule file {which} does not exist; shipped schedules: {', '.join(shipped_schedules())}"
            )
    else:
        path = config_dir() / "schedules" / f"{which}.yaml"
        if which not in shipped_schedules():
            raise ValueError(
                f"schedule={which!r} is unknown; {closest(which, shipped_schedules())} A path to a .yaml file works too"
            )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not valid YAML: {error}") from None
    return parse_schedule(data, resolution_sizes(), path.name)


def _one_dense_step(share: float, steps: int) -> str:
    """What makes one of the steps dense: more steps, up to MOST_STEPS, or a larger share."""
    if share * MOST_STEPS >= 1:
        return f"at least {math.ceil(1 / share)} steps"
    return f"a share of at least {math.ceil(1000 / steps) / 1000:g}"


def compile_schedule(
    schedule: Schedule, *, model: str, height: int, width: int, sigmas: Sequence[float], num_layers: int, guided: bool
) -> ScheduleProgram:
    """One plan a step.

    Args:
      schedule: parsed.
      model: known name of the model, for example "tiny".
      height, width: pixels of the video.
      sigmas: [n + 1], falling to 0.
      num_layers: of the transformer.
      guided: whether the unconditional branch runs.

    Raises:
      ValueError: more dense layers than the model has.
    """
    resolution, sparsity, chosen = schedule.pick(model, height, width)
    notes = list(chosen)
    if sparsity.dense_layers > num_layers:
        raise ValueError(f"dense_layers={sparsity.dense_layers} is more than the model's {num_layers} layers")
    steps = len(sigmas) - 1
    dense = StepPlan((Segment(0, num_layers, DENSE),), guided)
    mixed = dense
    count = steps
    if sparsity.density < DENSE and sparsity.dense_layers < num_layers:
        first = (Segment(0, sparsity.dense_layers, DENSE),) if sparsity.dense_layers else ()
        mixed = StepPlan((*first, Segment(sparsity.dense_layers, num_layers, sparsity.density)), guided)
        count = sparsity.dense_step_count(sigmas)
        notes.append(
            f"{count} of {steps} steps dense, {sparsity.dense_layers} of {num_layers} layers dense in the others, "
            f"density {sparsity.density:g}, sink {sparsity.sink}"
        )
        if sparsity.dense_steps and not count:
            notes.append(
                f"dense_steps share {sparsity.dense_steps:g} of {steps} steps is less than one step, so none runs dense and the "
                f"quality suffers; use {_one_dense_step(sparsity.dense_steps, steps)}"
            )
    plans = (dense,) * count + (mixed,) * (steps - count)
    return ScheduleProgram(schedule.name, schedule.digest, resolution, sparsity, plans, tuple(notes))
