"""MPI against TCP on a link of 1 Gbit/s: compressed all_reduces between two test hosts, under both MPIs.

    python benchmarks/mpi_link.py --mpich .venv/mpich/bin/mpiexec --open-mpi .venv/bin/mpirun

The launcher starts one rank on each host, by an agent that enters the host as ssh would. MPICH goes over libfabric's
TCP provider, Open MPI over its TCP component: left to themselves both would notice that the hosts are one machine, and
go around the link through memory. Turns of TCP and MPI alternate; medians of all turns are printed. Needs root, as all
test hosts do.
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
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from results import write_json

SIZES_MB = (4, 64)
CARRIERS = ("TCP", "MPI")
WARM_UP = 3
PORT = "29533"
Launch = Callable[[Path, Path, list[str], dict[str, str]], tuple[list[str], dict[str, str]]]


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
    parser.add_argument("--mpich", type=Path, help="its mpiexec")
    parser.add_argument("--open-mpi", type=Path, help="its mpirun")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--turns", type=int, default=4, help="of each carrier")
    parser.add_argument("--repeats", type=int, default=20, help="a turn and size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    launchers = {"MPICH": (options.mpich, mpich), "Open MPI": (options.open_mpi, open_mpi)}
    found: dict[str, Any] = {"rate": options.rate, "seconds": {}}
    for library, (launcher, command_for) in launchers.items():
        if launcher is None:
            continue
        times: dict[str, dict[str, list[float]]] = {name: {str(size): [] for size in SIZES_MB} for name in CARRIERS}
        for _ in range(options.turns):
            for name in CARRIERS:
                for size, seconds in measure(options, launcher.absolute(), command_for, name).items():
                    times[name][size] += seconds
        for size in map(str, SIZES_MB):
            tcp, mpi = (median(times[name][size]) * 1e3 for name in CARRIERS)
            print(f"{library}, {size} MB at {options.rate}: TCP {tcp:.2f} ms, MPI {mpi:.2f} ms: {mpi / tcp:.2f}")
        found["seconds"][library] = times
    if options.json:
        write_json(options.json, found)
    return 0


def measure(options: argparse.Namespace, launcher: Path, command_for: Launch, carrier: str) -> dict[str, list[float]]:
    from torch_cgx.cli.hosts import Hosts

    settings = {
        "MASTER_PORT": PORT,
        "OMP_NUM_THREADS": "1",
        "CGX_CROSS_COMMUNICATOR_TYPE": carrier,
        "CGX_COMPRESSION_QUANTIZATION_BITS": "4",
        "CGX_COMPRESSION_BUCKET_SIZE": "1024",
    }
    with Hosts(2, options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        settings["MASTER_ADDR"] = hosts.nodes[0].address
        cases = "".join(
            f'{node.address}) exec {shlex.join(node.command(["sh", "-c"]))} "$*";;\n' for node in hosts.nodes
        )
        agent = Path(folder) / "agent"
        # Options of ssh come before the host.
        agent.write_text(
            f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1\nshift\ncase $host in\n{cases}esac\n'
        )
        agent.chmod(0o755)
        command, more = command_for(launcher, agent, [node.address for node in hosts.nodes], settings)
        command += [sys.executable, __file__, "--rank", str(options.repeats)]
        environ = {**os.environ, "PATH": f"{launcher.parent}:{os.environ['PATH']}", **settings, **more}
        done = subprocess.run(
            hosts.nodes[0].command(command), env=environ, check=True, stdout=subprocess.PIPE, text=True
        )
    found: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def mpich(
    launcher: Path, agent: Path, addresses: list[str], settings: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    # Ranks are numbered like hosts, and a host's interface is called after it.
    rank = " ".join(f"{name}=node$PMI_RANK" for name in ("CGX_NODE_ID", "GLOO_SOCKET_IFNAME", "FI_TCP_IFACE"))
    command = [str(launcher), "-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", ",".join(addresses)]
    command += ["-n", "2", "-ppn", "1", "sh", "-c", f'{rank} exec "$@"', "sh"]
    more = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    return command, {**more, "MPI4PY_LIBMPI": str(launcher.parent.parent / "lib")}


def open_mpi(
    launcher: Path, agent: Path, addresses: list[str], settings: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    rank = " ".join(f"{name}=node$OMPI_COMM_WORLD_RANK" for name in ("CGX_NODE_ID", "GLOO_SOCKET_IFNAME"))
    network = addresses[0].rpartition(".")[0] + ".0/24"
    command = [str(launcher), "--allow-run-as-root", "--prtemca", "plm_ssh_agent", str(agent)]
    command += ["--host", ",".join(f"{address}:1" for address in addresses), "-n", "2", "--map-by", "node"]
    command += ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", network]
    for name in settings:
        command += ["-x", name]
    return [*command, "sh", "-c", f'{rank} exec "$@"', "sh"], {}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]))
    else:
        sys.exit(main())
