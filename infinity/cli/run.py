"""`infinity run`: start one process a rank, through torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from infinity.errors import ConfigError

_COMMAND = Path(__file__).parent / "launch" / "command.py"  # not -m, which looks in the working directory first


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a script, or a command such as train, on several ranks",
        description="A front to torchrun that gives every rank its share of the processor cores.",
    )
    parser.add_argument(
        "--ranks", "--num-gpus", "--num_gpus", type=int, metavar="N", help="processes on this node (default: its GPUs)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines; start the same command on each")
    parser.add_argument("--node-rank", type=int, metavar="R", help="which of them this is, from 0 (not for Slurm)")
    parser.add_argument("--address", metavar="HOST[:PORT]", help="of the first machine, for all to meet at")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="a Python file, or an infinity command: train")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replace this process by torchrun."""
    ranks = args.ranks if args.ranks is not None else _gpus() or 1
    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}; it must be at least 1")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *_meeting(args)]
    command += _target(args)
    environment = dict(os.environ)
    # torchrun would give each rank one thread, and the optimizer runs on the processor.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def _meeting(args: argparse.Namespace) -> list[str]:
    """Where the processes meet, as torchrun's options.

    Raises:
        ConfigError: several nodes without an address, or the other way round.
    """
    if args.nodes < 1:
        raise ConfigError(f"--nodes is {args.nodes}; it must be at least 1")
    if args.nodes == 1:
        if args.address is not None or args.node_rank is not None:
            raise ConfigError("--address and --node-rank are for several machines: give --nodes, too")
        return ["--standalone"]
    node_rank = args.node_rank if args.node_rank is not None else os.environ.get("SLURM_NODEID")
    if args.address is None or node_rank is None:
        missing = "--address HOST of the first machine" if args.address is None else "--node-rank of this machine"
        raise ConfigError(f"--nodes is {args.nodes}: give {missing}")
    host, _, port = args.address.partition(":")
    options = [f"--nnodes={args.nodes}", f"--node-rank={node_rank}", f"--master-addr={host}"]
    return [*options, f"--master-port={port or 29500}"]


def _target(args: argparse.Namespace) -> list[str]:
    if args.is_module:
        return ["-m", args.script, *args.arguments]
    if args.script == "train" and not Path(args.script).exists():
        return [str(_COMMAND), "train", *args.arguments]
    if not Path(args.script).is_file():
        raise ConfigError(f"{args.script} is no file: give a Python script, `train`, or -m and a module")
    return [args.script, *args.arguments]


def _gpus() -> int:
    import torch  # noqa: PLC0415  (takes seconds)

    return torch.cuda.device_count()
