"""Write models.npz: outputs of diffusers 0.42.1 on tiny reproducible checkpoints, and the published tensor shapes.

Needs the parity extra. Run from the repository root: python tests/goldens/make_models.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import models_support as support

FRAMES = {"plain": 9, "residual": 5, "patch4": 9}


def reference(config):
    """diffusers' module with the weights of `support.weights`, loaded strictly."""
    kind = WanTransformer3DModel if isinstance(config, support.TransformerConfig) else AutoencoderKLWan
    model = kind.from_config(config.to_json()).eval()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in support.weights(config).items()})
    return model


def first(x: np.ndarray) -> torch.Tensor:
    """Channels last -> channels first."""
    return torch.from_numpy(x).permute(0, 4, 1, 2, 3)


def last(x: torch.Tensor) -> np.ndarray:
    return x.permute(0, 2, 3, 4, 1).contiguous().numpy()


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    published = {}
    with torch.no_grad():
        for name, config in support.TRANSFORMERS.items():
            latents, t, text = support.transformer_inputs(name)
            out = reference(config)(first(latents), torch.from_numpy(t), torch.from_numpy(text)).sample
            arrays[f"transformer_{name}"] = last(out)
        for name, config in support.VAES.items():
            model, frames = reference(config), FRAMES[name]
            posterior = model.encode(first(support.video(name, frames))).latent_dist
            arrays[f"vae_{name}_mean"], arrays[f"vae_{name}_logvar"] = last(posterior.mean), last(posterior.logvar)
            arrays[f"vae_{name}_video"] = last(model.decode(first(support.raw_latents(name, frames))).sample)
            clamped = (np.abs(arrays[f"vae_{name}_video"]) >= 1).mean()
            print(name, f"{clamped=:.3f}", arrays[f"vae_{name}_video"].std())
            assert clamped < 0.05
        for name, (config, *_) in support.PUBLISHED.items():
            kind = WanTransformer3DModel if isinstance(config, support.TransformerConfig) else AutoencoderKLWan
            with torch.device("meta"):
                state = kind.from_config(config.to_json()).state_dict()
            published[name] = {key: list(tensor.shape) for key, tensor in sorted(state.items())}
    assert all(np.isfinite(a).all() for a in arrays.values())
    arrays["published"] = np.frombuffer(json.dumps(published, separators=(",", ":")).encode(), np.uint8)
    path = support.GOLDENS / "models.npz"
    np.savez_compressed(path, **arrays)
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
