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
from elasticd.heartbeat.collectives import decode_groups, flight_recorder_dump, nccl_groups
from elasticd.heartbeat.record import HeartbeatReader, HeartbeatWriter
from elasticd.heartbeat.thread import GROUPS_AFTER_NS, HeartbeatThread
from tests.faults.job import until


def status(names: dict[str, str], *counts: tuple[int, int] | None) -> bytes:
    """As torch 2.13 writes it; `names` with their ranks, the counts in the order in which groups were made."""
    config = {name: {"name": name, "desc": "undefined", "ranks": ranks} for name, ranks in names.items()}
    each = {
        str(at): dict(
            zip((f"last_{what}_collective" for what in ("enqueued", "completed")), map(str, one), strict=True)
        )
        for at, one in enumerate(counts)
        if one is not None
    }
    return json.dumps(
        {"version": "2.10", "comm_lib_version": "2.29.7", "pg_config": config, "pg_status": each}
    ).encode()


def key(name: str, ranks: str) -> int:
    return binascii.crc32(f"{name} {ranks}".encode())


ALL, PAIR = "[0, 1, 2]", "[0, 2]"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(status({"0": ALL}, (500, 400)), [(key("0", ALL), 500, 400)], id="one group"),
        pytest.param(
            status({"0": ALL, "10": PAIR, "9": PAIR}, (5, 5), (3, 2), (8, 8)),
            [(key("0", ALL), 5, 5), (key("9", PAIR), 3, 2), (key("10", PAIR), 8, 8)],
            id="names in numeric order",
        ),
        pytest.param(
            status({"0": ALL, "4": PAIR}, None, (1, -1)),
            [(key("0", ALL), 0, 0), (key("4", PAIR), 1, 0)],
            id="a group without a collective",
        ),
        pytest.param(status({"0": ALL, "b7e1": PAIR}, (5, 5), (3, 2)), [], id="a name that is a digest"),
        pytest.param(status({"0": ALL}, (5, 5), (3, 2)), [], id="names that repeat"),
        pytest.param(status({}), [], id="nothing recorded"),
    ],
)
def test_groups_of_status(text: bytes, found: list[tuple[int, int, int]]) -> None:
    assert decode_groups(text) == found


def recorder(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**functions))  # type: ignore[arg-type]


def test_pending_groups_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {str(number): f"[0, {number}]" for number in range(12)}
    text = status(names, *[(9, 9)] * 11, (9, 8))
    recorder(monkeypatch, _dump_nccl_trace_json=lambda **_: text)
    found = nccl_groups(8)
    assert len(found) == 8
    assert found[0] == (key("11", "[0, 11]"), 9, 8)


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
        return status({"0": ALL}, (7, 6))

    recorder(monkeypatch, _dump_nccl_trace_json=dump)
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


def test_recorder_of_this_torch_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's recorder has the format of NCCL's; the names of its groups are missing."""
    import torch._C._distributed_c10d as c10d

    text = json.loads(c10d._dump_fr_trace_json(includeCollectives=False))
    assert {"version", "pg_config", "pg_status", "comm_lib_version"} <= set(text)
    assert not text["comm_lib_version"]
    assert collectives.nccl_groups(8) == () or hasattr(c10d, "_dump_nccl_trace_json")
