"""`python -m videodiff` is the `videodiff` command."""

import sys

from videodiff.cli import main

if __name__ == "__main__":
    sys.exit(main())
