"""velocity(latents, timestep): one evaluation of the denoiser as the sampler sees it.

Owns: guidance, which expert answers (one model so far: see `velocity`), and the dtype border between float32 latents
and the model's dtype. Does not own: sigmas and solver arithmetic, attention, which layers are sparse (`schedule`).
Invariant: one branch (guidance off) equals the conditional half of two; no timestep is rounded to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from videodiff.attention.api import Attend, HeadStats
from videodiff.grid import TokenGrid
from videodiff.models.transformer import Context, WanTransformer
from videodiff.schedule import StepPlan


def is_guided(guidance_scale: float) -> bool:
    """Whether this scale needs the unconditional branch: above 1, as in diffusers."""
    return guidance_scale > 1


def join_context(cond: Context, uncond: Context) -> Context:
    """Both branches along the batch, in the one order used everywhere: conditional first, then unconditional.

    Args:
      cond, uncond: [B, L, ...] each, of the same structure (both with or both without a logit bias).

    Returns:
      [2B, L, ...].
    """
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), cond, uncond)


def _fit_context(context: Context, batch: int, guided: bool) -> Context:
    """The context rows of the branches that run: [B or 2B, ...]."""
    rows = jax.tree.leaves(context)[0].shape[0]
    if rows == (2 * batch if guided else batch):
        return context
    if rows == 2 * batch and not guided:
        return jax.tree.map(lambda a: a[:batch], context)
    raise ValueError(
        f"a {'guided' if guided else 'single-branch'} step on a batch of {batch} needs a context of "
        f"{2 * batch if guided else f'{batch} or {2 * batch}'} rows (conditional first), got {rows}"
    )


def velocity(
    model: WanTransformer,
    latents: jax.Array,
    timestep: jax.Array,
    context: Context,
    plan: StepPlan,
    attends: Mapping[float, Attend],
    guidance_scale: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, HeadStats]:
    """The velocity of the flow at one timestep, with guidance.

    v = v_uncond + guidance_scale * (v_cond - v_uncond) (Ho and Salimans, arXiv 2207.12598).

    With two experts, the choice between their weights belongs to the caller of this function in this file: it is known
    from the timestep before tracing, so it is part of the phase, never a branch in the program.

    Args:
      model: the transformer.
      latents: [B, F, Y, X, C] float32.
      timestep: scalar or [B] float32 in [0, 1000].
      context: encoded text of 2B rows, conditional first (`join_context`), or of B rows when the plan is not guided. A
        plan that is not guided takes the conditional half of 2B rows.
      plan: layer segments, and whether the unconditional branch runs.
      attends: density -> attention function.
      guidance_scale: float32 scalar, may be traced; unused when the plan is not guided.
      step: int32 scalar, may be traced.

    Returns:
      velocity: [B, F, Y, X, C] float32.
      stats: leaves [layers, B or 2B, H].

    Raises:
      ValueError: a context of the wrong number of rows, a density without an attention function, or segments that do
        not cover the model's layers.
    """
    batch, frames, rows, cols, _ = latents.shape
    branches = 2 if plan.guided else 1
    context = _fit_context(context, batch, plan.guided)
    missing = sorted({s.density for s in plan.segments} - set(attends))
    if missing:
        raise ValueError(f"the plan asks for density {missing}, and attention was built for {sorted(attends)} only")
    depth = plan.segments[-1].stop
    if depth != model.config.num_layers:
        raise ValueError(f"the plan covers {depth} layers and the model has {model.config.num_layers}")

    # Into the model's dtype: its matrix products run there. The loop's own copy of the latents stays float32.
    x = jnp.tile(latents.astype(model.dtype), (branches, 1, 1, 1, 1))
    # float32 on purpose: bfloat16 would turn timestep 998.4 into 1000.
    t = jnp.tile(jnp.broadcast_to(jnp.asarray(timestep, jnp.float32), (batch,)), branches)
    pf, py, px = model.config.patch_size

    with jax.named_scope("embed"):
        x, modulation = model.embed(x, t)
    stats = []
    for s in plan.segments:
        with jax.named_scope(f"blocks_{s.start}_{s.stop}"):
            x, one = model.blocks(x, modulation, context, s.start, s.stop, attends[s.density], step)
        stats.append(one)
    with jax.named_scope("head"):
        v = model.head(x, modulation, TokenGrid(frames // pf, rows // py, cols // px))
    # Back to float32 before guidance: the difference of the branches is small and the scale would amplify its rounding.
    v = v.astype(jnp.float32)
    if plan.guided:
        with jax.named_scope("guidance"):
            cond, uncond = v[:batch], v[batch:]
            v = uncond + guidance_scale * (cond - uncond)
    return v, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stats)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """What a denoising program reads besides latents, as a pytree: arguments, so that weights are never constants.

    Args:
      weights: state of the transformer, from `nnx.split`.
      context: encoded text, as in `velocity`.
      guidance_scale: float32 scalar.
    """

    weights: nnx.State
    context: Context
    guidance_scale: jax.Array


@dataclass(frozen=True, eq=False)
class Denoiser:
    """`velocity` as a pure function for the sampling loop (`sampling.loop.Denoise`).

    Args:
      graphdef: structure of the transformer, from `nnx.split`.
      attends: density -> attention function, bound to one grid.
    """

    graphdef: Any
    attends: Mapping[float, Attend]

    def __call__(
        self, operands: Operands, latents: jax.Array, timestep: jax.Array, step: jax.Array, plan: StepPlan
    ) -> tuple[jax.Array, HeadStats]:
        model = nnx.merge(self.graphdef, operands.weights)
        scale = operands.guidance_scale
        return velocity(model, latents, timestep, operands.context, plan, self.attends, scale, step)
