"""Who hosts the next store, and which Round may follow: tables of cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.model.records import Member, NodeRecord, Round, StoreLife, store_term
from elasticd_agent.rendezvous.probe import ProbeAlive
from elasticd_agent.rendezvous.succession import Succession
from elasticd_agent.rendezvous.takeover import choose_store, deputies
from elasticd_agent.rendezvous.view import Wait


def life(count: int, host: str) -> StoreLife:
    return StoreLife(store_term(count, host), f"{host}:1", f"{host}:2")


FIRST, SECOND = life(0, "a"), life(1, "b")


def round_of(names: str, store: StoreLife | None = FIRST, number: int = 4, **more: object) -> Round:
    members = tuple(Member(name, name, (0,), address=f"{name}:1") for name in names)
    made = Round(number, members, store=store, leader="a", reason="a node is lost")
    return replace(made, **more)  # type: ignore[arg-type]


LOST, USES, LEAVES = (FIRST, True, False), (FIRST, False, False), (FIRST, True, True)
MOVED, POOR = (SECOND, False, False), (SECOND, True, False)


@pytest.mark.parametrize(
    ("members", "me", "answers", "expected"),
    [
        ("abc", "b", {}, None),
        ("abc", "b", {"c": USES}, None),  # the store answers c
        ("abc", "b", {"c": LOST}, 1),
        ("abc", "c", {"b": LOST}, None),  # b hosts
        ("abc", "c", {"b": LEAVES}, 1),
        ("abc", "c", {"b": MOVED}, SECOND),
        ("abc", "c", {"b": POOR}, SECOND),  # it waits for c
        ("ab", "b", {}, None),
        ("abcd", "b", {"c": LOST}, None),  # half
        ("abcd", "b", {"c": LOST, "a": LOST}, 1),  # the host has lost the others
        ("cab", "b", {"c": LOST}, 1),  # the order begins after the host
        ("cab", "c", {"b": LOST}, None),
        ("abc", "x", {"b": LOST, "c": LOST}, None),  # no member
        ("abc", "x", {"b": MOVED}, SECOND),
    ],
)
def test_next_host(
    members: str, me: str, answers: dict[str, tuple[StoreLife, bool, bool]], expected: StoreLife | int | None
) -> None:
    told = {node: ProbeAlive(node, node, *said) for node, said in answers.items()}
    reached = {said[0] for said in answers.values()}
    assert choose_store(me, round_of(members), FIRST, False, False, told, reached) == expected


def test_host_with_too_few_members_waits_for_those_who_have_lost_an_earlier_store() -> None:
    told = {"c": ProbeAlive("c", "c", FIRST, True, False)}
    assert choose_store("b", round_of("abc"), SECOND, True, False, told, ()) is None


@pytest.mark.parametrize(("life", "hosts"), [(FIRST, False), (SECOND, True)])
def test_store_that_a_member_follows_and_nobody_reaches(life: StoreLife, hosts: bool) -> None:
    """The next one is of a later term still, or that member would not come."""
    lost = StoreLife(store_term(2, "d"), "d:1", "d:2")
    told = {"c": ProbeAlive("c", "c", lost, True, False)}
    assert choose_store("b", round_of("abc"), life, hosts, False, told, ()) == 3


def test_deputies_begin_after_the_host() -> None:
    assert deputies(round_of("cabd")) == ["b", "d", "c", "a"]
    assert deputies(round_of("abc", store=life(3, "elsewhere"))) == ["a", "b", "c"]


def look(base: Round, store: StoreLife, here: str, leaving: str = "", seen: Round | None = None) -> Succession:
    found = Succession(store.agent[0])
    found.look(base, store, records(seen or base, here, leaving))
    return found


def records(seen: Round, here: str, leaving: str = "") -> list[NodeRecord]:
    read = {"seen_round": seen.number, "seen_term": seen.store_term}
    return [NodeRecord(n, n, f"{n}:1", (0,), **read, leaving=n * (n in leaving)) for n in here]


@pytest.mark.parametrize(
    ("base", "store", "here", "leaving", "following", "may"),
    [
        ("abc", FIRST, "ab", "", "ab", True),
        ("abc", FIRST, "ab", "", "a", False),
        ("abc", FIRST, "a", "", "a", False),
        ("ab", FIRST, "a", "", "a", True),  # half is enough where the Round was published
        ("abcd", FIRST, "ab", "", "ab", True),
        ("abc", FIRST, "abc", "bc", "a", True),  # they leave for good
        ("abc", FIRST, "abc", "abc", "", True),
        ("abc", FIRST, "ax", "", "ax", False),  # a newcomer is no elector
    ],
)
def test_next_round(base: str, store: StoreLife, here: str, leaving: str, following: str, may: bool) -> None:
    end = {} if following else {"outcome": "stopped", "exit_code": 143}
    verdict = look(round_of(base), store, here, leaving).approve(round_of(following, number=5, **end), 0.0)
    assert isinstance(verdict, Round) == may, verdict
    if isinstance(verdict, Round):
        assert verdict.store == store
        assert set(verdict.electors) == set(base) - set(leaving)


@pytest.mark.parametrize(("here", "adopts"), [("bc", True), ("b", False), ("abc", True)])
def test_round_of_an_earlier_store(here: str, adopts: bool) -> None:
    adopted = look(round_of("abc"), SECOND, here).adoption(0.0)
    assert isinstance(adopted, Round) == adopts
    if isinstance(adopted, Round):
        assert (adopted.number, adopted.store, adopted.quorum) == (4, SECOND, 2)
        after = look(adopted, SECOND, here).approve(round_of("bc", number=5), 0.0)
        assert isinstance(after, Round) and after.number == 6, "the old host may have published number 5"


def test_half_is_not_enough_in_a_later_store() -> None:
    assert isinstance(look(round_of("ab"), SECOND, "b").adoption(0.0), Wait)


def test_two_terms_of_one_count() -> None:
    assert isinstance(look(round_of("abc"), life(0, "z"), "abc").adoption(0.0), Wait), "another host at the endpoint"


def test_round_that_too_few_have_read_has_no_successor() -> None:
    base = round_of("abc", electors=("a", "b", "c", "d", "e"), quorum=3)
    leader = look(base, FIRST, "ab")
    assert isinstance(leader.approve(round_of("ab", number=5), 0.0), Wait)
    assert leader.blocked_why
    assert isinstance(look(base, FIRST, "abd").approve(round_of("ab", number=5), 0.0), Round), (
        "d is no member, and read it"
    )


def test_members_of_a_round_that_too_few_can_read_any_more_are_elsewhere() -> None:
    """Node b is lost, {a, c} published, and c is gone before it reads that: a alone would be half of {a, c}."""
    base = round_of("ac", electors=("a", "b", "c"), quorum=2)
    reading = Succession("a")
    reading.look(base, FIRST, [*records(base, "a"), *records(round_of("abc", number=3), "c")])
    assert not reading.lacks_quorum, "c is on its way"
    alone = look(base, FIRST, "a")
    assert alone.lacks_quorum
    alone.note_wait(Wait("1 of at least 2 nodes present", None, too_few_nodes=True))
    assert "too few of the last round's nodes have read round 4" in alone.blocked_why


def test_who_has_read_the_round_and_is_gone_has_read_it_still() -> None:
    base = round_of("abc", electors=("a", "b", "c", "d", "e"), quorum=3)
    leader = look(base, FIRST, "abd")
    leader.look(base, FIRST, records(base, "ab"))
    assert isinstance(leader.approve(round_of("ab", number=5), 0.0), Round)
    after = replace(base, number=5)
    leader.look(after, FIRST, records(after, "ab"))
    assert isinstance(leader.approve(round_of("ab", number=6), 0.0), Wait), "d has not read this one"


def test_who_has_read_an_earlier_round_of_that_number_has_not_read_this_one() -> None:
    base = round_of("abc", store=SECOND, quorum=0)
    assert isinstance(look(base, SECOND, "abc", seen=round_of("abc")).approve(round_of("ab", number=5), 0.0), Wait)


def test_store_that_no_other_agent_may_host() -> None:
    leader = Succession("a")
    leader.look(round_of("abc", store=None), None, [])
    assert leader.approve(round_of("a", number=5), 0.0) == round_of("a", store=None, number=5)


@pytest.mark.parametrize(
    ("base", "store", "here", "lacks"),
    [
        ("abc", FIRST, "a", True),
        ("abc", FIRST, "ab", False),
        ("ab", FIRST, "a", False),
        ("ab", SECOND, "b", True),
        ("abcde", FIRST, "ab", True),
        ("abcde", FIRST, "abc", False),
    ],
)
def test_quorum(base: str, store: StoreLife, here: str, lacks: bool) -> None:
    assert look(round_of(base), store, here).lacks_quorum == lacks


@pytest.mark.parametrize(("store", "lacks"), [(FIRST, False), (SECOND, True)])
def test_agent_of_an_older_version_writes_no_term_and_counts_in_the_first_store_only(
    store: StoreLife, lacks: bool
) -> None:
    leader = Succession(store.agent[0])
    leader.look(round_of("abc"), store, [NodeRecord(n, n, f"{n}:1", (0,), seen_round=4) for n in "ab"])
    assert leader.lacks_quorum == lacks
