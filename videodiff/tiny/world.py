"""The world the shipped model knows: shaded shapes that move over simple landscapes, drawn in numpy at any size.

Owns: what a scene is, how it is sampled, how any window of any frame is drawn. Does not own: words (`captions`), judging
(`judge`). Invariant: lengths are fractions of the frame's height, so one scene looks alike from 128p to 1440p; edges are
anti-aliased by one pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SHAPES = ("ball", "square", "triangle", "star")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.12, 0.13),
    "orange": (0.98, 0.52, 0.05),
    "yellow": (0.98, 0.86, 0.10),
    "green": (0.10, 0.62, 0.20),
    "blue": (0.13, 0.30, 0.88),
    "purple": (0.56, 0.18, 0.72),
}
# name -> (sky at the top, sky at the horizon, ground at the horizon, ground at the bottom); equal pairs make it plain
BACKGROUNDS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "meadow": ((0.38, 0.66, 0.95), (0.78, 0.90, 0.99), (0.48, 0.74, 0.36), (0.27, 0.55, 0.22)),
    "desert": ((0.55, 0.78, 0.94), (0.97, 0.90, 0.76), (0.93, 0.77, 0.52), (0.80, 0.58, 0.34)),
    "night": ((0.02, 0.03, 0.12), (0.10, 0.11, 0.30), (0.07, 0.10, 0.16), (0.03, 0.04, 0.08)),
    "snow": ((0.66, 0.74, 0.84), (0.88, 0.92, 0.96), (0.97, 0.98, 1.00), (0.86, 0.90, 0.96)),
    "studio": ((0.52, 0.52, 0.54), (0.60, 0.60, 0.62), (0.60, 0.60, 0.62), (0.50, 0.50, 0.52)),
}
MOTIONS = ("left", "right", "up", "down", "bounce", "spin", "grow", "shrink", "still")
SIZES = {"small": 0.16, "": 0.205, "big": 0.26}  # radius as a fraction of the height
HORIZON = 0.16  # below the middle, as a fraction of the height
TRAVEL = 0.5  # how far a moving object goes, as a fraction of the height


@dataclass(frozen=True)
class Thing:
    """One object.

    Args:
      shape, colour, size: keys of SHAPES, COLOURS, SIZES.
      x, y: centre in the middle of the clip, fractions of the height from the frame's centre, right and down.
      angle: of rest, radians.
    """

    shape: str
    colour: str
    size: str
    x: float
    y: float
    angle: float = 0.0


@dataclass(frozen=True)
class Scene:
    """One clip: background, one or two things, one motion for all of them."""

    background: str
    things: tuple[Thing, ...]
    motion: str

    @property
    def key(self) -> tuple:
        """What a caption can tell; two scenes with one key differ in free positions only."""
        return (self.background, self.motion, tuple((t.shape, t.colour, t.size) for t in self.things))


def pose(thing: Thing, motion: str, t: float) -> tuple[float, float, float, float]:
    """Centre x, y, radius and angle at time t in [0, 1]."""
    x, y, r, a = thing.x, thing.y, SIZES[thing.size], thing.angle
    s = t - 0.5
    if motion == "left":
        x -= TRAVEL * s
    elif motion == "right":
        x += TRAVEL * s
    elif motion == "up":
        y -= TRAVEL * s
    elif motion == "down":
        y += TRAVEL * s
    elif motion == "bounce":
        y += 0.16 - 0.36 * abs(math.sin(2 * math.pi * t))
    elif motion == "spin":
        a += 2 * math.pi * s
    elif motion == "grow":
        r *= 0.5 * 2.6**t
    elif motion == "shrink":
        r *= 0.5 * 2.6 ** (1 - t)
    return x, y, r, a


def sample_scene(rng: np.random.Generator, aspect: float = 1.0) -> Scene:
    """A random scene.

    Args:
      rng: source of randomness.
      aspect: width / height; wider frames spread objects further.
    """
    motion = MOTIONS[rng.integers(len(MOTIONS))]
    background = list(BACKGROUNDS)[rng.integers(len(BACKGROUNDS))]
    shapes = [s for s in SHAPES if motion != "spin" or s != "ball"]  # a ball that spins looks still
    colours = [c for c in COLOURS]
    two = rng.random() < 0.3
    spread = max(aspect, 0.75) - 1
    things = []
    order = rng.permutation(len(colours))
    for i in range(2 if two else 1):
        size = "" if two else ("small", "", "", "big")[rng.integers(4)]
        if two:
            size = "small"
            x = (i - 0.5) * (0.52 + 0.5 * spread) + rng.uniform(-0.02, 0.02)
            if motion in ("left", "right"):
                x *= 0.9
        else:
            x = rng.uniform(-0.10, 0.10) + rng.uniform(-0.3, 0.3) * spread
        y = rng.uniform(-0.08, 0.08)
        angle = rng.uniform(-0.15, 0.15)
        things.append(Thing(shapes[rng.integers(len(shapes))], colours[order[i]], size, x, y, angle))
    return Scene(background, tuple(things), motion)


def _polygon(x: np.ndarray, y: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Signed distance to a polygon, negative inside (Quilez, iquilezles.org/articles/distfunctions2d)."""
    d = np.full(x.shape, np.inf, np.float32)
    inside = np.zeros(x.shape, bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        ex, ey, wx, wy = bx - ax, by - ay, x - ax, y - ay
        h = np.clip((wx * ex + wy * ey) / (ex * ex + ey * ey), 0, 1)
        np.minimum(d, (wx - ex * h) ** 2 + (wy - ey * h) ** 2, out=d)
        crosses = (ay <= y) != (by <= y)
        with np.errstate(divide="ignore", invalid="ignore"):
            inside ^= crosses & (x < ax + (y - ay) / (by - ay) * ex) if ey else False
    return np.where(inside, -1, 1) * np.sqrt(d)


def _corners(shape: str) -> np.ndarray:
    if shape == "square":
        return np.array([(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)])
    if shape == "triangle":
        a = np.pi / 2 + np.arange(3) * 2 * np.pi / 3
        return np.stack([1.12 * np.cos(a), 0.18 - 1.12 * np.sin(a)], axis=1)
    a = np.pi / 2 + np.arange(10) * np.pi / 5
    r = np.where(np.arange(10) % 2, 0.50, 1.16)
    return np.stack([r * np.cos(a), -r * np.sin(a)], axis=1)


def distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float, angle: float) -> np.ndarray:
    """Signed distance of points relative to the centre, in the points' unit."""
    if shape == "ball":
        return np.hypot(x, y) - radius
    c, s = math.cos(angle), math.sin(angle)
    u, v = (c * x + s * y) / radius, (-s * x + c * y) / radius
    rounding = 0.10
    return (_polygon(u, v, _corners(shape) * (1 - rounding)) - rounding) * radius


def background(name: str, y: np.ndarray) -> np.ndarray:
    """Colours for heights y (fractions from the middle, down): [..., 3] float32 in [0, 1]."""
    top, above, below, bottom = (np.array(c, np.float32) for c in BACKGROUNDS[name])
    sky = np.clip((y + 0.5) / (0.5 + HORIZON), 0, 1)[..., None]
    ground = np.clip((y - HORIZON) / (0.5 - HORIZON), 0, 1)[..., None]
    return np.where(y[..., None] < HORIZON, top + (above - top) * sky, below + (bottom - below) * ground)


def _stars(image: np.ndarray, x: np.ndarray, y: np.ndarray, px: float) -> None:
    rng = np.random.default_rng(7)
    for sx, sy, size in zip(rng.uniform(-1, 1, 26), rng.uniform(-0.48, 0.08, 26), rng.uniform(0.004, 0.009, 26)):
        near_x, near_y = np.abs(x[0] - sx) < 3 * size + px, np.abs(y[:, 0] - sy) < 3 * size + px
        if near_x.any() and near_y.any():
            part = np.ix_(near_y, near_x)
            glow = np.exp(-((x[part] - sx) ** 2 + (y[part] - sy) ** 2) / (size * size + px * px / 4))
            image[part] += 0.75 * glow[..., None]


def _shade(image: np.ndarray, x: np.ndarray, y: np.ndarray, px: float, thing: Thing, place: tuple) -> None:
    """Draw one thing over the image: soft shadow, body lit from the upper left, darker rim."""
    cx, cy, r, a = place
    reach = 1.5 * r
    near_x, near_y = np.abs(x[0] - cx) < reach + 4 * px, np.abs(y[:, 0] - cy) < reach + 4 * px
    if not (near_x.any() and near_y.any()):
        return
    part = np.ix_(near_y, near_x)
    u, v = x[part] - cx, y[part] - cy
    shadow = np.clip(0.5 - distance(thing.shape, u - 0.10 * r, v - 0.14 * r, r, a) / (0.24 * r), 0, 1)
    d = distance(thing.shape, u, v, r, a)
    cover = np.clip(0.5 - d / px, 0, 1)[..., None]
    depth = np.clip(-d / r, 0, 1)  # 0 at the rim
    if thing.shape == "ball":
        nz = np.sqrt(np.clip(1 - (u * u + v * v) / (r * r), 0, 1))
        light = 0.55 + 0.5 * np.clip(-0.45 * u / r - 0.6 * v / r + 0.66 * nz, 0, 1)
        gloss = np.exp(-((u + 0.35 * r) ** 2 + (v + 0.42 * r) ** 2) / (0.035 * r * r))
    else:
        light = 0.92 - 0.16 * (u + v) / r + 0.0 * depth
        light = np.where(depth < 0.09, light * 0.72, light)
        gloss = np.zeros_like(u)
    colour = np.array(COLOURS[thing.colour], np.float32)
    body = np.clip(colour * np.clip(light, 0, 1.12)[..., None] + 0.55 * gloss[..., None], 0, 1)
    base = image[part] * (1 - 0.32 * shadow[..., None])
    image[part] = base * (1 - cover) + body * cover


def render(
    scene: Scene,
    frames: int,
    height: int,
    width: int,
    *,
    window: tuple[int, int, int, int] | None = None,
    times: np.ndarray | None = None,
) -> np.ndarray:
    """Draw a clip or a window of it.

    Args:
      scene: what to draw.
      frames: T; frame k is at time k / (T - 1), a single frame at 0.5.
      height, width: of the whole frame, in pixels.
      window: (top, left, height, width) in pixels; None draws everything.
      times: [T] in [0, 1] instead of the even spacing.

    Returns:
      float32 [T, h, w, 3] in [0, 1].
    """
    top, left, h, w = window or (0, 0, height, width)
    px = 1.0 / height
    ys = ((np.arange(top, top + h, dtype=np.float32) + 0.5) * px - 0.5)[:, None]
    xs = ((np.arange(left, left + w, dtype=np.float32) + 0.5) * px - 0.5 * width / height)[None, :]
    y, x = np.broadcast_to(ys, (h, w)), np.broadcast_to(xs, (h, w))
    empty = np.ascontiguousarray(background(scene.background, y), np.float32)
    if scene.background == "night":
        _stars(empty, x, y, px)
    if times is None:
        times = np.linspace(0, 1, frames) if frames > 1 else np.array([0.5])
    out = np.empty((len(times), h, w, 3), np.float32)
    for k, t in enumerate(times):
        out[k] = empty
        for thing in scene.things:
            _shade(out[k], x, y, px, thing, pose(thing, scene.motion, float(t)))
    return np.clip(out, 0, 1, out=out)
