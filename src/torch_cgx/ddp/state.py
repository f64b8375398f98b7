"""`CGXState`: how one model's gradients are compressed, and what is known of them. One per model and hook."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_cgx import scopes
from torch_cgx.adaptive.options import AdaptiveBits
from torch_cgx.config import DEFAULT_QUANTIZER, Compression, at_least
from torch_cgx.ddp.adaptation import Adaptation
from torch_cgx.ddp.buckets import KnownBucket, KnownLayer
from torch_cgx.ddp.checks import check_process_group, check_saved, check_settings, version_of
from torch_cgx.ddp.report import Report
from torch_cgx.ddp.residuals import Residuals, add_residual, hold_back, scale_of
from torch_cgx.group.companion import cgx_group_of
from torch_cgx.group.process_group import ProcessGroupCGX
from torch_cgx.layer_rules import Choices, read_compression, write_compression

__all__ = ["CGXState"]

_DEFAULT = Compression(bits=4, block=1024)  # also for checkpoints that name no quantizer
_log = logging.getLogger("torch_cgx")
_VERSION = 3  # of state_dict's format; 1 had nothing adaptive, 2 no quantizer


class CGXState:
    """How `cgx_hook` compresses one model's gradients. All ranks must create it with identical arguments.

    Args:
        process_group: the model's group. None: the default group, which may be created after the state, but before
            its first use. If its backend is not cgx, the state creates a cgx group of the same ranks beside it.
        layer_min_size: layers with fewer values are sent uncompressed, and so are one-dimensional ones (biases, norms).
        compression_params: for all other layers: "bits" (1 to 8, or 32: exact; 4 by default), "bucket_size" (1024 by
            default) and "quantizer": "maxmin", the default, or "rotated", which takes 1 to 4 bits and a bucket size
            that is a power of two from 64 to 4096.
        overrides: the same for parameters whose names match a pattern, as in `{"*.attn.*": {"bits": 8}}`. Missing
            keys are as in `compression_params`. If several patterns match, the last one counts. Names come from
            `model` (`from_model` passes it).
        stochastic: round at random, without bias. None: as CGX_COMPRESSION_STOCHASTIC says.
        error_feedback: add what compression lost of a gradient to the next one.
        start_step: send everything uncompressed until so many steps have been made.
        adaptive: "auto" or an `AdaptiveBits`: choose the bits of layers without an override while training, from
            their gradients and the network; `compression_params` are the reference.
        grad_scaler: the training run's GradScaler, if any; error feedback follows its changing scale.
        measure_every: the number of steps between measurements of the relative errors in `report`.
        model: the model that names the parameters; `from_model` and `attach` set it too.
    """

    def __init__(
        self,
        process_group: Any = None,
        layer_min_size: int = 1024,
        compression_params: Mapping[str, int | str] | None = None,
        *,
        overrides: Mapping[str, Mapping[str, int | str]] | None = None,
        stochastic: bool | None = None,
        error_feedback: bool = False,
        start_step: int = 0,
        adaptive: AdaptiveBits | Literal["auto"] | None = None,
        grad_scaler: Any = None,
        measure_every: int = 100,
        model: nn.Module | None = None,
    ) -> None:
        check_process_group(process_group)
        measure_every = at_least("measure_every", measure_every, 1)
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model: expected an nn.Module, got {type(model).__name__}")
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise ValueError(f"grad_scaler: expected a GradScaler, got {type(grad_scaler).__name__}")
        chooses = AdaptiveBits.of(adaptive)
        settings = {
            "layer_min_size": layer_min_size,
            "compression_params": {} if compression_params is None else compression_params,
            "overrides": {} if overrides is None else overrides,
            "stochastic": stochastic,
            "error_feedback": error_feedback,
            "start_step": start_step,
            "adaptive": None if chooses is None else chooses.as_dict(),
        }
        self._begin(settings, process_group, grad_scaler, measure_every)
        if model is not None:
            self.attach(model)
        elif overrides:
            raise ValueError(
                "overrides: expected the model whose parameters they name; make the state with CGXState.from_model"
            )
        if dist.is_initialized() and isinstance(own := self._own_group(), ProcessGroupCGX):
            own.ignore_env_bits()

    def _begin(self, settings: Mapping[str, Any], process_group: Any, grad_scaler: Any, measure_every: int) -> None:
        # By the identity of parameters, which buckets and the model keep alive. A shared parameter has several names.
        self._names: dict[int, list[str]] = {}
        self._numels: dict[str, int] = {}
        self._choose(settings)
        self.process_group = process_group
        self.grad_scaler = grad_scaler
        self.measure_every = measure_every
        self._group: ProcessGroupCGX | None = None
        self._group_of: Any = None  # the model's group, for which it was made
        self._step = 0
        self._measured_step: int | None = None
        self._looked_for_layers = False
        self._buckets: dict[int, KnownBucket] = {}
        self._layers: dict[int, KnownLayer] = {}  # by the identity of parameters
        self._residuals = Residuals()
        self._may_skip = True  # steps may leave parameters unused; False if DDP would refuse that

    @classmethod
    def from_model(cls, model: nn.Module, process_group: Any = None, *args: Any, **kwargs: Any) -> CGXState:
        """Return a state that knows a DDP model's parameter names, and uses its process group if none is given.

        All other arguments are those of `CGXState`.
        """
        if process_group is None:
            process_group = getattr(model, "process_group", None)
        return cls(process_group, *args, model=model, **kwargs)

    def attach(self, model: nn.Module) -> None:
        """Learn the names of a model's parameters, for example after unpickling."""
        found = _unwrapped(model).named_parameters(remove_duplicate=False)
        named = {name.replace("_orig_mod.", ""): parameter for name, parameter in found}
        self._choices.check_patterns(list(named))
        useless = self._choices.without_effect({name: parameter.shape for name, parameter in named.items()})
        if useless and _is_first_rank():
            _log.warning(
                "overrides: %s %s no effect: layers of one dimension or of fewer than %d values (layer_min_size) are "
                "exact",
                ", ".join(map(repr, useless)),
                "have" if len(useless) > 1 else "has",
                self._settings["layer_min_size"],
            )
        self._may_skip = not isinstance(model, DistributedDataParallel) or model.find_unused_parameters
        self._names = {}
        for name, parameter in named.items():
            self._names.setdefault(id(parameter), []).append(name)
        self._numels = {name: parameter.numel() for name, parameter in named.items()}
        self._drop_residuals_of_others()
        if self._adaptation is not None:
            self._adaptation.know_layers(self._numels)
        self._buckets.clear()
        self._layers.clear()

    def _choose(self, settings: Mapping[str, Any]) -> None:
        settings = check_settings(settings)
        default = read_compression("compression_params", settings["compression_params"], _DEFAULT)
        overrides = {
            pattern: read_compression(f"overrides[{pattern!r}]", given, default)
            for pattern, given in settings["overrides"].items()
        }
        choices = Choices(default, settings["layer_min_size"], overrides)
        if self._names:
            choices.check_patterns(list(self._numels))
        self._choices = choices
        # Written out in full, so that a checkpoint does not depend on the defaults when it is loaded.
        self._settings: dict[str, Any] = {
            **copy.deepcopy(settings),
            "compression_params": write_compression(default),
            "overrides": {pattern: write_compression(override) for pattern, override in overrides.items()},
        }
        options = AdaptiveBits.of(settings["adaptive"])
        self._adaptation = None if options is None else Adaptation(options, default, settings["start_step"])

    # ---- reducing ----

    @property
    def group(self) -> ProcessGroupCGX:
        """Return the group that carries the averages: the model's own if its backend is cgx, else one beside it."""
        own = self._own_group()
        if self._group is None or self._group.is_closed or self._group_of is not own:
            self._group, self._group_of = cgx_group_of(own), own
            self._group.ignore_env_bits()
        return self._group

    def _own_group(self) -> Any:
        if self.process_group is not None:
            return self.process_group
        if not dist.is_initialized():
            raise ValueError("CGXState: expected an initialized process group: call init_process_group first")
        return dist.group.WORLD

    def _name_of(self, identity: int) -> str | None:
        names = self._names.get(identity)
        return names[0] if names else None

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a grad bucket, and return the future that `cgx_hook` passes to DDP."""
        buffer = bucket.buffer()
        group = self.group
        adaptation = self._adaptation
        if adaptation is not None and bucket.index() == 0 and adaptation.begin_step(self._step, group, buffer.device):
            self._refresh()
        known = self._known(bucket, group)
        if bucket.index() == 0 and self._settings["error_feedback"]:
            self._residuals.rescale(scale_of(self.grad_scaler))
        step = self._step
        if bucket.is_last():
            self._step += 1
            self._buckets = {index: each for index, each in self._buckets.items() if index <= bucket.index()}
            if not self._looked_for_layers:
                self._warn_if_all_are_exact(group)
        if buffer.layout is not torch.strided:  # a sparse embedding's: exact, and not examined
            sparse: torch.futures.Future[Tensor] = group.allreduce_layers(buffer, ()).get_future().then(_only)
            return sparse
        measuring = step % self.measure_every == 0
        looking = known.watching or measuring
        if looking:
            known.look_at_own(buffer, step)
        if self._adaptation is not None:
            self._adaptation.look_at(step, known, list(self._buckets.values()), buffer)
        compressing = known.is_compressed and step >= self._settings["start_step"] and not scopes.is_uncompressed()
        layers, residual, lost, held = known.exact_layers, None, None, None
        if compressing:
            layers, residual = known.wire_layers, known.residual
            if measuring or not known.measured:
                known.measure(buffer)
                self._measured_step = step
            if residual is not None:
                held = hold_back(buffer, residual, known.compressed_spans) if self._may_skip else None
                lost = add_residual(buffer, residual)
        work = group.allreduce_layers(buffer, layers, residual=residual, stochastic=self._settings["stochastic"])

        def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            averaged = future.value()[0]
            on_cpu = averaged.device.type == "cpu"  # elsewhere a check would make the host wait
            nonfinite = on_cpu and known.may_be_nonfinite(averaged, compressing)
            if residual is not None and lost is not None:
                group.record_use(residual, lost)  # of the stream that callbacks run on
                residual.add_(lost if on_cpu and not nonfinite else torch.where(torch.isfinite(averaged), lost, 0))
            if residual is not None and held is not None:
                group.record_use(residual, held)
                residual.add_(held)
            if nonfinite:
                known.look_at_average(averaged, step, looking)
            return averaged

        done: torch.futures.Future[Tensor] = work.get_future().then(finish)
        return done

    def _warn_if_all_are_exact(self, group: ProcessGroupCGX) -> None:
        """Warn once, after a step has shown all layers, if none of them is compressed although that was asked for."""
        self._looked_for_layers = True
        compressed = self._adaptation is not None or any(known.is_compressed for known in self._buckets.values())
        if not compressed and self._choices.compresses and _is_first_rank():
            _log.warning(
                "CGXState compresses no layer of this model: all are one-dimensional, have fewer than %d values "
                "(layer_min_size) or another type than float32, float16 and bfloat16, or overrides keep them exact",
                max(self._settings["layer_min_size"], group.settings.minimal_numel),
            )

    def _known(self, bucket: GradBucket, group: ProcessGroupCGX) -> KnownBucket:
        parameters = bucket.parameters()
        dtype = bucket.buffer().dtype
        known = self._buckets.get(bucket.index())
        if known is not None and known.is_made_of(dtype, parameters):
            return known
        if self._settings["overrides"] and not self._names:
            raise ValueError(
                "overrides: expected the names of the model's parameters; use CGXState.from_model or attach"
            )
        layers: list[KnownLayer] = []
        start = 0
        for number, parameter in enumerate(parameters):
            names = self._names.get(id(parameter), [])
            name = names[0] if names else f"grad bucket {bucket.index()}, layer {number}"
            numel = parameter.numel()
            asked = self._choices.asked(names, parameter.shape, numel)
            if numel < group.settings.minimal_numel:
                asked = Compression(bits=32)
            layer = KnownLayer(name, parameter, start, numel, asked or self._chosen(name), is_free=asked is None)
            before = self._layers.get(id(parameter))
            if before is not None and before.parameter is parameter:
                layer.take_over(before)
            self._layers[id(parameter)] = layer
            layers.append(layer)
            start += numel
        known = KnownBucket(dtype, layers, group.can_compress(bucket.buffer()), group.settings.skip_incomplete)
        self._lay_out_residual(known)
        if known.residual is None:
            self._residuals.forget(parameters)
        self._buckets[bucket.index()] = known
        return known

    def _chosen(self, name: str) -> Compression:
        """Return the compression of a layer for which nobody asked other bits."""
        return self._choices.default if self._adaptation is None else self._adaptation.compression(name, self._step)

    def _refresh(self) -> None:
        """Apply newly chosen bits to the known grad buckets."""
        for known in self._buckets.values():
            for layer in known.free_layers:
                layer.change_to(self._chosen(layer.name))
            known.refresh()
            self._lay_out_residual(known)

    def _lay_out_residual(self, known: KnownBucket) -> None:
        if self._settings["error_feedback"] and known.is_compressed and known.residual is None:
            parameters = [layer.parameter for layer in known.layers]
            known.residual = self._residuals.lay_out(parameters, [self._name_of(id(each)) for each in parameters])

    # ---- reports ----

    def report(self) -> Report:
        """Return every layer's bits, bytes, last measured relative error, and NaN or infinity, on this rank."""
        layers = [layer for _, known in sorted(self._buckets.items()) for layer in known.reports()]
        order = {name: number for number, name in enumerate(self._numels)}
        layers.sort(key=lambda layer: order.get(layer.name, len(order)))
        choices = () if self._adaptation is None else tuple(self._adaptation.told)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return Report(rank, self._step, self._measured_step, layers, choices)

    def log_to(self, summary_writer: Any, step: int | None = None) -> None:
        """Write the report's numbers to a TensorBoard SummaryWriter, or anything with its add_scalar."""
        report = self.report()
        step = report.step if step is None else step
        summary_writer.add_scalar("cgx/ratio", report.ratio, step)
        for layer in report.layers:
            kind = "bits" if layer.quantizer in (None, DEFAULT_QUANTIZER) else f"{layer.quantizer}_bits"
            summary_writer.add_scalar(f"cgx/{kind}/{layer.name}", layer.bits, step)
            if layer.relative_error is not None:
                summary_writer.add_scalar(f"cgx/relative_error/{layer.name}", layer.relative_error, step)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Residuals differ per rank, so each rank should save its own."""
        residuals = self._residuals.named(self._name_of)
        if len(residuals) < len(self._residuals):
            warnings.warn(
                "residuals of parameters without names are not saved: make the state with CGXState.from_model",
                stacklevel=2,
            )
        return {
            "version": _VERSION,
            "step": self._step,
            "settings": copy.deepcopy(self._settings),
            "rank": dist.get_rank(self.process_group) if dist.is_initialized() else 0,
            "world": dist.get_world_size(self.process_group) if dist.is_initialized() else 1,
            "residuals": residuals,
            "residual_scale": self._residuals.scale,
            "adaptive": None if self._adaptation is None else self._adaptation.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, settings included.

        Residuals that do not fit this rank, number of ranks or model are dropped, with a warning.
        """
        if version_of(saved) == 1 and isinstance(saved.get("settings"), Mapping):
            before = {**saved["settings"], "adaptive": None}
            saved = {**saved, "version": 2, "settings": before, "adaptive": None}
        if version_of(saved) == 2:  # it names no quantizers, so the defaults apply
            saved = {**saved, "version": _VERSION}
        check_saved(saved, self._settings, _VERSION)
        kept = self._choices, self._settings, self._adaptation, self._step
        try:
            self._load(saved)
        except Exception:  # a refused checkpoint changes nothing
            self._choices, self._settings, self._adaptation, self._step = kept
            raise

    def _load(self, saved: Mapping[str, Any]) -> None:
        before = self._settings
        self._choose(saved["settings"])
        changed = [name for name, value in self._settings.items() if value != before[name]]
        if changed:
            told = ", ".join(f"{name} {before[name]} becomes {self._settings[name]}" for name in changed)
            warnings.warn(f"settings are now those of the checkpoint: {told}", stacklevel=3)
        self._step = int(saved["step"])
        self._load_adaptation(saved["adaptive"])
        self._buckets.clear()
        residuals = dict(saved["residuals"])
        rank, world = (
            (dist.get_rank(self.process_group), dist.get_world_size(self.process_group))
            if dist.is_initialized()
            else (saved["rank"], saved["world"])
        )
        if residuals and (rank, world) != (saved["rank"], saved["world"]):
            warnings.warn(
                f"dropped the residuals of {len(residuals)} layers: they are of rank {saved['rank']} of "
                f"{saved['world']}, and this is rank {rank} of {world}",
                stacklevel=3,
            )
            residuals = {}
        self._residuals.put(residuals, float(saved["residual_scale"]))
        self._drop_residuals_of_others()

    def _drop_residuals_of_others(self) -> None:
        """Drop the residuals of parameters that the model lacks or has in another size, once the model is known."""
        dropped = (
            self._residuals.drop_waiting(lambda name, numel: self._numels.get(name) == numel) if self._names else []
        )
        if dropped:
            warnings.warn(
                f"dropped the residuals of {len(dropped)} layers that this model does not have in that size, the first "
                f"of them {dropped[0]}",
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state_dict(), "measure_every": self.measure_every}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Restore the state on the default group, without names until `attach`. A GradScaler must be given again."""
        self._begin(kept["state"]["settings"], None, None, kept["measure_every"])
        self._step = int(kept["state"]["step"])
        self._load_adaptation(kept["state"]["adaptive"])
        self._residuals.put(kept["state"]["residuals"], float(kept["state"]["residual_scale"]))

    def _load_adaptation(self, saved: Mapping[str, Any] | None) -> None:
        if self._adaptation is not None and saved is not None:
            self._adaptation.load_state_dict(saved, self._step)
            if self._names:
                self._adaptation.know_layers(self._numels)


def _only(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module, without what DDP and torch.compile wrap around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model
