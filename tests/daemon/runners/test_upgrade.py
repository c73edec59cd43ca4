"""Upgrades under running jobs: every file of the installation moves; evidence, verdict and recovery still work."""

from __future__ import annotations

import pytest

from tests.daemon.conftest import MakeNode
from tests.faults.job import Event, until
from tests.faults.moved_version import hang_a_rank, install, kill_owner, upgrade


@pytest.mark.system
def test_runner_of_an_agent(node: MakeNode) -> None:
    """The agent upgrades itself in place; a job that starts later uses the new version beside the old one."""
    n1 = node(slots=4)
    site = install(n1.root / "site")
    n1.path = [str(site)]
    env = {"PYTHONPATH": str(site)}
    n1.job("old", "train.py", "1000000", workers=2, env=env)
    n1.start()
    n1.wait_for_step(20)
    upgrade(site)
    n1.upgrade()
    n1.wait_for_log("and adopts 1 runner")

    def events(kind: str) -> list[Event]:
        return n1.job_events("old", kind)

    hang_a_rank(n1.workers("old")[1], events, n1.files("old").logs, n1.diagnostics)
    second = until(lambda: n1.job_events("old", "first_step", round=2), n1.diagnostics)
    assert second
    kill_owner(n1.runner("old"))
    until(lambda: n1.job_events("old", "first_step", round=3), n1.diagnostics)

    n1.job("new", "train.py", "1000000", workers=2, env=env | {"WORK": str(n1.root)})
    (n1.root / "faults.json").write_text("[]")
    n1.submit_jobs()
    until(lambda: n1.job_events("new", "first_step", number=2), n1.diagnostics)
    versions = n1.state / "versions"
    assert len(list(versions.iterdir())) == 2
    assert n1.drain() == 0
    n1.assert_gone()
    n1.start()
    assert len(list(versions.iterdir())) == 1, "no process uses the old version"
    assert n1.drain() == 0
