"""What is fuzzed: each target takes bytes, makes arguments of them, and calls what a user or a peer reaches.

A target returns whether the call went through. It raises `Broken` where the call ended otherwise than with a result or
with an error of the kinds that we promise, whose text says what was expected.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_cgx
from tests.fuzz.bytes_to_values import Source
from torch_cgx import AdaptiveBits, CGXError, CGXState, scopes
from torch_cgx.cli import bits as cli_bits
from torch_cgx.cli.registry import CommandFailed
from torch_cgx.codecs import MaxMin
from torch_cgx.config import Compression, Settings, compression_from_environ
from torch_cgx.ddp.adaptation import Adaptation
from torch_cgx.group.bootstrap.handshake import join
from torch_cgx.group.bootstrap.store_json import parse_answer
from torch_cgx.group.layer_table import LayerTable
from torch_cgx.kernels import Piece
from torch_cgx.kernels.native import NativeKernels, available
from torch_cgx.kernels.reference import ReferenceKernels

__all__ = ["TARGETS", "Broken"]

WORDS = (
    "expected",
    "allowed is",
    "need the same",
    "not registered",
    "could not",
    "have lost step",
    "cannot be",
    "is not",
    "make the state with",
)


class Broken(Exception):
    """A promise is."""


def attempt(
    call: Callable[[], Any], *, allowed: tuple[type[BaseException], ...] = (ValueError, TypeError, CGXError)
) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
        return True
    except allowed as error:
        if not any(word in str(error) for word in WORDS):
            raise Broken(f"does not say what is allowed: {type(error).__name__}: {error}") from error
        if len(str(error)) > 3000:
            raise Broken(f"is longer than anybody reads: {len(str(error))} characters") from error
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error}") from error
    return False


def payload(data: bytes) -> bool:
    """Any bytes, decoded with any arguments: by the native kernels to the same numbers as by those in plain torch."""
    source = Source(data)
    dtype = source.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8])
    numel, bits, block = source.below(300), source.below(10), source.choice([1, 3, 8, 64, 512, 65536, 65537])
    strange = source.below(8) == 0
    if strange:
        numel, bits, block, dtype = (source.anything() for _ in range(4))
    try:
        nbytes = torch_cgx.payload_nbytes(numel, dtype, bits, block)
    except (ValueError, TypeError):
        nbytes = source.below(64)
    raw = source.rest()
    raw = (
        raw
        if source.below(16) == 15
        else (raw * (nbytes // max(1, len(raw)) + 1))[:nbytes]
        if nbytes < 1 << 20
        else raw
    )
    packed = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    found: list[torch.Tensor] = []
    went = attempt(lambda: found.append(torch_cgx.dequantize(packed, numel, dtype, bits, block)))
    if went and not strange and numel:
        known = torch.zeros(numel, dtype=dtype)
        ReferenceKernels().decode((Piece.of(MaxMin(bits, block), 0, numel),), packed, known)
        if not torch.equal(found[0].nan_to_num(0.0, 1.0, -1.0), known.nan_to_num(0.0, 1.0, -1.0)):
            raise Broken(f"kernels differ: {found[0]} and {known}")
        again = torch_cgx.quantize(found[0], bits, block)
        if again.numel() != nbytes:
            raise Broken(f"a payload of {again.numel()} bytes instead of {nbytes}")
    return went


def pieces(data: bytes) -> bool:
    """Kernels with tables that no layout makes: refused, or within tensor and slot."""
    source = Source(data)
    rows = tuple(
        Piece(
            source.choice([0, 1, 8, 40, 2**40, -8]),
            source.choice([0, 1, 8, 13, 64, 2**33, -1]),
            source.choice([0, 1, 4, 8, 9, 32, -1]),
            source.choice([1, 8, 64, 0, -4, 2**20]),
            source.choice([0, 0, 1, 5, 2**33, -1]),
            source.choice([0, 0, 8, 4, 1024, 2**40, -8]),
            source.choice([0, 1, 2, 3, -1]),
        )
        for _ in range(1 + source.below(3))
    )
    values, slot = torch.zeros(64), torch.zeros(512, dtype=torch.uint8)
    if not available():
        return False
    return attempt(lambda: NativeKernels().decode(rows, slot, values))


def configuration(data: bytes) -> bool:
    source = Source(data)
    keys = ("bits", "bucket_size")
    parameters = source.anything() if source.below(3) else {source.choice(keys): source.anything() for _ in range(2)}
    given: dict[str, Any] = {"compression_params": parameters}
    names = (
        "layer_min_size",
        "overrides",
        "stochastic",
        "error_feedback",
        "start_step",
        "adaptive",
        "grad_scaler",
        "measure_every",
    )
    for name in names:
        if source.below(3) == 0:
            given[name] = source.anything()
    if source.below(4) == 0:
        given["model"] = source.anything()
    elif "overrides" in given or source.below(2):
        given["model"] = nn.Linear(4, 4)
    return attempt(lambda: CGXState(None, **given))


def adaptive(data: bytes) -> bool:
    source = Source(data)
    chosen = {field.name: source.anything() for field in fields(AdaptiveBits) if source.below(3) == 0}
    return attempt(lambda: AdaptiveBits(**chosen)) and attempt(
        lambda: AdaptiveBits.of(AdaptiveBits(**chosen).as_dict())
    )


def default_compression(data: bytes) -> bool:
    source = Source(data)
    try:
        went = attempt(lambda: torch_cgx.set_default(bits=source.anything(), bucket_size=source.anything()))
        return attempt(scopes.compression) and went
    finally:
        torch_cgx.set_default()


def layers(data: bytes) -> bool:
    source = Source(data)
    table, went = LayerTable(), False
    for _ in range(1 + source.below(4)):
        kind = source.below(3)
        place = [source.below(3), source.below(3)] if source.below(2) else [source.anything(), source.anything()]
        values = [source.choice([4, 8, 512]) if source.below(2) else source.anything() for _ in range(3)]
        call = (
            lambda place=place, values=values: table.register(*place, *values),
            lambda place=place, values=values: table.set_bits(*place, values[0]),
            lambda place=place, values=values: table.set_block(*place, values[0]),
        )[kind]
        went = attempt(call) or went
    attempt(lambda: table.cut(source.below(2000), Compression(4, 512), Settings()))
    return went


VARIABLES = (
    *("CGX_COMPRESSION_QUANTIZATION_BITS", "CGX_COMPRESSION_BUCKET_SIZE", "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS"),
    *(
        "CGX_COMPRESSION_MINIMAL_SIZE",
        "CGX_COMPRESSION_STOCHASTIC",
        "CGX_COMPRESSION_SEED",
        "CGX_FUSION_BUFFER_SIZE_MB",
    ),
    *("CGX_INNER_COMMUNICATOR_TYPE", "CGX_CROSS_COMMUNICATOR_TYPE", "CGX_INNER_REDUCTION_TYPE"),
    *(
        "CGX_CROSS_REDUCTION_TYPE",
        "CGX_LINK_COSTS",
        "CGX_INTRA_BROADCAST",
        "CGX_INTRA_COMPRESS",
        "CGX_NODE_ID",
        "CGX_NUM_THREADS",
        "CGX_SIMD",
    ),
)
GOOD = ("0", "1", "4", "8", "32", "512", "shm", "GLOO", "mpi", "NCCL", "sra", "RING", "scalar", "avx2", "host")


def environment(data: bytes) -> bool:
    source = Source(data)
    environ = {}
    for _ in range(1 + source.below(4)):
        value = source.choice(GOOD) if source.below(2) else os.fsdecode(source.take(source.below(30)))
        environ[source.choice(VARIABLES)] = value * source.choice([1, 1, 1, 5000])
    found = attempt(lambda: Settings.from_environ(environ))
    return (
        attempt(lambda: compression_from_environ(environ))
        and found
        and attempt(lambda: json.dumps(Settings.from_environ(environ).fingerprint()))
    )


def _state() -> CGXState:
    options = AdaptiveBits(period=4, warmup=1)
    return CGXState.from_model(nn.Linear(40, 40), error_feedback=True, adaptive=options)


def checkpoint(data: bytes) -> bool:
    """A state that is saved, damaged and loaded: all of it or nothing."""
    source = Source(data)
    state = _state()
    saved = state.state_dict()
    saved["residuals"] = {"weight": torch.zeros(1600)}
    choice = {"step": 3, "reason": "", "layers": {"weight": [4, 1024]}}
    sample = {"numel": 1600, "itemsize": 4, "positions": None, "mean": torch.zeros(1600), "squares": torch.zeros(2)}
    saved["adaptive"] = {"choices": [choice], "samples": {"weight": sample}}
    for _ in range(source.below(4)):
        inside: Any = saved
        for _ in range(source.below(4)):
            deeper = [
                value
                for value in (inside.values() if isinstance(inside, dict) else inside)
                if isinstance(value, (dict, list))
            ]
            if not deeper:
                break
            inside = source.choice(deeper)
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            continue
        key = source.choice(keys)
        if source.below(3) == 0:
            del inside[key]
        else:
            inside[key] = source.anything()
    given = source.anything() if source.below(16) == 15 else saved
    before = {key: value for key, value in state.state_dict().items() if key != "adaptive"}
    if attempt(lambda: state.load_state_dict(given)):
        return attempt(lambda: state.state_dict()) and attempt(lambda: str(state.report()))
    after = {key: value for key, value in state.state_dict().items() if key != "adaptive"}
    if before != after:
        raise Broken("a checkpoint that was refused has changed the state")
    return False


def report(data: bytes) -> bool:
    """`cgx bits` on any file."""
    source = Source(data)
    if source.below(4):
        layers = {source.text(): source.anything() if source.below(2) else [4, 512] for _ in range(source.below(3))}
        choices = [
            {"step": source.plain() if source.below(2) else 3, "reason": source.plain(), "layers": layers}
            for _ in range(1 + source.below(2))
        ]
        told = {
            "choices": choices if source.below(4) else source.plain(),
            "layers": source.plain(),
            "step": source.plain(),
        }
        raw = json.dumps(told, default=str, ensure_ascii=True).encode()
    else:
        raw = source.rest()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        path.write_bytes(raw)

        def read() -> None:
            history = cli_bits.read(path)
            for choice in history.choices:
                history.average_text(choice)

        return attempt(read, allowed=(CommandFailed,))


class _Store:
    """What a hostile or older peer has written."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self._answers = answers

    def set(self, key: str, value: str) -> None:
        self._answers[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return self._answers.get(key, b"{}")


def membership(data: bytes) -> bool:
    source = Source(data)
    store = _Store({})
    attempt(lambda: join(store, 1, 1, Settings(), [0, 1], ""))  # type: ignore[arg-type]
    theirs = json.loads(store.get("member/1"))
    for _ in range(source.below(3)):
        if source.below(4) == 0:
            theirs.pop(source.choice(sorted(theirs)), None)
        else:
            theirs[source.choice([*sorted(theirs), "mistake"])] = source.plain()
    raw = json.dumps(theirs).encode() if source.below(4) else source.rest()
    store = _Store({f"member/{source.below(2)}": raw})
    mine = source.below(2)
    went = attempt(lambda: join(store, mine, 2, Settings(), [0, 1], ""))  # type: ignore[arg-type]
    kinds = {"problem": str, "limit": int, "native": bool}
    attempt(lambda: parse_answer(raw, "control", kinds), allowed=(CGXError,))
    return went


def chosen_bits(data: bytes) -> bool:
    """What peers send to agree on bits."""
    source = Source(data)
    adaptation = Adaptation(AdaptiveBits(), Compression(4, 1024), 0)
    names = ["a", "b"]
    numbers = [source.choice([0, 1, 2, 4, 8, 32, 1024]) if source.below(2) else source.number() for _ in range(5)]
    reason = [source.below(300) for _ in range(4)]
    told = torch.tensor([max(-(2**31), min(2**31 - 1, number)) for number in (*numbers, *reason)], dtype=torch.int32)
    return attempt(lambda: adaptation._obey(3, told, names, 1))


TARGETS: dict[str, Callable[[bytes], bool]] = {
    target.__name__: target
    for target in (
        payload,
        pieces,
        configuration,
        adaptive,
        default_compression,
        layers,
        environment,
        checkpoint,
        report,
        membership,
        chosen_bits,
    )
}
