"""`initialize`: make an engine from a model, a configuration and the other objects of a training script."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.identity import model_identity
from infinity.config import Config, load_config
from infinity.config.resolved import CommunicationConfig
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.optim import AdamW
from infinity.optim.kinds import OptimizerKind, kind_of, named_optimizer
from infinity.optim.lr_schedules import make_scheduler, try_schedule
from infinity.optim.optimizer import ParamsOrGroups, TieredOptimizer
from infinity.optim.torch_schedules import is_factory, rebind
from infinity.schedule.on_device import addresses_stay
from infinity.telemetry.monitor import check_packages
from infinity.tiers import AcceleratorLink, HostMemory, Link, compute_device
from infinity.zero.adoption import RunFacts
from infinity.zero.agreement import (
    Facts,
    agree,
    configuration_facts,
    model_facts,
    optimizer_facts,
    plain_values,
    tell_of_machines,
    versions,
)
from infinity.zero.build import Runtime, build_runtime
from infinity.zero.compiled import refuse_cuda_graphs, unwrapped
from infinity.zero.initial_values import InitialValues, WeightSource, is_placeholder
from infinity.zero.leaf_modules import apply_leaf_modules
from infinity.zero.materialize import materialize, resident_first, stored_values
from infinity.zero.meta import InitFunction
from infinity.zero.model_parts import has_numbers, local_part, model_parts
from infinity.zero.outside_units import OutsideUnits, check_values
from infinity.zero.param_access import check_unowned
from infinity.zero.ranks import Ranks, is_first_process, join_ranks, world_size
from infinity.zero.sizing import compute_dtype

_log = logging.getLogger(__name__)
_TIMEOUT_S = CommunicationConfig().timeout_s  # used if the configuration cannot be read

ConfigSource = str | Path | Mapping[str, Any] | Config


def initialize(
    model: nn.Module,
    config: ConfigSource,
    model_parameters: ParamsOrGroups | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    training_data: Any | None = None,
    lr_scheduler: Any | None = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
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

    Args:
        model: any `nn.Module`. Parameters on the meta device are initialised unit by unit, directly in their tier. A
            model that `torch.distributed.tensor.parallel` has divided must have its values. If this call fails, the
            model is unchanged.
        config: a JSON file (docs/configuration.md), or the same as a mapping.
        model_parameters: parameters or parameter groups to train; by default all that require a gradient.
        optimizer: a torch Adam, AdamW, Adagrad or SGD, whose groups and hyper-parameters are used; or an Adam or AdamW
            of `infinity.optim`, which is closed.
        training_data: a dataset, for which a `DataLoader` with the configured micro-batch size is returned.
            `collate_fn` makes its batches.
        lr_scheduler: a torch scheduler of `optimizer`, or a callable that makes one from the returned optimizer.
        init_function: initialises the parameters of one module that was built on the meta device or by `zero.Init`.
        weights: stored values of parameters that were built on the meta device or by `zero.Init`, read unit by unit;
            see `infinity.integrations.pretrained_model`. Parameters without stored values are initialised.
        device: the compute device; by default a CUDA device if there is one, otherwise the CPU.
        link: copies bytes to and from a device of another kind.
        process_group: the ranks that share the states; by default all ranks of `torch.distributed`, which is
            initialised here under a launcher (`infinity run`, `torchrun`) if it was not before.
        trains: False for an engine that evaluates and generates, without optimizer states; None to train if an
            optimizer is given or configured.
        engine_class: the class of the engine.
        adapt: takes the resolved configuration, and returns the one to use.

    Returns:
        (engine, optimizer or None, dataloader or None, lr_scheduler or None)

    Raises:
        ConfigError: a key, value or combination cannot work. The message names it.
        CapacityError: a memory budget is too small. The message has the number that is needed.
        StorageError: an NVMe path cannot be used.
        RankError: another rank has failed.
    """
    resolved, ranks, model = _meet(model, config, optimizer, process_group)
    resolved = resolved if adapt is None else adapt(resolved)
    parts = model_parts(model, ranks)
    link = link or _default_link(device)
    refuse_cuda_graphs(model, fixed=addresses_stay(resolved, discrete=link.discrete))
    if trains is None:
        trains = optimizer is not None or resolved.optimizer is not None
    tiered, groups, frozen, facts = _agreed_optimizer(
        model,
        resolved,
        ranks,
        model_parameters,
        optimizer,
        engine_class.optimizer_class(resolved),
        trains=trains,
        own_schedule=lr_scheduler is not None,
    )
    apply_leaf_modules(model, resolved.zero.leaf_modules)
    values = InitialValues(model, init_function, weights, keep=ranks.size > 1)
    outside = OutsideUnits(model)
    runtime: Runtime | None = None
    try:
        dataloader = _dataloader(training_data, resolved, ranks, collate_fn)
        values.detach()
        tiered.bind(model, groups, frozen)  # parameters on the meta device were replaced
        outside.place(compute_dtype(resolved), link.device, ranks)
        runtime = build_runtime(
            model,
            groups,
            resolved,
            tiered.kind.layout,
            link,
            ranks,
            parts,
            values.made,
            values.in_files(groups, ranks),
            facts,
        )
        with runtime.counters.aside("initialize"):
            materialize(runtime, values, rounds=resolved.rounds_masters)
        ranks.each(runtime.monitor.open, "infinity.initialize(): the monitors", ConfigError)
        scheduler = _scheduler(resolved, tiered, lr_scheduler, optimizer) if trains else None
        engine = engine_class(model, resolved, runtime, tiered, scheduler)
    except BaseException:
        _give_back(values, outside, runtime)
        raise
    if isinstance(optimizer, AdamW):
        optimizer.close()  # the engine has states of its own
    if optimizer is not None:
        tiered.share_groups(optimizer)
    return engine, tiered if trains else None, dataloader, scheduler


def _give_back(values: InitialValues, outside: OutsideUnits, runtime: Runtime | None) -> None:
    """Restore the model after an error, with the values and placement that it had before `initialize`."""
    with ExitStack() as rest:  # each callback runs, even if another one fails
        rest.callback(values.give_back)
        rest.callback(outside.give_back)
        if runtime is not None:
            rest.callback(runtime.close)
            values.read_back(resident_first(runtime), partial(stored_values, runtime))


def _meet(model: Any, config: Any, optimizer: Any, process_group: Any | None) -> tuple[Config, Ranks, nn.Module]:
    """Return the configuration, the ranks, and the unwrapped model. If one rank refuses its arguments, all raise."""
    size = world_size(process_group)

    def read() -> tuple[Config, nn.Module]:
        _check_arguments(model, config, optimizer)
        found = unwrapped(model)
        check_unowned(found)
        return config if isinstance(config, Config) else load_config(config, world_size=size), found

    outcome: list[tuple[Config, nn.Module]] = []
    failure: Exception | None = None
    try:
        outcome.append(read())
    except Exception as error:  # raised below, on all ranks
        failure = error
    ranks = join_ranks(process_group, outcome[0][0].communication.timeout_s if outcome else _TIMEOUT_S)

    def check() -> None:
        if failure is not None:
            raise failure
        _check_batch(outcome[0][0], ranks)
        if is_first_process():
            check_packages(outcome[0][0].monitors)

    ranks.each(check, "infinity.initialize(): the configuration", ConfigError)
    return outcome[0][0], ranks, outcome[0][1]


def _agreed_optimizer(
    model: nn.Module,
    config: Config,
    ranks: Ranks,
    model_parameters: ParamsOrGroups | None,
    optimizer: torch.optim.Optimizer | None,
    optimizer_class: type[TieredOptimizer],
    *,
    trains: bool,
    own_schedule: bool,
) -> tuple[TieredOptimizer, dict[str, int], dict[str, int], RunFacts]:
    """Return the optimizer, the groups of trained and of frozen parameters, and the facts that all ranks agree on.

    Args:
        own_schedule: the learning rates do not follow the configuration's schedule.

    Raises:
        ConfigError: a rank's model or optimizer cannot work, or they are not the same on all ranks.
    """
    made: list[tuple[TieredOptimizer, dict[str, int], dict[str, int]]] = []

    def make() -> None:
        _check_parameters(model)
        check_values(model, ranks)
        tiered = optimizer_class([{"params": []}], {})
        if trains:
            tiered = optimizer_class(*_parameters(model, config, model_parameters, optimizer))
            tiered.rules()  # refuses hyper-parameters that cannot be used
        if trains and not own_schedule:  # checked now, before the tiers are filled
            try_schedule(config, tiered.kind, tiered.param_groups)
        made.append((tiered, *_group_of_each(model, tiered)))

    ranks.each(make, "infinity.initialize(): the model", ConfigError)
    tiered, groups, frozen = made[0]
    topics: dict[str, Facts] = {
        "versions": versions(),
        "configuration": configuration_facts(config),
        "model": model_facts(model),
        "optimizer": {**optimizer_facts(tiered.param_groups, groups), "trains": trains},
        "frozen members of groups": dict(frozen),
    }
    agree(ranks, topics)
    tell_of_machines(ranks, config)
    alike = {topic: topics[topic] for topic in ("configuration", "model", "optimizer")}
    return tiered, groups, frozen, alike | {"identity of the model": plain_values(model_identity(model))}


def _check_arguments(model: Any, config: Any, optimizer: Any) -> None:
    """Raise ConfigError unless these are a model, a configuration, and an optimizer or None."""
    if isinstance(config, nn.Module):
        raise ConfigError("`config` is a model: the order is initialize(model, config, ...), or name the arguments")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` is {_words(model)}; give initialize an nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module `{name}` ({type(module).__name__}) is TorchScript, which the engine cannot hook to fetch its "
                "parameters: give initialize the module that it was made from, and compile that (engine.compile)"
            )
    if not isinstance(config, (str, Path, Mapping, Config)):
        raise ConfigError(f"`config` is {_words(config)}; give a JSON file's path, its content as a dict, or a Config")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"`optimizer` is {_words(optimizer)}; give a torch optimizer, or have the configuration name one"
        )


def _words(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _check_batch(config: Config, ranks: Ranks) -> None:
    """Refuse a configuration that was resolved for another number of ranks, or whose shard size does not divide it."""
    per_rank = config.micro_batch_size * config.gradient_accumulation_steps
    if per_rank * ranks.size != config.train_batch_size:
        raise ConfigError(
            f"train_batch_size {config.train_batch_size} was resolved for {config.train_batch_size // per_rank} ranks "
            f"but {ranks.size} are running: give load_config world_size={ranks.size}, or the configuration itself"
        )
    config.zero.sharing(ranks.size)


def _parameters(
    model: nn.Module,
    config: Config,
    model_parameters: ParamsOrGroups | None,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[ParamsOrGroups, Mapping[str, Any], OptimizerKind]:
    """Return (parameters or groups to train, default hyper-parameters, kind of optimizer)."""
    if optimizer is not None:
        if config.optimizer is not None:
            raise ConfigError("both `optimizer` and the configuration's optimizer section are given; give one")
        kind, groups = kind_of(optimizer, also_adam=isinstance(optimizer, AdamW))
        if not any(param.requires_grad for group in groups for param in group["params"]):
            raise ConfigError("no parameter of `optimizer` requires a gradient: there is nothing to train")
        # Every group has its own values; schedules such as transformers' "polynomial" read the defaults.
        return groups, {name: optimizer.defaults[name] for name in kind.defaults if name in optimizer.defaults}, kind
    kind, defaults = named_optimizer(config)
    if model_parameters is None:
        model_parameters = [p for p in model.parameters() if p.requires_grad and has_numbers(p)]
    else:
        model_parameters = list(model_parameters)  # type: ignore[assignment]
    if not model_parameters:
        raise ConfigError(
            "no parameter of the model requires a gradient: there is nothing to train (trains=False evaluates)"
        )
    return model_parameters, defaults, kind


def _check_parameters(model: nn.Module) -> None:
    """Refuse a model with parameters that cannot be trained or placed."""
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise ConfigError(f"parameter `{name}` has no shape yet (a lazy module); run one forward pass first")
        if param.dtype is torch.float64:
            raise ConfigError(f"parameter `{name}` is float64; convert the model first (model.float())")
        if has_numbers(param) and is_placeholder(local_part(param)):
            raise ConfigError(
                f"parameter `{name}` has no values: the engine that had them was closed. Build the model anew, or load "
                "what was saved (model.load_state_dict(state, assign=True)), before initialize"
            )
        kind = str(param.dtype).removeprefix("torch.")
        if param.is_floating_point() and not has_numbers(param) and param.requires_grad:
            raise ConfigError(f"parameter `{name}` is {kind}, which cannot be trained: freeze it, or make it bfloat16")
        if param.is_complex() and param.requires_grad:
            raise ConfigError(
                f"parameter `{name}` is {kind}; hold it as real numbers (torch.view_as_real), or freeze it"
            )
    if not any(has_numbers(param) for param in model.parameters()):
        raise ConfigError("the model has no floating-point parameters to train or place")
    _check_memory_of_their_own(model)


def _check_memory_of_their_own(model: nn.Module) -> None:
    """Refuse trained parameters that share memory with other parameters or buffers: in the tiers, each has its own."""
    spans = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        part = local_part(tensor)
        if part.layout is torch.strided and not (tensor.is_meta or not tensor.numel() or 0 in part.stride()):
            length = part.numel() if part.is_contiguous() else 1  # other tensors may use the gaps between its elements
            spans.append((str(part.device), part.data_ptr(), length * part.itemsize, name, tensor.requires_grad))
    spans.sort(key=itemgetter(0, 1))
    before = ("", 0, 0, "", False)
    for span in spans:
        device, start, nbytes, name, trains = span
        if device == before[0] and start < before[1] + before[2] and (trains or before[4]):
            raise ConfigError(
                f"`{before[3]}` and `{name}` lie in the same memory (`a.data = b.data` does that), but the engine "
                "would store them apart: to tie parameters, make them one (`a = b`); to keep both, clone one"
            )
        if device != before[0] or start + nbytes > before[1] + before[2]:
            before = span


def _group_of_each(model: nn.Module, optimizer: TieredOptimizer) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parameter group of every trained parameter, and of every frozen one, by name."""
    names = {id(param): name for name, param in model.named_parameters()}
    trained: dict[str, int] = {}
    frozen: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name = names.get(id(param))
            if name is None:
                raise ConfigError(
                    f"parameter group {index} has a parameter of shape {tuple(param.shape)} that is not the model's"
                )
            if has_numbers(param):
                (trained if param.requires_grad else frozen)[name] = index
    return trained, frozen


def _default_link(device: torch.device | str | None) -> Link:
    """Return the link to the compute device.

    Raises:
        ConfigError: the device does not exist, or torch does not see it.
    """
    chosen = compute_device(device)
    if chosen.type == "cpu":
        return HostMemory()
    index: int | None = chosen.index
    return AcceleratorLink(
        torch.device(chosen.type, torch.accelerator.current_device_index() if index is None else index)
    )


def _scheduler(
    config: Config, optimizer: TieredOptimizer, given: Any | None, given_optimizer: torch.optim.Optimizer | None
) -> Any | None:
    if given is not None:
        made = given(optimizer) if is_factory(given) else given
        rebind(made, given_optimizer, optimizer)
        return made
    if config.scheduler is None:
        return None
    return make_scheduler(config.scheduler, optimizer)


def _dataloader(
    dataset: Any | None, config: Config, ranks: Ranks, collate_fn: Callable[[list[Any]], Any] | None
) -> Any | None:
    """Return a loader of micro-batches: a map-style dataset is shuffled, and divided among the ranks."""
    if dataset is None:
        return None
    how: dict[str, Any] = {
        "batch_size": config.micro_batch_size,
        "collate_fn": collate_fn,
        "drop_last": config.drops_last,
    }
    if isinstance(dataset, torch.utils.data.IterableDataset):
        _log.info(
            "training_data is iterable: each rank reads its own iterator, so the dataset must divide its samples among "
            "the ranks (torch.distributed.get_rank())"
        )
    elif ranks.size == 1:
        how["shuffle"] = True
    else:
        how["sampler"] = torch.utils.data.DistributedSampler(dataset, ranks.size, ranks.rank)
    return torch.utils.data.DataLoader(dataset, **how)
