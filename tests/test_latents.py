"""Saved latents: a round trip, and clear words for everything that is not one."""

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from videodiff.latents import SavedLatents


def saved(**change):
    values = {
        "latents": np.arange(48, dtype=np.float32).reshape(1, 4, 1, 3, 4), "height": 48, "width": 64, "fps": 8.0, "model": "tiny",
        "prompts": ("a red ball",), "seeds": (7,), "metadata": {"prompt": "a red ball"},
    }  # fmt: skip
    return SavedLatents(**{**values, **change})


def test_round_trip(tmp_path):
    path = saved().save(tmp_path / "deep" / "x.safetensors")
    back = SavedLatents.load(path)
    np.testing.assert_array_equal(back.latents, saved().latents)
    assert (back.height, back.width, back.fps, back.prompts, back.seeds) == (48, 64, 8.0, ("a red ball",), (7,))
    assert back.metadata == {"prompt": "a red ball"}
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]


def test_what_is_not_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="no latents at"):
        SavedLatents.load(tmp_path / "none.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({"latents": np.zeros(3, np.float32)}, other)
    with pytest.raises(ValueError, match="does not hold finished latents"):
        SavedLatents.load(other)
    path = saved().save(tmp_path / "cut.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="damaged and cannot be decoded"):
        SavedLatents.load(path)
    bad = saved(latents=np.full((1, 4, 1, 3, 4), np.nan)).save(tmp_path / "nan.safetensors")
    with pytest.raises(ValueError, match="NaN or infinity"):
        SavedLatents.load(bad)


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("videodiff.latents.save_file", full)
    saved = SavedLatents(np.zeros((1, 4, 1, 2, 2), np.float32), 32, 32, 8, "tiny", ("a",), (1,))
    with pytest.raises(OSError, match=r"x\.safetensors cannot be written: .*No space left.*; free space there"):
        saved.save(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())
