"""Prompt text -> token ids, with the ``tokenizers`` library on a model folder's tokenizer.json.

Owns: end-of-sequence, truncation that keeps it, right padding, and the text an over-long prompt loses. Does not own:
cleaning (`clean`), making a tokenizer (`build_tokenizer`). Invariant: every row holds at least the end token, and
``mask`` is 1 exactly on the tokens up to and including it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

FILE = "tokenizer.json"
SIDE_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins
DEFAULT_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # of every T5 tokenizer


@dataclass(frozen=True)
class Tokens:
    """A tokenised batch.

    Args:
      ids: [B, L] int32, right-padded.
      mask: [B, L] int32, 1 on tokens (the end token included), 0 on padding.
      cut_off: for each prompt the text that did not fit, "" when all of it did.
    """

    ids: np.ndarray
    mask: np.ndarray
    cut_off: tuple[str, ...]

    @property
    def lengths(self) -> np.ndarray:
        """[B] int32, tokens of each prompt with its end token."""
        return self.mask.sum(axis=1, dtype=np.int32)


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
      folder: the folder that holds tokenizer.json, and special_tokens_map.json and tokenizer_config.json where the
        special tokens are not named <pad>, </s> and <unk>.

    Raises:
      ValueError: the file is missing or unreadable, or lacks a special token.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / FILE
        if not path.is_file():
            hint = ""
            if (Path(folder) / "spiece.model").exists():
                hint = (
                    "; the folder has spiece.model only: convert it with transformers, "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                )
            raise ValueError(f"tokenizer file {path} does not exist{hint}")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise ValueError(f"tokenizer file {path} cannot be read: {e}") from e
        self._backend.no_truncation()  # a stored setting would count differently
        self._backend.no_padding()
        names = _special_tokens(Path(folder))
        self.pad_id = self._special(names, "pad_token", path)
        self.eos_id = self._special(names, "eos_token", path)
        self.unk_id = self._special(names, "unk_token", path)

    def _special(self, names: Mapping[str, str], role: str, path: Path) -> int:
        found = self._backend.token_to_id(names[role])
        if found is None:
            raise ValueError(f"{path} has no {role} {names[role]!r}")
        return found

    @property
    def vocab_size(self) -> int:
        """Ids lie in [0, vocab_size)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __call__(self, texts: Sequence[str], max_length: int = 512, pad_to: int | None = None) -> Tokens:
        """Tokenise.

        Args:
          texts: B prompts, cleaned already.
          max_length: tokens to keep at most, the end token included.
          pad_to: L; the longest prompt of the batch when None.

        Raises:
          ValueError: no prompt, max_length below 1, or pad_to too small.
        """
        if not texts or isinstance(texts, str):
            raise ValueError(f"texts must be a non-empty list of strings, got {texts!r}")
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1 (the end token), got {max_length=}")
        rows, cut_off = [], []
        for text, encoding in zip(texts, self._backend.encode_batch(list(texts), add_special_tokens=False)):
            kept = max_length - 1
            rows.append([*encoding.ids[:kept], self.eos_id])
            cut_off.append(text[encoding.offsets[kept][0] :].strip() if len(encoding.ids) > kept else "")
        longest = max(map(len, rows))
        length = longest if pad_to is None else pad_to
        if length < longest:
            raise ValueError(f"pad_to={length} is shorter than the longest prompt of {longest} tokens")
        ids = np.full((len(rows), length), self.pad_id, np.int32)
        mask = np.zeros((len(rows), length), np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        return Tokens(ids, mask, tuple(cut_off))


def _special_tokens(folder: Path) -> dict[str, str]:
    """Role -> token text, from the files beside tokenizer.json; an entry is a string or an object with "content"."""
    names = dict(DEFAULT_SPECIAL)
    for file in SIDE_FILES:
        path = folder / file
        if not path.is_file():
            continue
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{path} is not valid JSON: {e}") from e
        for role in names:
            entry = data.get(role)
            text = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(text, str):
                names[role] = text
    return names
