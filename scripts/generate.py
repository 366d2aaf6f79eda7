"""Prompt -> video from a checkout: the same as `videodiff generate`, with the same flags."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from videodiff.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
