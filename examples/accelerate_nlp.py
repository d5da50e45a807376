"""Train a classifier of texts in a loop over accelerate: nothing here knows of infinity.

infinity run accelerate launch --use_deepspeed --deepspeed_config_file accelerate_nvme.json accelerate_nlp.py \
    --model my-bert --data labelled.jsonl

Each line of the data is an object with a `text` and a `label`; every tenth is held out.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a directory or a name that from_pretrained takes")
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--out", default="classifier")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="samples a forward on each process")
    parser.add_argument("--accumulate", type=int, default=1, help="as in the configuration")
    parser.add_argument("--lr", type=float, default=2e-5)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    labels = sorted({row["label"] for row in rows})
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def collate(chosen: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        batch = tokenizer([row["text"] for row in chosen], padding=True, truncation=True, return_tensors="pt")
        return {**batch, "labels": torch.tensor([labels.index(row["label"]) for row in chosen])}

    held_out = rows[::10]
    trained = [row for index, row in enumerate(rows) if index % 10]
    train_loader = torch.utils.data.DataLoader(trained, args.batch, shuffle=True, collate_fn=collate)
    test_loader = torch.utils.data.DataLoader(held_out, args.batch, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * -(-len(train_loader) // args.accumulate)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.item()
        model.eval()
        right = 0
        for batch in test_loader:
            with torch.no_grad():
                found = model(**batch).logits.argmax(-1)
            found, wanted = accelerator.gather_for_metrics((found, batch["labels"]))
            right += int((found == wanted).sum())
        accelerator.print(f"epoch {epoch}: loss {total / len(train_loader):.4f}, {right} of {len(held_out)} right")
        accelerator.save_state(f"{args.out}/epoch-{epoch}")
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        args.out, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
