"""The job that is next in the queue is checked while other jobs have the slots."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from elasticd.errors import ElasticdError
from elasticd_agent.node.api.client import AgentClient
from elasticd_agent.node.head_check import LOOK_S, RETRY_S, HeadCheck
from elasticd_agent.node.records import NodeStatus, Placement, Refusal, Submission
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
    ) -> list[tuple[Submission, str]]:
        found = []
        for second in range(int(seconds)):
            if refused := self.check.turn(view, node, start + second):
                found.append(refused)
            for thread in threading.enumerate():
                if thread.name == "elasticd-head-check":
                    thread.join(10)
        return found


def view(submission: Submission = SUBMISSION, placement: Placement = WAITS) -> ClusterView:
    return ClusterView(submissions=(submission,), placements=(placement,))


def test_refusal_of_the_next_job_is_found_once() -> None:
    it = Checked("no.py does not exist")
    assert it.turns(3 * LOOK_S, view()) == [(SUBMISSION, "no.py does not exist")]
    assert it.woken.is_set()
    assert it.turns(100, view(), start=100) == []
    assert it.asked == ["llm"]
    cordoned = replace(NODE, state="cordoned")
    assert it.turns(10, view(), cordoned, start=200) == []
    assert it.turns(20, view(), start=300) == [(SUBMISSION, "no.py does not exist")], "the cordon ended the refusal"


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


def test_job_that_starts_meanwhile_is_not_refused() -> None:
    it = Checked("no.py does not exist")
    it.turns(LOOK_S + 1, view())
    assert it.woken.is_set()
    assert it.turns(100, ClusterView(), start=100) == []


@pytest.mark.system
def test_job_that_cannot_run_does_not_hold_the_queue(node: MakeNode) -> None:
    n1 = node(slots=1)
    n1.job("long", "ticking.py", workers=1)
    n1.start()
    n1.workers("long")
    api = AgentClient(n1.root / "run" / "agent.sock")
    for job, script in (("nosuch", "/nosuch.py"), ("good", n1.job_table("x", "ticking.py")["command"][0])):
        text = f'id = "{job}"\ncommand = ["{script}"]\nworkdir = "{n1.work}"\n[env]\nWORK = "{n1.work}"\n'
        api.post("/v1/jobs", text.encode(), "application/toml").result()

    def reason(job: str) -> str:
        return str(api.get(f"/v1/jobs/{job}").document()["reason"])

    n1.until(lambda: "behind nosuch" in reason("good"), "the job that cannot run to be next")
    n1.until(lambda: reason("nosuch").endswith("it blocks no other job"), "the refusal of a busy node")
    assert "n1 refused it: command: the script '/nosuch.py' does not exist" in reason("nosuch")
    n1.until(lambda: reason("good").startswith("pending: needs 1 node"), "the next job to be next")
    n1.upgrade()
    (n1.work / "enough").touch()
    assert n1.wait_for_exit("good", 3).outcome == "succeeded"
    assert [event["name"] for event in n1.events("runner_started")] == ["long", "good"]
    assert n1.drain() == 0
