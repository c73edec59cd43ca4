"""Runners are polled independently of each other, and only the job's user answers for its runner."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.system.network.control_socket import SOCKET_NAME, ControlServer, ControlSocketError
from elasticd_daemon.job_dir import JobFiles, job_files
from elasticd_daemon.runners import liveness, poller
from elasticd_daemon.runners.liveness import ProcessIdentity
from elasticd_daemon.runners.poller import RunnersPoller, ask_runner
from tests.daemon.node import until

WAIT_S = 60.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def folder(state: Path, job: str) -> JobFiles:
    files = job_files(state, job, 1)
    files.runtime.mkdir(parents=True)
    return files


def test_runners_that_do_not_answer_delay_no_other(stack: ExitStack, tmp_path: Path) -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    silent = [folder(tmp_path, f"silent{i}") for i in range(8)]
    for files in silent:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(files.runtime / SOCKET_NAME))
        listener.listen()
    polled, good = threading.Semaphore(0), folder(tmp_path, "good")

    def answer(_: Mapping[str, Any]) -> Mapping[str, Any]:
        polled.release()
        return {"phase": "running"}

    stack.enter_context(closing(ControlServer(good.runtime / SOCKET_NAME, lambda _: None, verbs={"poll": answer})))
    runners = stack.enter_context(closing(RunnersPoller(lambda: None, 0.05)))
    began = time.monotonic()
    runners.set_targets({(files.root.name, 1): (files, me) for files in [*silent, good]})
    for _ in range(10):
        assert polled.acquire(timeout=WAIT_S)
    assert time.monotonic() - began < 5 * len(silent) * poller.POLL_TIMEOUT_S, (
        "one after the other would take twice this"
    )
    until(lambda: runners.statuses == {("good.1", 1): {"phase": "running"}}, "a status of the one that answers")
    runners.check_threads()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's agent runs jobs of others")
def test_link_to_another_users_runner_gets_no_answer(stack: ExitStack, tmp_path: Path) -> None:
    mine, roots = job_files(tmp_path, "mine", 1), folder(tmp_path, "roots")
    stack.enter_context(closing(ControlServer(roots.runtime / SOCKET_NAME, lambda _: None)))
    assert ask_runner(roots, {"do": "about"}, WAIT_S)["pid"] == os.getpid()
    mine.root.mkdir()
    mine.runtime.symlink_to(roots.runtime)
    os.chown(mine.root, 65534, 65534)
    with pytest.raises(ControlSocketError, match="belongs to another user"):
        ask_runner(mine, {"do": "about"}, WAIT_S)


def test_only_the_runner_answers(stack: ExitStack, tmp_path: Path) -> None:
    """Another process of the job's user, whose folder it is, may listen where the runner should."""
    files = folder(tmp_path, "evil")
    stack.enter_context(closing(ControlServer(files.runtime / SOCKET_NAME, lambda _: None)))
    files.agent_folder.mkdir(parents=True)
    lock = liveness.take_lock(files.lock)
    assert lock is not None
    stack.callback(os.close, lock)
    assert ask_runner(files, {"do": "about"}, WAIT_S)["pid"] == os.getpid()
    runner = stack.enter_context(subprocess.Popen(["sleep", "60"], pass_fds=[lock]))
    stack.callback(runner.kill)
    liveness.write_owner(files.lock, runner.pid)
    for process in (None, ProcessIdentity.of(runner.pid)):
        with pytest.raises(ControlSocketError, match="belongs to another process"):
            ask_runner(files, {"do": "about"}, WAIT_S, process)
