"""The check of the job that is next in the queue, before its slots are free.

A job that every node refuses must not hold the queue until other jobs have ended: this node makes the checks of the
job's runner (runners/trial.py) in a thread, and reports a refusal as if the runner had been started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticd.errors import ElasticdError
from elasticd_agent.config.job_file import from_json
from elasticd_agent.node.records import NodeStatus, Submission
from elasticd_agent.node.scheduler.policy import ClusterView, head_of_queue
from elasticd_agent.system.bounded_io import DeadlineExceeded

LOOK_S = 5.0
"""A job that is next in two looks is checked: most start before."""
RETRY_S = 60.0
"""After a check without an answer."""


@dataclass(eq=False, slots=True)
class HeadCheck:
    """`turn` belongs to the main loop; times are monotonic seconds."""

    refusal: Callable[[Submission], str]
    """Why this node would refuse the job. It takes seconds; raises DeadlineExceeded, ElasticdError."""
    wake: Callable[[], None]
    """Called from another thread when there is a refusal."""
    _look_at: float = 0.0
    _next: tuple[str, int] | None = None
    """The job at the head in the last look."""
    _checked: tuple[str, int] | None = None
    _check: threading.Thread | None = None
    _refused: list[tuple[Submission, str]] = field(default_factory=list)

    def turn(self, view: ClusterView, status: NodeStatus, now: float) -> tuple[Submission, str] | None:
        """A pending job that this node refuses, and why: once."""
        if self._refused:
            submission, why = self._refused.pop()
            if (submission.job, submission.number) == _key(_candidate(view, status)):
                return submission, why
        if now < self._look_at or (self._check is not None and self._check.is_alive()):
            return None
        self._look_at = now + LOOK_S
        head = _candidate(view, status)
        before, self._next = self._next, _key(head)
        if head is None:
            self._checked = None  # it is checked again after a cordon, which ends refusals
        elif before == self._next != self._checked:
            self._checked = self._next
            self._check = threading.Thread(target=self._run, args=(head, now), name="elasticd-head-check", daemon=True)
            self._check.start()
        return None

    def _run(self, submission: Submission, now: float) -> None:
        try:
            if from_json(submission.spec).upload is not None:  # it is unpacked when its runner starts
                return
            why = self.refusal(submission)
        except (DeadlineExceeded, ElasticdError, OSError):
            self._checked = None
            self._look_at = now + RETRY_S
            return
        if why:
            self._refused.append((submission, why))
            self.wake()


def _candidate(view: ClusterView, status: NodeStatus) -> Submission | None:
    """The head of the queue if this node may run it. A job that has run before waits, whatever its files are like."""
    head = head_of_queue(view)
    if head is None or status.state != "ready" or status.slots < head.min_slots:
        return None
    if not set(head.labels) <= set(status.labels):
        return None
    placement = next((p for p in view.placements if (p.job, p.number) == (head.job, head.number)), None)
    if placement is None or placement.previous_nodes or status.node in {one.node for one in placement.refusals}:
        return None
    return head


def _key(submission: Submission | None) -> tuple[str, int] | None:
    return None if submission is None else (submission.job, submission.number)
