"""Write text.npz: prompt cleaning, token ids, bucket tables and encodings of diffusers 0.42.1 and transformers 5.24.

Needs the parity extra. Run from the repository root: python tests/goldens/make_text.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from transformers import T5TokenizerFast, UMT5EncoderModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))
import text_support as support

from videodiff.text.build_tokenizer import build_tokenizer


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    cleaned = [prompt_clean(t) for t in support.RAW_TEXTS]
    arrays["cleaned"] = np.frombuffer(json.dumps(cleaned).encode(), np.uint8)
    for name, config in support.CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = UMT5EncoderModel.from_pretrained(support.write_encoder(Path(folder), config)).eval()
        ids, mask = support.batch(config)
        attention = model.encoder.block[0].layer[0].SelfAttention
        distance = torch.arange(-support.BUCKET_RANGE, support.BUCKET_RANGE + 1)
        with torch.no_grad():
            out = model(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
            buckets = attention._relative_position_bucket(distance).numpy()
        arrays[f"{name}_hidden"] = out[mask == 1]  # rows of tokens, prompt after prompt
        arrays[f"{name}_buckets"] = buckets.astype(np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer(folder, support.CAPTIONS)
        tokenizer = T5TokenizerFast.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as folder:
        model = UMT5EncoderModel.from_pretrained(support.write_encoder(Path(folder), support.CONFIGS["wide"])).eval()
    pipeline = WanPipeline(tokenizer, model, vae=None, scheduler=None)
    tokens = tokenizer([prompt_clean(p) for p in support.PROMPTS], max_length=512, truncation=True)
    lengths = np.array([len(row) for row in tokens.input_ids], np.int32)
    arrays["prompt_ids"] = np.concatenate(tokens.input_ids).astype(np.int32)
    arrays["prompt_lengths"] = lengths
    with torch.no_grad():
        embeds, _ = pipeline.encode_prompt(list(support.PROMPTS), max_sequence_length=512)
    assert embeds.shape[1] == 512
    arrays["prompt_embeds"] = np.concatenate([e[: min(n, 200)] for e, n in zip(embeds.numpy(), lengths)])
    assert all(np.isfinite(a).all() for a in arrays.values())
    np.savez_compressed(support.GOLDENS, **arrays)
    print(support.GOLDENS, support.GOLDENS.stat().st_size, "bytes", lengths)


if __name__ == "__main__":
    main()
