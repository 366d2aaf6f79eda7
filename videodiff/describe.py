"""What a run will do, told before anything is loaded: steps, phases, densities, arithmetic, ideal speed-up.

Owns: counting the denoiser's floating-point operations, the description and its two forms (text, JSON). Does not own: what is
dense or sparse (`schedule`), which tiles are computed (`attention.tiles`), time and memory of a machine.
Invariant: every density shown as executed is that of the tile plan the run would use; no weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from videodiff.attention.tiles import Sink, TilePlan, exact_pairs, plan_tiles
from videodiff.configs import TransformerConfig
from videodiff.grid import TokenGrid, TokenOrder
from videodiff.known import ModelInfo
from videodiff.passes import plan_passes
from videodiff.request import ResolvedRequest
from videodiff.sampling.solvers import solver_spec, spec_from_config
from videodiff.schedule import DENSE, Phase, ScheduleProgram, Segment

TEXT_TOKENS = 512  # an upper bound: the engine folds the padding of shorter prompts into one row


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass of one video and one guidance branch; a multiply-add is two.

    Args:
      attention: scores and weighted values of self-attention over all pairs, all layers: 4 N^2 C each.
      other: projections, cross-attention, feed-forward, patch embedding and head.
    """

    attention: float
    other: float

    @property
    def share(self) -> float:
        """a, the share of attention."""
        return self.attention / (self.attention + self.other)


def forward_flops(config: TransformerConfig, tokens: int, text_tokens: int = TEXT_TOKENS) -> Flops:
    """Count one forward pass from the model's shapes.

    A layer's linear maps: q, k, v, o of self-attention and q, o of cross-attention, 2 N C^2 each; k and v of the text,
    2 L C^2 each; the feed-forward, 4 N C ffn. Cross-attention itself is 4 N L C.

    Args:
      config: the transformer.
      tokens: N.
      text_tokens: L.
    """
    n, c, text = tokens, config.width, text_tokens
    layer = 12 * n * c * c + 4 * text * c * c + 4 * n * c * config.ffn_dim + 4 * n * text * c
    patch = config.patch_size[1] * config.patch_size[2]
    ends = 2 * n * c * patch * (config.in_channels + config.out_channels)
    return Flops(attention=4.0 * n * n * c * config.num_layers, other=float(layer * config.num_layers + ends))


def probe_flops(config: TransformerConfig, tokens: int, rows: int) -> float:
    """Routing of one layer: R rows of scores, and their weighted values dense and under both patterns, 8 R N C."""
    return 8.0 * min(rows, tokens) * tokens * config.width


def ideal_speedup(share: float, dense_share: float, kept: float) -> float:
    """1 / (1 - a (1 - f) (1 - kept)): everything but the dropped pairs costs what it did.

    Args:
      share: a, attention's share of a dense run's operations.
      dense_share: f, the share of layer evaluations that run dense.
      kept: executed density of the others.
    """
    return 1 / (1 - share * (1 - dense_share) * (1 - kept))


@dataclass(frozen=True)
class Density:
    """What a sparse layer keeps, as shares of all N^2 pairs.

    Args:
      requested: by the schedule.
      executed: by the tile plan; both kinds of heads alike.
      window: W in tokens.
      band: of the pattern |q - k| <= W, before rounding to tiles.
      sink: what the sink adds to the band, before rounding to tiles.
      tile: tokens of a (query, key) tile.
    """

    requested: float
    executed: float
    window: int
    band: float
    sink: float
    tile: tuple[int, int]


@dataclass(frozen=True)
class StepRow:
    """One step of the table.

    Args:
      step: from 1.
      phase: from 1.
      layers_dense, layers_sparse: how many run how.
      requested, executed: density of the sparse ones, 1 if there are none.
      mean_executed: over all layers.
    """

    step: int
    sigma: float
    timestep: float
    phase: int
    layers_dense: int
    layers_sparse: int
    requested: float
    executed: float
    mean_executed: float


def describe_density(grid: TokenGrid, density: float, sink: str) -> Density:
    """Plan the tiles of one density.

    Raises:
      ValueError, NotImplementedError: a density or a sink that the tiles cannot execute.
    """
    plans = [plan_tiles(grid, density, sink=Sink(sink), order=order) for order in TokenOrder]
    plan: TilePlan = plans[0]
    assert all(p.executed_density == plan.executed_density for p in plans), "both kinds of heads cost the same"
    band = exact_pairs(grid.tokens, plan.window) / grid.tokens**2
    return Density(density, plan.executed_density, plan.window, band, plan.exact_density - band, plan.tile)


@dataclass(frozen=True)
class Description:
    """A run before it happens; made by :func:`describe_run`.

    Args:
      info, request, program: what is described.
      solver: its name.
      steps: the table.
      densities: one for each sparse density that occurs.
      flops: of one forward pass.
      evaluations: forward passes of one video: steps times guidance branches.
      probe: operations of routing, over the whole run of one video.
      base: operations of the pass at the smaller size before, which is dense; 0 without one. The table and everything else is of
        the pass at the final size.
    """

    info: ModelInfo
    request: ResolvedRequest
    program: ScheduleProgram
    solver: str
    steps: tuple[StepRow, ...]
    densities: tuple[Density, ...]
    flops: Flops
    evaluations: int
    probe: float
    base: float = 0.0

    @property
    def dense_steps(self) -> int:
        return sum(not row.layers_sparse for row in self.steps)

    @property
    def dense_share(self) -> float:
        """f, the share of layer evaluations that run dense."""
        return sum(r.layers_dense for r in self.steps) / sum(r.layers_dense + r.layers_sparse for r in self.steps)

    @property
    def kept(self) -> float:
        """Mean executed density of the sparse layer evaluations; 1 if there are none."""
        weight = sum(r.layers_sparse for r in self.steps)
        return sum(r.layers_sparse * r.executed for r in self.steps) / weight if weight else DENSE

    @property
    def attention_saved(self) -> float:
        """Share of the run's attention operations that is not computed."""
        return (1 - self.dense_share) * (1 - self.kept)

    @property
    def speedup(self) -> float:
        """Ideal, of all denoising: the pass at the smaller size costs the same under every schedule."""
        attention, other = (x * self.evaluations for x in (self.flops.attention, self.flops.other))
        rest = other + self.base
        return ideal_speedup(attention / (attention + rest), self.dense_share, self.kept)

    @property
    def total_flops(self) -> tuple[float, float]:
        """(dense, this schedule) denoising of one video, routing included."""
        attention, other = (x * self.evaluations for x in (self.flops.attention, self.flops.other))
        other += self.base
        return attention + other, attention * (1 - self.attention_saved) + other + self.probe

    def json(self) -> dict[str, Any]:
        """Plain JSON types, everything that the text says."""
        r, g, p = self.request, self.request.geometry, self.program
        grid = g.token_grid
        dense, sparse = self.total_flops
        return {
            "model": r.model,
            "size": {
                "width": g.width, "height": g.height, "computed_width": g.computed_width, "computed_height": g.computed_height,
                "num_frames": g.num_frames, "fps": r.fps,
            },
            "base": self._base_json(),
            "tokens": {"frames": grid.frames, "rows": grid.rows, "cols": grid.cols, "patches": grid.patches, "all": grid.tokens},
            "sampling": {
                "solver": self.solver, "steps": len(self.steps), "flow_shift": r.flow_shift,
                "flow_shift_from": r.flow_shift_source, "guidance_scale": r.guidance_scale, "evaluations": self.evaluations,
            },
            "schedule": {
                "name": p.name, "hash": p.digest, "resolution": p.resolution, "sink": p.sparsity.sink,
                "probe_rows": p.sparsity.probe_rows, "dense_layers": p.sparsity.dense_layers, "dense_steps": self.dense_steps,
            },
            "steps": [asdict(s) for s in self.steps],
            "phases": [_phase_json(phase) for phase in p.phases],
            "densities": [{**asdict(d), "tile": list(d.tile)} for d in self.densities],
            "flops": {
                "attention_share": self.flops.share, "dense": dense, "scheduled": sparse, "routing": self.probe,
                "attention_saved": self.attention_saved,
            },
            "dense_share": self.dense_share,
            "kept": self.kept,
            "ideal_speedup": self.speedup,
            "notes": list(self.notes),
        }  # fmt: skip

    def _base_json(self) -> dict[str, Any] | None:
        r = self.request
        if r.base is None:
            return None
        return {
            "width": r.base.width, "height": r.base.height, "tokens": r.base.token_grid.tokens, "steps": r.num_inference_steps,
            "denoise_strength": r.denoise_strength, "refine_steps": r.refine_steps, "flops": self.base,
        }  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.request.notes, *self.program.notes)

    def text(self) -> str:
        """For a terminal."""
        blocks = [self._head(), self._step_table(), self._phase_lines(), *map(self._density_lines, self.densities)]
        blocks.append(self._arithmetic())
        if self.notes:
            blocks.append("\n".join(f"note: {n}" for n in self.notes))
        return "\n\n".join(blocks)

    def _head(self) -> str:
        r, g, p = self.request, self.request.geometry, self.program
        grid = g.token_grid
        computed = "" if (g.height, g.width) == (g.computed_height, g.computed_width) else (
            f" (computed at {g.computed_width}x{g.computed_height})"
        )  # fmt: skip
        taken = "" if p.resolution == "any" else f", numbers of {p.resolution}"
        branches = "2 branches" if r.guided else "1 branch"
        steps, first = f"{r.num_inference_steps} steps", []
        if r.base is not None:
            steps = f"{r.refine_steps} steps from noise level {r.denoise_strength:g}"
            small = f"{r.base.width}x{r.base.height} ({r.base.token_grid.tokens} tokens, dense)"
            first.append(
                f"first     {r.num_inference_steps} steps at {small}, then enlarged; all below is the refinement"
            )
        return "\n".join(
            (
                f"model     {r.model}: {self.info.transformer.num_layers} layers, {self.info.transformer.num_attention_heads} "
                f"heads of {self.info.transformer.attention_head_dim}",
                f"video     {g.width}x{g.height}{computed}, {g.num_frames} frames at {r.fps:g} fps",
                *first,
                f"tokens    {grid.frames} frames x {grid.rows} x {grid.cols} = {grid.tokens}",
                f"sampling  {self.solver}, {steps}, flow_shift {r.flow_shift:g} ({r.flow_shift_source}), "
                f"guidance {r.guidance_scale:g} ({branches})",
                f"schedule  {p.name} ({p.digest}{taken})",
            )
        )

    def _step_table(self) -> str:
        lines = [
            f"{'step':>4s}  {'sigma':>7s}  {'timestep':>8s}  {'phase':>5s}  {'layers':>14s}  {'requested':>9s}  {'executed':>8s}"
        ]
        for s in self.steps:
            layers = f"{s.layers_dense} dense"
            if s.layers_sparse:
                layers = (
                    f"{s.layers_dense} + {s.layers_sparse} sparse" if s.layers_dense else f"{s.layers_sparse} sparse"
                )
            place = f"{s.step:4d}  {s.sigma:7.5f}  {s.timestep:8.2f}  {s.phase:5d}"
            lines.append(f"{place}  {layers:>14s}  {s.requested:9.4f}  {s.executed:8.4f}")
        return "\n".join(lines)

    def _phase_lines(self) -> str:
        phases = self.program.phases
        lines = [f"phases, each one compiled program: {len(phases)}"]
        for i, phase in enumerate(phases, 1):
            parts = ", ".join(_segment_text(s) for s in phase.plan.segments)
            lines.append(f"  {i}  steps {phase.start + 1} to {phase.stop}: {parts}")
        return "\n".join(lines)

    def _density_lines(self, d: Density) -> str:
        s = self.program.sparsity
        return "\n".join(
            (
                f"density, as a share of all pairs (sink {s.sink}, window W = {d.window} tokens)",
                f"  band       {d.band:.4f}",
                f"  sink       {d.sink:.4f}",
                f"  requested  {d.requested:.4f}",
                f"  executed   {d.executed:.4f}  in whole tiles of {d.tile[0]} queries x {d.tile[1]} keys",
            )
        )

    def _arithmetic(self) -> str:
        dense, sparse = self.total_flops
        a, f, kept = self.flops.share, self.dense_share, self.kept
        lines = [
            f"dense steps               {self.dense_steps} of {len(self.steps)}",
            f"attention's share         {a:.3f} of a dense run's operations",
            f"denoising, one video      {_flops(dense)} dense, {_flops(sparse)} with this schedule",
            *((f"the pass before           {_flops(self.base)} of each",) if self.base else ()),
            f"routing                   {self.probe / sparse:.2%} of that",
            f"attention FLOPs saved     {self.attention_saved:.1%}",
            f"ideal speed-up            {self.speedup:.2f}x = 1 / (1 - a (1 - f) (1 - kept))"
            + (", the pass before counted" if self.base else ""),
            f"                          a = {a:.3f}, f = {f:.3f} (dense share of layer runs), kept = {kept:.4f}",
        ]
        return "\n".join(lines)


def _flops(value: float) -> str:
    for exponent, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G")):
        if value >= 10**exponent:
            return f"{value / 10**exponent:.3g} {prefix}FLOP"
    return f"{value:.3g} FLOP"


def _segment_text(s: Segment) -> str:
    layers = f"layer {s.start}" if s.stop == s.start + 1 else f"layers {s.start} to {s.stop - 1}"
    return f"{layers} {'dense' if s.density == DENSE else f'density {s.density:g}'}"


def _phase_json(phase: Phase) -> dict[str, Any]:
    segments = [{"start": s.start, "stop": s.stop, "density": s.density} for s in phase.plan.segments]
    return {"start": phase.start, "stop": phase.stop, "guided": phase.plan.guided, "segments": segments}


def _rows(
    program: ScheduleProgram, sigmas: Any, timesteps: Any, executed: Mapping[float, float]
) -> tuple[StepRow, ...]:
    rows = []
    for number, phase in enumerate(program.phases, 1):
        densities = phase.plan.densities
        sparse = [d for d in densities if d < DENSE]
        requested = math.fsum(sparse) / len(sparse) if sparse else DENSE
        done = math.fsum(executed[d] for d in sparse) / len(sparse) if sparse else DENSE
        mean = math.fsum(executed[d] for d in densities) / len(densities)
        for i in range(phase.start, phase.stop):
            rows.append(
                StepRow(
                    step=i + 1, sigma=float(sigmas[i]), timestep=float(timesteps[i]), phase=number,
                    layers_dense=len(densities) - len(sparse), layers_sparse=len(sparse), requested=requested, executed=done,
                    mean_executed=mean,
                )
            )  # fmt: skip
    return tuple(rows)


def describe_run(info: ModelInfo, request: ResolvedRequest) -> Description:
    """Describe a run.

    Args:
      info: of the model.
      request: what is asked for.

    Raises:
      ValueError, NotImplementedError: a schedule that this model, size or tile plan cannot follow.
    """
    geometry, config = request.geometry, info.transformer
    grid = geometry.token_grid
    if request.solver is None and info.scheduler:
        spec = spec_from_config(info.scheduler)
        name = spec.kind.value
    else:
        name = request.solver or info.solver
        spec = solver_spec(name)
    passes = plan_passes(request, spec, config.num_layers)
    solver, program = passes[-1].solver, passes[-1].program
    branches = 2 if request.guided else 1
    base = 0.0
    for before in passes[:-1]:
        one = forward_flops(config, before.geometry.token_grid.tokens)
        base += (one.attention + one.other) * before.solver.steps * branches
    planned = {d: describe_density(grid, d, program.sparsity.sink) for d in program.densities if d < DENSE}
    executed = {DENSE: DENSE} | {d: p.executed for d, p in planned.items()}
    steps = _rows(program, solver.grid.sigmas, solver.grid.timesteps, executed)
    sparse_layers = sum(s.layers_sparse for s in steps)
    return Description(
        info=info,
        request=request,
        program=program,
        solver=name,
        steps=steps,
        densities=tuple(planned.values()),
        flops=forward_flops(config, grid.tokens),
        evaluations=len(steps) * branches,
        probe=probe_flops(config, grid.tokens, program.sparsity.probe_rows) * sparse_layers * branches,
        base=base,
    )
