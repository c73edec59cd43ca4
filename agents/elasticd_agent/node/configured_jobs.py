"""Hands in the jobs of agent.toml, [[job]]: each once, and again only when it is written differently there.

It exists so that neither a restart of the daemon nor the end of a job runs it a second time. What was handed in is
remembered in the state directory; that another daemon has handed in the same job is no error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.config import job_file as jobfile
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.node.runners.spec import replace_file
from elasticd_agent.node.runners.spec_builder import wanted
from elasticd_agent.node.scheduler import job_queue as queue
from elasticd_agent.node.scheduler.policy import View
from elasticd_agent.store import Store

FILE = "handed-in.json"


class HandedIn:
    """`state` is the state directory. Belongs to one thread."""

    def __init__(self, state: Path) -> None:
        self._path = state / FILE
        self._known: dict[str, str] = {}
        self._said: set[str] = set()
        try:
            found = json.loads(self._path.read_bytes())
            self._known = {str(job): str(digest) for job, digest in found.items()}
        except (OSError, ValueError, AttributeError):
            pass  # the store knows, too

    def turn(self, store: Store, jobs: tuple[JobFile, ...], view: View, node: str, at: float) -> Iterator[str]:
        """Hand in what is new; says so. Raises StoreUnavailable."""
        for job in jobs:
            try:
                name = wanted(job)
                spec = jobfile.to_json(job)
                digest = hashlib.sha256(spec.encode()).hexdigest()
                if self._known.get(name) == digest:
                    continue
                if any(s.job == name and s.spec == spec for s in view.submissions):
                    self._remember(name, digest)
                    continue
                made = queue.submit(
                    store,
                    spec,
                    job=name,
                    nodes=job.nodes_wanted,
                    slots=job.slots_wanted,
                    by=f"agent {node}",
                    at=at,
                    grow=job.grow != "never",
                )
                self._remember(name, digest)
                yield f"job {name} of this node's agent.toml was handed in as number {made.number}"
            except UsageError as error:
                if str(error) not in self._said:
                    self._said.add(str(error))
                    yield f"[[job]] {job.id or ''}: {error}"

    def _remember(self, name: str, digest: str) -> None:
        self._known[name] = digest
        try:
            replace_file(self._path, json.dumps(self._known).encode())
        except OSError:
            pass  # the store knows it for as long as its records are kept
