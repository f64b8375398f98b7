"""The lines of the CUDA code that no test here can execute: the calls into CUDA, and no others.

What is watched: all of the executor, the kernels (Triton's interpreter runs the very lines of a kernel), what `cgx`
does with GPUs; and of the group, where it serves CPU tensors too, whatever is about CUDA. This prints the list:

    pytest -m matrix -s tests/distributed/test_cuda_lines.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

import lines
import torch_cgx
from distributed import test_cuda, test_cuda_sharing
from distributed.gradients import BITS, noise
from distributed.harness import Rank, describe, observe_ranks
from distributed.test_cuda import CROSS, INNER, STAGED, start
from distributed.test_cuda_ends import leave, told_timeouts  # noqa: F401
from distributed.test_cuda_groups import coalesced, coalesced_by_nccl, take_turns, without_a_gpu
from distributed.test_cuda_shares import carried_or_refused, sums_and_gathers  # noqa: F401
from distributed.test_cuda_sharing import sums_over_shared_memory  # noqa: F401
from torch_cgx.algorithms import Topology
from torch_cgx.completions import Completions
from torch_cgx.cuda import exchanges
from torch_cgx.executors.rounds import rounds_for
from torch_cgx.layout import Layer
from torch_cgx.quantizers import MaxMin
from unit import test_cuda_turns, test_direct_exchange, test_stream_work

PACKAGE = Path(str(torch_cgx.__file__)).parent
TESTS = Path(__file__).parents[1]
FILES = [
    *(PACKAGE / "executors" / f"{name}.py" for name in ("cuda", "device", "rounds", "staged")),
    *(PACKAGE / "executors" / f"{name}.py" for name in ("shared_exchange", "direct_exchange")),
    *sorted((PACKAGE / "cuda").glob("*.py")),
    PACKAGE / "stream_work.py",
    PACKAGE / "transports" / "nccl.py",
    PACKAGE / "cli" / "gpu_check.py",
    PACKAGE / "cli" / "gpus.py",
    PACKAGE / "carried.py",
]
KERNELS = sorted((PACKAGE / "kernels").glob("triton*.py"))
# Of these, what is about CUDA tensors.
PARTLY = [PACKAGE / name for name in ("allreduces.py", "backend.py", "reduce_scatters.py", "shares.py")]
ABOUT_CUDA = re.compile(r"cuda|nccl|_side\b|\bside\b|device\.type", re.IGNORECASE)
WATCHED = [*FILES, *KERNELS, *PARTLY]

# What only a GPU can execute, by the file it stands in. Each is one call into torch.cuda, NCCL or Triton.
ONLY_ON_A_GPU = {
    "backend.py": ["return cuda_engine(joining)"],
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
    "gpus.py": [
        'torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))',
        "return values.cuda()",
        "torch.cuda.synchronize()",
        "return torch.cuda.device_count()",
        "return torch.cuda.get_device_name(index)",
        "return torch.cuda.can_device_access_peer(index, other)",
    ],
}


def run_traced(me: Rank, folder: str, name: str, *arguments: Any) -> None:
    with lines.traced(WATCHED, Path(folder)):
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


def every_collective(me: Rank) -> None:
    """That NCCL carries; the last ones, of several tensors at once, on a group of CPU tensors."""
    group = start(me, "standin")
    x, shares = torch.full((4,), float(me.rank)), [torch.zeros(4) for _ in range(me.world)]
    whole = torch.zeros(4 * me.world)
    dist.broadcast(x.clone(), 0)
    dist.reduce(x.clone(), 0)
    group.reduce(x.clone(), 0, dist.ReduceOp.SUM).wait()
    group.broadcast(x.clone(), 0).wait()
    dist.all_gather(shares, x)
    group.allgather(shares, x).wait()
    assert [float(each[0]) for each in shares] == list(map(float, range(me.world)))
    dist.all_gather_into_tensor(whole, x)
    dist.gather(x, shares if me.rank == 0 else None)
    dist.scatter(x, shares if me.rank == 0 else None)
    dist.all_to_all([torch.zeros(4) for _ in shares], shares)
    dist.all_to_all_single(torch.zeros_like(whole), whole)
    dist.reduce_scatter(x, shares)
    group.reduce_scatter(x, shares).wait()
    dist.reduce_scatter_tensor(x, whole)
    peer = 1 - me.rank
    for receive in (dist.recv, lambda x, peer: dist.recv(x)):
        if me.rank == 0:
            dist.send(x, peer)
        else:
            receive(x, peer)
    options = c10d.BarrierOptions()
    options.device = torch.device("cuda")
    group.barrier(options).wait()
    group.allreduce_layers(noise(me.rank, 64), (Layer(64, MaxMin(4, 64)),)).wait()
    with pytest.raises(ValueError, match="expected tensors on cpu"):
        dist.broadcast(torch.empty(4, device="meta"), 0)
    with pytest.raises(TypeError, match="expected real numbers"):
        group.gather([[x]], [torch.zeros(4, dtype=torch.complex64)])
    for wrong, words in ((torch.zeros(4, 2).t(), "contiguous input"), (torch.zeros(3), "equal parts")):
        with pytest.raises(ValueError, match=words):
            group.alltoall_base(whole, wrong, [], [])
    dist.destroy_process_group()
    me.start_group("cgx", name="another")
    group = dist.group.WORLD
    group.allreduce_layers(x.to_sparse(), ()).wait()
    group.allgather_into_tensor_coalesced([whole], [x]).wait()
    group.allgather_coalesced([[each] for each in shares], [x]).wait()


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
    ("every_collective", (), "00", {}),
    ("sums_and_gathers", ("standin",), "00", {}),
    ("carried_or_refused", (), "00", {}),
    ("waits_and_futures", (False,), "00", {BITS: "4"}),
    ("mixed_calls", (), "00", {}),
    ("alone", (), "0", {BITS: "4"}),
    (coalesced.__name__, (), "00", {}),
    (coalesced_by_nccl.__name__, (), "00", {BITS: "4"}),
    (without_a_gpu.__name__, (), "000", {BITS: "4"}),
    (take_turns.__name__, (), "0011", {BITS: "4", CROSS: "GLOO"}),
    ("large_sum", ("standin",), "001", {BITS: "4", CROSS: "GLOO"}),
    ("large_sum", ("standin",), "01", {BITS: "4", CROSS: "GLOO"}),
    ("large_sum", ("standin",), "0011", {BITS: "4", INNER: "SHM"}),
    ("large_sum", ("standin",), "00011", {BITS: "4"}),
    ("fails_for_good", (), "00", {BITS: "4"}),
    ("just_start", (), "001", {INNER: "GLOO", CROSS: "NCCL"}),
    *(("waits_and_futures", (True,), "00", {BITS: "4", **variables}) for variables in STAGED.values()),
]


def has_triton() -> bool:
    return find_spec("triton") is not None


def run_unit_tests(folder: Path) -> None:
    """In a process of their own, since Triton either interprets or compiles."""
    files = [str(TESTS / "unit" / f"test_{name}.py") for name in ("gpu_check", "triton_kernels")]
    chosen = ["-m", "not matrix", "-k", "not bad_constant and not 5000 and not importing", "-p", "no:cacheprovider"]
    program = (
        "import sys, pytest, lines\n"
        "from pathlib import Path\n"
        "folder, *rest = sys.argv[1:]\n"
        "middle = rest.index('--')\n"
        "with lines.traced([Path(file) for file in rest[:middle]], Path(folder)):\n"
        "    failed = pytest.main(rest[middle + 1:])\n"
        "sys.exit(failed)"
    )
    watched = [str(file) for file in WATCHED]
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), *watched, "--", *files, *chosen],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.matrix
def test_no_test_executes_these_lines_and_all_others_are_executed(tmp_path: Path) -> None:
    for name, arguments, nodes, variables in JOBS:
        places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate(nodes)}
        outcomes = observe_ranks(
            run_traced, len(nodes), None, str(tmp_path), name, *arguments, env=variables, rank_env=places, destroy=False
        )
        assert name == "just_start" or all(outcome.ok for outcome in outcomes), describe(outcomes)
    run_unit_tests(tmp_path)
    seen = lines.read(tmp_path)
    files = [
        *((file, None) for file in (*FILES, *(KERNELS if has_triton() else []))),
        *((f, ABOUT_CUDA) for f in PARTLY),
    ]
    found = {file.name: missing for file, about in files if (missing := lines.unexecuted(file, seen, about))}
    for name, missing in found.items():
        print(f"\n{name}", *missing, sep="\n    ")
    assert found == ONLY_ON_A_GPU
