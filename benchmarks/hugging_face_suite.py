"""The tests that transformers and accelerate have for DeepSpeed, of a checkout of either, with infinity in its place.

    python benchmarks/hugging_face_suite.py --checkout transformers --json
    python benchmarks/hugging_face_suite.py --checkout accelerate --only accumulation --verbose

The claim: Trainer and Accelerator, unchanged, do with infinity what their own tests want of DeepSpeed: read the file
and fill it in, train, accumulate, save, resume, load the best model, build under `zero.Init`, resize embeddings, with
ZeRO-2 and ZeRO-3, in one process and in two by `torchrun` and `accelerate launch`. Every test counts, with the first
cause of what failed; there is no floor.

The tests run unchanged, those for GPUs as well, on the CPU with gloo (`stand_ins/no_gpu`). The models that they
download are replaced by tiny ones of the same kinds; the model zoo of transformers, which runs all examples of a
checkout with models of the Hub, is left out. They need `parameterized` and `datasets`.
"""

from __future__ import annotations

import json
import string
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    MobileViTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from benchmarks.foreign_tests import HERE, Suite, parser_of, run, table

FILES = ("tests/trainer/distributed/test_trainer_distributed_deepspeed.py", "tests/deepspeed/test_deepspeed*.py")
WORDS = 1024  # tests draw ids below 1000


def make_models(place: Path) -> None:
    """What the tests load from the Hub, by the same names in the working directory."""
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE({**alphabet, "<eos>": len(alphabet), "<pad>": len(alphabet) + 1}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>", pad_token="<pad>")
    # Unigrams, as T5's: scores beside the pieces.
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0), ("▁", -2.0)]
    pieces = T5Tokenizer(vocab=[*special, *((letter, -3.0) for letter in string.printable if letter.strip())])
    blocks: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
    }
    experts: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    gpt2 = GPT2Config(vocab_size=WORDS, n_embd=32, n_head=4, n_layer=5)
    small: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    padding: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0}
    t5 = T5Config(**small, **padding, vocab_size=len(pieces))
    gptj = GPTJConfig(vocab_size=WORDS, n_embd=32, n_head=4, n_layer=2, rotary_dim=4)
    torch.manual_seed(0)
    made: dict[str, tuple[Any, Any]] = {
        "gpt2": (GPT2LMHeadModel(gpt2), words),
        "sshleifer/tiny-gpt2": (GPT2LMHeadModel(gpt2), words),
        "hf-internal-testing/tiny-random-gpt2": (GPT2LMHeadModel(gpt2), words),
        "hf-internal-testing/tiny-random-gptj": (GPTJForCausalLM(gptj), words),
        "patrickvonplaten/t5-tiny-random": (T5ForConditionalGeneration(t5), pieces),
        "peft-internal-testing/tiny-random-qwen-1.5-MoE": (
            Qwen2MoeForCausalLM(Qwen2MoeConfig(hidden_size=16, intermediate_size=32, **blocks, **experts)),
            words,
        ),
        "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": (
            Qwen2ForCausalLM(Qwen2Config(hidden_size=16, intermediate_size=32, **blocks)).bfloat16(),
            words,
        ),
    }
    for name, (model, tokenizer) in made.items():
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    MobileViTConfig(hidden_sizes=[64, 80, 96]).save_pretrained(place / "apple/mobilevit-xx-small")


@contextmanager
def working_directory(checkout: Path) -> Iterator[Path]:
    """One that has the checkout's tests, and the models by the names that they ask for."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "tests").symlink_to(checkout.absolute() / "tests")
        make_models(place)
        yield place


def main() -> int:
    parser = parser_of(__doc__, limit_s=240)
    parser.add_argument("--checkout", type=Path, required=True, help="of transformers or of accelerate")
    args = parser.parse_args()
    with working_directory(args.checkout) as place:
        files = [file for pattern in FILES for file in sorted(place.glob(pattern)) if args.only in str(file)]
        if not files:
            raise SystemExit(f"{args.checkout} has none of {', '.join(FILES)}: give a checkout of either project")
        suite = Suite(
            place,
            ("stand_ins.hugging_face_suite",),
            paths=(HERE / "stand_ins/no_gpu",),
            environment={"HF_HUB_OFFLINE": "1", "RUN_SLOW": "1", "SUITE_RANKS": str(args.ranks)},
            options=("-k", "not ModelZoo"),
            limit_s=args.limit,
        )
        results = run(suite, files, verbose=args.verbose)
    print(json.dumps(results) if args.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
