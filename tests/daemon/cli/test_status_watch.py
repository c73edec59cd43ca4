"""`elasticd status --watch` without a terminal: page after page, through an agent's restart, until the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from elasticd_daemon.api.client import Reply, RequestFailed, Unreachable
from elasticd_daemon.api.schema import JobStatus
from elasticd_daemon.cli import status_watch, tables
from tests.daemon.dashboard.hostile_texts import WICKED
from tests.daemon.dashboard.samples import NOW, a_job, a_rank


@dataclass
class Agent:
    """Answers in turn; an exception is raised, a number is that code."""

    answers: Iterator[Any]
    shown: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)

    def get(self, path: str) -> Reply:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return Reply(answer, json.dumps({"error": f"no, {answer}"}).encode())
        return Reply(200, json.dumps(answer).encode())

    def watched(self, job: str | None = "llama") -> int:
        return status_watch.follow(self, job, 2.0, self.shown.append, sleep=self.slept.append)  # type: ignore[arg-type]


ENDED = {**a_job(), "state": "succeeded", "ended_at": NOW, "ended_seconds": 1.0, "exit_code": 0}


def test_continues_through_a_restart_and_ends_with_the_job() -> None:
    away = Unreachable("no agent answers at /run/elasticd/agent.sock")
    agent = Agent(iter([a_job(), away, 503, a_job(), ENDED]))
    assert agent.watched() == 0
    assert "as of 0s ago: no agent answers" in agent.shown[1] and "llama: running" in agent.shown[1]
    assert "no, 503" in agent.shown[2]
    assert "llama: succeeded" in agent.shown[4]
    assert agent.slept == [2.0] * 4


def test_ends_on_refusal_and_without_any_answer() -> None:
    with pytest.raises(RequestFailed, match="no, 404"):
        Agent(iter([404])).watched()
    with pytest.raises(RequestFailed, match="no, 404"):
        Agent(iter([a_job(), 404])).watched()
    with pytest.raises(Unreachable):
        Agent(iter([Unreachable("no answer")])).watched()


def test_watch_of_all_jobs_and_nodes() -> None:
    row = {k: v for k, v in a_job().items() if k not in ("assignments", "progress")}
    node = {"node": "a", "state": "ready", "used": 2, "slots": 4, "jobs": ["llama"], "reason": ""}
    agent = Agent(iter([{"jobs": [row]}, {"nodes": [node]}, a_job(), {"jobs": []}, 403]))
    with pytest.raises(RequestFailed):
        agent.watched(None)
    assert "llama  running" in agent.shown[0] and "ready  2/4" in agent.shown[0]


def test_control_characters_are_escaped() -> None:
    text = WICKED.encode("utf-8", "replace").decode()
    answer = {**a_job(ranks=[a_rank(0, node=text, state="T")]), "reason": text}
    page = tables.job_page(JobStatus.from_dict(answer))
    assert "\x1b" not in page and "\r" not in page and "\x00" not in page


_SLOW = """
import sys
from elasticd_daemon.api import client
from tests.daemon.dashboard.samples import a_job
client.fetch_status = lambda client, job: a_job()
from elasticd_daemon.cli import job_commands
sys.exit(job_commands.run_command("status", ["llama", "--watch", "--every", "0.2", "--agent", "unix:/nowhere"]))
"""


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_ctrl_c_in_a_pipe_exits_with_0(more: list[str]) -> None:
    code = _SLOW.replace('"--every"', "".join(f'"{one}", ' for one in more) + '"--every"')
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert done.stdout is not None
    try:
        lines = [done.stdout.readline().decode() for _ in range(3)]
        done.send_signal(signal.SIGINT)
        _, wrong = done.communicate(timeout=20)
    finally:
        done.kill()
        done.wait()
    assert (done.returncode, wrong) == (0, b"")
    if more:
        assert all(json.loads(line)["job"] == "llama" for line in lines)
    else:
        assert lines[0].startswith("--- ") and "\x1b" not in "".join(lines)
