"""Helpers for error messages.

Owns: closest-match wording. Invariant: a message names the rule, the values and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str], count: int = 1) -> str:
    """A sentence naming the closest known names, or all of them when nothing is close.

    Args:
      name: what the caller wrote.
      known: legal names.
      count: how many close names to offer at most.
    """
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=count, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(repr(n) for n in near)}?"
    return f"known names: {', '.join(options)}"
