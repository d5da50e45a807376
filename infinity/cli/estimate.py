"""`infinity estimate`: bytes on every tier and of the process, and whether this machine has them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from infinity.cli.planning import Draft, add_arguments, lay_out
from infinity.config import format_size

EXIT_TOO_SMALL = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "estimate",
        help="bytes of a training on every tier, and whether they are there",
        description="Exits with 2 where a tier is too small.",
    )
    add_arguments(parser)
    parser.add_argument("--largest", action="store_true", help="find the largest GPT whose states fit, too")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the estimate; returns the exit code."""
    draft = lay_out(args, "estimate")
    from infinity.planner import largest_model  # noqa: PLC0415  (torch takes seconds)

    asked, plan, needs = draft.asked, draft.plan, draft.needs
    largest = largest_model(asked.config, asked.machine, asked.drives) if args.largest else None
    if args.json:
        facts: dict[str, Any] = {"model": asked.name, "params": plan.params, "ranks": plan.machine.ranks}
        facts |= asdict(needs) | {"free_nvme_bytes": sum(drive.free_bytes for drive in asked.drives)}
        facts |= {"tokens": draft.work.tokens, "host_budget_bytes": plan.host_bytes, "problems": draft.problems}
        if args.largest:
            facts["largest_params"] = largest.params if largest is not None else None
        print(json.dumps(facts))
    else:
        print(f"model           {asked.name}: {plan.params:,} parameters")
        print("\n".join(estimate_lines(draft)))
        if args.largest:
            print(f"largest here    {'none' if largest is None else f'{largest.params:,} parameters, by their states'}")
    return report_problems(draft.problems)


def estimate_lines(draft: Draft) -> list[str]:
    """For people."""
    from infinity.planner import states_on_device  # noqa: PLC0415  (torch takes seconds)

    plan, needs = draft.plan, draft.needs
    where = "" if plan.machine.ranks == 1 else ", each rank"
    lines = []
    if plan.machine.discrete:
        lines.append(f"device memory   {format_size(needs.device_bytes)}{where}")
        lines.append(f"  optimizer states: {states_on_device(plan, draft.asked.config, draft.work)}")
    lines += [
        f"process memory  {format_size(needs.process_bytes)}{where}",
        f"  budget        {format_size(needs.budget_bytes)} of tiering.host_memory {format_size(plan.host_bytes)}",
        f"  libraries     {format_size(needs.libraries_bytes)} (Python, torch and what is loaded now)",
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
    """Say why it does not fit; returns the exit code."""
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return EXIT_TOO_SMALL if found else 0
