"""The check of the job that is next in the queue, before its slots are free.

A job that every node refuses must not hold the queue until other jobs have ended: this node makes the checks of the
job's runner (runners/trial.py) in a thread, and its status names the jobs that it would refuse. They block no other
job, and do not fail: a job before them may make the script. They start where slots are free, and the runner decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticd.errors import ElasticdError
from elasticd_agent.config.job_file import from_json
from elasticd_agent.node.records import NodeStatus, RunnerStatus, Submission
from elasticd_agent.node.scheduler.policy import ClusterView, head_of_queue
from elasticd_agent.system.bounded_io import DeadlineExceeded

LOOK_S = 5.0
"""A job that is next in two looks is checked: most start before."""
RETRY_S = 60.0
"""After a refusal, and after a check without an answer."""
MAX_FOUND = 50
"""Of this node's status. The next job that the node would refuse holds the queue."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    submission: Submission
    why: str
    at: float
    """When the check began."""


@dataclass(eq=False, slots=True)
class HeadCheck:
    """`turn` and `found` belong to the main loop; times are monotonic seconds."""

    refusal: Callable[[Submission], str]
    """Why this node would refuse the job. It takes seconds; raises DeadlineExceeded, ElasticdError."""
    wake: Callable[[], None]
    """Called from another thread when there is an answer."""
    _look_at: float = 0.0
    _next: tuple[str, int] | None = None
    """The job at the head in the last look."""
    _checked: tuple[str, int] | None = None
    _check: threading.Thread | None = None
    _answers: list[_Refusal] = field(default_factory=list)
    _found: dict[tuple[str, int], _Refusal] = field(default_factory=dict)

    @property
    def found(self) -> tuple[RunnerStatus, ...]:
        """The pending jobs that this node would refuse, and why."""
        return tuple(RunnerStatus(*key, (), "refused", one.why) for key, one in self._found.items())

    def turn(self, view: ClusterView, status: NodeStatus, now: float) -> None:
        while self._answers:
            answer = self._answers.pop()
            self._found[_key(answer.submission)] = answer
        self._found = {k: one for k, one in self._found.items() if one.why and _waits(view, status, one.submission)}
        if now < self._look_at or (self._check is not None and self._check.is_alive()):
            return
        self._look_at = now + LOOK_S
        due = next((one.submission for one in self._found.values() if now >= one.at + RETRY_S), None)
        due = self._head(view, status) or due
        if due is not None:
            self._check = threading.Thread(target=self._run, args=(due, now), name="elasticd-head-check", daemon=True)
            self._check.start()

    def _head(self, view: ClusterView, status: NodeStatus) -> Submission | None:
        """The head of the queue if it is to be checked."""
        head = head_of_queue(view)
        if head is None or len(self._found) >= MAX_FOUND or not _waits(view, status, head):
            self._next = self._checked = None  # it is checked again after a cordon, which ends refusals
            return None
        before, self._next = self._next, _key(head)
        if before != self._next or self._checked == self._next:
            return None
        self._checked = self._next
        return head

    def _run(self, submission: Submission, now: float) -> None:
        try:
            if from_json(submission.spec).upload is not None:  # it is unpacked when its runner starts
                return
            why = self.refusal(submission)
        except (DeadlineExceeded, ElasticdError, OSError):
            self._checked = None
            self._look_at = now + RETRY_S
            return
        self._answers.append(_Refusal(submission, why, now))
        self.wake()


def _waits(view: ClusterView, status: NodeStatus, job: Submission) -> bool:
    """Whether it is pending, and may run on this node. One that has run before waits, whatever its files are like."""
    if status.state != "ready" or status.slots < job.min_slots or not set(job.labels) <= set(status.labels):
        return False
    if job not in view.submissions or view.result(*_key(job)) is not None:
        return False
    placement = next((p for p in view.placements if (p.job, p.number) == _key(job)), None)
    if placement is None or placement.assignments or placement.previous_nodes:
        return False
    return status.node not in {one.node for one in placement.refusals}


def _key(submission: Submission) -> tuple[str, int]:
    return submission.job, submission.number
