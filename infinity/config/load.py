"""Read a JSON file or a mapping, and return a frozen `Config`."""

from __future__ import annotations

import copy
import difflib
import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from infinity.config.edit import AN_OBJECT, edited, remove
from infinity.config.keys import CHOICES, DEPRECATED, NO_EFFECT, REFUSED, is_switched_off
from infinity.config.read import check_values, read_json
from infinity.config.resolve import resolve
from infinity.config.resolved import Config
from infinity.config.schema import RootSection
from infinity.config.values import shown, switch
from infinity.errors import ConfigError

_log = logging.getLogger(__name__)

_COMMENTS = ("_comment", "//", "#", "$schema")  # prefixes of keys that people use for comments in JSON

ConfigSource = str | Path | Mapping[str, Any]


def load_config(source: ConfigSource, *, auto: Mapping[str, Any] | None = None, world_size: int = 1) -> Config:
    """Parse, check and resolve a configuration.

    Args:
        source: path of a JSON file, or its content as a mapping. Dotted keys stand for nested ones.
        auto: values for keys that are "auto" in the source, by dotted path. All other "auto" keys get their defaults,
            or values that follow from other keys. A log line names each value.
        world_size: number of ranks that share the global batch.

    Raises:
        ConfigError: a key is unknown or refused, a value is of the wrong kind, or sizes contradict one another. The
            message names the key and says what to do.
    """
    values = _nest(_read(source))
    _lift_aio(values)
    _fill(values, auto or {})
    given = copy.deepcopy(values)
    _classify(values)
    try:
        root = RootSection.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from None
    return replace(resolve(root, world_size), source=given)


# Reading #


def _read(source: ConfigSource) -> dict[str, Any]:
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise ConfigError(
            f"the configuration is a {type(source).__name__}; give a JSON file's path, or its content as a dict"
        )
    values = dict(source) if isinstance(source, Mapping) else read_json(source)
    check_values(values)
    return values


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `values` with dotted keys (`zero_optimization.stage`) turned into nested ones."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(f"configuration key {key!r} is not a string")
        if key.startswith(_COMMENTS):
            _log.info("configuration key %s is taken as a comment", key)
            continue
        head, _, rest = key.partition(".")
        if rest:
            value = {rest: value}
        nested[head] = _merge(nested.get(head), _nest(value)) if isinstance(value, Mapping) else value
    return nested


def _lift_aio(values: dict[str, Any]) -> None:
    """Move `aio` from `zero_optimization` to the top level. Guides to ZeRO-Infinity print it in the wrong place."""
    section = values.get("zero_optimization")
    if not isinstance(section, dict) or "aio" not in section:
        return
    if "aio" in values:
        raise ConfigError("zero_optimization.aio and aio are both given; remove zero_optimization.aio")
    values["aio"] = section.pop("aio")
    _log.info("configuration section zero_optimization.aio is taken as aio, which belongs to the top of the file")


def _merge(below: Any, above: dict[str, Any]) -> dict[str, Any]:
    """Merge two values section by section. Values of `above` override those of `below`."""
    if not isinstance(below, dict):
        return above
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _merge(merged.get(key), value) if isinstance(value, dict) else value
    return merged


def _fill(values: dict[str, Any], auto: Mapping[str, Any]) -> None:
    """Set the given values of keys that are "auto". Refuse a value for any other key."""
    for path, value in auto.items():
        *parents, last = path.split(".")
        section: Any = values
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if not isinstance(section, dict) or section.get(last) != "auto":
            found = section.get(last) if isinstance(section, dict) else None
            raise ConfigError(
                f"a value is given for {path}, which is {shown(found)} in the configuration and not 'auto'"
            )
        section[last] = value
        _log.info("configuration key %s is auto: %s was given", path, value)


def with_values(source: ConfigSource, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a configuration with new values for some keys, given by dotted path.

    Raises:
        ConfigError: the source cannot be read, or the value of a section is no object.
    """
    return edited(_nest(_read(source)), changes)


# Keys #


class Key(NamedTuple):
    """The entry of the schema at a dotted path: a section's class, or the default of a value."""

    section: type[BaseModel] | None
    default: Any


def known_keys(section: type[BaseModel] = RootSection, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield (dotted path, entry) of every key in the schema. A key with two spellings is yielded twice."""
    for name, field in section.model_fields.items():
        candidates = (field.annotation, *get_args(field.annotation))
        inner = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        for spelling in filter(None, (name, field.alias)):
            yield prefix + spelling, Key(inner, field.default)
            if inner is not None:
                yield from known_keys(inner, f"{prefix}{spelling}.")


def _classify(values: dict[str, Any]) -> None:
    """Check all keys of `values`, and keep only those of the schema. Remove "auto" and null, so that defaults apply."""
    known = dict(known_keys())
    sections = {path.rpartition(".")[0] for path in (*known, *NO_EFFECT, *REFUSED)}
    for path, value in list(_entries(values, sections)):
        if path in REFUSED:
            if not is_switched_off(path, value):
                raise ConfigError(f"{path} is {shown(value)}: {REFUSED[path]}; remove the key")
            _log.info("configuration key %s is ignored: its feature is not supported, but it is switched off", path)
            remove(values, path)
        elif path in NO_EFFECT:
            _check_choice(path, value)
            _log.info("configuration key %s has no effect here: %s", path, NO_EFFECT[path])
            remove(values, path)
        elif path in DEPRECATED:
            remove(values, path)
            if value not in (None, "auto") and switch(path, value):
                _offload_to_cpu(values, path)
        elif path in known:
            if value == "auto" and known[path].default not in (None, "auto"):
                _log.info("configuration key %s is auto: %s, the default", path, known[path].default)
            if value is None or value == "auto":
                remove(values, path)
        elif path in sections:  # a section without a key of the schema
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path} is {shown(value)}; {AN_OBJECT}")
            remove(values, path)
        else:
            raise ConfigError(_unknown(path, known))
    _check_spellings(values, RootSection)


def _offload_to_cpu(values: dict[str, Any], path: str) -> None:
    """Replace a deprecated switch by its section. Refuse it if the section is given as well."""
    section, _, name = DEPRECATED[path].rpartition(".")
    if values[section].get(name) not in (None, "auto"):
        raise ConfigError(f"{path} is deprecated and {DEPRECATED[path]} is given as well; remove {path}")
    values[section][name] = {"device": "cpu"}
    _log.info("configuration key %s is deprecated: %s.device is cpu", path, DEPRECATED[path])


def _entries(values: Mapping[str, Any], sections: Container[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of all keys, innermost first. Only mappings in `sections` are entered."""
    for key, value in values.items():
        path = prefix + key
        if isinstance(value, Mapping) and path in sections:
            yield from _entries(value, sections, path + ".")
        yield path, value


def _check_spellings(values: Mapping[str, Any], section: type[BaseModel], prefix: str = "") -> None:
    for name, field in section.model_fields.items():
        if field.alias is not None and name in values and field.alias in values:
            raise ConfigError(f"{prefix}{name} and {prefix}{field.alias} are two names of one key; remove one")
        inner = values.get(name)
        if (
            isinstance(inner, Mapping)
            and isinstance(field.annotation, type)
            and issubclass(field.annotation, BaseModel)
        ):
            _check_spellings(inner, field.annotation, f"{prefix}{name}.")


def _check_choice(path: str, value: Any) -> None:
    choices = CHOICES.get(path)
    if choices is not None and value is not None and str(value).lower() not in map(str.lower, choices):
        raise ConfigError(f"{path} is {shown(value)}; choose one of {', '.join(choices)}")


def _unknown(path: str, known: Iterable[str]) -> str:
    everything = [*known, *NO_EFFECT, *REFUSED, *DEPRECATED]
    parent = path.rpartition(".")[0]
    siblings = [key for key in everything if key.rpartition(".")[0] == parent]
    nearest = difflib.get_close_matches(path, siblings, 1, 0.6) or difflib.get_close_matches(path, everything, 1, 0.6)
    hint = f"did you mean `{nearest[0]}`?" if nearest else "docs/configuration.md lists the known keys"
    return f"unknown configuration key `{path}`: {hint}"


def _first_problem(error: ValidationError) -> str:
    """Return pydantic's first error as a message with the path in the file, without names of our classes."""
    problem = error.errors()[0]
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown configuration key `{path}`: docs/configuration.md lists the known keys"
    if problem["type"] == "missing":
        return f"{path} is missing; add it, or remove the section"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{path} is {shown(problem['input'])}; {AN_OBJECT}"
    demand = problem["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    value = shown(problem["input"])
    return f"{path}: {demand}" if demand.startswith(value) else f"{path} is {value}; {demand}"
