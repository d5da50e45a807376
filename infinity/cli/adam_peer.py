"""DeepSpeed's optimizer beside ours in `infinity bench-adam`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from infinity.errors import ConfigError

NAME = "DeepSpeedCPUAdam"
_SCRIPT = Path(__file__).parent / "launch" / "adam_peer.py"


class PeerProcess:
    """DeepSpeed's optimizer in a process and an environment of its own; one line asks for a step."""

    def __init__(self, python: Path, numel: int, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
        # It compiles into this directory and loads what is there: nobody else may have put something into it.
        self._built = tempfile.TemporaryDirectory(prefix="infinity-peer-")
        environment.setdefault("TORCH_EXTENSIONS_DIR", self._built.name)
        environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', '')}"  # its ninja
        environment.pop("PYTHONPATH", None)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)
        try:
            self._process = subprocess.Popen(
                [str(python), str(_SCRIPT), str(numel)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                text=True,
            )
        except OSError as error:
            self._log.close()
            self._built.cleanup()
            raise ConfigError(f"--peer-python {python} does not start: {error}") from error

    def __enter__(self) -> Callable[[], float]:
        return self._step

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._built.cleanup()

    def _step(self) -> float:
        """Run one step there and return the seconds that it took."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None  # noqa: PT018  (both are pipes)
        with contextlib.suppress(BrokenPipeError):
            requests.write("step\n")
            requests.flush()
        while line := answers.readline():  # DeepSpeed prints lines of its own
            if line.startswith("seconds "):
                return float(line.split()[1])
        self._log.seek(0)
        raise ConfigError(f"the DeepSpeed peer ended; its last words:\n{self._log.read()[-2000:]}")
