"""Train a causal language model with Lightning, its states on the drive.

python lightning_clm.py --model my-model --data my-texts/ --config nvme.json
torchrun --nproc-per-node 4 lightning_clm.py ... --devices 4

Without `--config` Lightning trains in memory.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infinity.integrations.lightning import InfinityStrategy


class LanguageModel(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_model(self) -> None:
        """Here for what is built to lie in files until it is in its tier."""
        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_pretrained(self.name, dtype=torch.float32)

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, ids: torch.Tensor, index: int) -> None:
        self.log("validation", self.model(input_ids=ids, labels=ids).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a directory or a name that from_pretrained takes")
    parser.add_argument("--data", type=Path, required=True, help="a directory of .txt files")
    parser.add_argument("--config", help="where the states live")
    parser.add_argument("--out", default="trained")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens a sample")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--resume", help="a checkpoint")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = "\n\n".join(file.read_text() for file in sorted(args.data.rglob("*.txt")))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    samples = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    held_out = max(1, len(samples) // 10)
    trainer = pl.Trainer(
        strategy=InfinityStrategy(args.config) if args.config else "auto",
        devices=args.devices,
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        default_root_dir=args.out,
        enable_checkpointing=False,
    )
    trainer.fit(
        LanguageModel(args.model),
        torch.utils.data.DataLoader(samples[held_out:], batch_size=1, shuffle=True),
        torch.utils.data.DataLoader(samples[:held_out], batch_size=1),
        ckpt_path=args.resume,
    )
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
