"""The fault that ended a round, in one word, and the node at fault: once, as soon as it is settled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import StopRequested
from elasticd_agent.model.records import Failure, Member, NodeRecord, Round
from elasticd_agent.rendezvous.faults import Fault, FaultTracker, find_faults
from elasticd_agent.rendezvous.plan import ROOT_CAUSE_WAIT_S
from elasticd_agent.rendezvous.view import PresentNode, Requirements, View

POLICY = Policy()
NOW = 1000.0


def failed(node: str, kind: str = "crash", *culprits: tuple[int, int]) -> Failure:
    return Failure(3, node, kind, culprits, "why")


def running(*failures: Failure, nodes: str = "abc", **more: object) -> View:
    """Round 3 of a, b and c, begun long ago; `nodes` have a record."""
    members = tuple(Member(node, "i", (0,)) for node in "abc")
    records = tuple(
        PresentNode(NodeRecord(node, "i", f"{node}:1", (0,), seen_round=3, ready_round=3, stepped_round=3), 0.0)
        for node in nodes
    )
    view = View(Round(3, members), records, Requirements(1, 1, 2, 3), failures=failures, failure_seen_at=NOW - 1.0)
    return replace(view, store_up_since=0.0, **more)  # type: ignore[arg-type]


CRASH = failed("b", "crash", (1, 0))
VICTIM = failed("a")


@pytest.mark.parametrize(
    ("view", "found"),
    [
        (View(None, (), Requirements(1, 1)), []),
        (running(), []),
        (running(CRASH), [Fault("crash", "b")]),
        (running(VICTIM, CRASH), [Fault("crash", "b")]),
        (running(failed("b", "hung", (1, 0)), failed("c", "hung", (2, 0))), [Fault("hung", "b")]),
        (running(failed("a", "hung")), [Fault("hung", "")]),
        (running(failed("a", "store_lost")), [Fault("store_lost", "")]),
        (running(failed("c", "start_failed")), [Fault("start_failed", "c")]),
        (running(failed("c", "user_error", (2, 0))), [Fault("crash", "c")]),
        # Nobody is to blame: whoever has lost a peer may only not have heard yet of what befell that one.
        (running(VICTIM), [Fault("crash", "")]),
        (replace(running(VICTIM), failure_seen_at=NOW - ROOT_CAUSE_WAIT_S / 2), []),
        (replace(running(VICTIM, failed("b"), failed("c")), failure_seen_at=NOW), [Fault("crash", "")]),
        (replace(running(CRASH), failure_seen_at=NOW), [Fault("crash", "b")]),
        # A node that is gone, as its agent's port says or its lease.
        (running(VICTIM, probe_results=(("c", "refused"),)), [Fault("node_lost", "c")]),
        (
            running(probe_results=(("b", "refused"), ("c", "refused"))),
            [Fault("node_lost", "b"), Fault("node_lost", "c")],
        ),
        (running(nodes="ab", absent_since=(("c", 0.0),)), [Fault("node_lost", "c")]),
        (running(VICTIM, nodes="ab", absent_since=(("c", NOW),)), []),
        # Who crashed is to blame for what the others lost by it.
        (running(CRASH, probe_results=(("c", "refused"),)), [Fault("crash", "b")]),
        # No faults: somebody asked for it, or all is done.
        (running(CRASH, stop=StopRequested("SIGTERM", 143, 1.0)), []),
        (running(probe_results=(("c", "refused"),), done=frozenset("abc")), []),
        (replace(running(CRASH), current=Round(4, (), outcome="failed", exit_code=1)), []),
    ],
)
def test_find_faults(view: View, found: list[Fault]) -> None:
    assert list(find_faults(view, POLICY, NOW)) == found


def test_fault_log_reports_each_fault_once() -> None:
    """A later failure of the round is a consequence of the first; a node that is lost as well is a fault of its own."""
    log = FaultTracker(POLICY)
    assert log.take_new(running(CRASH), NOW) == [(3, Fault("crash", "b"))]
    for view in (running(CRASH), running(failed("a", "crash", (0, 0)), CRASH)):
        assert log.take_new(view, NOW) == []
    lost = running(probe_results=(("b", "refused"), ("c", "refused")))
    assert log.take_new(lost, NOW) == [(3, Fault("node_lost", "c"))]
    later = running(replace(CRASH, round=4))
    assert later.current is not None
    next_round = replace(later, current=replace(later.current, number=4))
    assert log.take_new(next_round, NOW) == [(4, Fault("crash", "b"))]
