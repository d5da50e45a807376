"""`infinity estimate`: show the memory that a training takes in every tier, and whether it fits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from infinity.cli.planning import Asked, Draft, add_arguments, draft_of, libraries_bytes, read_arguments
from infinity.config import format_size
from infinity.errors import CapacityError

if TYPE_CHECKING:
    from infinity.planner import Shape

EXIT_TOO_SMALL = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "estimate",
        help="show how much of each memory a training takes, and whether it fits",
        description="Does not allocate the model. Exits with 2 if a tier is too small.",
    )
    add_arguments(parser)
    parser.add_argument("--largest", action="store_true", help="also find the largest GPT that fits")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the estimate. Return the exit code."""
    asked = read_arguments(args, "estimate")
    largest = _largest(asked) if args.largest else None
    try:
        draft = draft_of(asked)
    except CapacityError:
        if args.largest and not args.json:
            print(_largest_line(largest))
        raise
    plan, needs = draft.plan, draft.needs
    if args.json:
        facts: dict[str, Any] = {"model": asked.name, "params": plan.params, "ranks": plan.machine.ranks}
        facts["precision"] = draft.asked.config.precision
        facts |= asdict(needs) | {"free_nvme_bytes": sum(drive.free_bytes for drive in asked.drives)}
        facts |= {"tokens": draft.work.tokens, "host_budget_bytes": plan.host_bytes, "problems": draft.problems}
        facts["verdict"] = verdict(draft)
        if args.largest:
            facts["largest_params"] = largest.params if largest is not None else None
        print(json.dumps(facts))
    else:
        print(f"model           {asked.name}: {plan.params:,} parameters")
        print("\n".join(estimate_lines(draft)))
        if args.largest:
            print(_largest_line(largest))
        print("\n".join([verdict(draft), *advice(draft)]))
    return report_problems(draft.problems)


def _largest(asked: Asked) -> Shape | None:
    from infinity.planner import largest_model

    host_bytes, libraries = asked.host_bytes, libraries_bytes()
    return largest_model(asked.config, asked.machine, asked.drives, host_bytes, asked.work_of, libraries, asked.tiles)


def _largest_line(largest: Shape | None) -> str:
    found = "none" if largest is None else f"{largest.params:,} parameters ({largest.layers}x{largest.width})"
    return f"largest here    {found}"


def estimate_lines(draft: Draft) -> list[str]:
    """Return the estimate as text."""
    from infinity.planner import states_on_device

    plan, needs = draft.plan, draft.needs
    where = "" if plan.machine.ranks == 1 else ", each rank"
    lines = []
    if plan.machine.discrete:
        lines.append(f"device memory   {format_size(needs.device_bytes)}{where}")
        lines.append(f"  optimizer states: {states_on_device(plan, draft.asked.config, draft.work)}")
    lines += [
        f"process memory  {format_size(needs.process_bytes)}{where}",
        f"  budget        {format_size(needs.budget_bytes)} of tiering.host_memory {format_size(plan.host_bytes)}",
        f"  libraries     {format_size(needs.libraries_bytes)} (Python, torch and other loaded libraries)",
    ]
    inside = "  (on the device)" if plan.machine.discrete else ""
    lines += [
        f"  activations   {format_size(needs.activation_bytes)}{inside}",
        f"  gradients     {format_size(needs.unit_grad_bytes)} that backward has made{inside}",
        f"nvme space      {format_size(needs.nvme_bytes)}{where}",
    ]
    if plan.machine.neighbours > 1:
        lines.append(f"  each machine  {format_size(needs.machine_nvme_bytes)}")
    return lines


def report_problems(found: list[str]) -> int:
    """Print why the training does not fit. Return the exit code."""
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return EXIT_TOO_SMALL if found else 0


# The verdict #


def verdict(draft: Draft) -> str:
    """Return in one line whether it fits, the scarcest memory, and what takes most of it."""
    used, there, name, part = _scarcest(draft)
    word = "does not fit" if draft.problems else "fits"
    return f"{word}: {_amount(used)} of {_amount(there)} GiB {name}; limited by {part}"


def _scarcest(draft: Draft) -> tuple[int, int, str, str]:
    """Return the entry of `_memories` of which the largest share is used."""
    return max(_memories(draft), key=lambda memory: memory[0] / max(1, memory[1]))


def _memories(draft: Draft) -> list[tuple[int, int, str, str]]:
    """Return for each memory of a machine: bytes needed, bytes available, its name, and what takes most of it."""
    asked, plan, needs = draft.asked, draft.plan, draft.needs
    machine = plan.machine
    beside = {"activations": needs.activation_bytes, "gradients": needs.unit_grad_bytes}
    # The minimum of the budget. More is optional: it only keeps states in memory instead of on the drive.
    budget = {"parameters and states in memory (tiering.host_memory)": min(plan.needs.least_bytes, needs.budget_bytes)}
    libraries = {"libraries": needs.libraries_bytes}
    host_parts = {**budget, **libraries} if machine.discrete else {**budget, **beside, **libraries}
    granted = needs.process_bytes + needs.granted_bytes - needs.budget_bytes
    found = [(granted * machine.neighbours, asked.host_bytes, "host", _most(host_parts))]
    if machine.device_bytes is not None:
        states = {"parameters and states on the device": plan.device_used_bytes}
        found.append((needs.device_bytes, machine.device_bytes, "device memory", _most({**states, **beside})))
    if needs.machine_nvme_bytes:
        free = sum(drive.free_bytes for drive in asked.drives)
        found.append((needs.machine_nvme_bytes, free, "NVMe", "states on the drives"))
    return found


def _most(parts: Mapping[str, int]) -> str:
    return max(parts, key=lambda name: parts[name])


def _amount(nbytes: int) -> str:
    gib = nbytes / (1 << 30)
    return f"{gib:.0f}" if gib >= 100 else f"{gib:.1f}" if gib >= 1 else f"{gib:.2f}"


def advice(draft: Draft) -> list[str]:
    """Return how to lower the memory of activations, if they are the limit."""
    if draft.asked.checkpointing or _scarcest(draft)[3] != "activations":
        return []
    lower = draft.asked.work_of(draft.asked.model, draft.plan, checkpointing=True)
    saved = draft.work.activation_bytes - lower.activation_bytes
    if saved < draft.work.activation_bytes / 4:
        return []
    return [
        f"advice: --checkpoint-activations saves {format_size(saved)}, and a shorter --seq-len saves activations, too"
    ]
