"""The world is drawn the same at every size, captions say what is there, and the judge sees it."""

from collections import Counter

import numpy as np
import pytest

from videodiff.tiny.captions import (
    HELD_OUT_TEMPLATES,
    LABEL_CLASSES,
    TEMPLATES,
    caption,
    held_out_prompts,
    is_held_out,
    labels,
    training_scene,
)
from videodiff.tiny.judge import compare, judge
from videodiff.tiny.world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Scene, Thing, render, sample_scene


def test_the_world_is_large_enough():
    assert len(SHAPES) >= 4
    assert len(COLOURS) >= 6
    assert len(MOTIONS) >= 6
    assert len(BACKGROUNDS) >= 4


def test_the_judge_is_right_on_drawn_clips():
    pairs = held_out_prompts(60, seed=5)
    right: Counter = Counter()
    for scene, _ in pairs:
        right.update(compare(judge((render(scene, 9, 96, 96) * 255).astype(np.uint8)), scene))
    assert {k: v / len(pairs) >= 0.98 for k, v in right.items()} == dict.fromkeys(
        ("background", "colour", "count", "shape", "motion"), True
    )


@pytest.mark.parametrize("key", ["background", "colour", "count", "shape", "motion"])
def test_the_judge_notices_what_is_wrong(key):
    shown = Scene("meadow", (Thing("ball", "red", "", 0.0, 0.0),), "left")
    asked = {
        "background": Scene("desert", shown.things, "left"),
        "colour": Scene("meadow", (Thing("ball", "blue", "", 0.0, 0.0),), "left"),
        "count": Scene("meadow", (*shown.things, Thing("ball", "red", "", 0.3, 0.0)), "left"),
        "shape": Scene("meadow", (Thing("star", "red", "", 0.0, 0.0),), "left"),
        "motion": Scene("meadow", shown.things, "up"),
    }[key]
    clip = render(shown, 9, 96, 96)
    assert all(compare(judge(clip), shown).values())
    assert not compare(judge(clip), asked)[key]


def test_a_window_is_a_part_of_the_frame():
    scene = sample_scene(np.random.default_rng(3))
    whole = render(scene, 3, 64, 96)
    part = render(scene, 3, 64, 96, window=(10, 20, 30, 40))
    np.testing.assert_allclose(part, whole[:, 10:40, 20:60], atol=1e-6)


def test_sizes_show_the_same_scene():
    scene = Scene("studio", (Thing("square", "blue", "big", 0.05, -0.02, 0.1),), "grow")
    small, large = render(scene, 3, 64, 64), render(scene, 3, 256, 256)
    averaged = large.reshape(3, 64, 4, 64, 4, 3).mean((2, 4))
    assert np.abs(averaged - small).mean() < 0.01


def test_held_out_scenes_and_phrasings_stay_out_of_training():
    rng = np.random.default_rng(0)
    assert not any(is_held_out(training_scene(rng)) for _ in range(200))
    assert not set(TEMPLATES) & set(HELD_OUT_TEMPLATES)
    pairs = held_out_prompts(20)
    assert all(is_held_out(s) for s, _ in pairs)
    assert held_out_prompts(20) == pairs


def test_captions_name_everything():
    rng = np.random.default_rng(1)
    for _ in range(100):
        scene = sample_scene(rng)
        text = caption(scene, rng)
        assert all(t.colour in text for t in scene.things)
        assert (" and " in text.replace("up and down", "")) == (len(scene.things) == 2)


def test_labels_fit_their_classes():
    rng = np.random.default_rng(2)
    for _ in range(100):
        assert all(0 <= v < n for v, n in zip(labels(sample_scene(rng)), LABEL_CLASSES, strict=True))
