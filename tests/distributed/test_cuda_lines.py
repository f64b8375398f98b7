"""The lines of the CUDA code that no test here can execute: the calls into CUDA, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import lines
import torch_cgx
from distributed import test_cuda, test_cuda_sharing
from distributed.gradients import BITS, noise
from distributed.harness import Rank, describe, observe_ranks
from distributed.test_cuda import CROSS, INNER, STAGED, start
from distributed.test_cuda_ends import leave, told_timeouts  # noqa: F401
from distributed.test_cuda_groups import coalesced, take_turns
from distributed.test_cuda_sharing import sums_over_shared_memory  # noqa: F401
from torch_cgx.algorithms import Topology
from torch_cgx.cuda import exchanges
from torch_cgx.executors.rounds import rounds_for
from torch_cgx.work import Completions
from unit import test_cuda_turns, test_direct_exchange, test_stream_work

PACKAGE = Path(str(torch_cgx.__file__)).parent
FILES = [
    *(PACKAGE / "executors" / f"{name}.py" for name in ("cuda", "device", "rounds", "staged")),
    *(PACKAGE / "executors" / f"{name}.py" for name in ("shared_exchange", "direct_exchange")),
    *sorted((PACKAGE / "cuda").glob("*.py")),
    PACKAGE / "stream_work.py",
    PACKAGE / "transports" / "nccl.py",
]

# What only a GPU can execute, by the file it stands in. Each is one call into torch.cuda, NCCL or Triton.
ONLY_ON_A_GPU = {
    "device.py": [
        "torch.cuda.set_device(where)",
        "return torch.cuda.Stream(where, priority=-1)  # type: ignore[no-untyped-call]",
        "return torch.cuda.current_stream(where)",
        "return torch.cuda.stream(stream)",
        "return stream.record_event()",
        "stream.wait_event(event)",
        "return bool(event.query())",
        "event.synchronize()",
        "tensor.record_stream(stream)",
        "return torch.cuda.is_current_stream_capturing()",
        "return torch.empty(nbytes, dtype=torch.uint8, device=where)",
        "return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)",
        "return not int(_runtime().cudaHostRegister(tensor.data_ptr(), tensor.numel(), _PORTABLE))",
        "_runtime().cudaHostUnregister(tensor.data_ptr())",
        "return torch.futures.Future(devices=[where])",
    ],
    "engine.py": [
        'return "" if dist.is_nccl_available() else "torch was built without NCCL"',
        'return Engine("cuda", partial(_new_nccl, joining), CudaDevice(), triton_kernels)',
        "options = dist.ProcessGroupNCCL.Options()",
        "options._timeout = joining.timeout",
        "return dist.ProcessGroupNCCL(joining.prefixed(name), ranks.index(joining.rank), len(ranks), options)",
        "from torch_cgx.kernels.triton import TritonKernels",
        "return TritonKernels()",
    ],
}


def run_traced(me: Rank, folder: str, name: str, *arguments: Any) -> None:
    with lines.traced(FILES, Path(folder)):
        try:
            globals()[name](me, *arguments) if name in globals() else getattr(test_cuda, name)(me, *arguments)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def on_cpu_too(me: Rank) -> None:
    """A group as users make it, which finds no GPU; and residuals that a callback keeps."""
    me.start_group("cgx", name="another")
    dist.destroy_process_group()
    group = start(me, "standin")
    group.keep(noise(me.rank, 8))


def without_shared_memory(me: Rank) -> None:
    """SHM was asked for, and cannot be had: messages, as on the CPU."""
    exchanges.open_shared_group = lambda joining, prefix: None  # type: ignore[assignment]
    test_cuda.sums(me, "standin")


def other_files(me: Rank) -> None:
    """Cached functions, which an earlier rank of this process may have called; what needs no ranks."""
    rounds_for.__wrapped__(Topology.flat("SRA", 2), (True, True), 0)
    for name, test in vars(test_cuda_turns).items():
        if name.startswith("test_"):
            test()


def hardly_ever(me: Rank) -> None:
    """What goes wrong with shared blocks, or hardly ever happens; streams that come round again."""
    test_direct_exchange.test_memory_that_cannot_be_had_or_mapped_is_an_error_that_says_so()
    completions = Completions("futures")
    test_stream_work.test_a_future_waits_for_its_operation_and_not_for_the_next(completions, 2)
    for test in (
        test_direct_exchange.test_payloads_arrive_whatever_their_lengths,
        test_direct_exchange.test_there_is_a_limit_to_what_is_shared,
    ):
        test(test_direct_exchange.make_pair(True))


JOBS: list[tuple[str, tuple[Any, ...], str, dict[str, str]]] = [
    ("on_cpu_too", (), "00", {}),
    ("sums", ("standin",), "00", {BITS: "4"}),
    ("without_shared_memory", (), "00", {BITS: "4", INNER: "SHM"}),
    ("other_files", (), "0", {}),
    ("hardly_ever", (), "0", {}),
    *(("sums_over_shared_memory", (how,), "00", {BITS: "4", INNER: "SHM"}) for how in test_cuda_sharing.WAYS),
    ("leave", ("aborted",), "00", {BITS: "4", INNER: "SHM"}),
    *(("leave", (how,), "001", {BITS: "4", CROSS: "GLOO"}) for how in ("done", "failed")),
    ("told_timeouts", (), "00", {BITS: "4"}),
    ("waits_and_futures", (False,), "00", {BITS: "4"}),
    ("mixed_calls", (), "00", {}),
    ("alone", (), "0", {BITS: "4"}),
    (coalesced.__name__, (), "00", {}),
    (take_turns.__name__, (), "0011", {BITS: "4", CROSS: "GLOO"}),
    ("large_sum", ("standin",), "001", {BITS: "4", CROSS: "GLOO"}),
    ("large_sum", ("standin",), "01", {BITS: "4", CROSS: "GLOO"}),
    ("large_sum", ("standin",), "0011", {BITS: "4", INNER: "SHM"}),
    ("large_sum", ("standin",), "00011", {BITS: "4"}),
    ("fails_for_good", (), "00", {BITS: "4"}),
    ("just_start", (), "001", {INNER: "GLOO", CROSS: "NCCL"}),
    *(("waits_and_futures", (True,), "00", {BITS: "4", **variables}) for variables in STAGED.values()),
]


@pytest.mark.matrix
def test_no_test_executes_these_lines_and_all_others_are_executed(tmp_path: Path) -> None:
    for name, arguments, nodes, variables in JOBS:
        places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate(nodes)}
        outcomes = observe_ranks(
            run_traced, len(nodes), None, str(tmp_path), name, *arguments, env=variables, rank_env=places, destroy=False
        )
        assert name == "just_start" or all(outcome.ok for outcome in outcomes), describe(outcomes)
    seen = lines.read(tmp_path)
    found = {file.name: missing for file in FILES if (missing := lines.unexecuted(file, seen))}
    assert found == ONLY_ON_A_GPU
