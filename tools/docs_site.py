"""Hooks of mkdocs: the README is the first page, parts of the reference are made from the code, links are adapted.

What lies outside of docs/ is named where it cannot be linked.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs runs this file alone

from tools.reference import filled  # noqa: E402

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?!https?:|#|mailto:)[^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the README, whose links into docs/ are links between pages here."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](").replace('src="docs/', 'src="')
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Put in the generated parts, and replace links to other files of the source by their names."""
    here = ROOT / ("README.md" if page.file.src_uri == "index.md" else f"docs/{page.file.src_uri}")

    def named(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = target.partition("#")[0]
        within = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
        if files.get_file_from_path(within) is not None or not path:
            return link[0]
        found = (here.parent / path).resolve()
        if not found.exists() or not found.is_relative_to(ROOT):
            return link[0]  # a broken one, which is told
        name = found.relative_to(ROOT).as_posix()
        return text if name in text else f"{text} (`{name}`)"

    return _OUTSIDE.sub(named, filled(markdown))
