"""The reference names every command, public name and configuration key, with the defaults of the schema."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import infinity
from infinity.cli.main import COMMANDS
from infinity.config import parse_size
from infinity.config.keys import DEPRECATED, NO_EFFECT, REFUSED
from infinity.config.load import known_keys

ROOT = Path(__file__).parents[1]
KEYS = {key: default for key, (section, default) in known_keys() if section is None}


@pytest.fixture
def reference(monkeypatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import reference  # noqa: PLC0415

    yield reference
    sys.modules.pop("reference")


def test_every_command_has_its_help(reference, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = reference.filled((ROOT / "docs/commands.md").read_text())
    assert len(re.findall(r"^## infinity ", text, re.MULTILINE)) == len(COMMANDS)
    for shown in ("### infinity checkpoint export\n", "### infinity states remove\n", "--save-every N"):
        assert shown in text


def test_every_public_name_is_described(reference) -> None:
    text = reference.filled((ROOT / "docs/api.md").read_text())
    names = re.findall(r"^### ([\w.]+)$", text, re.MULTILINE)
    for name in infinity.__all__:
        if callable(getattr(infinity, name)) and name != "Engine":
            assert {f"infinity.{name}", f"infinity.errors.{name}"} & set(names), name
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        words = re.sub(r"```python\n.*?```", "", section.partition("\n")[2], flags=re.DOTALL).strip()
        assert words, section


def test_every_configuration_key_is_documented(reference) -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    filled = reference.filled(text)
    for key, reason in (NO_EFFECT | REFUSED).items():
        assert f"| `{key}` | {reason} |" in filled
    for key in [*DEPRECATED, *KEYS]:
        is_listed = f"`{key}`" in text or key.split(".")[-1] in ("path", "capacity", "bandwidth")
        assert is_listed or key.startswith("bfloat16"), key
    assert {
        row.replace("[]", "") for row in re.findall(r"^\| `([\w.\[\]]+)` \|", reference.keys(), re.MULTILINE)
    } <= set(KEYS)


def test_the_defaults_of_the_configuration_page_are_those_of_the_schema() -> None:
    page = (ROOT / "docs/configuration.md").read_text().partition("## Values that Hugging Face fills in")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", page, re.MULTILINE)
    compared = {key: written.strip("` ") for key, written in rows if KEYS.get(key) not in (None, [], ())}
    assert len(compared) > 20
    for key, written in compared.items():
        default = KEYS[key]
        if isinstance(default, bool | str):
            assert written == str(default).lower(), key
        else:
            assert parse_size(written) == default if written.endswith("iB") else float(written) == default, key


def test_every_generated_part_exists(reference) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert set(re.findall(r"<!-- generated: (\w+) -->", page.read_text())) <= set(reference.PARTS), page
