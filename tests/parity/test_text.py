"""Live comparison of the text room with transformers' UMT5 and T5TokenizerFast and diffusers' WanPipeline."""

from __future__ import annotations

import html
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from videodiff.configs import TextEncoderConfig
from videodiff.text.build_tokenizer import build_tokenizer, precompile
from videodiff.text.clean import clean_prompt
from videodiff.text.encode import encode_prompts
from videodiff.text.tokenizer import Tokenizer
from videodiff.text.umt5 import UMT5Encoder, position_buckets
from videodiff.weights import keys_text
from videodiff.weights.load import load_module

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))
import text_support as support  # noqa: E402

# fmt: off
WORDS = [
    "a", "red", "blue", "circle", "squares", "moves", "left", "xylophone", "caf\u00e9", "\u732b", "\U0001f680", "</s>",
    "<pad>", "<extra_id_3>", "42", "it's",
]
# fmt: on


def reference(config: TextEncoderConfig, seed: int):
    """A randomly initialised UMT5EncoderModel whose every tensor matters."""
    torch.manual_seed(seed)
    model = transformers.UMT5EncoderModel(transformers.UMT5Config.from_dict(config.to_json())).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            std = 1.0 if "relative_attention_bias" in name else 0.2 if "norm" in name else p.shape[-1] ** -0.5
            p.add_(std * torch.randn_like(p))
    return model


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", support.CONFIGS)
def test_hidden_states(name: str, seed: int, tmp_path: Path) -> None:
    config = support.CONFIGS[name]
    model = reference(config, seed)
    model.save_pretrained(tmp_path)
    ours = support.load_encoder(tmp_path, TextEncoderConfig.from_json(config.to_json()))
    ids, mask = support.batch(config)
    with torch.no_grad():
        want = model(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    got = np.asarray(support.run(ours, ids, mask))
    assert support.relative_l2(got[mask == 1], want[mask == 1]) <= 1e-5


def test_hidden_states_at_full_length(tmp_path: Path) -> None:
    """512 tokens: distances beyond the last bucket."""
    config = support.CONFIGS["wide"]
    model = reference(config, 3)
    model.save_pretrained(tmp_path)
    ours = support.load_encoder(tmp_path, config)
    ids = np.random.default_rng(0).integers(2, config.vocab_size, (2, 512)).astype(np.int32)
    mask = (np.arange(512) < np.array([[512], [300]])).astype(np.int32)
    with torch.no_grad():
        want = model(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    got = np.asarray(support.run(ours, ids, mask))
    assert support.relative_l2(got[mask == 1], want[mask == 1]) <= 1e-5


def test_bfloat16_forward_is_as_good_as_the_references(tmp_path: Path) -> None:
    """In bfloat16 both round; ours must lie as near to the float32 result as transformers' own bfloat16."""
    config = support.CONFIGS["deep"]
    model = reference(config, 4).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    ids, mask = support.batch(config)
    t_ids, t_mask = torch.from_numpy(ids), torch.from_numpy(mask)
    with torch.no_grad():
        low = model(t_ids, t_mask).last_hidden_state.float().numpy()[mask == 1]
        exact = model.float()(t_ids, t_mask).last_hidden_state.numpy()[mask == 1]
    bf16 = support.load_encoder(tmp_path, config, jnp.bfloat16, jnp.bfloat16)
    upcast = support.load_encoder(tmp_path, config, jnp.float32, jnp.bfloat16)
    ours = np.asarray(support.run(bf16, ids, mask), np.float32)[mask == 1]
    assert support.relative_l2(ours, exact) <= 1.25 * support.relative_l2(low, exact)
    assert support.relative_l2(np.asarray(support.run(upcast, ids, mask))[mask == 1], exact) <= 1e-5


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 40), (20, 33), (8, 20), (64, 1000), (12, 4)])
def test_buckets(buckets: int, distance: int) -> None:
    config = TextEncoderConfig(
        vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
        relative_attention_num_buckets=buckets, relative_attention_max_distance=distance,
    )  # fmt: skip
    model = transformers.UMT5EncoderModel(transformers.UMT5Config.from_dict(config.to_json()))
    n = torch.arange(512)
    want = model.encoder.block[0].layer[0].SelfAttention._relative_position_bucket(n[None, :] - n[:, None])
    np.testing.assert_array_equal(position_buckets(512, config), want.numpy())


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(path, support.CAPTIONS)
    return path


@pytest.mark.parametrize("kind", ["T5TokenizerFast", "AutoTokenizer"])
def test_tokenizer_ids(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    theirs = getattr(transformers, kind).from_pretrained(tokenizer_folder)
    assert len(theirs) == Tokenizer(tokenizer_folder).vocab_size  # no sentinel tokens are added behind ours
    theirs.save_pretrained(tmp_path)  # as DiffusionPipeline.save_pretrained writes it
    r = np.random.default_rng(0)
    sep = np.array([" ", ", ", "", "\n", ". "])
    texts = ["".join(w + s for w, s in zip(r.choice(WORDS, n), r.choice(sep, n))) for n in r.integers(0, 700, 60)]
    want = theirs(texts, padding="max_length", max_length=512, truncation=True, add_special_tokens=True)
    for folder in (tokenizer_folder, tmp_path):
        got = Tokenizer(folder)(texts, 512, pad_to=512)
        np.testing.assert_array_equal(got.ids, want.input_ids)
        np.testing.assert_array_equal(got.mask, want.attention_mask)
    assert (got.lengths == 512).any()
    assert any(got.cut_off)


def test_tokenizer_ids_of_a_subword_vocabulary(tmp_path: Path) -> None:
    """As UMT5's own file: pieces inside words, and Metaspace as its only pre-tokenizer, where transformers puts two."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Precompiled(precompile({"\uff21": "A", "\u00bd": "1 2", "\u2028": " "}))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False)
    corpus = [*support.CAPTIONS, *support.RAW_TEXTS, "redo undoing circles squared"] * 3
    backend.train_from_iterator([clean_prompt(t) for t in corpus if clean_prompt(t)], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.T5TokenizerFast.from_pretrained(tmp_path, extra_ids=0)
    r = np.random.default_rng(1)
    parts = [
        *support.RAW_TEXTS,
        *support.CAPTIONS,
        *WORDS[:11],
        "\uff21x",
        "1\u00bd",
        "untrained",
        "\u2028",
        "\u0e01\u0e02",
    ]
    texts = [clean_prompt(" ".join(r.choice(parts, n))) for n in r.integers(0, 40, 80)]
    want = theirs(texts, padding="max_length", max_length=512, truncation=True, add_special_tokens=True)
    got = Tokenizer(tmp_path)(texts, 512, pad_to=512)
    np.testing.assert_array_equal(got.ids, want.input_ids)
    assert "" in texts
    assert (got.lengths == 512).any()
    assert (got.ids == 2).any()


def test_cleaning_random_text() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    r = np.random.default_rng(0)
    parts = [*support.RAW_TEXTS, *WORDS, "&lt;", "&amp;amp;", "&#128640;", "\u3000", "\u00c3\u00a9", "\u200d", "<", "&"]
    changed = 0
    for _ in range(400):
        text = "".join(r.choice(parts, r.integers(1, 8)))
        for variant in (text, html.escape(text), html.escape(html.escape(text))):
            assert clean_prompt(variant) == prompt_clean(variant)
            changed += clean_prompt(variant) != variant
    assert changed > 600


def test_encode_prompt(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The whole way of WanPipeline: clean, tokenise, encode, zero rows up to 512; negative prompt "" included."""
    config = support.CONFIGS["deep"]
    model = reference(config, 5)
    model.save_pretrained(tmp_path)
    pipeline = diffusers.WanPipeline(
        transformers.T5TokenizerFast.from_pretrained(tokenizer_folder), model, vae=None, scheduler=None
    )
    prompts = [*support.PROMPTS[:5], "fish &amp; chips \u2014 \u732b \U0001f680"]
    with torch.no_grad():
        want, negative = pipeline.encode_prompt(prompts, max_sequence_length=512)
    encoder, tokenizer = support.load_encoder(tmp_path, config), Tokenizer(tokenizer_folder)
    got = encode_prompts(encoder, tokenizer, prompts)
    assert got.embeds.shape == want.shape
    for ours, theirs, n in zip(np.asarray(got.embeds), want.numpy(), got.lengths):
        assert support.relative_l2(ours, theirs) <= 1e-5
        assert not theirs[n:].any()
        assert not ours[n:].any()
    empty = encode_prompts(encoder, tokenizer, [""])
    assert support.relative_l2(empty.embeds, negative.numpy()[:1]) <= 1e-5


def test_every_tensor_of_xxl_is_consumed_once() -> None:
    config = TextEncoderConfig()
    with torch.device("meta"):
        model = transformers.UMT5EncoderModel(transformers.UMT5Config.from_dict(config.to_json()))
    shapes = {name: tuple(t.shape) for name, t in model.named_parameters()}  # tied tensors appear once
    assert len(shapes) == 242
    names = set(model.state_dict())  # tied tensors appear under each name
    leaves = dict(nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: UMT5Encoder(config, rngs=nnx.Rngs(0))))))
    taken: list[str] = []
    for rule in keys_text.table(config):
        parameter = np.broadcast_to(np.uint8(0), leaves.pop(rule.target).shape)
        for i, name in enumerate(rule.sources):
            source = next(n for n in (name, *rule.aliases) if n in shapes)
            assert rule.source_view(parameter, i).shape == shapes[source], source
            taken.append(source)
        names -= {*rule.sources, *rule.aliases}
    assert sorted(taken) == sorted(shapes)
    assert not names
    assert not leaves


def test_module_loads_what_transformers_saved_under_both_names(tmp_path: Path) -> None:
    """Some repackaged files hold shared.weight and encoder.embed_tokens.weight."""
    from safetensors.torch import save_file

    config = support.CONFIGS["flat"]
    tensors = {k: v.clone() for k, v in reference(config, 6).state_dict().items()}
    assert {"shared.weight", "encoder.embed_tokens.weight"} <= set(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    make = lambda: UMT5Encoder(config, rngs=nnx.Rngs(0))  # noqa: E731
    encoder = load_module(make, keys_text.table(config), tmp_path)
    np.testing.assert_array_equal(encoder.embedding[...], tensors["shared.weight"].numpy())
    assert np.abs(encoder.embedding[...]).max() > 0
