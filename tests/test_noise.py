"""Noise belongs to a seed, not to a place in a batch."""

import numpy as np
import pytest

from videodiff.noise import from_published, initial_noise, resolve_seeds, to_published

SHAPE = (2, 3, 5, 4)


def test_noise_does_not_depend_on_the_batch():
    batch = np.asarray(initial_noise([3, 4, 3], SHAPE))
    np.testing.assert_array_equal(batch[1], np.asarray(initial_noise([4], SHAPE))[0])
    np.testing.assert_array_equal(batch[0], batch[2])
    assert np.abs(batch[0] - batch[1]).max() > 0.1


def test_noise_is_standard_normal():
    x = np.asarray(initial_noise([0], (8, 32, 32, 16)))
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01


@pytest.mark.parametrize("seed", [None, -1])
def test_a_seed_is_picked_and_reported(seed):
    drawn = {resolve_seeds(seed, 1, 1)[0] for _ in range(8)}
    assert len(drawn) > 1


def test_copies_count_up_and_prompts_share():
    assert resolve_seeds(7, 2, 3) == [7, 8, 9, 7, 8, 9]
    assert resolve_seeds([5, 1], 2, 1) == [5, 1]


@pytest.mark.parametrize(("seed", "words"), [(-2, "seed=-2"), (2**32, "seed=4294967296"), ([1], "one value a video")])
def test_bad_seeds(seed, words):
    with pytest.raises(ValueError, match=words):
        resolve_seeds(seed, 2, 1)


def test_published_layout_round_trip():
    x = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(from_published(to_published(x), x.shape)), x)


def test_bad_latents():
    with pytest.raises(ValueError, match="batch, channels, frames"):
        from_published(np.zeros((1, 2, 3, 5, 4)), (1, *SHAPE))
    with pytest.raises(ValueError, match="finite"):
        from_published(np.full((1, 4, 2, 3, 5), np.nan), (1, *SHAPE))
