"""DeepSpeed's modules are made from one table as they are imported, and behave as modules in files do."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

import infinity
from infinity.integrations.as_deepspeed import FOLDER
from infinity.integrations.deepspeed.namespace import MODULES, VERSION
from tests.integrations.processes import result, script

BELOW_INFINITY = [name for name in MODULES if name and name.partition(".")[0] not in ("checkpoint", "zero")]

IMPORTS = """
import importlib, importlib.metadata, importlib.util, json, pickle, runpy, sys
spec = importlib.util.find_spec("deepspeed.ops.adam")
import deepspeed
from deepspeed.runtime.zero.partition_parameters import is_zero_param
import deepspeed.ops.op_builder
found = {"file": deepspeed.__file__, "package": spec.submodule_search_locations is not None}
found["version"] = importlib.metadata.version("deepspeed"), deepspeed.__version__
found["names"], found["unsupported"] = {}, {}
for name in json.loads(sys.argv[1]):
    try:
        module = importlib.import_module(f"deepspeed.{name}" if name else "deepspeed")
    except ImportError as error:
        found["unsupported"][name] = str(error)
    else:
        found["names"][name] = [each for each in module.__all__ if hasattr(module, each)]
assert pickle.loads(pickle.dumps(is_zero_param)) is is_zero_param
stored = pickle.loads(b"cdeepspeed.ops.adam.multi_tensor_apply\\nMultiTensorApply\\n.")
assert stored is deepspeed.ops.adam.fused_adam.MultiTensorApply
assert deepspeed.utils.instrument_w_nvtx is deepspeed.utils.nvtx.instrument_w_nvtx
assert deepspeed.utils.nvtx.instrument_w_nvtx.__globals__ is vars(deepspeed.utils.nvtx)
assert importlib.reload(deepspeed.ops.lion) is deepspeed.ops.lion
assert importlib.util.find_spec("deepspeed.nothing") is None
sys.argv = ["", "--help"]
try:
    runpy.run_module("deepspeed.utils.zero_to_fp32", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    found["main"] = ended.code
print("RESULT", json.dumps(found))
"""


def test_every_module_of_the_table_is_there_or_says_what_to_use(tmp_path: Path) -> None:
    file = tmp_path / "imports.py"
    file.write_text(IMPORTS)
    ended = script(file, json.dumps(list(MODULES)))
    assert "usage: zero_to_fp32.py" in ended.stdout
    found = result(ended)
    assert found["file"] == str(FOLDER / "deepspeed" / "__init__.py")
    assert found["package"]
    assert found["version"] == [f"{VERSION}+infinity"] * 2
    assert found["main"] == 0
    for name, row in MODULES.items():
        if row.instead:
            assert found["unsupported"].pop(name) == f"deepspeed.{name} is not supported by infinity: {row.instead}"
        else:
            assert set(found["names"][name]) >= {*row.names, *row.submodules}
    assert found["unsupported"] == {}


@pytest.mark.parametrize("name", [name for name in BELOW_INFINITY if not MODULES[name].instead])
def test_modules_are_there_below_infinity(name: str) -> None:
    module = importlib.import_module(f"infinity.{name}")
    assert hasattr(module, "__path__") == MODULES[name].is_package or MODULES[name].fallback is not None
    for offered in MODULES[name].names:
        getattr(module, offered)


def test_packages_with_files_have_no_others() -> None:
    importlib.import_module("infinity.checkpoint")
    for name in ("infinity.checkpoint.constants", "infinity.nothing", "infinity.ops.nothing"):
        assert importlib.util.find_spec(name) is None
    assert importlib.import_module("infinity.zero").__file__ is not None


def test_another_deepspeed_has_its_own_modules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("deepspeed")
    other.__path__ = []
    monkeypatch.setitem(sys.modules, "deepspeed", other)
    assert importlib.util.find_spec("deepspeed.ops") is None


def test_classes_are_pickled_by_their_homes() -> None:
    adam = importlib.import_module("infinity.ops.adam").FusedAdam
    assert pickle.loads(pickle.dumps(adam)) is adam
    assert adam.__module__.startswith(f"{infinity.__name__}.integrations.deepspeed.")
