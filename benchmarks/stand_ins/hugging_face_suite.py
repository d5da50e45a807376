"""A plugin of pytest for `hugging_face_suite.py`: tests that ask for GPUs run, on several processes."""

from __future__ import annotations

import os
from typing import Any

import accelerate.test_utils
import accelerate.test_utils.testing
import transformers.testing_utils

_GPUS = (
    "require_cuda",
    "require_fp16",
    "require_multi_device",
    "require_multi_gpu",
    "require_non_cpu",
    "require_torch_accelerator",
    "require_torch_multi_accelerator",
)


def _as_it_is(case: Any) -> Any:
    return case


for _module in (accelerate.test_utils, accelerate.test_utils.testing, transformers.testing_utils):
    for _name in _GPUS:
        if hasattr(_module, _name):
            setattr(_module, _name, _as_it_is)
transformers.testing_utils.backend_device_count = lambda device: int(os.environ["SUITE_RANKS"])
