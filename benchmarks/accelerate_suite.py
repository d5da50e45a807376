"""accelerate's own test scripts (`accelerate.test_utils.scripts`), unchanged, with infinity as their DeepSpeed.

    python benchmarks/accelerate_suite.py --json
    python benchmarks/accelerate_suite.py --only sync --ranks 1 --verbose

The claim: each of them that needs neither a GPU nor what is no part of DeepSpeed passes, with ZeRO-2 and the optimizer
on the CPU and with ZeRO-3 on a drive, on one process and on two. What they download is replaced by stand-ins of
the same shape (`stand_ins/`, a small BERT): they ask whether training works, not how good it gets. There is no floor:
it counts, and does not time. Run it where `datasets` is not installed: where it is, `test_script.py` imports
from it what its stand-in has not, and fails.

Every script starts as a user would start it, `infinity run accelerate launch --use_deepspeed ...`, through
`stand_ins/as_rank.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate.test_utils import scripts
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from benchmarks.stand_ins.datasets import WORDS

HERE = Path(__file__).parent
STAND_INS = HERE / "stand_ins"
TIMEOUT_S = 240
MODELS = ("bert-base-cased", "hf-internal-testing/mrpc-bert-base-cased")  # what the scripts ask for


@dataclass(frozen=True)
class Case:
    """A script, what it is given, and why it cannot run, if it cannot."""

    script: str
    arguments: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1, 2)
    skipped: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the configuration; None takes a key away


_OWN: dict[str, Any] = {"optimizer": None, "scheduler": None}  # the script has them, or there is nothing to train

CASES = (
    Case("test_cli.py"),
    Case("test_ops.py", ranks=(1,), skipped="sees that processes disagree, for which it takes two"),
    Case("test_ops.py", ranks=(2,)),
    Case("test_script.py"),
    Case("test_sync.py", ranks=(1,), changes=_OWN | {"gradient_accumulation_steps": 2}),
    Case("test_sync.py", ranks=(2,), skipped="reads `param.grad`, which is None under DeepSpeed as well"),
    Case("test_distributed_data_loop.py", skipped="has ranks take unlike numbers of batches, which is DDP's (`Join`)"),
    Case("test_notebook.py", skipped="starts processes itself (notebook_launcher), none with DeepSpeed"),
    Case("test_ddp_comm_hook.py", skipped="is of DistributedDataParallel"),
    Case("test_merge_weights.py", skipped="is of FSDP"),
    Case("external_deps/test_performance.py", ("--num_epochs", "2")),
    Case("external_deps/test_checkpointing.py", ("--num_epochs", "2")),
    Case(
        "external_deps/test_checkpointing.py",
        ("--num_epochs", "2", "--resume_from_checkpoint", "epoch_0"),  # of the case before
    ),
    Case("external_deps/test_metrics.py", changes=_OWN),
    Case("external_deps/test_ds_multiple_model.py", ("--num_epochs", "9")),
    Case("external_deps/test_peak_memory_usage.py", skipped="measures the memory of a GPU"),
    Case("external_deps/test_zero3_integration.py", skipped="begins with NCCL, which needs a GPU"),
    Case("external_deps/test_ds_alst_ulysses_sp.py", skipped="is of sequence parallelism, and needs GPUs"),
    Case("external_deps/test_pippy.py", skipped="is of pipeline inference, and needs GPUs"),
)


# The machine that runs a case #


def configurations(place: Path) -> dict[str, dict[str, Any]]:
    """Two files: optimizer and schedule of the file, and of the script."""
    common = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
    optimizer = {"type": "AdamW", "params": dict.fromkeys(("lr", "weight_decay"), "auto")}
    scheduler = {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    }
    drive = {"device": "nvme", "nvme_path": str(place / "drive")}
    zero2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    zero3 = {"stage": 3, "offload_optimizer": drive, "offload_param": drive, "stage3_param_persistence_threshold": 0}
    return {
        "zero2_cpu": common | {"optimizer": optimizer, "scheduler": scheduler, "zero_optimization": zero2},
        "zero3_nvme": common | {"zero_optimization": zero3},
    }


def prepare(place: Path) -> None:
    """What the scripts look for in their working directory, and beside them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS, "same", "other"])}
    words = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = BertForSequenceClassification(
        BertConfig(**shape, vocab_size=len(vocabulary), max_position_embeddings=128, initializer_range=0.3)
    )
    with torch.no_grad():  # undecided at first but for a little: accuracy must rise at a learning rate of 2e-5
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([1e-2, 0.0]))
    for name in MODELS:
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    shutil.copytree(Path(scripts.__file__).parent, place / "src/accelerate/test_utils/scripts")
    (place / "tests/deepspeed").mkdir(parents=True)
    # test_ds_multiple_model.py reads these two from accelerate's source tree; the second has to have a batch size.
    for stage, home, samples in (("2", "zero2_cpu", "auto"), ("3", "zero3_nvme", 1)):
        whole = configurations(place)[home] | {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": samples}
        file = {key: whole[key] for key in whole if key not in ("optimizer", "scheduler")}
        (place / f"tests/deepspeed/ds_config_zero{stage}_model_only.json").write_text(json.dumps(file))


def run_case(case: Case, config: str, ranks: int, place: Path) -> dict[str, Any]:
    """What became of a script."""
    result = {"script": case.script, "arguments": list(case.arguments), "config": config, "ranks": ranks}
    if case.skipped:
        return result | {"outcome": "skipped", "why": case.skipped}
    script = place / "src/accelerate/test_utils/scripts" / case.script
    arguments = [argument.replace("epoch_", f"{config}{ranks}/epoch_") for argument in case.arguments]
    if "external_deps/test_c" in case.script or "external_deps/test_p" in case.script:
        (place / f"{config}{ranks}").mkdir(exist_ok=True)
        arguments += ["--output_dir", f"{config}{ranks}"]
    file = place / f"{config}-case.json"
    values = configurations(place)[config] | dict(case.changes)
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    launch = ["--use_deepspeed", "--deepspeed_config_file", str(file)]
    launch += [f"--num_processes={ranks}", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command = [sys.executable, "-m", "infinity.cli.main", "run", "accelerate", "launch", *launch]
    path = os.pathsep.join(filter(None, [str(HERE.parent), str(STAND_INS), os.environ.get("PYTHONPATH")]))
    start_s = time.perf_counter()
    try:
        ended = subprocess.run(
            [*command, str(STAND_INS / "as_rank.py"), str(script), *arguments],
            cwd=place,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        output, code = ended.stdout + ended.stderr, ended.returncode
    except subprocess.TimeoutExpired as error:
        output = "".join((part or b"").decode(errors="replace") for part in (error.stdout, error.stderr))
        output, code = f"{output}\nTimeoutError: still running after {TIMEOUT_S} s", 124
    result |= {"outcome": "failed" if code else "passed", "seconds": round(time.perf_counter() - start_s, 1)}
    return result | {"why": _last_error(output), "output": output[-20000:]} if code else result


def _last_error(output: str) -> str:
    """The line of a traceback that says what was wrong, of the rank that failed first."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line).strip() for line in output.splitlines()]
    found = [line for line in lines if "Error" in line.split(":")[0] and " " not in line.split(":")[0] and ":" in line]
    found = [line for line in found if "ChildFailedError" not in line] or found
    return found[0][:300] if found else (lines or ["nothing was printed"])[-1][:300]


# What came out #


def table(results: list[dict[str, Any]]) -> str:
    """A row a script, a column for each configuration and number of processes."""
    columns = sorted({(result["config"], result["ranks"]) for result in results})
    rows: dict[tuple[str, ...], dict[tuple[str, int], str]] = {}
    for result in results:
        key = (result["script"], " ".join(result["arguments"]))
        word = result["outcome"] + (f": {result['why']}" if "why" in result else "")
        rows.setdefault(key, {})[result["config"], result["ranks"]] = word
    lines = ["| script | " + " | ".join(f"{config}, {ranks}" for config, ranks in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for (script, arguments), cells in rows.items():
        name = f"`{script}{' ' if arguments else ''}{arguments}`"
        lines.append(f"| {name} | " + " | ".join(cells.get(column, "") for column in columns) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="scripts whose name has this")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--configs", nargs="+", default=["zero2_cpu", "zero3_nvme"])
    parser.add_argument("--verbose", action="store_true", help="print what failed scripts printed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="accelerate-suite-") as place:
        prepare(Path(place))
        for case in CASES:
            for config in args.configs if args.only in case.script else ():
                for ranks in sorted(set(args.ranks) & set(case.ranks)):
                    results.append(run_case(case, config, ranks, Path(place)))
                    print({**results[-1], "output": ""}, file=sys.stderr, flush=True)
                    if args.verbose and "output" in results[-1]:
                        print(results[-1]["output"], file=sys.stderr, flush=True)
                    results[-1].pop("output", None)
    print(json.dumps(results) if args.json else table(results))
    return int(any(result["outcome"] == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
