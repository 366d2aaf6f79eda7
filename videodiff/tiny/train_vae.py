"""Training of the shipped model's VAE: stills first, then clips.

Owns: its config, initialisation, data, loss and the two phases. Does not own: the class (`models.vae`), the transformer.
The recipe's reasons: many different scenes a step teach colour quickly, so stills come first; temporal taps start at zero so that
stills carry over to clips; the posterior starts narrow; the middle attention stays zero, which makes the VAE convolutional.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from videodiff.configs import VaeConfig
from videodiff.models.vae import WanVAE
from videodiff.tiny import optim, store
from videodiff.tiny.captions import training_scene
from videodiff.tiny.world import Scene, pose, render

CONFIG = VaeConfig(
    latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16, base_dim=32, z_dim=16, dim_mult=(1, 2, 2), num_res_blocks=1,
    temperal_downsample=(True, True), is_residual=True, in_channels=48, out_channels=48, patch_size=4,
    scale_factor_temporal=4, scale_factor_spatial=16,
)  # fmt: skip
FROZEN = ("attention/proj/kernel", "attention/proj/bias")
HEIGHTS = (128, 192, 256, 256, 480, 720, 1440)
KL_WEIGHT = 3e-4
# frames, clips a step, crop in px
STILLS = ((1, 16, 64),)
CLIPS = ((1, 16, 64), (5, 5, 64), (5, 5, 64), (9, 3, 64), (17, 2, 64), (5, 2, 96))


def initial(seed: int = 0) -> store.Model:
    """A fresh VAE with the recipe's special starts."""
    model = store.Model(WanVAE(CONFIG, rngs=nnx.Rngs(seed)))
    p = model.params
    for name, x in p.items():
        if name.endswith("kernel") and x.ndim == 5 and x.shape[:3] == (3, 3, 3):
            p[name] = x.at[:2].set(0.0) * 3**0.5  # the present only
        elif name.endswith("time_conv/kernel"):
            c = x.shape[3]
            eye = jnp.eye(c) if "encoder" in name else jnp.concatenate([jnp.eye(c), jnp.eye(c)], axis=1)
            p[name] = jnp.zeros_like(x).at[2, 0, 0].set(eye)
        elif name.endswith(FROZEN):
            p[name] = jnp.zeros_like(x)
    z = CONFIG.z_dim
    p["quant_conv/kernel"] = p["quant_conv/kernel"].at[..., z:].multiply(0.1)
    p["quant_conv/bias"] = p["quant_conv/bias"].at[z:].set(-5.0)
    return model


def edge_window(
    scene: Scene, rng: np.random.Generator, height: int, width: int, crop: int
) -> tuple[int, int, int, int]:
    """A window that mostly shows an object's edge."""
    if rng.random() < 0.85:
        thing = scene.things[rng.integers(len(scene.things))]
        x, y, r, _ = pose(thing, scene.motion, rng.random())
        a = rng.uniform(0, 2 * np.pi)
        cx, cy = (x + r * np.cos(a)) * height + width / 2, (y + r * np.sin(a) + 0.5) * height
    else:
        cx, cy = rng.uniform(0, width), rng.uniform(0, height)
    top = int(np.clip(cy - crop / 2, 0, height - crop))
    left = int(np.clip(cx - crop / 2, 0, width - crop))
    return top, left, crop, crop


def draw_crop(rng: np.random.Generator, frames: int, crop: int) -> np.ndarray:
    """uint8 [frames, crop, crop, 3] of a random scene at a random size."""
    height = int(rng.choice([h for h in HEIGHTS if h >= crop]))
    width = height if rng.random() < 0.5 else height * 16 // 9
    scene = training_scene(rng, width / height)
    times = np.array([rng.random()]) if frames == 1 else rng.uniform(0, 1 - (frames - 1) / 16) + np.arange(frames) / 16
    clip = render(scene, frames, height, width, window=edge_window(scene, rng, height, width, crop), times=times)
    return (clip * 255 + 0.5).astype(np.uint8)


class Pool:
    """Crops of one kind, drawn ahead and replaced a few at every visit."""

    def __init__(self, rng: np.random.Generator, frames: int, crop: int, size: int) -> None:
        self._rng, self._kind = rng, (frames, crop)
        self.clips = np.stack([draw_crop(rng, frames, crop) for _ in range(size)])

    def batch(self, count: int, fresh: int = 1) -> np.ndarray:
        """float32 [count, frames, crop, crop, 3] in [-1, 1]."""
        for i in self._rng.integers(len(self.clips), size=fresh):
            self.clips[i] = draw_crop(self._rng, *self._kind)
        return self.clips[self._rng.integers(len(self.clips), size=count)].astype(np.float32) / 127.5 - 1


def loss(model: WanVAE, video: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """L1 + half the L1 of finite differences + squared error + KL; video [B, T, h, w, 3] in [-1, 1]."""
    mean, logvar = model.encode(video)
    z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
    out = model.decode(z)
    e = out - video
    edges = jnp.mean(jnp.abs(jnp.diff(e, axis=2))) + jnp.mean(jnp.abs(jnp.diff(e, axis=3)))
    kl = jnp.mean(0.5 * (mean**2 + jnp.exp(logvar) - 1 - logvar))
    mse = jnp.mean(jnp.clip(out, -1, 1).__sub__(video) ** 2)
    total = jnp.mean(jnp.abs(e)) + 0.5 * edges + jnp.mean(e**2) + KL_WEIGHT * kl
    return total, {
        "psnr": -10 * jnp.log10(mse / 4),
        "kl": kl,
        "noise": jnp.mean(jnp.exp(0.5 * logvar)),
        "std": mean.std(),
    }


def learning_rate(progress: float, peak: float, warm: float = 0.02, floor: float = 0.03) -> float:
    """Short warm-up, then a cosine down to ``floor`` of the peak."""
    if progress < warm:
        return peak * progress / warm
    return peak * (floor + (1 - floor) * 0.5 * (1 + np.cos(np.pi * min(1.0, (progress - warm) / (1 - warm)))))


def train(run: Path, minutes_stills: float, minutes_clips: float, seed: int = 0) -> None:
    """Train (or go on) and leave ``vae.npz`` (moving average) in ``run``."""
    model = initial(seed)
    opt = optim.make(model.params)
    trees: dict[str, Any] = {"params": model.params, "opt": opt.init(model.params), "ema": model.params}
    meta: dict[str, Any] = {"seconds": 0.0, "step": 0}
    checkpoint = run / "vae_checkpoint.npz"
    if checkpoint.exists():
        trees, meta = store.load(checkpoint, trees)
    muon = {n: k == "muon" for n, k in optim.labels(model.params).items()}
    frozen = {n: n.endswith(FROZEN) for n in model.params}

    @jax.jit
    def step(params, opt_state, ema, video, key, lr):
        (_, aux), grads = jax.value_and_grad(lambda p: loss(model.module(p), video, key), has_aux=True)(params)
        updates, opt_state = opt.update(grads, opt_state, params)
        rate = {n: 0.0 if frozen[n] else (lr if muon[n] else 0.35 * lr) for n in params}
        params = {n: params[n] - rate[n] * updates[n] for n in params}
        ema = {n: 0.99 * ema[n] + 0.01 * params[n] for n in params}
        return params, opt_state, ema, aux

    rng = np.random.default_rng([seed, meta["step"]])
    log = store.Log(run / "vae_log.jsonl")
    total = 60 * (minutes_stills + minutes_clips)
    pools: dict[tuple[int, int], Pool] = {}
    for kinds, start, stop in ((STILLS, 0.0, 60 * minutes_stills), (CLIPS, 60 * minutes_stills, total)):
        if meta["seconds"] >= stop:
            continue
        for frames, _, crop in kinds:
            if (frames, crop) not in pools:
                pools[frames, crop] = Pool(rng, frames, crop, {1: 1200, 5: 240, 9: 140, 17: 90}[frames])
        last, saved = time.time(), time.time()
        while meta["seconds"] < stop:
            frames, count, crop = kinds[meta["step"] % len(kinds)]
            progress = (meta["seconds"] - start) / (stop - start)
            lr = learning_rate(progress, 4e-3, floor=0.5 if kinds is STILLS else 0.03)
            key = jax.random.fold_in(jax.random.key(seed), meta["step"])
            video = pools[frames, crop].batch(count)
            params, opt_state, ema, aux = step(trees["params"], trees["opt"], trees["ema"], video, key, lr)
            trees = {"params": params, "opt": opt_state, "ema": ema}
            aux = jax.device_get(aux)
            now = time.time()
            meta = {"seconds": meta["seconds"] + min(now - last, 5.0), "step": meta["step"] + 1}
            last = now
            log(phase="stills" if kinds is STILLS else "clips", **meta, frames=frames, lr=lr, **aux)
            if now - saved > 90:
                store.save(checkpoint, trees, meta)
                saved = now
    store.save(checkpoint, trees, meta)
    store.save(run / "vae.npz", {"params": trees["ema"]}, meta)


def load(run: Path) -> tuple[store.Model, store.Params]:
    """The trained VAE (moving average)."""
    model = store.Model(WanVAE(CONFIG, rngs=nnx.Rngs(0)))
    trees, _ = store.load(run / "vae.npz", {"params": model.params})
    return model, trees["params"]


def evaluate(run: Path, clips: int = 12, height: int = 256, width: int = 256, frames: int = 17) -> float:
    """Mean PSNR in dB over held-out clips."""
    from videodiff.tiny.captions import held_out_prompts

    model, params = load(run)
    go = jax.jit(lambda p, v: (lambda m: m.decode(m.encode(v)[0]))(model.module(p)))
    values = []
    for scene, _ in held_out_prompts(clips, seed=99, aspect=width / height):
        clip = render(scene, frames, height, width)
        out = np.clip(np.asarray(go(params, clip[None] * 2 - 1))[0] / 2 + 0.5, 0, 1)
        values.append(-10 * np.log10(np.mean((out - clip) ** 2)))
    return float(np.mean(values))


def with_statistics(mean: np.ndarray, std: np.ndarray) -> VaeConfig:
    """The exported config."""
    return dataclasses.replace(CONFIG, latents_mean=tuple(map(float, mean)), latents_std=tuple(map(float, std)))
