"""In the path of a process without a GPU, to have transformers and accelerate take it for one that has some.

accelerate counts one process there unless somebody names the backend, and transformers allows bf16 with `use_cpu`
alone: tests that are written for GPUs do neither.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any


def _transformers(module: Any) -> None:
    module.is_torch_bf16_gpu_available = lambda: True


def _accelerate(module: Any) -> None:
    plain = module.PartialState._prepare_backend

    def named(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> tuple[Any, Any]:
        found = plain(self, cpu, sagemaker_dp, backend)
        if found[0] is None and int(os.environ.get("LOCAL_RANK", "-1")) != -1:
            return "gloo", module.DistributedType.MULTI_CPU
        return found

    module.PartialState._prepare_backend = named


class _After(importlib.abc.MetaPathFinder):
    """Changes modules when they have been imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self._changes:
            return None
        change = self._changes.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_change(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = then_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _After({"transformers.utils.import_utils": _transformers, "accelerate.state": _accelerate}))
