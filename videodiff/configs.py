"""Frozen configs of the model components, and every check of them.

Owns: the fields of the published ``config.json`` files (diffusers naming), their defaults, and which values this
engine runs. Does not own: requests (`request`), sparsity schedules (`schedule`), folders on disk (`weights`).
Invariant: every field of a published config is honoured or refused by name; nothing is ignored silently.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from videodiff.errors import closest

DIFFUSERS_VERSION = "0.42.1"  # whose field names and defaults are followed
TRANSFORMERS_VERSION = "5.24.0"
# Bookkeeping of the libraries that wrote the file; says nothing about the model.
_META_KEYS = frozenset(
    (
        "_class_name",
        "_diffusers_version",
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
    )
)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value (lists already tuples) has the annotated type."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, h) for h in hint.__args__)
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        if not isinstance(value, tuple):
            return False
        items = [args[0]] * len(value) if args[-1] is ... else list(args)
        return len(items) == len(value) and all(map(_fits, value, items))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint if hint is not type(None) else value is None


class _FromJson:
    """``from_json`` and ``to_json`` for a frozen config dataclass."""

    _HEADER: ClassVar[Mapping[str, Any]] = {}  # written in front of the fields by to_json

    @classmethod
    def _inert(cls) -> Mapping[str, Any]:
        """Published fields that change nothing in the forward pass: name -> required value, or ``...`` for any."""
        return {}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "config.json") -> Self:
        """Build the config from a published file's fields; a missing field has its published default.

        Args:
          data: the parsed JSON object.
          where: file name for messages.

        Raises:
          ValueError: an unknown field, or a field with a value this engine does not run.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        hints = typing.get_type_hints(cls)
        inert = cls._inert()
        kept: dict[str, Any] = {}
        for key, value in data.items():
            if key in fields:
                kept[key] = tuple(value) if isinstance(value, list) else value
                if not _fits(kept[key], hints[key]):
                    raise ValueError(f"{where}: {key}={value!r} must be of type {fields[key].type}")
            elif key in inert:
                want = inert[key]
                if want is not ... and value != want:
                    raise ValueError(
                        f"{where}: {key}={value!r} is not supported by this engine; it runs {key}={want!r}"
                    )
            elif key not in _META_KEYS:
                raise ValueError(
                    f"{where}: unknown field {key!r} for {cls.__name__}; {closest(key, fields.keys() | set(inert))}"
                )
        try:
            return cls(**kept)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None

    def to_json(self) -> dict[str, Any]:
        """The published file's fields, fit for json.dump and for diffusers or transformers to load."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        fixed = {k: v for k, v in self._inert().items() if v is not ... and k not in self._HEADER}
        body = {k: list(v) if isinstance(v, tuple) else v for k, v in (own | fixed).items()}
        return {**self._HEADER, **dict(sorted(body.items()))}


@dataclass(frozen=True)
class TransformerConfig(_FromJson):
    """WanTransformer3DModel. Field names and defaults are those of diffusers 0.42.1."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    eps: float = 1e-6
    rope_max_seq_len: int = 1024

    _HEADER: ClassVar[Mapping[str, Any]] = {
        "_class_name": "WanTransformer3DModel",
        "_diffusers_version": DIFFUSERS_VERSION,
    }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "transformer/config.json") -> Self:
        fields = dict(data)
        if fields.get("out_channels", 0) is None:  # diffusers: as many as go in
            fields["out_channels"] = fields.get("in_channels", cls.in_channels)
        return super().from_json(fields, where)

    @classmethod
    def _inert(cls) -> Mapping[str, Any]:
        return {
            "qk_norm": "rms_norm_across_heads",
            "image_dim": None,
            "added_kv_proj_dim": None,
            "pos_embed_seq_len": None,
        }

    def __post_init__(self) -> None:
        if len(self.patch_size) != 3 or self.patch_size[0] != 1 or self.patch_size[1] != self.patch_size[2]:
            raise ValueError(f"patch_size must be (1, p, p), got {self.patch_size}")
        for name in ("num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("freq_dim", "ffn_dim", "num_layers", "rope_max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.attention_head_dim % 2 or self.freq_dim % 2:
            raise ValueError(
                f"attention_head_dim and freq_dim must be even, got {self.attention_head_dim=}, {self.freq_dim=}"
            )
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, got {self.eps}")

    @property
    def width(self) -> int:
        """C = heads * head dim."""
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class VaeConfig(_FromJson):
    """AutoencoderKLWan, both published forms. Field names and defaults are those of diffusers 0.42.1.

    ``latents_mean`` and ``latents_std`` have no default here on purpose: a checkpoint without them is refused.
    """

    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)  # the published spelling
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8

    _HEADER: ClassVar[Mapping[str, Any]] = {"_class_name": "AutoencoderKLWan", "_diffusers_version": DIFFUSERS_VERSION}

    @classmethod
    def _inert(cls) -> Mapping[str, Any]:
        return {"attn_scales": [], "dropout": ..., "clip_output": ...}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "vae/config.json") -> Self:
        for key in ("latents_mean", "latents_std"):
            if data.get(key) is None:
                raise ValueError(f"{where}: {key} is missing; latents cannot be denormalised without it")
        return super().from_json(data, where)

    def __post_init__(self) -> None:
        sizes = (self.base_dim, self.decoder_base_dim or 1, self.z_dim, self.patch_size or 1, *self.dim_mult)
        if not self.dim_mult or min(sizes) < 1 or self.num_res_blocks < 1:
            raise ValueError(
                f"base_dim, decoder_base_dim, z_dim, dim_mult, num_res_blocks and patch_size must be positive, got "
                f"{self.base_dim=}, {self.decoder_base_dim=}, {self.z_dim=}, {self.dim_mult=}, {self.num_res_blocks=}, "
                f"{self.patch_size=}"
            )
        if len(self.latents_mean) != self.z_dim or len(self.latents_std) != self.z_dim:
            raise ValueError(
                f"latents_mean and latents_std need z_dim={self.z_dim} values, got "
                f"{len(self.latents_mean)} and {len(self.latents_std)}"
            )
        if min(self.latents_std) <= 0:
            raise ValueError(f"latents_std must be positive, got a minimum of {min(self.latents_std)}")
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temperal_downsample needs one entry fewer than dim_mult={self.dim_mult}, got "
                f"{self.temperal_downsample}"
            )
        patch = self.patch_size or 1
        spatial = patch * 2 ** len(self.temperal_downsample)
        temporal = 2 ** sum(self.temperal_downsample)
        if spatial != self.scale_factor_spatial or temporal != self.scale_factor_temporal:
            raise ValueError(
                f"{self.scale_factor_spatial=} and {self.scale_factor_temporal=} do not agree with the layers, which "
                f"give {spatial} and {temporal}"
            )
        if self.in_channels != 3 * patch * patch or self.out_channels != 3 * patch * patch:
            raise ValueError(
                f"in_channels and out_channels must be 3 * patch_size^2 = {3 * patch * patch}, got "
                f"{self.in_channels} and {self.out_channels}"
            )


@dataclass(frozen=True)
class TextEncoderConfig(_FromJson):
    """UMT5EncoderModel. Field names are those of transformers 5.24; defaults are UMT5-XXL."""

    vocab_size: int = 256384
    d_model: int = 4096
    d_kv: int = 64
    d_ff: int = 10240
    num_layers: int = 24
    num_heads: int = 64
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    pad_token_id: int = 0
    eos_token_id: int = 1

    _HEADER: ClassVar[Mapping[str, Any]] = {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "transformers_version": TRANSFORMERS_VERSION,
    }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "text_encoder/config.json") -> Self:
        return super().from_json(data, where)

    @classmethod
    def _inert(cls) -> Mapping[str, Any]:
        return {
            "model_type": "umt5",
            "feed_forward_proj": "gated-gelu",
            "dense_act_fn": "gelu_new",
            "is_gated_act": True,
            "is_decoder": False,
            "output_attentions": False,
            "output_hidden_states": False,
            **dict.fromkeys(
                (
                    "dropout_rate", "classifier_dropout", "initializer_factor", "num_decoder_layers",
                    "decoder_start_token_id", "is_encoder_decoder", "use_cache", "output_past", "scalable_attention",
                    "tie_word_embeddings", "tokenizer_class", "bos_token_id", "return_dict", "id2label", "label2id",
                    "problem_type", "chunk_size_feed_forward", "add_cross_attention", "scale_decoder_outputs",
                    "cross_attention_hidden_size", "tie_encoder_decoder",
                ),
                ...,
            ),
        }  # fmt: skip

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if f.name not in ("pad_token_id", "eos_token_id") and getattr(self, f.name) <= 0:
                raise ValueError(f"{f.name} must be positive, got {getattr(self, f.name)}")
