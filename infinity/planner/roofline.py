"""The roofline of ZeRO-Infinity's paper (Rajbhandari et al., arXiv 2104.07857, section 4), for comparison.

[Note: arithmetic intensity]
A transformer's flop divided by the bytes of each kind of state that move for them, in 16 bits with Adam. A block of
width h does 24 h^2 flop a token in forward and 72 h^2 in backward with recomputation. Its 12 h^2 parameters of 2 bytes
move three times and its gradients once. Optimizer states are four times as many bytes. A checkpoint has 2 h bytes a
token, which move twice.

`step_time` predicts from the bytes of the plan instead: fields that stay in memory do not move, reads and writes may
share a drive, and the schedule decides which operations overlap.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Intensity:
    """Flop a byte, by kind of state."""

    params_and_grads: float
    optimizer_states: float
    activations: float


def intensity(batch: int, seq: int, width: int, checkpoint_interval: int = 1) -> Intensity:
    """Return the intensities for `batch` samples of `seq` tokens a device, with one checkpoint for so many blocks."""
    tokens = float(batch * seq)
    return Intensity(tokens, tokens / 4, 24.0 * width * checkpoint_interval)


def efficiency(flop_per_byte: float, bytes_per_s: float, peak_flop_per_s: float) -> float:
    """Return the share of the peak that is reached if nothing overlaps."""
    reached = flop_per_byte * bytes_per_s
    return reached / (reached + peak_flop_per_s)


def bandwidth_for(share: float, flop_per_byte: float, peak_flop_per_s: float) -> float:
    """Return the bytes a second with which `efficiency` is `share`."""
    return share / (1 - share) * peak_flop_per_s / flop_per_byte
