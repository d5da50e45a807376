"""`infinity train`: train a causal language model on text."""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

from infinity.cli.arguments import path_argument
from infinity.cli.packages import needed_packages
from infinity.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("train", help="train a language model with its states in the tiers")
    parser.add_argument("--model", default="gpt2", help="a size such as gpt2-xl or llama:1.3b, or a model directory")
    parser.add_argument(
        "--data",
        type=path_argument,
        nargs="+",
        help="text files or directories (default: Python's own library), or .jsonl files with `text` or `messages`",
    )
    parser.add_argument(
        "--eval-split", type=float, metavar="SHARE", help="hold this share of the samples out, and evaluate on them"
    )
    parser.add_argument(
        "--eval-data", type=path_argument, nargs="+", help="evaluate on these files, of the same kinds as --data"
    )
    parser.add_argument("--eval-every", type=int, default=100, metavar="N", help="steps (default 100), and at the end")
    parser.add_argument(
        "--tokenizer", help="a tokenizer directory, or `bytes` (default: the model directory's, or else bytes)"
    )
    parser.add_argument("--config", type=path_argument, required=True, help="a DeepSpeed-style JSON file")
    parser.add_argument("--steps", type=int, default=100, help="updates to train for, those before --resume included")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a sample")
    parser.add_argument(
        "--micro-batch-size", type=int, metavar="N", help="samples a forward pass, instead of the JSON's"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--lr", type=float, help="learning rate, instead of the JSON's or the checkpoint's")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the data")
    parser.add_argument("--save-dir", type=path_argument, default=Path("checkpoints"), help="where checkpoints go")
    parser.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="save a checkpoint every N steps, while training goes on; at the end, too",
    )
    parser.add_argument("--keep-last", type=int, metavar="N", help="remove all but the run's last N checkpoints")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last step on the drives, or the last whole checkpoint in --save-dir",
    )
    parser.add_argument(
        "--checkpoint-activations", action="store_true", help="keep the inputs of blocks only, and recompute the rest"
    )
    parser.add_argument(
        "--log", type=path_argument, metavar="FILE", help="append every step to it, for `infinity report`"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line a step on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    for name in ("steps", "seq_len", "save_every", "keep_last", "micro_batch_size", "eval_every"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.lr is not None and not 0 <= args.lr < math.inf:
        raise ConfigError(f"--lr is {args.lr}; it must be a number from 0 on")
    if args.eval_split is not None and not 0 < args.eval_split < 1:
        raise ConfigError(f"--eval-split is {args.eval_split}; it must be a share between 0 and 1, such as 0.05")
    if args.eval_split is not None and args.eval_data is not None:
        raise ConfigError("both --eval-split and --eval-data are given; give one")
    with needed_packages("train"):
        from infinity.cli.training.loop import Settings, train  # noqa: PLC0415  (torch and transformers take seconds)
        from infinity.cli.training.sources import DataOptions  # noqa: PLC0415  (the same)
    return train(
        Settings(
            model=args.model,
            data=DataOptions(
                data=tuple(args.data or [Path(sysconfig.get_path("stdlib"))]),
                seq_len=args.seq_len,
                seed=args.seed,
                eval_split=args.eval_split,
                eval_data=tuple(args.eval_data or ()),
            ),
            eval_every=args.eval_every,
            tokenizer=args.tokenizer,
            config=args.config,
            steps=args.steps,
            micro_batch_size=args.micro_batch_size,
            device=args.device,
            lr=args.lr,
            save_dir=args.save_dir,
            save_every=args.save_every,
            keep_last=args.keep_last,
            resume=args.resume,
            checkpoint_activations=args.checkpoint_activations,
            log=args.log,
            json=args.json,
        )
    )
