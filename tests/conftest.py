"""Settings and fixtures of all tests.

Tests with the marker `ranks` start processes; nothing of theirs may be left in shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.support import harness
from torch_cgx.cli.hosts import Hosts, HostsUnavailable

# Some virtual machines announce AMX and do not let it run: torch's products of bfloat16 tensors then end the process
# with an illegal instruction. oneDNN reads this when it is first used; processes that tests start inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Before anything imports Triton: its kernels run in its interpreter in this process. Tests that compile them start
# another, and so do ranks, whose environment is without this variable (support/harness.py).
os.environ["TRITON_INTERPRET"] = "1"

# Machines that run tests are busy with other tests: slow is not wrong.
settings.register_profile("cgx", deadline=None, max_examples=60)
settings.load_profile("cgx")

# Files that take longest, longest first. Workers take whole files, in this order and then by name: a long one that is
# taken last keeps one of them busy while the others have nothing left to do.
SLOWEST_FIRST = (
    "faults/test_fault_matrix.py",
    "docs/test_install.py",
    "plan/test_ring_of_slices.py",
    "examples/test_ffcv.py",
    "group/test_recovery.py",
    "examples/test_examples.py",
    "integrations/test_frameworks.py",
    "kernels/triton/test_compiled.py",
    "integrations/test_launched_ranks.py",
    "cli/bench/test_allreduce.py",
    "cli/bench/test_train.py",
    "group/cuda/test_cuda.py",
    "group/test_nodes.py",
    "group/test_mpi.py",
    "kernels/test_native.py",
    "group/test_linked.py",
    "group/test_without_shared_memory.py",
    "kernels/triton/test_oracle.py",
    "group/test_faults.py",
    "fsdp/test_fsdp.py",
    "fuzz/test_against_gloo.py",
    "group/test_trace_files.py",
    "kernels/test_sums.py",
    "engines/host/test_native_program.py",
    "engines/test_memory.py",
    "test_autoload.py",
    "fuzz/test_decode.py",
    "ddp/test_hook.py",
    "ddp/test_training.py",
    "examples/test_tour.py",
    "cli/doctor/test_doctor_ranks.py",
)
TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Let workers share the cores: threads of one would wait for cores that another one has."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only",
        choices=["together", "alone"],
        help="only tests that bear others beside them, or only those that do not",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without tests that run alone, if only those are asked for: it takes longer than they do."""
    if config.getoption("--only") == "alone" and collection_path.suffix == ".py":
        return "mark.alone" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {TESTS / name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    only = config.getoption("--only")
    if only is None:
        return
    chosen = [item for item in items if (item.get_closest_marker("alone") is not None) == (only == "alone")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.fixture(params=[pytest.param("gloo", marks=pytest.mark.matrix), "cgx"])
def backend(request: pytest.FixtureRequest) -> str:
    """Run a test on ours and, in CI, on torch's own backend: what gloo does is the standard."""
    name: str = request.param
    return name


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """Make test hosts that last as long as the test: `make_hosts(2, rate="1gbit")`. Skip where they cannot be made."""
    with ExitStack() as stack:

        def make(nodes: int, rate: str | None = None) -> Hosts:
            try:
                return stack.enter_context(Hosts(nodes, rate))
            except HostsUnavailable as reason:
                pytest.skip(str(reason))

        yield make


@pytest.fixture(scope="session")
def private_shared_memory() -> None:
    """Keep other processes' files out of sight where that is allowed; elsewhere the harness asks who holds them."""
    harness.make_shared_memory_private()


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("ranks") is None:
        yield
        return
    request.getfixturevalue("private_shared_memory")
    before = harness.shared_memory_names()
    yield
    left = harness.left_in_shared_memory(before)
    assert not left, f"left in /dev/shm: {sorted(left)}"


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    yield
    harness.close()
