"""The check of pending jobs, before slots are free for them.

A job whose script does not exist must neither hold the queue until other jobs have ended, nor be found out only then.
This node makes the checks of a pending job's runner (runners/trial.py) in a thread, and its status has its refusals.
The scheduler skips a job that every node would refuse, and ends it as failed if that stays so for `refuse_timeout`.
No refusal in the status is older than three quarters of that time: a script that is put in place meanwhile counts. A
job that has passed once is not checked again: file servers that are away for a while end no job that has waited.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from elasticd.errors import ElasticdError
from elasticd_agent.node.records import NodeStatus, RunnerStatus, Submission
from elasticd_agent.node.scheduler.policy import ClusterView, head_of_queue
from elasticd_agent.system.bounded_io import DeadlineExceeded

LOOK_S = 5.0
"""One job is checked in this time, if it was pending at the look before, too: most start before."""
RETRY_S = 20.0
"""After a refusal, and after a check without an answer."""
FRESH_S = 45.0
"""How long a refusal counts after the beginning of its check. All three shrink with a `refuse_timeout` below 60 s."""
MAX_REFUSALS = 6
"""So many are checked again in time: 6 * LOOK_S < FRESH_S. Further jobs are checked after them."""
MAX_PENDING = 50
"""The jobs at the front of the queue that are checked."""

_Key: TypeAlias = "tuple[str, int]"


@dataclass(eq=False, slots=True)
class PendingCheck:
    """`turn` and `refusals` belong to the main loop; times are monotonic seconds."""

    refusal: Callable[[Submission], str]
    """Why this node would refuse the job. It takes seconds; raises DeadlineExceeded, ElasticdError."""
    wake: Callable[[], None]
    """Called from another thread when there is an answer."""
    _look_at: float = 0.0
    _due: dict[_Key, float] = field(default_factory=dict)
    """When each job is to be checked; never again: infinity."""
    _found: dict[_Key, tuple[str, float]] = field(default_factory=dict)
    """Refusals: why, and when the check began."""
    _check: threading.Thread | None = None
    _answers: list[tuple[_Key, float, str | None]] = field(default_factory=list)
    """Of checks: the job, when the check began, and the refusal; None: no answer."""

    @property
    def refusals(self) -> tuple[RunnerStatus, ...]:
        """The pending jobs that this node would refuse, and why."""
        return tuple(RunnerStatus(*key, (), "refused", why) for key, (why, _) in self._found.items())

    def turn(self, view: ClusterView, status: NodeStatus, refuse_timeout_s: float, now: float) -> None:
        unit = min(1.0, refuse_timeout_s / 60)
        while self._answers:
            key, at, why = self._answers.pop()
            self._due[key] = math.inf if why == "" else now + RETRY_S * unit
            if why is not None:
                self._found[key] = why, at
        self._found = {key: (why, at) for key, (why, at) in self._found.items() if why and now < at + FRESH_S * unit}
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S * unit
        pending = {_key(job): job for job in islice(_pending(view, status), MAX_PENDING)}
        self._due = {key: self._due.get(key, self._look_at) for key in pending}
        self._found = {key: found for key, found in self._found.items() if key in pending}
        if self._check is not None and self._check.is_alive():
            return
        full = len(self._found) >= MAX_REFUSALS
        due = [key for key in pending if self._due[key] <= now and (key in self._found or not full)]
        if due:
            head = next(iter(pending))
            job = pending[min(due, key=lambda key: (key != head, self._due[key]))]
            self._check = threading.Thread(
                target=self._run, args=(job, now), name="elasticd-pending-check", daemon=True
            )
            self._check.start()

    def _run(self, submission: Submission, now: float) -> None:
        why: str | None
        try:
            why = self.refusal(submission)
        except (DeadlineExceeded, ElasticdError, OSError):
            why = None
        self._answers.append((_key(submission), now, why))
        self.wake()


def _pending(view: ClusterView, status: NodeStatus) -> Iterator[Submission]:
    """The jobs that wait and may run on this node, the head of the queue first. One that has run before waits, whatever
    its files are like.
    """
    if status.state != "ready":
        return
    placements = {(one.job, one.number): one for one in view.placements}
    head = head_of_queue(view)
    for job in (*(() if head is None else (head,)), *view.unfinished()):
        placement = placements.get(_key(job))
        if placement is None or placement.assignments or placement.previous_nodes:
            continue
        able = status.slots >= job.min_slots and set(job.labels) <= set(status.labels)
        if able and status.node not in {one.node for one in placement.refusals}:
            yield job


def _key(submission: Submission) -> _Key:
    return submission.job, submission.number
