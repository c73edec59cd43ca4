"""Submits the jobs of agent.toml, [[job]]: each once, and again only when its text there has changed.

Neither a restart of the agent nor the end of a job runs it a second time: the state directory has a list of submitted
jobs. A job that another agent has already submitted is no error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.config import job_file
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.node.runners.spawn import required_id
from elasticd_agent.node.scheduler import job_queue
from elasticd_agent.node.scheduler.policy import ClusterView
from elasticd_agent.store import Store
from elasticd_agent.system.files import replace_file

STATE_FILE = "handed-in.json"


class ConfiguredJobs:
    """`state` is the state directory. Belongs to one thread."""

    def __init__(self, state: Path) -> None:
        self._path = state / STATE_FILE
        self._submitted: dict[str, str] = {}
        self._reported_errors: set[str] = set()
        try:
            found = json.loads(self._path.read_bytes())
            self._submitted = {str(job): str(digest) for job, digest in found.items()}
        except (OSError, ValueError, AttributeError):
            pass  # the store has the submissions, too

    def submit_new(
        self, store: Store, jobs: tuple[JobFile, ...], view: ClusterView, node: str, now: float
    ) -> Iterator[str]:
        """Submit new and changed jobs; one sentence for each. Raises StoreUnavailable."""
        for job in jobs:
            try:
                name = required_id(job)
                spec = job_file.to_json(job)
                digest = hashlib.sha256(spec.encode()).hexdigest()
                if self._submitted.get(name) == digest:
                    continue
                if any(s.job == name and s.spec == spec for s in view.submissions):
                    self._mark_submitted(name, digest)
                    continue
                submission = job_queue.submit(
                    store,
                    spec,
                    job=name,
                    nodes=job.node_range,
                    slots=job.slot_range,
                    submitted_by=f"agent {node}",
                    submitted_at=now,
                    grow=job.grow != "never",
                    labels=job.node_labels,
                    priority=job.priority,
                )
                self._mark_submitted(name, digest)
                yield f"job {name} of this node's agent.toml submitted as number {submission.number}"
            except UsageError as error:
                if str(error) not in self._reported_errors:
                    self._reported_errors.add(str(error))
                    yield f"[[job]] {job.id or ''}: {error}"

    def _mark_submitted(self, name: str, digest: str) -> None:
        self._submitted[name] = digest
        try:
            replace_file(self._path, json.dumps(self._submitted).encode())
        except OSError:
            pass  # the store has the submission until its records are removed
