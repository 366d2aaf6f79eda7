"""Training: a step on a subset of tokens is the step on all of them; a training goes on from the shipped model."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from videodiff.resources import shipped_model
from videodiff.tiny import train, train_dit

TENSORS = ("transformer", "vae", "text_encoder")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train.start(folder)
    return folder


def test_a_training_from_the_shipped_model_holds_its_weights(run: Path, tmp_path: Path) -> None:
    """Exported at once, every weight file is the shipped one, byte for byte."""
    train.export(run, tmp_path / "out")
    for part in TENSORS:
        (file,) = (shipped_model() / part).glob("*.safetensors")
        assert (tmp_path / "out" / part / file.name).read_bytes() == file.read_bytes(), part


def test_a_started_folder_is_not_overwritten(run: Path) -> None:
    with pytest.raises(FileExistsError, match="give a new folder with --run"):
        train.start(run)


def test_a_subset_of_tokens_is_trained_at_its_true_positions(run: Path) -> None:
    trainer = train_dit.Trainer(run)
    rng = np.random.default_rng(0)
    latents, noise = jnp.asarray(rng.standard_normal((2, 1, 2, 6, 8, 16)), jnp.float32)
    ids, mask = train_dit.tokens_of(trainer.tok, ["a red ball bounces over a meadow"])
    sigma = jnp.array([0.7])
    loss = jax.jit(lambda tokens: trainer.loss(trainer.params, latents, ids, mask, sigma, noise, tokens))
    everything = loss(None)
    shuffled = jnp.asarray(rng.permutation(2 * 3 * 4))
    np.testing.assert_allclose(loss(shuffled), everything, rtol=1e-5)
    assert abs(loss(shuffled[:6]) - everything) > 1e-4  # a part is another number: the choice does reach the loss


def test_patchify_follows_the_patch_embedding() -> None:
    """Token i holds the 2x2 latents that the transformer's patch i covers, channel fastest."""
    latents = jnp.arange(2 * 4 * 6 * 3, dtype=jnp.float32).reshape(1, 2, 4, 6, 3)
    tokens = train_dit.patchify(latents)
    assert tokens.shape == (1, 12, 12)
    np.testing.assert_array_equal(tokens[0, 7].reshape(2, 2, 3), latents[0, 1, 0:2, 2:4])
