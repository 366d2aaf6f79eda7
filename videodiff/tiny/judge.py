"""Does a clip show what its prompt says? Decided from pixels alone.

Owns: background, colours, number, shape and motion of what is seen. Does not own: generating, prompts (`captions`).
Invariant: the judge knows the world's palette and shapes but never the seed, the latents or the model. It is itself checked
on drawn clips (tests/tiny), where the answer is known.
"""

from __future__ import annotations

import colorsys
import functools
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from videodiff.tiny.world import BACKGROUNDS, COLOURS, SHAPES, Scene, background, distance

GRID = 96  # rows a frame is reduced to before anything is looked at
EDGE = 0.10  # rows at the top and bottom that tell the background, as a share of the height
DIFFERENT = 0.20  # RGB distance from the background that makes a pixel part of an object
SECOND_SHARE = 0.16  # of object pixels that a second colour needs
SMALLEST = 0.003  # of the frame that counts as an object


@dataclass(frozen=True)
class Verdict:
    """What is seen.

    Args:
      background: key of BACKGROUNDS.
      colours: keys of COLOURS, most pixels first.
      count: number of separate objects in the middle frame.
      shapes: shape of each colour's object.
      motion: one of world.MOTIONS.
    """

    background: str
    colours: tuple[str, ...]
    count: int
    shapes: tuple[str, ...]
    motion: str


def shrink(frames: np.ndarray) -> np.ndarray:
    """uint8 or float [T, h, w, 3] -> float32 [T, GRID, about GRID * w / h, 3] in [0, 1], by averaging blocks."""
    x = frames.astype(np.float32) / 255 if frames.dtype == np.uint8 else frames.astype(np.float32)
    _, h, w, _ = x.shape
    if h <= GRID:
        return x
    rows = np.linspace(0, h, GRID + 1).astype(int)
    cols = np.linspace(0, w, round(GRID * w / h) + 1).astype(int)
    x = np.add.reduceat(x, rows[:-1], axis=1) / np.diff(rows)[None, :, None, None]
    return np.add.reduceat(x, cols[:-1], axis=2) / np.diff(cols)[None, None, :, None]


def _heights(rows: int) -> np.ndarray:
    return (np.arange(rows, dtype=np.float32) + 0.5) / rows - 0.5


def see_background(x: np.ndarray) -> str:
    """The background whose top and bottom rows fit best; x from :func:`shrink`."""
    rows = x.shape[1]
    edge = max(1, round(EDGE * rows))
    y = _heights(rows)
    seen = np.median(x, axis=(0, 2))  # [rows, 3]
    part = np.r_[0:edge, rows - edge : rows]
    return min(BACKGROUNDS, key=lambda b: float(((seen[part] - background(b, y)[part]) ** 2).sum()))


@functools.cache
def _hues() -> dict[str, float]:
    return {name: colorsys.rgb_to_hsv(*rgb)[0] for name, rgb in COLOURS.items()}


def _hue_saturation(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high, low = x.max(-1), x.min(-1)
    span = np.maximum(high - low, 1e-6)
    r, g, b = x[..., 0], x[..., 1], x[..., 2]
    hue = np.where(high == r, (g - b) / span % 6, np.where(high == g, (b - r) / span + 2, (r - g) / span + 4)) / 6
    return hue, span / np.maximum(high, 1e-6)


def object_masks(x: np.ndarray, back: str) -> dict[str, np.ndarray]:
    """Pixels of each colour: name -> bool [T, rows, cols]."""
    expected = background(back, _heights(x.shape[1]))[None, :, None]
    far = np.sqrt(((x - expected) ** 2).sum(-1)) > DIFFERENT
    hue, saturation = _hue_saturation(x)
    vivid = far & (saturation > 0.42) & (x.max(-1) > 0.22)
    names = list(COLOURS)
    gap = np.abs(hue[..., None] - np.array([_hues()[n] for n in names]))
    nearest = np.minimum(gap, 1 - gap).argmin(-1)
    return {n: vivid & (nearest == i) for i, n in enumerate(names)}


def components(mask: np.ndarray) -> list[np.ndarray]:
    """4-connected parts of a bool [rows, cols] mask, largest first."""
    left, parts = mask.copy(), []
    while left.any():
        part = np.zeros_like(left)
        part[tuple(np.argwhere(left)[0])] = True
        while True:
            grown = part.copy()
            grown[1:] |= part[:-1]
            grown[:-1] |= part[1:]
            grown[:, 1:] |= part[:, :-1]
            grown[:, :-1] |= part[:, 1:]
            grown &= left
            if (grown == part).all():
                break
            part = grown
        parts.append(part)
        left &= ~part
    return sorted(parts, key=lambda p: -int(p.sum()))


@functools.cache
def _template(shape: str, step: int, size: int = 40) -> np.ndarray:
    """A shape's filled mask, centred on its own centre of mass, at angle step * 10 degrees."""
    u = np.linspace(-1.5, 1.5, size, dtype=np.float32)
    y, x = np.meshgrid(u, u, indexing="ij")
    return distance(shape, x, y, 1.0, np.deg2rad(10.0 * step)) < 0


def _normalised(mask: np.ndarray, size: int = 40) -> np.ndarray:
    """The mask moved to its centre of mass and scaled to unit area, sampled like a template."""
    ys, xs = np.nonzero(mask)
    scale = np.sqrt(len(ys) / np.pi)
    cy, cx = ys.mean(), xs.mean()
    u = np.linspace(-1.5, 1.5, size)
    rows = np.clip(np.round(cy + u * scale).astype(int), -1, mask.shape[0])
    cols = np.clip(np.round(cx + u * scale).astype(int), -1, mask.shape[1])
    padded = np.pad(mask, 1)
    return padded[np.ix_(rows + 1, cols + 1)]


def see_shape(mask: np.ndarray) -> str:
    """The shape whose template overlaps best over rotations and small changes of size."""
    mine = _normalised(mask)
    best, found = -1.0, SHAPES[0]
    for shape in SHAPES:
        for step in range(1 if shape == "ball" else 36):
            template = _normalised(_template(shape, step))
            overlap = (mine & template).sum() / max(1, (mine | template).sum())
            if overlap > best:
                best, found = overlap, shape
    return found


def see_motion(masks: np.ndarray) -> str:
    """From the largest colour's mask over time, bool [T, rows, cols]."""
    rows = masks.shape[1]
    areas = masks.sum((1, 2)).astype(float)
    seen = areas > SMALLEST * masks[0].size
    if seen.sum() < 3:
        return "still"
    t = np.linspace(0, 1, len(masks))[seen]
    centre = np.array([[c.mean() for c in np.nonzero(m)] for m in masks[seen]]) / rows  # (y, x)
    growth = np.polyfit(t, np.log(areas[seen]), 1)[0]
    slope = np.polyfit(t, centre, 1)[0]
    residue = centre[:, 0] - np.polyval(np.polyfit(t, centre[:, 0], 1), t)
    if abs(growth) > 0.7 and abs(growth) > 2.5 * np.abs(slope).max():
        return "grow" if growth > 0 else "shrink"
    if np.abs(slope).max() > 0.15:
        if abs(slope[1]) >= abs(slope[0]):
            return "left" if slope[1] < 0 else "right"
        return "up" if slope[0] < 0 else "down"
    if residue.std() > 0.03:
        return "bounce"
    middle = np.flatnonzero(seen)
    changes = [(masks[a] ^ masks[b]).sum() / max(1, masks[a].sum()) for a, b in pairwise(middle)]
    return "spin" if np.median(changes) > 0.05 else "still"


def judge(frames: np.ndarray) -> Verdict:
    """Look at a clip.

    Args:
      frames: uint8 or float in [0, 1], [T, height, width, 3].
    """
    x = shrink(frames)
    back = see_background(x)
    masks = object_masks(x, back)
    area = {n: m.sum() for n, m in masks.items()}
    total = max(1, sum(area.values()))
    order = sorted(area, key=lambda n: -area[n])
    colours = (order[0], *(n for n in order[1:2] if area[n] >= SECOND_SHARE * total))
    middle = len(x) // 2
    shapes, count = [], 0
    for name in colours:
        parts = [p for p in components(masks[name][middle]) if p.sum() > SMALLEST * masks[name][middle].size]
        largest = int(parts[0].sum()) if parts else 0
        count += sum(int(p.sum()) > 0.2 * largest for p in parts)
        shapes.append(see_shape(parts[0]) if parts else "nothing")
    return Verdict(back, colours, count, tuple(shapes), see_motion(masks[colours[0]]))


def compare(verdict: Verdict, scene: Scene) -> dict[str, bool]:
    """Which attributes of the prompt's scene the clip shows: background, colour, count, shape, motion."""
    wanted = {t.colour: t.shape for t in scene.things}
    seen = dict(zip(verdict.colours, verdict.shapes, strict=True))
    return {
        "background": verdict.background == scene.background,
        "colour": set(verdict.colours) == set(wanted),
        "count": verdict.count == len(scene.things),
        "shape": all(seen.get(c) == s for c, s in wanted.items()),
        "motion": verdict.motion == scene.motion,
    }
