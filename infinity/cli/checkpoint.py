"""`infinity checkpoint`: inspect, verify, reshard, export and import checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from infinity.cli.arguments import path_argument
from infinity.cli.packages import needed_packages
from infinity.cli.progress import Progress
from infinity.cli.terminal import plain
from infinity.config import format_size

if TYPE_CHECKING:
    from torch import nn

_FORMAT_HELP = "safetensors: for transformers; dcp: for torch.distributed.checkpoint, with optimizer states, in float32"
_DTYPES = ("bfloat16", "float16", "float32")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("checkpoint", help="inspect, verify, reshard, export or import a checkpoint")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add(commands, "inspect", _inspect, "print what a checkpoint contains, without reading a tensor")
    _add(commands, "verify", _verify, "read a whole checkpoint and compare it with its checksums")
    reshard = _add(
        commands, "reshard", _reshard, "rewrite a checkpoint as one rank or as several, or in another state format"
    )
    reshard.add_argument("target", type=path_argument, help="directory for the new checkpoint; may be the source's")
    reshard.add_argument("--state-format", help="fp32, split, master, bf16 or int8 (default: the checkpoint's)")
    reshard.add_argument("--ranks", type=int, default=1, help="number of ranks whose shards are written (default 1)")
    export = _add(commands, "export", _export, "write a checkpoint's model for transformers, or its adapters for PEFT")
    export.add_argument("target", type=path_argument, help="directory to write")
    export.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the weights (default: that of the computation; adapters: float32)"
    )
    export.add_argument(
        "--model",
        help="model directory, size or Hugging Face name, for configuration and tokenizer (default: the model of "
        "`infinity train`)",
    )
    export.add_argument("--format", choices=("safetensors", "dcp"), default="safetensors", help=_FORMAT_HELP)
    importing = _add(commands, "import", _import, "convert a checkpoint of DeepSpeed (ZeRO 1 to 3) or of torch")
    importing.add_argument("target", type=path_argument, help="directory for the new checkpoint")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("source", type=path_argument, help="a checkpoint, or a directory of checkpoints")
    parser.add_argument("--tag", help="name of the checkpoint in the directory (default: the last one)")
    parser.add_argument("--json", action="store_true", help="one JSON line on standard output")
    parser.set_defaults(run=run)
    return parser


def _inspect(args: argparse.Namespace) -> int:
    from infinity.checkpoint.inspection import inspect

    found = inspect(args.source, args.tag)
    if args.json:
        print(json.dumps(asdict(found)))
        return 0
    moments = " and ".join(name for name in found.moments if name is not None) or "no moments"
    rows = {
        "checkpoint": found.path,
        "step": f"{found.global_steps:,}",
        "run": found.run or "not noted",
        "saved by": f"{found.ranks} rank{'' if found.ranks == 1 else 's'}, files: {found.files}",
        "parameters": f"{found.trained_parameters:,} trained, {found.frozen_parameters:,} frozen",
        "states": f"{found.state_format}: the master, {moments}",
        "size": f"{format_size(found.nbytes)} in {found.tensors} tensors",
        "here": " ".join(f"{tag}*" if tag == found.latest else tag for tag in found.tags) + "  (* the last one)",
    }
    if found.missing:
        rows["missing"] = f"{', '.join(found.missing[:3])}{' and others' if len(found.missing) > 3 else ''}"
    for name, value in rows.items():
        print(plain(f"{name:<12} {value}"))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from infinity.checkpoint.inspection import inspect, verify

    found = inspect(args.source, args.tag)
    done, start_s, one_at_a_time = 0, time.perf_counter(), Lock()

    def show(nbytes: int) -> None:  # called in several threads
        nonlocal done
        with one_at_a_time:
            done += nbytes
            progress.show("verified", done / max(1, found.nbytes))

    with Progress() as progress:
        path, manifest = verify(args.source, args.tag, show)
    seconds = time.perf_counter() - start_s
    if args.json:
        print(json.dumps({"path": str(path), "whole": True, "bytes": manifest.nbytes, "seconds": seconds}))
    else:
        print(f"{path}: whole, {manifest.nbytes:,} bytes, files: {len(manifest.files)}, {seconds:.1f} s")
    return 0


def _reshard(args: argparse.Namespace) -> int:
    from infinity.checkpoint.conversion import checkpoint_at, convert

    start_s = time.perf_counter()
    source = checkpoint_at(args.source, args.tag)
    with Progress() as progress:
        show = partial(_written, progress)
        path = convert(source, args.target, state_format=args.state_format, ranks=args.ranks, progress=show)
    return _show_new(args, path, start_s, "state_format", "format {}")


def _export(args: argparse.Namespace) -> int:
    import torch

    from infinity.checkpoint.dcp import export_dcp
    from infinity.checkpoint.export import files_of_library
    from infinity.checkpoint.inspection import export_weights

    start_s = time.perf_counter()
    if args.format == "dcp":
        export_dcp(args.source, args.target, tag=args.tag)
    else:
        model, tokenizer = _described(args)
        dtype = None if args.dtype is None else getattr(torch, args.dtype)
        if model is not None and hasattr(model, "peft_config"):
            from infinity.integrations.adapters import export_adapters

            export_adapters(args.source, args.target, model, dtype=dtype or torch.float32, tag=args.tag)
        else:
            export_weights(args.source, args.target, dtype=dtype, tag=args.tag, model=model)
        if tokenizer is not None:
            with files_of_library(args.target) as new:
                tokenizer.save_pretrained(new)
    seconds = time.perf_counter() - start_s
    files = sorted(path.name for pattern in ("*.safetensors", "*.distcp") for path in args.target.glob(pattern))
    nbytes = sum((args.target / name).stat().st_size for name in files)
    if args.json:
        print(json.dumps({"path": str(args.target), "files": files, "bytes": nbytes, "seconds": seconds}))
    else:
        print(f"{args.target}: {', '.join(files)}, {nbytes:,} bytes, {seconds:.1f} s")
    return 0


def _described(args: argparse.Namespace) -> tuple[nn.Module | None, Any | None]:
    """Return the model on the meta device and its tokenizer, by --model or the checkpoint; None if neither names one.

    The model of `infinity train --lora` has its adapters.

    Raises:
        ConfigError: the model is missing, or adapters need PEFT and it is not installed.
    """
    from infinity.checkpoint.inspection import client_state

    trained = client_state(args.source, args.tag).get("trained")
    trained = trained if isinstance(trained, dict) else {}
    name = args.model or trained.get("model")
    if name is None:
        print(
            f"note: the checkpoint does not name its model, so {args.target} gets no config.json; give --model "
            "DIRECTORY for a directory that transformers loads",
            file=sys.stderr,
        )
        return None, None
    with needed_packages("checkpoint export"):
        from infinity.cli.training.lora import with_adapters
        from infinity.cli.training.models import model_directory, model_shape
        from infinity.cli.training.tokenizers import byte_tokenizer, find_tokenizer
    directory = model_directory(name, weights=False)
    asked = trained.get("tokenizer") if args.model in (None, trained.get("model")) else None
    tokenizer = find_tokenizer(name if directory is None else str(directory), asked)
    if tokenizer is None and trained:
        tokenizer = byte_tokenizer()  # `infinity train` without a tokenizer trains on bytes
    model, rank = model_shape(name), trained.get("lora")
    return with_adapters(model, rank) if rank else model, tokenizer


def _import(args: argparse.Namespace) -> int:
    from infinity.checkpoint.dcp import METADATA, import_dcp
    from infinity.checkpoint.deepspeed import import_deepspeed

    start_s = time.perf_counter()
    is_dcp = (args.source / (args.tag or "") / METADATA).is_file()
    take_over = import_dcp if is_dcp else import_deepspeed
    with Progress() as progress:
        path = take_over(args.source, args.target, tag=args.tag, progress=partial(_written, progress))
    return _show_new(args, path, start_s, "global_steps", "step {:,}")


def _written(progress: Progress, done: int, total: int) -> None:
    progress.show("written", done / max(1, total))


def _show_new(args: argparse.Namespace, path: Path, start_s: float, fact: str, words: str) -> int:
    """Print the size of a new checkpoint and one fact about it. Return the exit code."""
    from infinity.checkpoint.inspection import inspect

    seconds, new = time.perf_counter() - start_s, inspect(path)
    value = getattr(new, fact)
    if args.json:
        print(json.dumps({"path": str(path), fact: value, "bytes": new.nbytes, "seconds": seconds}))
    else:
        print(f"{path}: {words.format(value)}, {new.nbytes:,} bytes, files: {new.files}, {seconds:.1f} s")
    return 0
