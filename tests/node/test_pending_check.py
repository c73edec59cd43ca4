"""Pending jobs are checked while other jobs have the slots."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from elasticd.errors import ElasticdError
from elasticd_agent.node.api.client import AgentClient
from elasticd_agent.node.pending_check import FRESH_S, LOOK_S, MAX_REFUSALS, RETRY_S, PendingCheck
from elasticd_agent.node.records import JobResult, NodeStatus, Placement, Refusal, SlotAssignment, Submission
from elasticd_agent.node.runners.trial import TrialFailed
from elasticd_agent.node.scheduler.policy import BEHIND_OTHERS, ClusterView
from tests.node.conftest import MakeNode

SUBMISSION = Submission("llm", 2, '{"command": ["no.py"], "workdir": "/"}', 1, 1, 2, 2)
WAITS = Placement("llm", 2, (), "pending: needs 1 node with 2 free slots; a has 0 of 2 free")
NODE = NodeStatus("a", "i", 2)


class Checked:
    """A PendingCheck with answers, of which the last one is repeated."""

    def __init__(self, *answers: str | ElasticdError) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.woken = threading.Event()
        self.check = PendingCheck(self.refusal, self.woken.set)

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
            self.check.turn(view, node, 60.0, start + second)
            for thread in threading.enumerate():
                if thread.name == "elasticd-pending-check":
                    thread.join(10)
        return [(one.job, one.why) for one in self.check.refusals]


def view(submission: Submission = SUBMISSION, placement: Placement = WAITS) -> ClusterView:
    return ClusterView(submissions=(submission,), placements=(placement,))


def test_refusal_is_known_until_a_later_check_finds_none() -> None:
    it = Checked("no.py does not exist", "no.py does not exist", "")
    assert it.turns(LOOK_S, view()) == []
    assert it.turns(LOOK_S, view(), start=LOOK_S) == [("llm", "no.py does not exist")]
    assert it.woken.is_set()
    skipped = view(placement=replace(WAITS, reason="pending: no; it blocks no other job"))
    assert it.turns(RETRY_S - LOOK_S, skipped, start=2 * LOOK_S) == [("llm", "no.py does not exist")]
    assert it.asked == ["llm"]
    assert it.turns(RETRY_S, skipped, start=RETRY_S + LOOK_S) == [("llm", "no.py does not exist")]
    assert it.asked == ["llm"] * 2
    assert it.turns(100 * RETRY_S, skipped, start=2 * RETRY_S + LOOK_S) == []
    assert it.asked == ["llm"] * 3, "a job that has passed is not checked again"


def test_old_refusal_does_not_count() -> None:
    it = Checked("no.py does not exist", TrialFailed("its check ended with code -9"))
    assert it.turns(LOOK_S + FRESH_S, view()) == [("llm", "no.py does not exist")]
    assert it.turns(1, view(), start=LOOK_S + FRESH_S) == []


def test_jobs_are_checked_in_turn_and_refusals_again_before_they_are_old() -> None:
    it = Checked("no.py does not exist")
    jobs = tuple(replace(SUBMISSION, job=f"j{n}", number=n) for n in range(1, 100))
    placements = tuple(replace(WAITS, job=one.job, number=one.number, reason=BEHIND_OTHERS) for one in jobs)
    many = ClusterView(submissions=jobs, placements=(*placements[:-1], replace(WAITS, job="j99", number=99)))
    first = ["j99", *(f"j{n}" for n in range(1, MAX_REFUSALS))]
    second = (MAX_REFUSALS + 2) * LOOK_S
    it.turns(second, many)
    while second < 500:
        assert [job for job, _ in it.turns(1, many, start=second)] == first, "they do not come and go"
        second += 1
    assert set(it.asked) == set(first), "the head of the queue first"


def test_cordon_ends_a_refusal() -> None:
    it = Checked("no.py does not exist")
    assert it.turns(2 * LOOK_S, view())
    assert it.turns(2 * LOOK_S, view(), replace(NODE, state="cordoned"), start=2 * LOOK_S) == []
    assert it.turns(2 * LOOK_S, view(), start=4 * LOOK_S) == [("llm", "no.py does not exist")]


@pytest.mark.parametrize(
    ("seen", "node"),
    [
        (view(placement=replace(WAITS, previous_nodes=("b",))), NODE),
        (view(placement=replace(WAITS, refusals=(Refusal("a", "no"),))), NODE),
        (view(replace(SUBMISSION, labels=("gpu=h100",))), NODE),
        (view(), replace(NODE, slots=1)),
        (view(), replace(NODE, state="quarantined")),
        (ClusterView(submissions=(SUBMISSION,)), NODE),
    ],
    ids=["has run", "refused", "labels", "small", "quarantined", "not placed"],
)
def test_other_jobs_are_not_checked(seen: ClusterView, node: NodeStatus) -> None:
    it = Checked("no")
    assert it.turns(100, seen, node) == []
    assert it.asked == []


def test_check_that_fails_says_nothing_of_the_job() -> None:
    it = Checked(TrialFailed("its check ended with code -9"), "")
    assert it.turns(2 * LOOK_S, view()) == []
    assert it.asked == ["llm"]
    assert it.turns(RETRY_S + 2 * LOOK_S, view(), start=2 * LOOK_S) == []
    assert it.asked == ["llm", "llm"]


@pytest.mark.parametrize(
    "seen",
    [
        view(placement=replace(WAITS, assignments=(SlotAssignment("a", (0, 1)),))),
        replace(view(), results=(JobResult("llm", 2, "cancelled", 143, "", 0.0),)),
        replace(view(), submissions=()),
    ],
    ids=["starts", "ends", "is removed"],
)
def test_job_that_is_not_pending_any_more_is_not_refused(seen: ClusterView) -> None:
    it = Checked("no.py does not exist")
    assert it.turns(2 * LOOK_S, view())
    assert it.turns(1, seen, start=2 * LOOK_S) == []


@pytest.mark.system
@pytest.mark.timeout(300)
def test_job_that_cannot_run_fails_behind_one_that_does_not_end_unless_its_script_comes_in_time(node: MakeNode) -> None:
    n1 = node(slots=1, refuse_timeout="20s")
    n1.start()
    api = AgentClient(n1.root / "run" / "agent.sock")

    def reason(job: str) -> str:
        return str(api.get(f"/v1/jobs/{job}").document()["reason"])

    for job in ("endless", "nosuch", "late", "good"):
        script = f"{job}.py" if job in ("nosuch", "late") else n1.job_table("x", "ticking.py")["command"][0]
        text = f'id = "{job}"\ncommand = ["{script}"]\nworkdir = "{n1.work}"\n[env]\nWORK = "{n1.work}"\n'
        api.post("/v1/jobs", text.encode(), "application/toml").result()
    for job in ("nosuch", "late"):
        why = f"n1 would refuse it now: command: the script '{job}.py' does not exist"
        n1.until(lambda job=job, why=why: why in reason(job), f"{job} to be refused")
        assert reason(job).endswith("it blocks no other job")
    (n1.work / "late.py").write_text("print('late')")
    n1.until(
        lambda: api.get("/v1/jobs/nosuch").document()["ended_at"] is not None, "the job without a script to fail", 120
    )
    assert reason("nosuch") == (
        f"every node refused it for 20 s: n1 refused it: command: the script 'nosuch.py' does not exist in '{n1.work}'"
    )
    n1.until(lambda: "would refuse" not in reason("late"), "the job whose script came to be checked again")
    assert {job: api.get(f"/v1/jobs/{job}").document()["state"] for job in ("endless", "late", "good")} == {
        "endless": "running",
        "late": "pending",
        "good": "pending",
    }
    (n1.work / "enough").touch()
    assert n1.wait_for_exit("late", 3).outcome == "succeeded"
    assert n1.wait_for_exit("good", 4).outcome == "succeeded"
    assert n1.drain() == 0
