"""The opt-in shim makes `import deepspeed` infinity without the launcher, and goes away without a trace."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from infinity.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of the environment's packages."""
    paths = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path) if name == "purelib" else paths(name))
    return tmp_path


def test_deepspeed_is_infinity_where_it_is_installed(environment, capsys) -> None:
    assert main(["install-deepspeed-shim"]) == 0
    script = (
        f"import site, sys; sys.path.insert(0, {str(ROOT)!r}); site.addsitedir({str(environment)!r})\n"
        "import deepspeed; from importlib.metadata import version; print(deepspeed.__infinity__, version('deepspeed'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[1] == "0.19.8+infinity"
    assert main(["install-deepspeed-shim"]) == 0, "twice is once"
    capsys.readouterr()
    for done in ("removed", "there is no"):
        assert main(["install-deepspeed-shim", "--remove"]) == 0
        assert capsys.readouterr().out.startswith(f"{done} {environment}")
        assert list(environment.iterdir()) == []


def test_beside_deepspeed_itself_it_is_refused(environment, tmp_path_factory, monkeypatch, capsys) -> None:
    other = tmp_path_factory.mktemp("packages")
    (other / "deepspeed-0.18.0.dist-info").mkdir()
    (other / "deepspeed-0.18.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.0\n"
    )
    monkeypatch.syspath_prepend(other)
    assert main(["install-deepspeed-shim"]) == 2
    assert f"DeepSpeed 0.18.0 is installed in {other}" in capsys.readouterr().err
