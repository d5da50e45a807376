"""Every language model of transformers, made tiny, beside a plain loop.

    python benchmarks/architectures.py --path DIR [--tasks causal,masked] [--only NAME] [--json FILE]

The claim: a model that trains in plain PyTorch trains alike with its parameters and states on NVMe, in the least memory
that `initialize` asks for or, where how its modules use one another is refused in that, in a few times as much; with no
word about its architecture anywhere. Three steps with AdamW in fp32, which changes a weight by 1e-3 in each: losses are
within 1e-4 of the plain loop's, and weights within 3e-4, or all of a parameter together within 1% of the way that they
have come (where a gradient is a rounding, so is the direction of Adam's step).

A configuration is made tiny by the names of its values; what does not train in plain PyTorch then, or is still larger
than 30 million parameters, is left out and counted as such. Each model trains in a process of its own, forked off one
that has imported everything.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

import infinity
import infinity.setup  # before the children are forked
from infinity.errors import CapacityError, InfinityError
from tests.behaviour.test_models import tightest

WIDTH, LAYERS, HEADS, VOCAB, TOKENS = 64, 3, 4, 128, 16
STEPS = 3
MOST_PARAMS = 30e6
MOST_TIMES = 5  # tries, each in twice the memory of the one before
LIMIT_S = 180
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
LOSS_TOLERANCE, WEIGHT_TOLERANCE, WAY_TOLERANCE = 1e-4, 3e-4, 1e-2
TASKS: dict[str, dict[str, Any]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
# What the values of a configuration are to be, by their names.
VALUES = (
    (WIDTH, "hidden_size d_model n_embd embed_dim dim word_embed_proj_dim embedding_size emb_dim hidden_dim"),
    (WIDTH, "projection_dim max_position_embeddings n_positions max_seq_len n_ctx"),
    (96, "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size mlp_dim inner_dim"),
    (96, "moe_intermediate_size shared_expert_intermediate_size"),
    (LAYERS, "num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_encoder_layers"),
    (LAYERS, "num_decoder_layers depth"),
    (HEADS, "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads"),
    (2, "num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok moe_topk moe_k"),
    (WIDTH // HEADS, "head_dim d_kv attention_head_size"),
)
BY_NAME = {name: value for value, names in VALUES for name in names.split()}
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers")


@dataclass(frozen=True)
class Outcome:
    """How one model trained.

    Attributes:
        verdict: "as plain", "left out", or what is wrong: "differs", "refused", "died".
        told: why.
    """

    task: str
    architecture: str
    verdict: str
    told: str
    params: int = 0
    furthest: float = 0.0
    read_bytes: int = 0


# Tiny configurations #


def tiny(name: str) -> Any:
    """The configuration of an architecture, as small as its names tell."""
    kind = CONFIG_MAPPING[name]
    small = dict(changes(kind()))
    try:
        config = kind(**small)
    except Exception:  # some check what cannot all be known here
        config = shrunk(kind())
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            shrunk(value)
    for key in PER_LAYER:
        if isinstance(kinds := getattr(config, key, None), list):
            setattr(config, key, kinds[:LAYERS])
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def shrunk(config: Any) -> Any:
    for key, value in list(changes(config)):
        setattr(config, key, value)
    return config


def changes(config: Any) -> Iterator[tuple[str, Any]]:
    for key, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool) and not key.startswith("_"):
            small = smaller(key, value)
            if small != value:
                yield key, small


def smaller(key: str, value: int) -> int:
    if key.endswith(("token_id", "_token_index")):
        return min(value, VOCAB - 1)
    if "vocab_size" in key:
        return min(value, VOCAB)
    if "expert" in key and key.startswith(("num", "n_")) and "per_tok" not in key and "group" not in key:
        return min(value, 4)
    return BY_NAME.get(key, value)


# Training #


def batch(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(5, VOCAB - 2, (2, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model: Any, index: int) -> torch.Tensor:
    torch.manual_seed(index)
    output: torch.Tensor = model(**batch(index)).loss
    return output


def train(task: str, name: str, kind: str, path: Path) -> Outcome:
    """In the least memory that is not refused."""
    try:
        config = tiny(name)
        with torch.device("meta"):
            params = sum(param.numel() for param in getattr(transformers, kind)(config).parameters())
        if params > MOST_PARAMS:
            return Outcome(task, name, "left out", "large, though its values are small", params)
        torch.manual_seed(0)
        plain: nn.Module = getattr(transformers, kind)(config).float().train()
        loss = loss_of(plain, 0)
        loss.backward()
        plain.zero_grad()
        if not torch.isfinite(loss):
            return Outcome(task, name, "left out", "its plain loss is not finite", params)
    except Exception as error:
        return Outcome(task, name, "left out", f"alone: {type(error).__name__}: {str(error)[:120]}")
    settings = tightest(plain, path)
    settings["optimizer"] = {"type": "AdamW", "params": ADAM}
    for times in range(MOST_TIMES):
        try:
            outcome = both(task, name, copy.deepcopy(plain), settings)
        except CapacityError as error:  # modules that use one another, or are used again and again
            settings["tiering"]["host_memory"] *= 2
            told = str(error)
        else:
            more = f"in {2**times} times the least" if times else ""
            return replace(outcome, params=params, told=outcome.told or more)
    return Outcome(task, name, "refused", told[:400], params)


def both(task: str, name: str, plain: nn.Module, settings: dict[str, Any]) -> Outcome:
    """The loops step by step.

    Raises:
        CapacityError: the least that `initialize` asks for is too little for how this model is used.
    """
    model = copy.deepcopy(plain)
    begin = {key: value.detach().clone() for key, value in plain.named_parameters()}
    optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], **ADAM)
    with infinity.initialize(model=model, config=settings)[0] as engine:
        for index in range(STEPS):
            expected = loss_of(plain, index)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(engine, index)
            engine.backward(loss)
            engine.step()
            if not torch.allclose(loss.detach(), expected.detach(), rtol=LOSS_TOLERANCE, atol=LOSS_TOLERANCE / 10):
                return Outcome(task, name, "differs", f"loss of step {index}: {loss.item()}, plain {expected.item()}")
        weights = {key: value.detach().clone() for key, value in engine.named_parameters()}
        read_bytes = engine.stats().tier_bytes.get("nvme_read", 0)
    distances = {key: weights[key] - value.detach() for key, value in plain.named_parameters() if value.numel()}
    furthest = max(distance.abs().max().item() for distance in distances.values())
    for key, distance in distances.items():
        way = (plain.get_parameter(key).detach() - begin[key]).norm()
        if not (distance.abs().max() <= WEIGHT_TOLERANCE or distance.norm() <= WAY_TOLERANCE * way):
            return Outcome(task, name, "differs", key, furthest=furthest, read_bytes=read_bytes)
    return Outcome(task, name, "as plain", "", furthest=furthest, read_bytes=read_bytes)


def in_a_child(task: str, name: str, kind: str, path: Path) -> Outcome:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        signal.alarm(LIMIT_S)
        try:
            with tempfile.TemporaryDirectory(dir=path) as directory:
                outcome = train(task, name, kind, Path(directory))
        except InfinityError as error:
            outcome = Outcome(task, name, "refused", str(error)[:400])
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
            outcome = Outcome(task, name, "died", told)
        os.write(writes, json.dumps(asdict(outcome)).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return Outcome(**json.loads(answer)) if answer else Outcome(task, name, "died", f"status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="directory on the drive (default: a temporary one)")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--only", help="architectures whose name has this in it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    outcomes = []
    for task in args.tasks.split(","):
        for name, kinds in TASKS[task].items():
            if args.only is None or args.only in name:
                kind = kinds if isinstance(kinds, str) else kinds[0]
                outcomes.append(in_a_child(task, name, kind, args.path or Path(tempfile.gettempdir())))
                one = outcomes[-1]
                print(f"{task:8} {name:32} {one.verdict:9} {one.furthest:.0e} {one.told}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    wrong = [one for one in outcomes if one.verdict not in ("as plain", "left out")]
    counts = Counter((one.task, one.verdict) for one in outcomes)
    print("\n| task | as plain | left out | wrong |\n|---|---|---|---|")
    for task in dict.fromkeys(one.task for one in outcomes):
        bad = sum(one.task == task for one in wrong)
        print(f"| {task} | {counts[task, 'as plain']} | {counts[task, 'left out']} | {bad} |")
    for one in wrong:
        print(f"{one.task} {one.architecture}: {one.verdict}: {one.told}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
