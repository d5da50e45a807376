"""An ordinary loop over accelerate, which knows nothing of infinity: `accelerate_script.py OUT`."""

from __future__ import annotations

import json
import sys
import warnings

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from tests.api.small_models import WIDTH, Heads

warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # accelerate calls it on the optimizer given

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = Heads()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
data = torch.utils.data.DataLoader(list(torch.randn(14, WIDTH)), batch_size=2)  # seven batches: the last step has one
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
found: dict[str, list[float]] = {"losses": [], "rates": [], "norms": [], "loaded": []}


def epoch(losses: list[float]) -> None:
    for x in data:
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            found["rates"].append(scheduler.get_last_lr()[0])


epoch(found["losses"])
accelerator.save_state(sys.argv[1])
epoch(found["losses"])
state = accelerator.get_state_dict(model)
found["weights"] = [float(state[name].double().sum()) for name in sorted(state)]
accelerator.load_state(sys.argv[1])
epoch(found["loaded"])
if accelerator.is_main_process:
    print("RESULT", json.dumps(found | {"engine": type(model).__name__}), flush=True)
accelerator.end_training()
