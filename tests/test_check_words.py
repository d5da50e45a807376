"""The lint of words finds what it is for, and nothing in what is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def lint(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import check_words  # noqa: PLC0415

    yield check_words
    sys.modules.pop("check_words")


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("# Title\n\nShort.\n", []),
        ("Text alone.\n", ["page.md:1: no heading"]),
        (f"# Title\n\n{'word ' * 30}\n", ["page.md:3: 150 characters, more than 120"]),
        (f"# Title\n\n- [link](https://example.org/{'x' * 120})\n| {'cell ' * 40}|\n```\n{'code ' * 40}\n```\n", []),
        ("# Title\n\nThe lock is in nobody's\nbooks.\n", ["page.md:3: private word `nobody's books`"]),
    ],
)
def test_a_page_is_measured_outside_of_tables_and_code(lint, text, problems) -> None:
    found = list(lint.page_problems("page.md", text))
    assert len(found) == len(problems)
    assert all(one.startswith(start) for one, start in zip(found, problems, strict=True))


def test_a_note_is_where_the_reference_says(lint) -> None:
    home = '"""Title.\n\n[Note: the ring]\nWords.\n"""\n'
    right = "# See [Note: the ring].\n# See [Note: the ring] in\n# tiers/ring.py.\n"
    assert list(lint.note_problems({"infinity/tiers/ring.py": home, "infinity/a.py": right})) == []
    wrong = "# [Note: the rings].\n# See [Note: the ring] in slots.py.\n"
    assert list(lint.note_problems({"infinity/tiers/ring.py": home, "infinity/a.py": wrong})) == [
        "infinity/a.py:1: [Note: the rings] does not exist",
        "infinity/a.py:2: [Note: the ring] is not in slots.py but in infinity/tiers/ring.py",
    ]
    twice = {"infinity/tiers/ring.py": home, "infinity/tiers/slots.py": home}
    assert list(lint.note_problems(twice)) == [
        "infinity/tiers/slots.py:3: [Note: the ring] is in infinity/tiers/ring.py already"
    ]
