"""`infinity install-deepspeed-shim`: let `import deepspeed` import infinity in all programs of this environment."""

from __future__ import annotations

import argparse
import sysconfig
from importlib import metadata
from pathlib import Path

from infinity.errors import ConfigError
from infinity.integrations.as_deepspeed import FOLDER

NAME = "infinity-as-deepspeed.pth"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "install-deepspeed-shim",
        help="let `import deepspeed` import infinity without `infinity run`",
        description="Writes one file into this Python environment, so that `python train.py --deepspeed ds.json` runs "
        "on infinity.",
    )
    parser.add_argument("--remove", action="store_true", help="remove the file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write or remove the file. Return the exit code."""
    path = Path(sysconfig.get_path("purelib"), NAME)
    try:
        if args.remove:
            was_there = path.exists()
            path.unlink(missing_ok=True)
            done = f"removed {path}" if was_there else f"there is no {path}"
            print(f"{done}: `import deepspeed` imports DeepSpeed, if it is installed")
            return 0
        _check_no_deepspeed()
        path.write_text(f"{FOLDER}\n")  # Python adds the lines of such files to its path
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be changed: {error.strerror}; use a virtual environment of your own"
        ) from error
    print(f"wrote {path}: `import deepspeed` imports infinity in this environment. --remove undoes this")
    return 0


def _check_no_deepspeed() -> None:
    """Raise ConfigError if DeepSpeed is installed, because Python would find it first."""
    for distribution in metadata.distributions(name="deepspeed"):
        where = Path(str(distribution.locate_file("")))
        if where.resolve() != FOLDER.resolve():
            raise ConfigError(
                f"DeepSpeed {distribution.version} is installed in {where}, and Python would find it first: uninstall "
                "it (python -m pip uninstall deepspeed), or start scripts with `infinity run`"
            )
