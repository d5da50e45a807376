"""torch.distributed.checkpoint: what it reads of ours, and what we take over of its."""

from __future__ import annotations

import io
import pickle
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.state_dict import get_state_dict

import infinity
from infinity.checkpoint.dcp import _Plain, _tile, export_dcp, import_dcp
from infinity.cli.main import main
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2, train_on
from tests.checkpoint.common import make_engine
from tests.checkpoint.test_convert import build
from tests.checkpoint.test_reshard import stored


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    with make_engine(Placement(), build=build) as engine:
        train_on(engine, batches(3))
        engine.save_checkpoint(directory, client_state={"epoch": 2})
    return directory


def test_there_and_back_is_the_same(saved, tmp_path, capsys) -> None:
    assert main(["checkpoint", "export", str(saved), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    assert main(["checkpoint", "import", str(tmp_path / "dcp"), str(tmp_path / "back")]) == 0
    found, wanted = stored(tmp_path / "back"), stored(saved)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value.float()) for key, value in wanted.items())
    losses = []
    for directory in (saved, tmp_path / "back"):
        with make_engine(Placement(), seed=5, build=build) as engine:
            assert engine.load_checkpoint(directory)[1] == {"epoch": 2}
            losses.append(train_on(engine, batches(2, seed=3)))
    assert losses[0] == losses[1]


def load_by_torch(path: str) -> dict[str, torch.Tensor]:
    """As a script of any world size loads it: by names, into sharded tensors."""
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor  # noqa: PLC0415  (slow)

    mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
    names = [name for name, _ in build(0).named_parameters()]
    model = {name: distribute_tensor(value.detach(), mesh, [Shard(0)]) for name, value in build(9).named_parameters()}
    trained = [name for name in names if "embed_tokens" not in name]
    state = {name: {"exp_avg": distribute_tensor(model[name].full_tensor(), mesh, [Shard(0)])} for name in trained}
    dcp.load({"model": model, "optim": {"state": state}}, checkpoint_id=path)
    found = {f"model.{name}": value.full_tensor() for name, value in model.items()}
    return found | {f"exp_avg.{name}": state[name]["exp_avg"].full_tensor() for name in trained}


def test_torch_reads_it_on_two_ranks(saved, tmp_path) -> None:
    export_dcp(saved, tmp_path / "dcp")
    values = stored(saved)
    for found in run_ranks(2, load_by_torch, str(tmp_path / "dcp"), path=tmp_path):
        for key, value in found.items():
            kind, _, name = key.partition(".")
            wanted = values[key] if kind == "exp_avg" else values.get(f"master.{name}", values.get(f"param.{name}"))
            assert torch.equal(value.reshape(-1), wanted.float()), key


def save_by_torch(state: dict[str, object], path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process is what is wanted
        dcp.save(state, checkpoint_id=path)


def train_plainly(path: str) -> list[float]:
    """A loop of torch's that is checkpointed in its middle."""
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for index, ids in enumerate(batches(6)):
        if index == 3:
            weights, states = get_state_dict(model, optimizer)
            save_by_torch({"model": weights, "optimizer": states}, path)
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_that_torch_has_begun(tmp_path) -> None:
    there = train_plainly(str(tmp_path / "step_3"))
    path = import_dcp(tmp_path / "step_3", tmp_path / "new")
    assert path.name == "step_3"
    model = tiny_gpt2(seed=5)
    config = Recipe().config(Placement())
    with infinity.initialize(model=model, config=config)[0] as engine:
        with pytest.raises(infinity.CheckpointError, match="`infinity checkpoint import` makes it one"):
            engine.load_checkpoint(tmp_path, tag="step_3")
        engine.load_checkpoint(tmp_path / "new")
        assert train_on(engine, batches(6)[3:]) == pytest.approx(there[3:], rel=1e-5)


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.cwd, ()


@pytest.mark.parametrize("change", ["code", "path", "missing", "weights"])
def test_what_cannot_be_taken_over_is_refused(change, saved, tmp_path) -> None:
    path = tmp_path / "dcp"
    if change == "weights":
        save_by_torch({"model": nn.Linear(2, 2).state_dict()}, str(path))
        message = "no states of an optimizer"
    else:
        export_dcp(saved, path)
        message = {
            "code": "which is no part of such metadata",
            "path": "no file in its directory",
            "missing": "cannot be read",
        }[change]
    if change == "code":
        (path / ".metadata").write_bytes(pickle.dumps(_Trap()))
    elif change == "path":
        metadata = pickle.loads((path / ".metadata").read_bytes())
        next(iter(metadata.storage_data.values())).relative_path = "../x"
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    elif change == "missing":
        next(path.glob("*.distcp")).unlink()
    with pytest.raises(infinity.CheckpointError, match=message):
        import_dcp(path, tmp_path / "new")
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


@pytest.mark.parametrize(("kind", "name"), [("_MEM_FORMAT_ENCODING", "__init__"), ("Metadata", "__reduce__")])
def test_of_attributes_an_enums_members_are_taken_alone(kind, name) -> None:
    def asking(of: str, attribute: str) -> io.BytesIO:  # as Python 3.11.0 to 3.11.3 pickle a member of an Enum
        return io.BytesIO(f"cbuiltins\ngetattr\n(c{metadata.__name__}\n{of}\nV{attribute}\ntR.".encode())

    member = metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert _Plain(asking("_MEM_FORMAT_ENCODING", member.name)).load() is member
    with pytest.raises(pickle.UnpicklingError, match="which is no part of such metadata"):
        _Plain(asking(kind, name)).load()


@pytest.mark.parametrize("state", ["}(V__truediv__\nI1\nu", "N}(V__truediv__\nI1\nu\x86"], ids=["attributes", "slots"])
@pytest.mark.parametrize("of", ["pathlib\nPosixPath", f"{metadata.__name__}\nMetadata", "collections\nOrderedDict"])
def test_no_class_is_changed_by_a_file(of, state) -> None:
    planted = io.BytesIO(b"\x80\x02c" + of.encode() + b"\n" + state.encode("latin-1") + b"b.")
    with pytest.raises(pickle.UnpicklingError, match="sets attributes of <class"):
        _Plain(planted).load()
    assert Path("a") / "b" == Path("a/b")


@pytest.mark.parametrize("kind", ["MetadataIndex", "ChunkStorageMetadata"])
def test_no_half_of_a_state_sets_other_attributes_than_fields(kind) -> None:
    """A state may be (attributes, slots)."""
    start = b"\x80\x02c" + f"{metadata.__name__}\n{kind}\n".encode() + b")\x81"  # an instance without its __init__
    for state in (b"N}(V__class__\nI1\nu\x86", b"}(V__doc__\nI1\nu}\x86", b"}}(V__doc__\nI1\nu\x86", b"]"):
        with pytest.raises(pickle.UnpicklingError, match=f"sets other attributes of {kind}"):
            _Plain(io.BytesIO(start + state + b"b.")).load()


def test_moments_without_a_number_of_updates_are_refused(saved, tmp_path) -> None:
    path = tmp_path / "dcp"
    export_dcp(saved, path)
    found = pickle.loads((path / ".metadata").read_bytes())
    for key in [key for key in found.state_dict_metadata if key.endswith(".step")]:
        del found.state_dict_metadata[key]
    (path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(infinity.CheckpointError, match=r"\.metadata has moments of .* and no `step`"):
        import_dcp(path, tmp_path / "new")


def test_metadata_that_do_not_fit_what_is_written_are_named(saved, tmp_path) -> None:
    path = tmp_path / "dcp"
    export_dcp(saved, path)
    found = pickle.loads((path / ".metadata").read_bytes())
    key = next(key for key in found.state_dict_metadata if key.startswith("model."))
    found.state_dict_metadata[key].properties.dtype = "float32"
    (path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(infinity.CheckpointError, match=r"\.metadata is damaged: "):
        import_dcp(path, tmp_path / "new")


@pytest.mark.parametrize("change", ["half", "twice", "outside"])
def test_chunks_that_are_not_all_of_a_tensor_are_refused(change, saved, tmp_path) -> None:
    """What no chunk has would be whatever memory had."""
    path = tmp_path / "dcp"
    export_dcp(saved, path)
    found = pickle.loads((path / ".metadata").read_bytes())
    key = next(key for key, value in found.state_dict_metadata.items() if len(getattr(value, "size", ())) == 2)
    (chunk,) = found.state_dict_metadata[key].chunks
    rows, columns = chunk.sizes
    if change == "half":
        chunk.sizes = torch.Size((rows // 2, columns))
    elif change == "twice":
        found.state_dict_metadata[key].chunks.append(chunk)
    else:
        chunk.offsets = torch.Size((1, 0))
    (path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(infinity.CheckpointError, match=f"chunks of {key} do not cover it exactly once"):
        import_dcp(path, tmp_path / "new")


def test_chunks_in_slabs_are_a_tensor() -> None:
    size = (6, 4)
    grid = [((row, column), (2, 2)) for row in (0, 2, 4) for column in (0, 2)]
    assert _tile(grid, (0, 0), size)
    assert _tile([*grid, ((6, 0), (0, 4))], (0, 0), size)  # a rank's empty part
    assert _tile([((), ())], (), ())
    assert not any(_tile(grid[:at] + grid[at + 1 :], (0, 0), size) for at in range(len(grid)))


@pytest.mark.parametrize("file", ["data", "metadata"])
def test_a_bit_that_is_another_is_noticed_or_changes_nothing(file, saved, tmp_path) -> None:
    path = tmp_path / "dcp"
    export_dcp(saved, path)
    import_dcp(path, tmp_path / "right")
    wanted = stored(tmp_path / "right")
    damaged = path / ".metadata" if file == "metadata" else next(path.glob("*.distcp"))
    content, chance = damaged.read_bytes(), random.Random(file)
    named: list[str] = []
    for number in range(20):
        changed = bytearray(content)
        changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        damaged.write_bytes(changed)
        try:
            import_dcp(path, tmp_path / f"new{number}")
        except infinity.CheckpointError as error:
            named.append(str(error))
            continue
        found = stored(tmp_path / f"new{number}")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert len(named) > 10
    assert all(str(damaged) in message for message in named)
