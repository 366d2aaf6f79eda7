"""Finished latents on disk: written before decoding, so that decoding can be run again alone.

Owns: the file format. Does not own: decoding, runs that are not finished (`sampling.loop`).
Invariant: a file holds everything decoding needs: latents, the promised size, fps, the model, and the container's metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from videodiff.files import atomic_path

FORMAT = "videodiff.latents.1"


@dataclass(frozen=True)
class SavedLatents:
    """Denoised latents with what decoding needs.

    Args:
      latents: [B, C, F, Y, X] float32, normalised, in the published channels-first layout.
      height, width: promised pixels; the decoded frames are cropped to them.
      fps: frames a second.
      model: known name or folder of the model that made them.
      prompts, seeds: one a video.
      metadata: the container's metadata.
    """

    latents: np.ndarray
    height: int
    width: int
    fps: float
    model: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file whole or not at all.

        Raises:
          OSError: no space, or no right to write there.
        """
        target = Path(path)
        about = {
            "height": self.height,
            "width": self.width,
            "fps": self.fps,
            "model": self.model,
            "prompts": list(self.prompts),
            "seeds": list(self.seeds),
            "metadata": dict(self.metadata),
        }
        with atomic_path(target) as partial:
            tensors = {"latents": np.ascontiguousarray(self.latents, np.float32)}
            try:
                save_file(tensors, partial, {"format": FORMAT, "about": json.dumps(about, ensure_ascii=False)})
            except SafetensorError as error:
                raise OSError(
                    f"{target} cannot be written: {error}; free space there, or choose another place"
                ) from None
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SavedLatents:
        """Read what :meth:`save` wrote.

        Raises:
          FileNotFoundError: no such file.
          ValueError: damaged, of another kind, or not finite.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no latents at {path}")
        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(
                        f"{path} does not hold finished latents (format {metadata.get('format')!r}, expected {FORMAT!r}); "
                        f"an interrupted run is resumed with `videodiff generate --resume`"
                    )
                latents = file.get_tensor("latents")
                about = json.loads(metadata["about"])
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged and cannot be decoded: {error}") from error
        if not np.isfinite(latents).all():
            raise ValueError(f"{path} holds NaN or infinity; generate it again")
        return cls(
            latents=latents,
            height=int(about["height"]),
            width=int(about["width"]),
            fps=float(about["fps"]),
            model=str(about["model"]),
            prompts=tuple(about["prompts"]),
            seeds=tuple(about["seeds"]),
            metadata=about["metadata"],
        )
