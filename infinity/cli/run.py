"""`infinity run`: start one process for each rank, with torchrun."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from infinity.cli.arguments import check_least
from infinity.errors import ConfigError
from infinity.integrations.as_deepspeed import FOLDER
from infinity.integrations.deepspeed.auto_values import auto_problem

# Started as files: `python -m` would look in the working directory first.
_COMMAND, _TORCHRUN = (Path(__file__).parent / "launch" / name for name in ("command.py", "torchrun.py"))

# Options of DeepSpeed's launcher, which starts other machines by ssh.
_DEEPSPEEDS = ("--hostfile", "--include", "--exclude", "--launcher")

_COMMANDS = ("train", "profile")  # commands that several ranks run together
_OF_ACCELERATE = ("--deepspeed", "--deepspeed_config_file")  # options whose file transformers and accelerate read
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a script, or a command such as train, on several ranks",
        description="Starts ranks by torchrun, each with its share of the processor cores. In these processes, `import "
        "deepspeed` is infinity, so that scripts for DeepSpeed, and transformers' Trainer, run unchanged. "
        "CUDA_VISIBLE_DEVICES chooses the GPUs.",
    )
    parser.add_argument(
        "--ranks",
        "--num-gpus",
        "--num_gpus",
        type=int,
        metavar="N",
        help="processes on this machine (default: one for each GPU)",
    )
    parser.add_argument(
        *("--nodes", "--num-nodes", "--num_nodes"),
        type=int,
        default=1,
        metavar="N",
        help="number of machines; start the same command on each (default 1)",
    )
    parser.add_argument(
        *("--node-rank", "--node_rank"), type=int, metavar="R", help="number of this machine, from 0 (default: Slurm's)"
    )
    parser.add_argument(
        *("--address", "--master-addr", "--master_addr"),
        metavar="HOST[:PORT]",
        help="address of the first machine, where all ranks meet",
    )
    parser.add_argument(
        *("--master-port", "--master_port"),
        type=int,
        metavar="PORT",
        help="port where all ranks meet (default: a free one on one machine, 29500 on several)",
    )
    for option in _DEEPSPEEDS:
        parser.add_argument(option, dest=option, help=argparse.SUPPRESS)
    parser.add_argument("--max-restarts", type=int, metavar="N", help="start all ranks again after one fails, N times")
    parser.add_argument(
        "--shutdown-timeout",
        type=int,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL for the ranks: time to save (default: torchrun's, 30)",
    )
    parser.add_argument(
        "--numa-binding",
        metavar="MODE",
        help="keep each rank, and the memory that it touches, near its GPU: node, socket, exclusive or core-complex",
    )
    parser.add_argument("--no-deepspeed", action="store_true", help="do not change `import deepspeed`")
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the script is the name of a module, as for `python -m`"
    )
    script = "a Python file, an infinity command (train or profile), or `accelerate launch ...`"
    parser.add_argument("script", help=script)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replace this process by torchrun, or by accelerate, which starts torchrun itself."""
    _check_launcher(args)
    by_accelerate = args.script == "accelerate" and not args.is_module and not Path(args.script).is_file()
    problem = _left_auto(args.arguments)
    if problem and by_accelerate:
        raise ConfigError(problem)
    if problem:  # the script may read the file itself
        print(f"warning: {problem}", file=sys.stderr)
    environment = dict(os.environ)
    if not args.no_deepspeed:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), environment.get("PYTHONPATH")]))
    sys.stdout.flush()
    if by_accelerate:
        os.execve(sys.executable, [sys.executable, *_accelerate(args)], environment)
    ranks = args.ranks if args.ranks is not None else _gpus() or 1
    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}; it must be at least 1")
    command = [sys.executable, str(_TORCHRUN), f"--nproc-per-node={ranks}", *_meeting(args)]
    command += [*_endings(args), *_binding(args), *_target(args)]
    # torchrun would give each rank one thread, and the optimizer runs on the processor.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    os.execve(sys.executable, command, environment)


def _check_launcher(args: argparse.Namespace) -> None:
    """Refuse options of DeepSpeed's launcher that have no counterpart."""
    for option in _DEEPSPEEDS:
        value = getattr(args, option)
        if value is not None:
            raise ConfigError(
                f"{option} {value} is an option of DeepSpeed's launcher, which starts other machines by ssh: start the "
                "same `infinity run` on each machine, with --nodes, --node-rank and --address. CUDA_VISIBLE_DEVICES "
                "chooses the GPUs of a machine"
            )


def _left_auto(arguments: Sequence[str]) -> str:
    """Return why accelerate refuses the configuration in its command line; empty if it does not."""
    for option, value in zip(arguments, [*arguments, ""][1:], strict=True):
        name, assigned, inline = option.partition("=")
        if name not in _OF_ACCELERATE:
            continue
        file = inline if assigned else value
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or damaged: the script raises its own error
            continue
        problem = auto_problem(content, file)
        if problem:
            return problem
    return ""


def _meeting(args: argparse.Namespace) -> list[str]:
    """Return torchrun's options for the address at which the processes meet."""
    check_least(args, 1, "nodes")
    if args.master_port is not None and not 0 < args.master_port < 1 << 16:
        raise ConfigError(f"--master-port is {args.master_port}; it must be a port, 1 to 65535")
    if args.nodes == 1:
        for option, value in (("--address", args.address), ("--node-rank", args.node_rank)):
            if value is not None and value not in _THIS_MACHINE:
                raise ConfigError(f"{option} is {value}, which is for several machines: give --nodes, or leave it out")
        if args.master_port is not None:
            return ["--master-addr=127.0.0.1", f"--master-port={args.master_port}"]
        return ["--standalone"]
    node_rank = args.node_rank if args.node_rank is not None else os.environ.get("SLURM_NODEID")
    if args.address is None or node_rank is None:
        missing = "--address HOST of the first machine" if args.address is None else "--node-rank of this machine"
        raise ConfigError(f"--nodes is {args.nodes}: give {missing}")
    host, port = _host_and_port(args.address)
    if port is not None and args.master_port is not None:
        raise ConfigError(f"--address {args.address} has a port, and --master-port is {args.master_port}; give one")
    options = [f"--nnodes={args.nodes}", f"--node-rank={node_rank}", f"--master-addr={host}"]
    return [*options, f"--master-port={port or args.master_port or 29500}"]


def _host_and_port(address: str) -> tuple[str, int | None]:
    """Split HOST[:PORT]. The host may be an IPv6 address in brackets."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--address {address}: {error}; give HOST, HOST:PORT or [IPv6 address]:PORT") from error
    if host is None:
        raise ConfigError(f"--address {address} has no host; give HOST, HOST:PORT or [IPv6 address]:PORT")
    return host, port


def _endings(args: argparse.Namespace) -> list[str]:
    """Return torchrun's options for restarts and for shutdown."""
    check_least(args, 0, "max_restarts")
    check_least(args, 1, "shutdown_timeout")
    options = {"--max-restarts": args.max_restarts, "--shutdown-timeout": args.shutdown_timeout}
    return [f"{option}={value}" for option, value in options.items() if value is not None]


def _binding(args: argparse.Namespace) -> list[str]:
    """Return torchrun's options for the CPUs that the ranks run on."""
    if args.numa_binding is None:
        return []
    try:
        from torch.numa.binding import AffinityMode
    except ImportError as error:
        raise ConfigError(
            f"--numa-binding {args.numa_binding} needs torch 2.9 or newer: start each rank under numactl instead"
        ) from error
    modes = [mode.value for mode in AffinityMode]
    if args.numa_binding not in modes:
        raise ConfigError(f"--numa-binding is {args.numa_binding}; it is one of {', '.join(modes)}")
    return [f"--numa-binding={args.numa_binding}"]


def _accelerate(args: argparse.Namespace) -> list[str]:
    """Return the command line of accelerate, behind the Python interpreter."""
    ours = ("ranks", "node_rank", "address", "master_port", "max_restarts", "shutdown_timeout", "numa_binding")
    if args.nodes != 1 or any(getattr(args, name) is not None for name in ours):
        raise ConfigError("accelerate starts the ranks: give `accelerate launch` its own --num_processes and the like")
    return ["-m", "accelerate.commands.accelerate_cli", *args.arguments]


def _target(args: argparse.Namespace) -> list[str]:
    if args.is_module:
        return ["-m", args.script, *args.arguments]
    if args.script in _COMMANDS and not Path(args.script).exists():
        return [str(_COMMAND), args.script, *args.arguments]
    if not Path(args.script).is_file():
        raise ConfigError(f"{args.script} is no file: give a Python script, `train`, `profile`, or -m and a module")
    return [args.script, *args.arguments]


def _gpus() -> int:
    import torch

    return torch.accelerator.device_count()
