"""The shipped model in diffusers' own WanPipeline: the same folder and noise give the same video, >= 50 dB."""

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from videodiff.pipeline import Pipeline  # noqa: E402
from videodiff.resources import shipped_model  # noqa: E402


def test_same_video():
    theirs = diffusers.WanPipeline.from_pretrained(shipped_model(), torch_dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    ours = Pipeline.from_pretrained()
    noise = np.random.default_rng(0).normal(size=(1, 16, 3, 12, 12)).astype(np.float32)
    size = {"height": 192, "width": 192, "num_frames": 9, "num_inference_steps": 6, "guidance_scale": 4.0}
    prompt = "a big red ball bounces over a green meadow"
    a = theirs(prompt=prompt, negative_prompt="", latents=torch.tensor(noise), output_type="np", **size).frames
    b = ours.generate(prompt, negative_prompt="", latents=noise, output_type="np", seed=0, **size).frames
    assert a.shape == b.shape
    assert a.std() > 0.05
    assert -10 * np.log10(np.mean((a.astype(np.float64) - b) ** 2)) >= 50


def test_same_tokens():
    theirs = diffusers.WanPipeline.from_pretrained(shipped_model(), torch_dtype=torch.float32).tokenizer
    ours = Pipeline.from_pretrained().tokenizer
    for text in ("A big, red ball bounces!", "two unknown zebras in the snow", "Under the stars there is a star"):
        ids = ours([text], 512).ids[0]
        assert list(ids[ids != ours.pad_id]) == theirs(text).input_ids
