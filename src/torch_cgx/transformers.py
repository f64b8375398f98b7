"""Hugging Face's Trainer: `trainer.add_callback(CGXCallback(trainer, bits=4))`.

Trainer wraps the model in DDP and passes callbacks the bare model, so this callback asks the trainer for the wrapped
one. The process group must exist before TrainingArguments: see docs/frameworks.md. Nothing else in torch_cgx needs
transformers.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_cgx import AdaptiveBits, CGXState, cgx_hook
from torch_cgx.config import DEFAULT_QUANTIZER
from torch_cgx.ddp.checkpoint import broadcast_state, most_state_nbytes

__all__ = ["CGXCallback"]

_log = logging.getLogger("torch_cgx")
_transformers: Any = importlib.import_module("transformers")


class CGXCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that registers `cgx_hook` on the trainer's DDP model when training begins, with state `cgx_state`.

    The arguments after `trainer` are those of `CGXState`. Each rank saves its state in the trainer's checkpoints, in a
    file of its own, as Trainer does with random number generators. It loads that state, settings included, when
    training resumes from a checkpoint in `output_dir`. With one process it does nothing.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        bits: int = 4,
        bucket_size: int = 1024,
        quantizer: str = DEFAULT_QUANTIZER,
        layer_min_size: int = 1024,
        overrides: Mapping[str, Mapping[str, int | str]] | None = None,
        stochastic: bool | None = None,
        error_feedback: bool = False,
        start_step: int = 0,
        adaptive: AdaptiveBits | Literal["auto"] | None = None,
        measure_every: int = 100,
    ) -> None:
        self.cgx_state: CGXState | None = None
        self._trainer = trainer
        self._model: DistributedDataParallel | None = None  # the one that has the hook
        self._settings: dict[str, Any] = {
            "layer_min_size": layer_min_size,
            "compression_params": {"bits": bits, "bucket_size": bucket_size, "quantizer": quantizer},
            "overrides": overrides,
            "stochastic": stochastic,
            "error_feedback": error_feedback,
            "start_step": start_step,
            "adaptive": adaptive,
            "measure_every": measure_every,
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size == 1:
            return
        model = self._trainer.model_wrapped
        model = getattr(model, "_orig_mod", model)  # without torch.compile's wrapper
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(f"CGXCallback: expected a model that Trainer wraps in DDP, got {type(model).__name__}")
        if model is not self._model:  # a second train() has the hook already
            scaler = self._trainer.accelerator.scaler
            self.cgx_state = CGXState.from_model(model, grad_scaler=scaler, **self._settings)
            model.register_comm_hook(self.cgx_state, cgx_hook)
            self._model = model
        if state.global_step > 0:
            self._resume(args, state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.cgx_state is not None and not getattr(args, "save_only_model", False):
            file = _file(args, state, dist.get_rank())
            file.parent.mkdir(parents=True, exist_ok=True)  # rank 0, which makes it, may be later
            torch.save(self.cgx_state.state_dict(), file)

    def _resume(self, args: Any, state: Any) -> None:
        """Load all states from own files, or all from rank 0's, or none, so that steps and settings are identical."""
        assert self.cgx_state is not None
        own = _file(args, state, dist.get_rank())
        saved = torch.load(own, map_location="cpu", weights_only=True) if own.exists() else None
        missing = torch.tensor([saved is None], dtype=torch.int64, device=args.device)
        dist.all_reduce(missing)
        if missing:
            saved = broadcast_state(saved, most_state_nbytes(self._trainer.model))
        if saved is not None:
            self.cgx_state.load_state_dict(saved)
        else:
            _log.warning("%s is not there: the hook's steps and residuals begin anew", own)


def _file(args: Any, state: Any, rank: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"torch_cgx_{rank}.pt"
