"""Lightning: `Trainer(strategy=CGXStrategy(bits=4))`, or `Trainer(strategy="cgx")` once this module is imported.

Lightning's own DDPStrategy registers communication hooks on CUDA only; this one registers `cgx_hook` on CPU as well,
and keeps the hook's state in Lightning's checkpoints. Nothing else in torch_cgx needs Lightning.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from torch_cgx import AdaptiveBits, CGXState, cgx_hook
from torch_cgx.config import DEFAULT_QUANTIZER
from torch_cgx.ddp.checkpoint import gather_states, most_state_nbytes

__all__ = ["CGXStrategy"]

CHECKPOINT_KEY = "torch_cgx"


def _lightning_package() -> str:
    """Return which of Lightning's two packages the script uses; a Trainer of one refuses the other's strategies."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in names:
        if name in sys.modules:
            return name
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ImportError("torch_cgx.lightning needs Lightning: pip install lightning")


_strategies: Any = importlib.import_module(f"{_lightning_package()}.strategies")


class CGXStrategy(_strategies.DDPStrategy):  # type: ignore[misc]
    """DDPStrategy with backend "cgx", whose gradients go through `cgx_hook`.

    The first arguments are those of `CGXState`; all others go to DDPStrategy. `cgx_state` is the hook's state
    (`report`, `log_to`), from the beginning of `fit`. Names in `overrides` are those of the LightningModule's
    parameters.

    A checkpoint holds the states of all ranks, gathered by rank 0. With error feedback each rank's state includes one
    float32 copy of the compressed parameters. A run that resumes with the same number of ranks continues with all of
    it; with another number it warns about what it drops. The checkpoint's settings (bits and so on) replace those given
    here. Weights-only checkpoints hold none of it.
    """

    strategy_name = "cgx"

    def __init__(
        self,
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
        process_group_backend: str = "cgx",
        **ddp: Any,
    ) -> None:
        if "ddp_comm_hook" in ddp or "ddp_comm_state" in ddp:
            raise TypeError("ddp_comm_hook, ddp_comm_state: expected neither, CGXStrategy brings its own")
        super().__init__(process_group_backend=process_group_backend, **ddp)
        self.cgx_state: CGXState | None = None
        self._cgx_settings: dict[str, Any] = {
            "layer_min_size": layer_min_size,
            "compression_params": {"bits": bits, "bucket_size": bucket_size, "quantizer": quantizer},
            "overrides": overrides,
            "stochastic": stochastic,
            "error_feedback": error_feedback,
            "start_step": start_step,
            "adaptive": adaptive,
            "measure_every": measure_every,
        }

    def setup_distributed(self) -> None:
        super().setup_distributed()
        # Lightning leaves groups other than NCCL's open until the process ends; at exit Python can still end one well.
        atexit.unregister(_destroy_group)
        atexit.register(_destroy_group)

    def _register_ddp_hooks(self) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)  # of 16-bit mixed precision
        self.cgx_state = CGXState.from_model(self.model, grad_scaler=scaler, **self._cgx_settings)
        wrapper = self._ddp_comm_wrapper
        self.model.register_comm_hook(self.cgx_state, cgx_hook if wrapper is None else wrapper(cgx_hook))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # All ranks come here. Optimizer states are what a weights-only checkpoint lacks.
        if self.cgx_state is not None and "optimizer_states" in checkpoint:
            states = gather_states(self.cgx_state.state_dict(), most_state_nbytes(self.model))
            checkpoint[CHECKPOINT_KEY] = states
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        # Checkpoints of other strategies have none; the hook then starts at step 0.
        states = checkpoint.get(CHECKPOINT_KEY)
        if states and self.cgx_state is not None:
            self.cgx_state.load_state_dict(states[dist.get_rank() % len(states)])


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


if CGXStrategy.strategy_name not in _strategies.StrategyRegistry:
    _strategies.StrategyRegistry.register(
        CGXStrategy.strategy_name, CGXStrategy, description="DDP whose gradients travel at 4 bits"
    )
