"""`python -m tests.fuzz --seconds 30 --json FILE`: every target in a process of its own, and how many inputs each had.

Inputs come from atheris, guided by the coverage of torch_cgx, where it is installed; else they are random. An input
that breaks a promise is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 120.0  # to import torch, and to find an input that hangs
INPUT_NBYTES = 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each target")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    parser.add_argument("--only", action="append", help="a target's name")
    parser.add_argument("--child", nargs=2, metavar=("TARGET", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return fuzz(options.child[0], Path(options.child[1]), options.seconds)
    from tests.fuzz.names import NAMES

    found, broken = {}, 0
    for name in options.only or NAMES:
        result = run_child(name, options.seconds)
        broken += result["broken"]
        found[name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)
    if options.json:
        write(options.json, found, options.seconds)
    return 1 if broken else 0


def write(path: Path, found: dict[str, dict[str, int]], seconds: float) -> None:
    """The counts; targets that were left out this time keep those that they have."""
    kept = json.loads(path.read_text())["targets"] if path.exists() else {}
    guided = importlib.util.find_spec("atheris") is not None
    targets = {
        **kept,
        **{name: {**each, "seconds": seconds, "coverage_guided": guided} for name, each in found.items()},
    }
    totals = {key: sum(each[key] for each in targets.values()) for key in ("inputs", "broken")}
    path.write_text(json.dumps({**totals, "targets": targets}, indent=2) + "\n")


def run_child(name: str, seconds: float) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "tests.fuzz",
            "--seconds",
            str(seconds),
            "--child",
            name,
            folder,
        ]
        with open(Path(folder) / "log", "w+", errors="replace") as log:
            try:
                code = subprocess.run(command, stdout=log, stderr=log, timeout=seconds + GRACE_S, cwd=ROOT).returncode
            except subprocess.TimeoutExpired:
                code = -1
            log.seek(0)
            text = log.read()
        counts = Path(folder) / "counts.json"
        result = json.loads(counts.read_text()) if counts.exists() else {"inputs": 0, "worked": 0}
        last = Path(folder) / "input"
        if code != 0:
            print(f"{name}: ended with {code} at {last.read_bytes()!r}" if last.exists() else f"{name}: never began")
            print(text[-3000:])
        return {**result, "broken": int(code != 0)}


def fuzz(name: str, folder: Path, seconds: float) -> int:
    """In the child. Leaves through os._exit, since libFuzzer does not return."""
    try:
        import atheris
    except ImportError:
        atheris = None
    import torch  # noqa: F401  not instrumented: it is not ours

    if atheris is None:
        from tests.fuzz.targets import TARGETS
    else:
        with atheris.instrument_imports(include=["torch_cgx"]):
            from tests.fuzz.targets import TARGETS
    one = counted(TARGETS[name], folder, seconds)
    if atheris is not None:
        atheris.Setup(
            [sys.argv[0], f"-max_len={INPUT_NBYTES}", "-rss_limit_mb=0", "-timeout=60", f"-artifact_prefix={folder}/"],
            one,
        )
        atheris.Fuzz()
    dice = random.Random(name)
    while True:
        one(dice.randbytes(dice.randrange(INPUT_NBYTES)))


def counted(target: Callable[[bytes], bool], folder: Path, seconds: float) -> Callable[[bytes], None]:
    """Notes each input before it is tried, and leaves when the time is over."""
    counts = {"inputs": 0, "worked": 0}
    until = time.monotonic() + seconds
    note = os.open(folder / "input", os.O_CREAT | os.O_RDWR)

    def one(data: bytes) -> None:
        os.ftruncate(note, 0)
        os.pwrite(note, data, 0)
        counts["worked"] += target(data)
        counts["inputs"] += 1
        if time.monotonic() > until:
            (folder / "counts.json").write_text(json.dumps(counts))
            sys.stdout.flush()
            os._exit(0)

    return one


if __name__ == "__main__":
    sys.exit(main())
