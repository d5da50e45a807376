"""A plain PyTorch loop with its optimizer's moments on a drive: 8 of the 16 bytes that a parameter takes in float32.

python plain_loop_nvme_adamw.py --data my-texts/ --nvme /local_nvme

The model, its parameters and its gradients are torch's own; updates run under backward.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import infinity


class Letters(nn.Module):
    """Guesses the next byte of a text."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        hidden = self.bytes(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.blocks(hidden, mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="a directory of .txt files")
    parser.add_argument("--nvme", type=Path, help="a directory on the drive; without it, torch's AdamW in memory")
    parser.add_argument("--out", default="letters.pt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=128, help="bytes a sample")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    text = b"\n\n".join(file.read_bytes() for file in sorted(args.data.rglob("*.txt")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Letters(args.width, args.layers, args.length).to(device)
    if args.nvme is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    else:
        optimizer = infinity.optim.AdamW(model.parameters(), lr=args.lr, offload="nvme", nvme_path=args.nvme)
        optimizer.overlap(model)  # for loops that neither clip nor accumulate
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step in range(args.steps):
        starts = torch.randint(len(tokens) - args.length, (args.batch,))
        pieces = torch.stack([tokens[start : start + args.length + 1] for start in starts]).long().to(device)
        logits = model(pieces[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    # Either optimizer loads the other's state.
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)
    if isinstance(optimizer, infinity.optim.AdamW):
        optimizer.close()


if __name__ == "__main__":
    main()
