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
      frames, height, width: pixels; 16-multiples, 32 for whole tokens.
      share: of the tokens the transformer trains on.
      batch: clips a step, about 1300 tokens.
    """

    frames: int
    height: int
    width: int
    share: float
    batch: int

    @property
    def name(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"

    @property
    def tokens(self) -> int:
        return (1 + (self.frames - 1) // 4) * (self.height // 32) * (self.width // 32)


KINDS = (
    Kind(17, 256, 256, 0.50, 4),
    Kind(17, 192, 192, 0.18, 7),
    Kind(17, 256, 448, 0.12, 2),
    Kind(5, 480, 832, 0.10, 2),
    Kind(1, 704, 1280, 0.06, 2),
    Kind(1, 1440, 2560, 0.04, 1),
)
CHUNK = 24


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
        kind = min(KINDS, key=lambda k: spent[k.name] / k.share)
        start = time.time()
        scenes, latents = [], []
        for _ in range(CHUNK if kind.height <= 480 else CHUNK // 4):
            scene = training_scene(rng, kind.width / kind.height)
            clip = render(scene, kind.frames, kind.height, kind.width)
            latents.append(np.asarray(encode(params, clip[None] * 2 - 1))[0].astype(np.float16))
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
        clips = [x.reshape(-1, x.shape[-1]).astype(np.float64) for k in KINDS[:3] for x in self.latents[k.name]]
        flat = np.concatenate(clips)
        return flat.mean(0), flat.std(0)
