"""Reports on what compression does to each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_cgx.config import DEFAULT_QUANTIZER, EXACT

__all__ = ["LayerReport", "Report"]

_MOST_NAME = 48


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer of a `Report`, on this rank."""

    name: str
    numel: int
    bits: int  # 32: exact
    quantizer: str | None  # None: exact
    bytes_exact: int
    bytes_sent: int  # of its payload; how much a rank sends in total depends on the algorithm and the number of ranks
    relative_error: float | None  # |decoded - x| / |x| of this rank's own gradient x at the last measured step
    nonfinite_step: int | None  # the first step with a NaN or an infinity in the average
    nonfinite_here: int | None  # the first step with one in this rank's own gradient
    nonfinite_elsewhere: bool  # there was one in the average while this rank's own gradient had none


@dataclass(frozen=True, slots=True)
class Report:
    """A report on all layers. `print(report)` shows a table, and `as_dict()` is for loggers."""

    rank: int
    step: int  # number of steps made so far
    measured_step: int | None
    layers: Sequence[LayerReport]
    choices: Sequence[Mapping[str, Any]] = ()  # of bits: step, reason, and by layer name [bits, bucket size]

    @property
    def bytes_exact(self) -> int:
        return sum(layer.bytes_exact for layer in self.layers)

    @property
    def bytes_sent(self) -> int:
        return sum(layer.bytes_sent for layer in self.layers)

    @property
    def ratio(self) -> float:
        return self.bytes_exact / self.bytes_sent if self.bytes_sent else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "step": self.step,
            "measured_step": self.measured_step,
            "bytes_exact": self.bytes_exact,
            "bytes_sent": self.bytes_sent,
            "ratio": self.ratio,
            "layers": {
                layer.name: {key: value for key, value in asdict(layer).items() if key != "name"}
                for layer in self.layers
            },
            "choices": list(self.choices),
        }

    def __str__(self) -> str:
        if not self.layers:
            return "no grad bucket has been reduced yet"
        rows: list[tuple[str, ...]] = [("layer", "values", "bits", "bytes exact", "bytes sent", "relative error")]
        rows += [_row(layer) for layer in self.layers]
        rows.append(("all", "", "", f"{self.bytes_exact:,}", f"{self.bytes_sent:,}", f"{self.ratio:.2f}x smaller"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        if self.choices:
            lines.append(f"bits since step {self.choices[-1]['step']}: {self.choices[-1]['reason']}")
        return "\n".join([*lines, *self._troubles()])

    def _troubles(self) -> list[str]:
        lines = []
        for layer in self.layers:
            here, averaged = layer.nonfinite_here, layer.nonfinite_step
            if here is not None:
                lines.append(f"{layer.name}: NaN or infinity in the gradient of rank {self.rank}, first at step {here}")
            elif averaged is not None:
                elsewhere = layer.nonfinite_elsewhere
                whose = "from another rank: see its report" if elsewhere else "whose, the next one will show"
                lines.append(f"{layer.name}: NaN or infinity in the average, first at step {averaged}, {whose}")
        return lines


def _row(layer: LayerReport) -> tuple[str, ...]:
    name = layer.name if len(layer.name) <= _MOST_NAME else "..." + layer.name[3 - _MOST_NAME :]
    error = "" if layer.relative_error is None else f"{layer.relative_error:.2e}"
    bits = "exact" if layer.bits == EXACT.bits else str(layer.bits)
    if layer.quantizer not in (None, DEFAULT_QUANTIZER):
        bits += f" {layer.quantizer}"
    return (name, f"{layer.numel:,}", bits, f"{layer.bytes_exact:,}", f"{layer.bytes_sent:,}", error)
