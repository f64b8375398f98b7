"""What `cgx doctor` says of GPUs, on GPUs that are none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_cgx.cli import gpus, main
from torch_cgx.cli.doctor import gpu_check
from torch_cgx.cli.doctor.gpu_check import differing_kernels, examine
from torch_cgx.cli.processes import RankFailed, TooSlow
from torch_cgx.cli.progress import Progress
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.kernels.native import default_kernels
from torch_cgx.kernels.reference import ReferenceKernels

Capture = pytest.CaptureFixture[str]


class Fake(gpus.Cpu):
    """So many GPUs, of which some pairs do not reach each other."""

    def __init__(
        self, count: int = 2, apart: Sequence[tuple[int, int]] = (), library: str | None = "NCCL 2.30"
    ) -> None:
        self._count, self._apart, self._library = count, apart, library

    def count(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        return f"Fake {index}"

    def reaches(self, index: int, other: int) -> bool:
        return (index, other) not in self._apart

    def library(self) -> str | None:
        return self._library


class WrongKernels(ReferenceKernels):
    """Makes another byte of one width's payloads."""

    def encode(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payload: Tensor,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        super().encode(pieces, values, payload, rounding, residual)
        if pieces[0].bits == 3 and values.dtype == torch.bfloat16:
            payload[-9] ^= 1


@pytest.fixture(autouse=True)
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_check, "KERNEL_NUMEL", 2051)


def right(count: int) -> dict[str, Any]:
    assert count == 2
    return {"relative_error": 0.0123}


def test_a_rank_puts_its_tensors_where_it_was_asked_to() -> None:
    assert isinstance(gpus.place_of("cpu"), gpus.Cpu)
    assert isinstance(gpus.place_of("cuda"), gpus.Cuda)


def test_what_carries_collectives_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert gpus.Cuda().library() is None
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    monkeypatch.setattr(torch.version, "hip", None)
    assert gpus.Cuda().library() == "NCCL 2.30.1"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert gpus.Cuda().library() == "RCCL 2.30.1"


def test_without_gpus_it_is_one_line() -> None:
    found = examine(Fake(0), default_kernels)
    assert found.facts == {"GPUs": "none that torch sees"} and not found.problems


def test_gpus_that_are_well() -> None:
    found = examine(Fake(), default_kernels, right)
    assert found.facts == {
        "GPU 0": "Fake 0",
        "GPU 1": "Fake 1",
        "collectives on GPUs": "NCCL 2.30",
        "peer access": "all",
        "kernels on GPUs": "the bytes of the CPU's",
        "all_reduce of 64 MB at 4 bits on 2 GPUs": "right: relative error 1.2e-02, the same bits on all GPUs",
    }
    assert not found.problems and not found.advice


def test_how_far_it_is_shows_on_stderr(capsys: Capture) -> None:
    """Every width, every type and both roundings are tried, and named while they are: Triton compiles for minutes."""
    examine(Fake(), default_kernels, right)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == len(gpu_check.TRIALS) + 1 and not said.out
    assert lines[0] == "cgx doctor:   0%, kernels: 1 bits, float32, nearest"
    for each in (*(f"{bits} bits" for bits in range(1, 9)), "float16", "bfloat16", "stochastic"):
        assert each in said.err
    assert lines[-1].endswith("all_reduce on 2 GPUs")
    examine(Fake(0), default_kernels)
    assert not capsys.readouterr().err


def test_who_only_looks_starts_no_kernels() -> None:
    def never() -> Kernels:
        raise AssertionError("kernels were made")

    found = examine(Fake(), never, only_look=True)
    assert found.facts["GPU 1"] == "Fake 1" and "kernels on GPUs" not in found.facts and not found.problems


def test_one_gpu_has_nobody_to_reduce_with() -> None:
    found = examine(Fake(1), default_kernels, right)
    assert found.facts["peer access"] == "-" and not any("all_reduce" in name for name in found.facts)


def test_pairs_without_peer_access_are_named() -> None:
    found = examine(Fake(apart=[(1, 0)]), default_kernels, right)
    assert found.facts["peer access"] == "all but 1-0"
    assert "CGX_INNER_COMMUNICATOR_TYPE=SHM" in found.advice[0]


def test_what_is_missing_must_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(Fake(library=None), default_kernels, right)
    assert "without NCCL" in found.problems[0] and not any("all_reduce" in name for name in found.facts)
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    found = examine(Fake(), default_kernels, right)
    assert found.facts["kernels on GPUs"] == "missing" and "pip install triton" in found.problems[0]


def test_kernels_that_make_other_bytes_are_named_by_width_and_type() -> None:
    with Progress("test") as progress:
        assert differing_kernels(default_kernels(), gpus.Cpu(), progress) == []
    found = examine(Fake(), WrongKernels, right)
    assert found.problems == ["kernels on GPUs: 3 bits, bfloat16, nearest: other bytes"]
    assert found.facts["kernels on GPUs"] == "not those of the CPU"


def test_kernels_that_cannot_be_made_do_not_end_the_report() -> None:
    def broken() -> Kernels:
        raise RuntimeError("ptxas fatal: Value 'sm_999' is not defined")

    found = examine(Fake(), broken, right)
    assert found.problems == ["kernels on GPUs: they failed: RuntimeError: ptxas fatal: Value 'sm_999' is not defined"]


def test_a_wrong_sum_must_be_fixed() -> None:
    def wrong(count: int) -> dict[str, Any]:
        raise RankFailed(1, "all_reduce of 67108864 bytes with backend cgx is wrong: ranks hold different bits")

    found = examine(Fake(), default_kernels, wrong)
    assert "rank 1 failed" in found.problems[0] and "different bits" in found.problems[0]


def test_gpus_that_do_not_answer_must_be_fixed() -> None:
    def hangs(count: int) -> dict[str, Any]:
        raise TooSlow("no result within 600 s")

    assert examine(Fake(), default_kernels, hangs).problems[0].endswith("2 GPUs: no result within 600 s")


def test_doctor_prints_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(gpus, "all_gpus", lambda: Fake(apart=[(0, 1)], library=None))
    monkeypatch.setattr("torch_cgx.group.cuda.engine.triton_kernels", default_kernels)
    assert main(["doctor", "--quick", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"]["GPU 1"] == "Fake 1" and "without NCCL" in told["problems"][0]
    monkeypatch.setattr(gpus, "all_gpus", lambda: Fake(0))
    assert main(["doctor", "--quick"]) == 0
    assert "none that torch sees" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "needs a GPU for each of 2 or more processes; torch sees 1"),
        (["--nproc", "3"], "torch sees 1"),
        (["--nodes", "2"], "not allowed with --nodes"),
        (["--busy"], "not allowed with --device cuda"),
        (["--against", "gloo"], "allowed are nccl and none"),
    ],
)
def test_bench_refuses_what_the_gpus_cannot_do(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(gpus, "all_gpus", lambda: Fake(1))
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["bench", "allreduce", "--device", "cuda", *arguments]))
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_bench_takes_all_gpus_against_nccl(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked: dict[str, Any] = {}

    def run_ranks(target: str, settings: dict[str, Any], nproc: int, *more: Any) -> list[dict[str, Any]]:
        asked.update(settings, nproc=nproc)
        raise RankFailed(0, "enough")

    monkeypatch.setattr(gpus, "all_gpus", lambda: Fake(4))
    monkeypatch.setattr("torch_cgx.cli.processes.run_ranks", run_ranks)
    assert main(["bench", "allreduce", "--device", "cuda"]) == 1
    assert (asked["nproc"], asked["device"], asked["against"]) == (4, "cuda", ("nccl",))


def test_the_allreduce_of_the_check_is_of_64_mb_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(
        target: str, settings: dict[str, Any], nproc: int, *more: Any, limit_s: float
    ) -> list[dict[str, Any]]:
        assert target == "torch_cgx.cli.bench.allreduce_ranks:check" and nproc == 3
        assert settings["nbytes"] == 64 << 20 and settings["device"] == "cuda"
        more[0](0, {})
        return [{"relative_error": 0.5}, {}, {}]

    monkeypatch.setattr(gpu_check, "run_ranks", run_ranks)
    assert gpu_check.check_allreduce(3) == {"relative_error": 0.5}
