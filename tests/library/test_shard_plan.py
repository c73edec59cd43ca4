"""Shards on the disk: what is read into its place, and what has to be loaded in another way; each has its values."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from elasticd.checkpointing.state import shard_plan
from elasticd.checkpointing.storage.manifest import METADATA, shard_name
from elasticd.errors import CheckpointCorrupt, CheckpointError
from elasticd.process_group import DefaultGroup

ALONE = DefaultGroup(0, 1, torch.device("cpu"), created_by_join=False)
WEIGHT = torch.arange(24.0).view(4, 6)


class View(shard_plan.DiskView):
    """Counts the tensors that are read into their place."""

    read_in_place = 0

    def read_into(self, start: int, target: torch.Tensor) -> None:
        super().read_into(start, target)
        View.read_in_place += 1


def save(state: dict[str, Any], folder: Path, name: str = shard_name(0)) -> Metadata:
    plan = shard_plan.ShardPlan(state, ALONE)
    with open(folder / name, "wb") as file:
        shard_plan.write_pieces(file.fileno(), 0, plan.content())
    (folder / METADATA).write_bytes(plan.metadata)
    return shard_plan.read_metadata(plan.metadata)


def load(folder: Path, targets: dict[str, Any]) -> int:
    """Into these targets; returns how many tensors were read into their place."""

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[shard_plan.ReadRange]:
        with open(folder / name, "rb") as file:
            yield View(file.fileno())

    View.read_in_place = 0
    shard_plan.load_shards(opened, lambda _: targets)
    return View.read_in_place


def test_tensors_are_read_into_their_places_and_values_are_loaded(tmp_path: Path) -> None:
    state = {"w": WEIGHT, "part": WEIGHT[1:3], "number": torch.tensor(7), "empty": torch.empty(0, 3), "v": [1, "text"]}
    save(state, tmp_path)
    targets = {**{key: torch.zeros_like(value) for key, value in state.items() if key != "v"}, "v": None}
    assert load(tmp_path, targets) == 3
    assert targets.pop("v") == state.pop("v")
    assert all(torch.equal(targets[key], value) for key, value in state.items())


@pytest.mark.parametrize(
    "target",
    [torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4).t(), torch.zeros(4, 12)[:, ::2]],
    ids=["of another type", "transposed", "with gaps"],
)
def test_target_of_another_kind_gets_a_copy(tmp_path: Path, target: torch.Tensor) -> None:
    save({"w": WEIGHT}, tmp_path)
    assert load(tmp_path, {"w": target}) == 0
    assert torch.equal(target, WEIGHT.to(target.dtype))


def in_memory(folder: Path) -> shard_plan.OpenFile:
    """As the files in another process's memory."""

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[shard_plan.ReadRange]:
        content = memoryview(bytearray((folder / name).read_bytes()))
        yield lambda start, size: content[start:] if size is None else content[start : start + size]

    return opened


def load_both(folder: Path, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What is loaded from the disk, and from memory."""
    return [
        shard_plan.load_shards(each, lambda _: make()) for each in (shard_plan.open_on_disk(folder), in_memory(folder))
    ]


def test_files_that_are_in_memory_are_read_as_well(tmp_path: Path) -> None:
    save({"w": WEIGHT, "empty": torch.empty(0, 3), "v": 3}, tmp_path)
    for loaded in load_both(tmp_path, lambda: {"w": torch.zeros(4, 6), "empty": torch.ones(0, 3), "v": None}):
        assert torch.equal(loaded["w"], WEIGHT) and loaded["v"] == 3


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by DCP of torch 2.6
def test_archive_that_torch_wrote_is_loaded(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": WEIGHT, "v": 3}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    metadata.storage_meta = None  # has a path
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    assert load(tmp_path, {"w": torch.zeros(4, 6), "v": None}) == 0
    for loaded in load_both(tmp_path, lambda: {"w": torch.zeros(4, 6), "v": None}):
        assert torch.equal(loaded["w"], WEIGHT) and loaded["v"] == 3


def test_archive_of_the_same_size_in_another_order_is_loaded(tmp_path: Path) -> None:
    """As another torch may write it."""
    save({"w": WEIGHT}, tmp_path)
    path, usual, other = tmp_path / shard_name(0), io.BytesIO(), io.BytesIO()
    torch.save(WEIGHT, usual)
    with zipfile.ZipFile(usual) as written, zipfile.ZipFile(other, "w") as file:
        for name in reversed(written.namelist()):  # the version first
            file.writestr(name, written.read(name))
    with zipfile.ZipFile(other, "a") as file:
        file.comment = b" " * (path.stat().st_size - len(other.getvalue()))
    assert len(other.getvalue()) == path.stat().st_size
    path.write_bytes(other.getvalue())
    for loaded in load_both(tmp_path, lambda: {"w": torch.zeros(4, 6)}):
        assert torch.equal(loaded["w"], WEIGHT)


def test_parts_of_different_sizes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three rows and of one: into the whole, and into two rows in the middle of the first part."""
    parts = {0: WEIGHT[:3], 3: WEIGHT[3:]}
    places, chunks = {}, []
    for number, (row, part) in enumerate(parts.items()):
        ((_, place),) = save({"w": part}, tmp_path, shard_name(number)).storage_data.items()
        place.relative_path = shard_name(number)
        offsets = torch.Size([row, 0])
        places[MetadataIndex("w", offsets, number)] = place
        chunks.append(ChunkStorageMetadata(offsets, part.shape))
    properties = TensorProperties(dtype=WEIGHT.dtype)
    whole = Metadata({"w": TensorStorageMetadata(properties, WEIGHT.shape, chunks)}, {"w": ("w",)}, places)
    (tmp_path / METADATA).write_bytes(pickle.dumps(whole))
    target = torch.zeros(4, 6)
    assert load(tmp_path, {"w": target}) == 2
    assert torch.equal(target, WEIGHT)
    monkeypatch.setattr(torch, "load", None)  # each part is used where it is
    for loaded in load_both(tmp_path, lambda: {"w": torch.zeros(4, 6)}):
        assert torch.equal(loaded["w"], WEIGHT)


@pytest.mark.parametrize(
    "name",
    ["torch.distributed.checkpoint.metadata:Enum", "torch.distributed.checkpoint.metadata:field", "os:system"],
    ids=["imported class", "function", "other module"],
)
def test_metadata_refers_to_nothing_else(name: str) -> None:
    module, _, member = name.partition(":")
    with pytest.raises(CheckpointCorrupt, match=f"it refers to {module}.{member}"):
        shard_plan.read_metadata(b"c" + f"{module}\n{member}\n".encode() + b".")


class Exchange:
    """Two ranks, each in a thread, that send each other what they send through a process group."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._sent: list[Any] = [None, None]

    def gather(self, mine: Any, group: DefaultGroup) -> list[Any]:
        self._sent[group.rank] = pickle.dumps(mine)
        self._barrier.wait(30)
        gathered = [pickle.loads(each) for each in self._sent] if group.rank == 0 else []
        self._barrier.wait(30)
        return gathered

    def scatter(self, every: list[Any], group: DefaultGroup) -> Any:
        if group.rank == 0:
            self._sent = [pickle.dumps(each) for each in every]
        self._barrier.wait(30)
        return pickle.loads(self._sent[group.rank])


@pytest.fixture
def plan_together(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """Each rank's plan for its state, or its error."""

    def plan(states: list[dict[str, Any]]) -> list[Any]:
        exchange = Exchange()
        monkeypatch.setattr(shard_plan, "gather_objects", exchange.gather)
        monkeypatch.setattr(shard_plan, "scatter_objects", exchange.scatter)

        def run(rank: int) -> Any:
            try:
                return shard_plan.ShardPlan(
                    states[rank], DefaultGroup(rank, 2, torch.device("cpu"), created_by_join=False)
                )
            except CheckpointError as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, range(2)))

    return plan


def test_ranks_divide_what_they_all_have(tmp_path: Path, plan_together: Any) -> None:
    state = {"a": WEIGHT, "b": WEIGHT * 2}
    plans = plan_together([{"own": {**state, "v": 3}}, {"own": state}])
    for rank, plan in enumerate(plans):
        with open(tmp_path / shard_name(rank), "wb") as file:
            shard_plan.write_pieces(file.fileno(), 0, plan.content())
            assert plan.sizes[rank] == file.seek(0, os.SEEK_END)
    assert plans[0].sizes == plans[1].sizes and min(plans[0].sizes) > 0
    assert plans[1].metadata == b""
    (tmp_path / METADATA).write_bytes(plans[0].metadata)
    for loaded in load_both(tmp_path, lambda: {"own": {"a": torch.zeros(4, 6), "b": torch.zeros(4, 6), "v": None}}):
        assert torch.equal(loaded["own"]["a"], WEIGHT) and torch.equal(loaded["own"]["b"], WEIGHT * 2)
        assert loaded["own"]["v"] == 3


def test_all_ranks_hear_that_there_is_no_plan(plan_together: Any) -> None:
    plans = plan_together([{"w": "text"}, {"w": WEIGHT}])
    assert plans[0] == plans[1]
    assert plans[0].startswith("torch.distributed.checkpoint cannot plan this state: ")


def test_many_pieces_are_written_by_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes 1024 pieces at most."""
    calls, pwritev = [], os.pwritev

    def counted(fd: int, pieces: list[Any], offset: int) -> int:
        calls.append(len(pieces))
        return pwritev(fd, pieces, offset)

    monkeypatch.setattr(os, "pwritev", counted)
    pieces = [bytes([number % 256]) * (1 + number % 5) for number in range(2500)]
    with open(tmp_path / "file", "w+b") as file:
        shard_plan.write_pieces(file.fileno(), 7, iter(pieces))
        assert file.read() == bytes(7) + b"".join(pieces)
        assert calls == [1000, 1000, 500]
        calls.clear()
        monkeypatch.setattr(shard_plan, "_VECTOR_BYTES", 10)
        shard_plan.write_pieces(file.fileno(), 0, iter([b"12345"] * 5))
        assert calls == [2, 2, 1]


def test_pieces_of_which_the_kernel_writes_a_part_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is almost full, or for a signal."""
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset: pwritev(fd, [b"".join(pieces)[:4]], offset))
    with open(tmp_path / "file", "w+b") as file:
        shard_plan.write_pieces(file.fileno(), 0, iter([b"abc", b"", b"defgh", b"ijkl"]))
        assert file.read() == b"abcdefghijkl"


def test_range_of_a_file_is_mapped_from_its_start(tmp_path: Path) -> None:
    with open(os.memfd_create("test"), "w+b", 0) as file:
        assert bytes(shard_plan.map_file(file.fileno(), 0, 0)(0, None)) == b""
        file.write(b"0123456789")
        read_range = shard_plan.map_file(file.fileno(), 2, 6)
        assert (bytes(read_range(0, None)), bytes(read_range(1, 3)), bytes(read_range(4, 9))) == (
            b"234567",
            b"345",
            b"67",
        )


def test_plan_fits_until_the_structure_changes() -> None:
    state = {"w": WEIGHT, "v": 3}
    plan = shard_plan.ShardPlan(state, ALONE)
    assert plan.try_use_state({"w": WEIGHT + 1, "v": 4})
    others = [
        {"w": WEIGHT.double(), "v": 3},
        {"w": WEIGHT.t(), "v": 3},
        {"w": WEIGHT},
        {"w": WEIGHT, "v": "longer" * 50},
    ]
    assert not any(map(plan.try_use_state, others))
