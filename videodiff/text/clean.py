"""Prompt clean-up, character for character what diffusers' WanPipeline does.

Owns: the text a prompt becomes before it is tokenised. Does not own: tokens. Invariant: no lower-casing, no rewording;
cleaning a clean prompt changes nothing unless it holds HTML entities escaped more than twice.
"""

from __future__ import annotations

import html
import re

import ftfy

_WHITESPACE = re.compile(r"\s+")


def clean_prompt(text: str) -> str:
    """Repair mis-decoded Unicode, unescape HTML entities twice, make every run of whitespace one space, and strip.

    Source: ``prompt_clean`` of diffusers 0.42.1, ``pipelines/wan/pipeline_wan.py``.

    Raises:
      ValueError: ``text`` is not a string.
    """
    if not isinstance(text, str):
        raise ValueError(f"a prompt must be a string, got {type(text).__name__}: {text!r}")
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _WHITESPACE.sub(" ", text).strip()
