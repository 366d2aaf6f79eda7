"""The file format against the reference library, and every kind of damage told apart by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from weights_support import toy_tensors, write_toy

from videodiff.weights.problems import Kind, WeightsError
from videodiff.weights.safetensors_files import DTYPE_BITS, Reader, open_checkpoint, write_safetensors

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4986211280\n"


def kinds(error: pytest.ExceptionInfo[WeightsError]) -> list[Kind]:
    return [p.kind for p in error.value.problems]


def raw_file(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def shard(folder: Path, parts: int = 3) -> dict[str, np.ndarray]:
    """Write the toy as shards with an index, the way diffusers names them."""
    tensors = toy_tensors()
    table = {}
    for i in range(parts):
        name = f"diffusion_pytorch_model-{i + 1:05d}-of-{parts:05d}.safetensors"
        mine = dict(list(tensors.items())[i::parts])
        save_file(mine, folder / name)
        table |= dict.fromkeys(mine, name)
    index = {"metadata": {"total_size": 1}, "weight_map": table}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("base", ["model", "diffusion_pytorch_model"])
def test_headers_equal_the_reference_library(tmp_path: Path, base: str) -> None:
    write_toy(tmp_path, base)
    checkpoint = open_checkpoint(tmp_path)
    with safe_open(tmp_path / f"{base}.safetensors", "np") as f:
        assert set(f.keys()) == set(checkpoint.tensors)
        for name in f.keys():  # noqa: SIM118  (not a mapping)
            assert tuple(f.get_slice(name).get_shape()) == checkpoint.tensors[name].shape
            assert f.get_slice(name).get_dtype() == checkpoint.tensors[name].dtype
    assert checkpoint.parameters == sum(t.size for t in toy_tensors().values())
    assert checkpoint.dtypes == ("BF16", "F16", "F32")
    assert checkpoint.metadata == {"format": "pt"}


def test_bytes_equal_the_reference_library(tmp_path: Path) -> None:
    write_toy(tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    with Reader(checkpoint) as reader:
        for name, tensor in want.items():
            flat = tensor.reshape(-1)
            got = np.empty(flat.size - 1, flat.dtype)
            reader.read_into(checkpoint.tensors[name], 1, got)
            np.testing.assert_array_equal(got.view(np.uint8), flat[1:].view(np.uint8))


def test_shards_follow_the_index(tmp_path: Path) -> None:
    tensors = shard(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) == 3
    assert {n: t.shape for n, t in checkpoint.tensors.items()} == {n: t.shape for n, t in tensors.items()}


def test_written_files_read_back_in_the_reference_library(tmp_path: Path) -> None:
    tensors = toy_tensors()
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    specs = {n: (names[t.dtype.name], t.shape) for n, t in tensors.items()}
    write_safetensors(tmp_path / "x.safetensors", specs, {n: iter([t[:1], t[1:]]) for n, t in tensors.items()})
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        np.testing.assert_array_equal(back[name].view(np.uint8), tensor.view(np.uint8))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def broken():
        yield np.zeros(2, np.float32)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_safetensors(tmp_path / "x.safetensors", {"a": ("F32", (4,))}, {"a": broken()})
    assert not list(tmp_path.iterdir())


def test_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(LFS)
    with pytest.raises(WeightsError, match="git lfs pull") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.LFS_POINTER]
    assert f"model.safetensors ({len(LFS)} bytes, the real file has 4,986,211,280 bytes)" in str(e.value)


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(WeightsError, match="the file is empty") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.EMPTY]


@pytest.mark.parametrize("keep", [5, 40, -1, -900])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    """Cut inside the header length, inside the header, by one byte, by many tensors."""
    file = write_toy(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    with pytest.raises(WeightsError, match="cut short") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.TRUNCATED]
    assert "model.safetensors has" in str(e.value)
    assert "download it again" in str(e.value)
    if keep < 0:
        assert f"{len(whole) + keep:,} of {len(whole):,} bytes" in str(e.value)


def damaged() -> dict[str, tuple[bytes, str]]:
    """Name -> (bytes of the file, words the message must hold)."""
    file = {}

    def put(name: str, header: object, data: bytes, words: str) -> None:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        file[name] = (len(raw).to_bytes(8, "little") + raw + data, words)

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    put("not json", b'{"a": ', b"", "header is not readable")
    put("not utf8", b'{"\xff": 1}', b"", "header is not readable")
    put("no object", b"[1, 2, 3]", b"", "starts with no safetensors header")
    put("two equal names", b'{"a": %b, "a": %b}' % ((json.dumps(entry).encode(),) * 2), bytes(8), "names occur twice")
    put("field missing", {"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "lacks dtype, shape or data_offsets")
    put("negative shape", {"a": entry | {"shape": [-2]}}, bytes(8), "impossible shape")
    put("bytes do not fit", {"a": entry | {"shape": [3]}}, bytes(8), "does not fill its 8 bytes")
    put("gap", {"a": entry | {"data_offsets": [4, 12]}}, bytes(12), "tensor 'a' starts at byte")
    put("overlap", {"a": entry, "b": entry | {"data_offsets": [4, 12]}}, bytes(12), "tensor 'b' starts at byte")
    put("bytes left over", {"a": entry}, bytes(11), "3 bytes after its last tensor")
    file["random bytes"] = (bytes(range(200, 250)) * 9, "starts with no safetensors header")
    file["web page"] = (b"<!DOCTYPE html><html><body>401</body></html>", "holds a web page")
    return file


@pytest.mark.parametrize("case", damaged())
def test_corrupt_file(tmp_path: Path, case: str) -> None:
    data, words = damaged()[case]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match="not valid safetensors") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.CORRUPT]
    assert words in str(e.value)


@pytest.mark.parametrize("head", [b"PK\x03\x04", b"\x80\x02"])
def test_pickles_are_refused_unopened(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(head + bytes(100))
    with pytest.raises(WeightsError, match="PyTorch pickle") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.PICKLE]


def test_missing_shard_and_lfs_shard_are_both_named(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    (tmp_path / "diffusion_pytorch_model-00003-of-00003.safetensors").write_bytes(LFS)
    with pytest.raises(WeightsError) as e:
        open_checkpoint(tmp_path)
    assert sorted(k.name for k in kinds(e)) == ["LFS_POINTER", "MISSING_SHARD"]
    assert "diffusion_pytorch_model-00002-of-00003.safetensors, named by" in str(e.value)


def test_missing_index(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").unlink()
    with pytest.raises(WeightsError, match="without their index") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.MISSING_INDEX]
    assert "no diffusion_pytorch_model.safetensors.index.json" in str(e.value)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    shard(tmp_path)
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    data = json.loads(index.read_text())
    table = data["weight_map"]
    first = table.pop("blocks.0.weight")
    table["ghost.weight"] = first
    table["norm.gamma"] = next(v for v in table.values() if v != table["norm.gamma"])
    index.write_text(json.dumps(data))
    with pytest.raises(WeightsError) as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.BAD_INDEX] * 3
    text = str(e.value)
    assert "ghost.weight is in diffusion_pytorch_model.safetensors.index.json but not in" in text
    assert "blocks.0.weight is in diffusion_pytorch_model-00001" in text
    assert re.search(r"norm\.gamma is in \S+, \S+ says \S+", text)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_bad_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.EMPTY if text == "" else Kind.BAD_INDEX]


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shard(tmp_path)
    first = tmp_path / "diffusion_pytorch_model-00001-of-00003.safetensors"
    second = load_file(tmp_path / "diffusion_pytorch_model-00002-of-00003.safetensors")
    save_file(load_file(first) | dict(list(second.items())[:1]), first)
    with pytest.raises(WeightsError, match="stored twice") as e:
        open_checkpoint(tmp_path)
    assert Kind.DUPLICATE_TENSOR in kinds(e)


def test_two_sets_of_weights(tmp_path: Path) -> None:
    shard(tmp_path)
    write_toy(tmp_path, "diffusion_pytorch_model")
    with pytest.raises(WeightsError, match="keep one set") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.AMBIGUOUS]


def test_no_weights_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "diffusion_pytorch_model.fp16.safetensors").touch()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match="no safetensors weights") as e:
        open_checkpoint(tmp_path)
    assert kinds(e) == [Kind.NO_WEIGHTS]
    assert "diffusion_pytorch_model.fp16.safetensors, pytorch_model.bin" in str(e.value)
    with pytest.raises(WeightsError, match="check the path"):
        open_checkpoint(tmp_path / "nowhere")


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    file = write_toy(tmp_path) / "model.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    last = max(checkpoint.tensors.values(), key=lambda t: t.start)
    file.write_bytes(file.read_bytes()[:-1])
    with Reader(checkpoint) as reader, pytest.raises(WeightsError, match="changed while it was read"):
        reader.read_into(last, 0, np.empty(last.shape, np.float32))


def test_every_dtype_of_the_format_has_a_size(tmp_path: Path) -> None:
    """A file with every dtype numpy and ml_dtypes share with the format opens; its weights are judged at load."""
    tensors = {
        name: np.zeros(8, getattr(np, name, None) or getattr(ml_dtypes, name))
        for name in (
            "float64",
            "int64",
            "uint32",
            "int16",
            "uint8",
            "bool_",
            "bfloat16",
            "float8_e4m3fn",
            "float8_e5m2",
        )
    }
    save_file(tensors, tmp_path / "model.safetensors")
    dtypes = open_checkpoint(tmp_path).dtypes
    assert set(dtypes) == {"F64", "I64", "U32", "I16", "U8", "BOOL", "BF16", "F8_E4M3", "F8_E5M2"}
    assert set(dtypes) <= set(DTYPE_BITS)


def test_unknown_dtype_is_kept_for_the_loader(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F3_X", "shape": [2], "data_offsets": [0, 1]}}).encode()
    raw_file(tmp_path / "model.safetensors", header, bytes(1))
    assert open_checkpoint(tmp_path).dtypes == ("F3_X",)


def test_long_lists_are_shortened_but_kept(tmp_path: Path) -> None:
    shard(tmp_path)
    for i in range(40):
        save_file({"x": np.zeros(1, np.float32)}, tmp_path / f"{i}.safetensors")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] |= {f"t{i}": f"gone-{i}.safetensors" for i in range(40)}
    index.write_text(json.dumps(data))
    with pytest.raises(WeightsError, match=r"\.\.\. and 34 more") as e:
        open_checkpoint(tmp_path)
    assert len(e.value.problems) == 40
