"""Prompts -> Conditioning: the one form in which text reaches the denoiser.

Owns: bucketing by length, zero rows after the end, and folding those rows into one. Does not own: cleaning, tokens,
the encoder. Invariant: what a prompt encodes to depends on neither its batch nor the bucket it ran in, and rows after
its end are exactly zero.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from videodiff.text.clean import clean_prompt
from videodiff.text.tokenizer import Tokenizer
from videodiff.text.umt5 import UMT5Encoder

MAX_LENGTH = 512  # text tokens of every Wan model
BUCKETS = (32, 64, 128, 256, 512)
NEVER = -1e30  # added to a logit: probability exactly 0 in float32, finite in bfloat16

log = logging.getLogger(__name__)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts.

    Args:
      embeds: [B, L, d] (L = 512 for Wan), exactly zero from row ``lengths[b]`` on.
      lengths: [B] int32, in [1, L].
    """

    embeds: jax.Array
    lengths: jax.Array

    @classmethod
    def from_embeds(cls, embeds: jax.Array, max_length: int = MAX_LENGTH) -> Conditioning:
        """Wrap embeddings made elsewhere ([B, L, d], L <= max_length): the zero rows at the end are its padding.

        Raises:
          ValueError: the shape is not [B, L, d], or L is too long.
        """
        if embeds.ndim != 3 or not 1 <= embeds.shape[1] <= max_length:
            raise ValueError(f"prompt embeddings must be [batch, 1..{max_length}, width], got {embeds.shape}")
        embeds = jnp.pad(embeds, ((0, 0), (0, max_length - embeds.shape[1]), (0, 0)))
        used = jnp.any(embeds != 0, axis=-1)  # [B, L]
        lengths = jnp.max(jnp.where(used, jnp.arange(1, max_length + 1), 1), axis=1)
        return cls(embeds, lengths.astype(jnp.int32))


def bucket(length: int, max_length: int = MAX_LENGTH) -> int:
    """The smallest bucket that holds ``length`` rows, at most ``max_length``."""
    if not 1 <= length <= max_length:
        raise ValueError(f"length must be in [1, {max_length}], got {length=}")
    return min(next((b for b in BUCKETS if b >= length), max_length), max_length)


@partial(jax.jit, static_argnums=(0, 4))
def _encode(graph, state, ids: jax.Array, mask: jax.Array, max_length: int) -> jax.Array:
    """[B, L] -> [B, max_length, d], zero after each end."""
    encoder: UMT5Encoder = nnx.merge(graph, state)
    x = encoder(ids, mask)
    x = jnp.where(mask[:, :, None] != 0, x, 0)
    return jnp.pad(x, ((0, 0), (0, max_length - x.shape[1]), (0, 0)))


def encode_prompts(
    encoder: UMT5Encoder, tokenizer: Tokenizer, prompts: Sequence[str], max_length: int = MAX_LENGTH
) -> Conditioning:
    """Clean, tokenise and encode prompts.

    The result equals diffusers' WanPipeline.encode_prompt at max_sequence_length=512. The encoder runs on the smallest
    bucket that holds the longest prompt; padding is masked inside it, so the bucket does not matter. A prompt of ""
    becomes its end token alone. A prompt that does not fit is cut, and a warning names the text it lost.

    Args:
      encoder: any compute dtype.
      prompts: B strings.
      max_length: rows of the result.

    Returns:
      Conditioning with embeds [B, max_length, d_model] in the encoder's compute dtype.

    Raises:
      ValueError: no prompt, something that is no string, or a tokenizer that does not belong to the encoder.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts must be a list of strings, got one string: {prompts!r}")
    tokens = tokenizer([clean_prompt(p) for p in prompts], max_length)
    for i, cut in enumerate(tokens.cut_off):
        if cut:
            log.warning("prompt %d is longer than %d tokens; this part is cut off: %r", i, max_length, cut)
    vocab_size = encoder.config.vocab_size
    if tokens.ids.max() >= vocab_size:
        raise ValueError(
            f"the tokenizer gave token id {tokens.ids.max()}, the text encoder has {vocab_size=}: they do not belong "
            "together"
        )
    length = bucket(tokens.ids.shape[1], max_length)
    ids = np.full((len(prompts), length), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(prompts), length), np.int32)
    ids[:, : tokens.ids.shape[1]] = tokens.ids
    mask[:, : tokens.mask.shape[1]] = tokens.mask
    graph, state = nnx.split(encoder)
    return Conditioning(_encode(graph, state, ids, mask, max_length), jnp.asarray(tokens.lengths))


def fold_padding(conditioning: Conditioning, rows: int | None = None) -> tuple[jax.Array, jax.Array]:
    """The same cross-attention from fewer rows: all zero rows after the end become one.

    Wan attends to all 512 rows without a mask, so the 512 - n zero rows of a prompt of n tokens are 512 - n equal
    keys and values. Softmax over m equal logits s weighs their common value as one logit s + log(m): exact.

    Args:
      conditioning: embeds [B, L, d].
      rows: Lb, rows to keep before the zero row; at least the longest length (a shorter one loses text). None takes
        the bucket of the longest prompt and needs concrete lengths; pass it under jit.

    Returns:
      text [B, Lb + 1, d], its last row zero; logit_bias [B, Lb + 1] float32 to add to every head's logits: 0 on
      tokens, log(L - n) on the last row, ``NEVER`` on rows between (and on the last one when L == n).
    """
    total = conditioning.embeds.shape[1]
    if rows is None:
        rows = bucket(int(jnp.max(conditioning.lengths)), total)
    if not 1 <= rows <= total:
        raise ValueError(f"rows must be in [1, {total}], got {rows=}")
    text = jnp.pad(conditioning.embeds[:, :rows], ((0, 0), (0, 1), (0, 0)))  # [B, Lb + 1, d]
    n = conditioning.lengths[:, None]  # [B, 1]
    tokens = jnp.where(jnp.arange(rows) < n, 0.0, NEVER)  # [B, Lb]
    zero_row = jnp.where(n < total, jnp.log(jnp.maximum(total - n, 1).astype(jnp.float32)), NEVER)
    return text, jnp.concatenate([tokens, zero_row], axis=1).astype(jnp.float32)
