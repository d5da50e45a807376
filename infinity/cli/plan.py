"""`infinity plan`: what a training will need and do, without allocating any of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.cli.packages import needed_packages
from infinity.config import format_size, load_config, parse_size, with_values
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.planner import TrainingPlan


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("plan", help="show what a training will need and do, before it starts")
    parser.add_argument("--model", required=True, help="as `infinity train --model` takes it")
    parser.add_argument("--config", type=Path, required=True, help="configuration (JSON)")
    parser.add_argument("--host-memory", help="try this budget in place of the configuration's, for example 2GiB")
    parser.add_argument("--disk", help="bytes a second that the drives move (2.5GB): adds a least time of a step")
    parser.add_argument("--explain", action="store_true", help="list what is fetched and evicted at every use")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    with needed_packages("plan"):
        from infinity.cli.training.models import build_model  # noqa: PLC0415  (torch takes seconds)
        from infinity.planner import plan_training  # noqa: PLC0415

    changes = {} if args.host_memory is None else {"tiering.host_memory": args.host_memory}
    config = load_config(with_values(args.config, changes))
    try:
        rate = None if args.disk is None else parse_size(args.disk)
    except ValueError as error:
        raise ConfigError(f"--disk: {error}") from error
    plan = plan_training(build_model(args.model)[0], config)
    seconds = None if not rate else (plan.read_bytes + plan.write_bytes) / rate
    if args.json:
        print(json.dumps({**plan.facts(), "disk_s_per_step": seconds}))
        return 0
    _print_sizes(plan, seconds)
    if args.explain:
        _print_steps(plan)
    return 0


def _print_sizes(plan: TrainingPlan, seconds: float | None) -> None:
    coming = sum(unit.offloaded for unit in plan.units)
    print(f"parameters      {plan.params:,} in {len(plan.units)} units, of which {coming} come and go")
    print(f"state format    {plan.state_format}; updates: {plan.update_schedule}")
    print(
        f"host memory     {format_size(plan.host_bytes)} (at least {format_size(plan.needs.least_bytes)}, "
        f"at most {format_size(plan.needs.most_bytes)} is of use)"
    )
    print(f"  parameters    {format_size(plan.split.params_bytes)}")
    print(f"  gradients     {format_size(plan.split.grads_bytes)}")
    print(f"  states kept   {format_size(plan.split.states_bytes)}")
    print(f"  tile ring     {format_size(plan.split.ring_bytes)}")
    print(f"  always there  {format_size(plan.needs.always_bytes)}")
    print(f"nvme space      {format_size(plan.nvme_bytes)}")
    print(
        f"disk, per step  {format_size(plan.read_bytes)} read ({plan.read_bytes / plan.params:.2f} B/parameter), "
        f"{format_size(plan.write_bytes)} written ({plan.write_bytes / plan.params:.2f})"
    )
    if seconds is not None:
        print(f"                at least {seconds:.1f} s")


def _print_steps(plan: TrainingPlan) -> None:
    names = [unit.name for unit in plan.units]
    print("\nat each use, forward and backward; the model is taken to run through its units in order")
    for step in plan.steps.steps:
        notes = [f"evict {names[unit]}" for unit in step.before or ()]
        if step.before is not None:
            notes.append("fetch it now")
        notes += [f"{action} {names[unit]}" for action, unit in step.actions]
        print(f"  {names[step.unit]:<32} {', '.join(notes)}".rstrip())
