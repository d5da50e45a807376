"""Makes the parts of the reference that follow from the code: commands, the Python API, configuration keys.

    python tools/reference.py commands|api|keys|no_effect|refused    # prints a part as Markdown

`tools/docs_site.py` puts a part where a page of docs/ has `<!-- generated: NAME -->`.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from importlib import import_module
from typing import Any

from infinity.cli.main import make_parser
from infinity.config.keys import NO_EFFECT, REFUSED
from infinity.config.schema import RootSection

COLUMNS = "88"  # of the help texts: what a page of the site has room for
MODULES: dict[str, tuple[str, ...]] = {
    "infinity": ("initialize", "from_pretrained", "load_config", "init_distributed", "add_config_arguments"),
    "infinity.zero": ("Init", "GatheredParameters", "TiledLinear"),
    "infinity.optim": ("AdamW", "Adam"),
    "infinity.integrations": (
        *("pretrained_model", "save_pretrained", "save_adapters", "load_adapters"),
        *("full_fp32_values", "report_tiers"),
    ),
    "infinity.checkpoint": ("convert", "latest_tag"),
    "infinity.telemetry": ("StepStats",),
    "infinity.errors": (
        *("InfinityError", "CapacityError", "CheckpointError", "ConfigError"),
        *("NonFiniteError", "RankError", "StorageError"),
    ),
}
ENGINE: dict[str, tuple[str, ...]] = {  # what a training loop uses; the other names are those of DeepSpeed's engine
    "Training": (
        *("forward", "backward", "scale", "step", "train_batch", "driven_step", "zero_grad", "no_sync"),
        *("coalesce_grad_reduction", "set_gradient_accumulation_boundary", "get_global_grad_norm", "get_lr"),
        *("global_steps", "micro_steps", "skipped_steps", "synchronize", "close", "destroy"),
    ),
    "Parameters": ("named_parameters", "parameters", "save_16bit_model", "compile"),
    "Checkpoints": (
        *("save_checkpoint", "load_checkpoint", "wait_checkpoint", "saving"),
        *("resume", "keep_with_steps", "commit", "end_run"),
    ),
    "Watching": ("stats", "tiers", "tell", "monitor"),
}
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Source):(.*)$")
_NAMES = {"Args": "Arguments"}


def commands() -> str:
    """Return the help of every command, and of its own commands."""
    os.environ["COLUMNS"] = COLUMNS
    parser, _ = make_parser()
    return "\n\n".join(_helps(parser, level=2))


def _helps(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    for action in parser._actions:  # argparse has no public way to its sub-commands
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield f"{'#' * level} {inner.prog}\n\n```text\n{inner.format_help().rstrip()}\n```"
                yield from _helps(inner, level + 1)


def api() -> str:
    """Return signatures and docstrings of the public names."""
    parts = []
    for module, names in MODULES.items():
        parts.append(f"## {module}")
        parts += [_described(f"{module}.{name}", getattr(import_module(module), name)) for name in names]
        if module == "infinity":
            for title, members in ENGINE.items():
                engine = getattr(import_module(module), "Engine")  # noqa: B009  (the package loads it when asked)
                parts.append(f"## infinity.Engine: {title.lower()}")
                parts += [_described(f"engine.{name}", getattr(engine, name)) for name in members]
    return "\n\n".join(parts)


def _described(name: str, thing: Any) -> str:
    signature = ""
    plain = inspect.isclass(thing) and (issubclass(thing, Exception) or is_dataclass(thing))
    if not isinstance(thing, property) and not plain:
        signature = f"\n\n```python\n{_call(name, thing)}\n```"
    return f"### {name}{signature}\n\n{_markdown(inspect.getdoc(thing) or '')}"


def _call(name: str, thing: Any) -> str:
    """Return the call as it is written, without `self` and types; an argument a line if it is long."""
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    shown = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    shown = [re.sub(r"<class '[\w.]*\.(\w+)'>", r"\1", each) for each in shown]
    flat = f"{name}({', '.join(shown)})"
    return flat if len(flat) <= int(COLUMNS) else f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + ")"


def _markdown(doc: str) -> str:
    """Return a docstring with its sections as lists."""
    lines: list[str] = []
    within = False
    for line in doc.split("\n"):
        if section := _SECTION.match(line):
            lines += [f"{_NAMES.get(section[1], section[1])}:{section[2]}", ""]
        elif within and (item := re.match(r"    ([\w*][\w*, ]*): (.*)$", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            lines.append(line.removeprefix("    ") if within else line)
        within = (within or section is not None) and (line[:1] in ("", " ") or section is not None)
    return "\n".join(lines)


def keys() -> str:
    """Return a table of every key that is honoured, with its values and its default, from the schema."""
    schema = RootSection.model_json_schema(by_alias=False)
    rows = [f"| `{key}` | {values} | {default} |" for key, values, default in _keys(schema, schema["$defs"], "")]
    return "\n".join(["| key | values | default |", "|---|---|---|", *rows])


def _keys(section: Mapping[str, Any], sections: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section["properties"].items():
        inner = field.get("$ref") or field.get("items", {}).get("$ref")
        inner = inner or next((each["$ref"] for each in field.get("anyOf", ()) if "$ref" in each), None)
        if inner is not None:
            dots = "[]." if field.get("type") == "array" else "."
            yield from _keys(sections[inner.rpartition("/")[2]], sections, f"{prefix}{name}{dots}")
        else:
            default = field.get("default")
            yield f"{prefix}{name}", _values(field), "" if default in (None, [], {}) else f"`{_shown(default)}`"


def _values(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(filter(None, map(_values, field["anyOf"]))))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    limits = (("minimum", ">= "), ("exclusiveMinimum", "> "), ("gt", "> "), ("maximum", "<= "), ("le", "<= "))
    limited = [f"{sign}{field[limit]}" for limit, sign in (*limits, ("exclusiveMaximum", "< ")) if limit in field]
    return " ".join(filter(None, ["" if field["type"] == "null" else field["type"], ", ".join(limited)]))


def _shown(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _reasons(table: Mapping[str, str]) -> str:
    return "\n".join(["| key | why |", "|---|---|", *(f"| `{key}` | {reason} |" for key, reason in table.items())])


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "api": api,
    "keys": keys,
    "no_effect": partial(_reasons, NO_EFFECT),
    "refused": partial(_reasons, REFUSED),
}
_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """Return the text of a page with its generated parts.

    Raises:
        KeyError: the page names a part that does not exist.
    """
    return _MARK.sub(lambda mark: PARTS[mark[1]](), page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print a generated part of the reference.")
    parser.add_argument("part", choices=PARTS)
    print(PARTS[parser.parse_args().part]())
