"""Head-routed sparse attention in XLA: the ``svg`` backend (Sparse VideoGen, arXiv 2502.01776).

Owns: the execution of spatial and temporal heads from their tile plans. Does not own: the plans (`tiles`), the
choice (`routing`). Invariant: the work done for a head is that of its own plan; nothing is permuted in memory, a
temporal tile is read as a strided block of [F, P, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from videodiff.attention.api import ROUTE_TEMPORAL, Attend, AttentionSpec, HeadStats, register
from videodiff.attention.blocked import Tiling, attend_head
from videodiff.attention.dense import dense_attention, dense_stats
from videodiff.attention.routing import probe_rows, published_keys, published_rows, route_heads, visited_keys
from videodiff.attention.tiles import Sink, TilePlan, plan_tiles
from videodiff.grid import TokenOrder

# how rows are drawn and which keys a pattern gives them
PROBES = {"executed": (probe_rows, visited_keys), "published": (published_rows, published_keys)}


def planned_head(q: jax.Array, k: jax.Array, v: jax.Array, plan: TilePlan, temporal: jax.Array | bool) -> jax.Array:
    """One head over the tiles of a plan.

    Args:
      q, k, v: [N, D], frame-major.
      plan: lists in the order of the head, which both kinds share.
      temporal: scalar bool, may be traced: tiles are neighbours in token-major order.

    Returns:
      [N, D] in q's dtype.
    """
    frames, patches = plan.grid.frames, plan.grid.patches
    queries, keys = (Tiling(frames, patches, min(size, frames * patches), temporal) for size in plan.tile)
    lists, counts = jnp.asarray(plan.tiles), jnp.asarray(plan.counts)
    return attend_head(q, k, v, queries, keys, lambda i, n: lists[i, n], lambda i: counts[i])


def routed_attention(q: jax.Array, k: jax.Array, v: jax.Array, route: jax.Array, plan: TilePlan) -> jax.Array:
    """Every head in the order its route names, one head at a time.

    Args:
      q, k, v: [B, H, N, D], frame-major.
      route: [B, H] int32, ROUTE_SPATIAL or ROUTE_TEMPORAL; data, decided on the device.
      plan: lists in the order of the head; both kinds have the same, only tiles are cut differently.

    Returns:
      [B, H, N, D] in q's dtype.
    """

    def head(x: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        r, q, k, v = x
        return planned_head(q, k, v, plan, r == ROUTE_TEMPORAL)

    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))  # [B*H, N, D]
    return lax.map(head, (route.reshape(-1), *flat)).reshape(q.shape)


@dataclass(frozen=True, eq=False)
class SvgAttend:
    """Sparse attention bound to one grid and density; an :class:`Attend`.

    Args:
      spec: what it was built from.
      spatial, temporal: the plans of both kinds of heads, equal in cost.
    """

    spec: AttentionSpec
    spatial: TilePlan
    temporal: TilePlan

    @property
    def requested_density(self) -> float:
        return self.spec.density

    @property
    def executed_density(self) -> float:
        """Executed share of pairs, sink included, the same for every route."""
        return self.spatial.executed_density

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, layer: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, HeadStats]:
        assert q.shape[1] == self.spec.grid.tokens, (q.shape, self.spec.grid)
        if self.spatial.full:
            with jax.named_scope("attend_dense"):
                return dense_attention(q, k, v), dense_stats(q.shape[0], q.shape[2])
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))  # [B, H, N, D]
        with jax.named_scope("route_heads"):
            draw, keys = PROBES[self.spec.probe]
            rows = draw(self.spec.grid.tokens, self.spec.probe_rows, self.spec.seed, layer, step)
            stats = route_heads(q, k, v, rows, keys(self.spatial, rows), keys(self.temporal, rows))
        with jax.named_scope("attend_svg"):
            o = routed_attention(q, k, v, stats.route, self.spatial)
        return o.transpose(0, 2, 1, 3), stats  # [B, N, H, D]


@register("svg")
def make_svg(spec: AttentionSpec) -> Attend:
    """Plan both kinds of heads for ``spec``; density 1 is the dense program itself.

    Raises:
      ValueError: a density that the plans cannot reach.
      NotImplementedError: a first-frame sink, which no tile plan can give to a temporal head.
    """
    sink = Sink(spec.sink)
    spatial, temporal = (
        plan_tiles(spec.grid, spec.density, sink=sink, order=order)
        for order in (TokenOrder.FRAME_MAJOR, TokenOrder.TOKEN_MAJOR)
    )
    assert (spatial.tiles == temporal.tiles).all()  # one list serves both kinds of heads
    assert (spatial.counts == temporal.counts).all()
    return SvgAttend(spec, spatial, temporal)
