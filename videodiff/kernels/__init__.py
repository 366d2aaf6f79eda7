"""Pallas kernels live here, one folder each: ``<name>/reference.py`` (plain jnp, f32), ``tpu.py``, ``gpu.py``."""
