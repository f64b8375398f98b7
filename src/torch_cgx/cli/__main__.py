"""`python -m torch_cgx.cli`: the `cgx` command for when it is not on the PATH."""

import sys

from torch_cgx.cli import main

if __name__ == "__main__":
    sys.exit(main())
