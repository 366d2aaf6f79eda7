"""Writing files whole or not at all.

Owns: the temporary name that every writer of this project uses. Does not own: formats.
Invariant: a reader never sees half a file, and a failed write leaves what was there before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name in the folder of ``path`` that becomes ``path`` when the block ends well, and else vanishes.

    Makes missing folders. The temporary name keeps the suffix, from which encoders choose the format.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem[:80]}.{os.getpid()}.part{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
