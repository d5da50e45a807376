"""The project's own files: workflows, images, pages for contributors, the notebook."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
NOTEBOOK = ROOT / "examples/first_steps.ipynb"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_there_is(path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert steps
    assert all(("run" in step) != ("uses" in step) for step in steps)
    for target in re.findall(r"\bmake ([a-z-]+)", path.read_text()):
        assert target in targets, target


def test_wheels_lint_tests_and_docs_have_a_workflow() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    for command in ("make lint", "make test\n", "make docs", "cibuildwheel"):
        assert command in text, command


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_built_from_files_that_are_sent(path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", path.read_text(), re.MULTILINE)
    assert copied
    for name in " ".join(copied).split():
        assert name in sent
        assert (ROOT / name).exists()


def test_both_images_are_built() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


def test_the_citation_is_of_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_what_the_project_s_pages_name_exists(name) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"`((?:tests|docs|csrc|benchmarks|infinity)/[\w/]*)`", text):
        assert (ROOT / target).exists(), target


def test_llms_txt_lists_every_page() -> None:
    text = (ROOT / "docs/llms.txt").read_text()
    assert sorted(re.findall(r"\]\((\w[\w/-]*\.md)\)", text)) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )


def test_the_notebook_has_no_output_in_it() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_notebook_runs(tmp_path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="python -m pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="python -m pip install nbclient ipykernel")
    import nbformat  # noqa: PLC0415  (nbclient brings it)

    notebook = nbformat.reads(NOTEBOOK.read_text().replace("range(40)", "range(20)"), as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    first, last = (float(re.search(text, printed)[1]) for text in (r"step 0: loss (.*)", r"last steps: (.*)"))
    assert last < first - 1
    assert "import " in printed
