"""The frame of a page, in light and dark colors, and its tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from infinity.errors import ConfigError

_STYLE = """
:root { color-scheme: light dark; --text: #222; --dim: #555; --back: #fff; --line: #ddd; --grid: #eee; --axis: #999;
  --box: #f6f6f6; --best: #eaf5ea; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --dim: #aaa; --back: #16181c; --line: #3a3d44;
  --grid: #2a2d33; --axis: #666; --box: #22252b; --best: #1d3322; } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 74rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
td, th { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } tr.best { background: var(--best); }
figure { display: inline-block; vertical-align: top; margin: 0 1rem 1rem 0; }
figcaption { color: var(--dim); max-width: 560px; } figure.wide figcaption { max-width: none; }
svg { max-width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--dim); }
.frame { fill: none; stroke: var(--axis); } .grid { stroke: var(--grid); } .mark { stroke: var(--axis); }
pre { background: var(--box); padding: 1rem; overflow-x: auto; } .changed { font-weight: 600; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page. The parts are HTML; the title is text, which is escaped."""
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</body></html>",
            "",
        ]
    )


def write_page(path: Path, text: str) -> None:
    """Write a page to the file of --html."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace")  # the text may contain a path that is not UTF-8
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from error


def table(heads: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table. The rows are HTML; the heads are text, and may be empty."""
    head = "<tr>" + "".join(f"<th>{escape(text)}</th>" for text in heads) + "</tr>" if heads else ""
    return f"<table>{head}{''.join(rows)}</table>"


def figure(drawn: str, caption: str, *, wide: bool = False) -> str:
    """Return a drawing with a caption."""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"
