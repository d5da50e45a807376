"""Runs torchrun, and replaces its traceback, which would follow those of the ranks, by one line."""

import signal
import sys

del sys.path[0]  # this file's directory

from torch.distributed import DistError  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure  # noqa: E402
from torch.distributed.run import main  # noqa: E402


def _order(failure: ProcessFailure) -> tuple[bool, int]:
    """Sort key: the rank that failed first. Ranks that ended by SIGTERM come last: torchrun sends it to the others."""
    return failure.exitcode == -signal.SIGTERM, failure.timestamp


def _report(error: ChildFailedError) -> int:
    """Print which rank failed first. Return its exit code in the convention of shells."""
    rank, failure = min(error.failures.items(), key=lambda item: _order(item[1]))
    code = int(failure.exitcode)
    how = f"exit code {code}" if code >= 0 else f"signal {-code} ({failure.signal_name()})"
    print(f"infinity run: rank {rank} ended with {how}; its output is above", file=sys.stderr)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        sys.exit(_report(error))
    except DistError as error:
        sys.exit(
            f"infinity run: the launchers cannot meet: {str(error).splitlines()[0]}. Give all machines the same "
            "--address HOST:PORT: a name of the first machine, and a port that no other program uses there"
        )
    except SignalException as error:
        sys.exit(128 + error.sigval)
