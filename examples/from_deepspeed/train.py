"""A DeepSpeed script as it was: `deepspeed train.py --deepspeed_config ds_config.json`.

On infinity: `infinity run train.py --deepspeed_config ds_config.json` as it is, or with the line of `infinity.diff`.
"""

import argparse

import deepspeed
import torch
from torch import nn

SIZE, CLASSES = 64, 8


class Digits(torch.utils.data.Dataset):
    """Noisy pictures of few classes, made up on the spot."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        means = torch.randn(CLASSES, SIZE, generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        self.pictures = means[self.labels] + torch.randn(count, SIZE, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pictures[index], self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=3)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    parameters = [param for param in model.parameters() if param.requires_grad]
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=parameters, training_data=Digits(512)
    )
    for epoch in range(args.epochs):
        for pictures, labels in loader:
            outputs = engine(pictures.to(engine.device, next(iter(engine.module.parameters())).dtype))
            loss = nn.functional.cross_entropy(outputs.float(), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, learning rate {engine.get_lr()[0]:.5f}")
    engine.save_checkpoint("checkpoints", client_state={"epochs": args.epochs})


if __name__ == "__main__":
    main()
