"""Notes: what a worker appends is what the agent reads, once; a line that is none is said, not fatal."""

from __future__ import annotations

import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from elasticd.errors import WireError
from elasticd.heartbeat.worker_events import WorkerEvent, WorkerEventReader, WorkerEventWriter


def test_a_note_is_read_once_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    reader = WorkerEventReader(path)
    assert reader.read() == ([], [])
    writer = WorkerEventWriter(path, round=3, rank=1)
    writer.write("checkpoint_saved", "every 50 steps\nand more: é", 50, path="/x", bytes=10, seconds=0.5)
    (note,), wrong = reader.read()
    assert wrong == []
    assert (note.kind, note.round, note.rank, note.step) == ("checkpoint_saved", 3, 1, 50)
    assert note.reason == "every 50 steps\nand more: é"
    assert note.extra == {"path": "/x", "bytes": 10, "seconds": 0.5}
    assert reader.read() == ([], [])
    writer.write("message", "again")
    assert [note.reason for note in reader.read()[0]] == ["again"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert WorkerEvent.from_line(note.to_line()) == note


def test_a_line_cut_in_two_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    line = WorkerEvent("message", 1, 0, None, 1.0, 2.0, "whole").to_line()
    reader = WorkerEventReader(path)
    path.write_bytes(line[:30])
    assert reader.read() == ([], [])
    path.write_bytes(line)
    assert [note.reason for note in reader.read()[0]] == ["whole"]


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
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_note_is_said_and_the_next_one_is_read(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(WireError):
        WorkerEvent.from_line(line)
    path = tmp_path / "notes"
    path.write_bytes(line + b"\n")
    WorkerEventWriter(path).write("message", "after it")
    notes, wrong = WorkerEventReader(path).read()
    assert [note.reason for note in notes] == ["after it"]
    assert len(wrong) == 1


def test_unknown_kinds_and_fields_are_kept(tmp_path: Path) -> None:
    line = (
        b'{"v": 1, "kind": "new", "round": 1, "rank": 0, "step": 1, "mono": 1, "wall": 1.5, "reason": "", "extra": [1]}'
    )
    note = WorkerEvent.from_line(line)
    assert (note.kind, note.extra) == ("new", {"extra": [1]})


def test_without_a_file_it_does_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    WorkerEventWriter(None).write("message", "to nobody")
    assert set(os.listdir("/proc/self/fd")) == before


def test_writers_never_mix_their_lines(tmp_path: Path) -> None:
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
    notes, wrong = WorkerEventReader(path).read()
    assert (len(notes), wrong) == (200, [])


def test_a_full_disk_loses_the_note_and_the_next_one_says_so(tmp_path: Path) -> None:
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
    notes, wrong = WorkerEventReader(path).read()
    assert [note.reason for note in notes] == ["first", "last"]
    assert notes[1].extra == {"lost": 2}
    assert len(wrong) == 1
