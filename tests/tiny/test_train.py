"""Training goes on from the shipped model."""

from __future__ import annotations

from pathlib import Path

import pytest

from videodiff.resources import shipped_model
from videodiff.tiny import train

TENSORS = ("transformer", "vae", "text_encoder")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train.start(folder)
    return folder


def test_a_training_from_the_shipped_model_holds_its_weights(run: Path, tmp_path: Path) -> None:
    """Exported at once, every weight file is the shipped one, byte for byte."""
    train.export(run, tmp_path / "out")
    for part in TENSORS:
        (file,) = (shipped_model() / part).glob("*.safetensors")
        assert (tmp_path / "out" / part / file.name).read_bytes() == file.read_bytes(), part


def test_a_started_folder_is_not_overwritten(run: Path) -> None:
    with pytest.raises(FileExistsError, match="give a new folder with --run"):
        train.start(run)
