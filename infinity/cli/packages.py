"""Packages that commands need in addition to the requirements of infinity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.distribution import install_command
from infinity.errors import InfinityError


@contextmanager
def needed_packages(command: str) -> Iterator[None]:
    """Convert a failed import in this context to an error that says what to install.

    Raises:
        InfinityError: a package, or one that it needs, is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:  # transformers raises some without a name
        what = error.name or f"a package that is missing ({error})"
        raise InfinityError(f"infinity {command} needs {what}: {install_command('train')}") from error
