"""What NCCL's recorder says of its groups, read by the background thread of a rank that is quiet."""

from __future__ import annotations

import binascii
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.heartbeat import collectives, record
from elasticd.heartbeat.collectives import flight_recorder_dump, group_counts, nccl_groups
from elasticd.heartbeat.record import HeartbeatReader, HeartbeatWriter
from elasticd.heartbeat.thread import GROUPS_AFTER_NS, HeartbeatThread
from tests.faults.job import until

ALL, PAIR = (0, 1, 2), (2, 0)


def status(*counts: tuple[int, tuple[int, int]]) -> bytes:
    """As torch 2.13 writes it, by the number that the group's backend has in this process."""
    each = {
        str(uid): {
            f"last_{what}_collective": str(one) for what, one in zip(("enqueued", "completed"), both, strict=True)
        }
        for uid, both in counts
    }
    return json.dumps({"version": "2.10", "comm_lib_version": "2.29.7", "pg_config": {}, "pg_status": each}).encode()


def key(name: str, ranks: tuple[int, ...]) -> int:
    return binascii.crc32(f"{name} {sorted(ranks)}".encode())


class Group:
    """A process group; `uid` is that of its NCCL backend, None where it has another one."""

    def __init__(self, name: str, uid: int | None) -> None:
        self.group_name, self._uid = name, uid
        self._device_types = ["cpu", "cuda"]

    def _get_backend(self, device: str) -> SimpleNamespace:
        return SimpleNamespace() if device == "cpu" or self._uid is None else SimpleNamespace(uid=self._uid)


def world(*groups: tuple[str, int | None, tuple[int, ...]]) -> SimpleNamespace:
    """torch's table of process groups: names, NCCL's numbers, ranks."""
    made = {Group(name, uid): ranks for name, uid, ranks in groups}
    return SimpleNamespace(
        pg_map=dict.fromkeys(made), pg_group_ranks={one: dict.fromkeys(ranks) for one, ranks in made.items()}
    )


@pytest.mark.parametrize(
    ("groups", "text", "found"),
    [
        pytest.param([("0", 0, ALL)], status((0, (500, 400))), [(key("0", ALL), 500, 400)], id="one group"),
        pytest.param(
            [("0", 0, ALL), ("3", 1, PAIR), ("4", 2, PAIR)],
            status((0, (5, 5)), (2, (3, 2))),
            [(key("0", ALL), 5, 5), (key("3", PAIR), 0, 0), (key("4", PAIR), 3, 2)],
            id="a group without a collective",
        ),
        pytest.param(
            [("0", 7, ALL), ("b7e1", 8, PAIR)],
            status((0, (90, 90)), (7, (5, 5)), (8, (3, 2))),
            [(key("0", ALL), 5, 5), (key("b7e1", PAIR), 3, 2)],
            id="after a second init_process_group, and a name that is a digest",
        ),
        pytest.param([("0", None, ALL), ("1", 0, PAIR)], status((0, (1, -1))), [(key("1", PAIR), 1, 0)], id="gloo's"),
        pytest.param([], status(), [], id="no group"),
    ],
)
def test_groups_of_status(
    groups: list[tuple[str, int | None, tuple[int, ...]]], text: bytes, found: list[tuple[int, int, int]]
) -> None:
    assert group_counts(world(*groups), json.loads(text)["pg_status"]) == found


def recorder(
    monkeypatch: pytest.MonkeyPatch, *groups: tuple[str, int | None, tuple[int, ...]], **functions: Any
) -> None:
    c10d: Any = SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", c10d)
    made: Any = SimpleNamespace(_world=world(*groups))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", made)


def test_pending_groups_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = status(*((number, (9, 9)) for number in range(11)), (11, (9, 8)))
    groups = [(str(number), number, (0, number)) for number in range(12)]
    recorder(monkeypatch, *groups, _dump_nccl_trace_json=lambda **_: text)
    found = nccl_groups(8)
    assert len(found) == 8
    assert found[0] == (key("11", (0, 11)), 9, 8)


@pytest.mark.parametrize(
    "functions",
    [
        pytest.param({}, id="no NCCL"),
        pytest.param({"_dump_nccl_trace_json": lambda: b"{}"}, id="no argument"),
        pytest.param({"_dump_nccl_trace_json": lambda **_: b"{"}, id="no JSON"),
        pytest.param({"_dump_nccl_trace_json": lambda **_: b"{}"}, id="no groups"),
    ],
)
def test_other_torch_says_nothing(monkeypatch: pytest.MonkeyPatch, functions: dict[str, Any]) -> None:
    recorder(monkeypatch, **functions)
    assert nccl_groups(8) == ()


def test_nccl_recorder_is_dumped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, empty, gloo = b'{"entries":[1]}', b'{"comm_lib_version":""}', b'{"entries":[2]}'
    made = b'{"comm_lib_version":"2.29.7"}'
    for nccl, other, expected in (
        (recorded, gloo, recorded),
        (made, gloo, made),
        (empty, gloo, gloo),
        (None, gloo, gloo),
        (empty, None, empty),
        (None, None, None),
    ):
        given = {"_dump_nccl_trace_json": nccl, "_dump_fr_trace_json": other}
        recorder(monkeypatch, **{name: lambda text=text: text for name, text in given.items() if text is not None})
        assert flight_recorder_dump() == expected


def test_recorder_of_nccl_without_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group is made, and the other ranks are in its first collective: gloo's recorder would have others."""
    empty, gloo = b'{"comm_lib_version":""}', b'{"entries":[2]}'
    for uid, expected in ((0, empty), (None, gloo)):
        functions = {"_dump_nccl_trace_json": lambda: empty, "_dump_fr_trace_json": lambda: gloo}
        recorder(monkeypatch, ("0", uid, ALL), **functions)
        assert flight_recorder_dump() == expected


@pytest.mark.system
def test_recorder_is_read_only_while_quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Never while steps are made, then at once a second; a slow reading is repeated late."""
    record.create(tmp_path / "beat")
    writer = HeartbeatWriter(tmp_path / "beat")
    readings: list[int] = []
    quiet: list[int] = []
    slow_s = 0.0

    def dump(includeCollectives: bool) -> bytes:  # noqa: N803 torch's name
        assert not includeCollectives
        readings.append(time.monotonic_ns())
        quiet.append(readings[-1] - writer.progress_ns)
        time.sleep(slow_s)
        return status((0, (7, 6)))

    recorder(monkeypatch, ("0", 0, ALL), _dump_nccl_trace_json=dump)
    thread = HeartbeatThread(writer, period_s=0.01)
    monkeypatch.setattr(thread, "_read_collectives", lambda: 7)
    thread.start()
    try:
        with HeartbeatReader(tmp_path / "beat") as reader:
            until(lambda: reader.read().alive_ticks > 2, "a tick", 10)
            readings.clear()
            quiet.clear()
            stop = time.monotonic() + 1.5
            while time.monotonic() < stop:
                writer.step(1)
                time.sleep(0.01)
            assert min(quiet, default=GROUPS_AFTER_NS) >= GROUPS_AFTER_NS, "while it steps"
            until(lambda: len(readings) >= 2, "two readings", 20)
            assert reader.read().groups == ((key("0", ALL), 7, 6),)
            assert readings[1] - readings[0] >= GROUPS_AFTER_NS
            assert min(quiet) >= GROUPS_AFTER_NS
            slow_s = 0.01
            count = len(readings)
            until(lambda: len(readings) > count, "a slow reading", 20)
            stop = time.monotonic() + 2.5
            while time.monotonic() < stop:
                time.sleep(0.1)
            assert len(readings) == count + 1
    finally:
        thread.stop()


def test_recorder_is_read_late_while_python_moves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record.create(tmp_path / "beat")
    writer = HeartbeatWriter(tmp_path / "beat")
    readings: list[int] = []
    recorder(monkeypatch, ("0", 0, ALL), _dump_nccl_trace_json=lambda **_: readings.append(1) or status())
    thread = HeartbeatThread(writer)
    for seconds, moved, count in ((0.5, False, 0), (2, True, 0), (2, False, 1), (6, True, 2)):
        now_ns = writer.progress_ns + int(seconds * 1e9)
        monkeypatch.setattr(time, "monotonic_ns", lambda now_ns=now_ns: now_ns)
        thread._read_groups(moved)
        assert len(readings) == count, seconds


def test_recorder_of_this_torch_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's recorder has the format of NCCL's; the names of its groups are missing."""
    import torch._C._distributed_c10d as c10d

    if not hasattr(c10d, "_dump_fr_trace_json"):
        pytest.skip("torch records gloo's collectives from 2.8 on")
    text = json.loads(c10d._dump_fr_trace_json(includeCollectives=False))
    assert {"version", "pg_config", "pg_status", "comm_lib_version"} <= set(text)
    assert not text["comm_lib_version"]
    assert collectives.nccl_groups(8) == () or hasattr(c10d, "_dump_nccl_trace_json")
