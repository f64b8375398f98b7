"""`dequantize` and `quantize` on damaged, random and truncated bytes: an error or numbers, never a step outside.

Every tensor lies between two inaccessible pages, so that a read or write outside kills the process. The hunts therefore
run in a child (this file as a program), which notes each example before it tries it; what killed it is the failure.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_cgx import dequantize, payload_nbytes, quantize
from torch_cgx.codecs import MaxMin
from torch_cgx.kernels import Piece
from torch_cgx.kernels.native import simd_levels
from torch_cgx.kernels.reference import ReferenceKernels

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
# Headers that no encoder writes: NaN, infinities, subnormals, -0.0, the largest number.
BAD_FLOATS = (0x7FC00000, 0xFF800001, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF, 0x80000000, 0x7F7FFFFF)
CANONICAL_NAN = 0x7FC00000
LIMIT_S = 240


def choose(level: str, threads: int) -> None:
    os.environ.update(CGX_SIMD=level, CGX_NUM_THREADS=str(threads))


class Fenced:
    """A tensor that ends at an inaccessible page, or starts right behind one."""

    def __init__(self, numel: int, dtype: torch.dtype, at_end: bool) -> None:
        self.nbytes = numel * dtype.itemsize
        page = mmap.PAGESIZE
        middle = -(-self.nbytes // page) * page
        start = _mapping(middle)
        self.address = start + page + (middle - self.nbytes if at_end else 0)
        if numel == 0:
            self.tensor = torch.empty(0, dtype=dtype)
        else:
            self.tensor = torch.frombuffer((ctypes.c_char * self.nbytes).from_address(self.address), dtype=dtype)

    @classmethod
    def holding(cls, x: Tensor, at_end: bool) -> Fenced:
        fenced = cls(x.numel(), x.dtype, at_end)
        fenced.tensor.copy_(x)
        return fenced


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE, _MAP_FAILED = 0, ctypes.c_void_p(-1).value
_mappings: dict[int, list[int]] = {}
_turns: dict[int, int] = {}


def _mapping(middle: int, kept: int = 8) -> int:
    """Address of an inaccessible page, `middle` bytes and another such page; the last `kept` of a size stay."""
    pool = _mappings.setdefault(middle, [])
    turn = _turns[middle] = _turns.get(middle, -1) + 1
    if len(pool) < kept:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _libc.mmap(None, middle + 2 * mmap.PAGESIZE, _PROT_NONE, flags, -1, 0)
        if start == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        if middle and _libc.mprotect(start + mmap.PAGESIZE, middle, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
        pool.append(start)
    return pool[turn % kept]


def random_bytes(nbytes: int, seed: int) -> Tensor:
    return torch.randint(256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def random_numbers(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def damaged(payload: Tensor, damage: str, n_blocks: int, seed: int) -> Tensor:
    """A copy with a few bytes or headers replaced, or all bytes."""
    dice = random.Random(seed)
    if damage == "all" or payload.numel() == 0:
        return random_bytes(payload.numel(), seed)
    out = payload.clone()
    for _ in range(dice.randint(1, 8)):
        if damage == "bytes":
            out[dice.randrange(out.numel())] = dice.randrange(256)
        else:
            header = out[: 8 * n_blocks].view(torch.int32)
            bad = dice.choice(BAD_FLOATS)
            header[dice.randrange(header.numel())] = bad - 2**32 if bad >= 2**31 else bad
    return out


def check_decode(
    numel: int,
    dtype: str,
    bits: int,
    block: int,
    add: bool,
    damage: str,
    seed: int,
    at_end: bool,
    level: str,
    threads: int,
) -> None:
    """Damaged payloads decode to what the plain-torch kernels make of them, and nobody steps outside."""
    choose(level, threads)
    kind = DTYPES[dtype]
    payload = quantize(random_numbers(numel, kind, seed), bits, block)
    broken = damaged(payload, damage, -(-numel // block), seed)
    before = random_numbers(numel, kind, seed + 1)
    fenced, out = Fenced.holding(broken, at_end), Fenced.holding(before, at_end)
    dequantize(fenced.tensor, numel, kind, bits, block, out=out.tensor, add=add)
    assert torch.equal(fenced.tensor, broken)
    if numel:
        ReferenceKernels().decode((Piece.of(MaxMin(bits, block), 0, numel),), broken, before, add=add)
    # What a NaN in a header decodes to is fixed only for the NaN that encoding writes.
    headers = broken[: 8 * -(-numel // block)].view(torch.int32).view(-1, 2)
    strange = (headers.view(torch.float32).isnan() & (headers != CANONICAL_NAN)).any(dim=1)
    fixed = ~strange.repeat_interleave(block)[:numel]
    torch.testing.assert_close(out.tensor[fixed], before[fixed], rtol=0, atol=0, equal_nan=True)


def check_truncated(
    numel: int, dtype: str, bits: int, block: int, given_nbytes: int, at_end: bool, level: str, threads: int
) -> None:
    """A payload of a wrong length is refused with the right one."""
    choose(level, threads)
    needed = payload_nbytes(numel, DTYPES[dtype], bits, block)
    if given_nbytes == needed:
        return
    fenced = Fenced.holding(random_bytes(given_nbytes, numel), at_end)
    with pytest.raises(ValueError, match=f"expected {needed} contiguous bytes, got"):
        dequantize(fenced.tensor, numel, DTYPES[dtype], bits, block)


def check_quantize(
    numel: int,
    dtype: str,
    bits: int,
    block: int,
    any_bits: bool,
    stochastic: bool,
    seed: int,
    at_end: bool,
    level: str,
    threads: int,
) -> None:
    """Whatever the values, the payload is that of a copy without fences, and the values stay."""
    choose(level, threads)
    kind = DTYPES[dtype]
    x = random_bytes(numel * kind.itemsize, seed).view(kind) if any_bits else random_numbers(numel, kind, seed)
    fenced = Fenced.holding(x, at_end)
    out = Fenced(payload_nbytes(numel, kind, bits, block), torch.uint8, at_end)
    quantize(fenced.tensor, bits, block, stochastic=stochastic, seed=seed, out=out.tensor)
    assert torch.equal(fenced.tensor.view(torch.uint8), x.view(torch.uint8))
    assert torch.equal(out.tensor, quantize(x, bits, block, stochastic=stochastic, seed=seed))


def check_outside(nbytes: int) -> None:
    """Dies: a proof that the fences bite."""
    ctypes.string_at(Fenced(nbytes, torch.uint8, at_end=True).address + nbytes, 1)


HUNTS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {}


def define_hunts() -> None:
    lengths = st.one_of(st.integers(0, 300), st.integers(0, 5000), st.sampled_from([2047, 2048, 2049, 66000, 140001]))
    blocks = st.one_of(st.integers(1, 700), st.sampled_from([1, 8, 64, 512, 1000, 1024, 4096, 65535, 65536]))
    common = {
        "numel": lengths,
        "dtype": st.sampled_from(sorted(DTYPES)),
        "bits": st.integers(1, 8),
        "block": blocks,
        "at_end": st.booleans(),
        "level": st.sampled_from(simd_levels() or [""]),
        "threads": st.integers(1, 3),
    }
    seed, flag = st.integers(0, 2**31), st.booleans()
    damage = st.sampled_from(["all", "bytes", "headers"])
    HUNTS["decode"] = check_decode, {**common, "add": flag, "damage": damage, "seed": seed}
    HUNTS["truncated"] = check_truncated, {**common, "given_nbytes": st.integers(0, 3000)}
    HUNTS["quantize"] = check_quantize, {**common, "any_bits": flag, "stochastic": flag, "seed": seed}
    HUNTS["outside"] = check_outside, {"nbytes": st.integers(1, 9000)}


def hunt(name: str, examples: int, note: Path) -> None:
    """In the child: tries examples, each noted before."""
    define_hunts()
    check, arguments = HUNTS[name]
    with note.open("w", buffering=1) as file:

        @settings(max_examples=examples, deadline=None, database=None)
        @given(st.fixed_dictionaries(arguments))
        def search(example: dict[str, Any]) -> None:
            file.seek(0)
            file.truncate()
            file.write(f"{check.__name__}({', '.join(f'{key}={value!r}' for key, value in example.items())})\n")
            check(**example)

        search()


def run_child(name: str, examples: int, note: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", __file__, name, str(examples), str(note)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    "name", ["decode", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("truncated", "quantize"))]
)
def test_no_bytes_lead_outside_of_a_tensor(name: str, tmp_path: Path) -> None:
    note = tmp_path / "example"
    child = run_child(name, 400, note)
    last = note.read_text() if note.exists() else "no example was reached"
    assert child.returncode == 0, f"ended with {child.returncode} at {last}\n{child.stdout}\n{child.stderr}"
    assert last.startswith(f"check_{name}(")


def test_a_step_outside_kills_the_child_and_leaves_its_arguments(tmp_path: Path) -> None:
    note = tmp_path / "example"
    assert run_child("outside", 1, note).returncode == -signal.SIGSEGV
    assert note.read_text().startswith("check_outside(nbytes=")


if __name__ == "__main__":
    hunt(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
