"""Fine-tune a causal language model with transformers' Trainer: nothing here knows of infinity.

infinity run finetune_trainer.py --model my-model --data my-texts/ --deepspeed trainer_nvme.json

With LoRA (`--lora 8`, needs PEFT), the base stays frozen on the drive and only adapters are trained.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


def samples(tokenizer, directory: Path, length: int) -> list[dict[str, torch.Tensor]]:
    """The texts of a directory, one after the other, in pieces of equal length."""
    text = "\n\n".join(file.read_text() for file in sorted(directory.rglob("*.txt")))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return [{"input_ids": piece, "labels": piece} for piece in ids[: len(ids) // length * length].view(-1, length)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a directory or a name that from_pretrained takes")
    parser.add_argument("--data", type=Path, required=True, help="a directory of .txt files")
    parser.add_argument("--deepspeed", help="a configuration; without it the Trainer trains in memory")
    parser.add_argument("--out", default="finetuned")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens a sample")
    parser.add_argument("--batch", type=int, default=1, help="samples a forward on each rank")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="train adapters of this rank only")
    args = parser.parse_args()

    # First of all: with ZeRO-3, what is read below goes to where the configuration says.
    arguments = TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=args.batch,
        max_steps=args.steps,
        learning_rate=2e-4 if args.lora else 2e-5,
        bf16=torch.cuda.is_available(),  # Trainer trains in 32 bits on a CPU
        logging_steps=1,
        save_steps=max(1, args.steps // 2),
        report_to=[],
        deepspeed=args.deepspeed,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if args.lora:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415  (only where it is needed)

        model = get_peft_model(model, LoraConfig(r=args.lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Trainer(model=model, args=arguments, train_dataset=samples(tokenizer, args.data, args.length))
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
