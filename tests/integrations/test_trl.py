"""TRL's trainers under ZeRO-3 on a drive log and save what they do without DeepSpeed; they need TRL installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infinity.distribution import install_command
from tests.integrations.processes import result, script
from tests.integrations.test_example_loops import byte_tokenizer

HERE = Path(__file__).parent
FILE = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "swap"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "swap"},
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def test_trainers_of_trl_log_what_they_do_without_deepspeed(tmp_path) -> None:
    """Two micro-batches a step, reference models, generation, and a model that is looked at before it is trained."""
    pytest.importorskip("trl", reason=install_command("examples"))
    pytest.importorskip("peft")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256, max_position_embeddings=64))
    model.save_pretrained(tmp_path / "out" / "model")
    byte_tokenizer().save_pretrained(tmp_path / "out" / "model")
    (tmp_path / "swap").mkdir()
    (tmp_path / "zero3.json").write_text(json.dumps(FILE))
    names = "sft,dpo,dpo-lora,dpo-before,grpo"
    found = result(script(HERE / "trl_script.py", "out", names, "zero3.json", where=tmp_path))
    assert list(found) == names.split(",")
    for name, (plain, ours) in found.items():
        assert plain.keys() == ours.keys()
        assert len(plain["loss"]) == 3
        for key, values in plain.items():
            assert ours[key] == pytest.approx(values, rel=1e-4, abs=1e-5), (name, key)
    assert not list((tmp_path / "swap").iterdir())
