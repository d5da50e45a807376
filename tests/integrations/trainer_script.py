"""An ordinary script of transformers' Trainer, which knows nothing of infinity: `trainer_script.py OUT MODE [FILE...]`.

Trains a small model without DeepSpeed, then with each configuration FILE, and prints what came out as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

OUT, MODE, FILES = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
TEXT = (__doc__ or "").encode() * 3
DATA = [{"input_ids": torch.tensor(list(TEXT[i : i + 16]))} for i in range(0, 640, 16)]
for sample in DATA:
    sample["labels"] = sample["input_ids"]


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def base() -> str:
    if not (OUT / "base").exists():
        set_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=128, max_position_embeddings=32))
        model.save_pretrained(OUT / "base")
    return str(OUT / "base")


def trainer(name: str, file: str | None, *, lora: bool = False, **more: Any) -> Trainer:
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(OUT / name),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        deepspeed=file,
        **{"max_steps": 4, **more},
    )
    model = AutoModelForCausalLM.from_pretrained(base())
    if lora:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415

        set_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return InOrder(model=model, args=arguments, train_dataset=DATA, eval_dataset=DATA[:4])


def outcome(made: Trainer, loss: float) -> dict[str, Any]:
    logs = made.state.log_history
    found: dict[str, Any] = {
        "loss": loss,
        "eval": made.evaluate()["eval_loss"],
        "losses": [entry["loss"] for entry in logs if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in logs if "grad_norm" in entry],
        "rates": [entry["learning_rate"] for entry in logs if "learning_rate" in entry],
    }
    if hasattr(made.model, "generate"):
        prompt = torch.tensor([list(TEXT[:8])])
        found["text"] = made.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()
    if made.deepspeed is not None:
        found["bytes"] = made.deepspeed.stats().tier_bytes
        found["engine"] = type(made.deepspeed).__name__
    return found


def one() -> dict[str, Any]:
    results = {}
    for index, file in enumerate([None, *FILES]):
        made = trainer(f"run{index}", file, gradient_accumulation_steps=2)
        results[f"run{index}"] = outcome(made, made.train().training_loss)
        made.save_model(str(OUT / f"saved{index}"))
        if index == 1:
            continue
        results[f"evaluated{index}"] = trainer(f"only{index}", file).evaluate()["eval_loss"]
        adapted = trainer(f"lora{index}", file, lora=True)
        results[f"lora{index}"] = outcome(adapted, adapted.train().training_loss)
        adapted.save_model(str(OUT / f"adapter{index}"))
    again = trainer("run2", FILES[-1], gradient_accumulation_steps=2)
    results["resumed2"] = outcome(again, again.train(str(OUT / "run2" / "checkpoint-2")).training_loss)
    return results


def two() -> dict[str, Any]:
    # Without a GPU, accelerate sees one process only unless the backend is named.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import PartialState  # noqa: PLC0415

    results = {}
    for index, file in enumerate(FILES):
        PartialState(backend="gloo")
        made = trainer(f"two{index}", file, accelerator_config={"use_configured_state": True})
        results[f"run{index}"] = outcome(made, made.train().training_loss)
    return results


if __name__ == "__main__":
    found = {"one": one, "two": two}[MODE]()
    if int(os.environ["RANK"]) == 0:  # what two ranks print can come out of their launcher on one line
        print("RESULT", json.dumps(found), flush=True)
