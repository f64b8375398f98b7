"""The native tests (csrc/tests): every SIMD level against the scalar one, in memory fenced by inaccessible pages; ranks
of a group as threads of one process."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
# What the scalar level makes of the program's fixed cases, the same on every architecture. It changes with the wire
# format and with those cases, and with nothing else.
CHECKSUM = "844ac4aa581f8bf2"

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to build the native tests with"),
    pytest.mark.skipif(not (ROOT / "csrc" / "tests").is_dir(), reason="the sources are not here"),
    pytest.mark.xdist_group("native program"),  # one worker: compiling takes longer than all of these tests
]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    command = ["sh", str(ROOT / ".ci" / "native-tests"), str(folder), "-O1"]
    built = subprocess.run(command, env={**os.environ, "CXX": str(COMPILER)}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_level_gives_the_bytes_of_the_scalar_one_and_stays_inside(build: Path) -> None:
    ran = subprocess.run([build / "kernels_test", "--quick"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == f"checksum {CHECKSUM}"


@pytest.mark.parametrize("program", ["shm_test", "shm_test_one_mapping"])
def test_ranks_as_threads_get_their_results_and_every_failure_is_told(build: Path, program: str) -> None:
    ran = subprocess.run([build / program, "--quick"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86-64 has levels to be kept apart")
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm to list symbols with")
@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_no_level_defines_code_that_the_linker_could_give_to_another(build: Path, level: str) -> None:
    """A weak symbol compiled with AVX-512 may be the one copy that the scalar level is linked to as well."""
    command = ["nm", "--demangle", "--defined-only", str(build / f"{level}.o")]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert any("cgx_" in symbol for symbol in symbols)
    assert [symbol for symbol in symbols if " W " in symbol] == []
