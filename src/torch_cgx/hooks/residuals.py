"""What compression has lost of each layer on this rank, to be added to its next gradient: error feedback.

float32, in the order of a grad bucket, because kernels fill it as they encode; kept by parameter, because DDP makes
new grad buckets after the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Residuals"]


class Residuals:
    """`scale` is what the loss was multiplied with when they were kept (1 without a GradScaler)."""

    def __init__(self) -> None:
        self._by_parameter: dict[int, Tensor] = {}  # flat views into those of grad buckets
        self._waiting: dict[str, Tensor] = {}  # loaded, for parameters that have not been seen yet
        self.scale = 1.0

    def lay_out(self, parameters: Sequence[Tensor], names: Sequence[str | None]) -> Tensor:
        """The residuals of a grad bucket, one after the other: those kept so far, else zeros."""
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
        views = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, name, view in zip(parameters, names, views, strict=True):
            kept = self._by_parameter.get(id(parameter))
            if kept is None and name is not None:
                kept = self._waiting.pop(name, None)
            if kept is not None:
                view.copy_(kept.view(-1))
            self._by_parameter[id(parameter)] = view
        return flat

    def forget(self, parameters: Sequence[Tensor]) -> None:
        """Of parameters that travel exactly now; they would keep those of their old grad bucket in memory."""
        for parameter in parameters:
            self._by_parameter.pop(id(parameter), None)

    def rescale(self, scale: float) -> None:
        """The loss is multiplied with another number from now on."""
        if scale != self.scale:
            for kept in (*self._by_parameter.values(), *self._waiting.values()):
                kept.mul_(scale / self.scale)
            self.scale = scale

    def put(self, named: Mapping[str, Tensor], scale: float) -> None:
        """Take the place of all that is kept, parameter by parameter as they come."""
        self._by_parameter.clear()
        self._waiting = {name: kept.detach().to(torch.float32).clone() for name, kept in named.items()}
        self.scale = scale

    def drop_waiting(self, fits: Callable[[str, int], bool]) -> list[str]:
        """Forget what was loaded for parameters that, by name and number of values, are not there; their names."""
        dropped = [name for name, kept in self._waiting.items() if not fits(name, kept.numel())]
        for name in dropped:
            del self._waiting[name]
        return dropped

    def named(self, name_of: Callable[[int], str | None]) -> dict[str, Tensor]:
        """Copies, by parameter name; those without a name are left out."""
        found = {name: kept.clone() for name, kept in self._waiting.items()}
        for identity, kept in self._by_parameter.items():
            name = name_of(identity)
            if name is not None:
                found[name] = kept.clone()
        return found

    def __len__(self) -> int:
        return len(self._by_parameter) + len(self._waiting)


def add_residual(buffer: Tensor, residual: Tensor) -> Tensor | None:
    """Add what was kept to gradients; what rounding to 16 bits loses of the sum, if anything."""
    if buffer.dtype == torch.float32:
        buffer.add_(residual)
        return None
    wide = buffer.to(torch.float32).add_(residual)
    buffer.copy_(wide)
    lost = wide.sub_(buffer)
    return torch.where(torch.isfinite(lost), lost, 0)
