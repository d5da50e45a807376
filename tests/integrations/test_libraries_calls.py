"""Every name that installed libraries take from `deepspeed` is there, but for what is known to be refused."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.processes import result, script

LIBRARIES = ("accelerate", "peft", "trl", "transformers", "lightning", "pytorch_lightning")  # those that are installed

# What is missing, and why that is right.
EXPECTED = {
    "deepspeed.runtime.sequence_parallel.": "refused by name where it is imported",
    "deepspeed.runtime.utils.move_to_device in accelerate/test_utils": "a test of sequence parallelism",
    "deepspeed.utils.is_initialized in transformers": "DeepSpeed has none either; asked for after its `comm` has none",
    "param.ds_device_mesh in accelerate": "no parameter's: accelerate's own, for sequence parallelism",
    "param.ds_external_parameters in trl": "no parameter's: of the module of `parameter_offload`, which has it",
}


def test_what_libraries_take_from_deepspeed_is_there() -> None:
    found = result(script(Path(__file__).parent / "libraries_calls.py", *LIBRARIES))
    missing = [name for name in found["missing"] if not name.startswith(tuple(EXPECTED))]
    assert not missing
    assert found["there"] > 100
