"""Every fault over every transport: all others raise what is promised, in time, and nothing is left behind.

`make test` runs those that end soon, on enough transports; the whole matrix is behind the marker. What a fault is, and
what is promised, stands in `fault_cases`. That nothing stays in /dev/shm is asserted after every test by a fixture;
that no process does, by the nursery, which waits for all of them.
"""

from __future__ import annotations

import os
import shutil

import pytest

from distributed import fault_runs
from distributed.fault_cases import FAULTS
from distributed.fault_runs import FULL, LINKS, WORLDS
from distributed.harness import describe
from torch_cgx.cli.hosts import HostsUnavailable
from torch_cgx.kernels.cpu import available

GROUP_TIMEOUT_S = 4.0
SOON_S = 15.0  # a loaded machine shall not fail a test; benchmarks/faults.py is stricter
LIMIT_S = 45.0
MPI_LIMIT_S = 150.0  # mpirun, and three interpreters that import torch

# Within a host `test_faults` has the rest, and `test_small_shared_memory` a full /dev/shm.
SHORT = {
    "SHM": (
        "exception in its DDP hook",
        "out of memory while staging",
        "ends with work pending",
        "abort()",
        "Ctrl-C while encoding",
        "Ctrl-C in destroy",
    ),
    "GLOO": (
        "killed (SIGKILL)",
        "exception in its DDP hook",
        "another shape, exact",
        "another dtype, exact",
        "broadcast instead",
        "link down",
        "out of memory while staging",
        "abort()",
        "Ctrl-C while waiting",
        "Ctrl-C in init",
    ),
    "HIERARCHY": ("killed (SIGKILL)", "never calls", "another reduction"),
    "MPI": ("broadcast instead",),
}
CASES = [
    pytest.param(
        *(name, transport),
        id=f"{name} over {transport}",
        marks=() if name in SHORT[transport] else pytest.mark.matrix,
    )
    for transport in WORLDS
    for name, fault in FAULTS.items()
    if transport in fault.transports
]


@pytest.mark.alone
@pytest.mark.parametrize(("name", "transport"), CASES)
def test_all_others_raise_what_is_promised(name: str, transport: str) -> None:
    if transport == "SHM" and not available():
        pytest.skip("installed without the native library")
    if name == FULL and (shutil.which("unshare") is None or os.getuid() != 0):
        pytest.skip("a private /dev/shm needs root and unshare")
    try:
        outcomes = fault_runs.run(
            name, transport, "cgx", GROUP_TIMEOUT_S, MPI_LIMIT_S if transport == "MPI" else LIMIT_S
        )
    except HostsUnavailable as reason:
        assert name in LINKS
        pytest.skip(str(reason))
    found = fault_runs.shortfalls(name, transport, outcomes, GROUP_TIMEOUT_S, SOON_S)
    assert not found, "\n".join([*found, describe(outcomes)])
