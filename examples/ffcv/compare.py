"""Train three times, plain, with cgx, and with cgx and FFCV, and print what each took.

    python compare.py --config-file default_config.yaml [--nproc 2] [--price-per-hour 1.20] [any flag of the training]

    vanilla      ../cifar_train.py with backend gloo (nccl on GPUs), exact; all images in memory, augmented by torch
    CGX          the same, with cgx and its hook, at --bits
    CGX + FFCV   train_cifar_ffcv_cgx.py; it needs what write_datasets.py has written

All three train the same model from the same weights, for as many epochs. Training is the time from the first step to
the end of the last; the whole run is what one pays for, with the start of Python, reading the data, FFCV compiling its
pipeline, and the test. The price is that of all processes together.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from settings import add_data_flags, parse

from cifar_train import cifar_flags

HERE = Path(__file__).resolve().parent
COLUMNS = ("", "training", "images a second", "accuracy", "whole run", "cost")


def run(script: Path, options: argparse.Namespace, **settings: object) -> dict[str, Any]:
    """What a training of `script` reported, and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc}"]
        command.append(str(script))
        for name, value in {**settings, "json": output}.items():
            flag = f"--{name.replace('_', '-')}"
            command += ([flag] if value else []) if isinstance(value, bool) else [flag, str(value)]
        start = time.perf_counter()
        subprocess.run(command, env={"OMP_NUM_THREADS": str(options.threads or 1), **os.environ}, check=True)
        return {**json.loads(output.read_text()), "run_s": time.perf_counter() - start}


def row(name: str, result: dict[str, Any], options: argparse.Namespace) -> tuple[str, ...]:
    images = len(result["losses"]) * options.batch * result["world"]
    return (
        name,
        f"{result['seconds']:.1f} s",
        f"{images / result['seconds']:,.0f}",
        f"{result['accuracy']:.1%}",
        f"{result['run_s']:.1f} s",
        f"{options.price_per_hour * result['run_s'] / 3600:.4f}",
    )


def main() -> int:
    parser = cifar_flags(__doc__)
    add_data_flags(parser)
    parser.add_argument("--nproc", type=int, default=2, help="processes, on this machine")
    parser.add_argument("--price-per-hour", type=float, default=1.0, help="in any currency")
    options = parse(parser, ["data", "training"])
    if options.json or options.tensorboard:
        parser.error("--json and --tensorboard are for single trainings")

    taken = (
        "model",
        "epochs",
        "batch",
        "lr",
        "label_smoothing",
        "seed",
        "average",
        "device",
        "bucket_size",
        "layer_min_size",
    )
    settings = {name: getattr(options, name) for name in taken}
    if options.threads:
        settings["threads"] = options.threads
    plain = HERE.parent / "cifar_train.py"
    exact = {"backend": "nccl" if options.device == "cuda" else "gloo", "bits": 32}
    cgx = {"backend": options.backend, "bits": options.bits, "error_feedback": options.error_feedback}
    betons = {"train_beton": options.train_beton, "test_beton": options.test_beton, "config_file": options.config_file}
    trainings = {
        "vanilla": (plain, {**settings, **exact, "data": options.data}),
        "CGX": (plain, {**settings, **cgx, "data": options.data}),
        "CGX + FFCV": (HERE / "train_cifar_ffcv_cgx.py", {**settings, **cgx, **betons}),
    }
    rows = [COLUMNS]
    try:
        for name, (script, flags) in trainings.items():
            print(f"== {name}", flush=True)
            rows.append(row(name, run(script, options, **flags), options))
    except subprocess.CalledProcessError as error:
        print(f"compare: a training failed, see above (exit code {error.returncode})", file=sys.stderr)
        return 1
    print()
    for number, cells in enumerate(rows):
        print("| " + " | ".join(cells) + " |")
        if number == 0:
            print("|---" * len(cells) + "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
