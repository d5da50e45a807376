"""The display of `infinity train` fits the terminal, whatever the numbers are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from infinity.cli.training import display
from infinity.cli.training.display import Display, sparkline
from infinity.cli.training.progress import StepReport
from infinity.memory import Level
from infinity.telemetry import StepStats

STEPS = 1_000_000


def report(step: int, loss: float, **changes: float) -> StepReport:
    stats = StepStats(
        phase_s={"forward": 60.0, "backward": 60.0},
        tier_bytes={"nvme_read": 10**13, "nvme_write": 10**13},
        stall_s={"collective": 60.0, "disk_write": 30.0},
        grad_norm=123456.789,
        skipped=True,
    )
    tiers = {name: Level(10**12, 10**12, 10**12) for name in ("device", "host", "nvme")}
    return StepReport(step, loss, 120.0, 10**9, 1e-4, stats, tiers)


class Silent:
    """Stands for the terminal."""

    def __init__(self, *arguments: object, **more: object) -> None:
        self.drawn = 0

    def draw(self) -> None:
        self.drawn += 1


@pytest.fixture
def shown(monkeypatch) -> Display:
    monkeypatch.setattr(display, "Drawing", Silent)
    return Display(STEPS)


def lines(shown: Display, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, _environ={})
    with console.capture() as capture:
        console.print(shown.picture(width, blocks=True))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "count"), [(40, 2), (80, 2), (119, 2), (120, 4), (250, 4)])
def test_the_picture_has_as_many_lines_as_it_should_and_none_is_too_long(width, count, shown) -> None:
    assert len(lines(shown, width)) == 2  # before the first step
    shown.show(report(999_999, float("nan")))
    found = lines(shown, width)
    assert "nan" in found[1]
    for step in range(5):
        shown.show(report(step, 12345.6789 + step))
    found = lines(shown, width)
    assert len(found) == count
    assert max(len(line) for line in found) <= width
    assert found[0].startswith("step 4/1000000")
    assert found[1].startswith("loss 12349.6789 (skipped)")
    if count == 4:
        assert found[2].startswith("last 5 losses ▁▃▅▆█  least 12345.6789  mean of 5 12347.6789")
        assert found[3].startswith("device [##########] 931.32 GiB of 931.32 GiB")
    if width == 250:
        assert found[3].endswith("read 83.33 GB/s  write 83.33 GB/s  waits 75% (collective 50%)")


def test_steps_that_come_faster_than_eyes_are_not_all_drawn(shown) -> None:
    for step in range(1000):
        shown.show(report(step, 1.0))
    assert 1 <= shown._drawing.drawn < 1000


def test_a_curve_goes_from_the_least_to_the_most() -> None:
    assert sparkline([1.0, 2.0, 3.0], 10) == "▁▅█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert len(sparkline(list(range(1000)), 32)) == 32
