"""Times attention on this machine: dense against PyTorch's, sparse against dense, few tokens against the plain form.

Every figure is the median over alternating pairs of runs in one process, so that a busy machine slows both sides.
`sparse / (executed density x dense)` is what sparsity really costs: 1 would be no overhead at all; routing is included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from videodiff.attention import AttentionSpec, make_attend
from videodiff.attention.api import ROUTE_SPATIAL, ROUTE_TEMPORAL
from videodiff.attention.dense import dense_attention, plain_attention
from videodiff.attention.svg import SvgAttend
from videodiff.grid import TokenGrid

# grid, heads, head dim, sink: Wan-like (21 x 1800 = 37800 tokens) and the shipped model at 1440p (18000)
CASES = {
    "37800": (TokenGrid(21, 40, 45), 2, 128, "prefix"),
    "18000": (TokenGrid(5, 45, 80), 2, 64, "none"),
}
SMALL = ((32, 320, 2, 64), (16, 640, 2, 64), (16, 1280, 2, 64), (2, 1280, 2, 64))


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def alternate(first: Callable[[], object], second: Callable[[], object], pairs: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median over pairs of first / second."""
    jax.block_until_ready(first())
    jax.block_until_ready(second())
    times = [(seconds(first), seconds(second)) for _ in range(pairs)]
    a, b = zip(*times)
    return statistics.median(a), statistics.median(b), statistics.median(x / y for x, y in times)


def planted(grid: TokenGrid, heads: int, dim: int, route: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v [1, N, H, D] of heads that attend to neighbours in one token order, plus a little noise."""
    n = grid.tokens
    rng = np.random.default_rng(0)
    q, k, v = (0.1 * rng.standard_normal((3, 1, n, heads, dim))).astype(np.float32)
    x = (grid.frame_major_gather() if route == ROUTE_TEMPORAL else np.arange(n)) / n - 0.5
    sharpness = 1e3 * dim**0.5
    q[..., 0], q[..., 1] = sharpness * 2 * x[:, None], -sharpness
    k[..., 0], k[..., 1] = x[:, None], x[:, None] ** 2
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)


def compare_torch(n: int, heads: int, dim: int, pairs: int) -> None:
    try:
        import torch
    except ImportError:
        print("  PyTorch is not installed: its column is left out")
        return
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, n, heads, dim)).astype(np.float32)
    ours = jax.jit(dense_attention)
    tq, tk, tv = (torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v))
    j = [jnp.asarray(x) for x in (q, k, v)]
    torch_s, dense_s, ratio = alternate(
        lambda: torch.nn.functional.scaled_dot_product_attention(tq, tk, tv), lambda: ours(*j), pairs
    )
    flops = 4 * heads * n * n * dim
    print(
        f"  dense {dense_s:7.2f} s ({flops / dense_s / 1e9:.0f} GFLOP/s)   torch SDPA {torch_s:7.2f} s"
        f" ({torch.get_num_threads()} threads)   dense has {ratio:.2f} of torch's throughput"
    )


def compare_sparse(grid: TokenGrid, heads: int, dim: int, sink: str, density: float, pairs: int) -> None:
    attend = make_attend("svg", AttentionSpec(grid, density=density, sink=sink, head_dim=dim))
    assert isinstance(attend, SvgAttend)
    dense, sparse = jax.jit(dense_attention), jax.jit(attend)
    for name, route in (("spatial", ROUTE_SPATIAL), ("temporal", ROUTE_TEMPORAL)):
        qkv = planted(grid, heads, dim, route)
        _, stats = sparse(*qkv, layer=0, step=0)
        assert (stats.route == route).all(), stats.route
        sparse_s, dense_s, ratio = alternate(lambda: sparse(*qkv, layer=0, step=0), lambda: dense(*qkv), pairs)  # noqa: B023
        executed = attend.executed_density
        print(
            f"  svg {name:8s} executed {executed:.4f} in tiles of {attend.spatial.tile}: {sparse_s:6.2f} s against"
            f" {dense_s:6.2f} s dense: {1 / ratio:.2f}x faster, sparse / (executed x dense) = {ratio / executed:.3f}"
        )


def compare_plain(batch: int, n: int, heads: int, dim: int, pairs: int) -> None:
    q, k, v = jnp.asarray(np.random.default_rng(0).standard_normal((3, batch, n, heads, dim)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)
    for name, wrap in (("forward", lambda f: f), ("gradient", lambda f: jax.grad(lambda x: jnp.sum(f(*x) * w)))):
        if name == "forward":
            ours, plain = jax.jit(dense_attention), jax.jit(plain_attention)
            plain_s, ours_s, ratio = alternate(lambda: plain(q, k, v), lambda: ours(q, k, v), pairs)  # noqa: B023
        else:
            ours, plain = jax.jit(wrap(dense_attention)), jax.jit(wrap(plain_attention))
            plain_s, ours_s, ratio = alternate(lambda: plain((q, k, v)), lambda: ours((q, k, v)), pairs)  # noqa: B023
        print(
            f"  B={batch} N={n} H={heads} D={dim} {name:8s}: dense {ours_s * 1e3:7.1f} ms, plain {plain_s * 1e3:7.1f} ms,"
            f" plain / dense = {ratio:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs per figure (default 7)")
    parser.add_argument("--case", choices=(*CASES, "small"), action="append", help="only these (default: all)")
    parser.add_argument("--density", type=float, action="append", help="requested densities (default .3 .5)")
    parser.add_argument("--skip_torch", action="store_true", help="leave PyTorch out even if it is installed")
    args = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, median of {args.pairs} alternating pairs, float32")
    for name in args.case or (*CASES, "small"):
        if name == "small":
            print("few tokens")
            for shape in SMALL:
                compare_plain(*shape, args.pairs)
            continue
        grid, heads, dim, sink = CASES[name]
        print(f"N = {grid.tokens} ({grid.frames} x {grid.patches}), {heads} heads of {dim}, sink {sink}")
        if not args.skip_torch:
            compare_torch(grid.tokens, heads, dim, args.pairs)
        for density in args.density or (0.3, 0.5):
            compare_sparse(grid, heads, dim, sink, density, args.pairs)


if __name__ == "__main__":
    main()
