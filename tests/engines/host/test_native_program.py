"""The native tests (csrc/tests), as CMake knows them: every SIMD level against the scalar one, in memory fenced by
inaccessible pages; ranks of a group as threads of one process; what each level leaves to the linker."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # ours has a newer CMake
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
X86 = platform.machine() in ("x86_64", "AMD64")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to build the native tests with"),
    pytest.mark.skipif(shutil.which("ctest", path=PATH) is None, reason="no CMake to build the native tests with"),
    pytest.mark.skipif(not (ROOT / "csrc" / "tests").is_dir(), reason="the sources are not here"),
]


def run(*command: str) -> None:
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": PATH}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


PROGRAMS = ("kernels", "engine", "engine_one_mapping")


@pytest.fixture(scope="module")
def build() -> Path:
    """Build the test programs and return the build folder.

    Where `make` has installed the package, they are linked with the objects that it compiled for the library: 14 s of
    processor time instead of 85. Elsewhere the preset `tests` compiles everything. Either way, later runs compile only
    what has changed.
    """
    installed, own = ROOT / "build" / "pip", ROOT / "build" / "tests"
    own.parent.mkdir(exist_ok=True)
    with open(ROOT / "build" / "tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = installed if (installed / "CMakeCache.txt").exists() else own
        if folder == installed:
            run("cmake", "-DCGX_BUILD_TESTS=ON", str(installed))
        else:
            run("cmake", "--preset", "tests")
        targets = [f"{program}_test" for program in PROGRAMS]
        run("cmake", "--build", str(folder), "--target", *targets, "--parallel", str(os.cpu_count() or 1))
    return folder


@pytest.mark.parametrize(
    "test",
    [
        *PROGRAMS,
        pytest.param("avx2_has_no_weak_symbols", marks=pytest.mark.skipif(not X86, reason="of x86-64")),
        pytest.param("avx512_has_no_weak_symbols", marks=pytest.mark.skipif(not X86, reason="of x86-64")),
    ],
)
def test_the_native_tests_pass(build: Path, test: str) -> None:
    options = ("--output-on-failure", "--no-tests=error")
    run("ctest", "--test-dir", str(build), *options, "--tests-regex", f"^{test}$")
