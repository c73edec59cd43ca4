"""Worker events: each appended event is read once; an invalid line is an error, not fatal."""

from __future__ import annotations

import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from elasticd.errors import WireError
from elasticd.heartbeat import worker_events
from elasticd.heartbeat.worker_events import WorkerEvent, WorkerEventReader, WorkerEventWriter


def test_event_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    reader = WorkerEventReader(path)
    assert reader.read() == ([], [])
    writer = WorkerEventWriter(path, round=3, rank=1)
    writer.write("checkpoint_saved", "every 50 steps\nand more: é", 50, path="/x", bytes=10, seconds=0.5)
    (event,), errors = reader.read()
    assert errors == []
    assert (event.kind, event.round, event.rank, event.step) == ("checkpoint_saved", 3, 1, 50)
    assert event.reason == "every 50 steps\nand more: é"
    assert event.extra == {"path": "/x", "bytes": 10, "seconds": 0.5}
    assert reader.read() == ([], [])
    writer.write("message", "again")
    assert [event.reason for event in reader.read()[0]] == ["again"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert WorkerEvent.from_line(event.to_line()) == event


def test_split_line_is_read_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    line = WorkerEvent("message", 1, 0, None, 1.0, 2.0, "whole").to_line()
    reader = WorkerEventReader(path)
    path.write_bytes(line[:30])
    assert reader.read() == ([], [])
    path.write_bytes(line)
    assert [event.reason for event in reader.read()[0]] == ["whole"]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1]",
        b'{"v": 2, "kind": "message"}',
        b'{"v": 1, "kind": "message"}',
        b'{"v": 1, "kind": "message", "round": true, "rank": 0, "step": null, "mono": 1, "wall": 1, "reason": ""}',
        b'{"v": 1, "kind": "message", "round": 1, "rank": 0, "step": "1", "mono": 1, "wall": 1, "reason": ""}',
        b'{"v": 1, "kind": "message", "round": -1, "rank": 0, "step": 1, "mono": 1, "wall": 1, "reason": ""}',
        b'{"v": 1, "kind": "message", "round": 1, "rank": 0, "step": 1, "mono": NaN, "wall": 1, "reason": ""}',
        b'{"v": 1, "kind": "x", "round": 1, "rank": 0, "step": 1, "mono": 1, "wall": 1, "reason": "", "seconds": "x"}',
        b'{"v": 1, "kind": "x", "round": 1, "rank": 0, "step": 1, "mono": 1, "wall": 1, "reason": "", "bytes": null}',
        b'{"v": 1, "kind": "", "round": 1, "rank": 0, "step": 1, "mono": 1, "wall": 1, "reason": "", "steps_saved":-1}',
        b'{"v": 1, "kind": "x", "round": 1, "rank": 0, "step": 1, "mono": 1, "wall": 1, "reason": "", "donor": []}',
        b"[" * 100_000,
    ],
)
def test_invalid_line_is_reported_and_next_is_read(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(WireError):
        WorkerEvent.from_line(line)
    path = tmp_path / "notes"
    path.write_bytes(line + b"\n")
    WorkerEventWriter(path).write("message", "after it")
    events, errors = WorkerEventReader(path).read()
    assert [event.reason for event in events] == ["after it"]
    assert len(errors) == 1


def test_unknown_kinds_and_fields_are_kept(tmp_path: Path) -> None:
    line = (
        b'{"v": 1, "kind": "new", "round": 1, "rank": 0, "step": 1, "mono": 1, "wall": 1.5, "reason": "", "extra": [1]}'
    )
    event = WorkerEvent.from_line(line)
    assert (event.kind, event.extra) == ("new", {"extra": [1]})


def test_writer_without_path_does_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    WorkerEventWriter(None).write("message", "to nobody")
    assert set(os.listdir("/proc/self/fd")) == before


def test_concurrent_writers_never_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    writers = [WorkerEventWriter(path, rank=rank) for rank in range(4)]
    threads = [
        threading.Thread(target=lambda w=writer: [w.write("message", "x" * 5000, n) for n in range(50)])
        for writer in writers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events, errors = WorkerEventReader(path).read()
    assert (len(events), errors) == (200, [])


def test_events_that_are_read_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_events, "MAX_FILE_BYTES", 4096)
    path = tmp_path / "notes"
    reader, writer = WorkerEventReader(path), WorkerEventWriter(path)
    steps: list[int | None] = []
    for step in range(1000):
        writer.write("snapshot", "the same", step)
        if step % 7 == 0:
            steps += [event.step for event in reader.read()[0]]
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000
    assert [*steps, *(event.step for event in reader.read()[0])] == list(range(1000))


def test_event_of_a_writer_that_had_the_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_events, "MAX_FILE_BYTES", 1)
    path = tmp_path / "notes"
    reader, writer = WorkerEventReader(path), WorkerEventWriter(path)
    writer.write("message", "first")
    late = os.open(path, os.O_WRONLY | os.O_APPEND)
    assert [event.reason for event in reader.read()[0]] == ["first"]
    writer.write("message", "third")
    os.write(late, WorkerEvent("message", 0, 0, None, 1.0, 2.0, "second").to_line())
    os.close(late)
    assert [event.reason for event in reader.read()[0]] == ["second", "third"]


def test_event_after_full_disk_counts_lost_events(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    if (pid := os.fork()) == 0:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = WorkerEventWriter(path)
        writer.write("message", "first")
        whole = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 20, resource.RLIM_INFINITY))
        writer.write("message", "torn: only 20 bytes of it fit")
        writer.write("message", "lost: none of it fits")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.write("message", "last")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    events, errors = WorkerEventReader(path).read()
    assert [event.reason for event in events] == ["first", "last"]
    assert events[1].extra == {"lost": 2}
    assert len(errors) == 1
