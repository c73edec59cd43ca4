"""Verdicts on CUDA jobs, by what NCCL's recorder says of the devices: constructed situations, hung and healthy.

Groups are written as {group: (enqueued, completed)}. WORLD is of all ranks, PAIR and OTHER of some. The counts are what
the heartbeat thread reads from a recorder with them, for each kind of backend that torch has made for "nccl".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elasticd.heartbeat.record import GroupCounts as GroupCountsSeen
from elasticd.heartbeat.record import Heartbeat
from elasticd.heartbeat.recorders import GroupCountReader
from elasticd_agent.hangs.observer import _Ages
from elasticd_agent.hangs.rank import RankState
from elasticd_agent.hangs.verdict import Hang, judge
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport, RankReport
from tests.library.fake_recorders import FakeGroup, FakeTorch, Kind

WORLD, PAIR, OTHER = 1, 2, 3
POLICY = Policy()
FULL_QUEUE = {"cpu_s": 3.0, "quiet_s": 0.0, "where": "elsewhere", "function": "train.py:9 forward"}
"""A launch that spins: a core is busy, and the stack is anywhere in forward, backward or the optimizer."""
PROXY = {"cpu_s": 3.0, "quiet_s": 0.0, "where": "device", "function": "train.py:12 item"}
"""The main thread sleeps in a synchronisation, NCCL's proxy thread spins."""
IN_ITEM = {"where": "device", "function": "train.py:12 item"}
IN_GLOO = {"where": "collective", "function": "barrier"}
IN_BARRIER = {"where": "barrier", "function": "session.barrier"}
SLEEPS = {"where": "elsewhere", "function": "data.py:3 read"}
COMPUTES = SLEEPS | {"cpu_s": 3.0, "quiet_s": 0.0, "moved_s": 0.0}
NO_GIL = SLEEPS | {"alive_s": 1e6}
Groups = dict[int, tuple[int, int]]


def rank(groups: Groups, facts: dict[str, Any] = FULL_QUEUE, **more: Any) -> dict[str, Any]:
    counts = tuple((group, enqueued, completed) for group, (enqueued, completed) in groups.items())
    return {"nccl_groups": counts, "device_s": 1e6 if counts else -1.0} | facts | more


@dataclass(frozen=True)
class Cuda:
    """`healthy_s`: no verdict for so long without progress; `hung_s`: a verdict by then, None for never."""

    ranks: list[dict[str, Any]]
    healthy_s: float
    hung_s: float | None
    cause: str = ""
    culprits: tuple[int, ...] = ()
    nodes: int = 1


PENDING = rank({WORLD: (500, 400)})
NEVER = None
SITUATIONS = {
    # hung: no member will ever enqueue what the others wait in
    "hang in a collective, launches spin": Cuda([PENDING] * 4, 59, 61, "network"),
    "hang in a collective, proxies spin": Cuda([rank({WORLD: (7, 6)}, PROXY)] * 4, 59, 61, "network", nodes=2),
    "a rank sleeps before its collective": Cuda(
        [PENDING, rank({WORLD: (400, 400)}, SLEEPS), PENDING], 59, 61, "blocked", (1,)
    ),
    "a rank holds the GIL": Cuda([PENDING, rank({WORLD: (400, 400)}, NO_GIL)], 14, 16, "gil", (1,)),
    "skipped collective in a sub-group": Cuda(
        [
            rank({WORLD: (90, 90), PAIR: (6, 5)}, IN_ITEM),
            rank({WORLD: (91, 90), PAIR: (5, 5)}, IN_ITEM, collectives=91),
            rank({WORLD: (91, 90)}, IN_ITEM, collectives=91),
        ],
        *(4, 6, "mismatched_collectives"),
    ),
    "a rank that a sub-group waits for sleeps": Cuda(
        [rank({WORLD: (90, 90), PAIR: (6, 5)}), rank({WORLD: (90, 90), PAIR: (5, 5)}, SLEEPS), rank({WORLD: (91, 90)})],
        *(59, 61, "blocked", (1,)),
    ),
    "the culprit is behind two groups": Cuda(
        [
            rank({WORLD: (90, 90), PAIR: (6, 5)}),
            rank({WORLD: (90, 90), PAIR: (6, 5), OTHER: (3, 2)}),
            rank({WORLD: (90, 90), OTHER: (2, 2)}, SLEEPS),
        ],
        *(59, 61, "blocked", (2,)),
    ),
    "never enqueued anything in a new group": Cuda(
        [rank({WORLD: (9, 9), PAIR: (1, 0)}), rank({WORLD: (9, 9), PAIR: (0, 0)}, SLEEPS)], 59, 61, "blocked", (1,)
    ),
    "waits in gloo for ranks in NCCL, without gloo's recording": Cuda(
        [rank({WORLD: (9, 8)}, IN_ITEM), rank({WORLD: (8, 8)}, IN_GLOO), rank({WORLD: (9, 8)}, IN_ITEM)],
        *(59, 61, "missed_collective", (1,)),
    ),
    "waits in the session for ranks in NCCL": Cuda(
        [rank({WORLD: (9, 8)}, IN_ITEM), rank({WORLD: (8, 8)}, IN_BARRIER), rank({WORLD: (9, 8)}, IN_ITEM)],
        *(4, 6, "missed_collective", (1,)),
    ),
    "another thread of the script may enqueue it": Cuda(
        [rank({WORLD: (9, 8)}, IN_ITEM), rank({WORLD: (8, 8)}, IN_BARRIER, alone=False)],
        *(59, 61, "missed_collective", (1,)),
    ),
    "two groups in opposite order": Cuda(
        [rank({PAIR: (1, 0), OTHER: (0, 0)}, IN_ITEM), rank({PAIR: (0, 0), OTHER: (1, 0)}, IN_ITEM)],
        *(4, 6, "mismatched_collectives"),
    ),
    "the same, but both may still enqueue the other one": Cuda(
        [rank({PAIR: (1, 0), OTHER: (0, 0)}, SLEEPS), rank({PAIR: (0, 0), OTHER: (1, 0)}, SLEEPS)],
        *(59, 61, "mismatched_collectives"),
    ),
    "in a barrier of gloo, the others may still reach it": Cuda(
        [rank({WORLD: (9, 8)}, SLEEPS), rank({WORLD: (8, 8)}, IN_GLOO), rank({WORLD: (9, 8)}, SLEEPS)],
        *(59, 61, "missed_collective", (1,)),
    ),
    "a collective of a node is stuck": Cuda(
        [
            rank({WORLD: (8, 8), PAIR: (5, 4)}),
            rank({WORLD: (8, 8), PAIR: (5, 4)}, collectives=399),
            rank({WORLD: (9, 8)}),
            rank({WORLD: (9, 8)}),
        ],
        *(59, 61, "network"),
    ),
    "ran ahead by different numbers, then hung": Cuda(
        [rank({WORLD: (900, 400)}, collectives=900), rank({WORLD: (401, 400)}, PROXY, collectives=401)] * 2,
        *(59, 61, "network"),
    ),
    "a long kernel before the collective of one": Cuda(
        [PENDING, rank({WORLD: (400, 400)}, IN_ITEM, collectives=400)], 59, 61, "blocked", (1,)
    ),
    # healthy for as long as each may take
    "a link flaps for 40 s": Cuda([PENDING] * 8, 40, 61, "network", nodes=2),
    "a new communicator is made for 50 s": Cuda([rank({WORLD: (9, 9), PAIR: (1, 0)}, IN_ITEM)] * 4, 50, 61, "network"),
    "a long kernel on all ranks": Cuda([rank({WORLD: (9, 9)}, IN_ITEM)] * 4, 59, 61, "network"),
    "devices complete a long queue": Cuda([rank({WORLD: (900, 400)}, device_s=0.4)] * 4, 1700, NEVER),
    "one device completes what others wait for": Cuda(
        [PENDING, PENDING, rank({WORLD: (500, 400), PAIR: (80, 33)}, device_s=0.4)], 1700, NEVER
    ),
    "rank 0 computes, the others wait": Cuda([rank({WORLD: (400, 400)}, COMPUTES), PENDING, PENDING], 1700, NEVER),
    "all compute, nothing is pending": Cuda([rank({WORLD: (400, 400)}, COMPUTES)] * 2, 1700, NEVER),
    "an asynchronous collective under a computation": Cuda(
        [rank({WORLD: (401, 400)}, COMPUTES), rank({WORLD: (400, 400)}, COMPUTES)], 1700, NEVER
    ),
    "no recorder, launches spin": Cuda([rank({})] * 4, 1700, NEVER),
    "no recorder on one rank": Cuda([PENDING, PENDING, rank({})], 1700, NEVER),
}


class Reader:
    """What the heartbeat thread of one rank reads of groups that have a backend of this kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.torch, self.counts = FakeTorch(), GroupCountReader()
        self.made: dict[int, FakeGroup] = {}

    def read(self, groups: Groups, members: dict[int, tuple[int, ...]]) -> GroupCountsSeen:
        for group, (enqueued, completed) in groups.items():
            if group not in self.made:
                self.made[group] = self.torch.group(str(group), members[group], self.kind)
            self.made[group].at(enqueued, completed)
        with pytest.MonkeyPatch.context() as patch:
            self.torch.install(patch)
            return self.counts.read(8)


def members(ranks: Iterable[Groups]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for number, groups in enumerate(ranks):
        for group in groups:
            found[group] = (*found.get(group, ()), number)
    return found


def verdict(case: Cuda, idle_s: float, kind: Kind = "nccl") -> Hang | None:
    ranks = []
    groups = [{group: (enqueued, done) for group, enqueued, done in one["nccl_groups"]} for one in case.ranks]
    for number, stated in enumerate(case.ranks):
        given = stated | {"nccl_groups": Reader(kind).read(groups[number], members(groups))}
        ages = {name: min(given.get(name, usual), idle_s) for name, usual in (("device_s", -1.0), ("alive_s", 0.1))}
        facts = {"collectives": 400, "state": "S", "window_s": 3.0, "moved_s": idle_s, "quiet_s": idle_s, "alone": True}
        facts |= given | ages
        ranks.append(RankReport(number, number, "step", 100, usual=4, timeout_s=600.0, idle_s=idle_s, **facts))
    nodes = [f"n{number}" for number in range(case.nodes)]
    reports = [
        HangReport(1, node, tuple(ranks[at :: case.nodes]), deadline_s=3.0, gathered=True, turn=1)
        for at, node in enumerate(nodes)
    ]
    found = judge(reports, nodes, POLICY)
    return found if isinstance(found, Hang) else None


EACH = [pytest.param(case, id=name) for name, case in SITUATIONS.items()]
KINDS: tuple[Kind, ...] = ("nccl", "nccl2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", EACH)
def test_verdict_by_nccl_recorder(case: Cuda, kind: Kind) -> None:
    assert verdict(case, case.healthy_s, kind) is None
    if case.hung_s is not None:
        found = verdict(case, case.hung_s, kind)
        assert (found.cause, tuple(one.rank for one in found.culprits)) == (case.cause, case.culprits), found.why


@pytest.mark.parametrize("idle_s", [6, 61, 590])
@pytest.mark.parametrize("case", EACH)
def test_group_of_unknown_kind_ends_no_job(case: Cuda, idle_s: float) -> None:
    """No recorder has what nccl2 of torch 2.14 completes. A rank that holds the GIL needs none."""
    found = verdict(case, idle_s, "nccl2 of 2.14")
    assert (
        found is None
        or not found.kills_group
        or found.cause == "gil"
        or not any(one["nccl_groups"] for one in case.ranks)
    )


@pytest.mark.parametrize("idle_s", [6, 61, 590])
def test_thread_of_the_script_may_still_enqueue(idle_s: float) -> None:
    case = SITUATIONS["two groups in opposite order"]
    found = verdict(replace(case, ranks=[one | {"alone": False} for one in case.ranks]), idle_s)
    assert found is None or not found.kills_group


@pytest.mark.parametrize(("facts", "ends"), [(SLEEPS, True), (IN_GLOO, False)])
def test_main_thread_in_gloo_may_wait_for_a_healthy_rank(facts: dict[str, Any], ends: bool) -> None:
    """Their devices wait for each other."""
    ranks = [rank({PAIR: (1, 0), OTHER: (0, 0)}, facts), rank({PAIR: (0, 0), OTHER: (1, 0)}, SLEEPS)]
    found = verdict(Cuda(ranks, 0, None), 61)
    assert found.kills_group is ends


def test_ceiling_ends_a_group_of_unknown_kind() -> None:
    found = verdict(SITUATIONS["two groups in opposite order"], 1850, "nccl2 of 2.14")
    assert found.kills_group


@dataclass(frozen=True)
class Sequence:
    """What NCCL's recorder of each rank says, and whether steps are made again, by the second."""

    groups: Callable[[int, int], Groups]
    found_s: tuple[int, int] | None = None
    """The verdict comes between these; None: never."""
    steps_from_s: int = 1000
    facts: Any = None


def flapped(second: int, rank: int) -> Groups:
    return {WORLD: (500, 400 + 10 * max(0, second - 40))}


SEQUENCES = {
    "hang in a collective": Sequence(lambda second, rank: {WORLD: (500, 400)}, (58, 62)),
    "link flap that heals": Sequence(flapped, steps_from_s=45),
    "long kernel": Sequence(lambda second, rank: {WORLD: (400, 400)}, steps_from_s=55, facts=IN_ITEM),
    "new communicator": Sequence(
        lambda second, rank: {WORLD: (9, 9), PAIR: (1, int(second >= 50))}, steps_from_s=51, facts=IN_ITEM
    ),
    "run-ahead": Sequence(lambda second, rank: {WORLD: (min(1000, 300 + 200 * second), 300 + 5 * second)}),
    "run-ahead that hangs": Sequence(
        lambda second, rank: {WORLD: (min(1000, 300 + 200 * second), min(350, 300 + 5 * second))}, (58, 72)
    ),
    "skipped collective in a sub-group": Sequence(
        lambda second, rank: (
            {WORLD: (90 + min(rank, 1), 90), PAIR: (6 - rank % 2, 5)} if rank < 2 else {WORLD: (91, 90)}
        ),
        (3, 8),
        facts=IN_ITEM,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_of_recorder_status(name: str, kind: Kind) -> None:
    """As the agent observes it, once a second for two minutes."""
    case = SEQUENCES[name]
    ages, readers, found_s = [_Ages() for _ in range(3)], [Reader(kind) for _ in range(3)], None
    for second in range(120):
        ranks = []
        groups = [case.groups(second, number) for number in range(len(ages))]
        for number, (each, reader) in enumerate(zip(ages, readers, strict=True)):
            counts = reader.read(groups[number], members(groups))
            step = 100 + max(0, second - case.steps_from_s)
            each.on_heartbeat(Heartbeat(step=step, groups=counts, alive_ticks=10 * second + 1), 1.0, float(second))
            facts = {"where": "elsewhere", "state": "S", "window_s": 3.0, "alone": True} | (case.facts or FULL_QUEUE)
            facts |= {"quiet_s": min(facts.get("quiet_s", each.idle_s), each.idle_s), "moved_s": each.idle_s}
            seen = {"nccl_groups": each.nccl_groups, "device_s": each.device_s, "idle_s": each.idle_s, "alive_s": 0.1}
            collectives = next(iter(groups[number].values()))[0]
            ranks.append(RankReport(number, number, "step", step, collectives, 4, timeout_s=600.0, **seen | facts))
        report = HangReport(1, "n0", tuple(ranks), deadline_s=3.0, gathered=True, turn=second)
        if isinstance(judge([report], ["n0"], POLICY), Hang):
            found_s = second
            break
    if case.found_s is None:
        assert found_s is None
    else:
        assert found_s is not None
        assert case.found_s[0] <= found_s <= case.found_s[1]


def test_few_pairs_of_ranks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader judges four times a second while a suspicion lasts, also a thousand ranks."""
    compared: list[int] = []
    compare = RankState.collective_missing_for

    def counting(self: RankState, other: RankState) -> tuple[int, int] | None:
        compared.append(self.report.rank)
        return compare(self, other)

    monkeypatch.setattr(RankState, "collective_missing_for", counting)
    facts = [rank({WORLD: (9, 8)}) | {"idle_s": 70.0, "step": 3, "collectives": 9} for _ in range(40)]
    facts[7] |= {"nccl_groups": ((WORLD, 8, 8),)} | SLEEPS | {"cpu_s": 0.0, "quiet_s": -1.0}
    ranks = tuple(RankReport(number, 0, **one) for number, one in enumerate(facts))
    found = judge([HangReport(1, "a", ranks, deadline_s=5.0, gathered=True)], ["a"], POLICY)
    assert isinstance(found, Hang)
    assert [where.rank for where in found.culprits] == [7]
    assert compared == [7] * 39


def test_verdict_names_collective_and_group() -> None:
    found = verdict(SITUATIONS["a rank that a sub-group waits for sleeps"], 61)
    assert found.why.startswith(
        "rank 1 on n0 (step 100) has not enqueued collective 6 of the NCCL group of ranks 0, 1: it waits in data.py:3"
    )
    behind_two = verdict(SITUATIONS["the culprit is behind two groups"], 61)
    assert "; 1 rank waits in an NCCL collective" in behind_two.why, "rank 0 waits in another group than the culprit's"
