"""The job that is next in the queue is checked while other jobs have the slots."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from elasticd.errors import ElasticdError
from elasticd_agent.node.api.client import AgentClient
from elasticd_agent.node.head_check import LOOK_S, RETRY_S, HeadCheck
from elasticd_agent.node.records import NodeStatus, Placement, Refusal, SlotAssignment, Submission
from elasticd_agent.node.runners.trial import TrialFailed
from elasticd_agent.node.scheduler.policy import ClusterView
from tests.node.conftest import MakeNode

SUBMISSION = Submission("llm", 2, '{"command": ["no.py"], "workdir": "/"}', 1, 1, 2, 2)
WAITS = Placement("llm", 2, (), "pending: needs 1 node with 2 free slots; a has 0 of 2 free")
NODE = NodeStatus("a", "i", 2)


class Checked:
    """A HeadCheck with answers, of which the last one is repeated."""

    def __init__(self, *answers: str | ElasticdError) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.woken = threading.Event()
        self.check = HeadCheck(self.refusal, self.woken.set)

    def refusal(self, submission: Submission) -> str:
        self.asked.append(submission.job)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ElasticdError):
            raise answer
        return answer

    def turns(
        self, seconds: float, view: ClusterView, node: NodeStatus = NODE, start: float = 0.0
    ) -> list[tuple[str, str]]:
        """What the node's status says afterwards."""
        for second in range(int(seconds)):
            self.check.turn(view, node, start + second)
            for thread in threading.enumerate():
                if thread.name == "elasticd-head-check":
                    thread.join(10)
        return [(one.job, one.why) for one in self.check.found]


def view(submission: Submission = SUBMISSION, placement: Placement = WAITS) -> ClusterView:
    return ClusterView(submissions=(submission,), placements=(placement,))


def test_refusal_of_the_next_job_is_known_until_a_later_check_finds_none() -> None:
    it = Checked("no.py does not exist", "no.py does not exist", "")
    assert it.turns(2 * LOOK_S, view()) == [("llm", "no.py does not exist")]
    assert it.woken.is_set()
    skipped = view(placement=replace(WAITS, reason="pending: no; it blocks no other job"))
    assert it.turns(RETRY_S - LOOK_S, skipped, start=2 * LOOK_S) == [("llm", "no.py does not exist")]
    assert it.asked == ["llm"]
    assert it.turns(RETRY_S, skipped, start=RETRY_S + LOOK_S) == [("llm", "no.py does not exist")]
    assert it.turns(RETRY_S, skipped, start=2 * RETRY_S + LOOK_S) == []
    assert it.asked == ["llm"] * 3


def test_cordon_ends_a_refusal() -> None:
    it = Checked("no.py does not exist")
    assert it.turns(2 * LOOK_S, view())
    assert it.turns(2 * LOOK_S, view(), replace(NODE, state="cordoned"), start=100) == []
    assert it.turns(2 * LOOK_S, view(), start=200) == [("llm", "no.py does not exist")]


@pytest.mark.parametrize(
    ("seen", "node"),
    [
        (view(placement=replace(WAITS, reason="pending behind other jobs")), NODE),
        (view(placement=replace(WAITS, reason="pending: no; it blocks no other job")), NODE),
        (view(placement=replace(WAITS, previous_nodes=("b",))), NODE),
        (view(placement=replace(WAITS, refusals=(Refusal("a", "no"),))), NODE),
        (view(replace(SUBMISSION, labels=("gpu=h100",))), NODE),
        (view(replace(SUBMISSION, spec='{"command": ["a.py"], "workdir": "/", "upload": "' + "a" * 64 + '"}')), NODE),
        (view(), replace(NODE, slots=1)),
        (view(), replace(NODE, state="quarantined")),
        (ClusterView(submissions=(SUBMISSION,)), NODE),
    ],
    ids=["behind", "impossible", "has run", "refused", "labels", "upload", "small", "quarantined", "not placed"],
)
def test_other_jobs_are_not_checked(seen: ClusterView, node: NodeStatus) -> None:
    it = Checked("no")
    assert it.turns(100, seen, node) == []
    assert it.asked == []


def test_check_that_fails_says_nothing_of_the_job() -> None:
    it = Checked(TrialFailed("its check ended with code -9"), "")
    assert it.turns(RETRY_S + 4 * LOOK_S, view()) == []
    assert it.asked == ["llm", "llm"]


@pytest.mark.parametrize("ended", [False, True])
def test_job_that_starts_or_ends_meanwhile_is_not_refused(ended: bool) -> None:
    it = Checked("no.py does not exist")
    assert it.turns(2 * LOOK_S, view())
    started = view(placement=replace(WAITS, assignments=(SlotAssignment("a", (0, 1)),)))
    assert it.turns(1, ClusterView() if ended else started, start=100) == []


MAKES = """
import os, time
from pathlib import Path
work = Path(os.environ["WORK"])
(work / "making").touch()
while not (work / "enough").exists():
    time.sleep(0.05)
(work / "made.py").write_text("print('made')")
"""


@pytest.mark.system
def test_job_that_cannot_run_holds_up_nobody_and_may_be_repaired_by_the_job_before_it(node: MakeNode) -> None:
    n1 = node(slots=1, refuse_timeout="2s")
    (n1.work / "makes.py").write_text(MAKES)
    n1.start()
    api = AgentClient(n1.root / "run" / "agent.sock")
    for job in ("makes", "nosuch", "made", "good"):
        script = n1.job_table("x", "ticking.py")["command"][0] if job == "good" else f"{job}.py"
        text = f'id = "{job}"\ncommand = ["{script}"]\nworkdir = "{n1.work}"\n[env]\nWORK = "{n1.work}"\n'
        api.post("/v1/jobs", text.encode(), "application/toml").result()

    def reason(job: str) -> str:
        return str(api.get(f"/v1/jobs/{job}").document()["reason"])

    n1.until((n1.work / "making").exists, "the first job to run")
    for job in ("nosuch", "made"):
        n1.until(lambda job=job: reason(job).endswith("it blocks no other job"), f"{job} to be refused")
        assert f"n1 would refuse it now: command: the script '{job}.py' does not exist" in reason(job)
    n1.until(lambda: reason("good").startswith("pending: needs 1 node"), "the next job to be next")
    n1.upgrade()
    n1.until(lambda: reason("good").startswith("pending: needs 1 node"), "the next job to be next again")
    assert not [job for job in ("nosuch", "made") if api.get(f"/v1/jobs/{job}").document()["ended_at"] is not None]
    (n1.work / "enough").touch()
    assert n1.wait_for_exit("made", 3).outcome == "succeeded"
    assert n1.wait_for_exit("good", 4).outcome == "succeeded"
    n1.until(lambda: api.get("/v1/jobs/nosuch").document()["ended_at"] is not None, "the other one to fail")
    assert reason("nosuch") == (
        f"every node refused it for 2 s: n1 refused it: command: the script 'nosuch.py' does not exist in '{n1.work}'"
    )
    assert n1.drain() == 0
