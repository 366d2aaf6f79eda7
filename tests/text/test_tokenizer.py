"""Tokens of small tokenizers: ids against transformers' goldens, the end token, padding, what is cut off, errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from text_support import CAPTIONS, GOLDENS, PROMPTS
from tokenizers import models, normalizers

from videodiff.text.build_tokenizer import build_tokenizer, folding_table, precompile, read_charsmap
from videodiff.text.clean import clean_prompt
from videodiff.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(path, CAPTIONS)
    return path


def test_ids_equal_transformers(folder: Path) -> None:
    golden = np.load(GOLDENS)
    tokens = Tokenizer(folder)([clean_prompt(p) for p in PROMPTS])
    np.testing.assert_array_equal(tokens.lengths, golden["prompt_lengths"])
    np.testing.assert_array_equal(tokens.ids[tokens.mask == 1], golden["prompt_ids"])


def test_end_token_and_padding(folder: Path) -> None:
    tokens = Tokenizer(folder)(["a red star", "", "star"], pad_to=7)
    assert tokens.ids.shape == tokens.mask.shape == (3, 7)
    assert tokens.ids.dtype == tokens.mask.dtype == np.int32
    np.testing.assert_array_equal(tokens.lengths, [4, 1, 2])
    for ids, mask, n in zip(tokens.ids, tokens.mask, tokens.lengths):
        assert ids[n - 1] == 1
        assert not ids[n:].any()
        np.testing.assert_array_equal(mask, np.arange(7) < n)
    assert tokens.cut_off == ("", "", "")


def test_cut_keeps_the_end_token_and_reports_the_text(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    whole = tokenizer(["a red circle moves left"]).ids[0]
    tokens = tokenizer(["a red circle moves left", "a red circle"], max_length=4)
    np.testing.assert_array_equal(tokens.ids, [[*whole[:3], 1], [*whole[:3], 1]])
    assert tokens.cut_off == ("moves left", "")
    assert tokenizer(["red star"], max_length=1).ids.tolist() == [[1]]


def test_stored_truncation_and_padding_do_not_matter(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "t")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "t" / "tokenizer.json"))
    text = ["a red circle moves left"]
    np.testing.assert_array_equal(Tokenizer(tmp_path / "t")(text).ids, Tokenizer(folder)(text).ids)


def test_special_tokens_come_from_the_side_files(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.Unigram([("[P]", 0.0), ("[U]", 0.0), ("x", -1.0), ("[E]", 0.0)], unk_id=1))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no pad_token '<pad>'"):
        Tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "[P]"}, "eos_token": "[U]"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[U]", "eos_token": "[E]"}))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.eos_id) == (0, 1, 3)
    assert tokenizer(["x"], pad_to=3).ids.tolist() == [[2, 3, 0]]


def test_errors_name_the_file(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist$"):
        Tokenizer(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"spiece\.model only: convert it"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer(tmp_path)


def test_bad_calls(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    with pytest.raises(ValueError, match="non-empty list"):
        tokenizer([])
    with pytest.raises(ValueError, match="non-empty list"):
        tokenizer("a string")
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        tokenizer(["a"], max_length=0)
    with pytest.raises(ValueError, match="pad_to=2 is shorter than the longest prompt of 4 tokens"):
        tokenizer(["a red star"], pad_to=2)


def test_built_vocabulary(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2)
    words = {w for c in CAPTIONS for w in c.lower().replace(".", " ").replace(",", " ").split()}
    assert tokenizer.vocab_size == 3 + len(words)
    assert tokenizer(["a"]).ids.tolist() == [[3, 1]]  # the most frequent word
    for word in words:
        ids = tokenizer([word]).ids[0]
        assert len(ids) == 2
        assert ids[0] > 2, word


def test_case_accents_and_punctuation_make_no_difference(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    want = tokenizer(["a red circle moves left"]).ids.tolist()
    for text in ("A RED CIRCLE moves left.", "a, red; circle: (moves) left!", "a r\u00e9d circle\u2014moves-left"):
        assert tokenizer([text]).ids.tolist() == want, text


def test_unknown_words_do_not_explode(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for word in ("xylophone", "\u7ea2\u8272\u5706", "circles", "\U0001f680\U0001f680", "incomprehensibilities"):
        ids = tokenizer([word]).ids[0]
        assert len(ids) <= 3, word
        assert 2 in ids, word


def test_max_words_keeps_the_most_frequent(tmp_path: Path) -> None:
    assert build_tokenizer(tmp_path, ["a b b c c c", "d"], max_words=2) == 5
    assert Tokenizer(tmp_path)(["c b a d"]).ids.tolist() == [[3, 4, 2, 2, 1]]
    with pytest.raises(ValueError, match="no word"):
        build_tokenizer(tmp_path, ["...", ""])


def random_table() -> dict[str, str]:
    r = np.random.default_rng(0)
    keys = [chr(c) for c in sorted(r.choice(np.arange(0x21, 0x3000), 700, replace=False))]
    return {k: "".join(map(chr, r.integers(0x61, 0x7B, r.integers(0, 4)))) for k in keys}


@pytest.mark.parametrize("table", [random_table(), folding_table(), {"A": "a"}, {"\U0010ffff": "x"}], ids=len)
def test_trie_against_plain_replacement(table: dict[str, str]) -> None:
    """The tokenizers library reads the trie written here: every key is replaced, all other characters are left alone."""
    characters = [chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000 and chr(c) not in "\r\n"]
    normalizer = normalizers.Precompiled(precompile(table))
    got = normalizer.normalize_str("\n".join(characters)).split("\n")
    wrong = [hex(ord(c)) for c, g in zip(characters, got, strict=True) if g != table.get(c, c)]
    assert not wrong


def test_stored_table(tmp_path: Path) -> None:
    build_tokenizer(tmp_path, ["x"])
    assert read_charsmap(tmp_path / "tokenizer.json") == precompile(folding_table())
    for bad in ("", "\0"):
        with pytest.raises(ValueError, match="cannot be a key"):
            precompile({bad: "x"})
