"""What `cgx doctor` says as far as one process can show it: it only looks here, or its trial is another one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from torch_cgx.cli import machine, main
from torch_cgx.cli.doctor import command, interfaces, software, text, trial
from torch_cgx.cli.doctor.interfaces import Interface
from torch_cgx.cli.doctor.software import Mpi
from torch_cgx.cli.doctor.trial import Attempt
from torch_cgx.group.bootstrap import mpi_process
from torch_cgx.kernels import native

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"), None)
RIGHT = Attempt("shared memory", 4, 4 << 20, relative_error=0.14, same_bits=True, median_s=2e-3, sent_nbytes=1e6)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: Patch) -> None:
    for name in os.environ:
        if name.startswith("CGX_") or name == interfaces.GLOO_VARIABLE:
            monkeypatch.delenv(name)


@pytest.fixture
def attempts(monkeypatch: Patch) -> list[Attempt]:
    """What the trial will have found."""
    found: list[Attempt] = []
    monkeypatch.setattr(trial, "try_ways", lambda compression, on_way: found)
    monkeypatch.setattr(interfaces, "loopback_bit_per_s", lambda link: 5e9)
    return found


def told(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_says_ready_where_the_trial_went_well(capsys: Capture, attempts: list[Attempt]) -> None:
    attempts.append(RIGHT)
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[-1] == "ready"
    assert any(line.split()[:1] == ["torch"] for line in lines)
    assert ["shared", "memory", "right", "0.14", "yes", "2.00", "ms"] in [line.split() for line in lines]
    assert "5 Gbit/s" in said.out and "says nothing of the wire" in said.out
    assert "two processes start" in said.err, "how far it is goes to stderr"


def test_a_quick_look_measures_nothing_and_does_not_claim_that_it_works(capsys: Capture, monkeypatch: Patch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it did not only look")

    monkeypatch.setattr(trial, "try_ways", never)
    monkeypatch.setattr(interfaces, "loopback_bit_per_s", never)
    assert main(["doctor", "--quick"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "ready, as far as one can tell without trying it"
    assert not said.err


def test_json_has_all_of_it(capsys: Capture, monkeypatch: Patch, attempts: list[Attempt]) -> None:
    monkeypatch.setenv("CGX_COMPRESSION_QUANTIZATION_BITS", "4")
    attempts.append(RIGHT)
    code, facts = told(capsys)
    assert code == 0 and facts["ready"] is True
    assert (facts["schema"], facts["schema_version"]) == ("cgx-doctor", 2)
    assert facts["settings"]["bits"] == 4
    assert facts["origins"]["bits"] == {"variable": "CGX_COMPRESSION_QUANTIZATION_BITS", "from": "variable"}
    assert facts["origins"]["bucket_size"] == {"variable": "CGX_COMPRESSION_BUCKET_SIZE", "from": "default"}
    assert facts["machine"]["cores"] >= 1
    assert facts["transports"]["TCP"] == "available" and "MPI" in facts["transports"]
    assert facts["trials"][0]["same_bits"] is True
    assert {"mpi", "nccl", "triton", "gpus", "interfaces", "gloo", "shared_memory", "advice"} <= facts.keys()


def test_every_wrong_variable_is_named_and_nothing_is_tried(
    capsys: Capture, monkeypatch: Patch, attempts: list[Attempt]
) -> None:
    attempts.append(RIGHT)
    monkeypatch.setenv("CGX_COMPRESSION_QUANTIZATION_BITS", "99")
    monkeypatch.setenv("CGX_INTRA_COMPRESS", "yes")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "fix: CGX_COMPRESSION_QUANTIZATION_BITS='99' is not valid: allowed is 1 to 8, or 32" in shown
    assert "fix: CGX_INTRA_COMPRESS='yes' is not valid: allowed is 0 or 1" in shown
    assert "ready" not in shown and "no all_reduce was tried" in shown


def test_a_misspelt_variable_is_advice(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CGX_COMPRESION_BUCKET_SIZE", "128")
    code, facts = told(capsys, "--quick")
    assert code == 0
    assert any(
        "CGX_COMPRESION_BUCKET_SIZE" in line and "CGX_COMPRESSION_BUCKET_SIZE" in line for line in facts["advice"]
    )


def test_a_failed_trial_must_be_fixed_and_is_told_once_where_all_failed_alike(
    capsys: Capture, attempts: list[Attempt]
) -> None:
    attempts += [Attempt(way, 4, 4 << 20, error="rank 1 failed: it ended") for way in trial.WAYS]
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("fix: ") and lines[-1].endswith("over shared memory and TCP: rank 1 failed: it ended")
    assert sum(line.startswith("fix: ") for line in lines) == 1


def test_memory_that_is_not_shared_for_no_known_reason_is_told(
    capsys: Capture, monkeypatch: Patch, attempts: list[Attempt]
) -> None:
    attempts.append(Attempt("shared memory", 4, 4 << 20, note="rank 0 reports: Permission denied"))
    monkeypatch.setattr(machine, "shared_memory_nbytes", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(machine, "native_facts", lambda: (True, "scalar"))
    code, facts = told(capsys)
    assert code == 0 and "rank 0 reports: Permission denied" in facts["advice"]
    monkeypatch.setattr(machine, "native_facts", lambda: (False, None))
    code, facts = told(capsys)
    assert not any("Permission" in line for line in facts["advice"]), "the missing library explains it"


@pytest.mark.parametrize(
    ("found", "shown", "advised"),
    [
        (None, "missing", "is missing"),
        ((1 << 26, 1 << 20), "64 MB, 1 MB free", "is small"),
        ((1 << 33, 1 << 32), "", ""),
    ],
)
def test_shared_memory_is_shown_with_what_to_do_about_it(
    found: tuple[int, int] | None, shown: str, advised: str, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(machine, "shared_memory_nbytes", lambda: found)
    assert main(["doctor", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.split()[:1] == ["/dev/shm"])
    assert shown in line
    assert any(line.startswith(f"advice: /dev/shm {advised}") for line in lines) == bool(advised)


def test_without_the_native_library_it_says_so_and_goes_on(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setenv("CGX_SIMD", "avx2")
    code, facts = told(capsys, "--quick")
    assert code == 0 and facts["machine"]["native"] is False
    assert any("native library is missing" in line for line in facts["advice"])


def test_without_any_interface_it_goes_on(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(interfaces, "find_interfaces", list)
    assert main(["doctor", "--quick"]) == 0
    assert "none that can be seen" in capsys.readouterr().out


def test_a_host_that_does_not_reach_itself_must_be_fixed(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(interfaces, "loopback_problem", lambda: "127.0.0.1 cannot be reached: ip link set lo up")
    code, facts = told(capsys)
    assert code == 1 and "ip link set lo up" in facts["problems"][0] and not facts["trials"]


@pytest.mark.parametrize(("library", "code"), [("Open MPI 5.0", 0), (None, 1)])
def test_mpi_that_is_asked_for_must_be_there(
    library: str | None, code: int, capsys: Capture, monkeypatch: Patch
) -> None:
    mpi = Mpi(mpi4py=None, library=library, mpirun=None, on_path=False, told="not installed: pip install it")
    monkeypatch.setattr(software, "find_mpi", lambda: mpi)
    monkeypatch.setenv("CGX_CROSS_COMMUNICATOR_TYPE", "MPI")
    found, facts = told(capsys, "--quick")
    assert found == code
    (line,) = (line for line in facts["problems" if code else "advice"] if "CGX_CROSS_COMMUNICATOR_TYPE=MPI" in line)
    assert ("pip install" if code else "mpirun") in line


def test_a_broken_mpi_library_is_told_and_no_more(monkeypatch: Patch) -> None:
    def broken() -> Any:
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(software, "version_of", lambda name: "4.1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(mpi_process, "load", broken)
    found = software.find_mpi()
    assert found["library"] is None and "cannot load MPI library" in found["told"]


def test_mpirun_is_found_on_the_path_or_beside_python(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpi_process, "describe", lambda: "")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert software.describe_mpirun(software.find_mpi()) == "not found"
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert software.describe_mpirun(software.find_mpi()) == f"{program}, which is not on the PATH"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.describe_mpirun(software.find_mpi()) == str(program)


class SomeGpus:
    def __init__(self, count: int, library: str | None) -> None:
        self._count, self._library = count, library

    def count(self) -> int:
        return self._count

    def library(self) -> str | None:
        if self._library == "broken":
            raise RuntimeError("no driver")
        return self._library


@pytest.mark.parametrize(
    ("count", "library", "text"),
    [
        (2, "NCCL 2.27", "NCCL 2.27"),
        (0, "NCCL 2.27", "NCCL 2.27, but torch sees no GPU"),
        (0, None, "not in this torch, which was built for CPUs alone"),
        (1, "broken", "cannot be asked: RuntimeError: no driver"),
    ],
)
def test_nccl_has_a_version_or_a_reason(count: int, library: str | None, text: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(software, "_for_gpus", lambda: False)
    assert software.find_nccl(SomeGpus(count, library)) == text  # type: ignore[arg-type]


def test_at_most_eight_interfaces_are_measured_that_of_gloo_first() -> None:
    links = [Interface(f"veth{n}", True, (f"10.0.0.{n}",), None) for n in range(20)]
    links += [Interface("down0", False, ("10.1.0.1",), None), Interface("bare0", True, (), None), LOOPBACK]
    report = text.Report(
        quick=False,
        machine=machine.facts(),
        shared_memory=None,
        transports={},
        mpi=Mpi(mpi4py=None, library=None, mpirun=None, on_path=False, told=""),
        nccl="",
        triton="",
        gpus={},
        interfaces=links,
        gloo=interfaces.Gloo(("lo",), "127.0.0.1", ""),
        settings=[],
    )
    measured = [link.name for link in command._worth_measuring(report)]
    assert measured[0] == "lo" and len(measured) == 8 and not {"down0", "bare0"} & set(measured)
