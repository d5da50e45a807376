"""A plugin of pytest for `deepspeed_suite.py`: starts ranks quickly, and takes bf16 away where that is asked for."""

from __future__ import annotations

import os
from multiprocessing import set_forkserver_preload
from typing import Any

import torch

from infinity.integrations.deepspeed.accelerator import Accelerator

if os.environ["SUITE_WITHOUT_BF16"] == "1":
    Accelerator.is_bf16_supported = lambda self: False  # type: ignore[method-assign]
    Accelerator.supported_dtypes = lambda self: [torch.float32, torch.float16]  # type: ignore[method-assign]


def pytest_configure(config: Any) -> None:
    # The tests start their ranks from a fork server: one that has torch imported saves seconds for each.
    set_forkserver_preload(["torch", "torch._dynamo", "numpy", "pytest", "deepspeed", __name__, "unit.common"])
