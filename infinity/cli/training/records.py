"""Reads records of training data in common formats, checks them, and converts them to three forms.

A record becomes `text`; `messages` (with `tools`); or `prompt` and `completion`, of which only the completion is
learned. Alpaca's records become both of the latter: messages for tokenizers with a chat template, and a prompt in the
words of the Alpaca project for others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity.cli.training.data import readable
from infinity.errors import ConfigError

LINES = ".jsonl"
_JSON = ".json"  # a list of records, or one record a line
_ENCODING = "utf-8-sig"  # some editors write a byte order mark
_READ_CHARS = 1 << 20
_GAP = re.compile(r"\s*,?\s*")  # between two entries of a list
_KINDS = {
    "text": ("text",),
    "messages": ("messages",),
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction", "output"),
    "prompt and completion": ("prompt", "completion"),
}
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
# The prompts of the Alpaca project (github.com/tatsu-lab/stanford_alpaca).
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)

Record = dict[str, Any]


def holds_records(path: Path) -> bool:
    """Whether the file has records, not plain text: by its name, or because it is JSON that begins with an object."""
    return path.suffix == LINES or (path.suffix == _JSON and _begin(path).startswith(("{", "[{")))


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield every record in one of the forms above, with its place for messages.

    Raises:
        ConfigError: the file cannot be read, or a record is malformed; with file and line, or number in a list.
    """
    with readable(path):
        for place, record in _listed(path) if _begin(path).startswith("[") else _lines(path):
            yield place, _formed(place, record)


# Files #


def _begin(path: Path) -> str:
    """Return the first characters of the file, without whitespace."""
    with readable(path), path.open(encoding=_ENCODING, errors="replace") as file:
        return "".join(file.read(1024).split())


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield place, json.loads(raw)
            except (ValueError, RecursionError) as error:  # includes errors of bytes that are not UTF-8
                hint = "" if path.suffix == LINES else "; give one list of records, or one record a line"
                raise ConfigError(f"{place} is no JSON: {error}{hint}") from error


def _listed(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a list, one in memory at a time."""
    decoder = json.JSONDecoder()
    number = at = 0
    with path.open(encoding=_ENCODING) as file:
        try:
            text = file.read(_READ_CHARS).lstrip().removeprefix("[")
            while True:
                gap = _GAP.match(text, at)
                assert gap is not None  # it also matches the empty text
                at = gap.end()
                try:
                    entry, at = decoder.raw_decode(text, at)
                except ValueError as error:
                    more = file.read(max(_READ_CHARS, len(text) - at))  # doubles a long entry: the work stays linear
                    if more or at:  # without more text, the same error again, with positions within the record
                        text, at = text[at:] + more, 0
                        continue
                    if text.strip() == "]":
                        return
                    raise ConfigError(f"{path}, record {number + 1} is no JSON: {error}") from error
                except RecursionError as error:
                    raise ConfigError(f"{path}, record {number + 1} is nested too deeply: {error}") from error
                number += 1
                yield f"{path}, record {number}", entry
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 (behind record {number}): save it as UTF-8") from error


# Formats #


def _formed(place: str, record: Any) -> Record:
    """Return the record in one of the three forms."""
    found = [kind for kind, keys in _KINDS.items() if isinstance(record, dict) and all(key in record for key in keys)]
    if len(found) != 1:
        known = "; ".join(" and ".join(f"`{key}`" for key in keys) for keys in _KINDS.values())
        has = f"it has {', '.join(f'`{key}`' for key in record)}" if isinstance(record, dict) else "it is no object"
        raise ConfigError(f"{place} must be an object with one of these: {known}; {has}")
    if found == ["text"]:
        _check_strings(place, record, "text")
        return {"text": record["text"]}
    if found == ["messages"]:
        return _messages(place, record["messages"], record.get("tools"))
    if found == ["ShareGPT"]:
        return _messages(place, _turns(place, record), record.get("tools"))
    if found == ["Alpaca"]:
        return _alpaca(place, record)
    _check_strings(place, record, "prompt", "completion")
    return {"prompt": record["prompt"], "completion": record["completion"]}


def _check_strings(place: str, record: Record, *keys: str) -> None:
    for key in keys:
        if not isinstance(record.get(key), str):
            raise ConfigError(f"{place}: `{key}` is {type(record.get(key)).__name__}; it must be a string")


def _messages(place: str, messages: Any, tools: Any) -> Record:
    whole = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not whole:
        raise ConfigError(f"{place}: `messages` must be a list of objects that have a `role`, and usually `content`")
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{place}: `messages` has no turn of the role `assistant`, so there is nothing to learn")
    return {"messages": messages, "tools": tools}


def _turns(place: str, record: Record) -> list[dict[str, str]]:
    """Return ShareGPT's turns as messages."""
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f"{place}: `conversations` must be a list of objects with `from` and `value`")
    messages = []
    if isinstance(record.get("system"), str) and record["system"]:
        messages.append({"role": "system", "content": record["system"]})
    for number, turn in enumerate(turns, 1):
        role, value = _ROLES.get(str(turn.get("from"))), turn.get("value")
        if role is None or not isinstance(value, str):
            raise ConfigError(
                f"{place}: turn {number} of `conversations` has `from` {turn.get('from')!r} and `value` of type "
                f"{type(value).__name__}; `from` must be one of {', '.join(_ROLES)}, and `value` a string"
            )
        messages.append({"role": role, "content": value})
    return messages


def _alpaca(place: str, record: Record) -> Record:
    values = {"input": "", "system": "", **{key: value for key, value in record.items() if value is not None}}
    _check_strings(place, values, "instruction", "input", "output", "system")
    if values.get("history"):
        raise ConfigError(f"{place} has `history`, which is not read: write the turns as `messages`")
    asked = "\n".join(filter(None, (values["instruction"], values["input"])))
    messages = [{"role": "system", "content": values["system"]}] if values["system"] else []
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": values["output"]}]
    prompt = (_ALPACA_WITH_INPUT if values["input"] else _ALPACA).format(**values)
    system = f"{values['system']}\n\n" if values["system"] else ""
    return {"messages": messages, "tools": None, "prompt": system + prompt, "completion": values["output"]}
