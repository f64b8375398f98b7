"""The settings of a group, as frozen dataclasses, and the only reader of the CGX_* variables.

A value outside its range raises a `ValueError` that names the variable, the value and what is allowed. A variable
that is set to the empty string counts as unset.
"""

from __future__ import annotations

import operator
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from torch_cgx import codecs
from torch_cgx.codecs import MAX_BLOCK, RAW, Codec

BITS_VARIABLE = "CGX_COMPRESSION_QUANTIZATION_BITS"
BLOCK_VARIABLE = "CGX_COMPRESSION_BUCKET_SIZE"
QUANTIZER_VARIABLE = "CGX_COMPRESSION_QUANTIZER"

# Read at every call, keyed by the bytes that os.environ stores.
_AT_EVERY_CALL = tuple(os.fsencode(name) for name in (BITS_VARIABLE, BLOCK_VARIABLE, QUANTIZER_VARIABLE))

DEFAULT_QUANTIZER = "maxmin"  # for scripts that name bits but no quantizer
_SMALLEST_COMPRESSED_NUMEL = 16  # below it the header costs more than the values
_SIMD = ("scalar", "avx2", "avx512", "neon")
_MOST_DIGITS = 20  # of 2^64 - 1
_MOST_TEXT = 255  # characters of a node's name: peers read it
_SHOWN = 200  # characters of a wrong value, in an error
_NEAR, _SPELLING = 0.5, 0.75  # least likeness, up to 1, of names for a suggestion, and of words that count as one
_OWN_TO_A_RANK = ("link_costs", "node_id", "num_threads", "simd", "socket_interface", "trace_folder")
_LINK_COSTS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)([mgt])bit(?:,(\d{1,6}(?:\.\d{1,6})?)us)?", re.IGNORECASE)
_BITS_PER_S = {"m": 1e6, "g": 1e9, "t": 1e12}


def whole_number(name: str, value: object, allowed: str = "a whole number") -> int:
    """Return the value as an int, also from numpy's integers; raise ValueError for booleans and floats."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # tensors without values raise the second
        raise ValueError(f"{name}: expected {allowed}, got {shortened(value)}") from None


def at_least(name: str, value: object, least: int, of: str = "") -> int:
    """Return the value as an int, or raise ValueError if it is below `least`."""
    allowed = f"{least} or more{of}"
    found = whole_number(name, value, allowed)
    if found < least:
        raise ValueError(f"{name}: expected {allowed}, got {found}")
    return found


def shortened(value: object) -> str:
    """Return a value's text as errors show it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Compression:
    """A codec's name, its bits and its bucket size."""

    bits: int = RAW.bits  # exact: without a request nothing is compressed
    block: int = 512  # values that share a header
    quantizer: str = DEFAULT_QUANTIZER

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits, "1 to 8 or 32"))
        object.__setattr__(self, "block", whole_number("bucket size", self.block, f"1 to {MAX_BLOCK} values"))
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"bucket size: expected 1 to {MAX_BLOCK} values, got {self.block}")
        codecs.family(self.quantizer)
        self.codec()  # raises if it does not take these bits or this bucket size

    @property
    def is_exact(self) -> bool:
        return self.bits == EXACT.bits

    def codec(self, skip_incomplete: bool = False) -> Codec:
        """Return the codec. With `skip_incomplete`, an incomplete last block is sent raw."""
        return codecs.make_codec(self.quantizer, self.bits, self.block, skip_incomplete)


EXACT = Compression()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for compression. Fields that are None are left open."""

    bits: int | None = None
    block: int | None = None
    quantizer: str | None = None

    def over(self, other: Asked) -> Asked:
        """Return this request, with open fields taken from `other`."""
        return Asked(
            other.bits if self.bits is None else self.bits,
            other.block if self.block is None else self.block,
            other.quantizer if self.quantizer is None else self.quantizer,
        )

    def compression(self) -> Compression:
        """Return the resulting compression. The bucket size defaults to the codec's own."""
        quantizer = DEFAULT_QUANTIZER if self.quantizer is None else self.quantizer
        block = codecs.family(quantizer).default_block if self.block is None else self.block
        return Compression(EXACT.bits if self.bits is None else self.bits, block, quantizer)


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Facts about the network between nodes, for the choice of an algorithm. None: use a built-in figure."""

    bytes_per_s: float | None = None  # of a node's link, each way
    message_s: float | None = None  # of a processor, per message, at each end

    @classmethod
    def parse(cls, text: str | None) -> LinkCosts:
        """Parse a rate, or a rate and microseconds per message: `10gbit`, `25gbit,8us`."""
        if not text:
            return cls()
        match = _LINK_COSTS.fullmatch(text)
        bit_per_s = float(match[1]) * _BITS_PER_S[match[2].lower()] if match else 0.0
        if match is None or not 1e6 <= bit_per_s <= 1e14:
            allowed = "a rate from 1mbit to 100tbit, or one and the microseconds per message: 10gbit or 25gbit,8us"
            raise _wrong("CGX_LINK_COSTS", text, allowed)
        return cls(bit_per_s / 8, None if match[3] is None else float(match[3]) * 1e-6)


NOTHING_KNOWN = LinkCosts()


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that are read once, when a group is created."""

    skip_incomplete: bool = False  # True: an incomplete last block is sent raw
    minimal_numel: int = 0  # values; smaller tensors are sent uncompressed. Forced to at least 16
    stochastic: bool = False  # True: unbiased rounding, for a little more noise
    seed: int = 0  # of stochastic rounding; 64 bits
    fusion_nbytes: int = 64 << 20  # bytes of values; the most one program handles: bounds the staging memory
    inner_communicator: str = "SHM"  # carries payloads within a node
    cross_communicator: str | None = None  # carries payloads between nodes; None: see `Carriers`
    cuda_communicator: str = "NCCL"  # carries CUDA tensors; SHM: staged in host memory, if all ranks are on one host
    inner_reduction: str = "SRA"  # the algorithm within a node
    cross_reduction: str = "AUTO"  # the algorithm between nodes; AUTO: by a cost model, see plan/costs.py
    link_costs: str | None = None  # network figures for that model; rank 0's count
    intra_broadcast: bool = True  # True: one rank per node exchanges data with other nodes
    intra_compress: bool = True  # False: exact within a node, compressed only between nodes
    streams: int = 1  # TCP data connections per pair of ranks
    socket_interface: str | None = None  # the network interface of TCP links; None: the one that leads to the store
    node_id: str | None = None  # names this rank's node; None: detected
    num_threads: int | None = None  # threads per large kernel call; None: torch's, at most this rank's share of cores
    simd: str | None = None  # forces a kernel level; None: the best the CPU has
    trace_folder: str | None = None  # gets the flight recorder's files; None: nothing is written

    def __post_init__(self) -> None:
        if self.minimal_numel < _SMALLEST_COMPRESSED_NUMEL:
            object.__setattr__(self, "minimal_numel", _SMALLEST_COMPRESSED_NUMEL)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Return the settings that the variables ask for (this process's, if no mapping is given)."""
        read = _Reader(os.environ if environ is None else environ)
        carriers = ("TCP", "GLOO", "MPI", "NCCL")
        reductions = ("SRA", "RING")
        inner = read.optional_choice("CGX_INNER_COMMUNICATOR_TYPE", ("SHM", *carriers))
        cross = read.optional_choice("CGX_CROSS_COMMUNICATOR_TYPE", carriers)
        # NCCL carries only CUDA tensors, so CPU tensors keep their default. TCP and MPI carry only CPU tensors, so CUDA
        # tensors use NCCL.
        return cls(
            skip_incomplete=read.flag("CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS", False),
            minimal_numel=read.integer("CGX_COMPRESSION_MINIMAL_SIZE", 0, 0, 2**63 - 1),
            stochastic=read.flag("CGX_COMPRESSION_STOCHASTIC", False),
            seed=read.integer("CGX_COMPRESSION_SEED", 0, 0, 2**64 - 1),
            fusion_nbytes=read.integer("CGX_FUSION_BUFFER_SIZE_MB", 64, 1, 65536) << 20,
            inner_communicator=inner if inner not in (None, "NCCL") else "SHM",
            cross_communicator=None if cross == "NCCL" else cross,
            cuda_communicator="SHM" if inner == "SHM" else "NCCL",
            inner_reduction=read.choice("CGX_INNER_REDUCTION_TYPE", "SRA", reductions),
            cross_reduction=read.choice("CGX_CROSS_REDUCTION_TYPE", "AUTO", ("AUTO", *reductions, "GRID")),
            link_costs=read.link_costs("CGX_LINK_COSTS"),
            intra_broadcast=read.flag("CGX_INTRA_BROADCAST", True),
            intra_compress=read.flag("CGX_INTRA_COMPRESS", True),
            streams=read.integer("CGX_STREAMS", 1, 1, 16),
            socket_interface=read.short_text("CGX_SOCKET_IFNAME") or read.first_of_list("GLOO_SOCKET_IFNAME"),
            node_id=read.short_text("CGX_NODE_ID"),
            num_threads=read.optional_integer("CGX_NUM_THREADS", 1, 256),
            simd=read.optional_choice("CGX_SIMD", _SIMD),
            trace_folder=read.folder("CGX_TRACE_DIR"),
        )

    def fingerprint(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks of a group, in JSON types."""
        return {name: value for name, value in asdict(self).items() if name not in _OWN_TO_A_RANK}


VARIABLES: dict[str, str] = {
    "bits": BITS_VARIABLE,
    "block": BLOCK_VARIABLE,
    "quantizer": QUANTIZER_VARIABLE,
    "skip_incomplete": "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS",
    "minimal_numel": "CGX_COMPRESSION_MINIMAL_SIZE",
    "stochastic": "CGX_COMPRESSION_STOCHASTIC",
    "seed": "CGX_COMPRESSION_SEED",
    "fusion_nbytes": "CGX_FUSION_BUFFER_SIZE_MB",
    "inner_communicator": "CGX_INNER_COMMUNICATOR_TYPE",
    "cross_communicator": "CGX_CROSS_COMMUNICATOR_TYPE",
    "cuda_communicator": "CGX_INNER_COMMUNICATOR_TYPE",
    "inner_reduction": "CGX_INNER_REDUCTION_TYPE",
    "cross_reduction": "CGX_CROSS_REDUCTION_TYPE",
    "link_costs": "CGX_LINK_COSTS",
    "intra_broadcast": "CGX_INTRA_BROADCAST",
    "intra_compress": "CGX_INTRA_COMPRESS",
    "streams": "CGX_STREAMS",
    "socket_interface": "CGX_SOCKET_IFNAME",
    "node_id": "CGX_NODE_ID",
    "num_threads": "CGX_NUM_THREADS",
    "simd": "CGX_SIMD",
    "trace_folder": "CGX_TRACE_DIR",
}
"""The variable that sets each field of `Compression` and `Settings`."""


def shared_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the set variables that must be identical on all ranks, as they were written."""
    read = _Reader(os.environ if environ is None else environ)
    names = {name for field, name in VARIABLES.items() if field not in _OWN_TO_A_RANK}
    return {name: text for name in sorted(names) if (text := read.text(name)) is not None}


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each CGX_* variable that does not exist, with the one that may have been meant."""
    present = os.environ if environ is None else environ
    known = set(VARIABLES.values())
    return [_not_known(name, known) for name in sorted(present) if name.startswith("CGX_") and name not in known]


def _not_known(name: str, known: Collection[str]) -> str:
    shown = name if name.isprintable() else ascii(name)
    near = _nearest(name, known)
    hint = f"Did you mean {_either(near)}?" if near else "docs/variables.md lists all names."
    return f"{shown} is set, but there is no such variable. {hint}"


def _nearest(name: str, known: Collection[str]) -> list[str]:
    """Return the known names that share the most words with this one; [] if none is near, or too many are.

    Words that many names have (COMPRESSION, TYPE) count for less than words that tell names apart (BITS, SEED).
    """
    uses = Counter(word for other in known for word in _words(other))
    given = _words(name)
    misspelled = [word for word in given if word not in uses]
    closeness: dict[str, float] = {}
    for other in known:
        expected = _words(other)
        shared = sum((word in given or _likeness(word, misspelled)) / uses[word] for word in expected)
        closeness[other] = 2 * shared / sum(1 / max(1, uses[word]) for word in (*given, *expected))
    best = max(closeness.values())
    nearest = sorted(other for other, value in closeness.items() if value == best)
    return nearest if best >= _NEAR and len(nearest) <= 2 else []


def _words(name: str) -> list[str]:
    return name.removeprefix("CGX_").split("_")


def _likeness(word: str, misspelled: Sequence[str]) -> float:
    """Return how near, up to 1, the nearest of these words is; 0 if it is another word rather than a mistake."""
    from difflib import SequenceMatcher

    likeness = max((SequenceMatcher(None, word, other).ratio() for other in misspelled), default=0.0)
    return likeness if likeness >= _SPELLING else 0.0


def asked_from_environ(environ: Mapping[str, str] | None = None) -> Asked:
    """Return what the three variables that are read at every call ask for now."""
    if environ is not None:
        return _asked(*(environ.get(os.fsdecode(name)) for name in _AT_EVERY_CALL))
    # os.environ.get of an absent variable raises and catches, 2 us each; the dict that it wraps takes a tenth of that.
    raw = getattr(os.environ, "_data", None)
    if raw is None or os.name != "posix":
        return asked_from_environ(os.environ)
    return _raw_asked(*(raw.get(name) for name in _AT_EVERY_CALL))


def compression_from_environ(environ: Mapping[str, str] | None = None) -> Compression:
    """Return the compression that these variables ask for."""
    return asked_from_environ(environ).compression()


@lru_cache(maxsize=64)
def _raw_asked(*raw: bytes | None) -> Asked:
    return _asked(*(None if each is None else os.fsdecode(each) for each in raw))


@lru_cache(maxsize=64)
def _asked(bits: str | None, block: str | None, quantizer: str | None) -> Asked:
    given = {BITS_VARIABLE: bits or "", BLOCK_VARIABLE: block or "", QUANTIZER_VARIABLE: quantizer or ""}
    read = _Reader(given)
    widths = "1 to 8, or 32 (exact)"
    number = None if read.text(BITS_VARIABLE) is None else read.integer(BITS_VARIABLE, 0, 1, EXACT.bits, widths)
    if number is not None and number not in (*range(1, 9), EXACT.bits):
        raise _wrong(BITS_VARIABLE, given[BITS_VARIABLE], widths)
    asked = Asked(
        number,
        read.optional_integer(BLOCK_VARIABLE, 1, MAX_BLOCK),
        read.optional_choice(QUANTIZER_VARIABLE, codecs.names()),
    )
    try:
        asked.compression()
    except ValueError as error:
        named = " ".join(f"{name}={text}" for name, text in given.items() if text)
        raise ValueError(f"{named}: {error}") from None
    return asked


class _Reader:
    """A reader of single variables, with one method per kind of value."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str | None:
        return self._environ.get(name, "").strip() or None

    def short_text(self, name: str) -> str | None:
        raw = self.text(name)
        if raw is not None and len(raw) > _MOST_TEXT:
            raise _wrong(name, raw, f"at most {_MOST_TEXT} characters")
        return raw

    def first_of_list(self, name: str) -> str | None:
        """Return the first word of a comma-separated list."""
        words = (word.strip() for word in (self.text(name) or "").split(","))
        return next((word for word in words if word), None)

    def link_costs(self, name: str) -> str | None:
        raw = self.text(name)
        LinkCosts.parse(raw)
        return raw

    def integer(self, name: str, default: int, least: int, most: int, allowed: str | None = None) -> int:
        raw = self.text(name)
        if raw is None:
            return default
        allowed = allowed or f"a whole number from {least} to {most}"
        # int() would also take "1_000" and other scripts' digits, which are mistakes in an environment.
        if not (raw.isascii() and raw.isdigit()) or len(raw) > _MOST_DIGITS or not least <= int(raw) <= most:
            raise _wrong(name, raw, allowed)
        return int(raw)

    def flag(self, name: str, default: bool) -> bool:
        raw = self.text(name)
        if raw is None:
            return default
        if raw not in ("0", "1"):
            raise _wrong(name, raw, "0 or 1")
        return raw == "1"

    def optional_choice(self, name: str, words: Sequence[str]) -> str | None:
        """Return the matching one of these words, ignoring case, or None if the variable is unset."""
        raw = self.text(name)
        if raw is None:
            return None
        for word in words:
            if raw.lower() == word.lower():
                return word
        raise _wrong(name, raw, _either(words))

    def choice(self, name: str, default: str, words: Sequence[str]) -> str:
        return self.optional_choice(name, words) or default

    def folder(self, name: str) -> str | None:
        """Return a folder that can be written to, or made when it is first needed."""
        raw = self.text(name)
        if raw is None:
            return None
        path = Path(raw).absolute()
        nearest = next(each for each in (path, *path.parents) if each.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            what = "is no folder" if not nearest.is_dir() else "cannot be written to"
            raise _wrong(name, raw, f"a folder that can be written to, or made: {nearest} {what}")
        return str(path)

    def optional_integer(self, name: str, least: int, most: int) -> int | None:
        return None if self.text(name) is None else self.integer(name, least, least, most)


def _either(words: Sequence[str]) -> str:
    return " or ".join(words)


def _wrong(name: str, value: str, allowed: str) -> ValueError:
    return ValueError(f"{name}={shortened(value)} is not valid: allowed is {allowed}")
