"""Tensors of a model that are in no unit: buffers, and parameters of integers or other codes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from infinity.errors import ConfigError
from infinity.zero.model_parts import has_numbers, is_distributed
from infinity.zero.ranks import Ranks

_STATISTICS = ("running_mean", "running_var")


class OutsideUnits:
    """Moves these tensors to the compute device; `give_back` undoes it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._parameters: list[tuple[nn.Parameter, torch.Tensor]] = []

    def place(self, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
        """Move buffers, and parameters of integers or other codes, to the device. All ranks get the values of rank 0.

        Floating-point buffers that are saved are cast as parameters are. Buffers that are not saved (rotary
        frequencies, masks) are constants of the architecture, and keep their precision. So do the statistics of
        normalisations, because the contribution of one step is too small for 16 bits.
        """
        for param in self._model.parameters():
            if not has_numbers(param) and not is_distributed(param):
                self._parameters.append((param, param.data))
                param.data = _placed(param.data, device, param.dtype, ranks)
        placed: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # modules that share a buffer share it afterwards, too
        for module in self._model.modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                self._buffers.append((module, name, buffer))
                target = buffer.dtype if _keeps_its_dtype(module, name, buffer) else dtype
                key = id(buffer), target
                if key not in placed:
                    placed[key] = _placed(buffer, device, target, ranks)
                module._buffers[name] = placed[key]

    def give_back(self) -> None:
        """Restore the model's own tensors."""
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for param, values in self._parameters:
            param.data = values


def check_values(model: nn.Module, ranks: Ranks) -> None:
    """Check that these tensors have values. Buffers may lack them on other ranks than rank 0, which get rank 0's.

    Raises:
        ConfigError: one is on the meta device, by name.
    """
    for name, param in model.named_parameters():
        if param.is_meta and not has_numbers(param):
            raise ConfigError(
                f"parameter `{name}` is {str(param.dtype).removeprefix('torch.')} and on the meta device, where "
                "nothing can initialise it: build its module in memory"
            )
    if ranks.rank == 0:
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ConfigError(
                    f"buffer `{name}` is on the meta device, so what its module computed is lost: build the model "
                    "under infinity.zero.Init, where buffers are in memory, instead of torch.device('meta')"
                )


def codes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of parameters that are in no unit, by name."""
    return {name: param.detach() for name, param in model.named_parameters() if not has_numbers(param)}


def _placed(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
    """Return the tensor on the device, with the values of rank 0. On one rank it may be the tensor itself.

    On other ranks than rank 0 the given tensor may be on meta.
    """
    if tensor.is_meta:
        buffer = torch.empty(tensor.shape, dtype=dtype, device=device)
    else:
        buffer = tensor.to(device, dtype, copy=ranks.size > 1)
    if ranks.size > 1:
        values = buffer.detach().cpu().contiguous()
        ranks.broadcast(values.view(-1).view(torch.uint8))  # as bytes, because gloo does not send every dtype
        buffer.copy_(values)
    return buffer


def _keeps_its_dtype(module: nn.Module, name: str, buffer: torch.Tensor) -> bool:
    if not has_numbers(buffer) or name in module._non_persistent_buffers_set:
        return True
    return isinstance(module, _NormBase) and name in _STATISTICS


class WidenedParameters:
    """Replaces a normalisation's parameters by copies in the dtype of its statistics, for one forward pass of it.

    torch accepts inputs in 16 bits with parameters and statistics in float32, but not parameters in 16 bits with
    statistics in float32. Gradients reach the parameters through the copies.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own = {name: param for name, param in module._parameters.items() if param is not None}

    def lend(self, module: nn.Module, _: object) -> None:
        statistics = module._buffers["running_mean"]
        for name, param in self._own.items():
            if statistics is not None and param.dtype is not statistics.dtype:
                module._parameters[name] = param.to(statistics.dtype)  # type: ignore[assignment]

    def take_back(self, module: nn.Module, *_: object) -> None:
        module._parameters.update(self._own)


def narrow_statistics(module: nn.Module) -> None:
    """Cast the statistics of one normalisation as its parameters are, for a module without `WidenedParameters`."""
    if isinstance(module, _NormBase) and module.affine:
        for name in _STATISTICS:
            statistics = module._buffers[name]
            if statistics is not None:
                module._buffers[name] = statistics.to(module.weight.dtype)


def normalisations(model: nn.Module) -> list[tuple[nn.Module, WidenedParameters]]:
    """The modules that have both parameters and statistics."""
    found = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [(module, WidenedParameters(module)) for module in found if module.track_running_stats and module.affine]
