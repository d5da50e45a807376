"""`infinity run` starts the ranks, and what they train is what one process does on the same global batch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, get_args_parser
from torch.numa.binding import AffinityMode

from infinity.cli.main import main
from tests.cli.test_commands import lines, train, train_arguments, workspace, write_config
from tests.integrations.processes import ranks, run

__all__ = ["workspace"]  # a fixture


def test_two_ranks_train_as_one_process_with_twice_the_micro_batches(workspace, capsys) -> None:
    write_config(workspace, gradient_accumulation_steps=2)
    alone = train(workspace, capsys, "--steps", "6")
    write_config(workspace, gradient_accumulation_steps=1)
    together = run("--ranks", "2", *train_arguments(workspace, "--steps", "6", "--save-every", "3"))
    assert together.returncode == 0, together.stderr
    steps = lines(together.stdout)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]  # rank 0 alone reports
    for step, expected in zip(steps, alone, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=2e-3)
    write_config(workspace, gradient_accumulation_steps=2)
    resumed = train(workspace, capsys, "--steps", "7", "--resume")  # on one rank, from what two have saved
    assert [step["step"] for step in resumed] == [7]


def test_an_error_is_told_and_ends_all_ranks(workspace) -> None:
    """One that is found before torch is imported, and one of ranks that have joined."""
    ended = run("--ranks", "2", *train_arguments(workspace, "--steps", "0"))
    assert ended.returncode == 2
    assert "--steps is 0" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(r"infinity run: rank [01] ended with exit code 2; its output is above\n$", ended.stderr)
    joined = train_arguments(workspace, "--steps", "2", "--seq-len", "100000")
    ended = ranks(2, "-m", "infinity.cli.main", *joined, namespace=False)
    assert ended.returncode == 2
    assert "--seq-len is 100000" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_rank_that_was_killed_is_named_and_not_those_that_were_ended_for_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(100)\n"
    )
    ended = run("--ranks", "2", str(script))
    assert ended.returncode == 128 + signal.SIGKILL
    assert ended.stderr.endswith("infinity run: rank 1 ended with signal 9 (SIGKILL); its output is above\n")


def test_a_port_that_another_program_uses_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ended = run("--nodes", "2", "--node-rank", "0", "--address", f"127.0.0.1:{port}", str(script))
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert re.search(rf"infinity run: the launchers cannot meet: .*\b{port}\b.*--address HOST:PORT", ended.stderr)


def test_every_rank_gets_its_share_of_the_cores(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        'line = f\'{os.environ["OMP_NUM_THREADS"]} {os.environ["WORLD_SIZE"]} {sys.argv[1:]}\\n\'\n'
        "os.write(1, line.encode())\n"  # in one piece: the other rank writes, too
    )
    ended = run("--ranks", "2", str(script), "--config", "ds.json")
    assert ended.returncode == 0, ended.stderr
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.stdout.splitlines() == [f"{share} 2 ['--config', 'ds.json']"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0", "train"], "--ranks is 0"),
        (["nowhere.py"], "nowhere.py is no file"),
        (["--nodes", "2", "train"], "give --address"),
        (["--nodes", "2", "--address", "first", "train"], "give --node-rank"),
        (["--address", "first", "train"], "--address is first, which is for several machines: give --nodes"),
        (["--node_rank", "0", "train"], "--node-rank is 0, which is for several machines: give --nodes"),
        (["--master_port", "0", "train"], "--master-port is 0"),
        (["--num_nodes", "2", "--node_rank", "0", "--master_addr", "a:1", "--master_port", "2", "train"], "give one"),
        (["--nodes", "2", "--node-rank", "1", "--address", "fd00::1", "train"], "give HOST, HOST:PORT or [IPv6"),
        (["--hostfile", "hosts", "train"], "--hostfile hosts is an option of DeepSpeed's launcher"),
        (["--include", "localhost:0", "train"], "CUDA_VISIBLE_DEVICES chooses the GPUs"),
        (["--numa-binding", "near", "train"], "--numa-binding is near; it is one of node, socket"),
    ],
)
def test_what_cannot_run_is_refused(arguments, message, capsys, monkeypatch) -> None:
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "started"),
    [
        (["--master_port", "1234"], ["--master-addr=127.0.0.1", "--master-port=1234"]),
        (["--master_addr", "localhost", "--master_port", "1234"], ["--master-addr=127.0.0.1", "--master-port=1234"]),
        (
            ["--num_nodes", "2", "--node_rank", "1", "--master_addr", "first", "--master_port", "1234"],
            ["--nnodes=2", "--node-rank=1", "--master-addr=first", "--master-port=1234"],
        ),
        (
            ["--nodes", "2", "--node-rank", "1", "--address", "[fd00::1]:1234"],
            ["--nnodes=2", "--node-rank=1", "--master-addr=fd00::1", "--master-port=1234"],
        ),
    ],
)
def test_options_of_deepspeeds_launcher_are_taken(options, started, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "script.py").touch()
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environment: commands.append(command))
    main(["run", "--num_gpus", "2", *options, str(tmp_path / "script.py")])
    assert commands[0][3 : 3 + len(started)] == started


AUTO = """tiering.host_memory is "auto" in {}: transformers' Trainer and accelerate have no value for this key"""


def test_a_file_that_accelerate_would_refuse_is_named_before_the_script_starts(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    script, file = tmp_path / "script.py", tmp_path / "ds.json"
    script.touch()
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environment: commands.append(command))
    file.write_text(json.dumps({"bf16": {"enabled": "auto"}, "tiering": {"host_memory": "1GiB"}}))
    for option in (["--deepspeed", str(file)], [f"--deepspeed={file}"]):
        main(["run", "--ranks", "1", str(script), *option])
        assert capsys.readouterr().err == ""
    file.write_text(json.dumps({"tiering": {"host_memory": "auto"}}))
    for option in (["--deepspeed", str(file)], [f"--deepspeed={file}"]):
        main(["run", "--ranks", "1", str(script), *option])
        assert f"warning: {AUTO.format(file)}" in capsys.readouterr().err
    assert len(commands) == 4
    assert main(["run", "accelerate", "launch", "--deepspeed_config_file", str(file), str(script)]) == 2
    assert f"error: {AUTO.format(file)}" in capsys.readouterr().err
    assert len(commands) == 4


@pytest.mark.parametrize("option", ["--ranks", "--nodes", "--master-port", "--max-restarts", "--shutdown-timeout"])
def test_what_accelerate_decides_is_not_ignored(option: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "execve", lambda *started: None)
    assert main(["run", option, "2", "accelerate", "launch", "script.py"]) == 2
    assert "accelerate starts the ranks" in capsys.readouterr().err


def test_ranks_are_bound_as_torchrun_binds_them(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    commands = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: commands.append(command))
    main(["run", "--ranks", "2", "--numa-binding", "node", str(script)])
    (command,) = commands
    given = config_from_args(get_args_parser().parse_args(command[2:]))[0]
    assert given.numa_options.affinity_mode == AffinityMode.NODE
