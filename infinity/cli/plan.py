"""`infinity plan`: predict the memory, transfers and step time of a training, without allocating it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from infinity.cli import faults
from infinity.cli.arguments import path_argument, size_argument
from infinity.cli.estimate import estimate_lines, report_problems
from infinity.cli.planning import Draft, add_arguments, draft_of, read_arguments
from infinity.cli.plots import plot_sweep
from infinity.config import format_size
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.planner import StepTime, TrainingPlan


_NAMED = 4  # units that are listed by name; the others are counted
_SHOWN_S = 0.005


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="predict what a step moves and computes, and how long it takes",
        description="Exits with 2 if a tier is too small, and with 1 if a simulated fault breaks a promise.",
    )
    add_arguments(parser)
    parser.add_argument("--tbw", type=size_argument, help="rated writes of a machine's drives, such as 600TB")
    parser.add_argument(
        "--sweep", choices=["tokens", "host-memory", "drives"], help="predict for a range of this quantity"
    )
    parser.add_argument("--plot", type=path_argument, help="draw the sweep into this image file")
    parser.add_argument(
        "--explain", action="store_true", help="list what is fetched and evicted at every use of a unit"
    )
    faults.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Return the exit code."""
    if args.plot is not None and args.sweep is None:
        raise ConfigError("--plot draws a sweep: give --sweep tokens, host-memory or drives, too")
    faults.check_arguments(args)
    draft = draft_of(read_arguments(args, "plan"))
    from infinity.planner import Sweep, filled_later, predict_step, states_on_device

    asked, plan, needs = draft.asked, draft.plan, draft.needs
    step = draft.step or predict_step(plan, asked.config, draft.work, asked.rates)
    later = filled_later(plan, asked.config, draft.work)
    sweep = Sweep(asked.model, asked.config, asked.machine, asked.rates, asked.seq_len, asked.checkpointing)
    points = sweep.over(args.sweep) if args.sweep else []
    if args.plot is not None:
        plot_sweep(args.plot, args.sweep, points)
    found = faults.simulate_faults(args, draft, later)
    if args.json:
        facts = {"model": asked.name, **plan.facts(), **asdict(needs), "disk_s_per_step": step.parts["disk"]}
        facts |= {
            "step": _step_facts(step, args.tbw),
            "sweep": [asdict(point) for point in points],
            "problems": draft.problems,
            "optimizer_states": states_on_device(plan, asked.config, draft.work),
            "filled_later": [plan.units[unit].name for unit in later],
            "emulated": asked.emulated or None,
            "measured": False,
            "faults": None if found is None else found.facts(),
        }
        print(json.dumps(facts))
        return _exit_code(draft, found)
    print(f"model           {asked.name}")
    if asked.emulated:
        print(f"machine         {asked.emulated}, emulated: all numbers are computed, none was measured on it")
    _print_sizes(plan)
    print("\n".join(estimate_lines(draft)))
    if later:
        print(
            f"filled later    {format_size(plan.sizing.shards.states_bytes(later))} of states, of {len(later)} units, "
            "move to the device after the first step; the step below is a later one"
        )
    if step.seconds:
        _print_step(step, args.tbw)
    if points:
        print(f"\n{args.sweep:<16}{'step':>10}{'tokens/s':>12}  bound by")
        for point in points:
            print(f"{point.label:<16}{point.step_s:>8.2f} s{point.tokens_per_s:>12.1f}  {point.bottleneck}")
    if args.explain:
        _print_steps(plan)
    if found is not None:
        print("\n".join(found.lines()))
    return _exit_code(draft, found)


def _exit_code(draft: Draft, found: faults.Faults | None) -> int:
    """Return the exit code, after printing why the training does not fit, if so."""
    code = report_problems(draft.problems)
    return 1 if found is not None and found.broken else code


def _step_facts(step: StepTime, rated_bytes: int | None) -> dict[str, Any]:
    wear = step.wear(rated_bytes or 0)
    return {
        "step_s": step.seconds,
        "parts_s": dict(step.parts),
        "busy_s": dict(step.busy),
        "phases_s": dict(step.phases),
        "waits_s": dict(step.waits),
        "unknown": step.unknown,
        "bottleneck": step.bottleneck,
        "tokens": step.tokens,
        "tokens_per_s": step.tokens_per_s if step.seconds else None,
        "flop_per_s": step.flop_per_s,
        "efficiency": step.efficiency,
        "break_even_tokens": step.break_even_tokens,
        "written_bytes_per_day": wear[0],
        "days_to_rated": wear[1] if rated_bytes and wear[0] else None,
    }


def _print_sizes(plan: TrainingPlan) -> None:
    coming = sum(unit.offloaded for unit in plan.units)
    print(f"parameters      {plan.params:,} in {len(plan.units)} units, of which {coming} are fetched and evicted")
    print(f"state format    {plan.sizing.layout.format}; updates: {plan.sizing.schedule.value}")
    print(
        f"host memory     {format_size(plan.host_bytes)} (at least {format_size(plan.needs.least_bytes)}, "
        f"more than {format_size(plan.needs.most_bytes)} has no effect)"
    )
    print(f"  parameters    {format_size(plan.split.params_bytes + plan.split.homes_bytes)}")
    print(f"  gradients     {format_size(plan.split.grads_bytes)}")
    print(f"  states kept   {format_size(plan.split.states_bytes)}")
    print(f"  tile ring     {format_size(plan.split.ring_bytes)}")
    if plan.split.images_bytes:
        print(f"  undo log      {format_size(plan.split.images_bytes)}")
    print(f"  always there  {format_size(plan.needs.always_bytes)}")
    there, traffic = plan.updated_on_device, plan.traffic
    if there:
        states_bytes = plan.sizing.shards.states_bytes(plan.sizing.on_device)
        trained = sum(1 for unit in plan.sizing.partition.units if unit.trainable_numel)
        names = ", ".join(there[:_NAMED]) + (f" and {len(there) - _NAMED} more" if len(there) > _NAMED else "")
        print(
            f"on the device   {format_size(states_bytes)} of states, of {len(there)} units "
            f"of {trained}, which are updated there: {names}"
        )
    print(
        f"disk, per step  {format_size(traffic.read_bytes)} read ({traffic.read_bytes / plan.params:.2f} B/parameter), "
        f"{format_size(traffic.write_bytes)} written ({traffic.write_bytes / plan.params:.2f})"
    )
    if plan.machine.ranks > 1:
        apart = f", {format_size(traffic.averaged)} averaged over replicas" if traffic.averaged else ""
        print(
            f"ranks, per step {format_size(traffic.gathered)} gathered, {format_size(traffic.reduced)} reduced{apart}"
        )


def _print_step(step: StepTime, rated_bytes: int | None) -> None:
    least = "at least " if step.unknown else ""
    print(f"step            {least}{step.seconds:.2f} s, {step.tokens_per_s:,.1f} tokens/s; bound by {step.bottleneck}")
    if step.unknown:
        print(f"                without {', '.join(step.unknown)}: give --profile, or their rates")
    for name, seconds in step.parts.items():
        if seconds:
            print(f"  {name:<14}{seconds:.2f} s if alone")
    print(f"  in order      {', '.join(f'{name} {seconds:.2f} s' for name, seconds in step.phases.items())}")
    waits = [f"{part} {seconds:.2f} s" for part, seconds in step.waits.items() if seconds >= _SHOWN_S]
    if waits:
        print(f"  computing waits for {', '.join(waits)}")
    if step.parts["compute"]:
        print(f"computing       {step.efficiency:.0%} of the step, {_flops(step.flop_per_s)} a device")
        print(f"break-even      {step.break_even_tokens:,.0f} tokens a step (now {step.tokens:,}) hide the rest")
    day, days = step.wear(rated_bytes or 0)
    if day and not step.unknown:
        rated = f", {days:,.0f} days to {format_size(rated_bytes)}" if rated_bytes else ""
        print(f"drive wear      {format_size(step.write_bytes)} a step, {format_size(day)} a day{rated}")


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.2f} GFLOP/s"


def _print_steps(plan: TrainingPlan) -> None:
    names = [unit.name for unit in plan.units]
    print("\nat each use, forward and backward; the model is assumed to run through its units in order")
    for step in plan.steps.steps:
        notes = [f"evict {names[unit]}" for unit in step.before or ()]
        if step.before is not None:
            notes.append("fetch it now")
        notes += [f"{action} {names[unit]}" for action, unit in step.actions]
        print(f"  {names[step.unit]:<32} {', '.join(notes)}".rstrip())
