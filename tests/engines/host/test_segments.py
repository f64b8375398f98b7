"""Segments of shared memory: what a rank refuses to map, and how the library that does it is built."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_cgx
from torch_cgx import _native
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.errors import SharedMemoryError

lib = _native.library()
pytestmark = pytest.mark.skipif(lib is None, reason="no native library")
NAMES = (("all_reduce",), ("float32",), ("SUM",))


def open_group(name: str, rank: int = 0, world: int = 2) -> SharedGroup:
    return SharedGroup(name, rank, [0] * world, range(world), NAMES, _native.Means(0, 1), 1 << 20)


@pytest.fixture
def control() -> Iterator[Path]:
    """The file of a new control segment for two ranks."""
    assert lib is not None
    name, error = ctypes.create_string_buffer(64), ctypes.create_string_buffer(512)
    assert lib.cgx_control_create(2, name, len(name), error, len(error)) == 0, error.value
    path = Path("/dev/shm") / name.value.decode()
    yield path
    path.unlink(missing_ok=True)


def test_a_new_segment_is_for_its_user_alone_and_has_a_random_name(control: Path) -> None:
    facts = control.stat()
    assert facts.st_mode & 0o7777 == 0o600
    assert facts.st_uid == os.geteuid()
    assert len(bytes.fromhex(control.name.removeprefix("cgx-"))) == 16
    open_group(control.name).close()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606, 0o400])
def test_a_segment_with_another_mode_is_refused(control: Path, mode: int) -> None:
    control.chmod(mode)
    with pytest.raises(SharedMemoryError, match=f"has mode {mode:04o}, not 0600" if os.geteuid() == 0 else "mode|open"):
        open_group(control.name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_segment_of_another_user_is_refused(control: Path) -> None:
    os.chown(control, 12345, -1)
    with pytest.raises(SharedMemoryError, match="belongs to user 12345, not to this process's user, 0"):
        open_group(control.name)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_segment_of_another_length_is_refused(control: Path, change: int) -> None:
    nbytes = control.stat().st_size
    os.truncate(control, nbytes + change)
    with pytest.raises(SharedMemoryError, match=f"has {nbytes + change} bytes, not {nbytes}"):
        open_group(control.name)


def test_a_segment_for_another_world_is_refused(control: Path) -> None:
    with pytest.raises(SharedMemoryError, match="bytes, not"):
        open_group(control.name, world=3)


def test_a_link_to_a_segment_is_refused(control: Path) -> None:
    link = control.with_name(f"cgx-{uuid.uuid4().hex}")
    link.symlink_to(control)
    try:
        with pytest.raises(SharedMemoryError, match="cannot open the peers' shared memory"):
            open_group(link.name)
    finally:
        link.unlink()


@pytest.mark.parametrize("name", ["../etc/passwd", "cgx-", "cgx-short", "cgx-" + "g" * 32, "abc-" + "0" * 32, ""])
def test_a_name_that_is_none_of_ours_is_refused(name: str) -> None:
    with pytest.raises(SharedMemoryError, match="none of ours"):
        open_group(name)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_world_is_refused(control: Path, rank: int) -> None:
    with pytest.raises(SharedMemoryError, match=f"rank {rank} is none of 2"):
        open_group(control.name, rank)


@pytest.fixture(scope="module")
def hardened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as CMakeLists.txt builds it: the one that is installed, where we test an installation."""
    root, cmake = Path(__file__).resolve().parents[3], shutil.which("cmake")
    package = Path(str(torch_cgx.__file__)).parent
    if package.parent != root / "src" and shutil.which("readelf") is not None:
        return package / "_native" / "libcgx.so"
    if cmake is None or shutil.which("readelf") is None or not (root / "csrc").is_dir():
        pytest.skip("needs cmake, readelf and the sources")
    folder = tmp_path_factory.mktemp("cmake")
    for command in (["-S", str(root), "-B", str(folder)], ["--build", str(folder), "--target", "cgx"]):
        built = subprocess.run([cmake, *command], capture_output=True, text=True)
        assert built.returncode == 0, built.stdout + built.stderr
    return folder / "libcgx.so"


@pytest.mark.slow
def test_the_library_is_built_with_its_guards(hardened: Path) -> None:
    def readelf(option: str) -> str:
        command = ["readelf", "--wide", option, str(hardened)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    symbols, segments = readelf("--dyn-syms"), readelf("--program-headers")
    assert "__stack_chk_fail" in symbols
    assert any(f"__{name}_chk" in symbols for name in ("snprintf", "memcpy", "read", "poll", "vsnprintf", "strncpy"))
    assert "BIND_NOW" in readelf("--dynamic") or "NOW" in readelf("--dynamic")
    assert "GNU_RELRO" in segments
    (stack,) = [line for line in segments.splitlines() if "GNU_STACK" in line]
    assert " RWE " not in stack and " RW " in stack
    assert not any(" RWE " in line for line in segments.splitlines())
