"""Helpers: JSON lines both ways, deadlines, and an end that reaches everything they started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.helper_process import (
    HelperCancelled,
    HelperError,
    HelperExited,
    HelperProcess,
    HelperTimeout,
)
from elasticd_agent.system.waker import Waker

PATIENCE_S = 30.0
ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"

Start = Callable[..., HelperProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    helpers: list[HelperProcess] = []

    def start(code: str, **how: bool) -> HelperProcess:
        helpers.append(HelperProcess([sys.executable, "-c", code], **how))  # type: ignore[arg-type]
        return helpers[-1]

    yield start
    for helper in helpers:
        assert helper.close(within_s=PATIENCE_S) == ""


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_messages_both_ways_larger_than_a_pipe(start: Start) -> None:
    helper = start(ECHO)
    thread = threading.Thread(target=lambda: helper.send({"text": "x" * (1 << 20)}, soon()))
    thread.start()
    assert len(helper.receive(soon())["text"]) == 1 << 20
    thread.join()
    for message in ({"a": 1}, {"b": "é"}, {"done": True}):
        helper.send(message, soon())
    assert list(helper.messages(soon())) == [{"a": 1}, {"b": "é"}]


def test_deadline_and_cancel_of_a_silent_helper(start: Start) -> None:
    helper, waker = start("import time; time.sleep(600)"), Waker()
    with pytest.raises(HelperTimeout):
        helper.receive(time.monotonic() + 0.05)
    with pytest.raises(HelperTimeout):
        helper.send({"text": "x" * (1 << 20)}, time.monotonic() + 0.05)
    waker.wake()
    with pytest.raises(HelperCancelled):
        helper.receive(soon(), cancel=waker.fileno())
    waker.close()


@pytest.mark.parametrize(
    ("code", "keep_errors", "reason"),
    [
        ("import sys; sys.exit(3)", False, "exit status"),
        ("import sys; sys.exit('first\\nthe reason\\n')", True, "the reason"),
        ("print('[1')", True, "not a JSON object"),
    ],
)
def test_why_there_is_no_answer(start: Start, code: str, keep_errors: bool, reason: str) -> None:
    with pytest.raises(HelperError, match=reason):
        start(code, keep_errors=keep_errors).receive(soon())


def test_kill_from_another_thread(start: Start) -> None:
    helper = start("import time; print('{}', flush=True); time.sleep(600)")
    assert helper.receive(soon()) == {}
    threading.Timer(0.05, helper.kill).start()
    with pytest.raises(HelperExited):
        helper.receive(soon())


def test_close_ends_the_whole_session(start: Start) -> None:
    helper = start(
        "import json, os, time\nif (pid := os.fork()): print(json.dumps({'pid': pid}), flush=True)\ntime.sleep(600)"
    )
    child = helper.receive(soon())["pid"]
    assert helper.close(within_s=PATIENCE_S) == ""
    until = soon()
    while procfs.state(child) not in ("", "Z"):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_close_with_grace_lets_a_helper_end_with_its_input(start: Start, tmp_path: Path) -> None:
    helper = start(f"import sys\nprint('{{}}', flush=True)\nsys.stdin.read()\nopen({str(tmp_path / 'ended')!r}, 'w')")
    helper.receive(soon())
    assert helper.close(PATIENCE_S, PATIENCE_S) == ""
    assert (tmp_path / "ended").exists()


def test_close_leaves_a_process_that_does_not_die(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = start("import time; time.sleep(600)")
    with monkeypatch.context() as undying:
        undying.setattr(os, "killpg", lambda pid, signum: None)
        began = time.monotonic()
        assert helper.close(within_s=0.1) == f"process {helper.pid} survives SIGKILL"
        assert time.monotonic() - began < PATIENCE_S
    os.killpg(helper.pid, signal.SIGKILL)


def test_cannot_be_started() -> None:
    with pytest.raises(FileNotFoundError):
        HelperProcess(["/no/such/program"], keep_errors=True)
