"""The tile kernel in Pallas for TPU: dense, spatial and temporal heads from one body.

Owns: the kernel, its block specs, the choice of the softmax's form per head. Does not own: tile sizes, plans, routes.
Invariants: nothing is permuted or padded in memory; a head costs what its own list of tiles costs; no input makes a NaN.

Scores are computed transposed, S^T = K Q^T and O^T = V^T P^T, which fills a 256-wide matrix unit in the second product.
Softmax subtracts a shift that is known before a tile starts: the Cauchy-Schwarz bound |q| max|k|. That is exact as long as
no row's true maximum lies so far below it that its terms underflow. A row's own key is always visited, so q.k of the row
itself bounds the true maximum from below; where the two bounds lie further apart than UNDERFLOW for any row of a head, that
head takes the running maximum instead. The test is made on the device before the kernel starts, from norms alone.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from videodiff.kernels.tile_attention.work import FIRST, KEY_SHIFT, LAST, MAX_TILES, QUERY_SHIFT, Work

LANES = 128
# In powers of two. Terms below 2**-26 of the largest do not count in f32, and f32 and bf16 hold 2**-126.
UNDERFLOW = 100.0
NEVER = -1e30  # a score that adds nothing; finite, so that differences are


def _own(ref: jax.Array, rows: int) -> jax.Array:
    """A block as [rows, D]."""
    return ref[...].reshape(rows, ref.shape[-1])


def _product(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Matrix product summed over one axis of each, in f32; f32 operands keep their precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((axes[0],), (axes[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _kernel(
    words, heads, count, q_ref, k_ref, v_ref, shift_ref, _, o_ref, acc, total, top, turned, *, work, chunk, temporal, running
):  # fmt: skip
    """One (query tile, key tile) pair; accumulators [D, tq], [8, tq], [1, tq] live across the pairs of a query tile."""
    del heads, count
    word = words[pl.program_id(1)]
    frames, tq, tk = work.frames, work.frames * work.query_patches, work.frames * work.key_patches
    ragged = work.patches % work.key_patches != 0

    @pl.when(word & FIRST != 0)
    def _start() -> None:
        acc[...] = jnp.zeros_like(acc)
        total[...] = jnp.zeros_like(total)
        if running:
            top[...] = jnp.full_like(top, NEVER)

    q, k, v = _own(q_ref, tq), _own(k_ref, tk), _own(v_ref, tk)
    bias = None
    if ragged:  # rows past the end of the last tile hold anything
        start = (word >> KEY_SHIFT & (MAX_TILES - 1)) * work.key_patches
        row = lax.broadcasted_iota(jnp.int32, (tk, 1), 0)
        left = work.patches - start
        real = row % work.key_patches < left if temporal else row < left * frames
        k, v = jnp.where(real, k, jnp.zeros_like(k)), jnp.where(real, v, jnp.zeros_like(v))
        bias = jnp.where(real, 0.0, NEVER)

    def scores(at: int) -> jax.Array:
        s = _product(k[at : at + chunk], q, (1, 1))  # [chunk, tq]
        return s if bias is None else s + bias[at : at + chunk]

    # the next chunk's scores are asked for before this one's sum, so that the matrix unit has work during exp2
    out, sums = acc[...], total[...]
    s = scores(0)
    for at in range(0, tk, chunk):
        following = scores(at + chunk) if at + chunk < tk else s
        if running:
            highest = jnp.maximum(top[...], jnp.max(s, axis=0, keepdims=True))
            fade = jnp.exp2(top[...] - highest)
            top[...] = highest
            out, sums = out * fade, sums * fade
            p = jnp.exp2(s - highest)
        else:
            p = jnp.exp2(s - shift_ref[...].reshape(1, tq))
        sums += p.reshape(-1, 8, tq).sum(0)
        out += _product(v[at : at + chunk], p.astype(v.dtype), (0, 0))  # [D, tq]
        s = following
    acc[...], total[...] = out, sums

    # A loop of none or one turn: a plain branch would be merged into the body and cost every pair.
    def finish(_: jax.Array, carry: int) -> int:
        turned[...] = (acc[...] / total[...].sum(0, keepdims=True)).T
        o_ref[...] = turned[...].reshape(o_ref.shape).astype(o_ref.dtype)
        return carry

    lax.fori_loop(0, jnp.where(word & LAST != 0, 1, 0), finish, 0)


def _tile_specs(work: Work, head_dim: int, temporal: bool) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Blocks of q (and o), of k and v, of the shift."""

    def query(h, s, words, heads, count):
        return heads[h], words[s] >> QUERY_SHIFT

    def key(h, s, words, heads, count):
        return heads[h], words[s] >> KEY_SHIFT & (MAX_TILES - 1)

    def block(wide: int, index) -> pl.BlockSpec:
        if temporal:
            return pl.BlockSpec((1, work.frames, wide, head_dim), lambda *a: (index(*a)[0], 0, index(*a)[1], 0))
        return pl.BlockSpec((1, work.frames * wide, head_dim), lambda *a: (*index(*a), 0))

    shift = pl.BlockSpec((1, 1, 1, work.frames * work.query_patches), lambda *a: (*query(*a), 0, 0))
    return block(work.query_patches, query), block(work.key_patches, key), shift


def _attend(
    heads, count, q, k, v, shift, out, work: Work, *, chunk: int, temporal: bool, running: bool, interpret, vmem_bytes
) -> jax.Array:
    """The heads of one kind, written into ``out``; the other heads of ``out`` stay as they are."""
    h, n, d = q.shape
    shape = (h, work.frames, work.patches, d) if temporal else (h, n, d)
    q, k, v, out = (x.reshape(shape) for x in (q, k, v, out))
    query, key, bound = _tile_specs(work, d, temporal)
    tq = work.frames * work.query_patches
    kernel = functools.partial(_kernel, work=work, chunk=chunk, temporal=temporal, running=running)
    o = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(count[0], work.words.shape[0]),
            in_specs=[query, key, key, bound, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=query,
            scratch_shapes=[
                pltpu.VMEM((d, tq), jnp.float32),
                pltpu.VMEM((8, tq), jnp.float32),
                pltpu.VMEM((1, tq), jnp.float32),
                pltpu.VMEM((tq, d), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(shape, q.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        interpret=interpret,
        name=f"tile_attention_{'temporal' if temporal else 'spatial'}_{'running' if running else 'fixed'}",
    )(jnp.asarray(work.words), heads, count, q, k, v, shift, out)
    return o.reshape(h, n, d)


def bounds(q: jax.Array, k: jax.Array, own: bool) -> tuple[jax.Array, jax.Array]:
    """Shift of every row and whether it is exact for every row of a head.

    Args:
      q: [H, N, D], scaled so that scores are powers of two.
      k: [H, N, D].
      own: a row's own key is among the visited.

    Returns:
      shift [H, N] f32 with q.k <= shift for all keys; exact [H] bool.
    """
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    upper = jnp.linalg.norm(q, axis=-1) * jnp.linalg.norm(k, axis=-1).max(-1, keepdims=True)
    lower = jnp.sum(q * k, -1) if own else -upper
    return upper, jnp.all(upper - lower <= UNDERFLOW, -1)  # NaN and infinity compare false


def _shift_tiles(shift: jax.Array, work: Work, temporal: bool) -> jax.Array:
    """[H, N] in the order of a kind of head: [H, query tiles, 1, tq]; tiny next to q."""
    h = shift.shape[0]
    tiles, wide = work.query_tiles, work.query_patches
    if temporal:
        shift = jnp.pad(shift.reshape(h, work.frames, work.patches), ((0, 0), (0, 0), (0, tiles * wide - work.patches)))
        return shift.reshape(h, work.frames, tiles, wide).transpose(0, 2, 1, 3).reshape(h, tiles, 1, -1)
    shift = jnp.pad(shift, ((0, 0), (0, (tiles * wide - work.patches) * work.frames)))
    return shift.reshape(h, tiles, 1, -1)


def tile_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    temporal: jax.Array | None,
    work: Work,
    *,
    chunk: int,
    vmem_bytes: int,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Softmax attention over visited tiles.

    Args:
      q, k, v: [H, N, D], frame-major; bfloat16 or float32; D 64 or 128. H counts heads of all batch entries.
      temporal: [H] bool, may be traced: the heads that follow token-major order; None if none does.
      work: tiles to visit; its tiles have a multiple of 8 (f32) or 16 (bf16) patches.
      chunk: keys of one matrix product; divides the key tile.
      vmem_bytes: limit for the compiler.
      interpret: run on the host, for tests.

    Returns:
      [H, N, D] in q's dtype.
    """
    h = q.shape[0]
    scale = math.log2(math.e) / math.sqrt(q.shape[-1])
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    shift, exact = bounds(q, k, work.own)
    out = jnp.empty_like(q)
    for order in (False,) if temporal is None else (False, True):
        tiles = _shift_tiles(shift, work, order)
        for running in (False, True):
            chosen = exact != running
            if temporal is not None:
                chosen &= temporal == order
            heads = jnp.argsort(~chosen, stable=True).astype(jnp.int32)
            count = chosen.sum(dtype=jnp.int32).reshape(1)
            out = _attend(
                heads, count, q, k, v, tiles, out, work, chunk=chunk, temporal=order, running=running,
                interpret=interpret, vmem_bytes=vmem_bytes,
            )  # fmt: skip
    return out.reshape(h, *q.shape[1:])
