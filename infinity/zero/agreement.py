"""Compare the values that must be alike on all ranks of a run, before anything is built.

Rank 0 is the reference. The ranks first exchange one digest a topic. The values follow only if digests differ, so that
the error can name the difference.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity import __version__
from infinity.config import Config, format_size
from infinity.errors import ConfigError
from infinity.zero.model_parts import local_part
from infinity.zero.ranks import Ranks
from infinity.zero.shared_directory import directory_leaders

Facts = Mapping[str, Any]  # plain values by name

# Keys that may differ between machines: memory, drives, and how they are read.
_LOCAL = (
    "aio.",
    "communication.timeout_s",
    "monitors.",
    "source",
    "tiering.activation_memory_bytes",
    "tiering.device_memory_bytes",
    "tiering.host_memory_bytes",
    "tiering.io_backend",
    "tiering.nvme",
    "tiering.timeline",
    "zero.offload_optimizer.nvme_path",
    "zero.offload_param.nvme_path",
)
_PLAIN = (bool, int, float, str, type(None))

_log = logging.getLogger(__name__)


def versions() -> Facts:
    """Return the versions that decide how values are laid out and sent."""
    return {"torch": str(torch.__version__), "infinity": __version__}


def configuration_facts(config: Config) -> Facts:
    """Return the configuration's values, except keys that may differ between machines."""
    return {name: value for name, value in plain_values(config).items() if not name.startswith(_LOCAL)}


def model_facts(model: nn.Module) -> Facts:
    """Return parameters and buffers in order, and the classes of the modules."""
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        kind = "trained" if param.requires_grad else "frozen"
        found[f"parameter `{name}`"] = f"{kind}, of shape {tuple(local_part(param).shape)}"
    found |= {f"buffer `{name}`": f"of shape {tuple(buffer.shape)}" for name, buffer in model.named_buffers()}
    found |= {f"module `{name}`": type(module).__name__ for name, module in model.named_modules()}
    return found | {"order of parameters": _digest([name for name, _ in model.named_parameters()])}


def optimizer_facts(groups: Sequence[Any], members: Mapping[str, int]) -> Facts:
    """Return the hyper-parameters of each group, which is a mapping or a rule, and the group of each parameter."""
    found: dict[str, Any] = {f"group of `{name}`": index for name, index in members.items()}
    for index, group in enumerate(groups):
        found |= {f"`{key}` of group {index}": value for key, value in plain_values(group).items() if key != "params"}
    return found


def agree(ranks: Ranks, topics: Mapping[str, Facts], advice: str = "") -> None:
    """Check that all ranks have the same facts. All of them call this together.

    Args:
        topics: facts by topic, such as `configuration`; the same topics on all ranks.
        advice: the end of the message.

    Raises:
        ConfigError: facts differ; names the first difference of each rank from rank 0.
    """
    digests = ranks.of_all([_digest(facts) for facts in topics.values()])
    differing = [topic for index, topic in enumerate(topics) if any(of[index] != digests[0][index] for of in digests)]
    if not differing:
        return
    of_ranks = ranks.of_all({topic: topics[topic] for topic in differing})
    found = [
        f"rank {rank} differs in its {topic}: {_difference(facts[topic], of_ranks[0][topic])}"
        for topic in differing
        for rank, facts in enumerate(of_ranks)
        if facts[topic] != of_ranks[0][topic]
    ]
    if not found:
        return  # for example, 1 and 1.0 have different digests
    more = f" ({len(found) - 3} more such)" if len(found) > 3 else ""
    raise ConfigError(
        f"all ranks must be given the same configuration, model and optimizer, but {'; '.join(found[:3])}{more}{advice}"
    )


def tell_of_machines(ranks: Ranks, config: Config) -> None:
    """Warn once about budgets that differ between machines, and about shared drives. All ranks call this together."""
    budgets = ranks.of_all((config.tiering.host_memory_bytes, config.tiering.device_memory_bytes))
    differing = next((rank for rank, own in enumerate(budgets) if own != budgets[0]), None)
    if ranks.rank == 0 and differing is not None:
        _log.warning(
            "rank %d has budgets of its own: host memory %s and device memory %s, where rank 0 has %s and %s; "
            "decisions that all ranks share follow from the smallest",
            differing,
            *(format_size(size) if size is not None else "auto" for size in (*budgets[differing], *budgets[0])),
        )
    if len({process.machine for process in ranks.processes}) <= 1:
        return
    paths = [nvme.path for nvme in config.tiering.nvme]
    for index in range(ranks.least(len(paths))):
        _tell_of_shared_drive(ranks, paths[index])


def _tell_of_shared_drive(ranks: Ranks, path: Path) -> None:
    """Warn about a directory for swap files that several machines share: it is on no machine's own drive."""
    if ranks.any(not path.is_dir()):
        return  # reported when it is opened
    machines = [process.machine for process in ranks.processes]
    for rank, leader in enumerate(directory_leaders(ranks, path)):
        if machines[rank] != machines[leader]:
            if ranks.rank == 0:
                _log.warning(
                    "%s is one directory for ranks %d and %d, which are on two machines: put swap files on a drive of "
                    "each machine, because a network file system is slow if all machines use it at once",
                    path,
                    leader,
                    rank,
                )
            return


def _difference(here: Facts, first: Facts) -> str:
    for name in (*first, *here):
        if name not in here:
            return f"it has no {name}, which rank 0 has"
        if name not in first:
            return f"it has {name}, which rank 0 does not have"
        if here[name] != first[name]:
            return f"{name} is {here[name]!r} and {first[name]!r} on rank 0"
    return "the order of its values"


def plain_values(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return plain values by their dotted names; skip other values, such as tensors."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, (list, tuple)) and not all(isinstance(item, _PLAIN) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= plain_values(item, f"{prefix}.{key}" if prefix else str(key))
        return found
    if isinstance(value, (list, tuple)):
        return {prefix: list(value)}
    if isinstance(value, Path):
        return {prefix: str(value)}
    return {prefix: value} if isinstance(value, _PLAIN) else {}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
