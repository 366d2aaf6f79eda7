"""Initial noise: seed -> latents.

Owns: which random numbers a seed stands for. Does not own: solvers, dtypes of the model.
Invariant: the noise of one video depends on its seed and its latent shape alone, never on its place in a batch, on the number
of devices or on the model's dtype.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import jax

MAX_SEED = 2**32 - 1


def resolve_seeds(seed: int | Sequence[int] | None, prompts: int, videos_per_prompt: int) -> list[int]:
    """One seed for every video of a batch.

    Args:
      seed: None or -1 picks one; an int s gives copy k of every prompt the seed s + k, so that a prompt in a batch is the
        same prompt alone; a sequence gives one seed a video.
      prompts: number of prompts.
      videos_per_prompt: copies of each prompt; copies are neighbours in the batch.

    Returns:
      prompts * videos_per_prompt seeds in [0, 2^32).

    Raises:
      ValueError: a seed outside [0, 2^32), or a sequence of the wrong length.
    """
    total = prompts * videos_per_prompt
    if isinstance(seed, Sequence):
        seeds = [int(s) for s in seed]
        if len(seeds) != total:
            raise ValueError(f"seed needs one value a video: got {len(seeds)} for {prompts=} x {videos_per_prompt=}")
    else:
        base = secrets.randbelow(2**31) if seed is None or seed == -1 else int(seed)
        seeds = [base + k for _ in range(prompts) for k in range(videos_per_prompt)]
    for s in seeds:
        if not 0 <= s <= MAX_SEED:
            raise ValueError(f"seed={s} must be in [0, {MAX_SEED}], or -1 to pick one")
    return seeds


def initial_noise(seeds: Sequence[int], latent_shape: tuple[int, int, int, int], stream: int = 0) -> jax.Array:
    """Standard normal latents.

    Args:
      seeds: one seed a video.
      latent_shape: (F, Y, X, C) of one video.
      stream: another number is other noise of the same seed; 0 starts a run, 1 is the noise of its refinement.

    Returns:
      [B, F, Y, X, C] float32.
    """
    import jax  # not at the top: seeds are resolved before anything heavy is imported
    import jax.numpy as jnp

    keys = [jax.random.key(s) for s in seeds]
    if stream:
        keys = [jax.random.fold_in(k, stream) for k in keys]
    return jnp.stack([jax.random.normal(k, latent_shape, jnp.float32) for k in keys])


def from_published(latents: np.ndarray | jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Initial noise handed in by the caller, in the published channels-first layout.

    Args:
      latents: [B, C, F, Y, X], any float dtype.
      shape: expected (B, F, Y, X, C).

    Returns:
      [B, F, Y, X, C] float32.

    Raises:
      ValueError: wrong shape or non-finite values.
    """
    import jax.numpy as jnp

    array = np.asarray(latents, np.float32)
    b, f, y, x, c = shape
    if array.shape != (b, c, f, y, x):
        raise ValueError(
            f"latents must be [batch, channels, frames, rows, columns] = {(b, c, f, y, x)}, got {array.shape}"
        )
    if not np.isfinite(array).all():
        raise ValueError("latents must be finite; the array holds NaN or infinity")
    return jnp.asarray(array.transpose(0, 2, 3, 4, 1))


def to_published(latents: np.ndarray) -> np.ndarray:
    """[B, F, Y, X, C] -> [B, C, F, Y, X]."""
    return np.ascontiguousarray(latents.transpose(0, 4, 1, 2, 3))
