"""Fine-tune LoRA adapters with PEFT in a loop of one's own; the base is read from its own files and never copied.

python finetune_lora.py --model my-model --data my-texts/ --config ../configs/nvme.json

The files have the dtype that the configuration computes in (bf16 for nvme.json); with `--copy` any will do, and the
base is copied to the drive first.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import infinity
from infinity.integrations import load_adapters, pretrained_model, save_adapters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a directory of transformers")
    parser.add_argument("--data", type=Path, required=True, help="a directory of .txt files")
    parser.add_argument("--config", required=True, help="where the states live, the optimizer, the batch size")
    parser.add_argument("--out", default="adapters")
    parser.add_argument("--from-adapters", help="adapters to begin with, of PEFT or of an earlier run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens a sample")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--copy", action="store_true", help="copy the base to the drive")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = "\n\n".join(file.read_text() for file in sorted(args.data.rglob("*.txt")))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    samples = ids[: len(ids) // args.length * args.length].view(-1, args.length)

    model, weights = pretrained_model(args.model, in_place=not args.copy)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    engine, _, loader, _ = infinity.initialize(model=model, config=args.config, weights=weights, training_data=samples)
    with engine:
        if args.from_adapters:
            load_adapters(engine, args.from_adapters)
        while engine.global_steps < args.steps:
            for batch in loader:
                batch = batch.to(engine.device)
                loss = engine(input_ids=batch, labels=batch).loss
                engine.backward(loss)
                engine.step()
                if engine.global_rank == 0 and engine.is_gradient_accumulation_boundary():
                    print(f"step {engine.global_steps}: loss {loss.item():.4f}", flush=True)
                if engine.global_steps == args.steps:
                    break
        save_adapters(engine, args.out)  # for PeftModel.from_pretrained


if __name__ == "__main__":
    main()
