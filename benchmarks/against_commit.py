"""All_reduces on one host, of this commit against another: is any width or size slower than it was?

    python benchmarks/against_commit.py f781bcd --json FILE

The other commit is checked out and its native library built, in a temporary folder. Turns of the two alternate, each
with processes of its own. Prints medians over all turns and their ratio, of every width and size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from results import write_json

ROOT = Path(__file__).resolve().parent.parent
WORLD = 2
BITS = (1, 2, 3, 4, 5, 6, 7, 8, 32)
SIZES_KB = (64, 4096, 65536)
PORT = "29541"
TURN_S = 0.15  # of each width and size


def rank_main() -> None:
    import torch
    import torch.distributed as dist

    import torch_cgx

    torch.set_num_threads(1)
    dist.init_process_group("cgx")
    times: dict[str, list[float]] = {}
    for size in SIZES_KB:
        x = torch.randn(size << 8)
        for bits in BITS:
            torch_cgx.set_default(bits=bits)
            seconds: list[float] = []
            repeats = torch.tensor([0])
            for number in range(1 << 30):
                start = time.perf_counter()
                dist.all_reduce(x, dist.ReduceOp.AVG)
                seconds.append(time.perf_counter() - start)
                if number == 3:  # the first ones make plans and memory; all ranks repeat as often
                    repeats[0] = max(8, min(2000, int(TURN_S / min(seconds))))
                    dist.broadcast(repeats, 0)
                    seconds.clear()
                if number > 3 and len(seconds) == repeats.item():
                    break
            times[f"{bits} bits, {size} KB"] = seconds
    if dist.get_rank() == 0:
        print(json.dumps({name: median(each) for name, each in times.items()}), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=6, help="of each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        there, here = Path(folder, "other"), Path(folder, "this")
        for tree, commit in ((there, options.commit), (here, "HEAD")):
            subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, tree], check=True)
            subprocess.run(["git", "checkout", "--quiet", commit], cwd=tree, check=True)
            subprocess.run(["cmake", "-S", ".", "-B", "build", "-G", "Ninja"], cwd=tree, check=True, stdout=2)
            subprocess.run(["cmake", "--build", "build"], cwd=tree, check=True, stdout=2)
            subprocess.run(["cmake", "--install", "build", "--prefix", "src"], cwd=tree, check=True, stdout=2)
        times: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
        for turn in range(options.turns):
            order = [("before", there), ("now", here)]
            for name, tree in order if turn % 2 else order[::-1]:
                times[name].append(measure(tree))
    ratios = []
    for name in times["now"][0]:
        before, now = (median(turn[name] for turn in times[which]) for which in ("before", "now"))
        ratios.append(now / before)
        print(f"{name:>18}: {options.commit} {before * 1e3:8.3f} ms, now {now * 1e3:8.3f} ms, ratio {now / before:.3f}")
    print(f"ratios: median {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    if options.json:
        write_json(options.json, {"commit": options.commit, "seconds": times})
    return 0


def measure(tree: Path) -> dict[str, float]:
    """Run all ranks on one source tree; the seconds of each case."""
    environ = {**os.environ, "PYTHONPATH": str(tree / "src"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    environ |= {"WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank"], env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(WORLD)
    ]
    texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank failed on {tree}")
    found: dict[str, float] = json.loads(texts[0].strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main()
    else:
        sys.exit(main())
