"""What libraries that are installed take from `deepspeed`: every import and attribute of their sources, looked up.

Started with the namespace on its path; prints what is missing, and how much there is.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

Name = tuple[str, ...]


def sources(package: str) -> Iterator[tuple[str, ast.Module]]:
    """Its files that mention deepspeed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    root = Path(spec.origin).parent
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "deepspeed" in text:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other people's escape sequences
                yield str(file.relative_to(root.parent)), ast.parse(text)


def chain(node: ast.expr) -> Name:
    """`a.b.c` as its names; empty for anything else."""
    if isinstance(node, ast.Name):
        return (node.id,)
    inner = chain(node.value) if isinstance(node, ast.Attribute) else ()
    return (*inner, node.attr) if isinstance(node, ast.Attribute) and inner else ()


def asked(tree: ast.Module) -> Iterator[Name]:
    """What a file takes from `deepspeed`, by the names of modules and attributes."""
    aliases: dict[str, Name] = {}
    bound = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "deepspeed":
                    bound = True
                    yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            module = tuple(node.module.split("."))
            if module[0] == "deepspeed":
                for alias in node.names:
                    aliases[alias.asname or alias.name] = (*module, alias.name)
                    yield (*module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = chain(node)
            if names and names[0] == "deepspeed" and bound:
                yield names
            elif names and names[0] in aliases:
                yield (*aliases[names[0]], *names[1:])


def found(names: Name) -> Any:
    """What the names lead to.

    Raises:
        AttributeError: nothing.
    """
    here: Any = deepspeed
    for index, name in enumerate(names[1:], 2):
        try:
            here = getattr(here, name)
        except AttributeError:
            try:
                here = importlib.import_module(".".join(names[:index]))
            except ModuleNotFoundError:
                raise AttributeError(".".join(names[:index])) from None
    return here


def attributes(tree: ast.Module, prefix: str) -> Iterator[str]:
    """Attributes of this beginning that a file reads of anything, by name or by `getattr` and `hasattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith(prefix):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
            second = node.args[1] if len(node.args) > 1 else None
            if isinstance(second, ast.Constant) and str(second.value).startswith(prefix):
                yield str(second.value)


def of_engines(tree: ast.Module) -> Iterator[str]:
    """What a file reads of something that it calls an engine."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = chain(node)
            if len(names) > 1 and names[-2] in {"engine", "deepspeed_engine", "_deepspeed_engine"}:
                yield names[-1]


def main(packages: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    there, missing = 0, []
    for package in packages:
        for file, tree in sources(package):
            for names in sorted(set(asked(tree))):
                try:
                    found(names)
                    there += 1
                except (AttributeError, ImportError) as error:
                    missing.append(f"{'.'.join(names)} in {file}: {error}")
            for name in sorted(set(attributes(tree, "ds_"))):
                if hasattr(model[0].weight, name):
                    there += 1
                else:
                    missing.append(f"param.{name} in {file}")
            for name in sorted(set(of_engines(tree))):
                if hasattr(engine, name):
                    there += 1
                else:
                    missing.append(f"engine.{name} in {file}")
    engine.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    print("RESULT", json.dumps({"there": there, "missing": missing}))


if __name__ == "__main__":
    main(sys.argv[1:])
