"""Pixel size <-> latent grid <-> tokens, and the two token orders with their inverses.

Owns: what token ``i`` means, how a frame-major sequence is reordered to token-major and back, and which pixel
sizes are legal for a model. Does not own: patterns, tiles, devices.
Invariant: for every grid, ``to_frame_major(to_token_major(x)) == x``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np


class TokenOrder(enum.Enum):
    """How the tokens of a video are laid out in a sequence."""

    FRAME_MAJOR = "frame_major"  # i = f * P + p, Wan's native order
    TOKEN_MAJOR = "token_major"  # j = p * F + f


@dataclass(frozen=True)
class TokenGrid:
    """The grid of transformer tokens: F frames of Y rows by X columns.

    Args:
      frames: latent frames F >= 1.
      rows: patch rows Y >= 1.
      cols: patch columns X >= 1.

    Raises:
      ValueError: when any extent is below 1.
    """

    frames: int
    rows: int
    cols: int

    def __post_init__(self) -> None:
        if min(self.frames, self.rows, self.cols) < 1:
            raise ValueError(
                f"every extent of a token grid must be at least 1, got {self.frames=}, {self.rows=}, {self.cols=}"
            )

    @property
    def patches(self) -> int:
        """P, tokens per latent frame."""
        return self.rows * self.cols

    @property
    def tokens(self) -> int:
        """N, tokens of the whole video."""
        return self.frames * self.patches

    def token_major_gather(self) -> np.ndarray:
        """[N] int32 such that ``x_tm = x_fm[gather]``."""
        j = np.arange(self.tokens, dtype=np.int32)
        return (j % self.frames) * np.int32(self.patches) + j // self.frames

    def frame_major_gather(self) -> np.ndarray:
        """[N] int32 such that ``x_fm = x_tm[gather]``; the inverse of :meth:`token_major_gather`."""
        i = np.arange(self.tokens, dtype=np.int32)
        return (i % self.patches) * np.int32(self.frames) + i // self.patches


@dataclass(frozen=True)
class LatentLayout:
    """How pixels become latents and tokens for one model.

    Args:
      spatial_factor: pixels per latent column or row (8 for the Wan 2.1 VAE, 16 for 2.2 and the shipped model).
      temporal_factor: pixel frames per latent frame after the first (4).
      patch: transformer patch (frames, rows, columns) in latents; (1, 2, 2) for every Wan model.
      latent_channels: channels of a latent.
    """

    spatial_factor: int
    temporal_factor: int
    patch: tuple[int, int, int]
    latent_channels: int

    @property
    def size_multiple_px(self) -> int:
        """Pixel sizes must be multiples of this: one token's edge."""
        return self.spatial_factor * self.patch[1]


@dataclass(frozen=True)
class VideoGeometry:
    """One request's sizes from pixels to tokens.

    Args:
      height, width: promised pixels of the file.
      num_frames: pixel frames, temporal_factor * k + 1.
      layout: the model's :class:`LatentLayout`.

    ``height`` and ``width`` need not be multiples of the token edge: the video is computed at the next
    multiple (``computed_height``, ``computed_width``) and cropped at the bottom and right. The request layer
    decides which sizes may be cropped; this class only does the arithmetic.

    Raises:
      ValueError: illegal frame count, naming the nearest legal ones.
    """

    height: int
    width: int
    num_frames: int
    layout: LatentLayout

    def __post_init__(self) -> None:
        t = self.layout.temporal_factor
        if self.height < 1 or self.width < 1:
            raise ValueError(f"height and width must be positive, got {self.height=}, {self.width=}")
        if self.num_frames < 1 or (self.num_frames - 1) % t:
            low = max(0, (self.num_frames - 1) // t) * t + 1
            near = [low, low + t] if low < self.num_frames else [low]
            raise ValueError(
                f"num_frames={self.num_frames} must be {t}k+1; the nearest legal counts are "
                f"{' and '.join(map(str, near))}"
            )

    def _up(self, px: int) -> int:
        m = self.layout.size_multiple_px
        return -(-px // m) * m

    @property
    def computed_height(self) -> int:
        return self._up(self.height)

    @property
    def computed_width(self) -> int:
        return self._up(self.width)

    @property
    def latent_frames(self) -> int:
        return 1 + (self.num_frames - 1) // self.layout.temporal_factor

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(F, rows, columns, channels) of the channels-last latent of one video."""
        s = self.layout.spatial_factor
        return (
            self.latent_frames,
            self.computed_height // s,
            self.computed_width // s,
            self.layout.latent_channels,
        )

    @property
    def token_grid(self) -> TokenGrid:
        f, y, x, _ = self.latent_shape
        pf, py, px = self.layout.patch
        return TokenGrid(f // pf, y // py, x // px)
