"""`deepspeed.utils.zero_to_fp32`: return float32 weights of a checkpoint as a state dict, or write them to a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from infinity.checkpoint.directory import latest_tag
from infinity.checkpoint.extra import read_extra, tied_names
from infinity.checkpoint.format import FROZEN_FIELD, MASTER_FIELD, read_manifest
from infinity.checkpoint.stored import StoredReader, check_files
from infinity.config import named_size
from infinity.errors import CheckpointError, ConfigError
from infinity.zero.model_parts import has_numbers
from infinity.zero.param_access import owner_of


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the exact float32 masters of a checkpoint, and frozen parameters and buffers, by name, in host memory.

    Parameters and buffers with several names are in the result under all of them, as one tensor.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: `lazy_mode` is true.
    """
    if lazy_mode:
        raise ConfigError("lazy_mode is not supported: leave it out, or read the checkpoint's safetensors yourself")
    tag = tag or latest_tag(Path(checkpoint_dir))
    if tag is None:
        raise CheckpointError(f"{checkpoint_dir} has no checkpoint: give the directory that save_checkpoint was given")
    path = Path(checkpoint_dir) / tag
    manifest = read_manifest(path)
    state: dict[str, torch.Tensor] = {}
    with StoredReader(path, check_files(path, manifest.tensors)) as reader:
        for field in (MASTER_FIELD,) if exclude_frozen_parameters else (MASTER_FIELD, FROZEN_FIELD):
            state |= {name: reader.whole(f"{field}.{name}").float() for name in manifest.stored(field)}
    extra = read_extra(path, manifest)
    state |= {name: value.float() if has_numbers(value) else value for name, value in extra["buffers"].items()}
    names = extra.get("tied")  # missing in older checkpoints
    tied = {name: state[first] for name, first in names.items() if first in state} if isinstance(names, dict) else {}
    return state | tied


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the float32 weights of a checkpoint into its model. A model without an engine is converted to float32."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if all(owner_of(param) is None for param in model.parameters()):
        model.float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = tied_names(model)
    lacking = [name for name in missing if tied.get(name) not in state]
    if lacking or unexpected:
        name = (lacking or unexpected)[0]
        side = "the checkpoint" if lacking else "the model"
        raise CheckpointError(f"{checkpoint_dir} is of another model: {side} has no parameter `{name}`")
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the float32 weights of a checkpoint into one file, `pytorch_model.bin` or `model.safetensors`.

    Raises:
        ConfigError: the weights are larger than `max_shard_size`, or that is no size.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    once = {id(value): name for name, value in reversed(state.items())}  # safetensors files have no tied tensors
    nbytes = sum(state[name].nbytes for name in once.values())
    if max_shard_size is not None and nbytes > named_size("max_shard_size", max_shard_size):
        raise ConfigError(
            f"the weights have {nbytes} bytes and max_shard_size is {max_shard_size}, but one file is written: pass "
            "max_shard_size=None, or use engine.save_16bit_model, which writes several"
        )
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        weights = {name: value for name, value in state.items() if once[id(value)] == name}
        save_file(weights, Path(output_dir) / "model.safetensors", {"format": "pt"})
    else:
        torch.save(state, Path(output_dir) / "pytorch_model.bin")


# A script that is written into the directory of checkpoints, as in DeepSpeed: `python zero_to_fp32.py . weights`.
SCRIPT_NAME = "zero_to_fp32.py"
SCRIPT = """from infinity.utils.zero_to_fp32 import main

main()
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script's command line."""
    parser = argparse.ArgumentParser(description="Write the float32 weights of a checkpoint into one file.")
    parser.add_argument("checkpoint_dir", help="the directory that save_checkpoint was given")
    parser.add_argument("output_dir", help="where pytorch_model.bin is written")
    parser.add_argument("-t", "--tag", help="tag of the checkpoint; by default the last one")
    parser.add_argument("--max_shard_size", default=None, help="refuse to write more than this, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write model.safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    args = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        args.max_shard_size,
        args.safe_serialization,
        args.tag,
        args.exclude_frozen_parameters,
    )
