"""Prompt cleaning against what diffusers' prompt_clean gave."""

from __future__ import annotations

import json

import numpy as np
import pytest
from text_support import GOLDENS, RAW_TEXTS

from videodiff.text.clean import clean_prompt

CLEANED = json.loads(bytes(np.load(GOLDENS)["cleaned"]))


@pytest.mark.parametrize(("raw", "want"), list(zip(RAW_TEXTS, CLEANED, strict=True)), ids=range(len(RAW_TEXTS)))
def test_equals_diffusers(raw: str, want: str) -> None:
    assert clean_prompt(raw) == want


def test_the_cases_are_not_trivial() -> None:
    assert sum(raw != want for raw, want in zip(RAW_TEXTS, CLEANED)) >= 9


@pytest.mark.parametrize("bad", [None, 3, b"bytes", ["a list"]])
def test_refuses_what_is_no_string(bad) -> None:
    with pytest.raises(ValueError, match="must be a string, got"):
        clean_prompt(bad)
