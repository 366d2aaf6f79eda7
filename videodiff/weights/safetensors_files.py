"""Safetensors files: headers checked in full, bytes read in chunks, files written in a stream.

Owns: the file format, finding the files of a component (single, or sharded with an index), telling damage apart.
Does not own: which tensor belongs to which parameter (`keys_*`, `load`).
Invariant: a tensor's bytes are only read from a file whose header accounts for every byte of it.
Format: https://github.com/huggingface/safetensors (u64 header length, JSON header, tensors without gaps).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np

from videodiff.files import atomic_path
from videodiff.weights.problems import Kind, Problem, WeightsError, raise_if

BASE_NAMES = ("diffusion_pytorch_model", "model")
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation

# Bits per element of every dtype the format defines (safetensors 0.8).
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16,
    "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "C64": 64,
}  # fmt: skip
# Those that hold weights as plain numbers.
WEIGHT_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_NAMES = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Args:
      name: its name in the file.
      file: the file.
      dtype: the format's dtype name, for example "BF16".
      shape: in the file's own axes.
      start: absolute byte offset of its first element.
      nbytes: its length.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one component: headers only, nothing loaded.

    Args:
      where: the folder or file that was opened.
      files: its safetensors files.
      tensors: by name.
      metadata: the ``__metadata__`` of all files, merged.
    """

    where: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(t.size for t in self.tensors.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype names that occur, sorted."""
        return tuple(sorted({t.dtype for t in self.tensors.values()}))


def _foreign(head: bytes, size: int, path: Path) -> Problem | None:
    """Recognise files that are not safetensors at all by their first bytes."""
    if head.startswith(b"version https://git-lfs"):
        real = re.search(rb"size (\d+)", head)
        expect = f", the real file has {int(real[1]):,} bytes" if real else ""
        return Problem(Kind.LFS_POINTER, f"{path.name} ({size} bytes{expect})")
    if size == 0:
        return Problem(Kind.EMPTY, path.name)
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        return Problem(Kind.PICKLE, path.name)
    if head.lstrip()[:1] == b"<":
        return Problem(
            Kind.CORRUPT, f"{path.name} holds a web page: the download was answered with an error or a login"
        )
    return None


def foreign_file(path: Path) -> Problem | None:
    """What stands in place of a file's real content: a Git-LFS pointer, nothing, a pickle, a web page; else None."""
    with path.open("rb") as f:
        return _foreign(f.read(512), path.stat().st_size, path)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are unique; raises ValueError otherwise."""
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"names occur twice: {sorted({n for n in names if names.count(n) > 1})[:3]}")
    return out


def _entry(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    """One header entry, checked on its own; raises ValueError with what is wrong."""
    if not isinstance(entry, dict) or {"dtype", "shape", "data_offsets"} - set(entry):
        raise ValueError("lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if len(offsets) != 2 or any(type(n) is not int or n < 0 for n in numbers) or offsets[1] < offsets[0]:
        raise ValueError(f"has an impossible {shape=} or data_offsets={offsets}")
    nbytes = offsets[1] - offsets[0]
    if dtype in DTYPE_BITS and math.prod(shape) * DTYPE_BITS[dtype] != nbytes * 8:
        raise ValueError(f"{dtype} of {shape=} does not fill its {nbytes} bytes")
    return TensorInfo(name, path, str(dtype), tuple(shape), data_start + offsets[0], nbytes)


def _parse_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The header of one file; raises WeightsError with the problem."""

    def fail(kind: Kind, what: str) -> WeightsError:
        return WeightsError(path, [Problem(kind, what)])

    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(512)
        foreign = _foreign(head, size, path)
        if foreign is not None:
            raise WeightsError(path, [foreign])
        if size < 8:
            raise fail(Kind.TRUNCATED, f"{path.name} has {size} bytes, not even a header length")
        length = int.from_bytes(head[:8], "little")
        looks_right = length <= MAX_HEADER_BYTES and head[8:9] in (b"{", b"")
        if length < 2 or not looks_right:
            raise fail(
                Kind.CORRUPT, f"{path.name} starts with no safetensors header (it would be {length:,} bytes long)"
            )
        if 8 + length > size:
            raise fail(Kind.TRUNCATED, f"{path.name} has {size:,} bytes and a header of {length:,}")
        f.seek(8)
        raw = f.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
    except ValueError as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise fail(Kind.CORRUPT, f"{path.name}: the header is not readable: {e}") from None
    metadata = header.pop("__metadata__", {})
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        try:
            tensors[name] = _entry(name, entry, path, 8 + length)
        except ValueError as e:
            raise fail(Kind.CORRUPT, f"{path.name}: tensor {name!r} {e}") from None
    end = 8 + length
    for t in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if t.start != end:
            raise fail(Kind.CORRUPT, f"{path.name}: tensor {t.name!r} starts at byte {t.start:,}, expected {end:,}")
        end += t.nbytes
    if size < end:
        lost = sum(t.start + t.nbytes > size for t in tensors.values())
        what = f"{path.name} has {size:,} of {end:,} bytes; {lost} of its {len(tensors)} tensors are incomplete"
        raise fail(Kind.TRUNCATED, what)
    if size > end:
        raise fail(Kind.CORRUPT, f"{path.name} has {size - end:,} bytes after its last tensor")
    return tensors, {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}


def _read_index(path: Path) -> dict[str, str]:
    """tensor name -> shard file name; raises WeightsError with the problem."""
    raw = path.read_bytes()
    foreign = _foreign(raw[:512], len(raw), path)
    if foreign is not None:
        raise WeightsError(path, [foreign])
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)["weight_map"]
        ok = isinstance(table, dict) and table and all(isinstance(v, str) and Path(v).name == v for v in table.values())
        if not ok:
            raise ValueError("weight_map must map tensor names to files of the same folder")
    except (ValueError, KeyError, TypeError) as e:
        raise WeightsError(path, [Problem(Kind.BAD_INDEX, f"{path.name}: {e!r}")]) from None
    return table


def _choose_files(folder: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """(index or None, files); raises WeightsError when nothing or more than one thing fits."""
    indices = [p for b in BASE_NAMES if (p := folder / f"{b}.safetensors.index.json").exists()]
    singles = [p for b in BASE_NAMES if (p := folder / f"{b}.safetensors").exists()]
    found = [*indices, *singles]
    if len(found) > 1:
        raise WeightsError(folder, [Problem(Kind.AMBIGUOUS, " and ".join(p.name for p in found))])
    if singles:
        return None, tuple(singles)
    if indices:
        names = sorted(set(_read_index(indices[0]).values()))
        return indices[0], tuple(folder / n for n in names)
    shards = sorted(p.name for p in folder.glob("*-of-*.safetensors"))
    if shards:
        what = f"{len(shards)} shards ({shards[0]} ...) and no {shards[0].split('-0')[0]}.safetensors.index.json"
        raise WeightsError(folder, [Problem(Kind.MISSING_INDEX, what)])
    other = sorted(p.name for p in folder.iterdir() if p.suffix in {".safetensors", ".bin", ".pth", ".pt", ".gguf"})
    names_text = " or ".join(f"{b}.safetensors" for b in BASE_NAMES)
    beside = f"; it holds {', '.join(other[:4])}" if other else ""
    raise WeightsError(folder, [Problem(Kind.NO_WEIGHTS, f"{folder.name}/ has no {names_text} (or index){beside}")])


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and check the headers of a component's weights.

    Args:
      path: a component folder with ``diffusion_pytorch_model`` or ``model`` safetensors, single or sharded with an
        index, or one safetensors file.

    Raises:
      WeightsError: everything wrong with the files, at once: pointer files, truncation, corruption, missing shards
        or index, an index that disagrees with its shards.
    """
    where = Path(path)
    if not where.exists():
        raise WeightsError(where, [Problem(Kind.NO_FOLDER, str(where))])
    index, files = _choose_files(where) if where.is_dir() else (None, (where,))
    problems: list[Problem] = []
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    unread: set[str] = set()
    for file in files:
        if not file.exists():
            problems.append(Problem(Kind.MISSING_SHARD, f"{file.name}, named by {index.name if index else where.name}"))
            unread.add(file.name)
            continue
        try:
            here, meta = _parse_header(file)
        except WeightsError as e:
            problems += e.problems
            unread.add(file.name)
            continue
        metadata |= meta
        for name, info in here.items():
            if name in tensors:
                both = f"{name} in {tensors[name].file.name} and {file.name}"
                problems.append(Problem(Kind.DUPLICATE_TENSOR, both))
            tensors[name] = info
    if index is not None:
        problems += _compare_index(index, tensors, unread)
    raise_if(where, problems)
    return Checkpoint(where, files, tensors, metadata)


def _compare_index(index: Path, tensors: Mapping[str, TensorInfo], unread: set[str]) -> Iterator[Problem]:
    """Every disagreement between an index and the headers of the shards that could be read."""
    table = _read_index(index)
    for name, file in table.items():
        if file in unread:
            continue
        if name not in tensors:
            yield Problem(Kind.BAD_INDEX, f"{name} is in {index.name} but not in {file}")
        elif tensors[name].file.name != file:
            yield Problem(Kind.BAD_INDEX, f"{name} is in {tensors[name].file.name}, {index.name} says {file}")
    for name in tensors.keys() - table.keys():
        yield Problem(Kind.BAD_INDEX, f"{name} is in {tensors[name].file.name} but not in {index.name}")


class Reader:
    """Reads bytes of a checkpoint's tensors without mapping the files, so that host memory stays what was allocated.

    Use as a context manager; safe to use from several threads.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files = checkpoint.files
        self._fds: dict[Path, int] = {}

    def __enter__(self) -> Self:
        self._fds = {f: os.open(f, os.O_RDONLY) for f in self._files}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def read_into(self, info: TensorInfo, first: int, out: np.ndarray) -> None:
        """Fill ``out`` (C-contiguous, the tensor's dtype) with the elements from number ``first`` on.

        Raises:
          WeightsError: the file became shorter since its header was read.
        """
        view = out.reshape(-1).view(np.uint8)
        at = info.start + first * out.dtype.itemsize
        done = 0
        while done < view.size:
            got = os.preadv(self._fds[info.file], [memoryview(view[done:].data)], at + done)
            if got == 0:
                what = f"{info.file.name} ended inside {info.name}: it changed while it was read"
                raise WeightsError(info.file, [Problem(Kind.TRUNCATED, what)])
            done += got


def write_safetensors(
    path: Path,
    specs: Mapping[str, tuple[str, tuple[int, ...]]],
    chunks: Mapping[str, Iterator[np.ndarray]],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write one file in a stream; nothing appears under ``path`` before it is whole.

    Args:
      path: the file.
      specs: name -> (dtype name, shape), in file order.
      chunks: name -> the tensor's elements in order, in C-contiguous pieces of its dtype.
      metadata: text for the header; diffusers and transformers expect {"format": "pt"}.

    Returns:
      Bytes of tensor data written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for name, (dtype, shape) in specs.items():
        end = at + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with atomic_path(path) as partial, partial.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for name in specs:
            for piece in chunks[name]:
                f.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        assert f.tell() == 8 + len(raw) + at, f"{name}: the pieces do not fill the tensors"
    return at
