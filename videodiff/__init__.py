"""videodiff: text-to-video diffusion in JAX and Flax. The public names live here and nothing else."""

from typing import TYPE_CHECKING, Any

from videodiff.version import __version__

if TYPE_CHECKING:
    from videodiff.pipeline import Interrupted, Pipeline
    from videodiff.result import Result

__all__ = ["Interrupted", "Pipeline", "Result", "__version__"]

_PLACES = {"Pipeline": "pipeline", "Interrupted": "pipeline", "Result": "result"}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``import videodiff`` stays instant (PEP 562)."""
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(f"videodiff.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'videodiff' has no attribute {name!r}")
