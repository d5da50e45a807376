"""What transformers' own tests of Trainer with DeepSpeed do: `trainer_combinations.py OUT`.

Each function is a case that asserts; the script prints the names of those that passed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from deepspeed.utils.zero_to_fp32 import main as zero_to_fp32
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

from infinity.errors import ConfigError, InfinityError

OUT = Path(sys.argv[1])
CONFIGS = Path(__file__).parents[2] / "configs"
_runs: list[Path] = []


# A line through points #


class LineConfig(PreTrainedConfig):
    model_type = "line"
    hidden_size = 1


class Line(PreTrainedModel):
    """Two scalars, which is less than two ranks can share."""

    config_class = LineConfig

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.a = nn.Parameter(torch.tensor(0.0))
        self.b = nn.Parameter(torch.tensor(0.0))
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.to(self.a.dtype) * self.a + self.b
        return nn.functional.mse_loss(y.float(), labels), y


def points(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    y = 2 * x + 3 + 0.1 * torch.randn(count, generator=generator)
    return [{"x": x[i], "labels": y[i]} for i in range(count)]


def config(stage: int, *, optimizer: bool = True, scheduler: bool = False, **more: Any) -> dict[str, Any]:
    """As transformers' tests have it."""
    home = {"device": "cpu"} if stage == 2 else {"device": "nvme", "nvme_path": str(OUT / "drive")}
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    )
    found = auto | {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": home,
            "reduce_bucket_size": "auto",
            **({"offload_param": home, "stage3_param_persistence_threshold": 0} if stage == 3 else {}),
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    if optimizer:
        names = ("lr", "betas", "eps", "weight_decay")
        found["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(names, "auto")}
    if scheduler:
        names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        found["scheduler"] = {"type": "WarmupLR", "params": dict.fromkeys(names, "auto")}
    return found | more


def line(
    ds: dict[str, Any] | None, *, out: str | None = None, train_len: int = 64, kind: type[Trainer] = Trainer, **how: Any
) -> Trainer:
    if ds is None:
        forget_deepspeed()
    _runs.append(OUT / (out or f"run{len(_runs)}"))
    arguments = TrainingArguments(
        output_dir=str(_runs[-1]),
        deepspeed=ds,
        report_to=[],
        disable_tqdm=True,
        **{"learning_rate": 0.1, "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", **how},
    )
    trainer = kind(
        model=Line(LineConfig()), args=arguments, train_dataset=points(train_len, 42), eval_dataset=points(16, 7)
    )
    assert trainer.is_deepspeed_enabled == (ds is not None)
    return trainer


def forget_deepspeed() -> None:
    """After one Trainer with DeepSpeed, accelerate would use it in all later ones, with or without a configuration."""
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    AcceleratorState._reset_state()
    GradientState._reset_state()


def weights(trainer: Trainer) -> tuple[float, float]:
    model = trainer.model
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return model.a.item(), model.b.item()


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=tolerance, atol=tolerance)


# What is configured #


def values_that_differ_from_the_arguments_are_named(stage: int) -> None:
    ds = config(stage) | {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 1000, "gradient_clipping": 1.1}
    trainer = line(ds, per_device_train_batch_size=2, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"(?s)per_device_train_batch_size.* train_batch_size.*max_grad_norm"):
        trainer.train()


def optimizers_and_schedulers_of_either_side_give_the_same_line(stage: int) -> None:
    plain = line(None)
    loss = plain.train().training_loss
    for optimizer in (True, False):
        trainer = line(config(stage, optimizer=optimizer))
        near(trainer.train().training_loss, loss)
        near(weights(trainer), (plain.model.a.item(), plain.model.b.item()))
        # Where DeepSpeed steps the schedule, Trainer logs the rate that comes next.
        wanted = logged(plain, "learning_rate")
        near(logged(trainer, "learning_rate")[: len(wanted) - 1], wanted[1:] if optimizer else wanted[:-1])
    warmed = [line(config(stage, optimizer=optimizer, scheduler=True), warmup_steps=4) for optimizer in (True, False)]
    for trainer in warmed:
        trainer.train()
    assert logged(warmed[0], "learning_rate") == logged(warmed[1], "learning_rate")
    near(weights(warmed[0]), weights(warmed[1]))


def an_optimizer_of_another_kind_is_taken_or_refused_by_name(stage: int) -> None:
    plain = line(None, optim="sgd", max_steps=4)
    plain.train()
    trainer = line(config(stage, optimizer=False, zero_force_ds_cpu_optimizer=False), optim="sgd", max_steps=4)
    trainer.train()
    near(weights(trainer), (plain.model.a.item(), plain.model.b.item()))
    for name, message, force in (
        ("sgd", r"they have `dampening`.*zero_force_ds_cpu_optimizer", True),
        ("adafactor", "they have `clip_threshold`", True),
        ("rmsprop", "RMSprop cannot be tiered", False),
    ):
        refused = line(config(stage, optimizer=False, zero_force_ds_cpu_optimizer=force), optim=name)
        with pytest.raises(ConfigError, match=message):
            refused.train()


def a_schedule_that_follows_a_metric_is_stepped_or_refused(stage: int) -> None:
    falling = {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"}  # at every evaluation
    how: dict[str, Any] = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": falling}
    how |= {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    plain = line(None, **how)
    plain.train()
    trainer = line(config(stage, optimizer=False), **how)
    trainer.train()
    assert logged(trainer, "learning_rate") == logged(plain, "learning_rate")
    near(weights(trainer), (plain.model.a.item(), plain.model.b.item()))
    refused = line(config(stage), **how)
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau follows a metric.*optimizer section"):
        refused.train()


def a_configuration_is_forgotten_with_its_trainer(stage: int) -> None:
    trainer = line(config(stage))
    assert is_deepspeed_zero3_enabled() == (stage == 3)
    assert deepspeed_config()
    trainer.accelerator.state._reset_state()
    del trainer
    assert not is_deepspeed_zero3_enabled()
    assert not deepspeed_config()


# What trains #


def accumulated_gradients_give_the_same_line(stage: int) -> None:
    one = line(config(stage, scheduler=True), per_device_train_batch_size=16)
    four = line(config(stage, scheduler=True), per_device_train_batch_size=4, gradient_accumulation_steps=4)
    losses = [trainer.train().training_loss for trainer in (one, four)]
    near(losses[0], losses[1], 1e-3)
    near(weights(one), weights(four))
    assert weights(one)[0] != 0


def steps_that_overflow_are_skipped_and_their_rate_is_logged(stage: int) -> None:
    trainer = line(config(stage, scheduler=True), fp16=True, train_len=8)
    trainer.train()
    assert trainer.state.global_step == 1
    assert weights(trainer) == (0.0, 0.0)
    assert logged(trainer, "learning_rate") == [0.0]


class Small(Trainer):
    """Has no memory for more than four samples, and notices it in the middle of a step."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *more: Any, **named: Any) -> torch.Tensor:
        if len(inputs["labels"]) > 4 and self.accelerator.sync_gradients:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return super().training_step(model, inputs, *more, **named)


def a_batch_size_that_fits_is_found(stage: int) -> None:
    how = {"gradient_accumulation_steps": 2, "max_steps": 3}
    trainer = line(config(stage), kind=Small, auto_find_batch_size=True, per_device_train_batch_size=9, **how)
    trainer.train()
    plain = line(None, per_device_train_batch_size=4, **how)
    plain.train()
    near(weights(trainer), (plain.model.a.item(), plain.model.b.item()))


def a_second_run_of_a_trainer_is_refused(stage: int) -> None:
    trainer = line(config(stage), max_steps=1)
    trainer.train()
    with pytest.raises(InfinityError, match="the engine is closed"):
        trainer.train()


def ready_configurations_train_as_in_memory(stage: int) -> None:
    for name, precision in (("llama-factory", {}), ("axolotl", {"bf16": True, "use_cpu": True})):
        found = []
        for optim in ("adamw_torch_fused", "sgd"):
            ds = json.loads((CONFIGS / f"{name}.json").read_text())
            ds["tiering"]["nvme"][0]["path"] = str(OUT / "drive")
            trainer = line(ds, optim=optim, **precision)
            trainer.train()
            plain = line(None, optim=optim)
            plain.train()
            assert trainer.deepspeed.zero_optimization_stage() == stage
            near(weights(trainer), (plain.model.a.item(), plain.model.b.item()), 0.05 if precision else 1e-5)
            found.append(weights(trainer))
        assert found[0] != found[1]


# What is saved #


def a_run_that_is_resumed_ends_the_same(stage: int) -> None:
    for optimizer, scheduler in ((True, True), (False, False)):
        how: dict[str, Any] = {
            "out": f"resumed{stage}{optimizer}",
            "train_len": 128,
            "num_train_epochs": 2,
            "save_strategy": "steps",
            "save_steps": 20,
        }
        whole = line(config(stage, optimizer=optimizer, scheduler=scheduler), **how)
        whole.train()
        found = weights(whole)
        again = line(config(stage, optimizer=optimizer, scheduler=scheduler), **how)
        again.train(resume_from_checkpoint=str(_runs[-1] / "checkpoint-20"))
        assert weights(again) == found
        assert logged(again, "loss") == logged(whole, "loss")
        assert dataclasses.asdict(again.state)["global_step"] == 32


def the_best_model_is_loaded_though_it_is_not_the_last(stage: int) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    how = often | {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = line(config(stage, optimizer=False), max_steps=12, **how)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    near(trainer.evaluate()["eval_loss"], trainer.state.best_metric)


def masters_are_had_from_a_checkpoint(stage: int) -> None:
    ds = config(stage)
    ds["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    trainer = line(ds, max_steps=4, save_strategy="steps", save_steps=4)
    trainer.train()
    found, out = weights(trainer), _runs[-1]
    trainer.save_model(str(out / "saved"))  # at stage 3 a checkpoint, for nothing is gathered
    saved = out / "saved" if stage == 3 else out / "checkpoint-4"
    assert (saved / "zero_to_fp32.py").is_file()
    zero_to_fp32([str(saved), str(out / "masters")])
    masters = torch.load(out / "masters" / "pytorch_model.bin")
    assert (masters["a"].item(), masters["b"].item()) == found
    load_state_dict_from_zero_checkpoint(trainer.model, str(out / "checkpoint-4"))
    assert weights(trainer) == found


# Models of transformers #


def embeddings_are_resized_before_training(stage: int) -> None:
    small = {"n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    set_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=64, **small)).save_pretrained(OUT / "gpt2")
    arguments = TrainingArguments(
        str(OUT / "resize"), deepspeed=config(stage), report_to=[], disable_tqdm=True, max_steps=2, save_strategy="no"
    )
    model = AutoModelForCausalLM.from_pretrained(OUT / "gpt2")
    model.resize_token_embeddings(80)
    ids = torch.randint(80, (16, 16))
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    trainer.save_model(str(OUT / "resized"))
    unset_hf_deepspeed_config()
    again = AutoModelForCausalLM.from_pretrained(OUT / "resized")
    assert again.get_input_embeddings().weight.shape == (80, 32)
    assert again.get_input_embeddings().weight.isfinite().all()


def an_encoder_and_decoder_trains_and_generates_the_same(stage: int) -> None:
    shape = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16, "decoder_start_token_id": 0}
    set_seed(0)
    T5ForConditionalGeneration(T5Config(vocab_size=64, **shape)).save_pretrained(OUT / "t5")
    ids, labels = torch.randint(2, 64, (16, 12)), torch.randint(2, 64, (16, 8))
    shifted = nn.functional.pad(labels[:, :-1], (1, 0))
    data = [{"input_ids": ids[i], "labels": labels[i], "decoder_input_ids": shifted[i]} for i in range(16)]
    found = []
    for ds in (None, config(stage)):
        set_seed(0)
        arguments = Seq2SeqTrainingArguments(
            str(OUT / "t5-run"),
            deepspeed=ds,
            report_to=[],
            disable_tqdm=True,
            max_steps=4,
            learning_rate=3e-3,
            label_smoothing_factor=0.1,
            predict_with_generate=True,
            generation_max_length=6,
            save_strategy="no",
        )
        model = T5ForConditionalGeneration.from_pretrained(OUT / "t5")
        trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
        assert trainer.is_deepspeed_enabled == (ds is not None)
        loss = trainer.train().training_loss
        found.append((loss, trainer.evaluate()["eval_loss"], trainer.predict(data[:4]).predictions.tolist()))
    near(found[0][:2], found[1][:2])
    assert found[0][2] == found[1][2]


BOTH, TWO, THREE = (2, 3), (2,), (3,)

CASES: tuple[tuple[Callable[[int], None], tuple[int, ...]], ...] = (
    (values_that_differ_from_the_arguments_are_named, TWO),
    (optimizers_and_schedulers_of_either_side_give_the_same_line, THREE),
    (an_optimizer_of_another_kind_is_taken_or_refused_by_name, TWO),
    (a_schedule_that_follows_a_metric_is_stepped_or_refused, TWO),
    (a_configuration_is_forgotten_with_its_trainer, BOTH),
    (accumulated_gradients_give_the_same_line, THREE),
    (steps_that_overflow_are_skipped_and_their_rate_is_logged, THREE),
    (a_batch_size_that_fits_is_found, TWO),  # which Trainer refuses itself at stage 3
    (a_second_run_of_a_trainer_is_refused, TWO),
    (ready_configurations_train_as_in_memory, THREE),
    (a_run_that_is_resumed_ends_the_same, THREE),
    (the_best_model_is_loaded_though_it_is_not_the_last, BOTH),
    (masters_are_had_from_a_checkpoint, BOTH),
    (embeddings_are_resized_before_training, THREE),
    (an_encoder_and_decoder_trains_and_generates_the_same, THREE),
)


def main() -> None:
    passed = []
    for case, stages in CASES:
        for stage in stages:
            case(stage)
            passed.append(f"{case.__name__}-{stage}")
            forget_deepspeed()
    print("RESULT", json.dumps(passed), flush=True)


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    main()
