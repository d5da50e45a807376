"""`infinity train`: train a causal language model on text."""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

from infinity.cli.arguments import check_least, name_argument, path_argument
from infinity.cli.packages import needed_packages
from infinity.cli.ready import config_argument
from infinity.errors import ConfigError

_MODEL = "gpt2"
_MAX_SEED = (1 << 32) - 1  # the data's order multiplies it by a million, which must fit in 64 bits
_COUNTS = ("steps", "seq_len", "save_every", "keep_last", "micro_batch_size", "accumulation", "eval_every", "lora")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a language model with its states in the tiers",
        description="infinity train MODEL DATA --nvme DIR --output OUT trains a model with its states on a drive and "
        "writes it as a directory that transformers loads. No configuration file is needed.",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", type=name_argument, help="the same as --model")
    parser.add_argument("data_paths", nargs="*", metavar="DATA", type=path_argument, help="the same as --data")
    parser.add_argument(
        "--model",
        type=name_argument,
        help="a size with random weights (gpt2-xl, llama:1.3b), a model directory, or a Hugging Face name such as "
        f"Qwen/Qwen2.5-0.5B (default: {_MODEL})",
    )
    parser.add_argument(
        "--data",
        type=path_argument,
        nargs="+",
        help="text files or directories (default: Python's own library); or .jsonl or .json files "
        "whose records have `text`, `messages`, `conversations` (ShareGPT), `instruction` and `output` (Alpaca), or "
        "`prompt` and `completion`",
    )
    parser.add_argument(
        "--tokenizer",
        type=name_argument,
        help="a tokenizer directory, or `bytes` (default: the model directory's, or else bytes)",
    )
    _add_configuration(parser.add_argument_group("configuration"))
    _add_steps(parser.add_argument_group("steps"))
    _add_saving(parser.add_argument_group("saving"))
    evaluation = parser.add_argument_group("evaluation")
    evaluation.add_argument(
        "--eval-split", type=float, metavar="SHARE", help="hold this share of the samples out, and evaluate on them"
    )
    evaluation.add_argument(
        "--eval-data", type=path_argument, nargs="+", help="evaluate on these files, of the same kinds as --data"
    )
    evaluation.add_argument(
        "--eval-every", type=int, default=100, metavar="N", help="evaluate every N steps (default 100), and at the end"
    )
    _add_reports(parser.add_argument_group("reports"))
    parser.set_defaults(run=run)


def _add_configuration(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nvme", type=path_argument, action="append", metavar="DIR", help="directory on a drive; can be repeated"
    )
    group.add_argument(
        "--config",
        type=config_argument,
        help="a DeepSpeed-style JSON file, or the name of a ready one (default with --nvme: all states on NVMe; those "
        "that fit stay in memory)",
    )
    group.add_argument("--host-memory", metavar="SIZE", help="host memory for states and buffers (tiering.host_memory)")
    group.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default: the file's, or the faster one")
    group.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    group.add_argument(
        "--checkpoint-activations", action="store_true", help="keep only the inputs of blocks, and recompute the rest"
    )
    group.add_argument(
        "--lora", type=int, nargs="?", const=16, metavar="RANK", help="train LoRA adapters by PEFT (default rank 16)"
    )


def _add_steps(group: argparse._ArgumentGroup) -> None:
    length = group.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="steps, including those before --resume (default 100)")
    length.add_argument("--epochs", type=float, metavar="N", help="passes over the data, instead of --steps")
    group.add_argument("--seq-len", type=int, default=256, help="tokens in a sample (default 256)")
    group.add_argument(
        "--micro-batch-size", type=int, metavar="N", help="samples in a forward pass (default: the file's)"
    )
    group.add_argument("--accumulation", type=int, metavar="N", help="micro-batches a step (default: the file's)")
    group.add_argument("--lr", type=float, help="learning rate (default: the file's or the checkpoint's)")
    group.add_argument(
        "--warmup", type=int, metavar="N", help="steps over which the learning rate rises (default: the file's, or 5%%)"
    )
    group.add_argument(
        "--schedule",
        choices=("constant", "linear", "cosine"),
        help="learning rate after the warm-up (default: the file's, or linear decay)",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the order of the data")


def _add_saving(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output",
        type=path_argument,
        metavar="DIR",
        help="where the trained model is written at the end and on Ctrl-C (default: trained/MODEL)",
    )
    group.add_argument("--no-save", action="store_true", help="do not write the trained model")
    group.add_argument(
        "--save-dir",
        type=path_argument,
        default=Path("checkpoints"),
        help="directory of checkpoints (default checkpoints)",
    )
    group.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="save a checkpoint every N steps, while training continues, and at the end",
    )
    group.add_argument("--keep-last", type=int, metavar="N", help="remove all but the run's last N checkpoints")
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in --save-dir, or from a later step of tiering.crash_consistent",
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log", type=path_argument, metavar="FILE", help="append every step to FILE, for `infinity report`"
    )
    group.add_argument("--tensorboard", type=path_argument, metavar="DIR", help="write TensorBoard event files")
    group.add_argument("--wandb", metavar="PROJECT", help="report to Weights & Biases")
    group.add_argument("--json", action="store_true", help="one JSON line a step on standard output")


def run(args: argparse.Namespace) -> int:
    """Train. Return the exit code."""
    _check(args)
    with needed_packages("train"):
        from infinity.cli.training.configuration import ConfigOptions
        from infinity.cli.training.loop import Saving, Settings, train
        from infinity.cli.training.sources import DataOptions
    return train(
        Settings(
            model=args.model or args.model_name or _MODEL,
            data=DataOptions(
                data=tuple(args.data or args.data_paths or [Path(sysconfig.get_path("stdlib"))]),
                seq_len=args.seq_len,
                seed=args.seed,
                eval_split=args.eval_split,
                eval_data=tuple(args.eval_data or ()),
            ),
            eval_every=args.eval_every,
            tokenizer=args.tokenizer,
            config=ConfigOptions(
                config=args.config,
                nvme=tuple(args.nvme or ()),
                host_memory=args.host_memory,
                micro_batch_size=args.micro_batch_size,
                accumulation=args.accumulation,
                lr=args.lr,
                warmup=args.warmup,
                schedule=args.schedule,
                precision=args.precision,
                tensorboard=args.tensorboard,
                wandb=args.wandb,
            ),
            steps=args.steps,
            epochs=args.epochs,
            lora=args.lora,
            device=args.device,
            saving=Saving(
                model=not args.no_save,
                output=args.output,
                checkpoints=args.save_dir,
                every=args.save_every,
                keep_last=args.keep_last,
                resume=args.resume,
            ),
            checkpoint_activations=args.checkpoint_activations,
            log=args.log,
            json=args.json,
        )
    )


def _check(args: argparse.Namespace) -> None:
    """Refuse options that contradict one another or are out of range."""
    check_least(args, 1, *_COUNTS)
    if args.warmup is not None and args.warmup < 0:
        raise ConfigError(f"--warmup is {args.warmup}; it must be a number of steps, at least 0")
    if abs(args.seed) > _MAX_SEED:
        raise ConfigError(f"--seed is {args.seed}; it must be between -{_MAX_SEED} and {_MAX_SEED}")
    if args.epochs is not None and not 0 < args.epochs < math.inf:
        raise ConfigError(f"--epochs is {args.epochs}; it must be a number above 0, such as 3 or 0.5")
    if args.lr is not None and not 0 <= args.lr < math.inf:
        raise ConfigError(f"--lr is {args.lr}; it must be a number, at least 0")
    if args.eval_split is not None and not 0 < args.eval_split < 1:
        raise ConfigError(f"--eval-split is {args.eval_split}; it must be a share between 0 and 1, such as 0.05")
    for one, other in (("--eval-split", "--eval-data"), ("--output", "--no-save")):
        values = [getattr(args, option.removeprefix("--").replace("-", "_")) for option in (one, other)]
        if all(value not in (None, False) for value in values):
            raise ConfigError(f"both {one} and {other} are given; give one")
    for option, given, positional in (
        ("--model", args.model, args.model_name),
        ("--data", args.data, args.data_paths),
    ):
        if given and positional:
            raise ConfigError(f"{option} is given twice, as an option and as a positional argument; give one")
