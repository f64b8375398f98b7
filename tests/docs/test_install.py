"""`pip install` of wheels built from this tree, into environments of their own, and what they can do there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.launching import free_port
from torch_cgx.version import __version__

TREE = Path(__file__).resolve().parents[2]
LIMIT_S = 240

pytestmark = [pytest.mark.ranks, pytest.mark.matrix]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a source distribution holds, without what earlier builds left."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(TREE / name, copy)
    for name in ("src", "csrc"):
        shutil.copytree(TREE / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    # What `make native` leaves in a source tree must not get into a package.
    library = copy / "src" / "torch_cgx" / "_native" / "libcgx.so"
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(b"of another machine")
    return copy


def run(*command: str | Path, **variables: str) -> str:
    result = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(python: str | Path, *arguments: str | Path, **variables: str) -> None:
    """Runs pip; what a build needs is taken from here, not downloaded."""
    run(python, "-m", "pip", *arguments, "--no-deps", "--no-index", "--disable-pip-version-check", **variables)


def build_wheel(tree: Path, *settings: str, **variables: str) -> Path:
    pytest.importorskip("scikit_build_core", reason="needs scikit-build-core, which `make test` installs")
    wheels = tree.parent / "wheels"
    # Without optimization the compiler takes a tenth of the time; what is tested is what goes where.
    options = [f"--config-settings={setting}" for setting in ("cmake.build-type=Debug", *settings)]
    pip(sys.executable, "wheel", "--no-build-isolation", "--wheel-dir", wheels, *options, tree, **variables)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def environment_with(wheel: Path, folder: Path) -> Path:
    """A new virtual environment with the wheel; torch and what it needs are lent by the one that runs the tests."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)  # to install pip takes longest
    python = folder / "bin" / "python"
    pip(sys.executable, "--python", python, "install", wheel)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("cgx")
x = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert x.unique().tolist() == [3.0]
shared = dist.group.WORLD._parts.native is not None
dist.destroy_process_group()

import torch_cgx
from torch_cgx.kernels import native

x = torch.arange(1000.0)
payload = torch_cgx.quantize(x, bits=4, bucket_size=100)
error = (x - torch_cgx.dequantize(payload, x.numel(), x.dtype, 4, 100)).abs().max()
assert error < 99 / 15 / 2 * 1.001
print(torch_cgx.__file__, "native" if native.available() else "plain", "shared" if shared else "Gloo")
"""


def say_of_two_ranks(python: Path) -> set[tuple[str, ...]]:
    """What SCRIPT prints of kernels and carrier on two ranks at 4 bits, with the package of that environment."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["CGX_COMPRESSION_QUANTIZATION_BITS"] = "4"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | shared
    ranks = [
        subprocess.Popen(
            [python, "-c", SCRIPT],
            env={**variables, "RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=python.parent,
        )
        for rank in ("0", "1")
    ]
    said = set()
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, errors
            file, *rest = output.split()
            assert Path(file).is_relative_to(python.parents[1])
            said.add(tuple(rest))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return said


needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


def test_without_a_compiler_everything_but_the_native_library_is_installed(tree: Path, tmp_path: Path) -> None:
    wheel = build_wheel(tree, CC="/bin/false", CXX="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as parts:
        assert not [name for name in parts.namelist() if ".so" in name]
    python = environment_with(wheel, tmp_path / "venv")
    assert say_of_two_ranks(python) == {("plain", "Gloo")}


@needs_compiler
def test_the_wheel_serves_every_python_and_works_in_an_environment_of_its_own(tree: Path, tmp_path: Path) -> None:
    path = build_wheel(tree)
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        library = wheel.read("torch_cgx/_native/libcgx.so")
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        declared = wheel.read(entry_points).decode().replace(" ", "")
    tag = path.stem.split("-", 2)[2]
    assert tag.startswith("py3-none-") and not tag.endswith("any")
    assert library.startswith(b"\x7fELF")
    assert {
        "_torch_cgx_autoload.py",
        "torch_cgx/__init__.py",
        "torch_cgx/py.typed",
        "cgx_utils/__init__.py",
    } <= names
    assert "cgx=_torch_cgx_autoload:command" in declared
    assert "cgx=_torch_cgx_autoload:register" in declared

    python = environment_with(path, tmp_path / "venv")
    assert say_of_two_ranks(python) == {("native", "shared")}
    cgx = python.with_name("cgx")
    assert run(cgx, "--version", PYTHONPATH="") == f"cgx {__version__}\n"
    assert run(cgx, "doctor", PYTHONPATH="").splitlines()[-1].startswith("ready")


@needs_compiler
def test_a_library_without_shared_memory_as_on_macos_leaves_its_kernels_and_sends_messages(
    tree: Path, tmp_path: Path
) -> None:
    wheel = build_wheel(tree, "cmake.define.CGX_SHARED_MEMORY=OFF")
    assert say_of_two_ranks(environment_with(wheel, tmp_path / "venv")) == {("native", "Gloo")}
