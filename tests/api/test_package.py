"""`import infinity` gives its packages as attributes, and costs nothing before they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import infinity

ATTRIBUTES = [
    "zero.Init",
    "zero.GatheredParameters",
    "optim.AdamW",
    "optim.Adam",
    "checkpoint.convert",
    "config.load_config",
    "integrations.from_pretrained",
    "integrations.pretrained_model",
    "initialize",
    "CapacityError",
]


def _python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# A process for each, forked off one that has imported torch alone, which takes most of the time.
_EACH_ALONE = """
import os, sys
import torch
for name in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    import infinity
    print(name, callable(eval(f"infinity.{name}")), flush=True)
    os._exit(0)
"""


def test_a_package_is_an_attribute_after_importing_infinity_alone() -> None:
    assert _python(_EACH_ALONE, *ATTRIBUTES[:6]) == "".join(f"{name} True\n" for name in ATTRIBUTES[:6])


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_every_public_name_is_there_and_listed(name) -> None:
    value = infinity
    for part in name.split("."):
        assert part in value.__all__
        value = getattr(value, part)


def test_importing_infinity_does_not_import_torch() -> None:
    program = "import sys, infinity; infinity.__version__; dir(infinity); print('torch' in sys.modules)"
    assert _python(program) == "False\n"


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'infinity' has no attribute 'Zero'"):
        infinity.Zero  # noqa: B018
