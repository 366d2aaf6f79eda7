"""Train the shipped model: VAE, bank of clips, text encoder, transformer, export, or ``start`` from the one that ships.

Every phase can be stopped and run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=("start", "vae", "bank", "text", "dit", "export", "all"))
    parser.add_argument("--run", type=Path, default=Path("runs/tiny"), help="folder of checkpoints, logs and latents")
    parser.add_argument("--minutes", type=float, help="time budget of the phase; 'all' takes every phase's default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("videodiff/assets/tiny"), help="where export writes the model")
    args = parser.parse_args()
    from videodiff.tiny import train

    train.run(args.phase, args.run, minutes=args.minutes, seed=args.seed, out=args.out)


if __name__ == "__main__":
    main()
