"""`job(script, *args, ...)` starts a Job in a directory of its own, of which nothing outlives the test.

`nodes("1:2")` makes Nodes: several agents of one such job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.etcd import EtcdServers, etcd_servers
from tests.faults.job import Job
from tests.faults.nodes import Nodes


class StartJob(Protocol):
    def __call__(self, script: str | Path, *args: str, work: Path | None = None, **how: Any) -> Job: ...


@pytest.fixture
def job(tmp_path: Path) -> Iterator[StartJob]:
    started: list[Job] = []

    def start(script: str | Path, *args: str, work: Path | None = None, **how: Any) -> Job:
        started.append(Job(work or tmp_path / f"job-{len(started)}", script, *args, **how))
        return started[-1]

    yield start
    for job in started:
        print(job.report())  # pytest shows it where the test has failed
        job.end()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServers]:
    with etcd_servers() as servers:
        yield servers


@pytest.fixture
def nodes(job: StartJob, etcd: EtcdServers, request: pytest.FixtureRequest) -> Callable[[str], Nodes]:
    """Each test's job has a name of its own: what one leaves in the store is not another one's."""
    return lambda nnodes: Nodes(job, etcd, nnodes, job=request.node.name)
