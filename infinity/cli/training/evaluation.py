"""Computes the loss on samples that are not trained on."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from infinity.cli.training.apart import model_inputs
from infinity.cli.training.data import Source
from infinity.cli.training.progress import Evaluation
from infinity.cli.training.ranks import rank_and_size
from infinity.engine import Engine

_IGNORED = -100  # the label that loss functions ignore


class Evaluator:
    """Evaluates an engine's model on the same samples every time. Each rank takes a part of them.

    Args:
        chosen: numbers of the samples in the source.
    """

    def __init__(self, engine: Engine, source: Source, chosen: torch.Tensor) -> None:
        self._engine = engine
        self._source = source
        self._chosen = chosen

    def run(self) -> Evaluation:
        """Return the mean loss per token. All ranks must call this together; each makes equally many passes."""
        engine = self._engine
        rank, ranks = rank_and_size()
        size, count = engine.config.micro_batch_size, len(self._chosen)
        start_s = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64)  # the sum of losses, and the number of tokens
        trains = engine.module.training
        engine.eval()
        try:
            with torch.no_grad():
                for first in range(rank * size, -(-count // (ranks * size)) * ranks * size, ranks * size):
                    batch, tokens = self._batch(first, min(size, max(1, count - first)))
                    loss = engine(**model_inputs(batch)).loss
                    if first < count:
                        total += torch.tensor([float(loss) * tokens, tokens], dtype=torch.float64)
        finally:
            engine.train(trains)
        total = total.to(engine.device) if ranks > 1 and engine.device.type != "cpu" else total
        if ranks > 1:
            dist.all_reduce(total)
        losses, tokens_of_all = total.tolist()
        return Evaluation(
            engine.global_steps, losses / tokens_of_all, int(tokens_of_all), time.perf_counter() - start_s
        )

    def _batch(self, first: int, size: int) -> tuple[dict[str, torch.Tensor], int]:
        """Return samples from `first` on, and the number of tokens in their loss. The last sample may be repeated."""
        numbers = [min(first + index, len(self._chosen) - 1) for index in range(size)]
        rows = [self._source.sample(int(self._chosen[number])) for number in numbers]
        batch = {name: torch.stack([row[name] for row in rows]).to(self._engine.device) for name in rows[0]}
        return batch, int((batch["labels"][:, 1:] != _IGNORED).sum())
