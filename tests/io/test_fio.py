"""What fio is given to do beside us, and what is said where it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infinity.errors import ConfigError
from infinity.io import IoOptions
from infinity.io.fio import FioJob, fio_engine, run_fio
from infinity.io.patterns import Move

MIB = 1 << 20
OPTIONS = IoOptions(128 << 10, 8, 4)


def test_fio_is_given_our_work(tmp_path) -> None:
    def job(operation: str, engine: str, **more: object) -> list[str]:
        return FioJob(tmp_path / "f", 10 * MIB + 1, operation, OPTIONS, engine, **more).command(2)

    uring = job("randread", "io_uring", registered=False)
    for option in ("--rw=randread", "--bs=131072", "--iodepth=8", "--size=10485760", "--fixedbufs=0", "--loops=2"):
        assert option in uring
    blocking = job("write", "psync")
    for option in ("--iodepth=1", "--numjobs=4", "--size=2621440", "--offset_increment=2621440"):
        assert option in blocking
    with pytest.raises(ConfigError, match="nothing like the backend aiofiles"):
        fio_engine("aiofiles")
    assert fio_engine("threads") == "psync"
    assert fio_engine("io_uring", "libaio") == "libaio"


def test_fio_is_given_an_absolute_path_that_it_does_not_divide(monkeypatch, tmp_path) -> None:
    """fio runs in a directory of its own, where a relative path would be another file."""
    monkeypatch.chdir(tmp_path)
    command = FioJob(Path("a:b") / "f", MIB, "read", OPTIONS, "psync").command()
    assert f"--filename={tmp_path}/a\\:b/f" in command


def _fake_fio(directory: Path, program: str) -> None:
    (directory / "fio").write_text(f"#!{sys.executable}\n{program}")
    (directory / "fio").chmod(0o700)


def test_a_replayed_order_is_of_the_file_itself(monkeypatch, tmp_path) -> None:
    """The log names it by a link, since blanks in a name would end it there."""
    place = tmp_path / "a b"
    place.mkdir()
    (place / "f").write_bytes(b"x" * MIB)
    seen = tmp_path / "seen"
    _fake_fio(
        tmp_path,
        f"""
import os, pathlib, sys
log = next(word.split("=", 1)[1] for word in sys.argv if word.startswith("--read_iolog="))
names = {{line.split()[0] for line in pathlib.Path(log).read_text().splitlines()[1:]}}
pathlib.Path({str(seen)!r}).write_text(repr([os.path.realpath(name) for name in names]))
sys.exit(1)
""",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    job = FioJob(Path("a b") / "f", MIB, "rw", OPTIONS, "io_uring", order=[Move("read", 0, MIB)])
    with pytest.raises(ConfigError, match="fio failed: it ended with 1"):
        run_fio(job)
    assert seen.read_text() == repr([str(place / "f")])


def test_an_error_of_fio_is_its_reason_and_the_command(monkeypatch, tmp_path) -> None:
    _fake_fio(
        tmp_path,
        """
import sys
print("fio: loading a module", "note: nothing else", sep="\\n", file=sys.stderr)
print("fio: pid=7, err=28/file:io_u.c:1845, func=io_u error, error=No space left on device", file=sys.stderr)
print("fio: usage of 40 lines", file=sys.stderr)
sys.exit(1)
""",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as found:
        run_fio(FioJob(tmp_path / "f", MIB, "read", OPTIONS, "io_uring"), 3)
    reason, command = str(found.value).splitlines()
    assert reason.endswith("error=No space left on device")
    assert command.startswith("to see its full output: fio --name=bench ")
    assert "--loops=3" in command
