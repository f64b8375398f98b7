"""`pip install` of this tree, into folders of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from distributed.launching import free_port

TREE = Path(__file__).resolve().parents[2]
LIMIT_S = 240

pytestmark = pytest.mark.matrix


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


def pip(*arguments: str, **variables: str) -> None:
    """Runs pip; what a build needs is taken from here, not downloaded."""
    result = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-index", "--disable-pip-version-check"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def build_wheel(tree: Path, **variables: str) -> Path:
    pytest.importorskip("scikit_build_core", reason="needs scikit-build-core, which `make test` installs")
    wheels = tree.parent / "wheels"
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(wheels), str(tree), **variables)
    (wheel,) = wheels.glob("*.whl")
    return wheel


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("cgx")
x = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert x.unique().tolist() == [3.0]
dist.destroy_process_group()

import torch_cgx

x = torch.arange(1000.0)
payload = torch_cgx.quantize(x, bits=4, bucket_size=100)
error = (x - torch_cgx.dequantize(payload, x.numel(), x.dtype, 4, 100)).abs().max()
assert error < 99 / 15 / 2 * 1.001
print(torch_cgx.__file__)
"""


def test_without_a_compiler_everything_but_the_native_library_is_installed(tree: Path, tmp_path: Path) -> None:
    wheel = build_wheel(tree, CC="/bin/false", CXX="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    target = tmp_path / "target"
    pip("install", "--target", str(target), str(wheel))
    assert (target / "bin" / "cgx").is_file()
    assert not list(target.rglob("*.so"))

    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["PYTHONPATH"] = str(target)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **shared, "RANK": rank, "CGX_COMPRESSION_QUANTIZATION_BITS": "4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in ("0", "1")
    ]
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, errors
            assert Path(output.strip()).is_relative_to(target)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_the_wheel_serves_every_python_and_holds_all_that_users_import(tree: Path) -> None:
    # Without optimisation the compiler takes a tenth of the time; what is tested is what goes where.
    listing = (tree / "CMakeLists.txt").read_text()
    (tree / "CMakeLists.txt").write_text(listing.replace("-O3", "-O0").replace("-D_FORTIFY_SOURCE=2", ""))
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
    assert "cgx=torch_cgx.cli:main" in declared
    assert "cgx=_torch_cgx_autoload:register" in declared
