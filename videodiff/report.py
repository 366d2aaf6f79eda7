"""The run report: what a generation did, as plain JSON types.

Owns: the report's layout. Does not own: measuring (`stages`, `sampling.loop`), writing (`result`).
Invariant: every step and layer says which kernel ran, which density was asked for and which one was executed.
"""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from videodiff.attention.api import ROUTE_DENSE, ROUTE_SPATIAL, ROUTE_TEMPORAL
from videodiff.sampling.loop import StepRecord
from videodiff.version import __version__

LETTER = {ROUTE_DENSE: "D", ROUTE_SPATIAL: "S", ROUTE_TEMPORAL: "T"}


def environment() -> dict[str, Any]:
    """Versions and device."""
    device = jax.devices()[0]
    return {
        "videodiff": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
    }


def peak_memory_gib() -> float:
    """Peak resident memory of this process so far, GiB."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss starts at the peak of the process that forked this one
        line = next((x for x in status.read_text().splitlines() if x.startswith("VmHWM")), None)
        if line:
            return round(int(line.split()[1]) / 2**20, 3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 2**30 if sys.platform == "darwin" else peak / 2**20, 3)


def step_report(record: StepRecord, kernels: Mapping[float, str], executed: Mapping[float, float]) -> dict[str, Any]:
    """One step.

    Args:
      record: of the loop.
      kernels: density -> name of the attention that ran it.
      executed: requested density -> executed density.
    """
    routes = np.asarray(record.stats.route)  # [layers, B, H]
    errors = np.asarray(record.stats.error)
    layers = []
    for i, density in enumerate(record.plan.densities):
        layer: dict[str, Any] = {
            "kernel": kernels[density],
            "density": density,
            "executed_density": executed[density],
            "routes": ["".join(LETTER[int(r)] for r in row) for row in routes[i]],
        }
        if (routes[i] != ROUTE_DENSE).any():
            layer["routing_error"] = [[round(float(e), 6) for e in row] for row in errors[i]]
        layers.append(layer)
    return {
        "step": record.step,
        "timestep": record.timestep,
        "sigma": round(record.sigma, 7),
        "seconds": round(record.seconds, 4),
        "compile_s": round(record.compile_s, 4),
        "guided": record.plan.guided,
        "layers": layers,
    }


def attention_summary(
    records: Sequence[StepRecord], kernels: Mapping[float, str], executed: Mapping[float, float]
) -> dict[str, Any]:
    """Densities over the whole run: what was asked for, what was executed, how heads were routed."""
    asked = [d for r in records for d in r.plan.densities]
    done = [executed[d] for d in asked]
    routes = np.concatenate([np.asarray(r.stats.route).ravel() for r in records]) if records else np.array([])
    errors = np.concatenate([np.asarray(r.stats.error).ravel() for r in records]) if records else np.array([])
    sparse = routes != ROUTE_DENSE
    out: dict[str, Any] = {
        "kernels": {f"{d:g}": k for d, k in kernels.items()},
        "executed_density": {f"{d:g}": round(e, 6) for d, e in executed.items()},
        "mean_density": round(float(np.mean(asked)), 6) if asked else None,
        "mean_executed_density": round(float(np.mean(done)), 6) if done else None,
        "share_spatial": round(float((routes[sparse] == ROUTE_SPATIAL).mean()), 4) if sparse.any() else None,
        "share_temporal": round(float((routes[sparse] == ROUTE_TEMPORAL).mean()), 4) if sparse.any() else None,
        "routing_error_mean": round(float(errors[sparse].mean()), 6) if sparse.any() else None,
        "routing_error_max": round(float(errors[sparse].max()), 6) if sparse.any() else None,
    }
    return out
