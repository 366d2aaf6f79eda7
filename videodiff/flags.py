"""The words of the command line and of config files: one table of options for every verb.

Owns: flags, their help, aliases and dashes, the config file, what overrides what. Does not own: defaults and checks of a request
(`request`), what a verb does (`cli`).
Invariant: every option of the table is a field of `GenerateRequest` (or --size, which is two), so nothing accepted is dropped.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from videodiff.errors import closest
from videodiff.request import ALIASES, BACKENDS, DTYPES, SOLVERS, canonical, parse_size


class UsageError(ValueError):
    """The command line is wrong."""


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _seeds(text: str) -> int | list[int]:
    seeds = [_whole(s) for s in text.split(",")]
    return seeds[0] if len(seeds) == 1 else seeds


def _size(text: str) -> str:
    try:
        parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True)
class Option:
    """One flag, which is also a key of the config file.

    Args:
      name: canonical.
      kind: turns the flag's text into a value; None for a switch.
      help: for --help.
      group: heading in --help.
      metavar: placeholder in --help.
    """

    name: str
    kind: Callable[[str], Any] | None
    help: str
    group: str
    metavar: str = ""


_WHAT, _SIZE, _HOW, _SPARSE, _FILES, _LATER = (
    "what to show", "size and length", "sampling", "model and attention", "files", "names of features that are not there yet",
)  # fmt: skip
_TABLE = (
    Option("prompt", str, "what the video should show; without it the model's example is used", _WHAT, "TEXT"),
    Option("negative_prompt", str, "what it should not show; default: the model's own", _WHAT, "TEXT"),
    Option("prompt_path", str, "a text file with one prompt a line; they run as one batch", _WHAT, "FILE"),
    Option("num_videos_per_prompt", _whole, "copies of every prompt, with seeds that count up", _WHAT, "N"),
    Option("seed", _seeds, "a whole number, or one a video as 1,2,3; -1 or none picks one and reports it", _WHAT, "N"),
    Option("res", str, "256p, 360p, 480p, 720p, 1080p, 1440p or WIDTHxHEIGHT", _SIZE, "NAME"),
    Option("size", _size, "width and height in pixels, as 1280x720 or 1280*720", _SIZE, "WxH"),
    Option("height", _whole, "pixels; together with --width", _SIZE, "PX"),
    Option("width", _whole, "pixels; together with --height", _SIZE, "PX"),
    Option("num_frames", _whole, "frames of the video, 4k+1", _SIZE, "N"),
    Option("fps", _number, "frames a second of the file", _SIZE, "N"),
    Option("num_inference_steps", _whole, "denoising steps", _HOW, "N"),
    Option("guidance_scale", _number, "strength of the prompt; 1 runs without guidance in half the time", _HOW, "X"),
    Option("flow_shift", _number, "shift of the noise levels; above 1 spends more steps on noisy ones", _HOW, "X"),
    Option("base_res", str, "smaller size to sample first and refine from: WIDTHxHEIGHT, a name, none or auto", _HOW, "NAME"),
    Option("denoise_strength", _number, "noise level at which refinement begins, between 0 and 1", _HOW, "X"),
    Option("refine_steps", _whole, "denoising steps of the refinement", _HOW, "N"),
    Option("solver", str, f"one of {', '.join(SOLVERS)}; default: the checkpoint's", _HOW, "NAME"),
    Option("resume", str, "go on with the saved state of an interrupted run; its options come with it", _HOW, "STATE"),
    Option("model", str, "a known model (`videodiff models` lists them) or a folder; default: the shipped one", _SPARSE, "NAME"),
    Option("model_path", str, "a checkpoint folder in the diffusers layout", _SPARSE, "FOLDER"),
    Option("dtype", str, f"one of {', '.join(DTYPES)}; auto is float32 on CPU, bfloat16 elsewhere", _SPARSE, "NAME"),
    Option("schedule", str, "sparsity: dense (exact, the default), conservative, moderate, aggressive or a .yaml", _SPARSE, "NAME"),
    Option("attention_backend", str, f"one of {', '.join(BACKENDS)}", _SPARSE, "NAME"),
    Option("output_path", str, "an .mp4 or .gif; default: outputs/<prompt>-<seed>.mp4", _FILES, "FILE"),
    Option("quality", _whole, "x264 constant rate factor of the mp4, 0 (lossless) to 51 (worst)", _FILES, "N"),
    Option("gif", None, "also write a .gif", _FILES),
    Option("frames_dir", str, "also write PNG frames there", _FILES, "FOLDER"),
    Option("contact_sheet", None, "also write a .png with a row of frames a video", _FILES),
    Option("keep_latents", None, "keep the .latents.safetensors beside the video (the default)", _FILES),
    Option("guidance_scale_2", _number, "guidance of a low-noise expert", _LATER, "X"),
    Option("boundary_ratio", _number, "where a low-noise expert takes over", _LATER, "X"),
    Option("image_path", str, "first frame", _LATER, "FILE"),
    Option("last_image", str, "last frame", _LATER, "FILE"),
    Option("lora_path", str, "adapter weights", _LATER, "FILE"),
    Option("vae_tiling", None, "decoding in tiles (it is streamed already)", _LATER),
    Option("ulysses_degree", _whole, "devices that share the heads", _LATER, "N"),
    Option("ring_degree", _whole, "devices that share the tokens", _LATER, "N"),
    Option("warmup", None, "a run before the one that counts", _LATER),
)  # fmt: skip
OPTIONS: Mapping[str, Option] = {o.name: o for o in _TABLE}
OUTPUT = ("output_path", "quality", "gif", "frames_dir", "contact_sheet")
DESCRIBED = (
    "model", "model_path", "res", "size", "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "flow_shift",
    "base_res", "denoise_strength", "refine_steps", "solver", "schedule", "attention_backend",
)  # fmt: skip
PLANNED = (
    "model", "model_path", "res", "size", "height", "width", "num_frames", "guidance_scale", "base_res", "num_videos_per_prompt",
    "dtype",
)  # fmt: skip
VERBS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "generate": ("make videos from prompts", tuple(OPTIONS)),
    "describe": ("show steps, phases, densities and savings of a run, without weights", DESCRIBED),
    "plan": ("show the memory that a run needs, stage by stage, and whether this machine has it", PLANNED),
    "decode": ("finish a run whose latents were saved", ("model_path", "dtype", *OUTPUT)),
    "rerun": ("repeat the run that made a file", ("model_path", "dtype", "keep_latents", *OUTPUT)),
    "models": ("list the known models and their defaults", ()),
}
# A flag drops the config file's other answer to the same question.
_DROPS: Mapping[str, tuple[str, ...]] = {
    "res": ("height", "width"),
    "height": ("res",),
    "width": ("res",),
    "prompt": ("prompt_path",),
    "prompt_path": ("prompt",),
    "model": ("model_path",),
    "model_path": ("model",),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb. Flags are spelled with underscores; `normalise` makes dashes into them."""
    text, names = VERBS[verb]
    parser = _Parser(
        prog=f"videodiff {verb}",
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="Flags may be spelled with - or _.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if verb == "generate":
        parser.add_argument("positional_prompt", nargs="?", metavar="PROMPT", help="the same as --prompt")
    elif verb in ("decode", "rerun"):
        what = "latents saved before decoding" if verb == "decode" else "an mp4, gif or contact sheet made by videodiff"
        parser.add_argument("file", metavar="FILE", help=what)
    groups: dict[str, Any] = {}
    for name in names:
        o = OPTIONS[name]
        group = groups.setdefault(o.group, None) or parser.add_argument_group(o.group)
        groups[o.group] = group
        flags = [f"--{n}" for n in (name, *(a for a, c in ALIASES.items() if c == name))]
        flags += ["-o"] if name == "output_path" else []
        if o.kind is None:
            group.add_argument(*flags, dest=name, action="store_true", help=o.help)
            group.add_argument(
                *(f"--no_{f[2:]}" for f in flags), dest=name, action="store_false", help=argparse.SUPPRESS
            )
        else:
            group.add_argument(*flags, dest=name, type=o.kind, metavar=o.metavar, help=o.help)
    other = parser.add_argument_group("other")
    if verb in ("generate", "describe", "plan"):
        other.add_argument("--config", metavar="FILE", help="a .yaml with any of these options; flags override it")
    if verb in ("describe", "plan", "models"):
        other.add_argument("--json", action="store_true", help="print JSON")
    else:
        other.add_argument("--quiet", action="store_true", help="print the written files and errors alone")
    return parser


def normalise(argv: Sequence[str]) -> list[str]:
    """Dashes inside flag names become underscores; values stay as they are."""
    out = []
    for word in argv:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            word = f"--{name.replace('-', '_')}{equals}{value}"
        out.append(word)
    return out


def parse(verb: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parsed flags; only those that were given are in the namespace.

    Raises:
      UsageError: an unknown flag (with the closest match), a bad value, a missing argument.
    """
    parser = make_parser(verb)
    args, rest = parser.parse_known_args(normalise(argv))
    for word in rest:
        if word.startswith("-"):
            known = [f for a in parser._actions for f in a.option_strings]
            raise UsageError(f"unknown flag {word.split('=')[0]!r}; {closest(word.split('=')[0], known)}")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; a prompt of several words needs quotes around it")
    return args


def read_config(path: str) -> dict[str, Any]:
    """Options from a YAML file, under their canonical names.

    Raises:
      ValueError: no such file, not a mapping, or an unknown key (with the closest match).
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config {path!r} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path!r} is not valid YAML: {error}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"config {path!r} must map option names to values, got {type(data).__name__}")
    known = [n for n in OPTIONS if n != "size"]
    try:
        return canonical({k: v for k, v in data.items() if v is not None}, known, "key")
    except ValueError as error:
        raise ValueError(f"config {path!r}: {error}") from None


def gather(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Options from flags and the config file, flags first.

    Returns:
      canonical name -> value, and name -> where it came from for those of the file.

    Raises:
      ValueError: a bad config file, or a prompt given twice.
    """
    given = {k: v for k, v in vars(args).items() if k in OPTIONS}
    positional = getattr(args, "positional_prompt", None)
    if positional is not None:
        if "prompt" in given:
            raise UsageError(f"the prompt is given twice: {positional!r} and --prompt {given['prompt']!r}")
        given["prompt"] = positional
    if "size" in given:
        if given.keys() & {"height", "width"}:
            raise UsageError("--size and --height or --width exclude each other; give one of them")
        given["height"], given["width"] = parse_size(given.pop("size"))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    config = getattr(args, "config", None)
    if config is not None:
        values = read_config(config)
        dropped = {other for name in given for other in _DROPS.get(name, ())}
        values = {k: v for k, v in values.items() if k not in given and k not in dropped}
        sources = dict.fromkeys(values, f"config file {Path(config).name}")
    if isinstance(values.get("res"), int):
        values["res"] = str(values["res"])
    return {**values, **given}, sources
