"""Messages that are true from a checkout, extensions that a source tree finds, and another project of our name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from infinity import distribution, extension

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]


# Names #


def test_messages_name_the_packages_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, packages in distribution.EXTRAS.items():
        assert list(packages) == extras[name]
    assert distribution.install_command("train").startswith("python -m pip install 'transformers>=")


@pytest.mark.parametrize("name", ["infinity-1.5.dist-info", "infinity-1.5-py3.12.egg-info", "infinity.py"])
def test_another_project_of_the_same_import_name_is_told(name, tmp_path) -> None:
    (tmp_path / name).mkdir()
    with pytest.warns(RuntimeWarning, match=rf"{re.escape(name)} is another project .* pip uninstall infinity"):
        distribution.warn_of_namesake(tmp_path)


def test_projects_of_other_names_are_not(tmp_path) -> None:
    for name in ("infinity_tiering-0.1.0.dist-info", "infinity_emb-0.0.1.dist-info", "infinity", "infinityx.py"):
        (tmp_path / name).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distribution.warn_of_namesake(tmp_path)
        distribution.warn_of_namesake(tmp_path / "missing")


# Extensions #


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A source tree without extensions."""
    tree = tmp_path / "checkout"
    shutil.copytree(ROOT / "infinity", tree / "infinity", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tree / "CMakeLists.txt").touch()
    return tree


def _install(site: Path) -> Path:
    """The package as pip installs it."""
    built = [pytest.importorskip(f"infinity.{name}").__file__ for name in ("_adam", "_aio")]
    package = site / "infinity"
    package.mkdir(parents=True)
    for path in [*built, *(ROOT / "infinity").glob("_a*.pyi"), ROOT / "infinity/__init__.py"]:
        shutil.copy(path, package)
    return package


def _python(program: str, cwd: Path, site: Path) -> str:
    """What a program prints that is started in `cwd`, with `site` for what is installed."""
    program = f"import sys; sys.path.append({str(site)!r}); {program}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_python_in_the_checkout_uses_the_installed_extensions(checkout, tmp_path) -> None:
    package = _install(tmp_path / "site")
    program = "import infinity, infinity._aio as aio; print(infinity.__file__, aio.__file__)"
    tree, native = _python(program, checkout, tmp_path / "site").split()
    assert Path(tree).parent == checkout / "infinity"
    assert Path(native).parent == package


def test_extensions_of_another_version_are_not_used(checkout, tmp_path, monkeypatch) -> None:
    package = _install(tmp_path / "site")
    monkeypatch.setattr(extension, "_PACKAGE", checkout / "infinity")
    places = [str(checkout), str(tmp_path / "site")]
    assert extension.installed_package(places) == package
    with (package / "_aio.pyi").open("a") as stub:
        stub.write("def removed_since() -> None: ...\n")
    assert extension.installed_package(places) is None
    assert extension.installed_package([str(tmp_path)]) is None
    message = extension.missing_extension("_aio")
    assert f"python -m pip install {checkout}" in message
