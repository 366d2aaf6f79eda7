"""How near two videos are, and whether one is broken: PSNR, SSIM, temporal PSNR, output checks.

Owns: the formulas. Does not own: what is compared with what (scripts, tests), files (`media`). Invariant: sums are
float64, one frame at a time, so a long 1440p video needs no more memory than two frames.
"""

from __future__ import annotations

import math

import numpy as np

SSIM_SIGMA = 1.5
SSIM_RADIUS = 5  # an 11 x 11 window
SSIM_K1, SSIM_K2 = 0.01, 0.03

# Limits of the output checks, in units of the data range. A drawn or filmed clip is far from all of them.
CONSTANT_STD = 2 / 255
FLICKER_RMS = 0.06
NOISE_RATIO = 0.7


def _pair(a: np.ndarray, b: np.ndarray, data_range: float | None) -> tuple[np.ndarray, np.ndarray, float]:
    """Both as [T, height, width, C], and the data range."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.ndim not in (3, 4) or 0 in a.shape:
        raise ValueError(f"videos must have one shape, [frames, height, width, 3], got {a.shape} and {b.shape}")
    if (a.dtype == np.uint8) != (b.dtype == np.uint8):
        raise ValueError(f"videos must both be uint8 or both be float, got {a.dtype} and {b.dtype}")
    if data_range is None:
        data_range = 255.0 if a.dtype == np.uint8 else 1.0
    if not data_range > 0:
        raise ValueError(f"data_range must be positive, got {data_range=}")
    return (a[None], b[None], data_range) if a.ndim == 3 else (a, b, data_range)


def _to_db(squares: float, count: int, data_range: float) -> float:
    mse = squares / count
    return math.inf if mse == 0 else 10 * math.log10(data_range**2 / mse)


def psnr(a: np.ndarray, b: np.ndarray, data_range: float | None = None) -> float:
    """Peak signal-to-noise ratio of the whole video in dB: 10 log10(range^2 / mean squared error).

    Args:
      a, b: [T, height, width, C] or one frame [height, width, C]; both uint8 or both float.
      data_range: largest value minus smallest possible one; 255 for uint8, 1 for floats unless given.

    Returns:
      dB; inf for equal videos, NaN where a value is NaN.

    Raises:
      ValueError: shapes or dtypes differ.
    """
    a, b, data_range = _pair(a, b, data_range)
    squares = sum(float(np.square(x.astype(np.float64) - y).sum()) for x, y in zip(a, b))
    return _to_db(squares, a.size, data_range)


def temporal_psnr(a: np.ndarray, b: np.ndarray, data_range: float | None = None) -> float:
    """PSNR of the frame-to-frame differences: error in motion and flicker, blind to errors that stand still.

    Args:
      a, b, data_range: as in :func:`psnr`, with at least two frames.
    """
    a, b, data_range = _pair(a, b, data_range)
    if len(a) < 2:
        raise ValueError("temporal PSNR needs at least two frames, got one")
    squares, before = 0.0, a[0].astype(np.float64) - b[0]
    for x, y in zip(a[1:], b[1:]):
        error = x.astype(np.float64) - y
        squares += float(np.square(error - before).sum())
        before = error
    return _to_db(squares, a[1:].size, data_range)


def _blur(x: np.ndarray) -> np.ndarray:
    """Gaussian window means, where the window fits: [h, w, C] -> [h - 10, w - 10, C] float64."""
    taps = np.exp(-0.5 * (np.arange(-SSIM_RADIUS, SSIM_RADIUS + 1) / SSIM_SIGMA) ** 2)
    taps /= taps.sum()
    for axis in (0, 1):
        n = x.shape[axis] - 2 * SSIM_RADIUS
        out = np.zeros(())
        for i, tap in enumerate(taps):
            out = out + tap * np.take(x, range(i, i + n), axis=axis)
        x = out
    return x


def ssim(a: np.ndarray, b: np.ndarray, data_range: float | None = None) -> float:
    """Structural similarity, the mean over windows, channels and frames, in [-1, 1].

    Wang et al., "Image quality assessment: from error visibility to structural similarity", IEEE TIP 2004, with the
    paper's 11 x 11 Gaussian window of sigma 1.5, K1 = .01, K2 = .03, population covariances, and only windows that lie
    inside the picture. Equals scikit-image with gaussian_weights=True, use_sample_covariance=False.

    Args:
      a, b, data_range: as in :func:`psnr`; frames of at least 11 x 11.
    """
    a, b, data_range = _pair(a, b, data_range)
    if min(a.shape[1:3]) < 2 * SSIM_RADIUS + 1:
        raise ValueError(f"SSIM needs frames of at least 11 x 11, got {a.shape[2]} x {a.shape[1]}")
    c1, c2 = (SSIM_K1 * data_range) ** 2, (SSIM_K2 * data_range) ** 2
    means = []
    for x, y in zip(a, b):
        x, y = x.astype(np.float64), y.astype(np.float64)
        mx, my = _blur(x), _blur(y)
        vx, vy, cov = _blur(x * x) - mx * mx, _blur(y * y) - my * my, _blur(x * y) - mx * my
        similarity = (2 * mx * my + c1) * (2 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
        means.append(similarity.mean())
    return float(np.mean(means))


def broken(frames: np.ndarray) -> tuple[str, ...]:
    """What is visibly wrong with a video, in sentences with numbers; () when nothing is.

    Checked: values that are not finite; one flat colour throughout; brightness that jumps back and forth from frame to
    frame (the root mean square of its second difference, so a steady fade is no flicker); pictures that are white noise
    (neighbouring pixels as different as far ones). A still video is not broken: it may have been asked for.

    Args:
      frames: [T, height, width, 3], uint8 or float in [0, 1].
    """
    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames must be [frames, height, width, 3] and not empty, got {frames.shape}")
    scale = 1 / 255 if frames.dtype == np.uint8 else 1.0
    bad = sum(int((~np.isfinite(f)).sum()) for f in frames) if frames.dtype != np.uint8 else 0
    if bad:
        return (f"not finite: {bad} of {frames.size} values",)
    found = []
    total = squares = np.zeros(3)
    brightness, ratios = [], []
    for frame in frames:
        x = frame.astype(np.float64) * scale
        total = total + x.sum(axis=(0, 1))
        squares = squares + (x * x).sum(axis=(0, 1))
        luma = x @ (0.2126, 0.7152, 0.0722)
        brightness.append(luma.mean())
        steps = [d for d in (np.diff(luma, axis=0), np.diff(luma, axis=1)) if d.size]
        if steps and luma.var() > CONSTANT_STD**2:  # white noise: a step's variance is twice the picture's
            ratios.append(np.mean([np.mean(d * d) for d in steps]) / (2 * luma.var()))
    count = frames.size / 3
    std = float(np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0)).max())
    if std < CONSTANT_STD:
        found.append(f"constant: standard deviation {std:.4f}, at least {CONSTANT_STD:.4f} is expected")
    if len(frames) >= 3:
        flicker = float(np.sqrt(np.mean(np.diff(brightness, n=2) ** 2)))
        if flicker > FLICKER_RMS:
            found.append(
                f"flicker: brightness jumps by {flicker:.3f} between frames, at most {FLICKER_RMS} is expected"
            )
    if ratios and np.median(ratios) > NOISE_RATIO:
        found.append(f"noise: neighbouring pixels differ {np.median(ratios):.2f} as much as far ones")
    return tuple(found)
