"""From the words for a size to pixels, latents and tokens.

Owns: names of sizes, which sizes a model can make, and at which smaller size a large video is sampled first. Does not own: the
arithmetic of a size (`grid`), the other options (`request`).
Invariant: an illegal size is refused with legal ones beside it. Imports no jax.
"""

from __future__ import annotations

import itertools
import re

from videodiff.errors import closest
from videodiff.grid import VideoGeometry
from videodiff.known import ModelInfo
from videodiff.schedule import resolution_sizes

BASE_STRETCH = 1.1  # how far the shape of base_res may be from the video's
BASE_SAVES = 1.5  # a base is taken by itself where the video has this many times its tokens


def parse_size(text: str) -> tuple[int, int]:
    """ "1280x720" or "1280*720" -> (height, width).

    Raises:
      ValueError: another form.
    """
    found = re.fullmatch(r"\s*(\d+)\s*[x*×]\s*(\d+)\s*", str(text), re.IGNORECASE)
    if not found:
        raise ValueError(f"size={text!r} must be WIDTHxHEIGHT in pixels, for example 1280x720 or 1280*720")
    return int(found[2]), int(found[1])


def _named(word: str, option: str, extra: tuple[str, ...] = ()) -> tuple[int, int]:
    """Height and width of a name or of WIDTHxHEIGHT."""
    sizes = resolution_sizes()
    if word in sizes:
        return sizes[word]
    if word[:1].isdigit() and re.search(r"[x*×]", word, re.IGNORECASE):
        return parse_size(word)
    raise ValueError(f"{option}={word!r} is unknown; {closest(word, (*extra, *sizes))} WIDTHxHEIGHT works too")


def video_geometry(
    info: ModelInfo, height: int | None, width: int | None, res: str | None, num_frames: int | None
) -> tuple[VideoGeometry, str]:
    """The sizes of a video, and the name of its resolution ("" when it has none).

    Args:
      info: of the model; its defaults fill what is None.
      height, width: pixels, both or neither.
      res: a name or WIDTHxHEIGHT, instead of them.
      num_frames: frames.

    Raises:
      ValueError: an unknown name, an illegal size or frame count (naming the nearest legal ones), too many positions.
    """
    if height is None or width is None:
        height, width = _named(str(info.resolution if res is None else res), "res")
    sizes = resolution_sizes()
    name = next((n for n, s in sizes.items() if s in ((height, width), (width, height))), "")
    multiple = info.layout.size_multiple_px
    if not name and (height % multiple or width % multiple):
        raise ValueError(_illegal_size(height, width, multiple, info.name))
    frames = info.num_frames if num_frames is None else num_frames
    geometry = VideoGeometry(int(height), int(width), int(frames), info.layout)
    grid, limit = geometry.token_grid, info.transformer.rope_max_seq_len
    if max(grid.frames, grid.rows, grid.cols) > limit:
        raise ValueError(
            f"{width}x{height} with {geometry.num_frames} frames is {grid.frames} x {grid.rows} x {grid.cols} tokens; "
            f"{info.name} has positions for at most {limit} along each axis"
        )
    return geometry, name


def base_geometry(info: ModelInfo, video: VideoGeometry, base_res: str) -> VideoGeometry | None:
    """The smaller size that is sampled first, or None where the final size is sampled directly.

    Args:
      info: of the model.
      video: the final size.
      base_res: "auto" is the model's rule: its short side, the video's shape, where the video has BASE_SAVES times the tokens;
        "none"; or a size, turned as the video is.

    Raises:
      ValueError: an unknown name, or a size that is illegal, not smaller, or of another shape.
    """
    multiple = info.layout.size_multiple_px
    if base_res == "none" or (base_res == "auto" and not info.base_side):
        return None
    if base_res == "auto":
        scale = info.base_side / min(video.height, video.width)
        height, width = (max(1, round(px * scale / multiple)) * multiple for px in (video.height, video.width))
        base = VideoGeometry(height, width, video.num_frames, video.layout)
        return base if BASE_SAVES * base.token_grid.tokens <= video.token_grid.tokens else None
    height, width = _named(base_res, "base_res", ("auto", "none"))
    if base_res in resolution_sizes() and (video.height > video.width) != (height > width):
        height, width = width, height
    if height > video.height or width > video.width or (height, width) == (video.height, video.width):
        raise ValueError(f"base_res={width}x{height} must be smaller than the video, {video.width}x{video.height}")
    ratio = (width / height) / (video.width / video.height)
    if not 1 / BASE_STRETCH <= ratio <= BASE_STRETCH:
        raise ValueError(
            f"base_res={width}x{height} has another shape than the video, {video.width}x{video.height}: enlarging would stretch "
            f"it by {max(ratio, 1 / ratio):.2f}; at most {BASE_STRETCH} is allowed"
        )
    if base_res not in resolution_sizes() and (height % multiple or width % multiple):
        raise ValueError("base_res: " + _illegal_size(height, width, multiple, info.name))
    return VideoGeometry(height, width, video.num_frames, video.layout)


def _illegal_size(height: int, width: int, multiple: int, model: str) -> str:
    def near(px: int) -> list[int]:
        low = px // multiple * multiple
        return [n for n in ((low,) if low == px else (low, low + multiple)) if n > 0]

    legal = [f"{w}x{h}" for w, h in itertools.product(near(width), near(height))]
    return (
        f"width={width}, height={height} must be multiples of {multiple} for {model}; the nearest legal sizes are "
        f"{', '.join(legal)}; any size of {', '.join(resolution_sizes())} works too"
    )
