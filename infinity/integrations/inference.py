"""Generate with a model whose weights are in the tiers, with a memory budget for keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from infinity.config import Config, format_size, size_to_set
from infinity.errors import CapacityError, ConfigError
from infinity.integrations.deepspeed.script_engine import Engine

# The name of the argument of `generate` that takes a cache; transformers 5.24 has renamed it.
CACHE_ARGUMENT = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"


class InferenceEngine(Engine):
    """An engine without training state.

    Attributes:
        cache_bytes: the most bytes of keys and values during `generate`; None for no limit.
    """

    cache_bytes: int | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's `generate` with a cache that stays within the budget.

        Raises:
            CapacityError: keys and values of these sequences and tokens exceed the budget.
        """
        model: Any = self.module
        has_cache = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        if self.cache_bytes is not None and not has_cache:
            new_tokens = kwargs.get("max_new_tokens") or getattr(model.generation_config, "max_new_tokens", None) or 1
            kwargs[CACHE_ARGUMENT] = BudgetedCache(model.config, self.cache_bytes, new_tokens)
        return model.generate(*args, **kwargs)


class BudgetedCache(DynamicCache):
    """Keys and values of a generation. An update that would exceed the budget is refused.

    The check includes the second copy of a layer that exists for a moment when the layer grows.

    Args:
        new_tokens: number of tokens to generate. Their keys and values are included in the check of the first update.
    """

    def __init__(self, config: Any, budget_bytes: int, new_tokens: int) -> None:
        super().__init__(config=config)
        self._budget_bytes = budget_bytes
        self._new_tokens = new_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add keys and values as the base class does. Raise CapacityError if they exceed the budget."""
        held = [_layer_bytes(layer) for layer in self.layers]
        more = key_states.nbytes + value_states.nbytes
        batch, tokens = key_states.shape[0], key_states.shape[-2]
        if not any(held):
            per_token = more // tokens
            lengths = [min(tokens + self._new_tokens, _window(layer)) for layer in self.layers]
            self._check(per_token * (sum(lengths) + max(lengths, default=0)), batch, tokens)
        here = held[layer_idx] if layer_idx < len(held) else 0
        self._check(sum(held) + here + more, batch, tokens)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check(self, nbytes: int, batch: int, tokens: int) -> None:
        if nbytes > self._budget_bytes:
            raise CapacityError(
                f"keys and values of {batch} sequences, {tokens} tokens and {self._new_tokens} new ones each, need "
                f"{format_size(nbytes)}, and kv_cache is {format_size(self._budget_bytes)}: raise it to "
                f"{size_to_set(nbytes)} or more, or generate fewer sequences or tokens at a time"
            )


def _layer_bytes(layer: Any) -> int:
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _window(layer: Any) -> int:
    """Return the most tokens that a layer keeps."""
    window = getattr(layer, "sliding_window", None)
    return window if isinstance(window, int) else 1 << 60


def reserve_cache(config: Config, cache_bytes: int, *, on_host: bool) -> Config:
    """Return the configuration with a compute memory budget that is smaller by the cache, if it has such a budget.

    Raises:
        ConfigError: the budget is not larger than the cache.
    """
    key = "host_memory" if on_host else "device_memory"
    budget = getattr(config.tiering, f"{key}_bytes")
    if budget is None:
        return config
    if budget <= cache_bytes:
        raise ConfigError(
            f"kv_cache is {format_size(cache_bytes)} and is taken from tiering.{key}, which is {format_size(budget)}: "
            "lower the one or raise the other"
        )
    return replace(config, tiering=replace(config.tiering, **{f"{key}_bytes": budget - cache_bytes}))
