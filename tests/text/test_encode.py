"""Conditioning: equality with diffusers' goldens, independence of batch and bucket, zero rows, the folded form."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from text_support import CAPTIONS, CONFIGS, GOLDENS, PROMPTS, load_encoder, relative_l2, run, write_encoder

from videodiff.text.build_tokenizer import build_tokenizer
from videodiff.text.encode import BUCKETS, Conditioning, bucket, encode_prompts, fold_padding
from videodiff.text.tokenizer import Tokenizer
from videodiff.text.umt5 import UMT5Encoder

GOLDEN = np.load(GOLDENS)


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> tuple[UMT5Encoder, Tokenizer]:
    path = tmp_path_factory.mktemp("model")
    build_tokenizer(path / "tokenizer", CAPTIONS)
    config = CONFIGS["wide"]
    return load_encoder(write_encoder(path / "text_encoder", config), config), Tokenizer(path / "tokenizer")


def test_equals_diffusers(room) -> None:
    c = encode_prompts(*room, PROMPTS)
    assert c.embeds.shape == (len(PROMPTS), 512, 24)
    np.testing.assert_array_equal(c.lengths, GOLDEN["prompt_lengths"])
    embeds = np.asarray(c.embeds)
    rows = np.concatenate([e[: min(n, 200)] for e, n in zip(embeds, GOLDEN["prompt_lengths"])])
    assert relative_l2(rows, GOLDEN["prompt_embeds"]) <= 1e-5
    for e, n in zip(embeds, GOLDEN["prompt_lengths"]):
        assert not e[n:].any()  # exactly zero after the end
        assert e[:n].any(axis=1).all()


def test_empty_prompt_is_its_end_token(room) -> None:
    c = encode_prompts(*room, ["", "  \n "])
    np.testing.assert_array_equal(c.lengths, [1, 1])
    used = np.asarray(c.embeds).any(axis=-1)
    np.testing.assert_array_equal(used.sum(axis=1), [1, 1])
    np.testing.assert_array_equal(c.embeds[0], c.embeds[1])


def test_a_batch_equals_its_prompts_alone(room) -> None:
    whole = encode_prompts(*room, PROMPTS)
    for i, prompt in enumerate(PROMPTS):  # alone most run in a smaller bucket
        alone = encode_prompts(*room, [prompt])
        assert relative_l2(alone.embeds[0], whole.embeds[i]) <= 2e-6


def test_every_bucket_gives_the_same_rows(room) -> None:
    encoder, tokenizer = room
    tokens = tokenizer(["a red circle moves left"], pad_to=512)
    n = int(tokens.lengths[0])
    want = encode_prompts(encoder, tokenizer, ["a red circle moves left"]).embeds[0, :n]
    for length in (n, BUCKETS[1], BUCKETS[-1]):
        got = run(encoder, tokens.ids[:, :length], tokens.mask[:, :length])[0, :n]
        assert relative_l2(got, want) <= 2e-6


def test_buckets_are_the_programs_that_are_compiled(room) -> None:
    from videodiff.text import encode

    encode._encode.clear_cache()
    for count in (1, 5, 20, 31, 32, 40):  # tokens 2..41: two buckets
        encode_prompts(*room, [" ".join(["red"] * count)])
    assert encode._encode._cache_size() == 2


def test_bucket_sizes() -> None:
    assert [bucket(n) for n in (1, 32, 33, 64, 65, 129, 257, 512)] == [32, 32, 64, 64, 128, 256, 512, 512]
    assert bucket(20, max_length=24) == 24
    assert bucket(300, max_length=400) == 400
    for n in (0, 513):
        with pytest.raises(ValueError, match=rf"in \[1, 512\], got length={n}"):
            bucket(n)


def test_over_long_prompt_warns_with_the_text_it_loses(room, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        c = encode_prompts(*room, ["a star", " ".join(["red"] * 511 + ["purple", "triangle"])])
    np.testing.assert_array_equal(c.lengths, [3, 512])
    assert len(caplog.records) == 1
    assert "prompt 1 is longer than 512 tokens; this part is cut off: 'purple triangle'" in caplog.text


def test_errors(room, tmp_path: Path) -> None:
    encoder, tokenizer = room
    with pytest.raises(ValueError, match="list of strings, got one string: 'a star'"):
        encode_prompts(encoder, tokenizer, "a star")
    with pytest.raises(ValueError, match="non-empty list"):
        encode_prompts(encoder, tokenizer, [])
    with pytest.raises(ValueError, match="a prompt must be a string, got NoneType"):
        encode_prompts(encoder, tokenizer, ["a", None])
    build_tokenizer(tmp_path, [f"w{i}" for i in range(200)])
    with pytest.raises(ValueError, match=r"token id 202, the text encoder has vocab_size=97: they do not belong"):
        encode_prompts(encoder, Tokenizer(tmp_path), ["w9 w99"])


def test_given_embeddings_find_their_ends() -> None:
    embeds = np.zeros((3, 9, 4), np.float32)
    embeds[0, :5] = 1
    embeds[0, 2] = 0  # a zero row inside is not the end
    embeds[1] = -1
    c = Conditioning.from_embeds(jnp.asarray(embeds))
    np.testing.assert_array_equal(c.lengths, [5, 9, 1])
    assert c.embeds.shape == (3, 512, 4)
    np.testing.assert_array_equal(c.embeds[:, :9], embeds)
    for shape in ((9, 4), (1, 513, 4), (1, 0, 4)):
        with pytest.raises(ValueError, match="prompt embeddings must be"):
            Conditioning.from_embeds(jnp.zeros(shape))


def cross_attention(q: np.ndarray, text: np.ndarray, logit_bias: np.ndarray | None, seed: int) -> np.ndarray:
    """Plain float64 cross-attention whose keys and values of zero rows are not zero. q [N, D], text [L, d]."""
    r = np.random.default_rng(seed)
    d = text.shape[1]
    hidden = np.tanh(text @ r.normal(size=(d, 16)) + r.normal(size=16))
    k, v = (hidden @ r.normal(size=(16, 8)) + r.normal(size=8) for _ in range(2))
    logits = q @ k.T / np.sqrt(8)
    if logit_bias is not None:
        logits = logits + logit_bias
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True) @ v


@pytest.mark.parametrize("total", [512, 40])
@pytest.mark.parametrize("rows", [None, "all"])
def test_folded_equals_padded(total: int, rows) -> None:
    r = np.random.default_rng(0)
    lengths = np.array([1, 7, total - 1, total] if rows else [1, 7, 31, 20])
    embeds = r.normal(size=(4, total, 5)).astype(np.float32)
    embeds[np.arange(total) >= lengths[:, None]] = 0
    c = Conditioning(jnp.asarray(embeds), jnp.asarray(lengths, jnp.int32))
    text, bias = fold_padding(c, total if rows else None)
    kept = total if rows else 32
    assert text.shape == (4, kept + 1, 5)
    assert bias.shape == (4, kept + 1)
    assert bias.dtype == jnp.float32
    assert np.isfinite(np.asarray(bias, jnp.bfloat16)).all()
    for i in range(4):
        q = r.normal(size=(6, 8))
        want = cross_attention(q, embeds[i].astype(np.float64), None, i)
        got = cross_attention(q, np.asarray(text[i], np.float64), np.asarray(bias[i], np.float64), i)
        assert relative_l2(got, want) <= 1e-7  # the float32 log of the bias
        if rows is None and lengths[i] < 32:  # and the bias matters
            assert relative_l2(cross_attention(q, np.asarray(text[i], np.float64), None, i), want) > 1e-3


def test_fold_runs_under_jit_with_given_rows(room) -> None:
    c = encode_prompts(*room, ["a red star", ""])
    text, bias = jax.jit(fold_padding, static_argnums=1)(c, 32)
    np.testing.assert_array_equal(text, fold_padding(c)[0])
    np.testing.assert_allclose(bias, fold_padding(c)[1], rtol=1e-6)
    with pytest.raises(ValueError, match=r"rows must be in \[1, 512\], got rows=513"):
        fold_padding(c, 513)
