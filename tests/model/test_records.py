"""Records survive JSON; anything else is refused in a sentence with the field."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.errors import WireError
from elasticd_agent.hangs.explain import model as _explain_model  # noqa: F401 - its records are checked, too
from elasticd_agent.model.codec import Document, Record
from elasticd_agent.model.records import BudgetState, Failure, Member, MemberCache, NodeRecord, QuarantinedSlot, Round
from elasticd_agent.model.reports import HangReport, RankReport

ROUND = Round(
    7,
    (Member("a", "i1", (4, 2)), Member("b", "i2", (0,))),
    last_checkpoint=(6, 120),
    restarts=3,
    budget=BudgetState(3, 1, 41.5, 130),
    quarantined_slots=(QuarantinedSlot("a", 3, 2, 1, 12.5),),
    reason="rank 1 was killed by SIGKILL",
)
FAILURE = Failure(7, "a", "crash", ((1, 2),), "why", 130, (7, 125), "ValueError", "Traceback\n  …")
NODE = NodeRecord("a", "i1", "10.0.0.1", (0, 1))
END = Round(8, (), reason="done", outcome="succeeded", exit_code=0)

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
whole = st.integers(0, 2**40)
place = st.tuples(whole, whole)
members = st.lists(
    st.builds(Member, names, names, st.lists(whole, min_size=1, max_size=3, unique=True).map(tuple)),
    min_size=1,
    max_size=3,
    unique_by=lambda m: m.node,
).map(tuple)
rounds = st.builds(
    Round,
    number=st.integers(1, 2**40),
    members=members,
    last_checkpoint=st.none() | place,
    restarts=whole,
    budget=st.builds(BudgetState, whole, whole, st.none() | st.floats(0, 60), whole),
    quarantined_slots=st.lists(
        st.builds(QuarantinedSlot, names, whole, whole, whole, st.floats(0, 1e6)), max_size=2
    ).map(tuple),
    reason=st.text(st.characters(codec="utf-8")),
)
failures = st.builds(
    Failure,
    whole,
    names,
    names,
    st.lists(place, max_size=2).map(tuple),
    names,
    whole,
    st.none() | place,
    st.none() | names,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(rounds | failures)
def test_json_round_trip(record: Document) -> None:
    line = record.to_json()
    assert b"\n" not in line
    assert type(record).from_json(line) == record
    assert type(record).from_json(line.decode()) == record


@pytest.mark.parametrize("record", [ROUND, END, FAILURE, NODE], ids=lambda r: type(r).__name__)
def test_unknown_fields_are_written_back(record: Document) -> None:
    raw = {**json.loads(record.to_json()), "version": "1.9", "mood": {"a": [1, None, {"b": "c"}]}}
    if "members" in raw:
        raw["members"] = [{**m, "rack": "r1"} for m in raw["members"]]
    read = type(record).from_json(json.dumps(raw))
    assert json.loads(read.to_json()) == raw
    assert hash(read) == hash(type(record).from_json(json.dumps({**raw, "mood": 1})))


def broken(record: Document, **changes: Any) -> str:
    raw = {**json.loads(record.to_json()), **changes}
    return json.dumps({k: v for k, v in raw.items() if v is not KeyError})


@pytest.mark.parametrize(
    ("text", "names_it"),
    [
        (
            broken(ROUND, version="2.0"),
            r"^Round: version 2\.0 cannot be read by this elasticd, which speaks 1\.0; run the",
        ),
        (broken(ROUND, version=KeyError), r"^Round\.version: expected 'major\.minor', got None"),
        (broken(ROUND, version="1"), r"Round\.version"),
        (broken(ROUND, version=1.0), r"Round\.version"),
        (broken(ROUND, version="1.²"), r"Round\.version"),
        (broken(ROUND, number=KeyError), r"^Round\.number: missing"),
        (broken(ROUND, number="7"), r"^Round\.number: expected a whole number, got a string"),
        (broken(ROUND, number=True), r"^Round\.number: expected a whole number, got true or false"),
        (broken(ROUND, number=7.0), r"^Round\.number"),
        (broken(ROUND, number=-1e9), r"^Round\.number: expected a whole number"),
        (broken(ROUND, number=-1_000_000_000), r"^Round\.number: expected a number from -256"),
        (broken(ROUND, budget={"tokens": -1e17}), r"^Round\.budget\.tokens: expected a number from 0 to 1e\+11"),
        (broken(ROUND, budget={"tokens": 1e300}), r"^Round\.budget\.tokens: expected a number from 0 to 1e\+11"),
        (broken(ROUND, number=2**63), r"^Round\.number: expected a number from -256 to 9"),
        (broken(ROUND, number=0), r"round 0: numbers start at 1"),
        (broken(ROUND, members=[]), r"at least one member"),
        (broken(ROUND, members=None), r"^Round\.members: expected a list, got null"),
        (
            broken(ROUND, members=[{"node": "a", "incarnation": "i", "slots": [1, 1]}]),
            r"member 'a': slots must be distinct",
        ),
        (broken(ROUND, members=[{"node": "a", "incarnation": "i", "slots": []}]), r"at least one slot"),
        (broken(ROUND, members=[{"node": "a", "slots": [1]}]), r"^Round\.members\[0\]\.incarnation: missing"),
        (broken(ROUND, members=json.loads(ROUND.to_json())["members"][:1] * 2), r"twice"),
        (broken(ROUND, last_checkpoint=[1]), r"^Round\.last_checkpoint: expected a list of 2, got \[1\]"),
        (broken(ROUND, last_checkpoint=[1, "x"]), r"^Round\.last_checkpoint\[1\]"),
        (broken(ROUND, budget={"tokens": "many"}), r"^Round\.budget\.tokens"),
        (broken(ROUND, budget={"counted": -1}), r"budget: no counter may be negative"),
        (broken(ROUND, budget=[]), r"^Round\.budget: expected an object, got a list"),
        (broken(ROUND, quarantined_slots=[{"node": "a", "slot": 0, "strikes": -1}]), r"quarantine of slot 0"),
        (
            broken(ROUND, outcome="won", exit_code=0),
            r"^Round\.outcome: expected one of succeeded, failed, stopped, got 'won'",
        ),
        (broken(ROUND, outcome="failed"), r"outcome and exit_code come together"),
        (broken(END, exit_code=256), r"exit_code 256 is not in 0\.\.255"),
        (broken(ROUND, reason="\ud800"), r"^Round\.reason: .* surrogate"),
        (broken(FAILURE, culprits=[[1]]), r"^Failure\.culprits\[0\]"),
        (broken(FAILURE, detail=3), r"^Failure\.detail: expected a string, got a number"),
        (broken(NODE, slots=[-1]), r"node 'a': slots"),
        (broken(NODE, leaving_code=256), r"node 'a': leaving_code 256 is not in 0\.\.255"),
        ('{"version": "1.0", "version": "1.0"}', r"names a field twice"),
        ('{"version": "1.0", "x": NaN}', r"NaN is not JSON"),
        ('{"version": "1.0", "x": 1e999}', r"1e999 is too large"),
        ('{"version": "1.0", "x": ' + "[" * 40 + "]" * 40 + "}", r"deeper than 32"),
        ("[" * 100_000, r"not JSON"),
        ("1" * 5000, r"not JSON"),
        ("[]", r"expected an object, got a list"),
        ("", r"not JSON"),
    ],
)
def test_invalid_field_is_named(text: str, names_it: str) -> None:
    kind: type[Document] = {"Fail": Failure, "node": NodeRecord}.get(names_it.lstrip("^")[:4], Round)
    with pytest.raises(WireError, match=names_it):
        kind.from_json(text)


@settings(max_examples=200)
@given(st.sampled_from([ROUND, END, FAILURE, NODE]), st.data())
def test_mutated_value_is_refused_or_valid(record: Document, data: st.DataObject) -> None:
    """One wrong value anywhere in a record raises WireError, or still makes sense."""
    raw = json.loads(record.to_json())
    spot: Any = raw
    while True:
        keys = sorted(spot) if isinstance(spot, dict) else list(range(len(spot)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(spot[key], dict | list) and spot[key]) or data.draw(st.booleans()):
            break
        spot = spot[key]
    spot[key] = data.draw(json_values)
    with contextlib.suppress(WireError):
        read = type(record).from_json(json.dumps(raw))
        line = read.to_json()
        assert type(record).from_json(line) == read


def test_undecodable_output_can_be_reported() -> None:
    detail = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert Failure.from_json(Failure(1, "a", "crash", (), "w", detail=detail).to_json()).detail == "caf?"


PARTS = st.sampled_from(['"members":[{', "}]", "},{", "}, {", '"node":', '"', "\\", "{", "[", "x"])
part_names = st.lists(PARTS, min_size=1, max_size=4).map("".join)
nested = st.recursive(
    part_names | st.just(1),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["members", "node", "x", "}]", "},{"]), inner, max_size=2)
    ),
    max_leaves=4,
)
newer_fields = st.dictionaries(st.sampled_from(["x", "members"]), nested, max_size=1)
doubtful = st.builds(Member, part_names, part_names, st.just((0,)), part_names, unknown=newer_fields)


@given(
    st.lists(st.lists(doubtful, max_size=3, unique_by=lambda m: m.node), min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["aside", "zenith"]), nested, max_size=1),
    st.sampled_from([(",", ":"), (", ", ": ")]),
)
def test_known_members_change_no_round(lists: list[list[Member]], unknown: dict[str, Any], space: Any) -> None:
    """Whatever names and newer fields contain, a Round is the same with the members of the one before as without."""
    known = MemberCache()
    for number, some in enumerate(lists, 1):
        round = Round(number, (Member("a", "i", (0,)), *(m for m in some if m.node != "a")), unknown=unknown)
        text = json.dumps(round.to_dict(), sort_keys=True, separators=space).encode()
        for given_text in (text, text.replace(b"[0]", b"[true]", 1), text[:-3], text):
            answers = []
            for parse in (None, known.parse_round):
                with contextlib.suppress(WireError):
                    answers.append(Round.from_json(given_text, parse))
            assert answers in ([], [answers[0]] * 2 if answers else [])


def member_text(node: str, more: str = "") -> str:
    return f'{{"incarnation":"i","node":"{node}","slots":[0]{more}}}'


def round_text(*members: str, more: str = '"number":1') -> bytes:
    return f'{{"aside":1,"members":[{",".join(members)}],{more},"version":"1.0"}}'.encode()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # a division inside a name, and members that blanks divide: as many texts as members, but other ones
        (
            round_text(member_text("a", ',"role":"},{"') + ", " + member_text("b")),
            round_text(member_text("a", ',"role":"').removesuffix("}") + "}", member_text("c")),
        ),
        # the same with a list of objects inside a newer field
        (
            round_text(member_text("a", ',"x":[{"q":0},{"q":1} ]') + ", " + member_text("b")),
            round_text(member_text("a", ',"x":[{"q":0},' + member_text("d") + ',{"q":1} ]') + ", " + member_text("b")),
        ),
        # the members of a newer field, in a Round without any
        (
            round_text(member_text("a")),
            b'{"aside":{"members":[' + member_text("a").encode() + b']},"exit_code":0,"members":[],"number":2,'
            b'"outcome":"succeeded","version":"1.0"}',
        ),
    ],
)
def test_doubtful_divisions_are_parsed_as_a_whole(first: bytes, second: bytes) -> None:
    known = MemberCache()
    assert Round.from_json(first, known.parse_round) == Round.from_json(first)
    answers = []
    for parse in (known.parse_round, None):
        with contextlib.suppress(WireError):
            answers.append(Round.from_json(second, parse))
    assert len(answers) in (0, 2) and answers[:1] == answers[1:]


def test_known_member_is_the_same_object() -> None:
    known = MemberCache()
    before = Round.from_json(ROUND.to_json(), known.parse_round)
    after = Round.from_json(dataclasses.replace(ROUND, number=8).to_json(), known.parse_round)
    assert before == ROUND and after.members[1] is before.members[1]


def test_ranks_run_through_members_and_slots() -> None:
    assert ROUND.world_size == 3
    assert list(ROUND.assignments()) == [(0, "a", 0, 4), (1, "a", 1, 2), (2, "b", 0, 0)]
    assert (ROUND.ranks("a"), ROUND.ranks("b"), ROUND.ranks("z")) == (range(2), range(2, 3), range(0))
    assert (ROUND.group_rank("b"), ROUND.member("b"), ROUND.member("z")) == (1, ROUND.members[1], None)
    assert (ROUND.terminal, END.terminal) == (False, True)
    with pytest.raises(KeyError, match="'z' is not a member of round 7"):
        ROUND.group_rank("z")


def test_default_of_every_number_can_be_read() -> None:
    """A report with a default out of range is not decoded by the leader: no hang would be found."""
    wrong = [
        f"{record.__name__}.{field.name}"
        for record in _subclasses(Record)
        for field in dataclasses.fields(record)
        if isinstance(field.default, float) and not record.FLOAT_RANGE[0] <= field.default <= record.FLOAT_RANGE[1]
    ]
    assert wrong == []
    assert HangReport.from_json(HangReport(1, "a", (RankReport(0, 0),)).to_json()).restart_s == -1.0


def _subclasses(record: type[Record]) -> Iterator[type[Record]]:
    for each in record.__subclasses__():
        yield each
        yield from _subclasses(each)
