"""Settings for the whole suite: CPU, and no compile cache outside the test run."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("VIDEODIFF_CACHE_DIR", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
