"""The on-disk cache of compiled programs.

Owns: where compiled programs are kept between processes. Does not own: what is compiled (the loop and the stages do).
Invariant: a cache directory the user configured in JAX already is left alone. JAX's key covers the program, the compiler version,
its flags and the device kind.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax


def enable(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep compiled programs on disk.

    Args:
      directory: where; default $VIDEODIFF_CACHE_DIR/xla, else $XDG_CACHE_HOME/videodiff/xla, else ~/.cache/videodiff/xla.
        An empty $VIDEODIFF_CACHE_DIR switches the cache off.

    Returns:
      The directory in use, or None when the cache is off or cannot be written (compilation then happens anew each time).
    """
    configured = jax.config.values.get("jax_compilation_cache_dir")
    if configured:
        return Path(configured)
    root = os.environ.get("VIDEODIFF_CACHE_DIR")
    if root == "":
        return None
    if directory is None:
        base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "videodiff"
        directory = base / "xla"
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(path, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return path
