"""`membership` rule by rule: lost members and reasons, joiners, the order of the next members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Exclusion, Failure, Member, NodeRecord, Round
from elasticd_agent.rendezvous.membership import (
    EXCLUSION_EXPIRES_S,
    REREGISTRATION_S,
    STALL_GRACE_S,
    START_LIMIT_S,
    cooloff_left_s,
    exclusions,
    joiners,
    losses,
    select_members,
)
from elasticd_agent.rendezvous.view import PresentNode, ProbeResult, Requirements, View, Wait
from elasticd_agent.workers.launcher.owned_group import DEVICE_KILL_DEADLINE_S
from elasticd_agent.workers.launcher.writer_process import MIN_SAVE_S

POLICY = Policy()
NOW = 1000.0
VICTIM = Failure(3, "a", "crash", (), "rank 0 lost its peers")


def record(name: str, incarnation: str = "i", **fields: object) -> NodeRecord:
    return replace(NodeRecord(name, incarnation, f"{name}:1", (0,), "d", seen_round=3, ready_round=3), **fields)  # type: ignore[arg-type]


def present(name: str, incarnation: str = "i", joined_at: float = 0.0, **fields: object) -> PresentNode:
    return PresentNode(record(name, incarnation, **fields), joined_at)


ROUND = Round(3, tuple(Member(n, "i", (0,)) for n in "abc"), directory="d")
VIEW = View(
    ROUND,
    tuple(present(n) for n in "abc"),
    Requirements(1, 1, 1, 4),
    round_seen_at=NOW - 100,
    failure_seen_at=NOW,
    next_step_due=NOW + 1,
    store_up_since=NOW - 1000,
)


def without(*names: str, view: View = VIEW) -> View:
    return replace(view, nodes=tuple(p for p in view.nodes if p.record.id not in names))


def lost(view: View, now: float = NOW) -> dict[str, str]:
    return losses(view, ROUND, POLICY, now).nodes


def test_no_losses_while_all_is_well() -> None:
    found = losses(VIEW, ROUND, POLICY, NOW)
    assert (found.nodes, found.until, found.returning) == ({}, None, ())


def test_new_incarnation_is_a_loss() -> None:
    view = replace(VIEW, nodes=(*without("b").nodes, present("b", "new")))
    assert lost(view) == {"b": "b was restarted"}


def test_refused_probe_is_a_loss_and_silence_is_not() -> None:
    assert lost(replace(VIEW, probe_results=(("b", "refused"),))) == {"b": "b is lost: the port of its agent is closed"}
    assert lost(replace(VIEW, probe_results=(("b", "silent"),))) == {}


def test_node_that_had_said_that_it_leaves_is_not_called_lost() -> None:
    view = replace(without("b"), probe_results=(("b", "refused"),), leave_reasons=(("b", "b leaves: SIGTERM"),))
    assert lost(view) == {"b": "b leaves: SIGTERM"}


def test_done_node_cannot_be_lost() -> None:
    assert lost(replace(without("b"), done=frozenset("b"), probe_results=(("b", "refused"),))) == {}


def test_missing_lease_counts_once_workers_stall() -> None:
    view = replace(without("b"), absent_since=(("b", NOW),))
    due = NOW + 1 + STALL_GRACE_S
    assert losses(view, ROUND, POLICY, NOW).until == due
    assert lost(view, due) == {"b": "b is lost: its lease has expired"}
    trains = replace(view, next_step_due=NOW + 900)
    assert losses(trains, ROUND, POLICY, due).until == NOW + POLICY.adopt_timeout_s, "not while they train on"
    assert "b" in lost(trains, NOW + POLICY.adopt_timeout_s)
    outside = replace(view, next_step_due=None)
    assert losses(outside, ROUND, POLICY, due).until == NOW + POLICY.adopt_timeout_s, "who has none cannot tell"


def test_missing_lease_does_not_count_after_an_outage() -> None:
    view = replace(without("b"), absent_since=(("b", NOW),), next_step_due=NOW - 5, store_up_since=NOW)
    due = NOW + POLICY.lease_s + POLICY.renewal_s
    assert losses(view, ROUND, POLICY, NOW + 1).until == due
    assert "b" in lost(view, due)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("silent", "b is lost: its lease has expired and it does not answer"),
        ("refused", "b is lost: the port of its agent is closed"),
    ],
)
def test_failed_round_missing_lease_without_answer_is_a_loss(answer: ProbeResult, why: str) -> None:
    view = replace(without("b"), failures=(VICTIM,), absent_since=(("b", NOW),), probe_results=(("b", answer),))
    assert lost(view) == {"b": why}


def test_failed_round_answer_without_lease_is_waited_for() -> None:
    """Its agent lives and is about to register again."""
    view = replace(without("b"), failures=(VICTIM,), absent_since=(("b", NOW - 9),), probe_results=(("b", "answered"),))
    back = replace(view, store_up_since=NOW)
    found = losses(back, ROUND, POLICY, NOW)
    assert (found.nodes, found.returning, found.until) == ({}, ("b",), NOW + REREGISTRATION_S)
    assert lost(back, NOW + REREGISTRATION_S) == {"b": "b is lost: its lease has expired"}
    assert "b" in lost(view), "it has had its time"


def test_round_not_seen_in_time_is_a_loss() -> None:
    view = replace(VIEW, nodes=(*without("b").nodes, present("b", seen_round=2, ready_round=2)), round_seen_at=NOW)
    due = NOW + POLICY.seen_timeout_s
    waits = losses(replace(view, failures=(VICTIM,)), ROUND, POLICY, NOW)
    assert (waits.until, waits.returning) == (due, ()), "it is in the store"
    assert losses(view, ROUND, POLICY, NOW).until == due
    assert lost(view, due) == {"b": "b has not seen round 3 within 1 s"}
    assert lost(replace(view, probe_results=(("b", "answered"),)), due) == {}, "it is there"
    failed = Failure(3, "b", "crash", (), "lost")
    assert lost(replace(view, failures=(failed,)), due) == {}, "who reports a failure of it has seen it"


def test_round_not_started_in_time_is_a_loss() -> None:
    view = replace(VIEW, nodes=(*without("b").nodes, present("b", ready_round=2)), round_seen_at=NOW)
    assert losses(view, ROUND, POLICY, NOW + 2).until == NOW + START_LIMIT_S
    assert lost(view, NOW + START_LIMIT_S) == {"b": "b has not started round 3 within 60 s"}


def test_slow_death_is_no_loss() -> None:
    """Ranks save their state and are killed; what does not die costs its slot, and not the node."""
    view = replace(VIEW, nodes=(*without("b").nodes, present("b", ready_round=2)), round_seen_at=NOW)
    assert lost(view, NOW + MIN_SAVE_S + DEVICE_KILL_DEADLINE_S + POLICY.seen_timeout_s) == {}


def test_silent_member_is_lost_only_while_stalled() -> None:
    stuck = replace(VIEW, next_step_due=NOW - STALL_GRACE_S, silent_since=(("b", NOW),))
    due = NOW + POLICY.lease_s
    assert losses(stuck, ROUND, POLICY, NOW).until == due
    assert lost(stuck, due) == {"b": "b is unreachable and no worker has made a step since"}
    assert lost(replace(stuck, next_step_due=due), due) == {}
    assert lost(replace(stuck, next_step_due=None), due) == {}


def test_exclusions_are_counted_and_expire() -> None:
    current = replace(ROUND, excluded=(Exclusion("b", 2, 10.0), Exclusion("z", 5, EXCLUSION_EXPIRES_S - 100)))
    found = exclusions(replace(VIEW, round_seen_at=NOW - 100), current, {"b": "gone", "c": "gone"}, NOW)
    assert found == (Exclusion("b", 3), Exclusion("c", 1)), "z is forgiven"


def test_cooloff_is_zero_at_first_and_doubles() -> None:
    times = [cooloff_left_s("b", (Exclusion("b", n),), POLICY) for n in (1, 2, 3, 4, 99)]
    assert times == [0.0, 5.0, 10.0, 20.0, EXCLUSION_EXPIRES_S]
    assert cooloff_left_s("b", (Exclusion("b", 3, 4.0),), POLICY) == 6.0
    assert cooloff_left_s("a", (Exclusion("b", 3),), POLICY) == 0.0


def test_joiners_have_seen_the_round_and_are_reachable() -> None:
    view = replace(VIEW, nodes=(*VIEW.nodes, present("e", joined_at=2), present("d", joined_at=1)))
    assert [p.record.id for p in joiners(view, ROUND, POLICY, NOW)] == ["d", "e"]
    for other in (
        replace(view, nodes=(*VIEW.nodes, present("d", seen_round=2))),
        replace(view, nodes=(*VIEW.nodes, present("d", leaving="d leaves"))),
        replace(view, nodes=(*VIEW.nodes, present("d")), unreachable_joiners=frozenset("d")),
    ):
        assert joiners(other, ROUND, POLICY, NOW) == []
    cooling = replace(ROUND, excluded=(Exclusion("d", 9),))
    assert [p.record.id for p in joiners(view, cooling, POLICY, NOW)] == ["e"]


def test_joiner_must_be_warm() -> None:
    """A running round does not wait while a joiner imports what its workers need."""
    view = replace(VIEW, nodes=(*VIEW.nodes, present("d", joined_at=NOW - 10, warm=0)))
    assert joiners(view, ROUND, POLICY, NOW) == []
    assert joiners(view, ROUND, POLICY, NOW + 3600) == []


def chosen(view: View, lost: dict[str, str] | None = None, excluded: tuple[Exclusion, ...] = ()) -> list[str]:
    found = select_members(view, POLICY, NOW, lost or {}, excluded)
    assert not isinstance(found, Wait), found
    return [r.id for r in found]


def test_survivors_keep_their_order_and_joiners_follow() -> None:
    view = replace(VIEW, nodes=(present("e", joined_at=2), present("d", joined_at=1), *reversed(VIEW.nodes)))
    assert chosen(view) == ["a", "b", "c", "d"], "four at most"
    assert chosen(view, {"a": "gone"}) == ["b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("lost", "min_nodes", "expected"),
    [
        ({}, 1, ["a", "b", "c", "w"]),
        ({"c": "gone"}, 1, ["a", "b", "w"]),
        ({"c": "gone"}, 3, ["a", "b", "w"]),
        ({"b": "gone", "c": "gone"}, 3, ["a", "d", "w"]),
    ],
)
def test_joiner_that_is_not_warm_is_taken_only_if_needed(
    lost: dict[str, str], min_nodes: int, expected: list[str]
) -> None:
    """Survivors b and c, cold themselves or not, never wait for d, which imports torch."""
    nodes = (*VIEW.nodes, present("d", joined_at=1, warm=0), present("w", joined_at=2))
    view = replace(VIEW, nodes=nodes, requirements=replace(VIEW.requirements, min_nodes=min_nodes))
    assert chosen(view, lost) == expected
    cold = tuple(replace(p, record=replace(p.record, warm=0)) for p in view.nodes)
    assert "a" in chosen(replace(view, nodes=cold), lost), "a survivor"


def test_nobody_is_warm_in_the_first_round() -> None:
    nodes = (present("d", joined_at=1, warm=0), present("e", joined_at=2, warm=0))
    view = replace(VIEW, current=None, nodes=nodes, requirements=replace(VIEW.requirements, max_nodes=2))
    assert chosen(view) == ["d", "e"]


def test_dead_nodes_record_is_not_selected() -> None:
    """The record of a dead node stays until its lease expires, but it has not seen the round."""
    dead = present("d", seen_round=2)
    assert chosen(replace(VIEW, nodes=(*VIEW.nodes, dead))) == ["a", "b", "c"]
    late = replace(VIEW, nodes=(present("a", seen_round=2), present("b"), present("c")))
    assert chosen(late) == ["a", "b", "c"], "a member is judged by losses alone"


def test_leaving_and_unreachable_nodes_are_not_selected() -> None:
    assert chosen(replace(VIEW, nodes=(*without("b").nodes, present("b", leaving="b leaves")))) == ["a", "c"]
    assert chosen(replace(VIEW, unreachable_joiners=frozenset("b"))) == ["a", "c"]


def test_rank_0_node_has_the_checkpoint_directory() -> None:
    """Rank 0 goes to a node with the checkpoint directory that the job has used so far."""
    view = replace(VIEW, nodes=(present("a", directory="x"), present("b"), present("c")))
    assert chosen(view) == ["b", "a", "c"]


def test_excluded_node_is_selected_where_too_few_remain() -> None:
    excluded = (Exclusion("a", 3), Exclusion("b", 3))
    assert chosen(VIEW, excluded=excluded) == ["c"]
    assert chosen(replace(VIEW, requirements=Requirements(1, 1, 2, 4)), excluded=excluded) == ["a", "b", "c"]
    few = select_members(replace(VIEW, requirements=Requirements(1, 1, 4, 4)), POLICY, NOW, {}, ())
    assert few == Wait("3 of at least 4 nodes present", None, too_few_nodes=True)


def test_last_call_without_survivors_only() -> None:
    """Survivors of a round do not wait for more nodes."""
    strangers = replace(VIEW, current=None, nodes=(present("a", joined_at=NOW - 1), present("b", joined_at=NOW - 3)))
    found = select_members(strangers, POLICY, NOW, {}, ())
    assert isinstance(found, Wait)
    assert found.until == NOW - 1 + 5
    assert chosen(replace(strangers, requirements=Requirements(1, 1, 1, 2))) == ["b", "a"], "all who may come are here"
    late = replace(VIEW, nodes=(*without("c").nodes, present("d", joined_at=NOW)))
    assert chosen(late) == ["a", "b", "d"], "a survivor waits for nobody"


def test_probes_of_an_earlier_round_cut_no_connection() -> None:
    old = replace(VIEW, nodes=(present("a", unreachable=("b",), seen_round=2), present("b"), present("c")))
    now = replace(VIEW, nodes=(present("a", unreachable=("b",)), present("b"), present("c")))
    assert [chosen(view) for view in (old, now)] == [["a", "b", "c"], ["a", "c"]]
