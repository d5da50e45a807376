"""What commands need beyond the package's own requirements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.distribution import install_command
from infinity.errors import InfinityError


@contextmanager
def needed_packages(command: str) -> Iterator[None]:
    """Say what to install where an import inside fails.

    Raises:
        InfinityError: a package is missing, or lacks one of its own.
    """
    try:
        yield
    except ModuleNotFoundError as error:  # transformers raises some without a name
        what = error.name or f"a package that is missing ({error})"
        raise InfinityError(f"infinity {command} needs {what}: {install_command('train')}") from error
