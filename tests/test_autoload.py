"""What `import torch` gets from us: the backend's name, quickly, and never an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import _torch_cgx_autoload as autoload
from tests.support.families import only
from torch_cgx import launchers

SOURCE = Path(autoload.__file__).parent


def run(script: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with only `path` for our packages, as though they had been installed there."""
    entry_points = path / "torch_cgx-0.0.0.dist-info" / "entry_points.txt"
    entry_points.parent.mkdir(exist_ok=True)
    entry_points.write_text("[torch.backends]\ncgx = _torch_cgx_autoload:register\n")
    (entry_points.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-cgx\nVersion: 0.0.0\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environ |= {"PYTHONPATH": str(path), **variables}
    return subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120, cwd=path
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with copies of our modules that a test may break."""
    shutil.copy(SOURCE / "_torch_cgx_autoload.py", tmp_path)
    shutil.copytree(SOURCE / "torch_cgx", tmp_path / "torch_cgx", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_torch_knows_the_backend_without_importing_the_package(installed: Path) -> None:
    script = """
import os, sys, torch
assert "cgx" in torch.distributed.Backend.backend_list
assert torch.distributed.Backend.backend_capability["cgx"] == ["cpu", "cuda"]
assert torch.distributed.Backend.default_device_backend_map["cpu"] == "gloo"
assert not any(name.partition(".")[0] == "torch_cgx" for name in sys.modules)
print(os.environ["RANK"], os.environ["WORLD_SIZE"])
"""
    result = run(script, installed, **MPICH)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1 2\n"


def test_registering_is_idempotent_and_cheap(installed: Path) -> None:
    script = """
import time, torch, _torch_cgx_autoload as autoload
times_s = []
for _ in range(20):
    known = torch.distributed.Backend  # as before the first time; torch 2.6 looks at all three
    known.backend_list.remove("cgx")
    del known.CGX
    del known._plugins["CGX"]
    start = time.perf_counter()
    autoload.register()
    times_s.append(time.perf_counter() - start)
    autoload.register()
assert min(times_s) < 1e-3, times_s
assert torch.distributed.Backend.backend_list.count("cgx") == 1
"""
    # A process without a group, as torchrun's and compilers' own, says nothing of variables that it does not use.
    result = run(script, installed, RANK="0", WORLD_SIZE="2", CGX_COMPRESSION_QUANTIZATION_BITS="4")
    assert result.returncode == 0, result.stderr
    assert "CGX_" not in result.stderr


@pytest.mark.parametrize(
    "broken", only(["torch_cgx/launchers.py"], ["torch_cgx/__init__.py", "torch_cgx/launchers.py", "torch_cgx"])
)
def test_torch_can_be_imported_with_a_broken_package(installed: Path, broken: str) -> None:
    path = installed / broken
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.write_text("this is not Python")
    result = run("import torch; print(torch.ones(2).sum().item())", installed, **MPICH)
    assert (result.returncode, result.stdout) == (0, "2.0\n"), result.stderr


def test_a_broken_package_shows_when_a_group_is_created(installed: Path) -> None:
    (installed / "torch_cgx" / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
    script = """
import torch.distributed as dist
dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
"""
    result = run(script, installed)
    assert result.returncode != 0
    assert "broken on purpose" in result.stderr


def test_every_launcher_has_a_variable_that_wakes_the_autoload() -> None:
    samples = (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    )
    everything = {name: value for sample in samples for name, value in sample.items()}
    places = [read(everything) for read in launchers._LAUNCHERS]
    assert {place.rank_variable for place in places} == set(autoload.LAUNCHER_VARIABLES)


def test_the_old_import_name_has_the_hook() -> None:
    import cgx_utils
    import torch_cgx

    assert cgx_utils.CGXState is torch_cgx.CGXState
    assert cgx_utils.cgx_hook is torch_cgx.cgx_hook
    assert not hasattr(cgx_utils, "something_else")
    assert not hasattr(torch_cgx, "something_else")


def test_importing_the_package_registers_the_backend_where_torch_does_not(installed: Path) -> None:
    script = """
import torch_cgx, torch, torch.distributed as dist
dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
assert set(torch_cgx.__all__) <= set(dir(torch_cgx)) | set(torch_cgx._LAZY)
for name in torch_cgx.__all__:
    getattr(torch_cgx, name)
"""
    result = run(script, installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
