"""Kinds of arguments that several commands take."""

from __future__ import annotations

import argparse

from infinity.config import parse_size


def size_argument(text: str) -> int:
    """Bytes of `16MiB`, as argparse wants its types."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
