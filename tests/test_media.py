"""Files read back with PyAV and Pillow: size, count, rate, tags, colours, metadata; failures leave nothing."""

from __future__ import annotations

import os
import stat
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from videodiff import media

av = pytest.importorskip("av")

BT709, LIMITED = 1, 1  # ITU-T H.273 code points; AVCOL_RANGE_MPEG


def moving_clip(frames: int, height: int, width: int) -> np.ndarray:
    """Smooth colours and a square whose left edge counts the frames."""
    y, x = np.mgrid[:height, :width]
    base = np.stack([x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)], -1)
    clip = np.repeat(base[None], frames, 0).astype(np.uint8)
    for t in range(frames):
        clip[t, 4:12, 4 * t : 4 * t + 8] = 255
    return clip


def flat_patches(count: int = 12, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Random colours [count, count, 3] and a 3-frame clip of patches of them."""
    colours = np.random.default_rng(0).integers(0, 256, (count, count, 3)).astype(np.uint8)
    colours[0, :8] = [[i & 1, i >> 1 & 1, i >> 2] for i in range(8)] * np.array(255, np.uint8)
    return colours, np.repeat(np.kron(colours, np.ones((size, size, 1), np.uint8))[None], 3, 0)


def decode(path: Path):
    with av.open(str(path)) as container:
        return list(container.decode(video=0))


@pytest.mark.parametrize(
    ("count", "height", "width", "fps"), [(17, 64, 96, 16), (1, 50, 34, 24), (5, 1080, 1920, 23.976), (81, 16, 16, 8)]
)
def test_mp4_has_the_size_count_and_rate_it_was_given(count, height, width, fps, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.mp4"
    media.write_mp4(path, moving_clip(count, height, width), fps=fps)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert (stream.width, stream.height, stream.frames) == (width, height, count)
        assert stream.pix_fmt == "yuv420p"
        assert stream.average_rate == Fraction(fps).limit_denominator(1001)
        if count > 1:
            assert float(stream.duration * stream.time_base) == pytest.approx(count / fps, abs=1e-3)
    frames = decode(path)
    assert len(frames) == count
    assert all((f.width, f.height) == (width, height) for f in frames)
    assert os.listdir(path.parent) == ["a.mp4"]


def test_mp4_colour_tags(tmp_path: Path) -> None:
    media.write_mp4(tmp_path / "a.mp4", moving_clip(3, 32, 32), fps=16)
    with av.open(str(tmp_path / "a.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert (context.colorspace, context.color_primaries, context.color_trc) == (BT709, BT709, BT709)
        assert context.color_range == LIMITED
    frame = decode(tmp_path / "a.mp4")[0]
    assert (frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range) == (
        BT709,
        BT709,
        BT709,
        LIMITED,
    )


@pytest.mark.parametrize("quality", [0, media.QUALITY])
def test_mp4_colours_are_bt709_and_rounded(quality: int, tmp_path: Path) -> None:
    """Y'CbCr of flat patches against ITU-R BT.709: rounding meets it within a half, truncation does not."""
    colours, clip = flat_patches()
    media.write_mp4(tmp_path / "a.mp4", clip, fps=16, quality=quality)
    frame = decode(tmp_path / "a.mp4")[1]
    planes = frame.to_ndarray().astype(float)
    n = clip.shape[1]
    luma, chroma = planes[:n], planes[n:].reshape(2, n // 2, n // 2)
    r, g, b = np.moveaxis(colours / 255, -1, 0)
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    errors = [
        luma[8::16, 8::16] - (16 + 219 * y),
        chroma[0][4::8, 4::8] - (128 + 224 * (b - y) / 1.8556),
        chroma[1][4::8, 4::8] - (128 + 224 * (r - y) / 1.5748),
    ]
    worst = 0.52 if quality == 0 else 2
    for error in errors:
        assert np.abs(error).max() <= worst
        assert abs(error.mean()) <= 0.1
    shown = frame.to_ndarray(format="rgb24")[8::16, 8::16].astype(int)  # as a player converts it, by the tags
    assert np.abs(shown - colours).max() <= 5


def test_quality_changes_the_file(tmp_path: Path) -> None:
    r = np.random.default_rng(0)
    clip = np.clip(moving_clip(5, 64, 64) + r.normal(0, 20, (5, 64, 64, 3)), 0, 255).astype(np.uint8)
    sizes, errors = [], []
    for quality in (5, 20, 40):
        media.write_mp4(tmp_path / "a.mp4", clip, fps=16, quality=quality)
        sizes.append((tmp_path / "a.mp4").stat().st_size)
        shown = np.stack([f.to_ndarray(format="rgb24") for f in decode(tmp_path / "a.mp4")])
        errors.append(np.abs(shown.astype(int) - clip).mean())
    assert sizes[0] > 1.5 * sizes[1] > 3 * sizes[2]
    assert errors[0] < errors[1] < errors[2]


def test_frames_keep_their_order(tmp_path: Path) -> None:
    clip = moving_clip(17, 32, 96)
    media.write_mp4(tmp_path / "a.mp4", clip, fps=16)
    for t, frame in enumerate(decode(tmp_path / "a.mp4")):
        errors = np.abs(clip.astype(int) - frame.to_ndarray(format="rgb24")).mean((1, 2, 3))
        assert errors.argmin() == t


METADATA = {
    "prompt": 'a = "b"; #c \\ d\n\u732b \U0001f680\r\t; comment=x',
    "seed": 2**53,
    "nested": {"list": [1, 2.5, None, True]},
    "numpy": np.float32(0.5),
    "path": Path("x/y"),
}
READ = {**METADATA, "numpy": 0.5, "path": str(Path("x/y"))}


def test_mp4_metadata_round_trip(tmp_path: Path) -> None:
    import json

    media.write_mp4(tmp_path / "a.mp4", moving_clip(2, 16, 16), fps=16, metadata=METADATA)
    assert media.read_metadata(tmp_path / "a.mp4") == READ
    with av.open(str(tmp_path / "a.mp4")) as container:  # and where other programs look for it
        assert json.loads(container.metadata["comment"]) == READ


def test_long_metadata(tmp_path: Path) -> None:
    data = {"prompt": "long; " * 60_000}  # beyond what one command-line argument may hold
    media.write_mp4(tmp_path / "a.mp4", moving_clip(1, 16, 16), fps=16, metadata=data)
    assert media.read_metadata(tmp_path / "a.mp4") == data


def test_no_metadata(tmp_path: Path) -> None:
    media.write_mp4(tmp_path / "a.mp4", moving_clip(1, 16, 16), fps=16)
    assert media.read_metadata(tmp_path / "a.mp4") == {}
    media.write_gif(tmp_path / "a.gif", moving_clip(2, 16, 16), fps=16)
    assert media.read_metadata(tmp_path / "a.gif") == {}
    with pytest.raises(FileNotFoundError, match=r"b\.mp4' does not exist"):
        media.read_metadata(tmp_path / "b.mp4")
    (tmp_path / "c.mp4").write_text("no video")
    with pytest.raises(OSError, match=r"ffmpeg cannot read .*c\.mp4"):
        media.read_metadata(tmp_path / "c.mp4")


@pytest.mark.parametrize(("height", "width"), [(15, 16), (16, 15), (15, 15)])
def test_odd_sizes_are_refused_with_the_remedy(height: int, width: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"even size, got width={width}, height={height}; crop to 1[46]x1[46], or"):
        media.write_mp4(tmp_path / "a.mp4", np.zeros((2, height, width, 3), np.uint8), fps=16)
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path: Path) -> None:
    clip, path = moving_clip(2, 16, 16), tmp_path / "a.mp4"
    with pytest.raises(ValueError, match=r"must be uint8, got float64; media\.to_uint8 converts"):
        media.write_mp4(path, clip / 255, fps=16)
    for shape in ((16, 16, 3), (2, 16, 16, 4), (0, 16, 16, 3)):
        with pytest.raises(ValueError, match=r"must be \[frames, height, width, 3\]"):
            media.write_mp4(path, np.zeros(shape, np.uint8), fps=16)
    for fps in (0, -1, float("nan"), 1e6):
        with pytest.raises(ValueError, match=r"fps must be in \(0, 1000\], got fps="):
            media.write_mp4(path, clip, fps=fps)
    for quality in (-1, 52, 20.5, True):
        with pytest.raises(ValueError, match=rf"quality must be a whole number in \[0, 51\].*quality={quality}"):
            media.write_mp4(path, clip, fps=16, quality=quality)
    with pytest.raises(TypeError, match="metadata cannot hold object"):
        media.write_mp4(path, clip, fps=16, metadata={"x": object()})
    assert not list(tmp_path.iterdir())


def fake_ffmpeg(tmp_path: Path, body: str) -> Path:
    program = tmp_path / "ffmpeg"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.mark.parametrize("read_first", [True, False])
def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(read_first: bool, tmp_path: Path, monkeypatch) -> None:
    """ffmpeg fails at the end (disk full), or before it has read its input."""
    eat = "cat > /dev/null; " if read_first else ""
    last = 'for last; do :; done; echo half > "$last"'
    program = fake_ffmpeg(tmp_path, f"{last}; {eat}echo No space left on device >&2; exit 3")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.mp4").write_text("the old one")
    with pytest.raises(OSError, match=r"exit status 3\): No space left on device"):
        media.write_mp4(out / "a.mp4", moving_clip(40, 256, 256), fps=16)
    assert os.listdir(out) == ["a.mp4"]
    assert (out / "a.mp4").read_text() == "the old one"


def test_interrupt_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    class Frames(np.ndarray):
        def __iter__(self):
            yield np.asarray(self)[0]
            raise KeyboardInterrupt

    clip = moving_clip(3, 16, 16).view(Frames)
    monkeypatch.setattr(media, "_checked", lambda frames: frames)
    with pytest.raises(KeyboardInterrupt):
        media.write_mp4(tmp_path / "a.mp4", clip, fps=16)
    assert not list(tmp_path.iterdir())


def test_no_ffmpeg_names_the_remedy(tmp_path: Path, monkeypatch) -> None:
    import imageio_ffmpeg

    def nothing():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", nothing)
    with pytest.raises(FileNotFoundError, match=r"pip install imageio-ffmpeg.*IMAGEIO_FFMPEG_EXE"):
        media.write_mp4(tmp_path / "a.mp4", moving_clip(1, 16, 16), fps=16)
    assert not list(tmp_path.iterdir())
    media.write_gif(tmp_path / "a.gif", moving_clip(1, 16, 16), fps=16)  # needs none


def test_ffmpeg_that_cannot_start(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match=r"missing' cannot be started: No such file"):
        media.write_mp4(tmp_path / "a.mp4", moving_clip(1, 16, 16), fps=16)


def test_check_writable(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("x")
    media.check_writable(tmp_path / "a.mp4")
    media.check_writable(tmp_path / "file")
    media.check_writable(tmp_path / "new" / "folders" / "a.mp4")
    monkeypatch.chdir(tmp_path)
    media.check_writable("a.mp4")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(IsADirectoryError, match="is a folder; give a file name in it"):
        media.check_writable(tmp_path)
    with pytest.raises(NotADirectoryError, match=r"cannot be written: '.*file' is not a folder"):
        media.check_writable(tmp_path / "file" / "x" / "a.mp4")


@pytest.mark.parametrize("below", ["a.mp4", "new/a.mp4"])
def test_check_writable_on_a_read_only_folder(below: str, tmp_path: Path, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "secret name")

    monkeypatch.setattr(media.tempfile, "mkstemp", refuse)  # for root every folder is writable
    monkeypatch.setattr(media.tempfile, "mkdtemp", refuse)
    with pytest.raises(
        PermissionError, match=r"output '.*a\.mp4' cannot be written: Permission denied in '.*'; choose"
    ):
        media.check_writable(tmp_path / below)


@pytest.mark.parametrize("fps", [16, 24, 10, 30])
def test_gif(fps: int, tmp_path: Path) -> None:
    clip = moving_clip(17, 33, 95)  # odd sizes too
    media.write_gif(tmp_path / "a.gif", clip, fps=fps, metadata=METADATA)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.size, image.n_frames, image.info["loop"]) == ((95, 33), 17, 0)
        total = 0
        for t in range(17):
            image.seek(t)
            total += image.info["duration"]
            assert np.abs(np.asarray(image.convert("RGB")).astype(int) - clip[t]).mean() < 6
    assert total == pytest.approx(17_000 / fps, abs=5)
    assert media.read_metadata(tmp_path / "a.gif") == READ
    assert os.listdir(tmp_path) == ["a.gif"]


def test_png_frames(tmp_path: Path) -> None:
    clip = moving_clip(4, 9, 7)
    media.write_frames(tmp_path / "f", moving_clip(6, 9, 7))
    (tmp_path / "f" / "frame_mine.png").write_text("kept")
    files = media.write_frames(tmp_path / "f", clip)
    assert [f.name for f in files] == [f"frame_{i:05d}.png" for i in range(4)]
    assert sorted(os.listdir(tmp_path / "f")) == [*(f.name for f in files), "frame_mine.png"]
    for file, frame in zip(files, clip):
        with Image.open(file) as image:
            np.testing.assert_array_equal(np.asarray(image), frame)


def test_contact_sheet(tmp_path: Path) -> None:
    grey = np.full((3, 40, 600, 3), 128, np.uint8)  # wide: scaled to a cell
    clips = [moving_clip(17, 32, 48), grey, moving_clip(1, 20, 20)]
    sheet = media.contact_sheet(clips, ["first", "second \u732b " * 100, ""], columns=5)
    gap, band = 6, 22
    assert sheet.dtype == np.uint8
    top = gap + band
    for j, t in enumerate([0, 4, 8, 12, 16]):  # the first row: untouched frames, the first and last among them
        x = gap + j * (48 + gap)
        np.testing.assert_array_equal(sheet[top : top + 32, x : x + 48], clips[0][t])
    assert sheet.shape[1] == gap + 3 * (256 + gap)
    y = gap + band + 32 + gap + band
    assert (sheet[y : y + 17, gap : gap + 256] == 128).all()
    assert sheet[gap : gap + band, gap : gap + 60].max() > 200  # the caption
    media.write_contact_sheet(tmp_path / "s.png", clips, ["a", "b", "c"], metadata={"seed": 1})
    assert media.read_metadata(tmp_path / "s.png") == {"seed": 1}
    with Image.open(tmp_path / "s.png") as image:
        assert image.mode == "RGB"
    with pytest.raises(ValueError, match="captions must be one a clip, got 1 for 3 clips"):
        media.contact_sheet(clips, ["x"])
    with pytest.raises(ValueError, match="at least one clip"):
        media.contact_sheet([])


def test_float_to_uint8() -> None:
    levels = np.arange(256)
    np.testing.assert_array_equal(
        media.to_uint8((levels / 255).astype(np.float32).reshape(1, 16, 16, 1))[0, ..., 0].ravel(), levels
    )
    x = np.array([[[[-1, 0.4 / 255, 0.6 / 255], [254.4 / 255, 254.6 / 255, 7]]]], np.float64)
    np.testing.assert_array_equal(media.to_uint8(x), [[[[0, 0, 1], [254, 255, 255]]]])
    assert media.to_uint8(np.ones((2, 3, 4, 5, 3), np.float16)).shape == (2, 3, 4, 5, 3)
    with pytest.raises(ValueError, match=r"must be float in \[0, 1\], got uint8"):
        media.to_uint8(np.zeros((1, 2, 2, 3), np.uint8))
    for bad in (np.nan, np.inf):
        x = np.zeros((3, 2, 2, 3), np.float32)
        x[1, 0, 0, 0] = bad
        with pytest.raises(ValueError, match="frame 1 holds 1 values that are not finite"):
            media.to_uint8(x)
