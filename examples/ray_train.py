"""Train GPT-2 from nothing on Ray's workers; when one of them is lost, all start again from the last checkpoint.

python ray_train.py --data my-texts/ --config ../configs/nvme.json --workers 2

On several machines, --data and --out must be directories that all of them see; the states lie on each machine's drive.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import GPT2Config, GPT2LMHeadModel

import infinity


def batch_of(step: int, text: torch.Tensor, samples: int, length: int, rank: int, ranks: int) -> torch.Tensor:
    """Pieces of the text that the step and the rank alone choose, so that a run goes on where it was."""
    generator = torch.Generator().manual_seed(step * ranks + rank)
    starts = torch.randint(len(text) - length + 1, (samples,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts]).long()


def train(settings: dict[str, Any]) -> None:
    """What every worker runs, and runs again after one was lost."""
    os.chdir(settings["where"])  # for paths of the configuration that begin here
    length, width = settings["length"], settings["width"]
    text = b"\n\n".join(file.read_bytes() for file in sorted(Path(settings["data"]).rglob("*.txt")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    shape = GPT2Config(
        vocab_size=256,
        n_positions=length,
        n_embd=width,
        n_layer=settings["layers"],
        n_head=width // 64 or 1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with infinity.zero.Init(config=settings["config"]):
        model = GPT2LMHeadModel(shape)
    engine, _, _, _ = infinity.initialize(model=model, config=settings["config"])  # joins the group that Ray has made
    with engine:
        engine.load_checkpoint(settings["out"])  # if there is one
        while engine.global_steps < settings["steps"]:
            step = engine.global_steps
            lose_a_worker(settings, step, engine.global_rank)
            samples = engine.train_micro_batch_size_per_gpu()
            ids = batch_of(step, tokens, samples, length, engine.global_rank, engine.world_size).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            if engine.global_steps % settings["save_every"] == 0 or engine.global_steps == settings["steps"]:
                engine.save_checkpoint(settings["out"], keep_last=2, blocking=False)
            if engine.global_rank == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            ray.train.report({"step": step, "loss": loss.item()})
        engine.wait_checkpoint()
        engine.save_16bit_model(Path(settings["out"]) / "weights")  # for AutoModelForCausalLM.from_pretrained


def lose_a_worker(settings: dict[str, Any], step: int, rank: int) -> None:
    """Have the last worker killed before this step, once, if that is asked for."""
    told = Path(settings["out"]) / "a-worker-was-lost"
    if step == settings["lose_at"] and rank == settings["workers"] - 1 and not told.exists():
        told.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="a directory of .txt files")
    parser.add_argument(
        "--config", type=Path, required=True, help="where the states live, the optimizer, the batch size"
    )
    parser.add_argument("--out", type=Path, default="trained")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens (bytes) a sample")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--lose-at", type=int, metavar="STEP", help="kill a worker there, to see the run go on")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    paths = {name: str(getattr(args, name).resolve()) for name in ("data", "config", "out")}
    gpus = torch.cuda.is_available()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(args) | paths | {"where": str(Path.cwd())},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=gpus),
        run_config=ray.train.RunConfig(
            storage_path=str(args.out.resolve() / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()
    print(f"trained: {args.out / 'weights'}")


if __name__ == "__main__":
    main()
