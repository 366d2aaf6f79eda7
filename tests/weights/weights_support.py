"""Small checkpoints on disk for the tests of this room: a toy model with one parameter of every layout."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from videodiff.weights.keys import KeyRule, Layout

LAYERS, IN, OUT = 3, 5, 7


class Blocks(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.zeros((LAYERS, IN, OUT)))
        self.bias = nnx.Param(jnp.zeros((LAYERS, OUT)))


class Toy(nnx.Module):
    """Every layout once, a stack, and an embedding with an alias."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.gamma = nnx.Param(jnp.zeros((4,)))
        self.video_conv = nnx.Param(jnp.zeros((3, 2, 2, 5, 6)))
        self.image_conv = nnx.Param(jnp.zeros((2, 3, 5, 6)))
        self.embed = nnx.Param(jnp.zeros((11, 4)))
        self.heads = nnx.List([nnx.Param(jnp.zeros((2,)))])


RULES = [
    KeyRule(("blocks", "kernel"), tuple(f"blocks.{i}.weight" for i in range(LAYERS)), Layout.LINEAR),
    KeyRule(("blocks", "bias"), tuple(f"blocks.{i}.bias" for i in range(LAYERS))),
    KeyRule(("gamma",), ("norm.gamma",), Layout.FLATTEN_GAMMA, trailing_ones=2),
    KeyRule(("video_conv",), ("video.weight",), Layout.CONV3D),
    KeyRule(("image_conv",), ("image.weight",), Layout.CONV2D),
    KeyRule(("embed",), ("shared.weight",), aliases=("encoder.embed_tokens.weight",)),
    KeyRule(("heads", 0), ("heads.0",)),
]


def toy_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors in the toy's checkpoint layout, of all three dtypes."""
    r = np.random.default_rng(seed)
    shapes = {f"blocks.{i}.weight": (OUT, IN) for i in range(LAYERS)}
    shapes |= {f"blocks.{i}.bias": (OUT,) for i in range(LAYERS)}
    shapes |= {"norm.gamma": (4, 1, 1), "video.weight": (6, 5, 3, 2, 2), "image.weight": (6, 5, 2, 3)}
    shapes |= {"shared.weight": (11, 4), "heads.0": (2,)}
    dtypes = {"image.weight": np.float16, "video.weight": ml_dtypes.bfloat16}
    return {n: r.normal(size=s).astype(dtypes.get(n, np.float32)) for n, s in shapes.items()}


def write_toy(folder: Path, base: str = "model", seed: int = 0, **replaced: np.ndarray | None) -> Path:
    """Write the toy's file; ``replaced`` changes a tensor (dots as double underscores), None leaves it out."""
    changes = {k.replace("__", "."): v for k, v in replaced.items()}
    tensors = {n: t for n, t in (toy_tensors(seed) | changes).items() if t is not None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"{base}.safetensors", metadata={"format": "pt"})
    return folder
