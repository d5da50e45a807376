"""`zero.estimate_*` gives DeepSpeed's numbers for the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity import zero
from tests.behaviour.reference import tiny_gpt2, tiny_llama

T5_3B, GPT2 = 2_851_000_000, 124_439_808

# What DeepSpeed 0.19.8 returns: (total, GPUs per node, nodes), then (per node, per GPU) with offload and without.
ZERO2 = [
    ((T5_3B, 1, 1), (68_424_000_000, 5_702_000_000), (17_106_000_000, 57_020_000_000)),
    ((T5_3B, 8, 1), (136_848_000_000, 5_702_000_000), (136_848_000_000, 12_116_750_000)),
    ((GPT2, 3, 7), (15_679_415_808, 248_879_616), (2_239_916_544, 355_542_308)),
]
# (total, largest layer, GPUs per node, nodes), then bytes of a node and of a GPU for both sections offloaded, the
# optimizer's only, and none; each with and without zero.Init.
ZERO3 = [
    (
        (T5_3B, 32_000_000, 1, 1),
        [76_977_000_000, 76_977_000_000, 68_424_000_000, 68_424_000_000, 192_000_000, 17_106_000_000],
        [128_000_000, 128_000_000, 5_830_000_000, 5_830_000_000, 51_446_000_000, 51_446_000_000],
    ),
    (
        (T5_3B, 32_000_000, 8, 1),
        [76_977_000_000, 136_848_000_000, 68_424_000_000, 136_848_000_000, 1_536_000_000, 136_848_000_000],
        [128_000_000, 128_000_000, 840_750_000, 840_750_000, 6_542_750_000, 6_542_750_000],
    ),
    (
        (GPT2, 38_597_376, 3, 7),
        [479_982_116, 2_239_916_544, 426_650_770, 2_239_916_544, 694_752_768, 2_239_916_544],
        [154_389_504, 154_389_504, 166_240_914, 166_240_914, 261_052_196, 261_052_196],
    ),
]


@pytest.mark.parametrize(("given", "offloaded", "kept"), ZERO2)
def test_stage_2_needs_are_deepspeeds(given, offloaded, kept) -> None:
    assert zero.estimate_zero2_model_states_mem_needs(*given) == offloaded
    assert zero.estimate_zero2_model_states_mem_needs(*given, cpu_offload=False) == kept
    rows = zero.estimate_zero2_model_states_mem_needs_all_cold(*given)
    assert [(row.cpu_bytes, row.gpu_bytes) for row in rows] == [offloaded, kept]


@pytest.mark.parametrize(("given", "per_node", "per_gpu"), ZERO3)
def test_stage_3_needs_are_deepspeeds(given, per_node, per_gpu) -> None:
    rows = zero.estimate_zero3_model_states_mem_needs_all_cold(*given)
    assert [row.cpu_bytes for row in rows] == per_node
    assert [row.gpu_bytes for row in rows] == per_gpu
    assert rows[2].options == "offload_param=none, offload_optimizer=cpu, zero_init=1"
    row = zero.estimate_zero3_model_states_mem_needs(*given, cpu_offload_params=False, zero_init=False)
    assert row == (per_node[3], per_gpu[3], 4 * given[1])


def test_the_factor_of_host_memory_can_be_chosen() -> None:
    (tight, _), (wide, _) = (
        zero.estimate_zero2_model_states_mem_needs(1000, additional_buffer_factor=factor) for factor in (1.0, 2.0)
    )
    assert (tight, wide) == (16_000, 32_000)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_a_live_model_is_counted_with_tied_weights_once(make, device, capsys) -> None:
    model: Any = make().to(torch.device(device))
    model.tie_weights()  # which moving to meta undoes
    total = sum(param.numel() for param in model.parameters())
    largest = max(model.get_parameter(name).numel() for name in dict(model.named_parameters()))
    if make is tiny_gpt2:
        largest += 4 * 64  # the feed-forward layer, with its bias
    live = zero.estimate_zero3_model_states_mem_needs_all_live(model, 2, 3)
    assert live == zero.estimate_zero3_model_states_mem_needs_all_cold(total, largest, 2, 3)
    two = zero.estimate_zero2_model_states_mem_needs_all_live(model, 2, 3)
    assert two == zero.estimate_zero2_model_states_mem_needs_all_cold(total, 2, 3)
    printed = capsys.readouterr().out
    assert "on 3 node(s) of 2 GPU(s)" in printed
    for row in (*live, *two):
        assert f"{row.cpu_bytes / 2**30:7.2f} GiB | {row.gpu_bytes / 2**30:6.2f} GiB | {row.options}" in printed
