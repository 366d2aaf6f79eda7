"""Flags -> a request -> files: `videodiff generate | describe | plan | decode | rerun | models`.

Owns: the choice of the model's folder, names of output files, progress on the terminal, exit codes (0 done, 1 failed, 2 the command
is wrong, 130 stopped by Ctrl-C). Does not own: flags (`flags`), checks of a request (`request`), what a run does (`pipeline`).
Invariant: nothing heavy is imported before the request is known to be legal and its files writable.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from videodiff.errors import closest
from videodiff.flags import DESCRIBED, OPTIONS, OUTPUT, PLANNED, VERBS, UsageError, gather, parse
from videodiff.known import SHIPPED, ModelInfo, info_for_folder, known_models, model_info, read_folder_info
from videodiff.request import GenerateRequest, ResolvedRequest, request_from_metadata
from videodiff.version import __version__


def choose_model(model: str | None, model_path: str | None, *, weights: bool) -> tuple[str | None, ModelInfo]:
    """Which folder runs, and what is known about it.

    Args:
      model: a known name or a folder.
      model_path: a folder.
      weights: whether they are needed; False answers for a known model that is not on this machine.

    Returns:
      the folder (None: the shipped model) and its info.

    Raises:
      ValueError: an unknown name, a known model without a folder, or a folder of another model.
      WeightsError: the folder cannot be used (only with ``weights``).
    """
    folder = model_path
    name = model
    if folder is None and model is not None and model not in known_models() and Path(model).is_dir():
        folder, name = model, None
    if folder is not None:
        if weights:
            from videodiff.weights.folder import open_folder

            info = info_for_folder(open_folder(folder))
        else:
            info = read_folder_info(folder)
        if name is not None and name not in (info.name, Path(folder).resolve().name):
            wanted = model_info(name)
            raise ValueError(
                f"model_path={folder!r} holds {info.name}, not {wanted.name}; leave --model out, or name the right folder"
            )
        return str(folder), info
    info = model_info(name or SHIPPED)
    if weights and not info.shipped:
        raise ValueError(
            f"model={info.name} is known, but its weights do not ship; get them with\n"
            f"  hf download {info.repository} --local-dir {info.repository.split('/')[-1]}\n"
            f"and add --model_path {info.repository.split('/')[-1]} (sizes and licences: weights.md)"
        )
    return None, info


def default_output(request: ResolvedRequest) -> Path:
    """outputs/<words of the prompt>-<seed>.mp4, with a number when that exists already."""
    words = re.sub(r"\W+", "-", request.prompts[0].lower()).strip("-")[:60].strip("-") or "video"
    more = f"-and-{len(request.prompts) - 1}-more" if len(request.prompts) > 1 else ""
    return free_name(Path("outputs") / f"{words}{more}-{request.seeds[0]}.mp4")


def free_name(path: Path) -> Path:
    """``path``, or ``name-2``, ``name-3`` ... when it, or the first file of a batch of that name, exists."""
    tried, number = path, 1
    while tried.exists() or tried.with_name(f"{tried.stem}_000{tried.suffix}").exists():
        number += 1
        tried = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return tried


class Progress:
    """Stage, step and time left: a bar on a terminal, else one line when a stage starts and one when it ends."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, step: int, total: int, elapsed_s: float) -> None:
        """``step`` of ``total`` steps of ``stage`` are done after ``elapsed_s`` seconds."""
        if stage != self._stage:
            self.close()
            self._stage = stage
            if self._terminal:
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc=f"{stage:8s}", unit="step", file=sys.stderr, dynamic_ncols=True)
            else:
                print(f"{stage}: {total} step{'s' if total != 1 else ''}", file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        elif step == total:
            print(f"{stage}: done in {elapsed_s:.1f} s", file=sys.stderr, flush=True)
        if step == total:
            self.close()

    def close(self) -> None:
        """End the bar of the current stage."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None
        self._stage = ""


class _Handler(logging.Handler):
    """Log lines that do not tear a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def _start_logging(quiet: bool) -> None:
    log = logging.getLogger("videodiff")
    log.handlers = [_Handler()]
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.propagate = False


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def check_outputs(path: Path, values: Mapping[str, Any]) -> None:
    """Find out before a long run whether its files can be written.

    Raises:
      OSError: a place that cannot be written, or no ffmpeg.
    """
    from videodiff import media

    media.check_writable(path)
    if values.get("frames_dir") is not None:
        media.check_writable(Path(values["frames_dir"]) / "00000.png")
    if path.suffix.lower() == ".mp4":
        media.ffmpeg_path()


def _same_model(folder: str | None) -> str:
    """The flag that makes a suggested command use the same folder."""
    return f" --model_path {shlex.quote(folder)}" if folder else ""


def _save(result: Any, path: Path, folder: str | None, values: Mapping[str, Any], quiet: bool) -> None:
    """Write the files of a result and tell about them."""
    start = time.perf_counter()
    try:
        written = result.save(
            path,
            quality=values.get("quality"),
            gif=bool(values.get("gif")),
            frames_dir=values.get("frames_dir"),
            contact_sheet=bool(values.get("contact_sheet")),
        )
    except OSError as error:
        kept = result.latents_path
        remedy = (
            f"; the latents are kept: videodiff decode {shlex.quote(str(kept))}{_same_model(folder)}" if kept else ""
        )
        raise OSError(f"{error}{remedy}") from error
    seconds = time.perf_counter() - start
    if not values.get("keep_latents", True) and result.latents_path is not None:
        Path(result.latents_path).unlink(missing_ok=True)
    elif result.latents_path is not None and Path(result.latents_path) not in written:
        written = [*written, Path(result.latents_path)]
    for name in written:
        print(name)
    if quiet:
        return
    seeds = list(result.seeds)
    print(f"seed{'s' if len(seeds) > 1 else ''}: {', '.join(map(str, seeds))}")
    print(timing_line(result.report.get("stages", {}), seconds))


def timing_line(stages: Mapping[str, float], writing_s: float) -> str:
    """One line from the report's stage times."""
    names = {
        "text_s": "text", "denoise_compile_s": "compile", "denoise_s": "denoise", "upscale_s": "upscale", "decode_s": "decode",
    }  # fmt: skip
    parts = [f"{label} {stages[key]:.1f}" for key, label in names.items() if key in stages] + [
        f"writing {writing_s:.1f}"
    ]
    total = stages.get("total_s", sum(stages.get(k, 0.0) for k in names)) + writing_s
    return f"time: {total:.1f} s ({', '.join(parts)})"


# Fields that a run takes; the others say where it reads and writes.
_RUN_FIELDS = (
    "negative_prompt", "height", "width", "res", "num_frames", "fps", "num_inference_steps", "guidance_scale", "flow_shift",
    "base_res", "denoise_strength", "refine_steps", "schedule", "attention_backend", "solver", "num_videos_per_prompt",
    "output_type", "dtype", "sources",
)  # fmt: skip


def run_request(
    request: GenerateRequest,
    resolved: ResolvedRequest,
    folder: str | None,
    path: Path,
    values: Mapping[str, Any],
    quiet: bool,
) -> None:
    """Generate and write the files of a request that was found legal."""
    from videodiff.pipeline import Pipeline

    pipe = Pipeline.from_pretrained(folder, dtype=None if request.dtype == "auto" else request.dtype)
    options = {k: getattr(request, k) for k in _RUN_FIELDS}
    prompts, seeds = list(resolved.prompts), list(resolved.seeds)
    example = request.prompt is None and request.prompt_path is None  # the pipeline takes it itself, and says so
    result = pipe.generate(
        None if example else prompts[0] if len(prompts) == 1 else prompts,
        seed=seeds[0] if len(seeds) == 1 else seeds,
        output_path=path,
        resume=request.resume,
        progress=_progress(quiet),
        **options,
    )
    _save(result, path, folder, values, quiet)


def _progress(quiet: bool) -> Progress | None:
    return None if quiet else Progress(sys.stderr.isatty())


Job = Callable[[], None]


def prepare_generate(args: argparse.Namespace) -> Job:
    """Check everything that can be checked before anything heavy is imported; the returned call does the work."""
    quiet = getattr(args, "quiet", False)
    values, sources = gather(args)
    if values.get("resume") is not None:
        values = _resumed(values)
    folder, info = choose_model(values.get("model"), values.get("model_path"), weights=True)
    request = GenerateRequest(**values, sources=sources)
    resolved = request.resolve(info)
    path = Path(values["output_path"]) if values.get("output_path") else default_output(resolved)
    return _announced(request, resolved, folder, path, values, quiet)


def _announced(
    request: GenerateRequest,
    resolved: ResolvedRequest,
    folder: str | None,
    path: Path,
    values: Mapping[str, Any],
    quiet: bool,
) -> Job:
    def job() -> None:
        check_outputs(path, values)
        try:
            run_request(request, resolved, folder, path, values, quiet)
        except KeyboardInterrupt as stop:
            state = getattr(stop, "state_path", None)
            if state is None:
                raise
            command = f"videodiff generate --resume {shlex.quote(str(state))}{_same_model(folder)}"
            raise KeyboardInterrupt(f"; go on with: {command}") from stop

    _check_kind(path, values)
    return job


def _check_kind(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse an output_path of a kind that is not written, and a quality that would change nothing."""
    if path.suffix.lower() not in (".mp4", ".gif"):
        raise ValueError(f"output_path={str(path)!r} must end in .mp4 or .gif")
    if path.suffix.lower() == ".gif" and values.get("quality") is not None:
        raise ValueError(
            f"quality={values['quality']} is for mp4, and output_path={str(path)!r} is a gif; leave it out"
        )


def _resumed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an interrupted run, with the flags of now on top.

    Raises:
      ValueError: not the state of a run.
    """
    from safetensors import SafetensorError, safe_open

    state = Path(values["resume"])
    if not state.is_file():
        raise ValueError(f"resume={str(state)!r} does not exist")
    try:
        with safe_open(state, "numpy") as file:
            about = json.loads((file.metadata() or {}).get("request", "{}"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"resume={str(state)!r} is damaged: {error}") from None
    if not about:
        raise ValueError(
            f"resume={str(state)!r} is not the state of an interrupted run; finished latents are decoded with `videodiff decode`"
        )
    _refuse_embeds(about, "resume")
    model = None if values.get("model_path") else about.get("model")
    made = request_from_metadata(about, model=model)
    options = {k: v for k, v in vars(made).items() if v is not None and k != "sources"}
    if "output_path" not in values:
        stem = state.name.removesuffix(".safetensors").removesuffix(".state")
        options["output_path"] = str(free_name(state.with_name(f"{stem}.mp4")))
    return {**options, **values}


def _refuse_embeds(about: Mapping[str, Any], verb: str) -> None:
    """Text that was given as numbers is in no file."""
    if "prompt_embeds" in about:
        raise ValueError(
            f"the run took prompt_embeds, which its files do not hold; {verb} it from Python, with the same prompt_embeds"
        )


def prepare_rerun(args: argparse.Namespace) -> Job:
    """`videodiff rerun FILE`."""
    from videodiff import media

    quiet = getattr(args, "quiet", False)
    values = {k: v for k, v in vars(args).items() if k in OPTIONS}
    source = Path(args.file)
    if not source.is_file():
        raise UsageError(f"{args.file!r} does not exist")
    about = media.read_metadata(source)
    try:
        _refuse_embeds(about, "repeat")
        if "initial_noise" in about:
            raise ValueError(
                "the run began from given latents, which the file does not hold; repeat it with Pipeline.generate(latents=...)"
            )
        changes = {k: v for k, v in values.items() if k not in OUTPUT}
        request = request_from_metadata(about, **changes, sources={"flow_shift": source.name})
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from None
    folder, info = choose_model(_named(about, values), values.get("model_path"), weights=True)
    resolved = request.resolve(info)
    from videodiff.resources import shipped_model
    from videodiff.weights.folder import open_folder

    open_folder(folder or shipped_model()).check_made(args.file, about)
    if about.get("schedule_digest") not in (None, resolved.schedule_digest):
        _say(
            quiet,
            f"schedule {resolved.schedule} has changed since {source.name} was made ({about['schedule_digest']} then)",
        )
    if about.get("version") not in (None, __version__):
        _say(quiet, f"{source.name} was made by version {about['version']}; this is {__version__}")
    path = Path(values.get("output_path") or free_name(source.with_name(f"{source.stem}-rerun.mp4")))
    return _announced(request, resolved, folder, path, values, quiet)


def _named(about: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """The model a file names, checked to be known unless a folder is given."""
    name = about.get("model")
    if values.get("model_path") is not None:
        return None
    if name is not None and name not in known_models():
        raise ValueError(f"the file was made by a model in a folder, {name!r}; name the folder with --model_path")
    return name


def prepare_decode(args: argparse.Namespace) -> Job:
    """`videodiff decode LATENTS`."""
    from videodiff.latents import SavedLatents

    quiet = getattr(args, "quiet", False)
    values = {k: v for k, v in vars(args).items() if k in OPTIONS}
    GenerateRequest(**values)  # its checks of types and ranges
    try:
        saved = SavedLatents.load(args.file)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from None
    folder, _ = choose_model(_named({"model": saved.model}, values), values.get("model_path"), weights=True)
    source = Path(args.file)
    stem = source.name.removesuffix(".safetensors").removesuffix(".latents")
    path = Path(values.get("output_path") or free_name(source.with_name(f"{stem}.mp4")))
    _check_kind(path, values)

    def job() -> None:
        check_outputs(path, values)
        from videodiff.pipeline import Pipeline

        dtype = values.get("dtype", "auto")
        pipe = Pipeline.from_pretrained(folder, dtype=None if dtype == "auto" else dtype)
        _save(pipe.decode(args.file, progress=_progress(quiet)), path, folder, values, quiet)

    return job


def prepare_describe(args: argparse.Namespace) -> Job:
    """`videodiff describe`."""
    values, sources = gather(args)
    _, info = choose_model(values.get("model"), values.get("model_path"), weights=False)
    request = GenerateRequest(
        prompt="any", seed=0, **{k: v for k, v in values.items() if k in DESCRIBED}, sources=sources
    )
    resolved = request.resolve(info)

    def job() -> None:
        from videodiff.describe import describe_run

        description = describe_run(info, resolved)
        print(json.dumps(description.json(), indent=1) if getattr(args, "json", False) else description.text())

    return job


def prepare_plan(args: argparse.Namespace) -> Job:
    """`videodiff plan`."""
    values, sources = gather(args)
    folder, info = choose_model(values.get("model"), values.get("model_path"), weights=False)
    request = GenerateRequest(
        prompt="any", seed=0, **{k: v for k, v in values.items() if k in PLANNED}, sources=sources
    )
    resolved = request.resolve(info)

    def job() -> None:
        from videodiff.memory import available_memory, check_memory, gib

        workload = _workload(folder, info, resolved)
        available = available_memory()
        plan = check_memory(workload, available)
        if getattr(args, "json", False):
            stages = {s.name: {"weights": s.weights, "working": s.working} for s in plan.stages}
            data = {"stages_bytes": stages, "runtime_bytes": plan.runtime, "peak_bytes": plan.peak}
            print(
                json.dumps(
                    {**data, "resident_peak_bytes": plan.resident_peak, "available_bytes": available.nbytes}, indent=1
                )
            )
            return
        g = resolved.geometry
        print(
            f"{resolved.model}: {resolved.videos} x {g.width}x{g.height}, {g.num_frames} frames, "
            f"{'guided' if resolved.guided else 'not guided'}, dtype {workload.dtype}"
        )
        print(plan)
        print(f"available {gib(available.nbytes)} ({available.source}): it fits")

    return job


def _workload(folder: str | None, info: ModelInfo, resolved: ResolvedRequest) -> Any:
    """What the memory plan is made for; a known model without a folder has the published VAE and text encoder."""
    import jax
    import numpy as np

    from videodiff.configs import TextEncoderConfig, VaeConfig
    from videodiff.memory import Workload, text_parameters
    from videodiff.resources import shipped_model
    from videodiff.stages import LARGE_TEXT_ENCODER_BYTES

    if folder is not None or info.shipped:
        from videodiff.weights.folder import open_folder

        model = open_folder(folder or shipped_model())
        vae, text = model.vae, model.text_encoder
    else:
        vae, text = VaeConfig(latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16), TextEncoderConfig()
    platform = jax.default_backend()
    name = {"auto": "float32" if platform == "cpu" else "bfloat16"}.get(resolved.dtype, resolved.dtype)
    half = np.dtype(jax.numpy.bfloat16)
    large = 4 * text_parameters(text) > LARGE_TEXT_ENCODER_BYTES
    return Workload(
        transformer=info.transformer,
        vae=vae,
        text_encoder=text,
        geometry=resolved.geometry,
        batch=resolved.videos,
        guided=resolved.guided,
        dtype=np.dtype(np.float32) if name == "float32" else half,
        text_dtype=half if large else np.dtype(np.float32),
        encode_video=resolved.base is not None,
        platform=platform,
    )


def prepare_models(args: argparse.Namespace) -> Job:
    """`videodiff models`."""
    infos = [model_info(n) for n in known_models()]

    def job() -> None:
        if getattr(args, "json", False):
            keys = (
                "name",
                "describe",
                "resolution",
                "num_frames",
                "fps",
                "num_inference_steps",
                "guidance_scale",
                "flow_shift",
            )
            print(json.dumps([{k: getattr(i, k) for k in (*keys, "repository")} for i in infos], indent=1))
            return
        print(f"{'model':18s}{'size':>8s}{'frames':>8s}{'fps':>5s}{'steps':>7s}{'guidance':>10s}{'shift':>7s}  weights")
        for i in infos:
            print(
                f"{i.name:18s}{i.resolution:>8s}{i.num_frames:>8d}{i.fps:>5g}{i.num_inference_steps:>7d}{i.guidance_scale:>10g}"
                f"{i.flow_shift:>7g}  {i.repository or 'in the package'}"
            )

    return job


_PREPARE: Mapping[str, Callable[[argparse.Namespace], Job]] = {
    "generate": prepare_generate,
    "describe": prepare_describe,
    "plan": prepare_plan,
    "decode": prepare_decode,
    "rerun": prepare_rerun,
    "models": prepare_models,
}
# What a run raises when something outside it is wrong; anything else is a mistake here and shows its traceback.
_EXPECTED = (ValueError, OSError, MemoryError, ArithmeticError, NotImplementedError, RuntimeError, ImportError)


def _usage() -> str:
    lines = [
        f"videodiff {__version__}: text to video",
        "",
        "usage: videodiff VERB ... (videodiff VERB --help tells more)",
        "",
    ]
    return "\n".join(lines + [f"  {verb:10s}{text}" for verb, (text, _) in VERBS.items()])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: words after the program's name; None takes those of the process.

    Returns:
      the exit code, see the module.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        print(f"videodiff {__version__}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        hint = f"flags follow a verb: videodiff generate {verb} ..." if verb.startswith("-") else closest(verb, VERBS)
        print(f"videodiff: error: unknown verb {verb!r}; {hint}", file=sys.stderr)
        return 2
    return _run(verb, words[1:])


def _run(verb: str, words: Sequence[str]) -> int:
    def fail(error: BaseException, code: int) -> int:
        text = str(error) or type(error).__name__
        print(f"videodiff {verb}: error: {text}", file=sys.stderr, flush=True)
        return code

    from videodiff.weights.problems import WeightsError

    try:
        args = parse(verb, words)
        job = _PREPARE[verb](args)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except WeightsError as error:
        return fail(error, 1)
    except ValueError as error:
        return fail(error, 2)
    except OSError as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        return 130
    _start_logging(getattr(args, "quiet", False))
    try:
        job()
    except KeyboardInterrupt as error:
        print(f"\nvideodiff {verb}: interrupted{error}", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # the reader of our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _EXPECTED as error:
        return fail(error, 1)
    except Exception as error:
        traceback.print_exc()
        return fail(error, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
