"""The phases of training in order, and the export into the published folder layout.

Owns: default budgets, which phase needs which, what the shipped folder holds. Does not own: the phases themselves.
Invariant: weights are rounded to float16 once, at export; the file holds the moving averages.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from videodiff.models.vae import WanVAE
from videodiff.tiny import bank, store, train_dit, train_vae
from videodiff.weights import keys_text, keys_transformer, keys_vae
from videodiff.weights.save import TRANSFORMERS_BASE, save_component, save_pipeline_index, unipc_scheduler_json

PHASES = ("vae", "bank", "text", "dit", "export")
MINUTES = {"vae": 15.0, "bank": 9.0, "text": 2.5, "dit": 72.0}  # of the shipped model, two CPU cores
FLOW_SHIFT = 5.0


def run(phase: str, folder: Path, *, minutes: float | None, seed: int, out: Path) -> None:
    """Run one phase, or all of them.

    Args:
      phase: one of PHASES, or "all".
      folder: checkpoints, logs, latents.
      minutes: budget of the phase in all ("dit" and "vae" count earlier runs, "bank" adds); None takes MINUTES.
      seed: of initial weights and data.
      out: where "export" writes.
    """
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
