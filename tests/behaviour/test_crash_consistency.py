"""Steps that outlive the process: whatever ends it, and whenever, the next one goes on with the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.cli.main import main
from infinity.config import format_size, load_config
from infinity.errors import CheckpointError, ConfigError, InfinityError, StorageError
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.ticket import UpdateTicket
from infinity.planner import plan_training
from infinity.tiers.run_files import kept_files, read_record
from infinity.tiers.states import Tile
from infinity.tiers.swap import SwapSpace
from infinity.tiers.swap_file import remove_stale
from tests.api.small_models import weights
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import ARCHITECTURES, Placement, Recipe, batches, loss_of, train_on

STEPS = 6
DATA = batches(STEPS)


def config_of(path: Path, *, keeps: bool = True, **changes: Any) -> dict[str, Any]:
    """`changes`: of the recipe, of the placement, and of tiering."""
    recipe = Recipe("bf16", clipping=changes.pop("clipping", 0.5))
    named = {name: changes.pop(name) for name in ("params", "host_memory", "schedule") if name in changes}
    placement = Placement(**({"params": "nvme", "optimizer": "nvme", "tile_size": "64KiB", "path": path} | named))
    config = recipe.config(placement)
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}
    config["zero_optimization"]["stage"] = changes.pop("stage", 3)
    config["tiering"] |= {"crash_consistent": keeps} | changes
    return config


def start(path: Path, architecture: str = "gpt2", seed: int = 0, **changes: Any) -> infinity.Engine:
    model = ARCHITECTURES[architecture](seed)
    if architecture == "llama":
        model.get_input_embeddings().requires_grad_(False)  # a frozen unit
        model.model.layers[1].mlp.requires_grad_(False)  # and one with both kinds
    return infinity.initialize(model=model, config=config_of(path, **changes))[0]


def train(engine: infinity.Engine, data: list[torch.Tensor] = DATA) -> list[float]:
    return train_on(engine, data[engine.global_steps :])


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def left(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run that was never stopped, without the key."""
    with start(tmp_path_factory.mktemp("whole"), keeps=False) as engine:
        return train(engine), weights(engine)


# Going on #

CASES = {
    "all_on_nvme_deferred": ("gpt2", {"host_memory": "1250KiB"}),
    "updates_in_backward": ("gpt2", {"host_memory": "900KiB", "clipping": 0.0}),
    "written_through_from_memory": ("llama", {}),
    "parameters_in_memory": ("llama", {"params": "none", "stage": 1, "checksum": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_closed_and_resumed_is_one_run(case, tmp_path) -> None:
    architecture, changes = CASES[case]
    (tmp_path / "whole").mkdir()
    with start(tmp_path / "whole", architecture, keeps=False, **changes) as engine:
        expected, expected_weights = train(engine), weights(engine)
    path = tmp_path / "kept"
    with start(path, architecture, **changes) as engine:
        losses = train(engine, DATA[:3])
        space = engine.stats().peak_bytes["nvme"]
    assert [Path(name).suffix for name in left(path)] == [".slots", ".record"]
    with start(path, architecture, **changes) as engine:
        record, state = engine.resume()
        assert record is not None
        assert state == {}
        assert engine.global_steps == 3
        assert engine.stats().peak_bytes.get("nvme", space) == space
        losses += train(engine)
        assert same(weights(engine), expected_weights)
        engine.end_run()
    assert losses == expected
    assert left(path) == []


def test_two_drives_that_are_mounted_elsewhere(whole, tmp_path) -> None:
    def drives(place: Path) -> list[dict[str, Any]]:
        rates = {"fast": 4e9, "slow": 1e9}
        return [{"path": str(place / name), "bandwidth": rate} for name, rate in rates.items()]

    first, second = tmp_path / "first", tmp_path / "second"
    with start(first, nvme=drives(first)) as engine:
        losses = train(engine, DATA[:3])
    first.rename(second)
    with pytest.raises(CheckpointError, match=r"is not in|in the order"):
        start(second, nvme=drives(second)[::-1])
    with start(second, nvme=drives(second)) as engine:
        engine.resume()
        assert losses + train(engine) == whole[0]
        engine.end_run()
    assert [left(second / name) for name in ("fast", "slow")] == [[], []]


def test_the_plan_knows_the_space(tmp_path) -> None:
    config = load_config(config_of(tmp_path, host_memory="1250KiB"))
    planned = plan_training(ARCHITECTURES["gpt2"](0), config)
    with start(tmp_path, host_memory="1250KiB") as engine:
        train(engine, DATA[:1])
        assert engine.stats().peak_bytes["nvme"] == planned.nvme_bytes
        engine.end_run()


def test_nothing_is_kept_without_the_key(tmp_path) -> None:
    with start(tmp_path, keeps=False) as engine:
        train(engine, DATA[:2])
        assert kept_files(tmp_path) == []
        for call in (engine.resume, engine.commit, engine.end_run):
            with pytest.raises(ConfigError, match="crash_consistent to true"):
                call()
    assert left(tmp_path) == []


class Images:
    """What the drive would have if the power failed, each time that a commit is about to flush it.

    Of the blocks that were written since the last flush a random half is there.
    """

    def __init__(self, engine: infinity.Engine, path: Path, target: Path) -> None:
        self._swap = engine._runtime.swap
        self._path = path
        self._target = target
        self._durable: dict[str, bytes] = {}
        self._rng = random.Random(0)
        self.taken: list[Path] = []
        self._swap.flush = self._flush

    def _flush(self, descriptor: int) -> None:
        (data,) = self._swap.files()
        content = data.read_bytes()
        durable = self._durable.get("data", bytes(len(content)))
        records = list(self._path.glob("*.record"))
        if records:
            image = self._target / f"image-{len(self.taken)}"
            image.mkdir()
            shutil.copy(records[0], image)
            assert self._swap.run is not None
            (image / self._swap.run.data_name(0)).write_bytes(self._torn(durable, content))
            self.taken.append(image)
        os.fdatasync(descriptor)
        self._durable["data"] = content

    def _torn(self, before: bytes, after: bytes) -> bytes:
        parts = []
        for start in range(0, len(after), 4096):
            block = slice(start, start + 4096)
            parts.append((after if self._rng.random() < 0.5 else before)[block])
        return b"".join(parts)


@pytest.mark.parametrize("host_memory", ["1250KiB", "64MiB"])
def test_a_power_failure_at_any_commit_leaves_the_step_of_the_record(host_memory, whole, tmp_path) -> None:
    expected, _ = whole
    path = tmp_path / "drive"
    with start(path, host_memory=host_memory) as engine:
        images = Images(engine, path, tmp_path)
        train(engine)
    assert len(images.taken) >= STEPS - 1
    for number, image in enumerate(images.taken):
        with start(image, host_memory=host_memory) as engine:
            assert engine.resume()[0] is not None
            assert engine.global_steps == number + 1
            assert train(engine, DATA[: number + 3]) == expected[number + 1 : number + 3]


def until_killed(path: Path, call: int) -> None:
    """Train, and be killed at a system call that makes something durable."""
    count = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return run

    for name in ("fsync", "fdatasync", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    engine = start(path)
    engine.resume()
    train(engine)
    engine.end_run()
    engine.close()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("call", [5, 12, 20])
def test_kill_9_at_any_flush_or_rename_goes_on_bit_for_bit(call, whole, tmp_path) -> None:
    expected, expected_weights = whole
    path = tmp_path / "drive"
    path.mkdir()
    run_ranks(1, until_killed, path, call, path=tmp_path, killed=[0])
    with start(path) as engine:
        engine.resume()
        step = engine.global_steps
        assert train(engine) == expected[step:]
        assert same(weights(engine), expected_weights)
        engine.end_run()
    assert left(path) == []


# What belongs to a step #


def test_the_client_state_and_what_is_done_between_steps(tmp_path) -> None:
    position = {"sample": 0}
    with start(tmp_path) as engine:
        engine.keep_with_steps(lambda: dict(position))
        for ids in DATA[:3]:
            position["sample"] += 1
            engine.backward(loss_of(engine, ids))
            engine.step()
        kept = weights(engine)
        name, param = next(iter(engine.module.named_parameters()))
        with infinity.zero.GatheredParameters([param], modifier_rank=0):
            param.data.fill_(7.0)
        assert not same(weights(engine), kept)
    with start(tmp_path) as engine:
        _, state = engine.resume()
        assert state == {"sample": 3}
        assert same(weights(engine), kept)  # what came after the step is not in it
        param = dict(engine.module.named_parameters())[name]
        with infinity.zero.GatheredParameters([param], modifier_rank=0):
            param.data.fill_(7.0)
        engine.commit()
        changed = weights(engine)
    with start(tmp_path) as engine:
        engine.resume()
        assert engine.global_steps == 3
        assert same(weights(engine), changed)
        engine.end_run()


def test_parameters_without_a_gradient_keep_their_values(tmp_path) -> None:
    """Their tiles stay in the slot of an earlier step while others move on."""

    def step(engine: infinity.Engine, index: int) -> None:
        head = engine.module.lm_head.weight
        values = engine(input_ids=DATA[index], labels=DATA[index]).loss
        if index % 2:
            values = (
                engine.module.model.layers[0].self_attn.q_proj(torch.ones(1, 64, dtype=torch.bfloat16)).sum() * 1e-3
            )
        assert head is not None
        engine.backward(values)
        engine.step()

    def run(path: Path, *, keeps: bool) -> dict[str, torch.Tensor]:
        engine = start(path, "llama", keeps=keeps, params="none", stage=1)
        for index in range(5):
            step(engine, index)
            if keeps and index in (1, 3):
                engine.close()
                engine = start(path, "llama", keeps=keeps, params="none", stage=1)
                engine.resume()
        found = weights(engine)
        engine.close()
        return found

    assert same(run(tmp_path / "plain", keeps=False), run(tmp_path / "kept", keeps=True))


# Refusals #


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A directory with the second step of a run."""
    with start(tmp_path / "drive") as engine:
        train(engine, DATA[:2])
    return tmp_path / "drive"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clipping": 1.0}, "gradient_clipping was 0.5 and is 1.0 here"),
        ({"tile_size": "128KiB"}, "tile_size_bytes"),
        ({"stage": 2, "params": "none"}, "stage"),
        ({"architecture": "llama"}, "is only"),
        ({"max_unit_size": "12KiB"}, "max_unit_size_bytes was None and is 12288 here"),
    ],
)
def test_another_configuration_or_model_is_refused_by_name(changes, words, stopped) -> None:
    with pytest.raises(CheckpointError, match=words) as refusal:
        start(stopped, **changes)
    assert "infinity states remove" in str(refusal.value)
    with start(stopped) as engine:  # nothing has happened to it
        engine.resume()
        assert engine.global_steps == 2


def test_a_budget_of_another_size_is_no_other_configuration(stopped, whole) -> None:
    with start(stopped, host_memory="64MiB") as engine:
        engine.resume()
        assert train(engine) == whole[0][2:]


def test_a_run_that_nobody_resumes_is_not_overwritten(stopped) -> None:
    (record,) = stopped.glob("*.record")
    before = read_record(record).generations[0]
    with start(stopped) as engine:
        for call in (lambda: train(engine), lambda: engine.load_checkpoint(stopped), engine.commit):
            with pytest.raises(CheckpointError, match=r"at step 2 .*engine\.resume\(\)"):
                call()
    assert read_record(record).generations[0] == before
    assert remove_stale(stopped) == []
    with start(stopped, keeps=False) as engine:  # a run of another kind beside it
        train(engine, DATA[:1])
    with start(stopped) as engine:
        assert engine.resume()[0] is not None


def test_a_living_run_keeps_its_directory(stopped, tmp_path) -> None:
    with start(stopped), pytest.raises(CheckpointError, match="in use: a living process"):
        start(stopped)
    with start(tmp_path / "new"), pytest.raises(CheckpointError, match="in use: a living process"):
        start(tmp_path / "new")  # whose first step is not finished


@pytest.mark.parametrize("damage", ["a byte of the record", "no record", "no states", "shorter states", "two runs"])
def test_damage_is_refused_with_words(damage, stopped, capsys) -> None:
    (record,) = stopped.glob("*.record")
    (states,) = stopped.glob("*.slots")
    if damage == "a byte of the record":
        content = bytearray(record.read_bytes())
        content[len(content) // 2] ^= 1
        record.write_bytes(content)
        words = "is damaged"
    elif damage == "no record":
        record.unlink()
        words = "whose record is not in"
    elif damage == "no states":
        states.unlink()
        words = "is missing"
    elif damage == "shorter states":
        os.truncate(states, states.stat().st_size - 4096)
        words = "where .* were kept"
    else:
        shutil.copy(record, stopped / "infinity-0123456789abcdef-r0.record")
        words = "several runs"
    with pytest.raises((CheckpointError, StorageError), match=words):
        start(stopped)
    if damage == "no states":
        assert main(["states", "list", str(stopped)]) == 0
        assert f"step 2  {format_size(record.stat().st_size)}  {states} is missing" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["record", "slots"])
@pytest.mark.parametrize("theirs", ["owner", "group", "everybody", "second name", "link"])
def test_states_that_another_user_may_have_made_are_refused(theirs, ending, stopped) -> None:
    """In a directory with the sticky bit, which is allowed, anybody may leave files under these names."""
    (file,) = stopped.glob(f"*.{ending}")
    stopped.chmod(0o1777)
    if theirs == "owner":
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(file, 12345, 12345)
        words = "it belongs to user 12345"
    elif theirs == "second name":
        os.link(file, stopped / "other")
        words = r"it has 2 names \(hard links\)"
    elif theirs == "link":
        file.rename(stopped / "other")
        file.symlink_to(stopped / "other")
        words = "it is no plain file"
    else:
        file.chmod(0o620 if theirs == "group" else 0o666)
        words = "others may write to it"
    before = file.stat()
    with pytest.raises((CheckpointError, StorageError), match=words):
        start(stopped)
    assert file.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("theirs", ["owner", "group"])
def test_a_directory_whose_files_another_user_may_rename_is_refused(theirs, stopped, capsys) -> None:
    if os.geteuid():
        pytest.skip("only root can give directories away")
    os.chown(stopped, 12345 if theirs == "owner" else -1, 12345)
    stopped.chmod(0o700 if theirs == "owner" else 0o770)
    words = "it belongs to user 12345" if theirs == "owner" else "it is writable for group 12345"
    before = {file: file.stat().st_mtime_ns for file in stopped.iterdir()}
    with pytest.raises(StorageError, match=words):
        start(stopped)
    for command in ("list", "remove"):
        assert main(["states", command, str(stopped)]) == 2
        assert words in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in stopped.iterdir()} == before
    stopped.chmod(0o1770)  # with the sticky bit nobody else can
    with start(stopped) as engine:
        assert engine.resume()[0] is not None


def test_what_another_user_has_left_is_not_removed(stopped, capsys) -> None:
    """Unfinished files are skipped, finished ones of another run are refused at the start, and left by the command."""
    stopped.chmod(0o1777)
    (record,) = stopped.glob("*.record")
    run = record.name.partition("-r0")[0]
    unfinished = [stopped / f"{run}-r0.record.new", stopped / "infinity-0123456789abcdef-r0-d0.slots.swap"]
    kept = stopped / "infinity-0123456789abcdef-r0.record"
    for path in (*unfinished, stopped / "infinity-r0-1-00.swap"):
        path.touch(0o600)
        if os.geteuid():
            os.link(path, f"{path}.other")  # a second name, as somebody else may give it
        else:
            os.chown(path, 12345, 12345)
    with pytest.raises(StorageError, match="is in the way, and is not removed"):
        start(stopped)
    assert all(path.exists() for path in unfinished)
    assert os.geteuid() or (stopped / "infinity-r0-1-00.swap").exists()
    unfinished[0].unlink()
    with start(stopped) as engine:
        assert engine.resume()[0] is not None
    unfinished[1].rename(kept)
    with pytest.raises(CheckpointError, match=f"{kept.name} is refused"):
        start(stopped)
    assert main(["states", "list", str(stopped)]) == 0
    assert "run 0123456789abcdef  rank 0  step ?  0 B  cannot be resumed: it" in capsys.readouterr().out
    assert main(["states", "remove", str(stopped)]) == 0
    assert f"{kept} is left: it" in capsys.readouterr().err
    assert kept.exists()
    assert not record.exists()


def test_no_room_for_two_versions_is_refused_at_initialize(tmp_path, monkeypatch) -> None:
    with start(tmp_path / "plain", keeps=False) as engine:
        train(engine, DATA[:1])
        one = engine.stats().peak_bytes["nvme"]
    config = config_of(tmp_path / "kept")
    config["tiering"]["nvme"][0]["capacity"] = int(1.5 * one)
    with pytest.raises(StorageError, match="crash_consistent keeps two slots"):
        infinity.initialize(model=ARCHITECTURES["gpt2"](0), config=config)
    assert left(tmp_path / "kept") == []


def test_nothing_on_the_drives_is_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "tiering": {"crash_consistent": True}}
    with pytest.raises(ConfigError, match="to nvme"):
        infinity.initialize(model=ARCHITECTURES["gpt2"](0), config=config)


def test_a_drive_that_cannot_flush_stops_the_engine_and_leaves_the_step_before(tmp_path, whole) -> None:
    with start(tmp_path) as engine:
        train(engine, DATA[:2])
        engine.synchronize()

        def fail(descriptor: int) -> None:
            raise OSError(5, "Input/output error")

        engine._runtime.swap.flush = fail
        with pytest.raises(StorageError, match="cannot flush"):
            train(engine)
        with pytest.raises(InfinityError, match="has stopped"):
            train(engine)
    with start(tmp_path) as engine:
        engine.resume()
        assert engine.global_steps == 2
        assert train(engine) == whole[0][2:]


def test_a_step_whose_update_fails_is_not_committed_while_its_writes_go_on(tmp_path, whole, monkeypatch) -> None:
    """A commit looks on before anybody waits for the update and is told."""
    compute, done = UpdatePipeline._compute, UpdateTicket.done

    def fails_behind_the_first_tile(self: UpdatePipeline, ticket: UpdateTicket, tile: Tile) -> bool:
        if ticket.unit == last and tile.index > 0:
            raise StorageError(5, "broken", "drive", 0)
        return compute(self, ticket, tile)

    def writes_on(ticket: UpdateTicket) -> bool:
        return done(ticket) and ticket.computed.exception() is None

    with start(tmp_path) as engine:
        train(engine, DATA[:2])
        engine.synchronize()
        states = engine._runtime.states
        last = max(unit.index for unit in engine._runtime.partition.units if len(states.units[unit.index].tiles) > 1)
        monkeypatch.setattr(UpdatePipeline, "_compute", fails_behind_the_first_tile)
        monkeypatch.setattr(UpdateTicket, "done", writes_on)
        train(engine, DATA[:3])
        outcomes = [each.ticket.computed.exception() for each in engine._runtime.executor.units if each.ticket]
        assert any(outcomes), "all have ended, and one has failed"
        with pytest.raises((StorageError, InfinityError)):
            train(engine)
        monkeypatch.undo()
    with start(tmp_path) as engine:
        engine.resume()
        assert engine.global_steps == 2
        assert train(engine) == whole[0][2:]


# The command line #


def test_states_are_listed_and_removed(stopped, capsys) -> None:
    assert main(["states", "list", str(stopped)]) == 0
    assert "step 2" in capsys.readouterr().out
    with start(stopped):
        assert main(["states", "remove", str(stopped)]) == 2
        assert "in use" in capsys.readouterr().err
    assert main(["states", "remove", str(stopped), "--run", "ffff"]) == 2
    assert main(["states", "remove", str(stopped)]) == 0
    assert left(stopped) == []
    with start(stopped) as engine:
        assert engine.resume() == (None, None)


# Several ranks #


def on_ranks(path: Path, kill: tuple[int, int] | None) -> tuple[int, list[float]]:
    """Train on from the last step; rank `kill[0]` dies at its flush number `kill[1]`, the others as they find out."""
    rank = dist.get_rank()
    data = batches(2 * STEPS, seed=3)[rank::2]
    engine = start(path, "llama")
    if kill is not None and kill[0] == rank:
        left_over = [kill[1]]

        def flush(descriptor: int) -> None:
            left_over[0] -= 1
            if not left_over[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            os.fdatasync(descriptor)

        engine._runtime.swap.flush = flush
    engine.resume()
    step = engine.global_steps
    if kill is not None:
        with suppress(InfinityError):
            train(engine, data)
        os.kill(os.getpid(), signal.SIGKILL)
    losses = train(engine, data)
    engine.end_run()
    engine.close()
    return step, losses


def test_two_ranks_go_on_from_the_newest_step_that_both_have(tmp_path) -> None:
    def run(name: str, path: Path, kill: tuple[int, int] | None, ranks: int = 2) -> list[Any]:
        (tmp_path / name).mkdir()
        killed = [] if kill is None else [0, 1]
        return run_ranks(ranks, on_ranks, path, kill, path=tmp_path / name, killed=killed)

    expected = run("whole", tmp_path / "plain", None)
    path = tmp_path / "drive"
    run("first", path, (0, 3))
    steps = {rank: read_record(next(path.glob(f"*r{rank}.record"))).generations[0].state["counters"] for rank in (0, 1)}
    assert steps[0]["global_steps"] == 2
    assert steps[1]["global_steps"] in (2, 3)  # it may be one ahead
    run("second", path, (1, 2))
    resumed = run("third", path, None)
    assert [step for step, _ in resumed] == [3, 3]
    assert [losses for _, losses in resumed] == [losses[3:] for _, losses in expected]
    assert left(path) == []


def test_a_space_without_a_run_keeps_nothing() -> None:
    space = SwapSpace((), ())
    space.discard_files()
    space.adopt()
    space.close()


def _fail() -> dict[str, Any]:
    raise OSError("no position")


def test_closing_raises_what_kept_the_last_step_from_being_committed(tmp_path) -> None:
    """A loop that ends in `close()` must not take a step for saved that no later process has."""
    engine = start(tmp_path)
    train(engine, DATA[:1])
    engine.keep_with_steps(_fail)
    train(engine, DATA[:2])
    with pytest.raises(OSError, match="no position"):
        engine.close()
    engine.close()
    with start(tmp_path) as engine:
        engine.resume()
        assert engine.global_steps == 1


def test_an_error_that_ends_the_run_is_not_replaced_by_that_of_its_last_commit(tmp_path, caplog) -> None:
    def loop() -> None:
        with start(tmp_path) as engine:
            engine.keep_with_steps(_fail)
            train(engine, DATA[:1])
            raise ValueError("the loop's own")

    with pytest.raises(ValueError, match="the loop's own"):
        loop()
    assert "the last step is not committed: no position" in caplog.text


def test_closing_raises_if_the_drive_cannot_flush_the_last_step(tmp_path, monkeypatch) -> None:
    engine = start(tmp_path)
    train(engine, DATA[:2])
    engine.synchronize()
    engine.wait_checkpoint()

    def fail(*_: Any) -> None:
        raise OSError("the drive has failed")

    monkeypatch.setattr(SwapSpace, "record", fail)  # before the step, which may be committed while it ends
    train(engine, DATA[:3])
    with pytest.raises(OSError, match="the drive has failed"):
        engine.close()
    monkeypatch.undo()
    with start(tmp_path) as engine:
        engine.resume()
        assert engine.global_steps == 2


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_a_client_state_that_fails_does_not_fail_the_step_that_is_applied(clipping, whole, tmp_path) -> None:
    """A loop that runs a step again when `step()` raises must not train a batch twice."""
    position = {"fails": True}

    def state() -> dict[str, Any]:
        if position.pop("fails", False):
            raise OSError("no position")
        return {"position": 1}

    with start(tmp_path, clipping=clipping) as engine:
        engine.keep_with_steps(state)
        train(engine, DATA[:1])
        assert engine.global_steps == 1
        with pytest.raises(OSError, match="no position"):
            train(engine, DATA[:2])
        assert engine.global_steps == 1
        engine.zero_grad()
        train(engine)
        ours = weights(engine)
    if clipping:
        assert same(ours, whole[1])
    with start(tmp_path, clipping=clipping) as engine:
        assert engine.resume()[1] == {"position": 1}
        assert same(weights(engine), ours)
