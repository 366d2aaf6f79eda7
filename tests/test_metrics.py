"""Metrics against closed forms and SciPy, and the output checks on videos that are and are not broken."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from videodiff.metrics import broken, psnr, ssim, temporal_psnr


def scene(frames: int = 9, height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """A disc moving over a gradient, uint8."""
    y, x = np.mgrid[:height, :width]
    out = np.empty((frames, height, width, 3), np.uint8)
    for t in range(frames):
        disc = (x - 10 - 4 * t) ** 2 + (y - 20) ** 2 < 81
        sky = np.stack([80 + x, 120 + y, np.full_like(x, 200)], -1)
        out[t] = np.where(disc[..., None], (220, 40, 30), sky)
    return out


def noisy(clip: np.ndarray, std: float, seed: int = 0) -> np.ndarray:
    r = np.random.default_rng(seed)
    return np.clip(clip + r.normal(0, std, clip.shape), 0, 255).round().astype(np.uint8)


def test_psnr_closed_forms() -> None:
    a = np.full((2, 4, 4, 3), 100, np.uint8)
    assert psnr(a, a) == math.inf
    assert psnr(a, a + np.uint8(10)) == pytest.approx(20 * math.log10(25.5))
    assert psnr(a + np.uint8(10), a) == psnr(a, a + np.uint8(10))  # no wrap-around of uint8
    b = a.copy()
    b[1] += 10  # half of the squares
    assert psnr(a, b) == pytest.approx(20 * math.log10(25.5) + 10 * math.log10(2))
    assert psnr(a[0], a[0] + np.uint8(10)) == psnr(a, a + np.uint8(10))
    x = np.zeros((2, 4, 4, 3), np.float32)
    assert psnr(x, x + 0.1) == pytest.approx(20, abs=1e-5)
    assert psnr(x, x + 0.1, data_range=2) == pytest.approx(20 + 20 * math.log10(2), abs=1e-5)
    assert math.isnan(psnr(x, np.full_like(x, np.nan)))


def test_temporal_psnr_sees_motion_only() -> None:
    clip = scene().astype(np.float64) / 255
    assert temporal_psnr(clip, clip - 0.1) > 200  # a constant error is no motion
    flicker = clip + 0.1 * (np.arange(len(clip)) % 2)[:, None, None, None]
    assert temporal_psnr(clip, flicker) == pytest.approx(20)
    assert temporal_psnr(clip, clip) == math.inf
    with pytest.raises(ValueError, match="at least two frames"):
        temporal_psnr(clip[:1], clip[:1])


def reference_ssim(x: np.ndarray, y: np.ndarray, data_range: float) -> float:
    """The formula of Wang et al. 2004 on one channel with SciPy's Gaussian filter, borders cut."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    blur = lambda z: gaussian_filter(z, sigma=1.5, truncate=3.5)  # noqa: E731
    ux, uy = blur(x), blur(y)
    vx, vy, vxy = blur(x * x) - ux * ux, blur(y * y) - uy * uy, blur(x * y) - ux * uy
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    s = ((2 * ux * uy + c1) * (2 * vxy + c2)) / ((ux**2 + uy**2 + c1) * (vx + vy + c2))
    return float(s[5:-5, 5:-5].mean())


@pytest.mark.parametrize("shape", [(3, 48, 64, 3), (1, 11, 11, 3), (2, 12, 31, 1)])
def test_ssim_equals_the_formula(shape) -> None:
    r = np.random.default_rng(0)
    a = r.integers(0, 256, shape).astype(np.uint8)
    b = noisy(a, 30)
    for x, y, peak in ((a, b, 255.0), (a / 255, b / 255, 1.0)):
        want = np.mean(
            [reference_ssim(x[t, ..., c], y[t, ..., c], peak) for t in range(shape[0]) for c in range(shape[3])]
        )
        assert ssim(x, y) == pytest.approx(want, abs=1e-12)


def test_ssim_properties() -> None:
    clip = scene()
    assert ssim(clip, clip) == 1
    values = [ssim(clip, noisy(clip, std)) for std in (2, 10, 40)]
    assert 1 > values[0] > values[1] > values[2] > 0
    unrelated = np.random.default_rng(1).integers(0, 256, clip.shape).astype(np.uint8)
    assert abs(ssim(clip, unrelated)) < 0.05
    with pytest.raises(ValueError, match="at least 11 x 11, got 64 x 10"):
        ssim(clip[:, :10], clip[:, :10])


@pytest.mark.parametrize("metric", [psnr, ssim, temporal_psnr])
def test_wrong_input(metric) -> None:
    clip = scene()
    with pytest.raises(ValueError, match="must have one shape"):
        metric(clip, clip[:-1])
    with pytest.raises(ValueError, match="both be uint8 or both be float, got uint8 and float64"):
        metric(clip, clip / 255)
    with pytest.raises(ValueError, match="data_range must be positive"):
        metric(clip, clip, data_range=0)


def test_good_videos_are_not_broken() -> None:
    assert broken(scene()) == ()
    assert broken((scene() / 255).astype(np.float32)) == ()
    assert broken(noisy(scene(), 12)) == ()  # grain
    assert broken(np.repeat(scene()[:1], 9, 0)) == ()  # a still
    assert broken(scene()[:1]) == ()
    fade = scene() * np.linspace(0, 1, 9)[:, None, None, None]
    assert broken(fade.astype(np.uint8)) == ()


def test_broken_videos_are_named() -> None:
    x = (scene() / 255).astype(np.float32)
    x[3, 1, 2] = np.nan
    assert broken(x) == (f"not finite: 3 of {x.size} values",)
    x[3, 1, 2, 0] = np.inf
    assert broken(x)[0].startswith("not finite: 3 of")
    assert [s.split(":")[0] for s in broken(np.full((5, 16, 16, 3), 127, np.uint8))] == ["constant"]
    assert [s.split(":")[0] for s in broken(np.full((5, 16, 16, 3), 0.2))] == ["constant"]
    flicker = scene().astype(int) + 20 * (np.arange(9) % 2)[:, None, None, None]
    assert [s.split(":")[0] for s in broken(np.clip(flicker, 0, 255).astype(np.uint8))] == ["flicker"]
    r = np.random.default_rng(0)
    noise = r.integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)
    assert [s.split(":")[0] for s in broken(noise)] == ["noise"]
    with pytest.raises(ValueError, match=r"must be \[frames, height, width, 3\]"):
        broken(scene()[0])
