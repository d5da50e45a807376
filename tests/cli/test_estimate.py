"""`infinity estimate`, and what it shares with `infinity plan`."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from infinity.cli.main import main
from infinity.cli.planning import libraries_bytes
from infinity.cli.training import precision
from tests.cli.test_plan import config_file


def test_the_table(tmp_path, capsys) -> None:
    assert main(["estimate", "--model", "gpt2:tiny", "--config", config_file(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "process memory" in out
    assert "libraries" in out
    assert "nvme space" in out


def test_a_drive_that_is_too_small_is_refused_with_both_numbers(tmp_path, capsys) -> None:
    arguments = ["estimate", "--params", "8e9", "--machine-memory", "64GiB", "--nvme-capacity", "60GiB", "--json"]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "the drives are too small: " in captured.err
    assert "has 60.00 GiB free" in captured.err
    facts = json.loads(captured.out)
    assert facts["machine_nvme_bytes"] > 60 << 30
    assert len(facts["problems"]) == 1
    assert main([*arguments[:-2], "130GiB", "--json"]) == 0


def test_libraries_count_with_what_the_first_products_load() -> None:
    """Kernels are loaded when a model first computes: 17 MiB with torch 2.13."""
    script = (
        "import infinity.planner, psutil; from infinity.cli.planning import libraries_bytes;"
        "before = psutil.Process().memory_info().rss; print(libraries_bytes() - before)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 4 << 20


# A process for each, forked off one that has imported what both need.
_EACH_ALONE = """
import json, os, sys
import infinity.planner
from infinity.cli.main import main
for command in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    code = main(command)
    sys.stdout.flush()
    os._exit(code)
"""


def test_libraries_count_with_those_of_the_model(tmp_path) -> None:
    """transformers and its model take 120 MiB."""
    models = (["--params", "2x64"], ["--model", "gpt2:tiny"])
    commands = [["estimate", *model, "--config", config_file(tmp_path), "--json"] for model in models]
    command = [sys.executable, "-c", _EACH_ALONE, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    alone, with_model = (json.loads(line)["libraries_bytes"] for line in done.stdout.splitlines())
    assert with_model > alone + (40 << 20)


def test_libraries_do_not_grow_with_what_was_planned_before() -> None:
    before = libraries_bytes()
    held = torch.ones(4 << 20)
    assert libraries_bytes() == before
    del held


def test_ranks_and_devices(capsys) -> None:
    machine = ["--nodes", "2", "--ranks", "4", "--device-memory", "2GiB", "--machine-memory", "8GiB"]
    machine += ["--nvme-capacity", "16GiB", "--host-memory", "150MiB"]
    options = ["--micro-batch-size", "2", "--seq-len", "128", "--checkpoint-activations"]
    assert main(["estimate", "--params", "4x512", *machine, *options, "--json", "--largest"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 8
    assert facts["tokens"] == 256
    assert facts["machine_nvme_bytes"] == 4 * facts["nvme_bytes"] > 0
    assert 0 < facts["activation_bytes"] < facts["device_bytes"] < 2 << 30
    assert facts["largest_params"] > facts["params"]


@pytest.mark.parametrize(("bf16_s", "chosen"), [(1.2, "bf16"), (4.0, "fp32")])
def test_the_precision_is_measured_where_nobody_names_one(bf16_s, chosen, tmp_path, monkeypatch, capsys) -> None:
    """As `infinity train` does; machines that are not here compute bf16 well."""
    monkeypatch.setattr(precision, "_layer", lambda device, dtype: [lambda: 1.0 if dtype is torch.float32 else bf16_s])
    (tmp_path / "auto.json").write_text(json.dumps({"bf16": {"enabled": "auto"}, "train_batch_size": 1}))
    (tmp_path / "named.json").write_text(json.dumps({"bf16": {"enabled": True}, "train_batch_size": 1}))

    def precision_of(*options: str) -> str:
        main(["estimate", "--params", "2x64", "--json", *options])
        captured = capsys.readouterr()
        assert ("fp32 is assumed" in captured.err) == (json.loads(captured.out)["precision"] == "fp32")
        return str(json.loads(captured.out)["precision"])

    assert precision_of() == precision_of("--config", str(tmp_path / "auto.json")) == chosen
    assert precision_of("--emulate", "H100") == precision_of("--precision", "bf16") == "bf16"
    assert precision_of("--config", str(tmp_path / "named.json")) == "bf16"


def test_what_a_stage_lets_go_is_on_nvme(caplog, capsys) -> None:
    stored = []
    for stage in ("0", "1", "2", "3"):
        memory = ["--host-memory", "2GiB", "--device-memory", "80GiB"]
        assert main(["estimate", "--params", "8x2048", "--stage", stage, *memory, "--json"]) == 0
        stored.append(json.loads(capsys.readouterr().out)["nvme_bytes"])
    assert 0 == stored[0] < stored[1] == stored[2] < stored[3]
    assert "does nothing at stage" not in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--params", "lots"], "--params lots: "),
        (["--params", "4x100"], "multiple of 64"),
        (["--params", "-5"], "no number of parameters"),
        (["--params", "1e9", "--ranks", "0"], "--ranks is 0"),
        (["--model", "gpt2", "--seq-len", "2048"], "takes at most 1024 tokens"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options, words, capsys) -> None:
    assert main(["estimate", *options]) == 2
    assert words in capsys.readouterr().err


# The verdict #


MACHINE = ["--machine-memory", "24GB", "--nvme-capacity", "400GB"]


def test_no_budget_is_estimated_to_be_exceeded(capsys) -> None:
    """On a device with clipping, some units keep their states and gradients in memory together, in one budget."""
    options = ["--emulate", "4090", "--machine-memory", "8GB", "--nvme-capacity", "1TB", "--json"]
    assert main(["estimate", "--params", "1e9", "--checkpoint-activations", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert 0.9 * facts["host_budget_bytes"] < facts["budget_bytes"] <= facts["host_budget_bytes"]


def test_the_last_lines_say_whether_it_fits_and_what_limits_it(capsys) -> None:
    assert main(["estimate", "--params", "8e9", *MACHINE, "--host-memory", "8GiB"]) == 0
    *_, verdict, advice = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"fits: 1\d\.\d of 22\.4 GiB host; limited by activations", verdict)
    assert advice.startswith("advice: --checkpoint-activations saves 4.6")
    assert main(["estimate", "--params", "8e9", *MACHINE, "--host-memory", "22GiB"]) == 2
    captured = capsys.readouterr()
    (total_gib,) = re.findall(r"^does not fit: ([\d.]+) of 22\.4 GiB host; limited by activations$", captured.out, re.M)
    assert float(total_gib) - libraries_bytes() / (1 << 30) == pytest.approx(27.9, abs=0.06)
    assert "host memory is too small" in captured.err
    few = ["--machine-memory", "24GB", "--nvme-capacity", "60GB", "--checkpoint-activations"]
    assert main(["estimate", "--params", "8e9", *few, "--json"]) == 2
    assert "GiB NVMe; limited by states on the drives" in json.loads(capsys.readouterr().out)["verdict"]


def test_the_largest_is_accepted_by_the_command_itself(capsys) -> None:
    machine = ["--machine-memory", "4GB", "--nvme-capacity", "12GB", "--device-memory", "2GB"]
    assert main(["estimate", "--params", "1e8", *machine, "--largest"]) == 0
    (shape,) = re.findall(r"^largest here .*\((\d+x\d+)\)$", capsys.readouterr().out, re.MULTILINE)
    assert main(["estimate", "--params", shape, *machine]) == 0


def test_the_largest_is_shown_for_a_budget_that_is_too_small_for_what_was_asked(capsys) -> None:
    assert main(["estimate", "--params", "8e9", *MACHINE, "--host-memory", "768MiB", "--largest"]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("largest here ")
    assert "needs at least" in captured.err
