"""Run an example as `python EXAMPLE ARGUMENT...` would. Write how many DDP modules there are when it leaves its group.

python end_probe.py FILE EXAMPLE ARGUMENT...
"""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def count_ddp_modules() -> int:
    """Return how many DDP modules this process has. Those in reference cycles count until they are collected."""
    return sum(issubclass(type(each), DistributedDataParallel) for each in gc.get_objects())


def main() -> None:
    file, example, *arguments = sys.argv[1:]
    destroy = dist.destroy_process_group

    def destroy_and_tell(*arguments: Any) -> None:
        with Path(file).open("a") as told:
            told.write(f"{count_ddp_modules()}\n")
        destroy(*arguments)

    gc.disable()
    dist.destroy_process_group = destroy_and_tell
    sys.argv = [example, *arguments]
    sys.path[0] = str(Path(example).parent)
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main()
