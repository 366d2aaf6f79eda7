"""Encoded clips for training the transformer, kept on disk in chunks.

Owns: which sizes are drawn and how often, encoding, latent statistics. Does not own: captions (drawn anew at each visit).
Invariant: only scenes that are not held out are drawn. More chunks can be added at any time, also while training runs.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from videodiff.files import atomic_path
from videodiff.tiny import train_vae
from videodiff.tiny.captions import training_scene
from videodiff.tiny.world import Scene, render


@dataclass(frozen=True)
class Kind:
    """One size of clip.

    Args:
      frames, height, width: pixels, multiples of 32 (whole tokens).
      share: of the tokens the transformer trains on.
      drawing: share of the time that drawing and encoding gets.
      batch: clips a step, about 2600 tokens.
      max_sigma: the highest noise level it is trained at. Below 1 it teaches refinement only, see ``sampling.refine``.
      canvases: heights of 16:9 frames of which a clip is a window; () draws whole frames.
    """

    frames: int
    height: int
    width: int
    share: float
    drawing: float
    batch: int
    max_sigma: float = 1.0
    canvases: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"

    @property
    def tokens(self) -> int:
        return (1 + (self.frames - 1) // 4) * (self.height // 32) * (self.width // 32)

    @property
    def chunk(self) -> int:
        """Clips a file holds, about as many tokens in each."""
        return max(2, min(400, 24 * 320 // self.tokens))


KINDS = (
    Kind(1, 256, 256, 0.15, 0.17, 40),
    Kind(1, 256, 448, 0.14, 0.17, 22),
    Kind(1, 448, 256, 0.04, 0.05, 22),
    Kind(17, 256, 256, 0.28, 0.24, 8),
    Kind(17, 256, 448, 0.22, 0.19, 5),
    Kind(17, 448, 256, 0.04, 0.05, 5),
    Kind(17, 320, 320, 0.08, 0.09, 5, 0.85, (480, 720, 1080, 1440)),
    Kind(5, 480, 832, 0.03, 0.02, 3, 0.85),
    Kind(1, 704, 1280, 0.02, 0.02, 3, 0.85),
)
MARGIN = 16  # px around a window, encoded with it and cut off, so that no latent saw the window's edge


def draw(kind: Kind, rng: np.random.Generator) -> tuple[Scene, np.ndarray]:
    """A scene that is not held out and its clip: float32 [T, h, w, 3] in [0, 1], with MARGIN around a window."""
    if not kind.canvases:
        scene = training_scene(rng, kind.width / kind.height)
        return scene, render(scene, kind.frames, kind.height, kind.width)
    height = int(rng.choice(kind.canvases))
    width = height * 16 // 9
    scene = training_scene(rng, width / height)
    window = train_vae.edge_window(scene, rng, height, width, kind.height + 2 * MARGIN)
    return scene, render(scene, kind.frames, height, width, window=window)


def build(run: Path, minutes: float, seed: int = 0) -> None:
    """Draw and encode clips for ``minutes``; each call adds to what is there."""
    folder = run / "bank"
    folder.mkdir(parents=True, exist_ok=True)
    model, params = train_vae.load(run)
    encode = jax.jit(lambda p, v: model.module(p).encode(v)[0])
    serial = len(list(folder.glob("[0-9]*.pkl")))
    rng = np.random.default_rng([seed, 17, serial])
    spent = {k.name: 0.0 for k in KINDS}
    began = time.time()
    while time.time() - began < 60 * minutes:
        # the kind that is furthest behind its share of the drawing time
        kind = min(KINDS, key=lambda k: spent[k.name] / k.drawing)
        start = time.time()
        scenes, latents = [], []
        cut = MARGIN // 16 if kind.canvases else 0
        for _ in range(kind.chunk):
            scene, clip = draw(kind, rng)
            z = np.asarray(encode(params, clip[None] * 2 - 1))[0]
            latents.append(z[:, cut : z.shape[1] - cut, cut : z.shape[2] - cut].astype(np.float16))
            scenes.append(scene)
        with atomic_path(folder / f"{kind.name}_{seed}_{serial:05d}.pkl") as partial:
            partial.write_bytes(pickle.dumps((kind.name, scenes, np.stack(latents))))
        serial += 1
        spent[kind.name] += time.time() - start
        print(f"bank {kind.name} +{len(scenes)} in {time.time() - start:.1f} s", flush=True)


class Bank:
    """All chunks on disk, raw latents by kind; ``refresh`` picks up new ones."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "bank"
        self._seen: set[str] = set()
        self.scenes: dict[str, list[Scene]] = {k.name: [] for k in KINDS}
        self.latents: dict[str, list[np.ndarray]] = {k.name: [] for k in KINDS}
        self.refresh()

    def refresh(self) -> int:
        """Load chunks that were added since; returns how many clips there are."""
        for file in sorted(self._folder.glob("[0-9]*.pkl")):
            if file.name not in self._seen:
                name, scenes, latents = pickle.loads(file.read_bytes())
                self.scenes[name] += scenes
                self.latents[name] += list(latents)
                self._seen.add(file.name)
        return sum(map(len, self.scenes.values()))

    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation per channel over the 17-frame clips."""
        whole = [k for k in KINDS if k.frames == 17 and not k.canvases]
        clips = [x.reshape(-1, x.shape[-1]).astype(np.float64) for k in whole for x in self.latents[k.name]]
        flat = np.concatenate(clips)
        return flat.mean(0), flat.std(0)
