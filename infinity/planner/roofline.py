"""The roofline of ZeRO-Infinity's paper (Rajbhandari et al., arXiv 2104.07857, section 4), for comparison.

[Note: arithmetic intensity]
Flop of a transformer over the bytes of a kind of state that move for them, in 16 bits with Adam: a block of width h
does 24 h^2 flop a token forward and 72 h^2 backward with recomputation, on 12 h^2 parameters of 2 bytes that move three
times and gradients that move once; optimizer states are four times as many bytes; a checkpoint is 2 h bytes a token,
moved twice.

`step_time` predicts from the bytes of the plan instead: what stays in memory does not move, reads and writes share a
drive or do not, and the schedule says what runs under what.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Intensity:
    """Flop a byte, by what moves."""

    params_and_grads: float
    optimizer_states: float
    activations: float


def intensity(batch: int, seq: int, width: int, checkpoint_interval: int = 1) -> Intensity:
    """Of `batch` samples of `seq` tokens a device, with one checkpoint for so many blocks."""
    tokens = float(batch * seq)
    return Intensity(tokens, tokens / 4, 24.0 * width * checkpoint_interval)


def efficiency(flop_per_byte: float, bytes_per_s: float, peak_flop_per_s: float) -> float:
    """The share of the peak that is left when nothing overlaps."""
    reached = flop_per_byte * bytes_per_s
    return reached / (reached + peak_flop_per_s)


def bandwidth_for(share: float, flop_per_byte: float, peak_flop_per_s: float) -> float:
    """Bytes a second with which `efficiency` is `share`."""
    return share / (1 - share) * peak_flop_per_s / flop_per_byte
