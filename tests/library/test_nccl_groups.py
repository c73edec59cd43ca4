"""What torch's recorders say of NCCL's groups, read by the background thread of a rank that is quiet."""

from __future__ import annotations

import binascii
import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.heartbeat import record
from elasticd.heartbeat.record import HeartbeatReader, HeartbeatWriter
from elasticd.heartbeat.recorders import UNKNOWN_COUNTS, GroupCountReader, flight_recorder_dump
from elasticd.heartbeat.thread import READ_GROUPS_AFTER_NS, READ_GROUPS_INTERVAL_FACTOR, HeartbeatThread
from tests.library.fake_recorders import C10D, FakeTorch, Kind

ALL, PAIR = (0, 1, 2), (2, 0)
RECORDED: tuple[Kind, ...] = ("nccl", "nccl2")


def key(name: str, ranks: tuple[int, ...]) -> int:
    return binascii.crc32(f"{name} {sorted(ranks)}".encode())


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    return FakeTorch().install(monkeypatch)


@pytest.mark.parametrize("kind", [*RECORDED, "wrapped"])
def test_counts_of_groups(torch: FakeTorch, kind: Kind) -> None:
    torch.group("0", ALL, kind).at(500, 400)
    torch.group("3", PAIR, kind)
    torch.group("4", PAIR, "gloo").at(7, 6)
    torch.group("b7e1", PAIR, kind).at(3, 2)
    found = {(key("0", ALL), 500, 400), (key("3", PAIR), 0, 0), (key("b7e1", PAIR), 3, 2)}
    assert set(GroupCountReader().read(8)) == found


@pytest.mark.parametrize("kind", RECORDED)
def test_second_init_process_group(torch: FakeTorch, kind: Kind) -> None:
    """The recorder keeps what the groups of the same names have left unfinished."""
    counts = GroupCountReader()
    torch.group("0", ALL, kind).at(90, 80)
    assert counts.read(8) == ((key("0", ALL), 90, 80),)
    torch.destroy()
    group = torch.group("0", ALL, kind)
    assert counts.read(8) == ((key("0", ALL), 0, 0),)
    group.at(5, 5)
    assert counts.read(8) == ((key("0", ALL), 5, 5),)
    group.issue(2)
    assert counts.read(8) == ((key("0", ALL), 7, 5),)


def test_ranks_send_different_numbers_of_messages(torch: FakeTorch) -> None:
    """A hook numbers them with the collectives; what is compared with other ranks are collectives."""
    group = torch.group("0", ALL, "nccl2").at(10, 10)
    group.issue(3, p2p=True)
    group.complete(3)
    assert GroupCountReader().read(8) == ((key("0", ALL), 10, 10),)
    group.issue(2)
    group.issue(p2p=True)
    group.complete()
    assert GroupCountReader().read(8) == ((key("0", ALL), 12, 11),)
    group.complete()
    assert GroupCountReader().read(8) == ((key("0", ALL), 12, 12),), "a message is awaited, no collective"


def test_messages_of_a_pipeline_are_no_collectives(torch: FakeTorch) -> None:
    """ProcessGroupNCCL has the number of the last message in the place of a collective's."""
    group = torch.group("0", ALL, "nccl")
    group.issue(40, p2p=True)
    group.complete(39)
    assert GroupCountReader().read(8) == ((key("0", ALL), 0, 0),)


def test_collectives_of_a_captured_graph(torch: FakeTorch) -> None:
    """The backend counts them, and no recorder: those that it has are numbered from the end."""
    group = torch.group("0", ALL, "nccl2").at(10, 10)
    group.issue(5, recorded=False)
    assert GroupCountReader().read(8) == ((key("0", ALL), 15, 15),)
    group.issue(2)
    assert GroupCountReader().read(8) == ((key("0", ALL), 17, 15),)


def test_entries_are_read_once_for_the_names(torch: FakeTorch) -> None:
    """With 1000 pending collectives they take 30 ms, their counts 10 µs."""
    counts = GroupCountReader()
    group = torch.group("0", ALL, "nccl2").at(10, 10)
    counts.read(8)
    assert torch.calls == [("nccl2", False)], "nothing is pending"
    for _ in range(3):
        group.issue(2)
        counts.read(8)
    assert torch.calls.count(("nccl2", True)) == 1


@pytest.mark.parametrize(
    "more", [{"kind": "nccl2 of 2.14"}, {"kind": "nccl2", "reports_completion": False}], ids=["2.14", "no end"]
)
def test_group_of_unknown_kind_is_said_to_be_unknown(torch: FakeTorch, more: dict[str, Any]) -> None:
    """Before idle ones: there is room for eight."""
    for number in range(9):
        torch.group(str(number), (0, number), "nccl").at(4, 4)
    torch.group("9", ALL, **more).at(500, 400)
    assert GroupCountReader().read(8)[0] == (key("9", ALL), *UNKNOWN_COUNTS)


def test_group_that_raises_is_unknown(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    group = torch.group("0", ALL, "nccl2").at(500, 400)
    monkeypatch.setattr(type(group), "_get_backend", lambda self, device: SimpleNamespace())
    assert GroupCountReader().read(8) == ((key("0", ALL), *UNKNOWN_COUNTS),)


@pytest.mark.parametrize("kind", RECORDED)
def test_mixed_group(torch: FakeTorch, kind: Kind) -> None:
    torch.group("0", ALL, kind, _device_types=("cpu", "cuda")).at(5, 4)
    assert GroupCountReader().read(8) == ((key("0", ALL), 5, 4),)


@pytest.mark.parametrize("kind", RECORDED)
def test_pending_groups_come_first(torch: FakeTorch, kind: Kind) -> None:
    for number in range(12):
        torch.group(str(number), (0, number), kind).at(9, 8 if number == 11 else 9)
    found = GroupCountReader().read(8)
    assert len(found) == 8
    assert found[0] == (key("11", (0, 11)), 9, 8)


@pytest.mark.parametrize(
    "functions",
    [
        pytest.param({}, id="no NCCL"),
        pytest.param({"_dump_nccl_trace_json": lambda: b"{}"}, id="no argument"),
        pytest.param({"_dump_nccl_trace_json": lambda **_: b"{"}, id="no JSON"),
        pytest.param({"_dump_nccl_trace_json": lambda **_: b"{}"}, id="switched off"),
    ],
)
def test_other_torch_says_nothing(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, functions: dict[str, Any]) -> None:
    torch.group("0", ALL, "nccl").at(5, 4)
    monkeypatch.setitem(sys.modules, C10D, SimpleNamespace(**functions))
    assert GroupCountReader().read(8) == ()


def dumped() -> dict[str, Any]:
    found = flight_recorder_dump()
    assert found is not None
    return dict(json.loads(found))


@pytest.mark.parametrize("kind", RECORDED)
def test_recorder_of_nccl_is_dumped_first(torch: FakeTorch, kind: Kind) -> None:
    torch.group("1", ALL, "gloo").at(4, 4)
    assert dumped()["recorder"] == "gloo"
    torch.group("0", ALL, kind)
    assert "entries" not in dumped(), "the other ranks are in its first collective: gloo's recorder has others"
    torch.made[1].at(2, 1)
    found = dumped()
    assert (found["recorder"], len(found["entries"]), found["unrecorded"]) == (kind, 2, [])
    torch.destroy()
    assert dumped()["recorder"] == ("nccl" if kind == "nccl" else "gloo")


@pytest.mark.parametrize("kind", ["nccl2 of 2.14", "nccl2"])
def test_dump_names_groups_without_a_recorder(torch: FakeTorch, kind: Kind) -> None:
    torch.group("1", ALL, "gloo").at(4, 4)
    torch.group("0", ALL, kind, reports_completion=False)
    unrecorded = {"process_group": ["0", "default_pg"], "backend": "nccl2", "complete": False}
    assert dumped()["unrecorded"] == [unrecorded | {"recorder": torch.made[1].recorder}]


def test_dump_names_the_hidden_group_of_a_wrapper(torch: FakeTorch) -> None:
    torch.group("0", ALL, "wrapped").at(2, 1)
    assert [(one["backend"], one["recorder"]) for one in dumped()["unrecorded"]] == [("gloo", "")]


@pytest.mark.parametrize("kind", RECORDED)
def test_gloo_is_dumped_beside_nccl(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Unless torch has no recorder of gloo: then its groups are unrecorded."""
    group = torch.group("0", ALL, kind, _device_types=("cpu", "cuda")).at(2, 1)
    group.gloo.at(4, 3)
    found = dumped()
    assert (found["recorder"], len(found["entries"]), len(found["gloo"]["entries"])) == (kind, 2, 4)
    assert found["unrecorded"] == []


@pytest.mark.parametrize("missing", ["_dump_nccl_trace_json", "_dump_fr_trace_json"])
def test_torch_with_one_recorder(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    torch.group("0", ALL, "gloo")
    functions = sys.modules[C10D]
    monkeypatch.delattr(functions, missing)
    assert dumped()["recorder"] == ("gloo" if "nccl" in missing else "nccl")
    monkeypatch.setitem(sys.modules, C10D, SimpleNamespace())  # type: ignore[arg-type]
    assert flight_recorder_dump() is None


def test_recorder_is_read_only_while_quiet(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second after the last step at the earliest; a slow reading is repeated late."""
    record.create(tmp_path / "beat")
    writer = HeartbeatWriter(tmp_path / "beat")
    now_ns, slow_ns, readings = writer.progress_ns, 10_000_000, list[int]()

    def dump(includeCollectives: bool) -> bytes:  # noqa: N803 torch's name
        nonlocal now_ns
        assert not includeCollectives
        readings.append(now_ns)
        now_ns += slow_ns
        return torch.dump("nccl", False, False)

    torch.group("0", ALL, "nccl").at(7, 6)
    monkeypatch.setattr(sys.modules[C10D], "_dump_nccl_trace_json", dump)
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    thread = HeartbeatThread(writer)
    again_ns = slow_ns + max(READ_GROUPS_AFTER_NS, READ_GROUPS_INTERVAL_FACTOR * slow_ns)
    for pause_ns, count in ((READ_GROUPS_AFTER_NS - 1, 0), (1, 1), (again_ns - slow_ns - 1, 1), (1, 2)):
        now_ns += pause_ns
        thread.update_groups(False)
        assert len(readings) == count
    with HeartbeatReader(tmp_path / "beat") as reader:
        assert reader.read().groups == ((key("0", ALL), 7, 6),)


def test_recorder_is_read_late_while_python_moves(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record.create(tmp_path / "beat")
    writer = HeartbeatWriter(tmp_path / "beat")
    torch.group("0", ALL, "nccl2").at(7, 7)
    thread = HeartbeatThread(writer)
    for seconds, moved, count in ((0.5, False, 0), (2, True, 0), (2, False, 1), (6, True, 2)):
        now_ns = writer.progress_ns + int(seconds * 1e9)
        monkeypatch.setattr(time, "monotonic_ns", lambda now_ns=now_ns: now_ns)
        thread.update_groups(moved)
        assert len(torch.calls) == count, seconds


def test_recorder_of_this_torch_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's recorder has the format of NCCL's; the names of its groups are missing."""
    c10d = importlib.import_module(C10D)

    if not hasattr(c10d, "_dump_fr_trace_json"):
        pytest.skip("torch records gloo's collectives from 2.8 on")
    text = json.loads(c10d._dump_fr_trace_json(includeCollectives=False))
    assert {"version", "pg_config", "pg_status", "comm_lib_version"} <= set(text)
    assert not text["comm_lib_version"]
    assert GroupCountReader().read(8) == () or hasattr(c10d, "_dump_nccl_trace_json")
