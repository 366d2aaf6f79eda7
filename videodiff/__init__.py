"""videodiff: text-to-video diffusion in JAX and Flax. The public names live here and nothing else."""

from videodiff.version import __version__

__all__ = ["__version__"]
