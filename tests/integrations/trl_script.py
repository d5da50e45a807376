"""An ordinary script of TRL's trainers, which knows nothing of infinity: `trl_script.py OUT TRAINER,... [FILE...]`.

Trains the small model in OUT without DeepSpeed, then with each configuration FILE, and prints what was logged as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

OUT, NAMES, FILES = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 5e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
SUMS = [{"prompt": f"{n} and one are", "completion": f" {n + 1}"} for n in range(40)]
PAIRS = [{"prompt": f"{n} and one are", "chosen": f" {n + 1}", "rejected": f" {n + 3}, or so"} for n in range(40)]
PROMPTS = [{"prompt": f"{n} and one are"} for n in range(40)]


def data(rows: list[dict[str, str]]) -> Any:
    file = OUT / f"{'-'.join(rows[0])}.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return load_dataset("json", data_files=str(file), split="train")


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(character.isalpha() for character in completion)) for completion in completions]


def sft(model: Any, out: str, file: str | None, **more: Any) -> Any:
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=out, deepspeed=file, max_length=32, **COMMON),
        train_dataset=data(SUMS),
        **more,
    )


def dpo(model: Any, out: str, file: str | None, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
    return DPOTrainer(
        model=model,
        args=DPOConfig(output_dir=out, deepspeed=file, max_length=32, **COMMON | (options or {})),
        train_dataset=data(PAIRS),
        **more,
    )


def grpo(model: Any, out: str, file: str | None, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
    chosen = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1, "temperature": 1.0}
    return GRPOTrainer(
        model=model,
        reward_funcs=letters,
        args=GRPOConfig(output_dir=out, deepspeed=file, **COMMON | chosen | (options or {})),
        train_dataset=data(PROMPTS),
        **more,
    )


def adapters() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


MAKERS = {
    "sft": sft,
    "sft-lora": lambda model, out, file: sft(model, out, file, peft_config=adapters()),
    "dpo": dpo,
    "dpo-lora": lambda model, out, file: dpo(model, out, file, peft_config=adapters()),
    "dpo-before": lambda model, out, file: dpo(model, out, file, options={"precompute_ref_log_probs": True}),
    "dpo-sync": lambda model, out, file: dpo(
        model, out, file, options={"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    ),
    "grpo": grpo,
    "grpo-lora": lambda model, out, file: grpo(model, out, file, peft_config=adapters()),
    "grpo-ungathered": lambda model, out, file: grpo(model, out, file, options={"ds3_gather_for_generation": False}),
}


def run(name: str, file: str | None, index: int) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    set_seed(0)
    out = str(OUT / f"{name}{index}")
    trainer = MAKERS[name](str(OUT / "model"), out, file)
    trainer.train()
    trainer.save_model(out)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    kept = ("loss", "grad_norm", "reward", "kl", "rewards/margins", "completions/mean_length")
    found: dict[str, Any] = {key: [entry[key] for entry in logged] for key in kept if key in logged[0]}
    if not name.endswith("lora"):
        weights = AutoModelForCausalLM.from_pretrained(out).state_dict().values()
        found["weights"] = float(torch.stack([value.double().square().sum() for value in weights]).sum())
    return found


if __name__ == "__main__":
    results: dict[str, list[Any]] = {name: [] for name in NAMES}
    for index, file in enumerate([None, *FILES]):  # without DeepSpeed first: accelerate's settings stay
        for name in NAMES:
            results[name].append(run(name, file, index))
    print("RESULT", json.dumps(results))
