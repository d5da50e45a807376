"""The common part of `estimate` and `plan`: their options, and the plan of the training that the options describe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, get_args

from infinity.cli.arguments import check_least, name_argument, path_argument, size_argument
from infinity.cli.packages import needed_packages
from infinity.cli.ready import config_argument
from infinity.config import Config, Precision, load_config, with_values
from infinity.config.schema import OFFLOADED_FROM
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from infinity.planner import Drive, Estimate, Machine, Rates, StepTime, TrainingPlan, Work

_TOKENS = 1024
_MOST = 1 << 20  # layers, and width; larger values are mistakes


def _everything_on_nvme(stage: int) -> Mapping[str, Any]:
    """Return a configuration that stores on a drive all that the stage can offload."""
    offloaded = [name for name, least in OFFLOADED_FROM.items() if stage >= least]
    return {
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": stage, **{name: {"device": "nvme"} for name in offloaded}},
        "tiering": {"nvme": [{"path": "."}]},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=name_argument, help="as in `infinity train --model`")
    model.add_argument("--params", help="a GPT, by its number of parameters (70e9), or by layers x width (128x25600)")
    parser.add_argument("--tiles", type=int, default=1, help="number of tiles of each layer of --params (TiledLinear)")
    parser.add_argument(
        "--config",
        type=config_argument,
        help="configuration file, or the name of a ready one (default: stage 3, all states on NVMe, bf16 unless fp32 "
        "is measured to be faster here)",
    )
    parser.add_argument("--host-memory", help="tiering.host_memory of one rank (default: the configuration's)")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage (default: the configuration's)")
    parser.add_argument("--precision", choices=get_args(Precision), help="default: the configuration's")
    for what in ("param", "optimizer"):
        parser.add_argument(f"--offload-{what}", choices=["none", "cpu", "nvme"], help="default: the configuration's")
    batch = parser.add_argument_group("a step")
    batch.add_argument(
        "--micro-batch-size", type=int, metavar="N", help="samples of a rank in a pass (default: the configuration's)"
    )
    batch.add_argument("--accumulation", type=int, metavar="N", help="micro-batches (default: the configuration's)")
    batch.add_argument("--seq-len", type=int, help=f"tokens in a sample (default {_TOKENS}, or the model's limit)")
    batch.add_argument("--checkpoint-activations", action="store_true", help="keep only the inputs of blocks")
    machine = parser.add_argument_group("the machines (default: this one, computing on its CPU)")
    machine.add_argument(
        "--emulate",
        metavar="MACHINE",
        help="another machine: H200, H100, A100, L40S, 4090, 3090 or a JSON file; --profile then gives the rates of "
        "drives and optimizer",
    )
    machine.add_argument("--nodes", type=int, default=1, help="number of machines")
    machine.add_argument("--ranks", type=int, default=1, help="processes on each machine, one for each device")
    machine.add_argument("--device-memory", type=size_argument, help="memory of one device")
    machine.add_argument("--machine-memory", type=size_argument, help="host memory of each machine")
    machine.add_argument("--nvme-capacity", type=size_argument, help="space on the drives of each machine")
    rates = parser.add_argument_group("rates (without any, no time is predicted)")
    rates.add_argument("--profile", type=path_argument, help="the file of `infinity profile --output`")
    rates.add_argument("--disk", type=size_argument, help="bytes a second that the drives of a machine move (2.5GB)")
    rates.add_argument("--link", type=size_argument, help="bytes a second between host and device, each way")
    rates.add_argument("--collectives", type=size_argument, help="bytes a second that a rank receives")
    rates.add_argument("--flops", type=_count, help="floating-point operations a second of one device (70e12)")
    rates.add_argument("--optimizer-rate", type=_count, help="parameters a second that a machine updates (2e9)")


@dataclass(frozen=True)
class Asked:
    """The values of the options.

    Attributes:
        tiles: number of tiles of each linear layer, for models of --params.
        emulated: the machine of --emulate, whose rates were not measured; else empty.
    """

    model: nn.Module
    name: str
    config: Config
    machine: Machine
    drives: list[Drive]
    host_bytes: int
    rates: Rates
    seq_len: int
    checkpointing: bool
    tiles: int = 1
    emulated: str = ""

    def work_of(self, model: nn.Module, plan: TrainingPlan, *, checkpointing: bool | None = None) -> Work:
        """Return the work of a micro-batch of a model, by default with the activation checkpoints of the options."""
        from infinity.planner import count_work

        checkpointing = self.checkpointing if checkpointing is None else checkpointing
        return count_work(model, plan, self.config.micro_batch_size, self.seq_len, checkpointing=checkpointing)


@dataclass(frozen=True)
class Draft:
    """The plan of a training.

    Attributes:
        work: work of one micro-batch.
        step: the predicted step; None if no rate is known.
        problems: why the training does not fit the machine, in words.
    """

    asked: Asked
    plan: TrainingPlan
    work: Work
    step: StepTime | None
    needs: Estimate
    problems: list[str]


def draft_of(asked: Asked) -> Draft:
    """Plan the training. Budgets that are "auto" leave room for activations, gradients and libraries.

    Raises:
        CapacityError: a budget is too small.
    """
    from infinity.planner import Rates, estimate, plan_with_room, predict_step, problems

    libraries = libraries_bytes()
    free_bytes = asked.host_bytes - libraries * asked.machine.neighbours
    work_of = partial(asked.work_of, asked.model)
    config, plan, work = plan_with_room(asked.model, asked.config, asked.machine, work_of, free_bytes)
    asked = replace(asked, config=config)
    step = predict_step(plan, asked.config, work, asked.rates) if asked.rates != Rates() else None
    needs = estimate(plan, work, libraries, step)
    return Draft(asked, plan, work, step, needs, list(problems(plan, needs, asked.drives, asked.host_bytes)))


@cache  # later measurements would include memory that a search for the largest model has left behind
def libraries_bytes() -> int:
    """Return the memory in bytes of a process that has loaded the libraries of a training.

    The first call measures this process. Make it before a model with memory exists.
    """
    import psutil

    _compute_once()
    return int(psutil.Process().memory_info().rss)


def _compute_once() -> None:
    """Run a small block forward and backward, because kernels are loaded at their first use."""
    import torch

    block = torch.nn.TransformerEncoderLayer(64, 2, 64, batch_first=True, dtype=torch.bfloat16)
    hidden = block(torch.ones(1, 64, 64, dtype=torch.bfloat16))
    torch.nn.functional.cross_entropy(hidden[0].float(), torch.zeros(64, dtype=torch.long)).backward()


def read_arguments(args: argparse.Namespace, command: str) -> Asked:
    """Resolve the options.

    Raises:
        ConfigError: an option or the configuration is invalid.
    """
    if args.machine_memory == 0:
        raise ConfigError("--machine-memory is 0; it must be more")
    check_least(args, 1, "tiles", "micro_batch_size", "accumulation", "seq_len", "nodes", "ranks")
    with needed_packages(command):
        from infinity.memory import available_memory_bytes
        from infinity.planner import Drive, Machine, drives_here, free_on

    _fill_in(args)
    model, name, longest = _model(args, command)
    libraries = libraries_bytes()  # includes libraries that the model has loaded
    world = args.nodes * args.ranks
    config = load_config(_values(args), world_size=world)
    drives = drives_here(config) if args.nvme_capacity is None else [Drive("--nvme-capacity", args.nvme_capacity)]
    machine = Machine(world, args.ranks, args.device_memory, args.machine_memory, free_on(drives))
    return Asked(
        model,
        name,
        config,
        machine,
        drives,
        # This process has loaded its libraries already. When it ends, a training's libraries can take their memory.
        args.machine_memory or available_memory_bytes() + libraries,
        _rates(args, config, machine),
        args.seq_len or min(_TOKENS, longest),
        args.checkpoint_activations,
        args.tiles,
        args.emulate or "",
    )


def _fill_in(args: argparse.Namespace) -> None:
    """Take options that are not given from the emulated machine."""
    if args.emulate is None:
        return
    from infinity.planner.machines import known_machine

    for key, value in asdict(known_machine(args.emulate, profiled=args.profile is not None)).items():
        if getattr(args, key) is None:
            setattr(args, key, value)


def _values(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the configuration with the changes of the command line."""
    from infinity.cli.training.configuration import with_precision

    batches = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.accumulation,
    }
    given = {
        "tiering.host_memory": args.host_memory,
        "zero_optimization.stage": args.stage,
        "zero_optimization.offload_param.device": args.offload_param,
        "zero_optimization.offload_optimizer.device": args.offload_optimizer,
        **batches,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    values = dict(with_values(args.config or _everything_on_nvme(3 if args.stage is None else args.stage), changes))
    if args.config is None:
        values.setdefault("train_micro_batch_size_per_gpu", 1)
    if any(value is not None for value in batches.values()):
        values.pop("train_batch_size", None)  # it is computed from the new values
    precision = args.precision or _chosen_precision(args, values)
    return values if precision is None else with_precision(values, precision)


def _chosen_precision(args: argparse.Namespace, values: Mapping[str, Any]) -> str | None:
    """Return the precision that `infinity train` would choose; None for the configuration's.

    It is measured for a training on this machine. Other machines are assumed to be fast in bf16.
    """
    import torch

    from infinity.cli.training.configuration import precision_is_auto
    from infinity.cli.training.precision import measured_precision
    from infinity.tiers import accelerator

    if args.config is not None and not precision_is_auto(values):
        return None
    elsewhere = (args.emulate, args.device_memory, args.machine_memory, args.profile)
    if args.nodes > 1 or any(option is not None for option in elsewhere):
        return "bf16"
    precision = measured_precision(torch.device(accelerator() or "cpu"))
    if precision != "bf16":
        print(
            "note: this machine computes matrix products in bf16 much more slowly than in fp32, so fp32 is assumed, as "
            "in `infinity train`; --precision sets another precision",
            file=sys.stderr,
        )
    return precision


def _model(args: argparse.Namespace, command: str) -> tuple[nn.Module, str, int]:
    """Return the model, its name, and the most tokens of a sample."""
    if args.params is None:
        with needed_packages(command):
            import transformers

            from infinity.cli.training.models import max_tokens, model_shape
        transformers.logging.set_verbosity_error()  # its remarks on configurations are for model authors
        model = model_shape(args.model)
        return model, args.model, max_tokens(model, args.model, args.seq_len) or _TOKENS
    from infinity.planner import WIDTH_STEP, Shape, decoder_of, shape_of

    try:
        layers, _, width = args.params.partition("x")
        shape = Shape(int(layers), int(width)) if width else shape_of(float(layers))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"--params {args.params}: {error}; write 70e9, or 128x25600 (layers x width)") from error
    if not (0 < shape.layers < _MOST and 0 < shape.width < _MOST) or shape.width % WIDTH_STEP:
        raise ConfigError(f"--params {args.params}: the width must be a multiple of {WIDTH_STEP}")
    return decoder_of(shape, args.tiles), f"GPT, {shape.layers} layers of width {shape.width}", args.seq_len or _TOKENS


def _rates(args: argparse.Namespace, config: Config, machine: Machine) -> Rates:
    from infinity.planner import Rates, rates_of, with_numbers

    rates = Rates()
    if args.profile is not None:
        from infinity.profiling import read_profile
        from infinity.zero.sizing import compute_dtype, state_format

        profile = read_profile(args.profile)
        device = profile["link"]["device"] if machine.discrete and profile["link"] else "cpu"
        if machine.discrete and device == "cpu" and args.flops is None:
            raise ConfigError(f"--profile {args.profile}: its machine had no device: give --flops and --link")
        dtype = str(compute_dtype(config)).removeprefix("torch.")
        rates = rates_of(profile, dtype=dtype, state_format=state_format(config), device=device)
    return with_numbers(
        rates,
        flop_per_s=args.flops,
        optimizer_params_per_s=args.optimizer_rate,
        disk_bytes_per_s=args.disk,
        link_bytes_per_s=args.link,
        collective_bytes_per_s=args.collectives,
    )


def _count(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, such as 70e12")
    return value
