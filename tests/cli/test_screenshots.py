"""The pages as Chromium draws them with no network, beside pictures of them that somebody has looked at.

Compared are means over squares of pixels, since fonts differ from machine to machine by a pixel here and there. To look
at new ones: INFINITY_NEW_PICTURES=1 python -m pytest tests/cli/test_screenshots.py
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from infinity.cli.main import main
from tests.cli.browser import in_chromium
from tests.cli.test_report import log
from tests.cli.test_tune import stand_in, tune

image = pytest.importorskip("matplotlib.image")

__all__ = ["log", "stand_in"]  # fixtures

PICTURES = Path(__file__).parent / "data"
SQUARE = 8  # pixels
WIDE, NARROW = 1000, 480


def drawn(page: Path, width: int, height: int, tmp_path: Path) -> np.ndarray:
    """Grey means of squares of the top of a page, in [0, 1]."""
    shot = tmp_path / "shot.png"
    looks = ("--hide-scrollbars", "--force-device-scale-factor=1", "--force-color-profile=srgb")
    in_chromium(page, tmp_path / "profile", *looks, f"--window-size={width},{height}", f"--screenshot={shot}")
    grey = image.imread(shot)[:height, :width, :3].mean(axis=2)
    return grey.reshape(height // SQUARE, SQUARE, width // SQUARE, SQUARE).mean(axis=(1, 3))


def assert_like_picture(found: np.ndarray, name: str) -> None:
    picture = PICTURES / f"{name}.png"
    if os.environ.get("INFINITY_NEW_PICTURES"):
        PICTURES.mkdir(exist_ok=True)
        image.imsave(picture, found, cmap="gray", vmin=0, vmax=1)
    expected = image.imread(picture)[:, :, 0]
    away = abs(found - expected)
    assert away.mean() < 0.02
    assert np.quantile(away, 0.99) < 0.3


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_report(width, log, tmp_path) -> None:
    assert main(["report", str(log)]) == 0
    assert_like_picture(drawn(log.with_suffix(".html"), width, 2400, tmp_path), f"report-{width}")


@pytest.mark.parametrize(("width", "height"), [(WIDE, 960), (NARROW, 1280)])  # to the first chart; others have times
def test_tuning(width, height, stand_in, tmp_path) -> None:
    page = tmp_path / "tune.html"
    assert tune(tmp_path, "--keep", "batch", "--html", str(page)) == 0
    assert_like_picture(drawn(page, width, height, tmp_path), f"tune-{width}")


def test_another_page_is_not_like_the_picture(log, tmp_path) -> None:
    if os.environ.get("INFINITY_NEW_PICTURES"):
        pytest.skip("it would become the picture")
    assert main(["report", str(log)]) == 0
    page = log.with_suffix(".html")
    page.write_text(page.read_text().replace("<svg", '<svg style="visibility: hidden"'))
    with pytest.raises(AssertionError):
        assert_like_picture(drawn(page, WIDE, 2400, tmp_path), f"report-{WIDE}")
