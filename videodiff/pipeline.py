"""Prompt in, video out: the only file that knows every room.

Owns: the order of the stages, what a call accepts, freeing weights where memory asks, latents on disk before decoding.
Does not own: any arithmetic. Invariant: nothing is loaded or compiled before the request, the schedule and the memory plan
are checked, and a failure leaves no half-written file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from videodiff import compile_cache, media, noise, report
from videodiff.attention import AttentionSpec, make_attend
from videodiff.denoiser import Denoiser, Operands
from videodiff.grid import VideoGeometry
from videodiff.latents import SavedLatents
from videodiff.memory import MemoryPlan, Workload, available_memory, check_memory
from videodiff.models.transformer import Context
from videodiff.passes import Pass, plan_passes, renoised
from videodiff.request import GenerateRequest, ResolvedRequest, info_for_folder, make_request
from videodiff.resources import shipped_model
from videodiff.result import Result
from videodiff.sampling import loop
from videodiff.sampling.solvers import solver_spec, spec_from_config
from videodiff.stages import (
    decode_frames,
    text_param_dtype,
    text_stage,
    transformer_stage,
    upscale_frames,
    vae_stage,
)
from videodiff.text.encode import Conditioning, bucket, encode_prompts, fold_padding
from videodiff.text.tokenizer import Tokenizer
from videodiff.weights.folder import ModelFolder, open_folder

log = logging.getLogger(__name__)

PASS_KEY = "pass"  # in the state of an interrupted run: which pass it was in
KEEP_SHARE = 0.8  # of available memory that weights kept between stages may fill
Progress = loop.Progress


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during denoising. ``state_path`` holds the run; ``generate(resume=state_path)`` goes on with it."""

    def __init__(self, state_path: Path | None, step: int, total: int) -> None:
        self.state_path = state_path
        where = (
            f"the run is saved in {state_path}; resume with --resume {state_path}"
            if state_path
            else "nothing was saved"
        )
        super().__init__(f"interrupted after step {step} of {total}; {where}")


@dataclass(frozen=True)
class _Job:
    """A checked request with everything that follows from it, before anything is loaded."""

    request: ResolvedRequest
    passes: tuple[Pass, ...]
    solver_name: str
    guided: bool
    memory: MemoryPlan
    keep: bool
    batch: int

    @property
    def last(self) -> Pass:
        """The pass that makes the video's latents; the schedule is for it."""
        return self.passes[-1]


class Pipeline:
    """A text-to-video model.

    Args:
      folder: a checked model folder (``open_folder``).
      dtype: of the transformer; None takes float32 on CPU and bfloat16 elsewhere.
    """

    def __init__(self, folder: ModelFolder, *, dtype: Any = None) -> None:
        self.folder = folder
        self.info = info_for_folder(folder)
        platform = jax.default_backend()
        self.dtype = jnp.dtype(dtype if dtype is not None else (jnp.float32 if platform == "cpu" else jnp.bfloat16))
        if self.dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
            raise ValueError(f"dtype={self.dtype} is not supported; use float32 or bfloat16")
        self._text = text_stage(folder, jnp.float32 if platform == "cpu" else self.dtype)
        self._transformer = transformer_stage(folder, self.dtype)
        self._vae = vae_stage(folder)
        self._programs: dict[Any, tuple[loop.StepPrograms, dict[float, float]]] = {}

    @classmethod
    def from_pretrained(cls, model_path: str | os.PathLike[str] | None = None, *, dtype: Any = None) -> Pipeline:
        """Open a model folder; weights load when a stage first needs them.

        Args:
          model_path: a folder in the Hugging Face diffusers layout; None is the model that ships in the package.
          dtype: "float32" or "bfloat16" (or the jnp types), see the class.

        Raises:
          WeightsError: the folder cannot be used, with everything that is wrong.
          ValueError: an unsupported dtype.
        """
        compile_cache.enable()
        return cls(open_folder(shipped_model() if model_path is None else model_path), dtype=dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.folder.tokenizer_path)

    def free(self) -> None:
        """Drop all weights; the next call loads what it needs."""
        for stage in (self._text, self._transformer, self._vae):
            stage.free()

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        latents: Any = None,
        output_path: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        callback_on_step_end: Callable[..., Mapping[str, Any] | None] | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Result:
        """Generate videos.

        Args:
          prompt: one prompt or a list; a list is a batch.
          prompt_embeds, negative_prompt_embeds: [B, L, text_dim] in place of text; rows after the end are zero.
          latents: initial noise [B, C, F, Y, X], channels first as published; None draws it from the seed.
          output_path: where the video will go; latents are saved beside it before decoding. The video itself is written by
            ``Result.save``.
          resume: the state of an interrupted run; the request must be the same.
          callback_on_step_end: called as ``callback(pipeline, step, timestep, {"latents": [B, C, F, Y, X]})`` after every step,
            as in diffusers; a returned dict with "latents" replaces them. Steps of a refinement count on from those before it.
          progress: called as ``progress(stage, done, total, elapsed_s)``.
          **options: the words of ``videodiff.request.GenerateRequest``: negative_prompt, res, height, width, num_frames, fps,
            num_inference_steps, guidance_scale, flow_shift, seed, schedule, attention_backend, solver, num_videos_per_prompt,
            output_type, ...

        Returns:
          The result.

        Raises:
          ValueError: the request is not legal, or does not fit into memory (NotEnoughMemory); nothing was loaded.
          NonFiniteError: NaN or infinity, naming stage and step; nothing was written.
          Interrupted: Ctrl-C during denoising.
        """
        began = time.perf_counter()
        embeds = self._given_embeds(prompt_embeds, negative_prompt_embeds)
        embedded = None if embeds[0] is None else len(embeds[0])
        asked = make_request(prompt=prompt, **options)
        self._refuse_elsewhere(asked)
        request = asked.resolve(self.info, embedded=embedded)
        metadata = self._metadata(request, embeds, latents, resume)
        job = self._plan(request, encode_text=embedded is None or (request.guided and embeds[1] is None))
        if output_path is not None:
            media.check_writable(output_path)
        log.info(request.summary())
        for note in (*request.notes, *job.last.program.notes):
            log.info(note)
        times: dict[str, float] = {"plan_s": time.perf_counter() - began}
        context = self._context(job, embeds, times, progress)
        results = self._denoise(
            job, context, latents, output_path, resume, metadata, callback_on_step_end, times, progress
        )
        last = results[-1]
        assert last is not None
        final = np.asarray(last.latents)
        if not job.keep:
            self._transformer.free()
        saved = None
        if output_path is not None:
            saved = self._save_latents(job, final, Path(output_path), metadata)
        if request.output_type == "latent":
            frames = noise.to_published(final)
        else:
            frames = self._decode(request.geometry, final, request.output_type, times, progress)
            if not job.keep:
                self._vae.free()
        times["total_s"] = time.perf_counter() - began
        return Result(
            frames=frames,
            fps=request.fps,
            output_type=request.output_type,
            prompts=request.video_prompts,
            seeds=request.seeds,
            report=self._report(job, results, times, latents is not None),
            metadata=metadata,
            latents_path=saved,
        )

    def decode(
        self, path: str | os.PathLike[str], *, output_type: str = "uint8", progress: Progress | None = None
    ) -> Result:
        """Finish a run whose latents were saved.

        Args:
          path: a file that generation wrote before decoding.
          output_type: "uint8" or "np".

        Raises:
          FileNotFoundError, ValueError: no such file, a damaged one, or one of another model or other weights.
        """
        saved = SavedLatents.load(path)
        self.folder.check_made(path, saved.metadata)
        b, c, f, y, x = saved.latents.shape
        layout = self.info.layout
        geometry = VideoGeometry(saved.height, saved.width, layout.temporal_factor * (f - 1) + 1, layout)
        if geometry.latent_shape != (f, y, x, c):
            raise ValueError(
                f"{path} holds latents of shape {saved.latents.shape} from model {saved.model!r}; {self.info.name} would need "
                f"{(b, geometry.latent_shape[3], *geometry.latent_shape[:3])} for {saved.width}x{saved.height}"
            )
        times: dict[str, float] = {}
        frames = self._decode(geometry, saved.latents.transpose(0, 2, 3, 4, 1), output_type, times, progress)
        about = {"decoded_from": str(path), "stages": _rounded(times), "environment": report.environment()}
        return Result(
            frames, saved.fps, output_type, saved.prompts, saved.seeds, about, dict(saved.metadata), Path(path)
        )

    # --- what a call consists of -------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> str:
        """Which weights these are, see ``ModelFolder.fingerprint``."""
        return self.folder.fingerprint()

    def _refuse_elsewhere(self, asked: GenerateRequest) -> None:
        """Refuse options that a loaded pipeline cannot follow."""
        owners = dict.fromkeys(("model", "model_path"), "Pipeline.from_pretrained") | dict.fromkeys(
            ("gif", "frames_dir", "contact_sheet", "quality"), "Result.save"
        )
        for name, owner in owners.items():
            value = getattr(asked, name)
            if value not in (None, False) and not (name == "model" and value == self.info.name):
                raise ValueError(f"{name}={value!r} changes nothing in generate; give it to {owner}")
        if asked.dtype not in ("auto", self.dtype.name):
            raise ValueError(
                f"dtype={asked.dtype!r}, but this pipeline was loaded in {self.dtype.name}; give it to Pipeline.from_pretrained"
            )

    def _metadata(self, request: ResolvedRequest, embeds: tuple[Any, Any], latents: Any, resume: Any) -> dict[str, Any]:
        """What repeats the run, and a digest of what was given besides: weights, embeddings, initial noise."""
        about = request.metadata() | {"weights": self.weights}
        for name, given in zip(("prompt_embeds", "negative_prompt_embeds"), embeds, strict=True):
            if given is not None:
                about[name] = _digest(given)
        if resume is not None:  # the noise is behind it
            _, made_with = loop.load_state(resume)
            self.folder.check_made(resume, made_with)
            about |= {k: made_with[k] for k in ("initial_noise",) if k in made_with}
        elif latents is not None:
            about["initial_noise"] = _digest(latents)
        return about

    def _given_embeds(self, embeds: Any, negative: Any) -> tuple[Any, Any]:
        if embeds is None:
            if negative is not None:
                raise ValueError("negative_prompt_embeds needs prompt_embeds; give both, or text for both")
            return None, None
        width = self.folder.transformer.text_dim
        for name, given in (("prompt_embeds", embeds), ("negative_prompt_embeds", negative)):
            if given is None:
                continue
            given = np.asarray(given, np.float32)
            if given.ndim != 3 or given.shape[2] != width:
                raise ValueError(
                    f"{name} must be [prompts, tokens, {width}] for {self.info.name}, got shape {given.shape}"
                )
            if not np.isfinite(given).all():
                raise ValueError(f"{name} holds NaN or infinity")
        return jnp.asarray(embeds, jnp.float32), None if negative is None else jnp.asarray(negative, jnp.float32)

    def _plan(self, request: ResolvedRequest, encode_text: bool) -> _Job:
        """Everything that can be known, and refused, before weights load."""
        name = request.solver
        spec = spec_from_config(self.folder.scheduler) if name is None else solver_spec(name)
        passes, solver_name = plan_passes(request, spec, self.folder.transformer.num_layers), name or spec.kind.value
        geometry, guided = request.geometry, request.guided
        batch = len(request.seeds)
        workload = Workload(
            transformer=self.folder.transformer,
            vae=self.folder.vae,
            text_encoder=self.folder.text_encoder,
            geometry=geometry,
            batch=batch,
            guided=guided,
            dtype=self.dtype,
            text_dtype=text_param_dtype(self.folder),
            encode_text=encode_text,
            float_output=request.output_type == "np",
            encode_video=request.base is not None,
            platform=jax.default_backend(),
        )
        available = available_memory()
        plan = check_memory(workload, available)
        keep = plan.resident_peak <= KEEP_SHARE * available.nbytes
        return _Job(request, passes, solver_name, guided, plan, keep, batch)

    def _context(
        self, job: _Job, embeds: tuple[Any, Any], times: dict[str, float], progress: Progress | None
    ) -> Context:
        """Text of all branches, projected: rows are videos with the prompt, then (guided) videos with the negative prompt."""
        start = time.perf_counter()
        if progress:
            progress("text", 0, 1, 0.0)
        request, copies = job.request, job.request.num_videos_per_prompt
        given, negative = embeds
        texts = list(request.prompts) if given is None else []
        if job.guided and negative is None:
            texts.append(request.negative_prompt)
        parts: list[Conditioning] = [] if given is None else [Conditioning.from_embeds(given)]
        if texts:
            parts.append(encode_prompts(self._text.module, self.tokenizer, texts))
            if not job.keep:
                self._text.free()
        if job.guided and negative is not None:
            if len(negative) not in (1, len(request.prompts)):
                raise ValueError(
                    f"negative_prompt_embeds must have 1 row or one a prompt ({len(request.prompts)}), got {len(negative)}"
                )
            parts.append(Conditioning.from_embeds(negative))
        both = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        prompts = len(request.prompts)
        rows = np.repeat(np.arange(prompts), copies)
        if job.guided:
            single = len(both.lengths) == prompts + 1
            rows = np.concatenate([rows, np.full(prompts * copies, prompts) if single else rows + prompts])
        every = Conditioning(both.embeds[rows], both.lengths[rows])
        text, bias = fold_padding(every, rows=bucket(int(np.max(np.asarray(both.lengths)))))
        jax.block_until_ready(text)
        times["text_s"] = time.perf_counter() - start
        start = time.perf_counter()
        graph, weights = nnx.split(self._transformer.module)
        context = _encode_context(graph, weights, text, bias)
        times["load_transformer_s"] = time.perf_counter() - start
        if progress:
            progress("text", 1, 1, times["text_s"])
        return context

    def _step_programs(self, part: Pass) -> tuple[loop.StepPrograms, dict[float, float]]:
        """Compiled steps for this grid and schedule, kept between calls; and the executed density by requested density."""
        s = part.program.sparsity
        key = (part.geometry.token_grid, tuple(part.backends.items()), s.sink, s.probe_rows, s.routing_seed)
        if key not in self._programs:
            attends, executed = {}, {}
            for density, name in part.backends.items():
                spec = AttentionSpec(
                    grid=part.geometry.token_grid,
                    density=density,
                    sink=s.sink,
                    probe_rows=s.probe_rows,
                    seed=s.routing_seed,
                    head_dim=self.folder.transformer.attention_head_dim,
                )
                attends[density] = make_attend(name, spec)
                executed[density] = attends[density].executed_density
            graph, _ = nnx.split(self._transformer.module)
            self._programs[key] = (loop.StepPrograms(Denoiser(graph, attends)), executed)
        return self._programs[key]

    def _denoise(
        self,
        job: _Job,
        context: Context,
        latents: Any,
        output_path: str | os.PathLike[str] | None,
        resume: str | os.PathLike[str] | None,
        about: dict[str, Any],
        callback: Callable[..., Mapping[str, Any] | None] | None,
        times: dict[str, float],
        progress: Progress | None,
    ) -> tuple[loop.LoopResult | None, ...]:
        """Run the passes; one result each, None for a pass that a resumed run has behind it."""
        start = time.perf_counter()
        first, state = 0, None
        if resume is not None:
            first, state = self._resumed(job, resume, about)
        results: list[loop.LoopResult | None] = [None] * first
        total = sum(p.solver.steps for p in job.passes)
        for number, part in enumerate(job.passes[first:], first):
            done = sum(p.solver.steps for p in job.passes[:number])
            if state is None:
                last = results[-1] if results else None
                state = self._start(
                    job, part, latents, None if last is None else np.asarray(last.latents), times, progress
                )
            programs, _ = self._step_programs(part)
            _, weights = nnx.split(self._transformer.module)
            operands = Operands(weights, context, jnp.asarray(job.request.guidance_scale, jnp.float32))
            try:
                result = loop.run(
                    programs,
                    operands,
                    part.solver,
                    part.program.plans,
                    state,
                    progress=progress,
                    callback_on_step_end=_adapt(self, callback, done),
                    stage=part.name,
                )
            except loop.SamplingInterrupted as stop:
                path = None
                if output_path is not None:
                    path = Path(output_path).with_suffix(".state.safetensors")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    loop.save_state(path, stop.state, about | {PASS_KEY: part.name})
                raise Interrupted(path, done + stop.state.step, total) from stop
            results.append(result)
            state = None
            if len(job.passes) > 1:
                times[f"{part.name}_s"] = sum(r.seconds for r in result.records)
        records = [r for result in results if result is not None for r in result.records]
        times["denoise_s"] = sum(r.seconds for r in records)
        times["denoise_compile_s"] = sum(r.compile_s for r in records)
        times["denoise_wall_s"] = time.perf_counter() - start
        return tuple(results)

    def _resumed(self, job: _Job, path: str | os.PathLike[str], about: dict[str, Any]) -> tuple[int, loop.LoopState]:
        """Which pass an interrupted run was in, and its state there."""
        state, made_with = loop.load_state(path)
        names = [p.name for p in job.passes]
        where = made_with.pop(PASS_KEY, names[0])
        different = sorted(k for k in about.keys() | made_with.keys() if about.get(k) != made_with.get(k))
        if different:
            pairs = ", ".join(f"{k}: {made_with.get(k)!r} then, {about.get(k)!r} now" for k in different)
            raise ValueError(f"{path} was made by another request ({pairs}); resume with the same one")
        return names.index(where), state

    def _start(
        self,
        job: _Job,
        part: Pass,
        given: Any,
        before: np.ndarray | None,
        times: dict[str, float],
        progress: Progress | None,
    ) -> loop.LoopState:
        """The state a pass begins with: noise, or what the pass before made, enlarged and noised again."""
        shape, seeds = (job.batch, *part.geometry.latent_shape), job.request.seeds
        if before is not None:
            base = job.passes[0]
            if not job.keep:
                self._transformer.free()
            start = time.perf_counter()
            small = decode_frames(self._vae.module, before, base.geometry, "np")
            clean = upscale_frames(self._vae.module, small, part.geometry, progress)
            times["upscale_s"] = time.perf_counter() - start
            if not job.keep:
                self._vae.free()
            return loop.start(part.solver, renoised(clean, seeds, part))
        if given is None:
            return loop.start(part.solver, noise.initial_noise(seeds, part.geometry.latent_shape))
        try:
            return loop.start(part.solver, noise.from_published(given, shape))
        except ValueError as error:
            if part.name != "base":
                raise
            g = part.geometry
            raise ValueError(
                f"{error}; the video is sampled at {g.width}x{g.height} first, so this is the size of its noise; base_res='none' "
                f"samples the final size directly"
            ) from None

    def _save_latents(self, job: _Job, final: np.ndarray, output_path: Path, metadata: dict[str, Any]) -> Path:
        saved = SavedLatents(
            latents=noise.to_published(final),
            height=job.request.geometry.height,
            width=job.request.geometry.width,
            fps=job.request.fps,
            model=self.info.name,
            prompts=job.request.video_prompts,
            seeds=job.request.seeds,
            metadata=metadata,
        )
        return saved.save(output_path.with_suffix(".latents.safetensors"))

    def _decode(
        self,
        geometry: VideoGeometry,
        latents: np.ndarray,
        output_type: str,
        times: dict[str, float],
        progress: Progress | None,
    ) -> np.ndarray:
        start = time.perf_counter()
        frames = decode_frames(self._vae.module, latents, geometry, output_type, progress)
        times["decode_s"] = time.perf_counter() - start
        return frames

    def _report(
        self, job: _Job, results: Sequence[loop.LoopResult | None], times: dict[str, float], own_latents: bool
    ) -> dict[str, Any]:
        request, last = job.request, job.last
        g, program = request.geometry, last.program
        ran = [(p, r, self._step_programs(p)[1]) for p, r in zip(job.passes, results, strict=True) if r is not None]
        return {
            "model": self.info.name,
            "model_path": str(self.folder.path),
            "prompts": list(request.video_prompts),
            "seeds": list(request.seeds),
            "initial_noise": "given" if own_latents else "from the seeds",
            "request": request.metadata(),
            "size": {
                "height": g.height,
                "width": g.width,
                "computed_height": g.computed_height,
                "computed_width": g.computed_width,
                "num_frames": g.num_frames,
                "fps": request.fps,
                "tokens": g.token_grid.tokens,
            },
            "sampling": {
                "solver": job.solver_name,
                "steps": sum(p.solver.steps for p in job.passes),
                "flow_shift": request.flow_shift,
                "flow_shift_from": request.flow_shift_source,
                "guidance_scale": request.guidance_scale,
                "evaluations": sum(r.evaluations for _, r, _ in ran),
                "compilations": sum(r.compilations for _, r, _ in ran),
                "dtype": self.dtype.name,
            },
            "passes": [p.report() for p in job.passes],
            "schedule": {
                "name": program.name,
                "hash": program.digest,
                "resolution": program.resolution,
                "sink": program.sparsity.sink,
                "phases": [[p.start, p.stop, list(p.plan.densities)] for p in program.phases],
                "notes": list(program.notes),
            },
            "attention": report.attention_summary(ran[-1][1].records, last.backends, ran[-1][2]),
            "stages": _rounded(times),
            "memory": {
                "planned_peak_gib": round(job.memory.peak / 2**30, 3),
                "weights_kept": job.keep,
                "process_peak_gib": report.peak_memory_gib(),
            },
            "environment": report.environment(),
            "steps": [
                {"pass": p.name} | report.step_report(record, p.backends, executed)
                for p, result, executed in ran
                for record in result.records
            ],
        }


@partial(jax.jit, static_argnums=0)
def _encode_context(graph: Any, weights: Any, text: jax.Array, bias: jax.Array) -> Context:
    return nnx.merge(graph, weights).encode_context(text, bias)


def _digest(array: Any) -> str:
    """Twelve hex digits of an array's values as float32."""
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()[:12]


def _adapt(pipe: Pipeline, callback: Callable[..., Any] | None, done: int) -> loop.StepEnd | None:
    """diffusers' callback signature around the loop's; ``done`` steps were made in passes before."""
    if callback is None:
        return None

    def on_step_end(step: int, timestep: float, latents: jax.Array) -> np.ndarray | None:
        out = callback(pipe, done + step, timestep, {"latents": noise.to_published(np.asarray(latents))})
        if out is None or "latents" not in out:
            return None
        return np.asarray(noise.from_published(out["latents"], latents.shape))

    return on_step_end


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {k: round(v, 3) for k, v in times.items()}
