"""`python -m torch_cgx.cli` is `cgx`, where the command is not on the PATH."""

import sys

from torch_cgx.cli import main

if __name__ == "__main__":
    sys.exit(main())
