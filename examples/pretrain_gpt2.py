"""Pretrain GPT-2 from nothing on the bytes of a directory's texts, in a loop of one's own.

python pretrain_gpt2.py --data my-texts/ --config ../configs/nvme.json
infinity run --ranks 4 pretrain_gpt2.py --data my-texts/ --config ../configs/nvme.json --resume
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import infinity


def batch_of(step: int, text: torch.Tensor, samples: int, length: int, rank: int, ranks: int) -> torch.Tensor:
    """Pieces of the text that the step and the rank alone choose, so that a run goes on where it was."""
    generator = torch.Generator().manual_seed(step * ranks + rank)
    starts = torch.randint(len(text) - length + 1, (samples,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts]).long()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="a directory of .txt files")
    parser.add_argument("--config", required=True, help="where the states live, the optimizer, the batch size")
    parser.add_argument("--out", default="pretrained")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens (bytes) a sample")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    args = parser.parse_args()

    text = b"\n\n".join(file.read_bytes() for file in sorted(args.data.rglob("*.txt")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    shape = GPT2Config(
        vocab_size=256,
        n_positions=args.length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.width // 64 or 1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with infinity.zero.Init(config=args.config):  # memory need not hold the model
        model = GPT2LMHeadModel(shape)
    engine, _, _, _ = infinity.initialize(model=model, config=args.config)
    if args.resume:
        engine.load_checkpoint(args.out)
    accumulate = engine.gradient_accumulation_steps()
    with engine:
        while engine.global_steps < args.steps:
            step = engine.global_steps
            for part in range(accumulate):
                ids = batch_of(
                    step * accumulate + part,
                    tokens,
                    engine.train_micro_batch_size_per_gpu(),
                    args.length,
                    engine.global_rank,
                    engine.world_size,
                ).to(engine.device)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
            if engine.global_rank == 0:
                read = engine.stats().tier_bytes.get("nvme_read", 0) / 1e6
                print(f"step {step}: loss {loss.item():.4f}, {read:.1f} MB read", flush=True)
            if engine.global_steps % args.save_every == 0 or engine.global_steps == args.steps:
                engine.save_checkpoint(args.out, keep_last=2)
        engine.save_16bit_model(Path(args.out) / "weights")  # for AutoModelForCausalLM.from_pretrained


if __name__ == "__main__":
    main()
