"""Files that travel with the package: configs and the shipped model.

Owns: where they are, in a checkout and in an installed wheel. Does not own: reading them.
Invariant: an installed package never looks outside itself.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def config_dir() -> Path:
    """The folder of the YAML configs: videodiff/_configs in a wheel, configs/ in a checkout.

    Raises:
      FileNotFoundError: neither is there.
    """
    for place in (PACKAGE / "_configs", PACKAGE.parent / "configs"):
        if place.is_dir():
            return place
    raise FileNotFoundError("the configs that belong to videodiff are missing; install the package again")


def shipped_model() -> Path:
    """The folder of the model that ships in the package.

    Raises:
      FileNotFoundError: it is not there.
    """
    folder = PACKAGE / "assets" / "tiny"
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            "the shipped model is missing from this installation; install the package again, or name another "
            "checkpoint folder with --model_path"
        )
    return folder
