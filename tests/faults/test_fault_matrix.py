"""Every fault over every transport: all others raise what is promised, in time, and nothing is left behind.

`make test` runs those that end soon, on enough transports; most others are behind the marker. What a fault is, and
what is promised, stands in `cases`. That nothing stays in /dev/shm is asserted after every test by a fixture;
that no process does, by the nursery, which waits for all of them.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.faults import runs
from tests.faults.cases import FAULTS
from tests.faults.runs import FULL, LINKS, WORLDS
from tests.support.harness import describe
from torch_cgx.cli.hosts import HostsUnavailable
from torch_cgx.kernels.native import available

pytestmark = pytest.mark.ranks

GROUP_TIMEOUT_S = 4.0
SOON_S = 30.0  # a loaded machine shall not fail a test; tests/faults/__main__.py is stricter
LIMIT_S = 90.0
MPI_LIMIT_S = 150.0  # mpirun, and three interpreters that import torch where they cannot be forked

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
    "GLOO": ("killed (SIGKILL)", "another shape, exact", "Ctrl-C while waiting"),
    "HIERARCHY": ("killed (SIGKILL)", "never calls", "another reduction"),
    "TCP": (
        "killed (SIGKILL)",
        "exception in its DDP hook",
        "another shape, exact",
        "broadcast instead",
        "link down",
        "abort()",
        "Ctrl-C while waiting",
    ),
    "MPI": (),
}
# A case over MPI takes 5 s. What differs there is how ranks end, wait and are interrupted. That calls differ, or
# that a hook raises, is found out before anything is sent, as over GLOO. `make faults` runs these over MPI, too.
NOT_OVER_MPI = (
    "exception in its DDP hook",
    "another shape, exact",
    "another dtype",
    "another dtype, exact",
    "other bits",
    "another reduction",
    "broadcast instead",
    "broadcast instead, exact",
    "out of memory while staging",
    "Ctrl-C while encoding",
    "destroys the group twice",
)
CASES = [
    pytest.param(
        *(name, transport),
        id=f"{name} over {transport}",
        marks=() if name in SHORT[transport] else pytest.mark.matrix,
    )
    for transport in WORLDS
    for name, fault in FAULTS.items()
    if transport in fault.transports and not (transport == "MPI" and name in NOT_OVER_MPI)
]


@pytest.mark.parametrize(("name", "transport"), CASES)
def test_all_others_raise_what_is_promised(name: str, transport: str) -> None:
    if transport == "SHM" and not available():
        pytest.skip("installed without the native library")
    if name == FULL and (shutil.which("unshare") is None or os.getuid() != 0):
        pytest.skip("a private /dev/shm needs root and unshare")
    try:
        outcomes = runs.run(name, transport, "cgx", GROUP_TIMEOUT_S, MPI_LIMIT_S if transport == "MPI" else LIMIT_S)
    except HostsUnavailable as reason:
        assert name in LINKS
        pytest.skip(str(reason))
    found = runs.shortfalls(name, transport, outcomes, GROUP_TIMEOUT_S, SOON_S)
    assert not found, "\n".join([*found, describe(outcomes)])
