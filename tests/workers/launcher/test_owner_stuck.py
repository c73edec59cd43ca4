"""The owner and processes that do not die of SIGKILL: waited for a bounded time, told of, reaped whenever they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd_agent.workers.launcher.messages import Ended, Exited, Reaped, Signal, Started
from elasticd_agent.workers.launcher.owned_group import KILL_DEADLINE_S
from tests.library.conftest import wait_for
from tests.tracing import ALLOW, Tracer
from tests.workers.launcher.owner_process import PATIENCE_S, OwnerProcess, execute

WORKER = f"{ALLOW}; import time; print('up', flush=True); time.sleep(600)"
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {WORKER!r}])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[OwnerProcess]:
    started = OwnerProcess(tmp_path)
    yield started
    assert started.end() == (0, "")


def wait_for_word(path: Path, word: str) -> None:
    wait_for(lambda: path.exists() and word in path.read_text(), f"{word!r} in {path.name}")


def start(owner: OwnerProcess, directory: Path, group: int, *codes: str) -> list[int]:
    """A cold group with a worker for each piece of code; their pids once all of them have said something."""
    python, output = [sys.executable, "-I", "-S", "-c"], directory / str(group)
    owner.send(execute(group, *([*python, code] for code in codes), env=dict(os.environ), output=output))
    pids = owner.until(Started, group).pids
    for rank in range(len(codes)):
        wait_for_word(directory / f"{group}-{rank}", "\n")
    return pids


@pytest.mark.system
def test_unkillable_process_is_reported_then_reaped(owner: OwnerProcess, tmp_path: Path) -> None:
    """One story, since each of its parts would wait as long again."""
    dies, stays, parent = start(owner, tmp_path, 1, WORKER, WORKER, PARENT)
    child = int((tmp_path / "1-2").read_text().split()[0])
    wait_for_word(tmp_path / "1-2", "up")
    with Tracer(stays) as first, Tracer(child):
        began = time.monotonic()
        owner.send(Signal(1, signal.SIGKILL))
        gone = owner.until(Ended, 1)
        assert KILL_DEADLINE_S <= time.monotonic() - began < PATIENCE_S
        stuck = {each["pid"]: (each["local_rank"], each["state"], each["wchan"]) for each in gone.unkillable}
        assert stuck == {stays: (1, "Z", ""), child: (2, "Z", "")}, "a worker's child is known by its session"
        exits = {exit.pid: os.waitstatus_to_exitcode(exit.status) for exit in owner.reports if isinstance(exit, Exited)}
        assert exits == {dies: -signal.SIGKILL, parent: -signal.SIGKILL}

        start(owner, tmp_path, 2, WORKER)
        began = time.monotonic()
        owner.send(Signal(2, signal.SIGKILL))
        assert owner.until(Ended, 2).unkillable == []
        assert time.monotonic() - began < KILL_DEADLINE_S, "what is known to be stuck is waited for once"

        first.let_go()
        assert owner.until(Reaped).pid == stays
        began = time.monotonic()
        owner.end()
        assert time.monotonic() - began < KILL_DEADLINE_S, "nor is it waited for at the end"
