"""The members that continue where some do not reach each other: `largest_connected`, and its use by `membership`."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Exclusion, Failure, Member, NodeRecord, Round
from elasticd_agent.rendezvous.membership import joiners, largest_connected, losses, select_members
from elasticd_agent.rendezvous.view import PresentNode, Requirements, View

POLICY, NOW = Policy(), 1000.0
NAMES = "abcdefgh"
pairs = st.sampled_from([frozenset(pair) for pair in combinations(NAMES, 2)])


def largest(nodes: str, cuts: set[frozenset[str]]) -> int:
    """By trying all."""
    sizes = range(len(nodes), 0, -1)
    return next(n for n in sizes if any(not any(map(cuts.__contains__, _pairs(s))) for s in combinations(nodes, n)))


def _pairs(nodes: tuple[str, ...]) -> list[frozenset[str]]:
    return [frozenset(pair) for pair in combinations(nodes, 2)]


@settings(max_examples=300)
@given(st.integers(1, len(NAMES)), st.sets(pairs, max_size=20))
def test_largest_connected_prefers_the_first_node(count: int, cuts: set[frozenset[str]]) -> None:
    nodes = NAMES[:count]
    cuts = {pair for pair in cuts if pair <= set(nodes)}
    kept = largest_connected(nodes, cuts)
    assert kept == [n for n in nodes if n in kept], "in their order"
    assert not any(pair <= set(kept) for pair in cuts)
    assert len(kept) == largest(nodes, cuts)
    without_first = {pair for pair in cuts if nodes[0] not in pair}
    friends = [n for n in nodes[1:] if frozenset((nodes[0], n)) not in cuts]
    with_first = 1 + (largest("".join(friends), without_first) if friends else 0)
    assert (nodes[0] in kept) == (with_first == len(kept))
    assert largest_connected(nodes, sorted(cuts, key=sorted, reverse=True)) == kept, "whoever is asked says the same"


def test_largest_connected_is_no_greedy_choice() -> None:
    """Without the node of most cuts, and so on, two nodes would be left."""
    cuts = {frozenset(pair) for pair in ["AB", "AC", "AD", "AE", "BC", "BF", "CD", "CG", "DE", "EF", "EG", "FG"]}
    assert largest_connected("ABCDEFG", cuts) == ["B", "D", "G"]


def test_largest_connected_is_bounded_for_many_cuts() -> None:
    """The search is NP-hard: with hundreds of partitioned nodes it is cut short."""
    nodes = [f"n{i:03}" for i in range(300)]
    halves = {frozenset((a, b)) for a in nodes[:140] for b in nodes[140:]}
    ring = {frozenset((nodes[i], nodes[(i * 7 + d) % 300])) for i in range(300) for d in (1, 5, 11, 60)}
    began = time.process_time()
    assert largest_connected(nodes, halves) == nodes[140:]
    kept = largest_connected(nodes, {pair for pair in ring if len(pair) == 2})
    assert len(kept) >= 60, "a quarter of them at the least, since nobody has more than eight foes"
    assert time.process_time() - began < 30


def record(name: str, *unreachable: str, seen_round: int = 3) -> PresentNode:
    told = NodeRecord(
        name, "i", f"{name}:1", (0,), "d", seen_round=seen_round, ready_round=seen_round, unreachable=unreachable
    )
    return PresentNode(told, 0.0)


ROUND = Round(3, tuple(Member(n, "i", (0,)) for n in "abcd"), directory="d", excluded=(Exclusion("e", 1, 99.0),))
STUCK = View(
    ROUND,
    (record("a"), record("b", "c"), record("c"), record("d")),
    Requirements(1, 1, 2, 8),
    round_seen_at=NOW - 100,
    failure_seen_at=NOW,
    next_step_due=NOW - 9,
    store_up_since=NOW - 1000,
)


def lost(view: View) -> dict[str, str]:
    return losses(view, ROUND, POLICY, NOW).nodes


def test_later_of_two_partitioned_members_is_lost_while_stalled() -> None:
    """Two members that cannot reach each other stay while workers advance."""
    why = "c and b cannot reach each other and no worker has made a step since"
    assert lost(STUCK) == {"c": why}
    assert lost(replace(STUCK, next_step_due=NOW + 9)) == {}, "they train"
    assert "c" in lost(replace(STUCK, next_step_due=None, failures=(Failure(3, "a", "crash", (), "lost its peers"),)))
    assert lost(replace(STUCK, done=frozenset("c"))) == {}, "who is done needs nobody"
    old = replace(STUCK, nodes=(record("a"), record("b", "c", seen_round=2), record("c"), record("d")))
    assert lost(replace(old, round_seen_at=NOW)) == {}, "that was another round's"


def test_lost_member_partitions_no_other() -> None:
    """A member that is lost anyway excludes no member that it cannot reach."""
    assert set(lost(replace(STUCK, probe_results=(("c", "refused"),)))) == {"c"}
    assert set(lost(replace(STUCK, probe_results=(("b", "refused"),)))) == {"b"}


def test_excluded_node_joins_once_it_reaches_all_members() -> None:
    view = replace(STUCK, nodes=(record("a"), record("b"), record("c"), record("d"), record("e", "b")))
    assert joiners(view, ROUND, POLICY, NOW) == []
    chosen = select_members(view, POLICY, NOW, {}, ROUND.excluded)
    assert isinstance(chosen, list)
    assert [r.id for r in chosen] == list("abcd")
    without_b = select_members(view, POLICY, NOW, {"b": "gone"}, ROUND.excluded)
    assert isinstance(without_b, list)
    assert [r.id for r in without_b] == list("acde"), "b it need not reach any more"
    healed = replace(view, nodes=(*view.nodes[:4], record("e")))
    assert [p.record.id for p in joiners(healed, ROUND, POLICY, NOW)] == ["e"]


def test_one_of_two_partitioned_joiners_is_selected() -> None:
    view = replace(STUCK, nodes=(*(record(n) for n in "abcd"), record("e"), record("f", "e")))
    chosen = select_members(view, POLICY, NOW, {}, ())
    assert isinstance(chosen, list)
    assert [r.id for r in chosen] == list("abcde")
