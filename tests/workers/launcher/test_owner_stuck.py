"""The owner and processes that do not die of SIGKILL: waited for a bounded time, told of, reaped whenever they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import elasticd_agent.workers.launcher
from elasticd_agent.workers.launcher.owned_group import KILL_DEADLINE_S
from tests.tracing import ALLOW, Tracer

OWNER = Path(elasticd_agent.workers.launcher.__file__).with_name("owner.py")
PATIENCE_S = 30.0
WORKER = f"{ALLOW}; import time; print('up', flush=True); time.sleep(600)"
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {WORKER!r}])
print(child.pid, flush=True)
time.sleep(600)
"""


class Owner:
    """An owner, and everything that it said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (directory / "run").mkdir()
        with theirs:
            argv = [sys.executable, "-I", "-S", str(OWNER), str(theirs.fileno()), str(directory / "run")]
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        self.socket.settimeout(PATIENCE_S)
        self.said: list[dict[str, Any]] = []

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message).encode())

    def start(self, group: int, *codes: str) -> list[int]:
        """A cold group with a worker for each piece of code; their pids once all of them have said something."""
        outs = [self.directory / f"{group}-{rank}" for rank in range(len(codes))]
        python = [sys.executable, "-I", "-S", "-c"]
        workers = [
            {"argv": [*python, code], "env": {}, "stdout": str(out), "stderr": str(out)}
            for code, out in zip(codes, outs, strict=True)
        ]
        env = dict(os.environ)
        self.send(do="exec", group=group, store=None, keep=False, host="", port=0, cwd="/", env=env, workers=workers)
        pids: list[int] = self.until("started", group)["pids"]
        deadline = time.monotonic() + PATIENCE_S
        while not all(out.exists() and out.read_text() for out in outs):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return pids

    def kill(self, group: int) -> None:
        self.send(do="signal", group=group, signal=int(signal.SIGKILL))

    def until(self, kind: str, group: int | None = None) -> dict[str, Any]:
        while True:
            message = json.loads(self.socket.recv(1 << 20))
            self.said.append(message)
            if message["kind"] == kind and group in (None, message.get("group")):
                return dict(message)

    def end(self) -> None:
        self.socket.close()  # as an agent that has died
        assert self.process.wait(PATIENCE_S) == 0


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    found = Owner(tmp_path)
    yield found
    found.end()


@pytest.mark.system
def test_unkillable_process_is_reported_then_reaped(owner: Owner) -> None:
    """One story, since each of its parts would wait as long again."""
    dies, stays, parent = owner.start(1, WORKER, WORKER, PARENT)
    child = int((owner.directory / "1-2").read_text().split()[0])
    until_says(owner.directory / "1-2", "up")
    with Tracer(stays) as first, Tracer(child):
        began = time.monotonic()
        owner.kill(1)
        gone = owner.until("ended", 1)
        assert KILL_DEADLINE_S <= time.monotonic() - began < PATIENCE_S
        stuck = {each["pid"]: (each["local_rank"], each["state"], each["wchan"]) for each in gone["unkillable"]}
        assert stuck == {stays: (1, "Z", ""), child: (2, "Z", "")}, "a worker's child is known by its session"
        exits = {m["pid"]: os.waitstatus_to_exitcode(m["status"]) for m in owner.said if m["kind"] == "exited"}
        assert exits == {dies: -signal.SIGKILL, parent: -signal.SIGKILL}

        owner.start(2, WORKER)
        began = time.monotonic()
        owner.kill(2)
        assert owner.until("ended", 2)["unkillable"] == []
        assert time.monotonic() - began < KILL_DEADLINE_S, "what is known to be stuck is waited for once"

        first.let_go()
        assert owner.until("reaped")["pid"] == stays
        began = time.monotonic()
        owner.end()
        assert time.monotonic() - began < KILL_DEADLINE_S, "nor is it waited for at the end"


def until_says(path: Path, word: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while word not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
