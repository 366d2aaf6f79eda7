"""Write sampling.npz: sigma grids and solver trajectories of diffusers 0.42.1.

Needs the parity extra. Run from the repository root: python tests/goldens/make_sampling.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
NOISE = np.random.default_rng(2).standard_normal((1, 2, 3, 2, 4)).astype(np.float32)
SHIFTS = (1.0, 3.0, 5.0, 12.0)
STEPS = (1, 2, 3, 4, 8, 20, 50)
CORRECTOR_OFF = (0, 1, 2)


def field(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The nonlinear velocity the tests repeat in JAX."""
    return torch.tanh(1.3 * x + 0.7 * sigma) - 0.4 * x * sigma + 0.3 * torch.cos(2 * x)


def trajectory(scheduler) -> np.ndarray:
    """Latents after every step, [n, ...] float32."""
    scheduler.set_begin_index(0)
    x, out = torch.from_numpy(NOISE), []
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(field(x, scheduler.sigmas[i]), t, x, return_dict=False)[0]
        out.append(x.numpy())
    result = np.stack(out)
    assert np.isfinite(result).all()
    return result


def kept(states: np.ndarray) -> np.ndarray:
    """All states of short runs, every tenth and the last of long ones."""
    return states if len(states) <= 8 else states[[*range(9, len(states) - 1, 10), -1]]


def unipc(steps: int, shift: float, order: int, variant: str, **more) -> UniPCMultistepScheduler:
    scheduler = UniPCMultistepScheduler(**FLOW, flow_shift=shift, solver_order=order, solver_type=variant, **more)
    scheduler.set_timesteps(steps)
    if variant == "bh1":
        scheduler.sigmas[-1] = 1e-30  # at exactly 0 the class computes inf * 0; this is its limit
    return scheduler


def dpmpp(steps: int, shift: float, order: int) -> DPMSolverMultistepScheduler:
    scheduler = DPMSolverMultistepScheduler(**FLOW, flow_shift=shift, solver_order=order)
    scheduler.set_timesteps(steps)
    return scheduler


def euler(steps: int, shift: float, twice: bool) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    if twice:
        scheduler.set_timesteps(steps)
    else:
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist())
    return scheduler


def main() -> None:
    out: dict[str, np.ndarray] = {"noise": NOISE}
    for shift in SHIFTS:
        for n in STEPS:
            grids = {
                "unipc": unipc(n, shift, 2, "bh2"), "dpm++": dpmpp(n, shift, 2),
                "euler": euler(n, shift, False), "euler_twice": euler(n, shift, True),
            }  # fmt: skip
            for name, scheduler in grids.items():
                out[f"grid/{name}/{n}/{shift:g}/sigmas"] = scheduler.sigmas.numpy()
                out[f"grid/{name}/{n}/{shift:g}/timesteps"] = scheduler.timesteps.numpy()
                if name.startswith("euler"):
                    out[f"run/{name}/0/-/{n}/{shift:g}"] = kept(trajectory(scheduler))
            for order in (1, 2, 3):
                for variant in ("bh1", "bh2"):
                    states = kept(trajectory(unipc(n, shift, order, variant)))
                    out[f"run/unipc/{order}/{variant}/{n}/{shift:g}"] = states
            for order in (1, 2):
                out[f"run/dpm++/{order}/-/{n}/{shift:g}"] = kept(trajectory(dpmpp(n, shift, order)))
    off = unipc(8, 3.0, 2, "bh2", disable_corrector=list(CORRECTOR_OFF))
    out["corrector_off"] = trajectory(off)
    path = Path(__file__).with_name("sampling.npz")
    np.savez_compressed(path, **out)
    print(f"{path}: {len(out)} arrays, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
