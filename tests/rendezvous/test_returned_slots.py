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


def present(name: str, slots: tuple[int, ...] = (0, 1, 2), slots_seen_at: float = 0.0, **fields: object) -> PresentNode:
    record = NodeRecord(name, "i", f"{name}:1", slots, "d", seen_round=3, ready_round=3)
    return PresentNode(replace(record, **fields), 0.0, slots_seen_at)  # type: ignore[arg-type]


def view(first: PresentNode, current: Round = ROUND, **fields: object) -> View:
    seen = View(current, (first, present("b")), Requirements(2, 3, 1, 2), round_seen_at=ROUND_AT, next_step_due=NOW + 1)
    return replace(seen, **fields)  # type: ignore[arg-type]


STEPS = {"stepped_round": 3, "can_pause": 3}
FIRST = present("a", **STEPS)
ALONE = replace(ROUND, members=ROUND.members[:1])


def test_a_slot_that_is_back_waits_for_more_then_the_job_pauses_and_grows() -> None:
    back = view(present("a", slots_seen_at=NOW, **STEPS))
    settled = NOW + POLICY.grow_debounce_s
    assert plan(back, POLICY, NOW) == Wait("slot 2 of a is back; waiting for more slots", settled)
    assert plan(back, POLICY, settled) == Pause(3, "slot 2 of a is back")
    paused = view(present("a", paused=3, **STEPS))
    grown = plan(paused, POLICY, NOW)
    assert isinstance(grown, Round)
    assert [m.slots for m in grown.members] == [(0, 1, 2), (0, 1, 2)]
    assert grown.reason == "slot 2 of a is back; restart with 6 workers on 2 nodes, no elasticd checkpoint yet"
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
    after = plan(view(present("a"), failures=(crash,), failure_seen_at=NOW), POLICY, NOW)
    assert isinstance(after, Round)
    assert after.reason.startswith("rank 2 was killed by SIGKILL; slot 2 of a is back; restart with 6 workers")


def test_a_quarantined_slot_comes_back_after_its_cooloff() -> None:
    in_use = tuple(QuarantinedSlot(node, slot, 2, 1, left_s=150.0) for node, slot in (("a", 0), ("b", 2)))
    left_out = replace(ROUND, quarantined_slots=(QuarantinedSlot("a", 2, 2, 1, left_s=160.0), *in_use))
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
    seen = View(current, records, Requirements(fewest, 4, 1, 2), round_seen_at=ROUND_AT, next_step_due=NOW + 1)
    grown = plan(seen, POLICY, NOW)
    if not (isinstance(grown, Round) and "back; restart" in grown.reason and "usable" not in grown.reason):
        return
    assert grown.world_size > current.world_size
    steps = {"seen_round": 4, "ready_round": 4, "stepped_round": 4, "paused": 4}
    after = tuple(replace(p, record=replace(p.record, **steps)) for p in records)  # type: ignore[arg-type]
    again = plan(replace(seen, current=grown, nodes=after, round_seen_at=NOW), POLICY, NOW)
    assert isinstance(again, Wait), again


def test_the_leader_counts_from_the_moment_at_which_it_saw_the_slots() -> None:
    """Another field of the record changes nothing; a new leader counts anew."""
    cache = _Cache()
    reader = ViewReader(cache, Keys("job"), Requirements(1, 3), _Observations())  # type: ignore[arg-type]
    seen = []
    for at, record in ((1.0, (0, 1)), (2.0, (0, 1)), (3.0, (0, 1, 2)), (4.0, (0, 1, 2))):
        cache.found = [replace(present("a", record).record, high_water=int(at))]
        seen.append(reader.read(None, LocalFacts(), at).nodes[0].slots_seen_at)
    assert seen == [1.0, 1.0, 3.0, 3.0]


def test_the_leader_reads_what_a_node_wrote_before_its_failure() -> None:
    """The watch of failures may be ahead of that of nodes: the slots that start would be counted as ready."""
    cache = _Cache()
    reader = ViewReader(cache, Keys("job"), Requirements(1, 3), _Observations())  # type: ignore[arg-type]
    for failures, read in ((0, 0), (1, 1), (1, 1), (2, 2)):
        cache.failures = [CRASH] * failures
        reader.read(ROUND, LocalFacts(), NOW)
        assert cache.invalidated == [Keys("job").nodes] * read


class _Cache:
    def __init__(self) -> None:
        self.found: list[NodeRecord] = []
        self.failures: list[Failure] = []
        self.invalidated: list[str] = []

    def records(self, prefix: str, kind: type) -> list[NodeRecord] | list[Failure]:
        return self.found if kind is NodeRecord else self.failures

    def invalidate(self, prefix: str) -> None:
        self.invalidated.append(prefix)

    def list(self, prefix: str) -> dict[str, object]:
        return {}


class _Observations:
    def __init__(self) -> None:
        self.store_up_since = 0.0
        self.silent_since: dict[str, float] = {}
        self.unreachable_joiners: frozenset[str] = frozenset()

    def nodes_listed(self, present: set[str], now: float) -> None:
        pass


# ---- slots whose process starts, while other ranks keep theirs


CRASH = Failure(3, "a", "crash", ((1, 1),), "rank 1 was killed by SIGKILL", high_water=9)
FAILED = {"failures": (CRASH,), "failure_seen_at": NOW - 5}


def after_crash(*records: PresentNode, **fields: object) -> Round:
    verdict = plan(replace(view(FIRST, **FAILED, **fields), nodes=records), POLICY, NOW)
    assert isinstance(verdict, Round), verdict
    return verdict


def members(round: Round) -> list[tuple[str, tuple[int, ...]]]:
    return [(m.node, m.slots) for m in round.members]


def test_the_ranks_that_keep_their_process_wait_for_no_other() -> None:
    after = after_crash(present("a", starting=(1,)), present("b"))
    assert members(after) == [("a", (0, 2)), ("b", (0, 1, 2))]
    assert after.reason == (
        "rank 1 was killed by SIGKILL; slot 1 of a starts; "
        "restart with 5 workers on 2 nodes, no elasticd checkpoint yet"
    )
    assert after.budget.counted == 1, "smaller, and a restart as any other"
    assert "; slots 0 and 1 of a start; restart" in after_crash(present("a", starting=(0, 1)), present("b")).reason


def test_a_node_whose_processes_start_is_left_out_if_enough_others_are_ready() -> None:
    starts = present("a", (0, 1), starting=(0, 1))
    alone = after_crash(starts, present("b"))
    assert members(alone) == [("b", (0, 1, 2))]
    assert alone.excluded == (), "it is not lost"
    both = after_crash(starts, present("b"), requirements=Requirements(2, 3, 2, 2))
    assert members(both) == [("a", (0, 1)), ("b", (0, 1, 2))], "too few nodes would remain"
    here = replace(view(FIRST), current=alone, round_seen_at=NOW - 1)
    steps = {"seen_round": 4, "ready_round": 4, "stepped_round": 4, "can_pause": 4}
    still = replace(here, nodes=(replace(starts, record=replace(starts.record, seen_round=4)), present("b", **steps)))
    assert plan(still, POLICY, NOW) == Wait("round 4 runs with 3 workers", None)
    ready = replace(still, nodes=(present("a", (0, 1), seen_round=4), present("b", **steps)))
    assert plan(ready, POLICY, NOW) == Pause(4, "a joined")


def test_a_node_with_too_few_ready_slots_is_waited_for() -> None:
    """Then for all of its slots."""
    one = after_crash(present("a", starting=(1, 2)), current=replace(ROUND, members=ROUND.members[:1]))
    assert members(one) == [("a", (0, 1, 2))]


def test_the_only_node_with_the_checkpoints_is_waited_for() -> None:
    after = after_crash(present("a", (0, 1), starting=(0, 1)), present("b", directory="other"))
    assert members(after) == [("a", (0, 1)), ("b", (0, 1, 2))]


def test_a_job_that_never_grows_does_not_shrink_for_a_start() -> None:
    seen = replace(view(FIRST, **FAILED), nodes=(present("a", (0, 1), starting=(1,)), present("b")))
    after = plan(seen, Policy(grow="never"), NOW)
    assert isinstance(after, Round)
    assert after.world_size == 5


def test_a_quarantined_slot_is_not_taken_because_others_start() -> None:
    quarantined = (QuarantinedSlot("a", 2, 2, 1, left_s=900.0),)
    current = replace(ROUND, members=ROUND.members[:1], quarantined_slots=quarantined)
    after = after_crash(present("a", starting=(1,)), current=current)
    assert members(after) == [("a", (0, 1))]


def test_a_started_slot_is_added_as_one_that_is_back() -> None:
    small = replace(ROUND, members=(Member("a", "i", (0, 1)), ROUND.members[1]))
    starts = view(present("a", starting=(2,), **STEPS), current=small)
    assert plan(starts, POLICY, NOW) == RUNS
    assert plan(view(present("a", slots_seen_at=NOW - 9, **STEPS), current=small), POLICY, NOW) == Pause(
        3, "slot 2 of a is back"
    )


@pytest.mark.parametrize(("required", "size"), [(4, 4), (5, 5)])
def test_a_size_that_the_script_has_refused_is_waited_for(required: int, size: int) -> None:
    """A slot that starts is waited for only where the job needs it."""
    after = after_crash(
        present("a", (0, 1), starting=(1,)),
        present("b"),
        current=replace(ROUND, required_size=required),
        requirements=Requirements(1, 3, 1, 2),
    )
    assert after.world_size == size


@given(
    usable=st.lists(slots, min_size=1, max_size=3),
    starting=st.lists(slots, min_size=3, max_size=3),
    out=quarantines,
    fewest=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    directories=st.lists(st.sampled_from("de"), min_size=3, max_size=3),
)
def test_no_job_waits_longer_or_loses_its_checkpoints_because_slots_start(
    usable: list[tuple[int, ...]],
    starting: list[tuple[int, ...]],
    out: list[QuarantinedSlot],
    fewest: tuple[int, int],
    directories: list[str],
) -> None:
    names = "abc"[: len(usable)]
    current = Round(3, tuple(Member(n, "i", s) for n, s in zip(names, usable, strict=True)), directory="d",
                    quarantined_slots=(*out,))  # fmt: skip
    culprit = current.members[0].slots[0]
    failure = Failure(3, "a", "crash", ((0, culprit),), "rank 0 was killed by SIGKILL")
    records = tuple(
        present(n, s, starting=tuple(set(s) & set(new)), directory=where)
        for n, s, new, where in zip(names, usable, starting, directories, strict=False)
    )
    least = min(fewest[0], *(len(s) for s in usable))  # a node announces no fewer
    asked = Requirements(least, 4, min(fewest[1], len(names)), 3)
    seen = View(current, records, asked, failures=(failure,), failure_seen_at=NOW - 5, round_seen_at=ROUND_AT)
    patient, prompt = plan(seen.with_starting_as_ready, POLICY, NOW), plan(seen, POLICY, NOW)
    assert type(prompt) is type(patient)
    if isinstance(prompt, Round) and isinstance(patient, Round):
        assert len(prompt.members) >= asked.min_nodes
        assert prompt.directory == patient.directory
        assert all(len(m.slots) >= least for m in prompt.members)


def test_a_node_joins_ranks_that_keep_their_processes_once_its_own_are_ready() -> None:
    """It was asked to start them, and they are at their entry; or none will come so far."""
    steps = {**STEPS, "entered": 3}
    asked = Requirements(2, 3, 1, 3)
    for fields, joins in (
        ({}, False),
        ({"ahead": 2}, False),
        ({"ahead": 3, "starting": (0, 1, 2)}, False),
        ({"ahead": 3, "starting": (2,)}, True),
        ({"ahead": 3}, True),
    ):
        joiner = present("c", ready_round=0, **fields)  # type: ignore[arg-type]
        full = present("a", (0, 1), **steps)
        seen = view(full, requirements=asked, nodes=(full, present("b"), joiner))
        assert plan(seen, POLICY, NOW) == (Pause(3, "c joined") if joins else RUNS), fields
