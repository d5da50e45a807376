"""Supervised fine-tuning with TRL, whole or with LoRA: nothing here knows of infinity.

infinity run sft_trl.py --model my-model --data dialogues.jsonl --deepspeed trainer_nvme.json

Each line of the data is an object with a `prompt` and a `completion`; the loss is of the completion.
"""

import argparse

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a directory or a name that from_pretrained takes")
    parser.add_argument("--data", required=True, help="a .jsonl file")
    parser.add_argument("--deepspeed", help="a configuration; without it the trainer trains in memory")
    parser.add_argument("--out", default="tuned")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="most tokens of a sample")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="train adapters of this rank only")
    args = parser.parse_args()

    adapters = None
    if args.lora:
        from peft import LoraConfig  # noqa: PLC0415  (only where it is needed)

        adapters = LoraConfig(r=args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = SFTConfig(
        output_dir=args.out,
        per_device_train_batch_size=1,
        max_steps=args.steps,
        max_length=args.length,
        learning_rate=2e-4 if args.lora else 2e-5,
        bf16=torch.cuda.is_available(),  # on a CPU the trainer trains in 32 bits
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=max(1, args.steps // 2),
        report_to=[],
        deepspeed=args.deepspeed,
    )
    trainer = SFTTrainer(
        model=args.model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        peft_config=adapters,
    )
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
