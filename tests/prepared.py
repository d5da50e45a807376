"""Python processes that start in milliseconds: forked off one that has imported torch and transformers beforehand.

`run` and `Child` are for tests that need a process of their own - its end, its signals, its standard output - and not
its start. What is tested by being started (an installed command, what an import brings with it, memory that is counted
from nothing) starts with `subprocess`.

The workers of a test run share the prepared process. It has imported and has run nothing, so that it has no threads,
whose locks a child would inherit. A child has an environment, directory, arguments and standard files of its own, and
runs its program as `__main__`. At its end it waits for threads, calls what was registered at exit, and is gone; it is
left out that an interpreter clears all modules, which here are thousands, one by one. A test that is about that end
asks for it.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[1]
_MODULES = ("infinity.setup", "tests.behaviour.reference", "transformers.trainer", "accelerate", "peft", "pytest")
_WITHOUT_THREADS = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's, which `datasets` brings
}
_FILES = 3  # standard input, output and errors


# The test's side #


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    check: bool = False,
    clears: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)`."""
    with Child(arguments, cwd=cwd, env=env, clears=clears) as child:
        output, errors = child.communicate(timeout)
        done = subprocess.CompletedProcess(child.args, child.wait(), output, errors)
    if check:
        done.check_returncode()
    return done


class Child:
    """As `subprocess.Popen([sys.executable, *arguments], stdout=PIPE, stderr=PIPE, text=True, ...)`, but quickly.

    As a context it kills the process at its end.

    Args:
        arguments: of Python: a script, `-m` and a module, or `-c` and a program; then what is for it.
        clears: at its end it clears its modules, which takes a second.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        clears: bool = False,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        environment = dict(os.environ if env is None else env)
        request = {"arguments": self.args, "cwd": str(cwd or Path.cwd()), "environment": environment, "clears": clears}
        (out, stdout), (err, stderr), (status, told) = os.pipe(), os.pipe(), os.pipe()
        with tempfile.TemporaryFile("w+") as file, Path(os.devnull).open() as nothing:
            json.dump(request, file)
            file.seek(0)
            descriptors = [nothing.fileno(), stdout, stderr, told, file.fileno()]
            socket.send_fds(_prepared(environment.get("PYTHONPATH", "")), [b"start"], descriptors)
        for descriptor in (stdout, stderr, told):
            os.close(descriptor)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self._status = os.fdopen(status, buffering=1)
        self._readers: list[_Reader] = []
        begun = self._status.readline()
        assert begun, "the prepared process has ended; what it wrote to standard error says why"
        self.pid = int(begun)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.communicate()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; returns what has been written and not been read."""
        until_s = None if timeout is None else time.monotonic() + timeout
        self._readers = self._readers or [_Reader(self.stdout), _Reader(self.stderr)]
        for reader in self._readers:
            reader.join(None if until_s is None else max(0, until_s - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0, *(each.text for each in self._readers))
        self.wait(None if until_s is None else max(0, until_s - time.monotonic()))
        output, errors = (reader.text for reader in self._readers)
        return output, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Reader(threading.Thread):
    """Reads a pipe to its end, and closes it."""

    def __init__(self, pipe: IO[str]) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self.text = ""
        self.start()

    def run(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self.text += line


_running: dict[str, socket.socket] = {}


def _prepared(path: str) -> socket.socket:
    """To a process that was started with this PYTHONPATH: what is imported may depend on it."""
    path = os.pathsep.join(entry for entry in path.split(os.pathsep) if entry not in ("", str(ROOT)))
    if path not in _running:
        # An abstract address belongs to the process that binds it first, and is free when the last has closed it.
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        address = "\0infinity-tests-" + hashlib.sha256(f"{run} {path}".encode()).hexdigest()
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(address)
            except OSError:  # another worker of this run has started it
                pass
            else:
                listening.listen()
                _start(listening, path)
            _running[path] = _connected(address)
        atexit.register(_running[path].close)  # the prepared process ends when the last worker has closed its socket
    return _running[path]


def _start(listening: socket.socket, path: str) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, str(listening.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[listening.fileno()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))} | _WITHOUT_THREADS,
    )
    atexit.register(process.wait)


def _connected(address: str) -> socket.socket:
    until_s = time.monotonic() + 10
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except ConnectionRefusedError:  # bound, and not listened to yet
            connection.close()
            assert time.monotonic() < until_s, "nobody listens"
            time.sleep(0.01)
        else:
            return connection


# The prepared process's side #


def _main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the tests' own process ends this one
    del sys.path[0]  # this file's
    for name in _MODULES:
        with suppress(ImportError):  # the tests that need it are skipped
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is here is no garbage of a child's, whose collections would go through all of it
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"an import has started {len(threads) - 1} threads, whose locks children would inherit"
    request = _next_of(listening)
    if request is None:
        os._exit(0)  # an interpreter clears all modules at its end, which takes a second
    if request["clears"]:
        _become(request)
        return
    code = 0
    try:
        _become(request)
    except BaseException as error:
        code = _code_of(error)
    _end(code)


def _next_of(listening: socket.socket) -> dict[str, Any] | None:
    """A request, in the child that is for it; None in this process when all workers have ended."""
    workers: list[socket.socket] = []
    while True:
        for ready in select.select([listening, *workers], [], [])[0]:
            if ready is listening:
                worker = listening.accept()[0]
                if _user_of(worker) == os.getuid():  # an abstract address has no permissions
                    workers.append(worker)
                continue
            said, descriptors, *_ = socket.recv_fds(ready, len(b"start"), _FILES + 2)
            if not said:
                ready.close()
                workers.remove(ready)
                continue
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                for each in (listening, *workers):
                    each.close()
                return _started(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        if not (workers or select.select([listening], [], [], 0)[0]):
            return None


def _user_of(connection: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _started(descriptors: list[int]) -> dict[str, Any]:
    """In another child, which has the request; this one stays to tell what becomes of it."""
    told = descriptors[_FILES]
    pid = os.fork()
    if pid:
        os.write(told, f"{pid}\n".encode())
        for descriptor in descriptors[:_FILES]:
            os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):  # nobody has waited
            os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    with os.fdopen(descriptors[_FILES + 1]) as file:
        request: dict[str, Any] = json.load(file)
    for number, descriptor in enumerate(descriptors[:_FILES]):
        os.dup2(descriptor, number)
    for descriptor in descriptors[: _FILES + 1]:
        os.close(descriptor)
    return request


def _become(request: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    first, *rest = request["arguments"]
    if first == "-m":
        sys.path.insert(0, request["cwd"])
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        script = Path(first)
        main.__file__ = first
        sys.path.insert(0, str(script.parent.resolve()))
        sys.argv = [first, *rest]
        code = compile(script.read_bytes(), first, "exec")
    exec(code, vars(main))


def _code_of(error: BaseException) -> int:
    """The exit code of an interpreter whose program ends with this, which is printed."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    sys.excepthook(type(error), error, error.__traceback__)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _main()
