"""/proc's facts of a process, its threads and its tree."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.hangs.collector import proc_facts as facts
from elasticd_agent.hangs.collector.record import RankEvidence
from elasticd_agent.system.processes import procfs
from tests.hangs.stuck_worker import StartWorker, Until

READS_A_PIPE = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
if os.fork() == 0:
    print("ready", flush=True)
os.read(fd, 1)
"""


def system_call(pid: int) -> dict[str, Any]:
    return facts.process_facts(pid).get("proc", {}).get("syscall", {})  # type: ignore[no-any-return]


def test_facts_of_waiting_process(worker: StartWorker, tmp_path: Path, until: Until) -> None:
    """They say what it waits for, and which processes are below it."""
    pipe = tmp_path / "a pipe"
    os.mkfifo(pipe)
    pid = worker(READS_A_PIPE, str(pipe))
    until(lambda: procfs.state(pid) == "S" and system_call(pid).get("target") == str(pipe), 20)
    rank = RankEvidence.from_dict({"rank": 0, **facts.process_facts(pid)})
    assert (rank.pid, rank.state, len(rank.tree)) == (pid, "S", 2)
    assert {process.parent for process in rank.tree} == {os.getpid(), pid}
    assert [thread["tid"] for thread in rank.proc["threads"]] == [pid]
    assert str(pipe) in rank.proc["fds"].values()
    assert rank.proc["io"]["rchar"] > 0
    assert "SigCgt" in rank.proc["status"]
    if platform.machine() in ("x86_64", "aarch64"):
        assert rank.call == f"read of {pipe}"
        assert facts.may_wait_for_file(pid, str(pid))  # a file system of FUSE waits like this for its program


def test_facts_of_ended_process() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert facts.process_facts(process.pid) == {}
    assert facts.runnable_time_ns(process.pid) == {}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system calls have no names here")
def test_open_waits_for_a_file(worker: StartWorker, tmp_path: Path, until: Until) -> None:
    """torch.save() holds the GIL there."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    pid = worker("import os, sys; print('ready', flush=True); os.open(sys.argv[1], os.O_WRONLY)", pipe)
    until(lambda: facts.may_wait_for_file(pid, str(pid)), 20)


def test_sleep_waits_for_no_file(until: Until) -> None:
    sleeps = subprocess.Popen(["sleep", "60"])
    try:
        until(lambda: facts.syscall(sleeps.pid, {}).get("name") == "clock_nanosleep", 20)
        assert not facts.may_wait_for_file(sleeps.pid, str(sleeps.pid))
    finally:
        sleeps.kill()
        sleeps.wait()


def test_run_time_of_busy_and_sleeping_thread(worker: StartWorker, until: Until) -> None:
    busy = worker("print('ready', flush=True)\nwhile True: pass", state="R")
    idle = worker("import time; print('ready', flush=True); time.sleep(1e6)")
    until(lambda: procfs.state(idle) == "S", 20)
    before = facts.runnable_time_ns(busy)[busy], facts.runnable_time_ns(idle)[idle]
    until(lambda: facts.runnable_time_ns(busy)[busy] - before[0] > 50_000_000, 20)
    assert facts.runnable_time_ns(idle)[idle] - before[1] < 10_000_000


WRITES = "import os, sys\nto, fd = map(int, sys.argv[1:])\nos.dup2(to, fd)\nos.write(fd, b'x' * 10_000_000)"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system calls have no names here")
@pytest.mark.parametrize(
    ("kind", "fd", "found"),
    [("pipe", 1, True), ("pipe", 2, True), ("named pipe", 1, True), ("terminal", 1, True), ("pipe", 7, False)],
)
def test_output_that_nobody_reads(kind: str, fd: int, found: bool, tmp_path: Path, until: Until) -> None:
    if kind == "named pipe":
        os.mkfifo(tmp_path / "out")
        ours, theirs = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK), os.open(tmp_path / "out", os.O_WRONLY)
    else:
        ours, theirs = os.openpty() if kind == "terminal" else os.pipe()
    command = [sys.executable, "-c", WRITES, str(theirs), str(fd)]
    with subprocess.Popen(command, pass_fds=(theirs,)) as process:
        try:
            call = {"name": "write", "fd": fd}.items()
            until(lambda: call <= system_call(process.pid).items(), 20)
            until(lambda: procfs.state(process.pid) == "S", 20)
            assert facts.is_in_output_write(facts.process_facts(process.pid)) == found
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
