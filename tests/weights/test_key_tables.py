"""The key tables against the published tensor names and shapes (a golden from diffusers), without real arrays."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from models_support import GOLDENS, PUBLISHED, TRANSFORMERS, source_shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_tensor_is_consumed_once_with_its_shape(name: str) -> None:
    config, tensors, parameters = PUBLISHED[name]
    published = json.loads(np.load(GOLDENS / "models.npz")["published"].tobytes())[name]
    ours = {key: list(shape) for key, shape in source_shapes(config).items()}  # refuses doubles and left-overs
    assert ours == published
    assert len(ours) == tensors
    assert sum(math.prod(shape) for shape in ours.values()) == parameters


def test_norm_before_cross_attention_is_optional() -> None:
    with_norm, without = (source_shapes(TRANSFORMERS[name]) for name in ("odd", "plain"))
    assert {k.split(".", 2)[2] for k in with_norm if ".norm2." in k} == {"norm2.weight", "norm2.bias"}
    assert not [k for k in without if ".norm2." in k]
