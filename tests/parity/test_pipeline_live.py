"""The whole pipeline against diffusers' WanPipeline: same folder, same initial noise, video PSNR >= 60 dB on float output."""

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from tests.support.models import make_folder  # noqa: E402
from videodiff.pipeline import Pipeline  # noqa: E402

CASES = {
    "residual": {"folder": {"residual": True}, "height": 48, "width": 64, "frames": 5},
    "plain": {
        "folder": {"residual": False, "heads": 3, "layers": 1, "seed": 5},
        "height": 32,
        "width": 48,
        "frames": 9,
    },
    "one frame": {
        "folder": {"residual": True, "heads": 1, "head_dim": 32, "seed": 9},
        "height": 80,
        "width": 48,
        "frames": 1,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            path = make_folder(tmp_path_factory.mktemp("models") / name.replace(" ", "_"), **CASES[name]["folder"])
            theirs = diffusers.WanPipeline.from_pretrained(path, torch_dtype=torch.float32)
            theirs.set_progress_bar_config(disable=True)
            made[name] = (theirs, Pipeline.from_pretrained(path))
        return made[name]

    return get


def psnr(a, b):
    return -10 * np.log10(np.mean((a.astype(np.float64) - b) ** 2))


@pytest.mark.parametrize(
    ("case", "solver", "steps", "guidance"),
    [
        ("residual", "unipc", 5, 5.0),
        ("residual", "euler", 4, 5.0),
        ("residual", "unipc", 8, 1.0),
        ("plain", "unipc", 4, 4.0),
        ("plain", "euler", 6, 1.0),
        ("one frame", "unipc", 4, 3.0),
    ],
)
def test_same_video(folders, case, solver, steps, guidance):
    theirs, ours = folders(case)
    spec = CASES[case]
    size = {"height": spec["height"], "width": spec["width"], "num_frames": spec["frames"]}
    if solver == "euler":
        theirs.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    elif not isinstance(theirs.scheduler, diffusers.UniPCMultistepScheduler):
        theirs.scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(ours.folder.path / "scheduler")
    latent = (
        1,
        ours.info.layout.latent_channels,
        (spec["frames"] - 1) // 4 + 1,
        spec["height"] // 8,
        spec["width"] // 8,
    )
    noise = np.random.default_rng(steps).normal(size=latent).astype(np.float32)
    common = {"num_inference_steps": steps, "guidance_scale": guidance, "output_type": "np", **size}
    a = theirs(prompt="a red ball", negative_prompt="the grass", latents=torch.tensor(noise), **common).frames
    # their pipeline calls the Euler scheduler without sigmas, which shifts the last one twice
    name = {"euler": "euler_twice"}.get(solver, solver)
    b = ours.generate(
        "a red ball", negative_prompt="the grass", latents=noise, flow_shift=3.0, solver=name, seed=0, **common
    )
    assert a.shape == b.frames.shape
    assert a.std() > 0.05, "a constant video would prove nothing"
    assert psnr(a, b.frames) >= 60
    assert b.report["sampling"]["evaluations"] == steps
