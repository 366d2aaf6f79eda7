"""Attention of every head over the key tiles of its own pattern: interface, plain reference, Pallas kernel.

Owns: the arithmetic of one call. Does not own: plans and routes (`attention`), which platform runs what.
Invariant: the result is that of softmax over the visited keys, for every finite input.
"""

from videodiff.kernels.tile_attention.reference import reference
from videodiff.kernels.tile_attention.work import Work, work_of

__all__ = ["Work", "reference", "work_of"]
