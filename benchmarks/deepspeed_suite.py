"""DeepSpeed's own unit tests, of a checkout of its repository, with infinity as their DeepSpeed.

    cp -r DeepSpeed/tests copy/tests    # without DeepSpeed itself beside them, which they would import
    python benchmarks/deepspeed_suite.py --tests copy/tests --json
    python benchmarks/deepspeed_suite.py --tests copy/tests --only tensor_fragment --verbose

The claim: scripts for DeepSpeed find what they call, and it does what its name says; what is not here says so. So every
test counts as passed, failed or skipped, with the first cause of what failed, and there is no floor: it counts, and
does not time. The tests run unchanged, on the CPU with gloo, on as many processes as they ask for up to `--ranks`.

Most take the best of bf16, fp16 and float32 that is there; some are of fp16 alone, and have inputs of that best one:
they need `--without-bf16`, which has the accelerator say that it has none.

Beside the tests themselves they need what DeepSpeed does, such as `hjson`; without it those that import it fail.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.foreign_tests import Suite, parser_of, run, table

# What is no part of training with ZeRO on one machine: other devices, inference, other kinds of parallelism.
LEFT_OUT = (
    "accelerator",
    "autotuning",
    "autotp",
    "compile",
    "compression",
    "elasticity",
    "hybrid_engine",
    "inference",
    "launcher",
    "linear",
    "model_parallelism",
    "module_inject",
    "moe",
    "multimodal",
    "pipe",
    "profiling",
    "rollout",
    "sequence_parallelism",
    "tensor_parallel",
    "ulysses_alst",
    "zenflow",
)


def test_files(tests: Path, only: str) -> list[Path]:
    """The files of unit tests, without the folders that are left out."""
    files = sorted((tests / "unit").rglob("test_*.py"))
    if not files:
        raise SystemExit(f"{tests} has no unit/test_*.py: give the folder `tests` of a checkout of DeepSpeed")
    parts = {file: file.relative_to(tests / "unit").parts for file in files}
    return [file for file in files if only in str(file) and not set(LEFT_OUT) & set(parts[file])]


def main() -> int:
    parser = parser_of(__doc__, limit_s=60)
    parser.add_argument("--tests", type=Path, required=True, help="the folder `tests` of a checkout of DeepSpeed")
    parser.add_argument("--without-bf16", action="store_true", help="as on a device that has fp16 alone")
    args = parser.parse_args()
    environment = {
        "LOCAL_SIZE": str(args.ranks),
        "DS_UNITTEST_TIMEOUT": str(args.limit),
        "DS_TEST_USE_INSTALLED_DEEPSPEED": "1",
        "SUITE_WITHOUT_BF16": str(int(args.without_bf16)),
    }
    tests = args.tests.absolute()
    if (tests.parent / "deepspeed").exists():  # the tests put this folder before all others
        raise SystemExit(f"{tests.parent} has DeepSpeed itself, which the tests would import: copy {tests} elsewhere")
    suite = Suite(tests, ("stand_ins.deepspeed_suite",), environment=environment, limit_s=args.limit)
    results = run(suite, test_files(tests, args.only), verbose=args.verbose)
    print(json.dumps(results) if args.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
