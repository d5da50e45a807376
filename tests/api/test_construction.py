"""What a constructor writes under `zero.Init` is what `initialize` places: the values of a model built in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import infinity
from infinity.zero import Init
from infinity.zero.construction import FILE_BYTES
from tests.behaviour.reference import Placement, Recipe

LARGE = FILE_BYTES // 4  # float32 values
SMALL = 8
FP32 = Recipe("fp32").config(Placement())


class Written(nn.Module):
    """Writes to its parameters in every way that a constructor has."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.filled = nn.Linear(SMALL, numel // SMALL)
        with torch.no_grad():
            self.filled.weight.fill_(7.0)
            self.filled.bias[2:].uniform_()
        self.applied = nn.Linear(SMALL, numel // SMALL)
        self.given = nn.Parameter(torch.full((numel,), 3.0))
        values = torch.zeros(numel)
        self.shared = nn.Parameter(values)
        values += 5  # through another name of the same memory
        weight = nn.Parameter(torch.ones(numel))
        self.tied, self.list = weight, nn.ParameterList([weight])
        self.given.data.mul_(float(self.filled.weight.detach().sum()))
        self.scaled = nn.Linear(SMALL, numel // SMALL)
        self.scaled.weight = nn.Parameter(self.scaled.weight.detach() / 2)
        self.apply(self.init)

    @staticmethod
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.in_features == SMALL:
            nn.init.normal_(module.bias, std=3.0)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=512, n_positions=64))


def llama() -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, tie_word_embeddings=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: Written(SMALL * 4),
    "large": lambda: Written(LARGE),
    "gpt2": gpt2,
    "llama": llama,
    "norm": lambda: nn.Sequential(nn.Linear(SMALL, LARGE // SMALL), nn.BatchNorm1d(LARGE // SMALL)),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_random_numbers_are_those_of_a_model_built_in_memory(name) -> None:
    built = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with Init(enabled=enabled):
            model = MODELS[name]()
        built.append((model, torch.get_rng_state()))
    (plain, after), (kept, after_init) = built
    assert torch.equal(after, after_init)
    expected = plain.state_dict()
    assert len(dict(kept.named_parameters())) == len(dict(plain.named_parameters()))  # tied ones are
    with infinity.initialize(model=kept, config=FP32)[0] as engine:
        for key, value in engine.named_parameters():
            assert torch.equal(value, expected[key]), key


def test_what_it_wrote_is_kept() -> None:
    with Init():
        model = Written(LARGE)
    with infinity.initialize(model=model, config=FP32)[0] as engine:
        values = dict(engine.named_parameters())
    assert bool((values["filled.weight"] == 7).all())
    assert bool((values["shared"] == 5).all())
    assert float(values["applied.bias"].std()) > 2


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_large_parameters_lie_in_files_on_the_drive_and_not_in_memory(tmp_path) -> None:
    config = Recipe("fp32").config(Placement("nvme", "nvme", tmp_path))
    with Init(config=config):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
        before = _anonymous_bytes()
        model.extend(nn.Linear(1024, 1024) for _ in range(16))
        grown = _anonymous_bytes() - before
    assert grown < 16 << 20  # of 64 MiB
    assert not any(tmp_path.iterdir())  # files without names
    assert all(f"{tmp_path}/" in line for line in _mapped(model[0].weight))


def _mapped(tensor: torch.Tensor) -> list[str]:
    """The line of this process's memory map that has the tensor."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            found.append(line)
    assert found
    return found


def test_a_full_drive_is_an_error_with_words_and_not_a_signal(monkeypatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with Init(), pytest.raises(infinity.StorageError, match=r"zero\.Init cannot keep Linear\.weight .* TMPDIR"):
        nn.Linear(SMALL, LARGE)


def test_initialize_works_inside_the_context(tmp_path) -> None:
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path))
    with Init(config=config):
        model = Written(LARGE)
        with torch.device("meta"):
            model.meta = nn.Linear(SMALL, SMALL)
        engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        values = dict(engine.named_parameters())
    assert bool((values["filled.weight"] == 7).all())
    assert float(values["meta.weight"].abs().max()) > 0


class Halves:
    """Weights that know one parameter."""

    def __contains__(self, name: str) -> bool:
        return name == "weight"

    def read(self, name: str) -> torch.Tensor:
        return torch.full((SMALL, SMALL), 0.5)


def test_stored_weights_and_an_init_function_go_before_what_init_built() -> None:
    with Init():
        model = nn.Linear(SMALL, SMALL)
    bias = model.bias.detach().clone()
    with infinity.initialize(model=model, config=FP32, weights=Halves())[0] as engine:
        values = dict(engine.named_parameters())
    assert bool((values["weight"] == 0.5).all())
    assert torch.equal(values["bias"], bias)

    def to_threes(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 3.0)

    with Init():
        model = nn.Linear(SMALL, SMALL)
    with infinity.initialize(model=model, config=FP32, init_function=to_threes)[0] as engine:
        assert all(bool((value == 3).all()) for _, value in engine.named_parameters())


def test_a_value_in_memory_goes_before_stored_weights() -> None:
    model = nn.Linear(SMALL, SMALL)
    weight = model.weight.detach().clone()
    model.bias = nn.Parameter(model.bias.detach().to("meta"))
    with infinity.initialize(model=model, config=FP32, weights=Halves())[0] as engine:
        assert torch.equal(dict(engine.named_parameters())["weight"], weight)


def test_stored_weights_that_nothing_takes_are_refused() -> None:
    with pytest.raises(infinity.ConfigError, match="`weights` are given, but every parameter of the model has values"):
        infinity.initialize(model=nn.Linear(SMALL, SMALL), config=FP32, weights=Halves())
