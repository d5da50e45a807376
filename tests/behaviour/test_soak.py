"""The soak benchmark, short."""

from __future__ import annotations

from benchmarks.soak import soak


def test_losses_are_torchs_while_everything_changes_at_random(tmp_path) -> None:
    result = soak(tmp_path, steps=60, seed=1)
    assert result.worst_loss < 1e-3
    assert result.engines > 1
    assert result.evaluations
    assert result.last_loss < result.first_loss
    assert not list(tmp_path.iterdir())
