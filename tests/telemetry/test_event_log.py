"""The event log is what programs read: its format holds, and no file system can stop the job through it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.generate import events
from elasticd.errors import UsageError
from elasticd_agent.model.log_events import EVENT_TYPES, CheckpointSavedEvent, JobEndedEvent, RoundPublishedEvent
from elasticd_agent.telemetry.event_log import (
    MAX_LINE_BYTES,
    MAX_UNWRITTEN_BYTES,
    EventLog,
    NullEventLog,
    open_event_log,
)

ROOT = Path(__file__).resolve().parents[2]


def ended(reason: str = "all workers are done", **values: Any) -> JobEndedEvent:
    given: dict[str, Any] = {"round": 3, "mono": time.monotonic(), "outcome": "succeeded", "exit_code": 0}
    return JobEndedEvent(reason=reason, restarts=2, **(given | values))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_carries_the_common_fields_and_its_own(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events", "job-1", "node-a")
    before = time.time()
    mono = time.monotonic()
    nodes = ("node-a",)
    log.write(
        RoundPublishedEvent(round=1, mono=mono, reason="began", world_size=2, nodes=nodes, restarts=0, cause="start")
    )
    log.close()
    (line,) = lines(tmp_path / "events")
    assert before - 0.1 < line.pop("wall") < time.time() + 0.1
    assert line == {
        "v": 1, "kind": "round_published", "job": "job-1", "node": "node-a", "round": 1, "mono": mono,
        "reason": "began", "world_size": 2, "nodes": ["node-a"], "restarts": 0, "cause": "start", "lost": [],
        "leader": "", "idle_seconds": 0.0,
    }  # fmt: skip


def test_wall_and_mono_say_when_it_happened_not_when_it_was_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events", "j", "n")
    log.write(ended(mono=time.monotonic() - 100))
    log.close()
    (line,) = lines(tmp_path / "events")
    assert 99 < time.time() - line["wall"] < 120


def test_a_later_run_appends_and_a_new_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "with space ünd ünicode"
    for _ in range(2):
        log = open_event_log(path, "j", "n")
        log.write(ended())
        log.close()
        log.close()
    assert len(lines(path)) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_log_is_rotated_and_a_removed_one_recreated(tmp_path: Path) -> None:
    """A log that grew for months starts anew; a log file that was removed is created again."""
    path = tmp_path / "logs" / "events.jsonl"
    log = EventLog(path, "", "n", most_bytes=2000)
    threads = [threading.Thread(target=lambda: [log.write(ended()) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    old = path.with_name("events.jsonl.1")
    assert sorted(path.parent.iterdir()) == [path, old]
    assert 0 < path.stat().st_size < 3000
    assert 2000 <= old.stat().st_size < 3000
    assert {line["kind"] for line in lines(path) + lines(old)} == {"job_ended"}

    path.rename(tmp_path / "by-logrotate")
    log.write(ended("after logrotate"))
    assert [line["reason"] for line in lines(path)] == ["after logrotate"]
    shutil.rmtree(path.parent)
    log.write(ended("after rm -r"))
    assert [line["reason"] for line in lines(path)] == ["after rm -r"]
    log.close()
    assert log.lines_lost == 0


def test_a_directory_that_cannot_be_made_yet_costs_no_line(tmp_path: Path) -> None:
    """An agent's: its file system may be mounted, or made writable, while the agent runs."""
    away = tmp_path / "away"
    log = EventLog(away / "logs" / "events.jsonl", "", "n", most_bytes=2000, must_open=False)
    log.write(ended("before"))
    away.mkdir()
    log.write(ended("after"))
    log.close()
    log.close()
    assert [line["reason"] for line in lines(away / "logs" / "events.jsonl")] == ["before", "after"]
    assert log.lines_lost == 0


def test_without_a_path_nothing_is_done() -> None:
    log = open_event_log(None, "j", "n")
    assert isinstance(log, NullEventLog)
    log.write(ended())
    log.close()
    assert log.lines_lost == 0


@pytest.mark.parametrize("name", ["no/such/folder/events", ".", "a" * 300, "pipe"])
def test_a_path_that_cannot_be_opened_is_a_usage_error_of_one_line(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError) as raised:
        open_event_log(tmp_path / name, "j", "n")
    assert "--event-log" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_processes_never_mix_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from elasticd_agent.telemetry.event_log import *; from elasticd_agent.model.log_events import *\n"
        "log = EventLog(Path(sys.argv[1]), 'j', sys.argv[2])\n"
        "for i in range(300):\n"
        "    log.write(StopRequestedEvent(round=i, mono=0.0, reason='x' * 3000, by='me', grace_seconds=1))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), node]) for node in "ab"]
    assert [w.wait(30) for w in writers] == [0, 0]
    found = lines(path)
    for node in "ab":
        assert [line["round"] for line in found if line["node"] == node] == list(range(300))


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """RLIMIT_FSIZE makes the kernel answer a write as a full disk does: first a part, then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


@pytest.mark.parametrize("last", [[], ["after"]], ids=["at-close", "with-the-next-line"])
def test_a_full_disk_delays_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture, last: list[str]) -> None:
    path = tmp_path / "events"
    log = EventLog(path, "j", "n")
    log.write(ended("before"))
    with full_disk(path):
        for number in range(5):
            log.write(ended(f"late {number}"))
    for reason in last:
        log.write(ended(reason))
    log.close()
    assert log.lines_lost == 0
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "only a part of a line could be written; its lines are written later"
    ]
    whole = [json.loads(line)["reason"] for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    assert whole == ["before", *(f"late {number}" for number in range(5)), *last]


def test_a_disk_that_stays_full_costs_the_oldest_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events"
    log = EventLog(path, "j", "n")
    with full_disk(path):
        for number in range(200):
            log.write(ended(f"{number} " + "x" * 3000))
    lost = log.lines_lost
    log.close()
    found = [json.loads(line)["reason"].split()[0] for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    assert found == [str(number) for number in range(lost, 200)]
    assert MAX_UNWRITTEN_BYTES // 3300 <= len(found) <= MAX_UNWRITTEN_BYTES // 3000
    assert f"{lost} lines were lost" in caplog.text


def test_a_pipe_whose_reader_stalls_loses_lines_not_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog(tmp_path / "pipe", "j", "n")
    begun = time.monotonic()
    for _ in range(200):
        log.write(ended("x" * 3000))
    assert log.lines_lost > 0
    os.close(reader)
    log.write(ended())  # EPIPE
    log.close()
    assert log.lines_lost > MAX_UNWRITTEN_BYTES // 3300
    assert time.monotonic() - begun < 20


def test_a_line_is_bounded_and_says_that_it_was_cut(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events", "j" * 100_000, "n")
    log.write(ended("ü" * 1_000_000))
    many = tuple("node-with-a-long-name" * 100 for _ in range(5000))
    log.write(RoundPublishedEvent(round=1, mono=0.0, reason="r", world_size=2, nodes=many, restarts=0, cause="start"))
    log.close()
    for raw, line in zip((tmp_path / "events").read_bytes().splitlines(), lines(tmp_path / "events"), strict=True):
        assert len(raw) < MAX_LINE_BYTES
        assert line["cut"] is True


def test_odd_values_still_make_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events", "j", "n")
    odd = os.fsdecode(b"/data/\xff\xfe\n")
    log.write(
        CheckpointSavedEvent(
            round=1, mono=time.monotonic(), reason="r", step=1, path=odd, bytes=1, seconds=math.nan, written_seconds=1.0
        )
    )
    log.close()
    (line,) = lines(tmp_path / "events")
    assert line["seconds"] is None
    assert os.fsencode(line["path"]) == b"/data/\xff\xfe\n"


def test_kinds_are_the_promised_ones() -> None:
    """Adding a kind is fine, so add it here; renaming or removing one breaks readers."""
    assert [kind.kind for kind in EVENT_TYPES] == [
        "round_published", "group_started", "first_step", "work_recovered", "worker_exited", "checkpoint_saved",
        "checkpoint_skipped", "checkpoint_failed", "checkpoint_dropped", "scalars", "resumed", "paused", "pause_ended",
        "store_unavailable", "store_available", "hang_suspected", "hang_cleared", "hang_detected", "straggler",
        "launcher_ready", "store_exited", "group_ended",
        "process_unkillable", "process_reaped", "stop_requested", "waiting", "job_ended", "agent_started",
        "node_registered", "node_state", "node_unhealthy", "node_quarantined", "node_healthy", "agent_reloaded",
        "agent_ended",
        "runner_started", "runner_stop_requested", "runner_ended", "scheduled", "audit",
    ]  # fmt: skip


def test_the_page_is_the_one_the_code_generates() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    assert page == events.page(), "make docs"
    assert re.findall(r"^### (\w+)$", page, re.M) == [kind.kind for kind in EVENT_TYPES]
