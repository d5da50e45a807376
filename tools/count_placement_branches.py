"""Counts where code asks for the placement again that `schedule/rules.py` has resolved once.

    python tools/count_placement_branches.py [--most N] [--lines]

A branch is an `if`, `elif` or `while`, a conditional expression, a filter of a comprehension, or an `and`/`or` that is
none of these; it counts, once, if what it tests mentions a stage, a device or its link, how many ranks there are, what
is offloaded where, or a flag that follows from these. Exits 1 if there are more than `--most`.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "infinity"
WHERE = ("zero", "optim", "engine.py", "setup.py", "checkpoint")
# Of a name, or of the last part of an attribute, without a leading underscore.
WORDS = {
    "discrete",
    "every_pass",
    "holds_all_gradients",
    "home",
    "homes",
    "is_cuda",
    "link",
    "moves",
    "offload_optimizer",
    "offload_param",
    "offloaded",
    "params_on_nvme",
    "persistent",
    "placement",
    "rules",
    "waits_for_updates",
    "shards_params",
    "update_memory",
    "spills_gradients",
    "stage",
    "states_on_nvme",
    "swap",
}
PAIRS = {("device", "type"), ("ranks", "size"), ("sharding", "count"), ("self", "_alone")}  # (owner, attribute)
PLACES = {"none", "cpu", "nvme", "cuda"}  # as values that something is compared with
MEMORIES = {"DEVICE", "SHARD", "HOST", "NVME", "FILE"}  # members of `Memory`


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, help="fail above so many")
    parser.add_argument("--lines", action="store_true", help="print every branch")
    options = parser.parse_args()
    total = 0
    for path in sorted(file for place in WHERE for file in _files(ROOT / place)):
        source = path.read_text()
        tests = sorted(_placement_tests(ast.parse(source)), key=lambda test: test.lineno)
        total += len(tests)
        if tests:
            print(f"{len(tests):4} {path.relative_to(ROOT)}")
        for test in tests if options.lines else ():
            words = " ".join((ast.get_source_segment(source, test) or "").split())
            print(f"       {test.lineno:4}: {words[:110]}")
    print(f"{total:4} in all")
    return int(options.most is not None and total > options.most)


def _files(place: Path) -> Iterator[Path]:
    yield from place.rglob("*.py") if place.is_dir() else (place,)


def _placement_tests(tree: ast.AST) -> Iterator[ast.expr]:
    """What branches of the tree test, as far as it is about placement."""
    within: set[int] = set()  # parts of tests that were counted or looked at as a whole
    for node in ast.walk(tree):  # breadth first: a test comes before its parts
        for test in _tests(node):
            if id(test) in within:
                continue
            within.update(id(part) for part in ast.walk(test) if isinstance(part, ast.BoolOp))
            if any(map(_is_about_placement, ast.walk(test))):
                yield test


def _tests(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs
    elif isinstance(node, ast.BoolOp):
        yield node


def _is_about_placement(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):  # with "nvme", or with one of ("cpu", "nvme")
        values = (value for comparator in node.comparators for value in ast.walk(comparator))
        return any(isinstance(value, ast.Constant) and value.value in PLACES for value in values)
    if isinstance(node, ast.Attribute):
        owner = _last(node.value)
        return _last(node) in WORDS or (owner, node.attr) in PAIRS or (owner == "Memory" and node.attr in MEMORIES)
    return isinstance(node, ast.Name) and _last(node) in WORDS


def _last(node: ast.expr) -> str:
    """The last part of a dotted name, without a leading underscore."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


if __name__ == "__main__":
    raise SystemExit(main())
