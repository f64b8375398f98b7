"""Error feedback: what compression has lost of each layer on this rank, to be added to its next gradient.

Residuals are float32 and in the order of a grad bucket, because kernels fill them as they encode. They are kept by
parameter, because DDP rebuilds its grad buckets after the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Residuals", "add_residual", "hold_back", "scale_of"]


class Residuals:
    """The residuals of all parameters, multiplied by `scale` as the loss is (1 without a GradScaler)."""

    def __init__(self) -> None:
        self._by_parameter: dict[int, Tensor] = {}  # flat views into the residuals of grad buckets
        self._waiting: dict[str, Tensor] = {}  # loaded, for parameters that have not been seen yet
        self._waiting_scale = 1.0
        self._scale: float | Tensor = 1.0  # a tensor if it is on the residuals' device

    @property
    def scale(self) -> float:
        """Return the scale; the host waits for it if it is on a device."""
        return float(self._scale)

    def lay_out(self, parameters: Sequence[Tensor], names: Sequence[str | None]) -> Tensor:
        """Return the residuals of a grad bucket, one after the other: those kept so far, else zeros."""
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
        views = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, name, view in zip(parameters, names, views, strict=True):
            kept = self._by_parameter.get(id(parameter))
            if kept is not None:
                view.copy_(kept)
            elif name is not None and (loaded := self._waiting.pop(name, None)) is not None:
                view.copy_(loaded.view(-1)).mul_(self._scale / self._waiting_scale)
            self._by_parameter[id(parameter)] = view
        return flat

    def forget(self, parameters: Sequence[Tensor]) -> None:
        """Drop the residuals of parameters now sent uncompressed; they would keep their old grad bucket's alive."""
        for parameter in parameters:
            self._by_parameter.pop(id(parameter), None)

    def rescale(self, scale: float | Tensor) -> None:
        """Convert the residuals to the loss's new scale; the host does not read one that is on a device."""
        kept = list(self._by_parameter.values())
        if isinstance(scale, Tensor):
            if kept:
                torch._foreach_mul_(kept, (scale / self._scale).to(torch.float32))
            self._scale = scale.clone()  # a GradScaler changes it in place
        elif scale != self.scale:
            for each in kept:
                each.mul_(scale / self.scale)
            self._scale = scale

    def put(self, named: Mapping[str, Tensor], scale: float) -> None:
        """Replace everything that is kept; each parameter takes up its residual when it is laid out."""
        self._by_parameter.clear()
        self._waiting = {name: kept.detach().to(torch.float32).clone() for name, kept in named.items()}
        self._waiting_scale = self._scale = scale

    def drop_waiting(self, fits: Callable[[str, int], bool]) -> list[str]:
        """Drop loaded residuals whose name and number of values fit no parameter, and return their names."""
        dropped = [name for name, kept in self._waiting.items() if not fits(name, kept.numel())]
        for name in dropped:
            del self._waiting[name]
        return dropped

    def named(self, name_of: Callable[[int], str | None]) -> dict[str, Tensor]:
        """Return copies by parameter name, without parameters that have no name."""
        found = {name: kept * (self.scale / self._waiting_scale) for name, kept in self._waiting.items()}
        for identity, kept in self._by_parameter.items():
            name = name_of(identity)
            if name is not None:
                found[name] = kept.clone()
        return found

    def __len__(self) -> int:
        return len(self._by_parameter) + len(self._waiting)


def hold_back(buffer: Tensor, residual: Tensor, spans: Sequence[slice]) -> Tensor | None:
    """Take out the residuals of parameters without a gradient on this rank, to be added back after the average.

    DDP ignores the average of a parameter that no rank used, and no rank knows that before the end of the step. So a
    rank adds what it has kept only together with a gradient of its own. Parameters lie in `spans`, and an unused one
    has zeros. Return None if none is unused.
    """
    if buffer.device.type != "cpu":
        return _hold_back_unseen(buffer, residual, spans)
    first = buffer[torch.tensor([span.start for span in spans], device="cpu")].tolist()
    unused = [span for span, value in zip(spans, first, strict=True) if value == 0 and not buffer[span].any()]
    if not unused:
        return None
    held = torch.zeros_like(residual)
    for span in unused:
        held[span] = residual[span]
        residual[span] = 0
    return held


def _hold_back_unseen(buffer: Tensor, residual: Tensor, spans: Sequence[slice]) -> Tensor:
    """Do the work of `hold_back` on a device, without making the host wait."""
    held = torch.zeros_like(residual)
    largest = torch._foreach_norm([buffer[span] for span in spans], float("inf"))
    for span, norm in zip(spans, largest, strict=True):
        held[span] = torch.where(norm == 0, residual[span], 0)
    residual.sub_(held)
    return held


def add_residual(buffer: Tensor, residual: Tensor) -> Tensor | None:
    """Add the residual to gradients, and return what rounding the sum to 16 bits loses, or None for float32."""
    if buffer.dtype == torch.float32:
        buffer.add_(residual)
        return None
    wide = buffer.to(torch.float32).add_(residual)
    buffer.copy_(wide)
    lost = wide.sub_(buffer)
    return torch.where(torch.isfinite(lost), lost, 0)


def scale_of(grad_scaler: Any) -> float | Tensor:
    """Return the factor by which a GradScaler multiplies the loss. One on a device is not copied to the host."""
    if grad_scaler is None:
        return 1.0
    scale = getattr(grad_scaler, "_scale", None)  # None before the first loss, and for a disabled scaler
    return scale if isinstance(scale, Tensor) and scale.device.type != "cpu" else float(grad_scaler.get_scale())
