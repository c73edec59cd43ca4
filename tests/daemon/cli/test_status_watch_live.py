"""`elasticd status JOB --watch` of a real agent that is killed and restarted, in a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, AgentNode

pytestmark = pytest.mark.system


@contextmanager
def watching(node: AgentNode, out: int, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    agent = f"unix:{node.socket}"
    path = os.pathsep.join(node.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "elasticd_agent", "status", *more, "--watch", "--every", "0.3", "--agent", agent],
        env={**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Read:
    """What comes from it, so far; `seen` of it has been waited for."""

    def __init__(self, fd: int) -> None:
        self.fd, self.text, self.seen = fd, "", 0

    def until(self, expected: str, within: float = 40.0) -> None:
        """Reads on until that has come, after what was waited for before."""
        deadline = time.monotonic() + within
        while (at := self.text.find(expected, self.seen)) < 0:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.fd], [], [], left)[0], f"no {expected!r} in\n{self.text[-3000:]}"
            self.text += os.read(self.fd, 65536).decode("utf-8", "replace")
        self.seen = at + len(expected)


def test_watch_in_a_pipe_survives_an_agent_restart(node: MakeNode) -> None:
    n1 = node()
    n1.job("one", "ticking.py", COLD, workers=2)
    n1.start()
    n1.wait_for_step(3)
    ours, theirs = os.pipe()
    with watching(n1, theirs, "one") as process:
        os.close(theirs)
        page = Read(ours)
        page.until("one: running")
        page.until("RANK  NODE")
        n1.kill()
        page.until("ago: no agent answers at")
        n1.start()
        page.until("\none: running")
        done = subprocess.run(
            [sys.executable, "-m", "elasticd_agent", "cancel", "one", "--agent", f"unix:{n1.socket}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(n1.path)},
            capture_output=True,
            timeout=30,
        )
        assert done.returncode == 0, done
        page.until("one: cancelled")
        assert process.wait(40) == 0
    os.close(ours)
    assert "\x1b" not in page.text
    assert n1.drain() == 0


def test_watch_on_a_terminal_leaves_the_last_page(node: MakeNode) -> None:
    n1 = node()
    n1.job("one", "ticking.py", COLD, workers=2)
    n1.start()
    n1.wait_for_step(3)
    ours, theirs = pty.openpty()
    with watching(n1, theirs, "one") as process:
        page = Read(ours)
        page.until("\x1b[?1049h")
        page.until("RANK")
        page.until("RANK")
        process.send_signal(signal.SIGINT)
        page.until("\x1b[?1049l")
        page.until("running")
        assert process.wait(20) == 0
    os.close(theirs)
    os.close(ours)
    assert n1.drain() == 0
