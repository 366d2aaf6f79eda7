"""Frames -> files: mp4, gif, PNG frames, contact sheets, with colour tags and the metadata that repeats a run.

Owns: the float -> uint8 rule, colour conversion, file formats. Does not own: which files a
run writes (`result`), judging frames (`metrics`). Invariant: a file appears under its name complete, or not at all and
the call raises; a video has exactly the size, frame count and rate it was given.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from videodiff.files import atomic_path

QUALITY = 17  # x264 constant rate factor; visually close to lossless
PathLike = str | os.PathLike[str]

# Tags of ITU-R BT.709, limited ("tv") range: what every player assumes of HD video.
_TAGS = "color_primaries=bt709:color_trc=bt709:colorspace=bt709:range=tv"
# Without accurate_rnd swscale truncates; without full_chroma_inp it drops every second pixel's chroma.
_SCALE = (
    "scale=flags=bicubic+accurate_rnd+full_chroma_int+full_chroma_inp:in_range=pc:out_range=tv:out_color_matrix=bt709"
)
_NO_FFMPEG = (
    "no ffmpeg program was found, which writing mp4 needs; install one with `pip install imageio-ffmpeg` or your "
    "system's package manager, or name one in the environment variable IMAGEIO_FFMPEG_EXE"
)


def to_uint8(frames: np.ndarray) -> np.ndarray:
    """Float frames in [0, 1] -> uint8: clip, times 255, round to nearest (ties to even, as diffusers rounds).

    Args:
      frames: [..., height, width, 3], any float dtype.

    Raises:
      ValueError: not float, or a value is not finite.
    """
    frames = np.asarray(frames)
    if frames.dtype.kind != "f" and frames.dtype.name != "bfloat16":
        raise ValueError(f"frames must be float in [0, 1], got {frames.dtype}")
    out = np.empty(frames.shape, np.uint8)
    flat_in = frames.reshape(-1, *frames.shape[-3:]) if frames.ndim > 3 else frames[None]
    flat_out = out.reshape(flat_in.shape)
    for i, frame in enumerate(flat_in):  # one frame of float32 at a time
        x = frame.astype(np.float32)
        if not np.isfinite(x).all():
            raise ValueError(f"frame {i} holds {int((~np.isfinite(x)).sum())} values that are not finite")
        flat_out[i] = np.rint(np.clip(x, 0, 1) * np.float32(255))
    return out


def check_writable(path: PathLike) -> None:
    """Find out before a long run whether ``path`` can be written; leaves nothing behind.

    Raises:
      OSError: ``path`` is a folder, or its folder cannot be written or made.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"output {str(path)!r} is a folder; give a file name in it, for example out.mp4")
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # missing folders are made when the file is written
    if not folder.is_dir():
        raise NotADirectoryError(f"output {str(path)!r} cannot be written: {str(folder)!r} is not a folder")
    try:
        if folder == path.absolute().parent:
            descriptor, name = tempfile.mkstemp(dir=folder, prefix=".videodiff-")
            os.close(descriptor)
            os.unlink(name)
        else:
            os.rmdir(tempfile.mkdtemp(dir=folder, prefix=".videodiff-"))
    except OSError as e:
        raise type(e)(
            e.errno, f"output {str(path)!r} cannot be written: {e.strerror} in {str(folder)!r}; choose another path"
        ) from e


def _checked(frames: np.ndarray) -> np.ndarray:
    frames = np.asarray(frames)
    if frames.dtype != np.uint8:
        raise ValueError(f"frames must be uint8, got {frames.dtype}; media.to_uint8 converts floats in [0, 1]")
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames must be [frames, height, width, 3] and not empty, got {frames.shape}")
    return frames


def _rate(fps: float) -> Fraction:
    """fps as ffmpeg is told: 23.976 becomes 24000/1001."""
    if not (math.isfinite(fps) and 0 < fps <= 1000):
        raise ValueError(f"fps must be in (0, 1000], got {fps=}")
    return Fraction(fps).limit_denominator(1001)


def ffmpeg_path() -> str:
    """The ffmpeg program.

    Raises:
      FileNotFoundError: there is none; the message says how to get one.
    """
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as e:
        raise FileNotFoundError(_NO_FFMPEG) from e


def write_mp4(
    path: PathLike,
    frames: np.ndarray,
    *,
    fps: float,
    quality: int = QUALITY,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write H.264 in yuv420p with BT.709 colours, converted and tagged as such, limited range.

    Args:
      path: the file; its folder is made when missing.
      frames: [T, height, width, 3] uint8 RGB; height and width even, because 4:2:0 chroma has half of each.
      fps: frames a second.
      quality: x264 constant rate factor, 0 (lossless, which some players cannot show) to 51 (worst).
      metadata: plain JSON types, stored as JSON in the container's comment; :func:`read_metadata` reads it.

    Raises:
      ValueError: frames, fps or quality out of range.
      OSError: no ffmpeg, or it failed (its words are in the message); no file is left.
    """
    frames = _checked(frames)
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise ValueError(
            f"mp4 needs an even size, got width={width}, height={height}; crop to {width - width % 2}x"
            f"{height - height % 2}, or write a gif or PNG frames"
        )
    if isinstance(quality, bool) or not isinstance(quality, int) or not 0 <= quality <= 51:
        raise ValueError(f"quality must be a whole number in [0, 51] (lower is better), got {quality=}")
    rate = str(_rate(fps))
    program = ffmpeg_path()
    comment = _escape(json.dumps(dict(metadata or {}), default=_plain))
    with atomic_path(path) as partial, tempfile.TemporaryDirectory() as scratch:
        tags = Path(scratch) / "tags"
        tags.write_text(f";FFMETADATA1\ncomment={comment}\n" if metadata else ";FFMETADATA1\n", encoding="utf-8")
        command = [
            program, "-hide_banner", "-loglevel", "error", "-y",
            "-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-framerate", rate, "-i", "-",
            "-f", "ffmetadata", "-i", str(tags), "-map", "0:v", "-map_metadata", "1",
            "-vf", f"{_SCALE},format=yuv420p,setparams={_TAGS}",
            "-c:v", "libx264", "-preset", "medium", "-crf", str(quality), "-pix_fmt", "yuv420p",
            "-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv",
            "-movflags", "+faststart", "-f", "mp4", str(partial),
        ]  # fmt: skip
        _feed(command, frames)


def _feed(command: Sequence[str], frames: np.ndarray) -> None:
    """Run ffmpeg with the frames on its standard input.

    Raises:
      OSError: it could not start, or ended with an error.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=errors, stderr=errors)
        except OSError as e:
            raise type(e)(e.errno, f"ffmpeg at {command[0]!r} cannot be started: {e.strerror}") from e
        assert process.stdin is not None
        try:
            for frame in frames:
                process.stdin.write(np.ascontiguousarray(frame).data)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it ended early; its exit status and words follow
        except BaseException:
            process.kill()
            raise
        finally:
            status = process.wait()
        if status:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-1000:]
            raise OSError(f"ffmpeg could not write {command[-1]!r} (exit status {status}): {said}")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"metadata cannot hold {type(value).__name__}")


def _escape(text: str) -> str:
    """For a value in an ffmetadata file (https://ffmpeg.org/ffmpeg-formats.html#Metadata)."""
    return re.sub(r"([=;#\\\n])", r"\\\1", text)


def read_metadata(path: PathLike) -> dict[str, Any]:
    """What :func:`write_mp4`, :func:`write_gif` or :func:`write_contact_sheet` stored; {} when there is nothing.

    Raises:
      OSError: the file is missing or unreadable, or an mp4 is asked for and there is no ffmpeg.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist")
    if path.suffix.lower() in (".gif", ".png"):
        with Image.open(path) as image:
            comment = image.info.get("comment", b"")
        text = comment.decode("utf-8", "replace") if isinstance(comment, bytes) else comment
    else:
        command = [ffmpeg_path(), "-hide_banner", "-loglevel", "error", "-i", str(path), "-f", "ffmetadata", "-"]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise OSError(f"ffmpeg cannot read {str(path)!r}: {done.stderr.decode(errors='replace').strip()[-500:]}")
        found = re.search(r"^comment=((?:\\.|[^\\\n])*)", done.stdout.decode("utf-8", "replace"), re.M | re.S)
        text = re.sub(r"\\(.)", r"\1", found[1], flags=re.S) if found else ""
    try:
        data = json.loads(text)
    except ValueError:
        return {}  # some other program's comment
    return data if isinstance(data, dict) else {}


def write_gif(path: PathLike, frames: np.ndarray, *, fps: float, metadata: Mapping[str, Any] | None = None) -> None:
    """Write an endlessly looping gif, 256 colours a frame.

    A gif counts in hundredths of a second, so frames get delays that differ by one and end at the right time; a delay
    is at least two, below which players slow down (50 fps).

    Args:
      path, frames, fps, metadata: as in :func:`write_mp4`; any size.

    Raises:
      ValueError, OSError: as in :func:`write_mp4`.
    """
    frames = _checked(frames)
    rate = _rate(fps)
    ends = [round(100 * (i + 1) / rate) for i in range(len(frames))]
    delays = [max(2, end - start) * 10 for start, end in zip([0, *ends], ends)]  # ms
    images = [Image.fromarray(f).quantize(256, method=Image.Quantize.MEDIANCUT) for f in frames]
    comment = {"comment": json.dumps(dict(metadata), default=_plain)} if metadata else {}
    with atomic_path(path) as partial:
        images[0].save(
            partial, format="GIF", save_all=True, append_images=images[1:], duration=delays, loop=0, **comment
        )


def write_frames(folder: PathLike, frames: np.ndarray) -> list[Path]:
    """Write lossless PNG files frame_00000.png ... and remove later frames that an earlier, longer clip left there.

    Args:
      folder: made when missing.
      frames: [T, height, width, 3] uint8.

    Returns:
      The files, in order.
    """
    frames = _checked(frames)
    folder = Path(folder)
    written = []
    for i, frame in enumerate(frames):
        target = folder / f"frame_{i:05d}.png"
        with atomic_path(target) as partial:
            Image.fromarray(frame).save(partial, format="PNG")
        written.append(target)
    for old in folder.glob("frame_*.png"):
        if re.fullmatch(r"frame_\d{5}\.png", old.name) and old not in written:
            old.unlink()
    return written


def contact_sheet(
    clips: Sequence[np.ndarray], captions: Sequence[str] | None = None, *, columns: int = 5, cell_width: int = 256
) -> np.ndarray:
    """One row a clip, evenly spaced frames from the first to the last, its caption above it.

    Args:
      clips: each [T, height, width, 3] uint8; sizes and lengths may differ.
      captions: one a clip.
      columns: frames a row at most.
      cell_width: pixels; smaller frames are kept as they are.

    Returns:
      uint8 [height, width, 3].

    Raises:
      ValueError: no clip, or not one caption a clip.
    """
    if not len(clips):
        raise ValueError("a contact sheet needs at least one clip")
    if captions is not None and len(captions) != len(clips):
        raise ValueError(f"captions must be one a clip, got {len(captions)} for {len(clips)} clips")
    gap, font = 6, ImageFont.load_default(size=14)
    rows: list[tuple[str, list[Image.Image]]] = []
    for i, clip in enumerate(clips):
        clip = _checked(clip)
        picked = sorted(set(np.linspace(0, len(clip) - 1, min(columns, len(clip))).round().astype(int).tolist()))
        images = [Image.fromarray(clip[j]) for j in picked]
        if images[0].width > cell_width:
            size = (cell_width, max(1, round(images[0].height * cell_width / images[0].width)))
            images = [image.resize(size, Image.Resampling.LANCZOS) for image in images]
        rows.append((captions[i] if captions is not None else "", images))
    band = 22 if captions is not None else 0
    width = gap + max(len(images) * (images[0].width + gap) for _, images in rows)
    height = gap + sum(band + images[0].height + gap for _, images in rows)
    sheet = Image.new("RGB", (width, height), (24, 24, 24))
    draw = ImageDraw.Draw(sheet)
    y = gap
    for caption, images in rows:
        if band:
            draw.text((gap, y), _shorten(caption, font, width - 2 * gap), (235, 235, 235), font)
        for j, image in enumerate(images):
            sheet.paste(image, (gap + j * (image.width + gap), y + band))
        y += band + images[0].height + gap
    return np.asarray(sheet)


def _shorten(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """``text`` on one line, cut with dots where it is wider than ``width`` pixels."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    low, high = 0, len(text)  # most characters that fit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if font.getlength(text[:middle] + "...") <= width else (low, middle - 1)
    return text[:low] + "..."


def write_contact_sheet(
    path: PathLike,
    clips: Sequence[np.ndarray],
    captions: Sequence[str] | None = None,
    *,
    columns: int = 5,
    cell_width: int = 256,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write :func:`contact_sheet` as PNG."""
    sheet = Image.fromarray(contact_sheet(clips, captions, columns=columns, cell_width=cell_width))
    info = PngInfo()
    if metadata:
        info.add_text("comment", json.dumps(dict(metadata), default=_plain))
    with atomic_path(path) as partial:
        sheet.save(partial, format="PNG", pnginfo=info)
