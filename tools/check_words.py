"""Checks the words of documentation and code; `make lint` runs it.

    python tools/check_words.py

Prints one line for each problem, and exits with 1 if there is one:

- in README.md and docs/: a line of prose with more than 120 characters, a page without a heading, a private word;
- in the code of infinity/, tests/ and benchmarks/: a private word;
- in infinity/ and csrc/: a reference to a `[Note: name]` that does not exist, or is not in the file that the reference
  names; a note that is defined twice.

Tables, code blocks, and lines without a space to break at may be longer. A private word is one of `PRIVATE`: a phrase
that a reader has to guess, and that has a plain replacement.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 120  # characters of a line of prose
SOURCES = (("infinity", "*.py"), ("csrc", "*.h"), ("csrc", "*.cpp"))  # with notes
IN_WORDS = (("infinity", "*.py"), ("tests", "*.py"), ("benchmarks", "*.py"))  # without private words
EXEMPT = "tests/test_check_words.py"  # quotes them

PRIVATE = {  # what not to write, and what to write instead
    r"nobody's books": "ownership transfer was cut short",
    r"\b(?:is|are) had\b": "a verb with a subject",
    r"\bthat (?:it|they) ha(?:s|ve) not (?:is|are)\b": "unknown, or missing",
    r"\bwhat is beside\b": "the noun",
    r"\bsomebody else than\b": "outside of, or other than",
    r"\bnobody has any ?more\b": "unreferenced",
    r"\bnothing that leads here\b": "no reference to self",
    r"\btells? (?:its|their) (?:gradients|parameters)\b": "can be reconstructed from",
}

_NOTE = r"\[Note:\s+([^\]]+)\]"
_DEFINITION = re.compile(rf"^[ \t]*(?:(?://|#)[ \t]*)?{_NOTE}$", re.MULTILINE)
_REFERENCE = re.compile(rf"{_NOTE}(?:\s+(?:(?://|#)\s*)?in\s+(?:(?://|#)\s*)?([\w/]+\.(?:py|h|cpp)))?")
_MARKER = re.compile(r"\s*(?:(?:[-*]|\d+\.)\s+)?")  # what a line of prose begins with and cannot be broken in


def main() -> int:
    problems = list(all_problems())
    print(*problems, sep="\n", end="\n" if problems else "")
    return int(bool(problems))


def all_problems() -> Iterator[str]:
    """Of the whole project."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name, text = page.relative_to(ROOT).as_posix(), page.read_text()
        yield from page_problems(name, text)
    yield from note_problems(_files(SOURCES))
    for name, text in _files(IN_WORDS).items():
        if name != EXEMPT:
            yield from private_words(name, text)


def _files(patterns: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the text of the files of these folders that match, by path."""
    return {
        file.relative_to(ROOT).as_posix(): file.read_text()
        for folder, pattern in patterns
        for file in sorted((ROOT / folder).rglob(pattern))
    }


# Pages #


def page_problems(name: str, text: str) -> Iterator[str]:
    """Of one page."""
    prose = dict(_prose(text))
    if not any(line.startswith("#") for line in prose.values()):
        yield f"{name}:1: no heading"
    for number, line in prose.items():
        if len(line) > MOST and " " in line[_indent(line) : MOST]:
            yield f"{name}:{number}: {len(line)} characters, more than {MOST}"
    yield from private_words(name, text)


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines, by number, that are in no table and in no block of code."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith("|"):
            yield number, line


def _indent(line: str) -> int:
    marker = _MARKER.match(line)
    return marker.end() if marker else 0


def private_words(name: str, text: str) -> Iterator[str]:
    """Where the text has one of `PRIVATE`, also over the end of a line."""
    for pattern, better in PRIVATE.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            yield f"{name}:{_line(text, match)}: private word `{_one_line(match[0])}`: {better}"


# Notes #


def note_problems(sources: Mapping[str, str]) -> Iterator[str]:
    """References that lead nowhere, or to another file than they name; names that are taken twice."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in sources.items():
        for match in _DEFINITION.finditer(text):
            note = _one_line(match[1])
            if defined[note]:
                yield f"{name}:{_line(text, match)}: [Note: {note}] is in {defined[note][0]} already"
            defined[note].append(name)
    for name, text in sources.items():
        for match in _REFERENCE.finditer(text):
            note, file = _one_line(match[1]), match[2]
            where = f"{name}:{_line(text, match)}: [Note: {note}]"
            if note not in defined:
                yield f"{where} does not exist"
            elif file and not any(f"/{home}".endswith(f"/{file}") for home in defined[note]):
                yield f"{where} is not in {file} but in {defined[note][0]}"


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    raise SystemExit(main())
