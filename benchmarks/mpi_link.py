"""MPI against TCP on a link of 1 Gbit/s: compressed all_reduces between two test hosts.

    python benchmarks/mpi_link.py --mpiexec .venv/mpich/bin/mpiexec

MPICH's mpiexec starts one rank on each host, by an agent that enters the host as ssh would. MPI goes over libfabric's
TCP provider: left to itself it would notice that both hosts are one machine, and go around the link through memory.
Turns of the two alternate; medians of all turns are printed. Needs root, as all test hosts do.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from results import write_json

SIZES_MB = (4, 64)
CARRIERS = ("TCP", "MPI")
WARM_UP = 3
PORT = "29533"


def rank_main(repeats: int) -> None:
    import torch
    import torch.distributed as dist

    import torch_cgx  # noqa: F401  (for a source tree that is not installed)

    torch.set_num_threads(1)
    dist.init_process_group("cgx")
    times: dict[int, list[float]] = {}
    for size in SIZES_MB:
        x = torch.randn(size << 18)
        times[size] = []
        for number in range(WARM_UP + repeats):
            start = time.perf_counter()
            dist.all_reduce(x, dist.ReduceOp.AVG)
            if number >= WARM_UP:
                times[size].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpiexec", type=Path, required=True, help="MPICH's")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--turns", type=int, default=4, help="of each carrier")
    parser.add_argument("--repeats", type=int, default=20, help="a turn and size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {name: {str(size): [] for size in SIZES_MB} for name in CARRIERS}
    for _ in range(options.turns):
        for name in CARRIERS:
            for size, seconds in measure(options, name).items():
                times[name][size] += seconds
    for size in map(str, SIZES_MB):
        tcp, mpi = (median(times[name][size]) * 1e3 for name in CARRIERS)
        print(f"{size} MB at {options.rate}: TCP {tcp:.2f} ms, MPI {mpi:.2f} ms, MPI / TCP {mpi / tcp:.2f}")
    if options.json:
        write_json(options.json, {"rate": options.rate, "seconds": times})
    return 0


def measure(options: argparse.Namespace, carrier: str) -> dict[str, list[float]]:
    from torch_cgx.cli.hosts import Hosts

    mpiexec = options.mpiexec.resolve()
    environ = {
        **os.environ,
        "PATH": f"{mpiexec.parent}:{os.environ['PATH']}",
        "MPI4PY_LIBMPI": str(mpiexec.parent.parent / "lib"),
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "MASTER_PORT": PORT,
        "OMP_NUM_THREADS": "1",
        "CGX_CROSS_COMMUNICATOR_TYPE": carrier,
        "CGX_COMPRESSION_QUANTIZATION_BITS": "4",
        "CGX_COMPRESSION_BUCKET_SIZE": "1024",
    }
    script = shlex.join([sys.executable, __file__, "--rank", str(options.repeats)])
    # Ranks are numbered like hosts, and a host's interface is called after it.
    rank = " ".join(f"{name}=node$PMI_RANK" for name in ("CGX_NODE_ID", "GLOO_SOCKET_IFNAME", "FI_TCP_IFACE"))
    with Hosts(2, options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        cases = "".join(
            f'{node.address}) exec {shlex.join(node.command(["sh", "-c"]))} "$*";;\n' for node in hosts.nodes
        )
        agent.write_text(f"#!/bin/sh\nshift\nhost=$1\nshift\ncase $host in\n{cases}esac\n")  # the first is an option
        agent.chmod(0o755)
        addresses = ",".join(node.address for node in hosts.nodes)
        command = [str(mpiexec), "-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", addresses]
        command += ["-n", "2", "-ppn", "1", "sh", "-c", f"{rank} exec {script}"]
        environ["MASTER_ADDR"] = hosts.nodes[0].address
        done = subprocess.run(
            hosts.nodes[0].command(command), env=environ, check=True, stdout=subprocess.PIPE, text=True
        )
    found: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]))
    else:
        sys.exit(main())
