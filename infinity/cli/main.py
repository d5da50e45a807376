"""Entry point: parse the command line, run a sub-command, and turn errors into a message and an exit code."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from infinity import __version__
from infinity.cli import (
    bench_adam,
    bench_io,
    checkpoint,
    configs,
    deepspeed_shim,
    env,
    estimate,
    init,
    plan,
    profile,
    report,
    run,
    selftest,
    states,
    timeline,
    top,
    train,
    tune,
)
from infinity.cli.terminal import plain
from infinity.errors import InfinityError

_log = logging.getLogger(__name__)
COMMANDS = (  # modules whose `add_parser` registers a command, with a function `run` that returns the exit code
    train,
    run,
    init,
    configs,
    estimate,
    plan,
    tune,
    top,
    report,
    timeline,
    checkpoint,
    states,
    bench_io,
    bench_adam,
    profile,
    selftest,
    env,
    deepspeed_shim,
)
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141  # the exit code of a process that dies of SIGPIPE
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of `print`, which have no filename


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line. Return the exit code."""
    _open_standard_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and (error.errno not in _UNWRITTEN):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python's flush at exit fails, too
        if isinstance(error, BrokenPipeError):  # the reader has ended, as in `infinity env | head`
            return EXIT_UNREAD
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR


def _open_standard_streams() -> None:
    """Open standard streams that the parent has closed (`>&-`) on the null device.

    Otherwise a swap file or a checkpoint would get descriptor 1 or 2, and C libraries would print into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123  (it stays open)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and data may have characters that its encoding lacks
        with suppress(OSError):  # its descriptor may have become a pipe since Python opened it
            sys.stdout.reconfigure(errors="backslashreplace")


def make_parser() -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parsers of the commands."""
    parser = argparse.ArgumentParser(prog="infinity", description="Train models that do not fit the GPUs at hand.")
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log what is chosen and why")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add_parser(subparsers)
    for listed in subparsers._choices_actions:  # argparse shows `help` in the list of commands only
        command_parser, text = subparsers.choices[listed.dest], listed.help or ""
        command_parser.description = f"{text[:1].upper()}{text[1:]}. {command_parser.description or ''}".strip()
    return parser, subparsers


def _run(arguments: Sequence[str] | None) -> int:
    parser, subparsers = make_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(subparsers.choices[parsed.command], unknown)
    level = logging.INFO if parsed.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        code: int = parsed.run(parsed)
    except InfinityError as error:
        print("error: " + "\n".join(map(plain, str(error).split("\n"))), file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        if error.filename is None:
            raise
        _log.info("where it failed", exc_info=True)
        print(plain(f"error: {error.filename}: {error.strerror}"), file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exit with an error that names the unknown arguments, and the option that is most similar to the first of them."""
    options = [option for action in parser._actions for option in action.option_strings]
    nearest = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


if __name__ == "__main__":
    sys.exit(main())
