"""Random faults of a fleet: no slot is used twice, and in the end every job has run or is pending with a reason."""

from __future__ import annotations

from collections import Counter

import pytest

from elasticd_daemon.records import Submission
from elasticd_daemon.scheduler import job_queue as queue
from tests.daemon.fleet import ADOPT_S, LEASE_S, STEP_S, Fleet

HAPPENED: Counter[str] = Counter()


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_faults(seed: int, nodes: int) -> None:
    fleet = Fleet(100 * nodes + seed, nodes)
    for _ in range(60):
        fleet.random_fault()
        for _ in range(fleet.chance.choice((1, 2, 10, 40))):
            fleet.step()
    HAPPENED.update(fleet.counts)
    fleet.heal()
    for _ in range(int((ADOPT_S + 4 * LEASE_S) / STEP_S)):
        fleet.step()
    for _ in range(200):  # one after the other ends, until nobody runs
        view = fleet.view()
        running = [r.key for m in fleet.machines for r in m.runners]
        ended = [key for key in running if view.result(*key)]
        assert not ended, f"{ended} have ended and run on"
        for job, reason in fleet.waiting().items():
            assert "pending" in reason, f"{job}: {reason or 'nobody has looked at it'}"
        if not running:
            break
        fleet.succeed()
        for _ in range(int(12 / STEP_S)):
            fleet.step()
    left = fleet.view().unfinished()
    for wants in left:
        fit = [m for m in fleet.machines if m.slots >= wants.min_slots]
        refused = {r.node for p in fleet.view().placements if p.job == wants.job for r in p.refusals}
        assert len([m for m in fit if m.node not in refused]) < wants.min_nodes, f"{wants.job} could run"
        assert "it blocks no other job" in fleet.waiting()[wants.job]
    ended = {(e.job, e.number) for e in fleet.view().results}
    newest = {job: max(n for j, n in fleet.submitted if j == job) for job, _ in fleet.submitted}
    assert set(newest.items()) <= ended | {(s.job, s.number) for s in left}, "of every id the last run ended or waits"


def test_refused_job_is_retried_on_a_node_after_a_cordon() -> None:
    fleet = Fleet(1, 1)
    fleet.refusing.add(("llm", "n1"))
    queue.submit(fleet.memory, Submission("llm", 0, "{}", 1, 1, 1, 1))
    for _ in range(20):
        fleet.step()
    assert "n1 refused it: no such script" in fleet.waiting()["llm"]
    fleet.refusing.clear()
    for _ in range(100):
        fleet.step()
    assert fleet.waiting(), "the node is not repaired yet"
    queue.cordon(fleet.memory, "n1", False, "the path", "", 0.0)
    for _ in range(10):
        fleet.step()
    assert "n1 is cordoned: the path" in fleet.waiting()["llm"]
    queue.uncordon(fleet.memory, "n1")
    for _ in range(10):
        fleet.step()
    assert not fleet.waiting()


def test_all_faults_occurred() -> None:
    """Else the test above has tested nothing."""
    assert set(HAPPENED) == set(Fleet.EVENTS)
