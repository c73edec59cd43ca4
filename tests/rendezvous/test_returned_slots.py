"""`plan()` where a member can use more slots than its Round does: the job grows as for a node that joins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.records import Failure, Member, NodeRecord, QuarantinedSlot, Round
from elasticd_agent.rendezvous.plan import plan
from elasticd_agent.rendezvous.planner import ViewReader
from elasticd_agent.rendezvous.view import LocalFacts, Pause, PresentNode, Requirements, View, Wait

POLICY = Policy()
NOW = 1000.0
ROUND_AT = NOW - 100
ROUND = Round(3, (Member("a", "i", (0, 1)), Member("b", "i", (0, 1, 2))), directory="d", restarts=1)
RUNS = Wait("round 3 runs with 5 workers", None)


def present(name: str, slots: tuple[int, ...] = (0, 1, 2), slots_at: float = 0.0, **fields: object) -> PresentNode:
    record = NodeRecord(name, "i", f"{name}:1", slots, "d", seen_round=3, ready_round=3)
    return PresentNode(replace(record, **fields), 0.0, slots_at)  # type: ignore[arg-type]


def view(first: PresentNode, current: Round = ROUND, **fields: object) -> View:
    seen = View(current, (first, present("b")), Requirements(2, 3, 1, 2), round_at=ROUND_AT, next_step_due=NOW + 1)
    return replace(seen, **fields)  # type: ignore[arg-type]


STEPS = {"stepped_round": 3, "can_pause": 3}
FIRST = present("a", **STEPS)
ALONE = replace(ROUND, members=ROUND.members[:1])


def test_a_slot_that_is_back_waits_for_more_then_the_job_pauses_and_grows() -> None:
    back = view(present("a", slots_at=NOW, **STEPS))
    settled = NOW + POLICY.grow_debounce_s
    assert plan(back, POLICY, NOW) == Wait("slot 2 of a is back; waiting for more slots", settled)
    assert plan(back, POLICY, settled) == Pause(3, "slot 2 of a is back")
    paused = view(present("a", paused=3, **STEPS))
    grown = plan(paused, POLICY, NOW)
    assert isinstance(grown, Round)
    assert [m.slots for m in grown.members] == [(0, 1, 2), (0, 1, 2)]
    assert grown.reason == "slot 2 of a is back; restart with 6 workers on 2 nodes, from the beginning"
    assert (grown.cause, grown.budget.counted, grown.budget.streak) == ("resize", 0, 0), "it costs no restart"


@pytest.mark.parametrize(
    ("seen", "policy"),
    [
        (view(present("a", can_pause=3)), POLICY),
        (view(present("a", **STEPS)), Policy(grow="never")),
        (view(present("a", **STEPS), done=frozenset("b")), POLICY),
        (view(present("a", (0, 1), **STEPS)), POLICY),
        (view(FIRST, requirements=Requirements(1, 2, 1, 1), nodes=(FIRST,), current=ALONE), POLICY),
    ],
    ids=["before the first step", "policy", "one is done", "nothing is back", "more than the job asks for"],
)
def test_no_growth(seen: View, policy: Policy) -> None:
    verdict = plan(seen, policy, NOW)
    assert isinstance(verdict, Wait)
    assert "runs with" in verdict.why


def test_growth_without_pause_depends_on_the_policy() -> None:
    plain = view(present("a", stepped_round=3))
    cannot = "slot 2 of a is back; the script cannot pause at a checkpoint, so this waits for the next restart"
    assert plan(plain, POLICY, NOW) == Wait(cannot, None, notable=True)
    grown = plan(plain, Policy(grow="always"), NOW)
    assert isinstance(grown, Round)
    assert grown.world_size == 6


def test_a_slot_and_a_node_are_one_growth() -> None:
    seen = view(present("a", **STEPS), requirements=Requirements(2, 3, 1, 3))
    joined = replace(seen, nodes=(*seen.nodes, PresentNode(replace(present("c").record, ready_round=0), NOW)))
    assert plan(joined, POLICY, NOW).why.startswith("c joined; slot 2 of a is back; waiting for more")  # type: ignore[union-attr]
    assert plan(joined, POLICY, NOW + 1) == Pause(3, "c joined; slot 2 of a is back")


def test_a_restart_names_the_slots_that_it_takes_back() -> None:
    crash = Failure(3, "b", "crash", ((2, 0),), "rank 2 was killed by SIGKILL")
    after = plan(view(present("a"), failures=(crash,), failed_at=NOW), POLICY, NOW)
    assert isinstance(after, Round)
    assert after.reason.startswith("rank 2 was killed by SIGKILL; slot 2 of a is back; restart with 6 workers")


def test_a_quarantined_slot_comes_back_after_its_cooloff() -> None:
    left_out = replace(ROUND, quarantined_slots=(QuarantinedSlot("a", 2, 2, 1, left_s=160.0),))
    seen = view(present("a", **STEPS), current=left_out)
    ends = ROUND_AT + 160
    assert plan(seen, POLICY, NOW) == replace(RUNS, until=ends), "the leader turns again as it ends"
    assert plan(seen, Policy(grow="never"), NOW) == RUNS
    assert plan(seen, POLICY, ends) == Wait("slot 2 of a is back; waiting for more slots", ends + 1)
    assert plan(seen, POLICY, ends + 1) == Pause(3, "slot 2 of a is back")


slots = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(lambda s: tuple(sorted(s)))
quarantines = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.sampled_from((0.0, 50.0, 150.0))).map(
        lambda q: QuarantinedSlot(q[0], q[1], 2, 1, left_s=q[2])
    ),
    max_size=4,
    unique_by=lambda q: (q.node, q.slot),
)


@given(used=st.tuples(slots, slots), usable=st.tuples(slots, slots), out=quarantines, fewest=st.integers(1, 3))
def test_growth_ends(
    used: tuple[tuple[int, ...], ...], usable: tuple[tuple[int, ...], ...], out: list[QuarantinedSlot], fewest: int
) -> None:
    """A Round that follows only because slots are back is larger, uses every one of them, and is followed by none."""
    current = Round(3, (Member("a", "i", used[0]), Member("b", "i", used[1])), directory="d", quarantined_slots=(*out,))
    records = tuple(present(n, s, stepped_round=3, paused=3) for n, s in zip("ab", usable, strict=True))
    seen = View(current, records, Requirements(fewest, 4, 1, 2), round_at=ROUND_AT, next_step_due=NOW + 1)
    grown = plan(seen, POLICY, NOW)
    if not (isinstance(grown, Round) and "back; restart" in grown.reason and "usable" not in grown.reason):
        return
    assert grown.world_size > current.world_size
    steps = {"seen_round": 4, "ready_round": 4, "stepped_round": 4, "paused": 4}
    after = tuple(replace(p, record=replace(p.record, **steps)) for p in records)  # type: ignore[arg-type]
    again = plan(replace(seen, current=grown, nodes=after, round_at=NOW), POLICY, NOW)
    assert isinstance(again, Wait), again


def test_the_leader_counts_from_the_moment_at_which_it_saw_the_slots() -> None:
    """Another field of the record changes nothing; a new leader counts anew."""
    cache = _Cache()
    reader = ViewReader(cache, Keys("job"), Requirements(1, 3), _Observations())  # type: ignore[arg-type]
    seen = []
    for at, record in ((1.0, (0, 1)), (2.0, (0, 1)), (3.0, (0, 1, 2)), (4.0, (0, 1, 2))):
        cache.found = [replace(present("a", record).record, high_water=int(at))]
        seen.append(reader.read(None, LocalFacts(), at).nodes[0].slots_at)
    assert seen == [1.0, 1.0, 3.0, 3.0]


class _Cache:
    def __init__(self) -> None:
        self.found: list[NodeRecord] = []

    def records(self, prefix: str, kind: type) -> list[NodeRecord]:
        return self.found if kind is NodeRecord else []

    def list(self, prefix: str) -> dict[str, object]:
        return {}


class _Observations:
    def __init__(self) -> None:
        self.store_up_since = 0.0
        self.silent_since: dict[str, float] = {}

    def nodes_listed(self, present: set[str], now: float) -> None:
        pass
