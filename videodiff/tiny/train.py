"""The phases of training in order, and the export into the published folder layout.

Owns: default budgets, which phase needs which, what the shipped folder holds. Does not own: the phases themselves.
Invariant: weights are rounded to float16 once, at export; the file holds the moving averages.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from videodiff.models.vae import WanVAE
from videodiff.resources import shipped_model
from videodiff.tiny import bank, optim, store, train_dit, train_vae
from videodiff.weights import keys_text, keys_transformer, keys_vae
from videodiff.weights.folder import open_folder
from videodiff.weights.keys import KeyRule
from videodiff.weights.load import load_state
from videodiff.weights.save import TRANSFORMERS_BASE, save_component, save_pipeline_index, unipc_scheduler_json

START = "start"  # from the model that ships, instead of "vae" and "text"
PHASES = ("vae", "bank", "text", "dit", "export")
MINUTES = {"vae": 15.0, "bank": 9.0, "text": 2.5, "dit": 72.0}  # of the shipped model, two CPU cores
FLOW_SHIFT = 5.0


def run(phase: str, folder: Path, *, minutes: float | None, seed: int, out: Path) -> None:
    """Run one phase, or all of them.

    Args:
      phase: one of PHASES, START, or "all".
      folder: checkpoints, logs, latents.
      minutes: budget of the phase in all ("dit" and "vae" count earlier runs, "bank" adds); None takes MINUTES.
      seed: of initial weights and data.
      out: where "export" writes.
    """
    if phase == START:
        return start(folder)
    for one in PHASES if phase == "all" else (phase,):
        budget = MINUTES.get(one, 0.0) if minutes is None or phase == "all" else minutes
        if one == "vae":
            train_vae.train(folder, 0.25 * budget, 0.75 * budget, seed)
            print(f"VAE: {train_vae.evaluate(folder):.2f} dB on held-out clips at 256x256")
        elif one == "bank":
            bank.build(folder, budget, seed)
        elif one == "text":
            train_dit.warm_text(folder, budget, seed)
        elif one == "dit":
            train_dit.train(folder, budget, seed)
        else:
            export(folder, out)


def start(folder: Path) -> None:
    """Fill a new training folder from the shipped model, so that "bank" and "dit" go on from there.

    Raises:
      FileExistsError: a folder that holds a training already; nothing in it is touched.
      ValueError: a shipped model of other shapes than training makes.
    """
    if any(folder.glob("*.npz")):
        raise FileExistsError(f"{folder} holds checkpoints of a training; give a new folder with --run")
    source = open_folder(shipped_model())
    vae_config = source.vae
    if (source.transformer, vae_config.z_dim) != (train_dit.DIT, train_vae.CONFIG.z_dim):
        raise ValueError("the shipped model has other shapes than training makes now: train from nothing instead")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source.tokenizer_path, folder / "tokenizer", dirs_exist_ok=True)
    vae = store.Model(WanVAE(train_vae.CONFIG, rngs=nnx.Rngs(0)))
    text, dit = train_dit.text_model(folder), train_dit.dit_model()

    def read(model: store.Model, rules: Sequence[KeyRule], part: str) -> store.Params:
        return model.named(load_state(model.state(model.params), rules, source.checkpoints[part]))

    vae_params = read(vae, keys_vae.table(train_vae.CONFIG), "vae")
    text_params = read(text, keys_text.table(text.module(text.params).config), "text_encoder")
    dit_params = read(dit, keys_transformer.table(train_dit.DIT), "transformer")
    params = {f"text/{k}": v for k, v in text_params.items()} | {f"dit/{k}": v for k, v in dit_params.items()}
    np.savez(folder / "statistics.npz", mean=np.array(vae_config.latents_mean), std=np.array(vae_config.latents_std))
    store.save(folder / "text.npz", {"params": text_params}, {"steps": 0})
    store.save(folder / "vae.npz", {"params": vae_params}, {"step": 0})
    trees, meta = {"params": params, "opt": optim.make(params).init(params), "ema": params}, {"seconds": 0.0, "step": 0}
    store.save(folder / "dit_checkpoint.npz", trees, meta)
    store.save(folder / "dit.npz", {"params": params}, meta)
    print(f"{folder}: starts from the shipped model; go on with the phases bank and dit")


def _by_prefix(params: store.Params, prefix: str) -> store.Params:
    return {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}


def export(folder: Path, out: Path) -> None:
    """Write the model folder; it loads here and in diffusers."""
    with np.load(folder / "statistics.npz") as data:
        vae_config = train_vae.with_statistics(data["mean"], data["std"])
    vae = store.Model(WanVAE(vae_config, rngs=nnx.Rngs(0)))
    _, vae_params = train_vae.load(folder)
    trainer = train_dit.Trainer(folder)
    trees, meta = store.load(folder / "dit.npz", {"params": trainer.params})
    params = trees["params"]
    text_config = trainer.text.module(trainer.text.params).config
    half = jnp.float16
    save_component(out / "vae", vae.state(vae_params), keys_vae.table(vae_config), vae_config.to_json(), half)
    save_component(
        out / "transformer",
        trainer.dit.state(_by_prefix(params, "dit/")),
        keys_transformer.table(train_dit.DIT),
        train_dit.DIT.to_json(),
        half,
    )
    save_component(
        out / "text_encoder",
        trainer.text.state(_by_prefix(params, "text/")),
        keys_text.table(text_config),
        text_config.to_json(),
        half,
        base=TRANSFORMERS_BASE,
    )
    shutil.copytree(folder / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    save_pipeline_index(out, unipc_scheduler_json(FLOW_SHIFT))
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    print(f"{out}: {size / 1e6:.1f} MB after {meta['step']} transformer steps ({meta['seconds'] / 60:.0f} min)")
