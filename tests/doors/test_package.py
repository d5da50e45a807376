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


def _python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", ATTRIBUTES[:6])
def test_a_package_is_an_attribute_after_importing_infinity_alone(name) -> None:
    assert _python(f"import infinity; print(callable(infinity.{name}))") == "True\n"


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
