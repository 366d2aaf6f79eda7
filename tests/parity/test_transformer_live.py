"""The transformer and its key table against diffusers' WanTransformer3DModel, live."""

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

from videodiff.attention.api import AttentionSpec, make_attend  # noqa: E402
from videodiff.configs import TransformerConfig  # noqa: E402
from videodiff.grid import TokenGrid  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import models_support as support  # noqa: E402


@pytest.mark.parametrize("name", support.TRANSFORMERS)
def test_velocity(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel.from_config(support.TRANSFORMERS[name].to_json()).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    config = TransformerConfig.from_json(json.loads((tmp_path / "config.json").read_text()))
    assert config == support.TRANSFORMERS[name]
    ours = support.load(tmp_path, config)
    latents, t, text = support.transformer_inputs(name)
    with torch.no_grad():
        x = torch.from_numpy(latents).permute(0, 4, 1, 2, 3)
        want = model(x, torch.from_numpy(t), torch.from_numpy(text)).sample.permute(0, 2, 3, 4, 1).numpy()
    _, f, y, x, _ = latents.shape
    attend = make_attend("dense", AttentionSpec(TokenGrid(f, y // 2, x // 2), head_dim=config.attention_head_dim))
    got = jax.jit(lambda m, a, t, c: m(a, t, m.encode_context(c), attend))(ours, latents, t, text)
    assert support.relative_l2(got, want) <= 1e-5
    if len(t) > 1:
        assert support.relative_l2(want[0], want[1]) > 0.1  # neither timestep nor text is lost


@pytest.mark.parametrize("name", support.PUBLISHED)
def test_published_key_tables(name: str) -> None:
    config, tensors, parameters = support.PUBLISHED[name]
    transformer = isinstance(config, TransformerConfig)
    kind = diffusers.WanTransformer3DModel if transformer else diffusers.AutoencoderKLWan
    with torch.device("meta"):
        state = kind.from_config(config.to_json()).state_dict()
    assert support.source_shapes(config) == {k: tuple(t.shape) for k, t in state.items()}
    assert len(state) == tensors
    assert sum(int(np.prod(t.shape)) for t in state.values()) == parameters
