"""Ranks that cannot stay in their process get a new one soon, with a sentence why."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd_agent.job.monitor import PARK_S
from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job, until
from tests.faults.nodes import Nodes

WITHIN_S = 2.0
"""From the fault, or the end of the time that a rank has, to the end of its process."""
pytestmark = pytest.mark.system


def start(job: StartJob, kind: str, workers: str = "3") -> Job:
    faults = [Fault(1, 13, "SIGKILL", 1)]
    return job("fallback.py", kind, workers=workers, faults=faults, flags=["--checkpoint-dir", "checkpoints"])


def said(run: Job, why: str) -> list[str]:
    """The lines of the job's log with this sentence; what ranks have printed is none."""
    return [line for line in run.err.splitlines() if " elasticd[" in line and why in line]


@pytest.mark.parametrize(
    ("kind", "kept", "has_s", "why"),
    [
        ("late", 1, PARK_S, "round 1: rank 2 did not leave it within "),
        ("device", 1, 0.0, "rank 2 ends, as its process cannot stay: CUDA error: an illegal memory access"),
        ("returns", 1, 0.0, "round 1: train had ended on rank 2, by a result or an error: a new process follows"),
        ("group", 0, 0.0, "restarts every process: the script makes another process group before session.run()"),
        (
            "finally",
            1,
            0.0,
            "rank 2 has not saved step 12 at the fault: what is attached was changed after session.step()",
        ),
        ("collective", 0, 0.0, "restarts every process: the script uses collectives before session.run()"),
    ],
)
def test_rank_that_cannot_stay(job: StartJob, kind: str, kept: int, has_s: float, why: str) -> None:
    run = start(job, kind)
    assert run.wait() == 0
    fault, ended = run.event("worker_exited", rank=1), run.event("group_ended", round=1)
    assert ended["mono"] - fault["mono"] <= has_s + WITHIN_S
    assert [event["kept"] for event in run.events("group_started")] == [0, kept]
    assert len(said(run, why)) == 1, run.err
    for rank in range(3):
        assert [step for _, step in run.steps(rank)] == list(range(1, 21)), "no step is lost or repeated"


def test_state_that_all_ranks_change_as_they_leave_is_lost(job: StartJob) -> None:
    """They stay, with the state of the last save."""
    run = start(job, "finally everywhere")
    assert run.wait() == 0
    assert [event["kept"] for event in run.events("group_started")] == [0, 2]
    assert "steps 11 to 12 are trained again" in run.event("resumed")["reason"]
    for rank in (0, 2):
        why = f"rank {rank} has not saved step 12 at the fault: what is attached was changed after session.step()"
        assert len(said(run, why)) == 1


def test_error_that_all_ranks_raise_as_they_stay_is_no_refusal_of_their_number(job: StartJob) -> None:
    """New processes raise no such error."""
    run = start(job, "once", workers="2:3")
    assert run.wait() == 0
    assert [event["kept"] for event in run.events("group_started")][:3] == [0, 2, 0]
    assert run.event("round_published", round=2)["world_size"] == 2
    assert run.event("round_published", round=3)["cause"] == "crash"
    assert not said(run, "has refused to start with less than")


@pytest.mark.parametrize("place", ["before the group", "before the model"])
def test_job_that_is_stopped_while_ranks_wait_for_a_new_process(job: StartJob, place: str) -> None:
    """At once: they would answer SIGTERM only when the new process has come. What they hold is on the disk then."""
    run = start(job, place)
    run.file("stopped")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(within=20) == 128 + signal.SIGTERM
    assert [path.name for path in run.work.glob("checkpoints/r*")] == ["r1-s12"]


@pytest.mark.parametrize("others", [True, False], ids=["all", "one"])
def test_nodes_that_are_stopped_while_ranks_wait_for_a_new_process(
    nodes: Callable[[str], Nodes], tmp_path: Path, others: bool
) -> None:
    """They wait for no pause. A node without which too few remain stays for half of its time: another may come."""
    both, checkpoints = nodes("2"), tmp_path / "checkpoints"
    flags, faults = ["--checkpoint-dir", str(checkpoints)], [Fault(1, 13, "SIGKILL", 1)]
    agents = [both.agent(n, "fallback.py", "before the model", faults=faults, flags=flags, warm=True) for n in "ab"]
    waits = until(lambda: [agent for agent in agents if (agent.work / "stopped").exists()], "the new process")[0]
    holds = next(agent for agent in agents if agent is not waits)
    holds.faults = ()  # happened on the other node
    stopped = [holds, waits] if others else [holds]
    asked_at = time.monotonic()
    for agent in stopped:
        agent.process.send_signal(signal.SIGTERM)
    assert [agent.wait(within=60) for agent in stopped] == [128 + signal.SIGTERM] * len(stopped)
    assert time.monotonic() - asked_at < (10 if others else 25)
    assert [path.name for path in checkpoints.glob("r*")] == ["r1-s12"]
