"""Self-attention backends behind one interface.

Owns: the registry and every backend that registers itself on import of this package. Does not own: the models
that call a backend, the schedule that picks a density. Invariant: importing this package registers every backend.
"""

from videodiff.attention import dense as _dense  # noqa: F401  (registers itself)
from videodiff.attention import svg as _svg  # noqa: F401
from videodiff.attention.api import Attend, AttentionSpec, HeadStats, backends, make_attend, register

__all__ = ["Attend", "AttentionSpec", "HeadStats", "backends", "make_attend", "register"]
