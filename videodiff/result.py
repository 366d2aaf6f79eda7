"""What a generation returns: frames, how to save them, and the run report.

Owns: the result object, the file names beside a video, the JSON report on disk. Does not own: encoding (`media`), what goes
into the report (`pipeline`). Invariant: `save` writes every file whole or not at all, and never changes the frames.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from videodiff import media
from videodiff.files import atomic_path


def sibling(path: Path, index: int, count: int) -> Path:
    """The file of video ``index`` of ``count``: ``name.mp4``, or ``name_000.mp4`` ... when there are several."""
    return path if count == 1 else path.with_name(f"{path.stem}_{index:03d}{path.suffix}")


def write_json(path: Path, data: Any) -> None:
    """Write JSON, whole or not at all."""
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(data, indent=1, ensure_ascii=False, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a report cannot hold {type(value).__name__}")


@dataclass
class Result:
    """The videos of one call.

    Attributes:
      frames: uint8 [batch, frames, height, width, 3]; float32 in [0, 1] of the same shape for ``output_type="np"``; float32
        [batch, channels, frames, rows, columns] latents for ``output_type="latent"``.
      fps: frames a second.
      output_type: "uint8", "np" or "latent".
      prompts: one a video.
      seeds: one a video.
      report: everything that happened, as plain JSON types.
      metadata: what the container carries, enough to repeat the run.
      latents_path: where the latents were saved before decoding, if they were.
    """

    frames: np.ndarray
    fps: float
    output_type: str
    prompts: Sequence[str]
    seeds: Sequence[int]
    report: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    latents_path: Path | None = None

    def uint8_frames(self) -> np.ndarray:
        """uint8 [batch, frames, height, width, 3].

        Raises:
          ValueError: the result holds latents.
        """
        if self.output_type == "latent":
            raise ValueError('output_type="latent" has no frames; generate with output_type="uint8" or "np"')
        return self.frames if self.frames.dtype == np.uint8 else media.to_uint8(self.frames)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        quality: int | None = None,
        gif: bool = False,
        frames_dir: str | os.PathLike[str] | None = None,
        contact_sheet: bool = False,
        report: bool = True,
    ) -> list[Path]:
        """Write every video, with its report beside it.

        Args:
          path: an .mp4 (or .gif) path; several videos become ``name_000.mp4`` and so on.
          quality: x264 constant rate factor, 0 (lossless) to 51; None takes media's default.
          gif: also write a .gif of the same name.
          frames_dir: also write PNG frames there.
          contact_sheet: also write ``name.png``, one row of frames a video.
          report: also write ``name.json``.

        Returns:
          The files written, videos first.

        Raises:
          ValueError: the result holds latents, or the suffix is unknown.
          OSError: the place cannot be written; files written before stay whole.
        """
        clips = self.uint8_frames()
        path = Path(path)
        if path.suffix.lower() not in (".mp4", ".gif"):
            raise ValueError(f"output_path={str(path)!r} must end in .mp4 or .gif")
        path.parent.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []
        for i, clip in enumerate(clips):
            target = sibling(path, i, len(clips))
            extra = {"prompt": self.prompts[i], "seed": self.seeds[i]}
            if target.suffix.lower() == ".gif":
                media.write_gif(target, clip, fps=self.fps)
            else:
                options = {} if quality is None else {"quality": quality}
                media.write_mp4(target, clip, fps=self.fps, metadata={**self.metadata, **extra}, **options)
            written.append(target)
        for i, clip in enumerate(clips):
            target = sibling(path, i, len(clips))
            if gif and target.suffix.lower() != ".gif":
                media.write_gif(target.with_suffix(".gif"), clip, fps=self.fps)
                written.append(target.with_suffix(".gif"))
            if frames_dir is not None:
                folder = Path(frames_dir) if len(clips) == 1 else Path(frames_dir) / f"{i:03d}"
                media.write_frames(folder, clip)
                written.append(folder)
        if contact_sheet:
            media.write_contact_sheet(path.with_suffix(".png"), list(clips), captions=list(self.prompts))
            written.append(path.with_suffix(".png"))
        if report:
            write_json(path.with_suffix(".json"), self.report)
            written.append(path.with_suffix(".json"))
        return written
