"""The VAE against diffusers' AutoencoderKLWan, live: both forms, several lengths."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from videodiff.configs import VaeConfig  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import models_support as support  # noqa: E402

RUN = jax.jit(lambda m, video, z: (*m.encode(video), m.decode(z)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = {}

    def get(name: str):
        if name not in made:
            torch.manual_seed(0)
            model = diffusers.AutoencoderKLWan.from_config(support.VAES[name].to_json()).eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.05 * torch.randn_like(p))
                model.decoder.conv_out.weight.mul_(0.2)
                model.decoder.conv_out.bias.mul_(0.2)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            config = VaeConfig.from_json(json.loads((folder / "config.json").read_text()))
            assert config == support.VAES[name]
            made[name] = model, support.load(folder, config)
        return made[name]

    return get


@pytest.mark.parametrize("frames", [1, 5, 9])
@pytest.mark.parametrize("name", support.VAES)
def test_encode_and_decode(name: str, frames: int, pair) -> None:
    theirs, ours = pair(name)
    video, z = support.video(name, frames), support.raw_latents(name, frames)
    with torch.no_grad():
        posterior = theirs.encode(torch.from_numpy(video).permute(0, 4, 1, 2, 3)).latent_dist
        decoded = theirs.decode(torch.from_numpy(z).permute(0, 4, 1, 2, 3)).sample
    mean, logvar, decoding = (a.permute(0, 2, 3, 4, 1).numpy() for a in (posterior.mean, posterior.logvar, decoded))
    got = [np.asarray(a) for a in RUN(ours, video, z)]
    assert (np.abs(decoding) >= 1).mean() < 0.1  # else the clamp hides what is compared
    assert decoding.std() > 0.02
    assert support.relative_l2(got[0], mean) <= 1e-5
    assert support.relative_l2(got[1], logvar) <= 1e-5
    assert support.relative_l2(np.clip(got[2], -1, 1), decoding) <= 1e-5
    assert got[2].shape[1] == frames
