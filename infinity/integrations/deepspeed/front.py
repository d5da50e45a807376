"""The first calls of a training script, with DeepSpeed's names and order of arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.script_engine import Engine
from infinity.optim.optimizer import ParamsOrGroups, TieredOptimizer
from infinity.setup import ConfigSource
from infinity.setup import initialize as set_up
from infinity.tiers import Link
from infinity.zero.ending import leave_at_exit
from infinity.zero.initial_values import WeightSource
from infinity.zero.meta import InitFunction
from infinity.zero.ranks import join_ranks

OptimizerOrFactory = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer]

_BACKENDS = (None, "gloo", "nccl", "xccl", "hccl", "cncl")  # torch's backends; join_ranks chooses the device's


def initialize(
    args: argparse.Namespace | nn.Module | None = None,
    model: nn.Module | ConfigSource | None = None,
    optimizer: OptimizerOrFactory | None = None,
    model_parameters: ParamsOrGroups | None = None,
    training_data: Any | None = None,
    lr_scheduler: Any | None = None,
    distributed_port: int = 29500,
    mpu: Any | None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any | None = None,
    config_params: ConfigSource | None = None,
    *,
    init_function: InitFunction | None = None,
    weights: WeightSource | None = None,
    device: torch.device | str | None = None,
    link: Link | None = None,
    process_group: Any | None = None,
    trains: bool | None = True,
    engine_class: type[Engine] = Engine,
    adapt: Callable[[Config], Config] | None = None,
) -> tuple[Engine, TieredOptimizer | None, Any | None, Any | None]:
    """Place a model's states in the tiers and return what a training loop needs.

    `initialize(model=model, config=config)` is all that most scripts need. The names and the order of the arguments up
    to `config_params` are DeepSpeed's.

    Args:
        args: the parsed arguments of a script. `args.deepspeed_config` is the configuration, if no other is given.
        model: any `nn.Module`. Parameters on the meta device are initialised unit by unit, directly in their tier. A
            model that `torch.distributed.tensor.parallel` has divided must have its values. If `initialize` fails, the
            model keeps its values.
        optimizer: Adam, AdamW, Adagrad or SGD of torch, one of `infinity.optim`, or a callable that makes one from the
            parameters. Its parameter groups are used, so a scheduler of it keeps working.
        model_parameters: parameters or parameter groups to train; all that require a gradient by default.
        training_data: a dataset, map-style or iterable; a `DataLoader` with the configured micro-batch size is returned
            for it, and `collate_fn` makes its batches.
        lr_scheduler: a torch scheduler of `optimizer`, or a callable that makes one from the returned optimizer.
        distributed_port: the port where the ranks meet, if the launcher gives none.
        dist_init_required: True to initialise `torch.distributed` for a single process as well.
        config: a DeepSpeed-style JSON file, or the same as a mapping; `config_params` is its older name.
        init_function: initialises the parameters of one module that was built on the meta device or by `zero.Init`.
        weights: stored values of parameters that were built on the meta device or by `zero.Init`, read unit by unit;
            see `infinity.integrations.pretrained_model`. Missing parameters are initialised.
        device: the compute device; by default a CUDA device if there is one, else the CPU.
        link: the object that copies bytes to and from a device that is not CUDA's.
        process_group: the ranks that share the states; all of `torch.distributed`'s by default, which is initialised
            here under a launcher (`infinity run`, `torchrun`) if it was not before.
        trains: False for an engine that evaluates and generates, without optimizer states; None to train if there is an
            optimizer, given or in the configuration.
        engine_class: the class of the returned engine.
        adapt: called with the configuration that was read; returns the one to use.

    Returns:
        (engine, optimizer or None, dataloader or None, lr_scheduler or None)

    Raises:
        ConfigError: a key, value or combination cannot work. The message names it.
        CapacityError: a memory budget is too small. The message has the number that is needed.
        StorageError: an NVMe path cannot be used.
        RankError: another rank has failed.
    """
    if isinstance(args, nn.Module):  # initialize(model, config)
        args, model, config = None, args, _one_of({"the second argument": model, "config": config})
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ConfigError(
                f"`{name}` is not supported: divide the model with torch.distributed.tensor.parallel, and give the "
                "ranks that share the states as process_group"
            )
    source = _configuration(args, config, config_params)
    if dist_init_required:
        init_distributed(distributed_port=distributed_port)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer) and isinstance(model, nn.Module):
        optimizer = _made(optimizer, model, model_parameters)
    made = set_up(
        model,  # type: ignore[arg-type]  # checked there
        source,
        model_parameters,
        optimizer,  # type: ignore[arg-type]
        training_data,
        lr_scheduler,
        collate_fn=collate_fn,
        init_function=init_function,
        weights=weights,
        device=device,
        link=link,
        process_group=process_group,
        trains=trains,
        engine_class=engine_class,
        adapt=adapt,
    )
    return cast(tuple[Engine, TieredOptimizer | None, Any | None, Any | None], made)


def _made(
    factory: Callable[[list[Any]], Any], model: nn.Module, parameters: ParamsOrGroups | None
) -> torch.optim.Optimizer:
    """Return the optimizer that the callable makes."""
    if parameters is None:
        parameters = [param for param in model.parameters() if param.requires_grad]
    made = factory(list(parameters))
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"`optimizer` is a callable that gave a {type(made).__name__}; it must give a torch optimizer"
        )
    return made


def _configuration(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration from the arguments; None if it is not given."""
    of_args = None if isinstance(args, Mapping) else getattr(args, "deepspeed_config", None)
    return _one_of({"config": config, "config_params": config_params, "args.deepspeed_config": of_args})


def _one_of(given: Mapping[str, Any]) -> Any:
    there = {name: value for name, value in given.items() if value is not None}
    if len(there) > 1:
        raise ConfigError(f"the configuration is given twice, as {' and '.join(there)}; give one")
    return next(iter(there.values()), None)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = timedelta(seconds=300),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise `torch.distributed` as the launcher says, or for this process alone, unless it is initialised already.

    Args:
        dist_backend: must be one of torch's. The backends of host memory and of the device are chosen here.
        distributed_port: used if the launcher gives an address and no port.
        timeout: how long a rank waits for the others.
        dist_init_required: False to do nothing.
        init_method, rank, world_size: as torch's `init_process_group` takes them, in place of the launcher's.

    Raises:
        ConfigError: variables of the launcher are missing in the environment, or the backend is not one of torch.
        RankError: not all ranks have joined in time.
    """
    if dist_init_required is False or dist.is_initialized():
        return
    if dist_backend not in _BACKENDS:
        names = ", ".join(name for name in _BACKENDS if name)
        raise ConfigError(
            f"dist_backend is {dist_backend!r}, which is not supported: leave it out, or choose of {names}"
        )
    if init_method is not None or rank >= 0 or world_size > 0:
        dist.init_process_group(dist_backend, init_method, timeout, max(1, world_size), max(0, rank))
        return
    if os.environ.get("MASTER_ADDR"):
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    join_ranks(timeout_s=timeout.total_seconds())
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        leave_at_exit()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options `--deepspeed` and `--deepspeed_config` to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="train with the configuration below")
    group.add_argument("--deepspeed_config", type=_path, metavar="FILE", help="the JSON configuration")
    return parser


def _path(text: str) -> str:
    return str(Path(text))
