"""What can be wrong with weights on disk, and the one error that says all of it.

Owns: the kinds of problems, their remedies, the wording. Does not own: finding them (`safetensors_files`, `load`).
Invariant: a reader sees every problem of a checkpoint at once, grouped, each with its file or tensor named.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHOWN_PER_KIND = 6


class Kind(enum.Enum):
    """A kind of problem: (title, remedy)."""

    NO_FOLDER = ("no such folder or file", "check the path")
    NOT_A_MODEL = (
        "this is no model folder in the diffusers layout",
        "give the folder that holds model_index.json, transformer/, vae/, text_encoder/, tokenizer/ and scheduler/ "
        "(the repositories whose names end in -Diffusers)",
    )
    UNSUPPORTED_MODEL = (
        "this engine does not run this kind of model yet",
        "use a Wan 2.1 text-to-video folder, for example Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    )
    MISSING_COMPONENT = ("a component is missing", "download the named files of the same repository")
    BAD_CONFIG = ("a configuration file cannot be used", "use the file that was published with these weights")
    MISMATCH = ("components do not belong together", "download all components from one repository")
    NO_WEIGHTS = ("no safetensors weights", "download the safetensors files of this component into the folder")
    AMBIGUOUS = ("more than one set of weights", "keep one set in the folder and move the other away")
    LFS_POINTER = (
        "a Git-LFS pointer stands in for the file",
        "run `git lfs install` and `git lfs pull` in the checkpoint's repository, or download it with `hf download`",
    )
    EMPTY = ("the file is empty", "download it again")
    TRUNCATED = ("the file is cut short", "the download did not finish: download it again")
    CORRUPT = ("the file is not valid safetensors", "download it again and compare its checksum")
    PICKLE = (
        "the file is a PyTorch pickle, not safetensors",
        "get the safetensors release, or convert it once with a trusted tool: pickles are never opened here",
    )
    MISSING_INDEX = ("shards without their index", "download the *.safetensors.index.json that belongs to them")
    BAD_INDEX = ("the index and its shards disagree", "download the index and the shards from the same revision")
    MISSING_SHARD = ("a shard is missing", "download the named shard")
    DUPLICATE_TENSOR = ("a tensor is stored twice", "download the files from one revision")
    MISSING_TENSOR = (
        "tensors this model needs are not in the files",
        "check that config.json belongs to these weights",
    )
    EXTRA_TENSOR = (
        "the files hold tensors this model has no place for",
        "check that config.json belongs to these weights; adapters and other variants do not load as a plain model",
    )
    SHAPE = ("tensors have the wrong shape", "check that config.json belongs to these weights")
    DTYPE = (
        "tensors have a dtype this engine does not load",
        "use the float32, bfloat16 or float16 release of the weights",
    )
    QUANTISED = (
        "the weights are quantised (scale tensors or markers)",
        "use the float32, bfloat16 or float16 release of the weights",
    )
    ALIAS = ("tensors that must be equal differ", "the tied weights were split: use the published file")
    NON_FINITE = ("weights are NaN or infinite", "the file is damaged or its training diverged: download it again")
    OVERFLOW = ("weights do not fit the chosen dtype", "load as bfloat16 or float32")
    UNASSIGNED = ("parameters no rule of the key table fills", "this is a mistake in the key table: report it")
    NO_PARAMETER = ("rules of the key table for parameters the model lacks", "mistake in the key table: report it")
    ASSIGNED_TWICE = ("the key table names these more than once", "this is a mistake in the key table: report it")

    @property
    def title(self) -> str:
        return self.value[0]

    @property
    def remedy(self) -> str:
        return self.value[1]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: its kind and the file or tensor with the numbers."""

    kind: Kind
    what: str


class WeightsError(ValueError):
    """Weights that cannot be loaded, with every problem found.

    Args:
      where: the folder or file.
      problems: at least one.

    Attributes:
      problems: all of them; the message shows the first few of each kind.
    """

    def __init__(self, where: object, problems: Sequence[Problem]) -> None:
        assert problems
        self.where = str(where)
        self.problems = tuple(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [f"cannot use the weights in {self.where}:"]
        for kind in Kind:
            found = [p.what for p in self.problems if p.kind is kind]
            if not found:
                continue
            count = f" ({len(found)})" if len(found) > 1 else ""
            lines.append(f"* {kind.title}{count}:")
            lines += [f"    {what}" for what in found[:SHOWN_PER_KIND]]
            if len(found) > SHOWN_PER_KIND:
                lines.append(f"    ... and {len(found) - SHOWN_PER_KIND} more")
            lines.append(f"  remedy: {kind.remedy}")
        return "\n".join(lines)


def raise_if(where: object, problems: Iterable[Problem]) -> None:
    """Raise :class:`WeightsError` when there is any problem."""
    found = list(problems)
    if found:
        raise WeightsError(where, found)
