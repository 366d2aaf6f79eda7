"""Make a tokenizer folder for a small closed vocabulary, the way T5 tokenizers are stored.

Owns: the three files of the folder and the table that folds letter case and punctuation. Does not own: using them
(`tokenizer`). Invariant: transformers' T5TokenizerFast, which rebuilds itself from the vocabulary and the normaliser
table alone, and the ``tokenizers`` library reading tokenizer.json give the same ids.
"""

from __future__ import annotations

import base64
import json
import math
import os
import string
import struct
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"  # ids 0, 1, 2
SPACE = "\u2581"  # how SentencePiece writes the start of a word


def folding_table() -> dict[str, str]:
    """What the normaliser replaces: capitals by small letters, accented Latin letters by plain ones, ASCII and common
    typographic punctuation by a space, apostrophes by nothing."""
    table = {c: " " for c in string.punctuation + "\u2013\u2014\u2026\u201c\u201d\u00a1\u00bf\u3001\u3002\uff0c\uff01"}
    table |= {c: c.lower() for c in string.ascii_uppercase}
    table |= {"'": "", "\u2019": "", "`": ""}
    for code in range(0x00C0, 0x0180):
        plain = unicodedata.normalize("NFKD", chr(code))[0].lower()
        if plain in string.ascii_lowercase:
            table[chr(code)] = plain
    return table


def build_tokenizer(folder: str | os.PathLike[str], captions: Iterable[str], max_words: int | None = None) -> int:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Every word of the captions becomes one token, ids 3, 4, ... from the most to the least frequent one (ties in
    alphabetical order). Letter case, accents and punctuation make no difference. A word that was never seen is one
    <unk>, or its longest known beginning and one <unk> ("circles" -> "circle", <unk>).

    Args:
      folder: where to write; made when missing.
      captions: whole captions, or just the words.
      max_words: keep the most frequent ones only.

    Returns:
      The vocabulary size, special tokens included: at least this many rows are needed in the embedding.

    Raises:
      ValueError: the captions hold no word.
    """
    normalizer = normalizers.Precompiled(precompile(folding_table()))
    counts = Counter(word for caption in captions for word in normalizer.normalize_str(caption).split())
    if not counts:
        raise ValueError("captions hold no word")
    words = sorted(counts, key=lambda w: (-counts[w], w))[:max_words]
    total = sum(counts[w] for w in words)
    vocab = [(PAD, 0.0), (EOS, 0.0), (UNK, 0.0)]
    vocab += [(SPACE + w, math.log(counts[w] / total)) for w in words]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")]
    )
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", EOS], pair=["$A", EOS, "$B", EOS], special_tokens=[(EOS, 1)]
    )
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
    backend.add_special_tokens(list(special.values()))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        **special,
        "added_tokens_decoder": {str(i): _added(t) for i, t in enumerate((PAD, EOS, UNK))},
        "additional_special_tokens": [],
        "clean_up_tokenization_spaces": False,
        "extra_ids": 0,
        "model_max_length": 512,
        "tokenizer_class": "T5TokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", special)
    return len(vocab)


def _added(content: str) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, **flags, "special": True}


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def precompile(table: Mapping[str, str]) -> bytes:
    """A SentencePiece ``precompiled_charsmap``: a double-array trie of UTF-8 keys over a blob of replacements.

    Layout (SentencePiece ``normalizer.cc``, darts-clone ``darts.h``): uint32 size of the trie in bytes, the trie,
    then the replacements, each ended by a zero byte; a leaf's value is its replacement's byte offset. A trie unit is
    a uint32: bits 0-7 label, bit 8 "has a leaf", bit 9 "offset is in units of 256", bits 10-30 offset; a leaf has
    bit 31 set and the value below it. The child of unit i by byte c lies at i ^ offset(i) ^ c, the leaf at byte 0.

    Args:
      table: replacements of single characters; none may be empty or contain a zero byte.
    """
    blob = bytearray()
    values: dict[bytes, int] = {}
    offsets: dict[str, int] = {}
    for key in sorted(table, key=lambda k: k.encode()):
        if not key or "\0" in key + table[key]:
            raise ValueError(f"{key!r} cannot be a key of a character map")
        if table[key] not in offsets:
            offsets[table[key]] = len(blob)
            blob += table[key].encode() + b"\0"
        values[key.encode()] = offsets[table[key]]
    units = _double_array(values)
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + bytes(blob)


def _double_array(values: Mapping[bytes, int]) -> list[int]:
    """Place every node of the trie of ``values`` into one array; first fit.

    A lookup checks a unit's label, not its parent, so no two nodes may have the same base. Nor does it check its
    index, so every base is followed by a whole block of 256 units.
    """
    units: list[int] = [0]
    used = {0}
    bases: set[int] = set()

    def place(prefix: bytes, index: int) -> None:
        labels = sorted({k[len(prefix)] for k in values if len(k) > len(prefix) and k.startswith(prefix)})
        leaf = prefix in values
        slots = ([0] if leaf else []) + labels
        base = next(b for b in range(1, 1 << 21) if b not in bases and all(b ^ c not in used for c in slots))
        bases.add(base)
        used.update(base ^ c for c in slots)
        units.extend([0] * ((base | 255) + 1 - len(units)))
        offset = base ^ index
        assert offset < 1 << 21, "a larger trie needs scaled offsets"
        units[index] |= (offset << 10) | (int(leaf) << 8)
        if leaf:
            units[base] = (1 << 31) | values[prefix]
        for c in labels:
            units[base ^ c] |= c
            place(prefix + bytes([c]), base ^ c)

    place(b"", 0)
    return units


def read_charsmap(tokenizer_json: str | os.PathLike[str]) -> bytes:
    """The normaliser table stored in a tokenizer.json."""
    data = json.loads(Path(tokenizer_json).read_text(encoding="utf-8"))
    return base64.b64decode(data["normalizer"]["precompiled_charsmap"])
