"""Compile the Triton kernels ahead of time, and say what a GPU has to do for each value. Needs no GPU.

Everything here is read from compiled code or calculated from sizes: nothing is timed. The roofline is the larger of two
times: bytes moved over memory bandwidth, and instructions over the rate at which they can be issued. A kernel can be
slower than that, never faster.

    python benchmarks/gpu_estimates.py                      # the table of docs/gpu.md
    python benchmarks/gpu_estimates.py --json --targets sm_90,gfx942 --bits 3 --dtypes bfloat16

`tests/kernels/triton/test_compiled.py` holds the compiled code to what `--json` prints of it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # whoever compiles wants no interpreter

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_cgx.codecs import MaxMin
from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.triton import OPTIONS, TritonKernels

NUMEL = 1 << 14  # of the layer that is compiled for; its code does not depend on it
LARGE_NUMEL = 1 << 24  # that the times are for: 64 MB of float32
OPERATIONS = ("encode", "decode", "add", "reduce")


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    target: str
    bandwidth: float  # bytes a second
    flops: float  # float32, a second; a multiply-add counts two

    @property
    def instructions(self) -> float:
        """That all its lanes can be issued in a second."""
        return self.flops / 2


GPUS = (Gpu("RTX 3090", "sm_86", 936e9, 35.6e12), Gpu("H100 SXM", "sm_90", 3350e9, 67e12))


@dataclasses.dataclass(frozen=True)
class Case:
    operation: str
    bits: int  # 0: layers of all widths, in one table
    dtype: str = "float32"
    block: int = 1024
    payloads: int = 0
    stochastic: bool = False
    residual: bool = False

    @property
    def bytes_per_value(self) -> float:
        """Read and written in global memory."""
        coded = self.bits / 8 + 8 / self.block
        value = getattr(torch, self.dtype).itemsize
        times = {"encode": 1, "decode": 1, "add": 2, "reduce": 2}[self.operation]
        residual = 4 if self.residual else 0
        return times * value + (1 + self.payloads) * coded + residual


@dataclasses.dataclass
class Compiled:
    """What was found in the code of one kernel."""

    kernel: str
    target: str
    case: dict[str, Any]
    registers: int | None = None
    spilled_nbytes: int | None = None
    shared_nbytes: int | None = None
    warps: int = 1
    instructions_per_value: float | None = None
    memory: dict[str, int] = dataclasses.field(default_factory=dict)  # each kind of access to global memory
    arithmetic: dict[str, int] = dataclasses.field(default_factory=dict)  # each kind of float instruction


class Recorder(TritonKernels):
    """Keeps what would be launched."""

    def __init__(self) -> None:
        super().__init__()
        self._device = "cpu"
        self.launches: list[tuple[Any, Sequence[Any], dict[str, Any], int]] = []

    def _enqueue(self, kernel: Any, n: int, args: Sequence[Any], constants: dict[str, Any], warps: int) -> None:
        self.launches.append((kernel, args, constants, warps))


def launches(case: Case) -> list[tuple[Any, Sequence[Any], dict[str, Any], int]]:
    """The very arguments that the library would launch this case with."""
    pieces: tuple[Piece, ...] = ()
    nbytes = 0
    for bits in [case.bits] if case.bits else range(1, 9):
        pieces += (Piece.of(MaxMin(bits, case.block), len(pieces) * NUMEL, NUMEL, nbytes),)
        nbytes += MaxMin(bits, case.block).payload_nbytes(NUMEL, 4)
    values = torch.zeros(len(pieces) * NUMEL, dtype=getattr(torch, case.dtype))
    slots = torch.zeros(case.payloads + 1, nbytes, dtype=torch.uint8)
    rounding = Rounding(stochastic=True) if case.stochastic else NEAREST
    residual = torch.zeros(values.numel()) if case.residual else None
    recorder = Recorder()
    if case.operation == "encode":
        recorder.encode(pieces, values, slots[0], rounding, residual)
    elif case.operation == "reduce":
        recorder.reduce(pieces, values, list(slots[1:]), slots[0], 0.25, rounding, residual)
    else:
        recorder.decode(pieces, slots[0], values, add=case.operation == "add")
    return recorder.launches


def compile_case(case: Case, target: str) -> Iterator[Compiled]:
    for kernel, args, constants, warps in launches(case):
        code = triton.compile(
            _source(kernel, args, constants), target=_gpu_target(target), options={**OPTIONS, "num_warps": warps}
        )
        found = Compiled(kernel.__name__, target, dataclasses.asdict(case), warps=warps)
        found.shared_nbytes = code.metadata.shared
        if target.startswith("sm_"):
            _read_ptx(code.asm["ptx"], found)
            tile = constants["ROWS"] * constants["TILE"]
            _read_cubin(code.asm["cubin"], found, case, values_per_lane=tile / (32 * warps))
        else:
            _read_amdgcn(code.asm["amdgcn"], code.asm["llir"], found)
        yield found


def _gpu_target(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64)


def _source(kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> ASTSource:
    """As the launcher would have it: tensors start at multiples of 16 bytes, and of integers nothing is known."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: _type(arg) for name, arg in zip(names, args, strict=True)}
    signature["count"] = "i32"
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if str(signature[name]).startswith("*")]
    return ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})


def _type(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple("i64" for _ in arg)
    if isinstance(arg, torch.Tensor):
        return {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}.get(
            arg.dtype, f"*i{8 * arg.element_size()}"
        )
    return "i64"


def _read_ptx(ptx: str, found: Compiled) -> None:
    found.memory = dict(collections.Counter(re.findall(r"\b(?:ld|st)\.global[.\w:]*", ptx)))
    found.arithmetic = dict(
        collections.Counter(
            re.findall(r"^\s*(?:@\S+\s+)?((?:add|sub|mul|fma|mad|div|rcp|sqrt|ex2)\.\S*f\d\d\S*)", ptx, re.M)
        )
    )


def _read_amdgcn(text: str, llir: str, found: Compiled) -> None:
    """AMD divides, exactly, by fused instructions: what was asked for is in the step before."""
    found.registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
    found.spilled_nbytes = 4 * int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0])
    found.memory = dict(collections.Counter(re.findall(r"\b(?:global|buffer)_(?:load|store)_\w+", text)))
    operations = re.findall(r"= (f(?:add|sub|mul|div)\b[ a-z]*?) (?:float|double|half|<)|(llvm\.fm\w+)", llir)
    found.arithmetic = dict(collections.Counter(operation or call for operation, call in operations))


def _read_cubin(cubin: bytes, found: Compiled, case: Case, values_per_lane: float) -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, sass = (
            subprocess.run([tool, flag, path], check=True, capture_output=True, text=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    found.registers = int(re.findall(r"REG:(\d+)", usage)[0])
    found.spilled_nbytes = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    main, inner = loop_instructions(sass)
    if main is not None:
        found.instructions_per_value = (main + inner * case.payloads) / values_per_lane


def loop_instructions(sass: str) -> tuple[int | None, int]:
    """Of the loop over whole tiles: how many instructions a turn has, and how many a turn of the loop in it.

    The shortest way around that passes all accesses of 16 bytes: there are other ways, for values that start
    elsewhere, and for divisions of subnormals. The loop in it (over payloads) is the longest that has no such access.
    """
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)
    code = [(int(address, 16), text) for address, text in lines]
    blocks, edges = _flow(code)
    loops = []
    for address, text in code:
        target = _jump(text)
        if target is not None and target < address:
            loops.append((target, address))
    wide = [address for address, text in code if ".128" in text and re.search(r"\b(LDG|STG)\.", text)]
    around = [loop for loop in loops if any(loop[0] <= address <= loop[1] for address in wide)]
    if not around:
        return None, 0
    head, tail = min(around, key=lambda loop: loop[1] - loop[0])
    stops = [head] + [address for address in wide if head <= address <= tail] + [tail]
    stops = list(dict.fromkeys(max(start for start in blocks if start <= address) for address in stops))
    total = blocks[stops[0]]
    for here, there in itertools.pairwise(stops):
        total += _shortest(blocks, edges, here, there)
    within = [(a, b) for a, b in loops if head < a and b < tail and not any(a <= address <= b for address in wide)]
    inner = max((sum(1 for address, _ in code if a <= address <= b) for a, b in within), default=0)
    return total, inner


def _jump(text: str) -> int | None:
    match = re.search(r"\bBRA\S*\s+(?:\S+,\s*)?.*?(0x[0-9a-f]+)", text)
    return int(match[1], 16) if match else None


def _flow(code: Sequence[tuple[int, str]]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Basic blocks by address, with how many instructions they have, and where each can go."""
    starts = {code[0][0]}
    for (_, text), (after, _) in itertools.pairwise(code):
        target = _jump(text)
        if target is not None:
            starts |= {target, after}
    blocks: dict[int, int] = {}
    edges: dict[int, list[int]] = collections.defaultdict(list)
    start = code[0][0]
    for i, (address, text) in enumerate(code):
        if address in starts:
            start = address
        blocks[start] = blocks.get(start, 0) + 1
        target, after = _jump(text), code[i + 1][0] if i + 1 < len(code) else None
        if target is not None:
            edges[start].append(target)
        ends = re.match(r"(BRA|EXIT|RET)", text)
        if after in starts and not ends and after is not None:
            edges[start].append(after)
    return blocks, edges


def _shortest(blocks: dict[int, int], edges: dict[int, list[int]], here: int, there: int) -> int:
    """Instructions on the way from the end of one block to the end of another."""
    best = {here: 0}
    todo = [here]
    while todo:
        block = min(todo, key=best.__getitem__)
        todo.remove(block)
        for after in edges[block]:
            cost = best[block] + blocks.get(after, 0)
            if cost < best.get(after, sys.maxsize):
                best[after] = cost
                todo.append(after)
    return best[there]


def table_cases() -> list[Case]:
    widths = (1, 2, 4, 8)
    cases = [Case(operation, bits) for operation in ("encode", "decode") for bits in widths]
    return cases + [Case("reduce", bits, payloads=k) for k in (1, 3) for bits in widths]


def print_table() -> None:
    print(
        "| kernel | bits | GPU | registers | shared bytes | spilled bytes | bytes a value | instructions a value "
        "| memory, us | issue, us | estimate, us |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for case in table_cases():
        for gpu in GPUS:
            (found,) = compile_case(case, gpu.target)
            assert found.instructions_per_value is not None
            memory_s = case.bytes_per_value * LARGE_NUMEL / gpu.bandwidth
            issue_s = found.instructions_per_value * LARGE_NUMEL / gpu.instructions
            name = case.operation + (f", {case.payloads} payload{'s' * (case.payloads > 1)}" if case.payloads else "")
            print(
                f"| {name} | {case.bits} | {gpu.name} | {found.registers} | {found.shared_nbytes} | "
                f"{found.spilled_nbytes} | {case.bytes_per_value:.2f} | {found.instructions_per_value:.1f} | "
                f"{memory_s * 1e6:.0f} | {issue_s * 1e6:.0f} | {max(memory_s, issue_s) * 1e6:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, of the cases that the options name"
    )
    parser.add_argument("--targets", default="sm_86", help="sm_80, sm_86, ..., or gfx90a, gfx942; comma between")
    parser.add_argument("--operations", default="encode,decode,reduce", help=", ".join(OPERATIONS))
    parser.add_argument("--bits", default="4", help="1 to 8; 0: layers of all widths, in one table")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--blocks", default="1024")
    parser.add_argument("--payloads", type=int, default=3, help="of reduce")
    parser.add_argument("--stochastic", action="store_true")
    parser.add_argument("--residual", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print_table()
        return
    for target in args.targets.split(","):
        for operation in args.operations.split(","):
            for bits in args.bits.split(","):
                for dtype in args.dtypes.split(","):
                    for block in args.blocks.split(","):
                        encodes = operation in ("encode", "reduce")
                        case = Case(
                            *(operation, int(bits), dtype, int(block), args.payloads if operation == "reduce" else 0),
                            *(args.stochastic and encodes, args.residual and encodes),
                        )
                        for found in compile_case(case, target):
                            print(json.dumps(dataclasses.asdict(found)), flush=True)


if __name__ == "__main__":
    main()
