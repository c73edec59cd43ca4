"""Random histories of a job whose store is a process of an agent: real members take over, no two groups train.

The invariants of test_cluster_histories.py, and benchmarks/history.py, which knows nothing of stores. A group that is
left behind trains at most until its next collective: here, a cut in the network stops it at once.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.history import breaches
from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous.succession import Succession
from elasticd_agent.rendezvous.view import Requirements
from tests.rendezvous.test_cluster_histories import CheckedCluster, Step, all_is_well, happen, living
from tests.scenarios.hosting import HostingCluster
from tests.scenarios.node import Node

NAMES = "abcd"
AWAY_S = 30.0
"""After this without a store, or without enough of the last round's members, an agent exits with 75."""


class CheckedHosting(CheckedCluster, HostingCluster):
    """A HostingCluster that checks every transition, and every step that is made."""

    def train(self, round: Round) -> None:
        super().train(round)
        trains = [r for r in self.rounds.values() if not r.terminal and self._trains(r)]
        assert len(trains) <= 1, f"rounds {[r.number for r in trains]} train at once"


def cluster(began: int, fewest: int = 1) -> CheckedHosting:
    made = CheckedHosting(Requirements(1, 1, fewest, 4), Policy(max_restarts=50, store_away_s=AWAY_S), True)
    for label in NAMES[:began]:
        made.start(label)
    made.wait(8.0)
    return made


def split(c: CheckedHosting, side: str) -> None:
    for one in side:
        for other in c.nodes:
            if other not in side:
                c.cut(one, peer=other)


def heal(c: CheckedHosting) -> None:
    for label in c.nodes:
        c.heal(label)


def newest(c: CheckedHosting) -> str:
    """The members of the newest Round that trained in the last second."""
    number = max(n for n, at in c.trained.items() if at > c.now - 1.0)
    return "".join(sorted(m.node for m in c.rounds[number].members))


def left(node: Node) -> int | None:
    return None if node.left is None else node.left.exit_code


def test_host_is_killed() -> None:
    c = cluster(3)
    c.kill("a")
    c.wait(3.0)
    assert newest(c) == "bc"
    c.start("a")  # it hosts an empty store at the endpoint, and is shown the way
    c.wait(15.0)
    assert newest(c) == "abc"
    c.finish()
    c.wait(15.0)
    assert [left(c.nodes[n]) for n in "abc"] == [0, 0, 0]


def test_only_the_store_is_lost() -> None:
    """Nobody reaches the host's store, and all workers train on: the round continues in another one."""
    c = cluster(3)
    lost = c.lives[c.nodes["a"].store.term]
    lost.over = True
    c.wait(30.0)
    assert newest(c) == "abc"
    assert [n.number for n in c.rounds.values()] == [1]
    assert len({c.nodes[n].store.term for n in "abc"} - {lost.term}) == 1


@pytest.mark.parametrize(("side", "expected"), [("a", "bcd"), ("ab", "ab"), ("abc", "abc"), ("bd", "ac")])
def test_one_side_of_a_partition_continues(side: str, expected: str) -> None:
    c = cluster(4)
    split(c, side)
    c.wait(25.0)
    assert newest(c) == expected
    heal(c)
    c.wait(20.0)
    assert newest(c) == "abcd"


@pytest.mark.parametrize("fewest", [1, 2])
def test_minority_exits_with_requeue(fewest: int) -> None:
    c = cluster(4, fewest)
    split(c, "a")
    c.wait(AWAY_S + 15.0)
    assert newest(c) == "bcd"
    assert left(c.nodes["a"]) == 75


def test_one_of_two_exits_with_requeue() -> None:
    c = cluster(2)
    c.kill("a")
    c.wait(AWAY_S + 10.0)
    assert left(c.nodes["b"]) == 75


def test_all_but_the_host_are_asked_to_leave() -> None:
    c = cluster(3)
    c.stop("b")
    c.stop("c")
    c.wait(20.0)
    assert newest(c) == "a"


def test_host_is_back_as_the_others_have_begun_to_move() -> None:
    """b hosts a store, and c's is back before it is there: b goes back, too."""
    c = cluster(3)
    first = c.nodes["a"].store.term
    c.cut("b", store=True)
    c.nodes["c"].says = c.nodes["c"].says[0], True, False  # c has lost the store, too, for a moment
    while not c.nodes["b"].store.hosts:
        c.wait(0.1)
    c.heal("b")
    c.wait(10.0)
    assert {n.store.term for n in c.nodes.values()} == {first}
    assert newest(c) == "abc"
    assert list(c.rounds) == [1]


@pytest.mark.parametrize("seconds", [1.0, 2.5, 4.5])
def test_host_that_stands_still_for_a_moment_stays_the_host(seconds: float) -> None:
    """SIGSTOP, or a machine so busy that nothing on it answers: shorter than a lease and two renewals."""
    c = cluster(3)
    first = c.nodes["a"].store.term
    c.freeze("a")
    c.wait(seconds)
    c.thaw("a")
    c.wait(20.0)
    assert {n.store.term for n in c.nodes.values()} == {first}
    assert list(c.rounds) == [1]
    assert newest(c) == "abc"


def test_half_of_the_nodes_are_drained_at_once() -> None:
    c = cluster(4)
    first = c.nodes["a"].store.term
    c.stop("b")
    c.stop("c")
    c.wait(20.0)
    assert newest(c) == "ad"
    assert {c.nodes[n].store.term for n in "ad"} == {first}


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.0, 3.0])
def test_newcomer_during_a_take_over(delay_s: float) -> None:
    """It finds nobody at the endpoint until an agent is started there; the others continue without it meanwhile."""
    c = cluster(3)
    c.kill("a")
    c.wait(delay_s)
    c.start("d")
    c.wait(8.0)
    assert newest(c) == "bc"
    c.start("a")
    c.wait(25.0)
    assert newest(c) == "abcd"


def test_without_the_quorum_two_groups_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Succession, "_await_quorum", lambda self, following, now: None)
    c = cluster(4)
    split(c, "a")
    with pytest.raises(AssertionError, match=r"invariant 2|train at once"):
        c.wait(30.0)


acts = st.builds(
    Step,
    kind=st.sampled_from(
        ("start", "kill", "vanish", "freeze", "thaw", "crash", "stop", "cut", "cut from one", "heal", "hints",
         "dies before", "dies after", "answer lost")
    ),
    who=st.integers(0, len(NAMES) - 1),
    n=st.integers(1, 12),
    wait_s=st.sampled_from((0.0, 0.02, 0.2, 1.3, 3.7, 12.0)),
)  # fmt: skip


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(began=st.integers(2, 4), fewest=st.integers(1, 2), acts=st.lists(acts, max_size=10))
def test_random_histories(began: int, fewest: int, acts: list[Step]) -> None:
    c = cluster(began, fewest)
    for act in acts:
        happen(c, act)
    all_is_well(c)
    for _ in range(4):
        c.wait(AWAY_S + 20.0)
        for label in NAMES:
            if not ended(c) and (label not in c.nodes or c.nodes[label].dead or c.nodes[label].left):
                c.start(label)
    c.wait(60.0)
    assert breaches(c.history) == []
    assert ended(c) or newest(c), [(n.label, n.phase) for n in living(c)]


def ended(c: CheckedHosting) -> bool:
    return any(r.outcome in ("succeeded", "failed") for r in c.rounds.values())
