"""Training of the shipped model's text encoder and transformer.

Owns: their configs, the warm start of the text encoder, the flow-matching objective, prompt dropout. Does not own: latents
(`bank`), the classes. Padding is trained as it is used: one zero row stands for all rows after the prompt's end
(`text.encode.fold_padding`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from videodiff.attention import AttentionSpec, make_attend
from videodiff.configs import TextEncoderConfig, TransformerConfig
from videodiff.grid import TokenGrid
from videodiff.models.transformer import WanTransformer
from videodiff.text.build_tokenizer import build_tokenizer
from videodiff.text.encode import Conditioning, fold_padding
from videodiff.text.tokenizer import Tokenizer
from videodiff.text.umt5 import UMT5Encoder
from videodiff.tiny import optim, store
from videodiff.tiny.bank import KINDS, Bank, Kind
from videodiff.tiny.captions import LABEL_CLASSES, caption, corpus, labels, training_scene

DIT = TransformerConfig(
    num_attention_heads=2, attention_head_dim=64, in_channels=16, out_channels=16, text_dim=128, freq_dim=128,
    ffn_dim=512, num_layers=6,
)  # fmt: skip
TEXT = TextEncoderConfig(vocab_size=128, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
LENGTH = 24  # tokens of the longest caption
TOTAL = 512  # rows the pipeline pads to
EMA = 0.998


def tokenizer(run: Path) -> Tokenizer:
    """The tokenizer of this run; built on first use."""
    folder = run / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        build_tokenizer(folder, corpus())
    return Tokenizer(folder)


def text_model(run: Path, seed: int = 0) -> store.Model:
    config = dataclasses.replace(TEXT, vocab_size=tokenizer(run).vocab_size)
    return store.Model(UMT5Encoder(config, rngs=nnx.Rngs(seed)))


def dit_model(seed: int = 0) -> store.Model:
    """A fresh transformer whose output starts at zero."""
    model = store.Model(WanTransformer(DIT, rngs=nnx.Rngs(seed)))
    model.params["proj_out/kernel"] = jnp.zeros_like(model.params["proj_out/kernel"])
    return model


def tokens_of(tok: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """ids, mask: [B, LENGTH]."""
    t = tok(texts, LENGTH, pad_to=LENGTH)
    return t.ids, t.mask


def _split(encoder: UMT5Encoder, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Text rows and logit bias as the pipeline's 512 rows would act: [B, LENGTH + 1, d], [B, LENGTH + 1]."""
    x = jnp.where(mask[..., None] != 0, encoder(ids, mask), 0)
    x = jnp.pad(x, ((0, 0), (0, TOTAL - x.shape[1]), (0, 0)))
    return fold_padding(Conditioning(x, mask.sum(1)), rows=LENGTH)


def warm_text(run: Path, minutes: float, seed: int = 0) -> None:
    """Teach the text encoder to name a scene's attributes; leaves ``text.npz``."""
    model, tok = text_model(run, seed), tokenizer(run)
    rng = np.random.default_rng(seed)
    width, n = TEXT.d_model, len(LABEL_CLASSES)
    keys = jax.random.split(jax.random.key(seed), n + 1)
    params = dict(model.params) | {"queries": jax.random.normal(keys[0], (n, width)) / width**0.5}
    for i, classes in enumerate(LABEL_CLASSES):
        params[f"out_{i}"] = jax.random.normal(keys[i + 1], (width, classes)) / width**0.5

    def loss(p: store.Params, ids: jax.Array, mask: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = model.module(p)(ids, mask)
        score = jnp.einsum("qd,bld->bql", p["queries"], x) + jnp.where(mask[:, None] != 0, 0.0, -1e9)
        pooled = jnp.einsum("bql,bld->bqd", jax.nn.softmax(score), x)
        total, right = jnp.float32(0), []
        for i in range(n):
            logits = pooled[:, i] @ p[f"out_{i}"]
            total += optax.softmax_cross_entropy_with_integer_labels(logits, y[:, i]).mean()
            right.append((logits.argmax(-1) == y[:, i]).mean())
        return total, jnp.stack(right).mean()

    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1.5e-3))

    @jax.jit
    def step(p, s, ids, mask, y):
        (value, right), grads = jax.value_and_grad(loss, has_aux=True)(p, ids, mask, y)
        updates, s = opt.update(grads, s, p)
        return optax.apply_updates(p, updates), s, value, right

    state, began, i, log = opt.init(params), time.time(), 0, store.Log(run / "text_log.jsonl")
    while time.time() - began < 60 * minutes:
        scenes = [training_scene(rng) for _ in range(64)]
        ids, mask = tokens_of(tok, [caption(s, rng) for s in scenes])
        params, state, value, right = step(params, state, ids, mask, np.stack([labels(s) for s in scenes]))
        i += 1
        log(phase="text", step=i, loss=value, accuracy=right)
    store.save(run / "text.npz", {"params": {k: params[k] for k in model.params}}, {"steps": i})


def training_shift(kind: Kind) -> float:
    """How far sigmas lean to the noisy side: 3 at 256x256x17, more for larger grids; 1.5 for refinement."""
    return 3.0 * max(1.0, (kind.tokens / 320) ** 0.35) if kind.max_sigma == 1 else 1.5


@dataclasses.dataclass
class Trainer:
    """Models, optimiser and one compiled step a clip size."""

    run: Path
    seed: int = 0

    def __post_init__(self) -> None:
        self.tok = tokenizer(self.run)
        self.text, self.dit = text_model(self.run), dit_model(self.seed)
        warm, _ = store.load(self.run / "text.npz", {"params": self.text.params})
        params = {f"text/{k}": v for k, v in warm["params"].items()}
        self.params: store.Params = params | {f"dit/{k}": v for k, v in self.dit.params.items()}
        self.opt = optim.make(self.params)
        self.muon = {n: k == "muon" for n, k in optim.labels(self.params).items()}

    def parts(self, params: store.Params) -> tuple[UMT5Encoder, WanTransformer]:
        def take(prefix: str) -> store.Params:
            return {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}

        return self.text.module(take("text/")), self.dit.module(take("dit/"))

    def loss(self, params, latents, ids, mask, sigma, noise) -> jax.Array:
        """Squared error of the velocity, [B]; latents [B, F, Y, X, C] normalised, sigma [B]."""
        encoder, dit = self.parts(params)
        _, f, y, x, _ = latents.shape
        attend = make_attend("dense", AttentionSpec(TokenGrid(f, y // 2, x // 2), head_dim=DIT.attention_head_dim))
        s = sigma[:, None, None, None, None]
        noisy, context = (1 - s) * latents + s * noise, dit.encode_context(*_split(encoder, ids, mask))
        tokens, mod = dit.embed(noisy, 1000 * sigma)
        graph, stack = nnx.split(dit.block_stack)

        # Recomputing a layer's activations is faster here than keeping them: 208 against 245 ms for 1280 tokens.
        @jax.checkpoint
        def layer(h: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graph, block)(h, mod, context, attend, jnp.int32(0), jnp.int32(0))[0], None

        tokens, _ = jax.lax.scan(layer, tokens, stack)
        v = dit.head(tokens, mod, TokenGrid(f, y // 2, x // 2))
        return jnp.mean((v - (noise - latents)) ** 2, axis=(1, 2, 3, 4))

    @functools.cached_property
    def step(self) -> Any:
        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def step(params, state, ema, latents, ids, mask, key, lr, shift, max_sigma, decay):
            k1, k2 = jax.random.split(key)
            s = jax.nn.sigmoid(jax.random.normal(k1, (latents.shape[0],)))
            sigma = max_sigma * shift * s / (1 + (shift - 1) * s)
            noise = jax.random.normal(k2, latents.shape)
            value, grads = jax.value_and_grad(lambda p: self.loss(p, latents, ids, mask, sigma, noise).mean())(params)
            updates, state = self.opt.update(grads, state, params)
            params = {n: params[n] - lr * (1.0 if self.muon[n] else 0.5) * updates[n] for n in params}
            ema = {n: decay * ema[n] + (1 - decay) * params[n] for n in params}
            return params, state, ema, value

        return step

    def batch(self, bank: Bank, kind: Kind, rng: np.random.Generator, mean: np.ndarray, std: np.ndarray) -> tuple:
        picks = rng.integers(len(bank.scenes[kind.name]), size=kind.batch)
        latents = np.stack([bank.latents[kind.name][i] for i in picks]).astype(np.float32)
        texts = ["" if rng.random() < 0.1 else caption(bank.scenes[kind.name][i], rng) for i in picks]
        return (latents - mean) / std, *tokens_of(self.tok, texts)


def train(run: Path, minutes: float, seed: int = 0, peak: float = 3e-3) -> None:
    """Train (or go on) until ``minutes`` of training in all; leaves ``dit.npz`` (moving average)."""
    trainer, bank = Trainer(run, seed), Bank(run)
    statistics = run / "statistics.npz"
    if not statistics.exists():
        mean64, std64 = bank.statistics()
        np.savez(statistics, mean=mean64, std=std64)
    with np.load(statistics) as data:
        mean, std = data["mean"].astype(np.float32), data["std"].astype(np.float32)
    trees: dict[str, Any] = {"params": trainer.params, "opt": trainer.opt.init(trainer.params), "ema": trainer.params}
    trees["ema"] = jax.tree.map(jnp.array, trees["ema"])
    meta: dict[str, Any] = {"seconds": 0.0, "step": 0}
    checkpoint = run / "dit_checkpoint.npz"
    if checkpoint.exists():
        trees, meta = store.load(checkpoint, trees)
    rng = np.random.default_rng([seed, meta["step"]])
    log, total = store.Log(run / "dit_log.jsonl"), 60 * minutes
    shares = np.array([k.share / (k.tokens * k.batch) for k in KINDS])
    losses: dict[str, float] = {}
    last, saved = time.time(), time.time()
    while meta["seconds"] < total:
        i, progress = meta["step"], meta["seconds"] / total
        usable = [j for j, k in enumerate(KINDS) if bank.scenes[k.name]]
        p = shares[usable] / shares[usable].sum()
        kind = KINDS[usable[rng.choice(len(usable), p=p)]]
        lr = peak * min(1.0, i / 80) * (1.0 if progress < 0.55 else 1 - 0.97 * (progress - 0.55) / 0.45)
        latents, ids, mask = trainer.batch(bank, kind, rng, mean, std)
        key = jax.random.fold_in(jax.random.key(seed), i)
        decay = min(EMA, 1 - 1 / (1 + 0.1 * i))
        params, opt, ema, value = trainer.step(
            trees["params"],
            trees["opt"],
            trees["ema"],
            latents,
            ids,
            mask,
            key,
            lr,
            training_shift(kind),
            kind.max_sigma,
            decay,
        )
        trees = {"params": params, "opt": opt, "ema": ema}
        value = float(value)
        if not np.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {i}; the last checkpoint is {checkpoint}")
        losses[kind.name] = 0.98 * losses.get(kind.name, value) + 0.02 * value
        now = time.time()
        meta = {"seconds": meta["seconds"] + min(now - last, 5.0), "step": i + 1}
        last = now
        log(phase="dit", **meta, lr=lr, **losses)
        if now - saved > 120:
            store.save(checkpoint, trees, meta)
            store.save(run / "dit.npz", {"params": trees["ema"]}, meta)
            bank.refresh()
            saved = now
    store.save(checkpoint, trees, meta)
    store.save(run / "dit.npz", {"params": trees["ema"]}, meta)
