"""The link's rates are those that the emulated device is given."""

from __future__ import annotations

import pytest
import torch

from infinity.profiling.link import link_rates
from infinity.profiling.processor import matmul_rates
from tests.device import simdev, target

pytestmark = target.emulated_only

COPY_BYTES = 4 << 20
MIB = 1 << 20


@pytest.mark.parametrize(("up", "down"), [(400 * MIB, 200 * MIB), (150 * MIB, 300 * MIB)])
def test_each_way_has_its_rate(up, down) -> None:
    wanted = {
        "to_device": up,
        "to_host": down,
        "both_to_device": up,  # each half of the link has a rate of its own
        "both_to_host": down,
    }
    shares = []
    for _ in range(5):  # a busy machine may need another try
        with simdev.configured(h2d=up, d2h=down):
            rates = link_rates(torch.device("simdev"), COPY_BYTES)
        assert rates["device"] == "simdev"
        shares.append({name: rates[f"{name}_bytes_per_s"] / rate for name, rate in wanted.items()})
        assert max(shares[-1].values()) < 1.1, shares
        if min(shares[-1].values()) > 0.5:
            return
    pytest.fail(f"the link is slower than it should be: {shares}")


def test_products_run_on_the_device() -> None:
    (rates,) = matmul_rates(torch.device("simdev"), (torch.float32,))
    assert rates["device"] == "simdev"
    assert rates["flop_per_s"] > 0
