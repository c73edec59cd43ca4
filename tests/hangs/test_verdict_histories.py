"""Laws of the rules, tried on groups that hypothesis makes up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from elasticd_agent.hangs.causes import CAUSES
from elasticd_agent.hangs.verdict import Hang, Judgement, NoHang, RankLocation, SuspectedHang, judge, reason_to_suspect
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport, RankReport

POLICY = Policy(slow_ceiling_s=100, hang_floor_s=5)
WAITS = ("collective", "device", "init", "barrier")
FUNCTIONS = {"collective": ("all_reduce", "broadcast"), "device": ("synchronize",)}

Group = list[HangReport]
law = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@st.composite
def ranks(draw: st.DrawFn, number: int) -> RankReport:
    where = draw(st.sampled_from(["", "elsewhere", "collective", *WAITS]))
    idle_s = draw(st.sampled_from([0.0, 0.2, 1.4, 4.9, 5.1, 6.0, 30.0, 70.0, 200.0, 4000.0]))
    state = draw(st.sampled_from("SSSSRDTtZ"))
    return RankReport(
        number,
        draw(st.integers(0, 7)),
        phase=draw(st.sampled_from(["step", "step", "starting", "barrier", "checkpoint", "eval", "exit"])),
        step=draw(st.integers(99, 101)),
        collectives=draw(st.sampled_from([-1, 400, 401, 402])),
        usual=draw(st.sampled_from([-1, 3, 4])),
        barrier=draw(st.sampled_from(["", "epoch"])),
        timeout_s=draw(st.sampled_from([0.0, 30.0, 600.0])),
        idle_s=idle_s,
        alive_s=draw(st.sampled_from([-1.0, 0.0, 0.1, idle_s])),
        state=state,
        stopped_s=min(idle_s, draw(st.sampled_from([1.0, 3.0]))) if state == "T" else 0.0,
        cpu_s=draw(st.sampled_from([0.0, 0.01, 1.9])),
        io_bytes=draw(st.sampled_from([0, 4096, 10**7])),
        window_s=draw(st.sampled_from([0.0, 2.0])),
        where=where,
        function=draw(st.sampled_from(FUNCTIONS.get(where, ("", "x.py:1 f")))),
        evidence=draw(st.booleans()),
        exited=draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """One to three nodes with up to three ranks each, all reports gathered."""
    reports, number = [], 0
    for node in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        here = draw(st.integers(1, 3))
        reports.append(
            HangReport(
                7,
                node,
                tuple(draw(ranks(number + i)) for i in range(here)),
                deadline_s=draw(st.sampled_from([0.0, 5.0, 5.0, 60.0])),
                gathered=True,
                store_state=draw(st.sampled_from(["", "S", "S", "T"])),
                store_stopped_s=draw(st.sampled_from([0.0, 1.0, 3.0])),
                turn=draw(st.integers(1, 5)),
            )
        )
        number += here
    return reports


def nodes(group: Group) -> list[str]:
    return [report.node for report in group]


def verdict(group: Group) -> Judgement:
    return judge(group, nodes(group), POLICY)


def ends(found: Judgement) -> bool:
    return isinstance(found, Hang) and found.kills_group


def live(group: Group) -> list[RankReport]:
    return [rank for report in group for rank in report.ranks if not rank.exited]


def with_ranks(report: HangReport, new: Sequence[RankReport]) -> HangReport:
    return replace(report, ranks=tuple(new))


def at_a_deadline(group: Group) -> bool:
    """No rank is stopped or a zombie, no store stopped: only idle time counts against this group."""
    return not any(rank.state in "TZ" for rank in live(group)) and not any(r.store_state == "T" for r in group)


@law
@given(groups())
def test_every_judgement_has_a_reason(group: Group) -> None:
    """One line; culprits are ranks of the group, causes are of the closed list."""
    found = verdict(group)
    assert found.why
    assert "\n" not in found.why
    if isinstance(found, Hang):
        places = {RankLocation(report.node, rank.rank, rank.slot) for report in group for rank in report.ranks}
        assert set(found.culprits) <= places
        assert len(set(found.culprits)) == len(found.culprits)
        assert found.cause in CAUSES


@law
@given(groups(), st.randoms(use_true_random=False))
def test_duplicates_and_order_change_nothing(group: Group, draw: random.Random) -> None:
    old = [replace(r, turn=r.turn - 1, ranks=r.ranks[:1], deadline_s=1.0, store_state="T") for r in group]
    reports = [*group, *old, *group, *(replace(report, round=6, turn=99) for report in old)]
    draw.shuffle(reports)
    assert judge(reports, nodes(group)[::-1] * 2, POLICY) == verdict(group)


@law
@given(groups(), st.data())
def test_more_work_never_hangs_earlier(group: Group, data: st.DataObject) -> None:
    more = [
        with_ranks(
            report,
            [
                replace(rank, cpu_s=rank.cpu_s + data.draw(st.sampled_from([0.0, 1.0])), window_s=rank.window_s or 2.0)
                for rank in report.ranks
            ],
        )
        for report in group
    ]
    if ends(verdict(more)):
        assert ends(verdict(group))


@law
@given(groups())
def test_group_with_progress_is_not_hung(group: Group) -> None:
    running = live(group)
    assume(running and at_a_deadline(group))
    longest = max(report.deadline_s for report in group if any(not rank.exited for rank in report.ranks))
    if longest == 0 or min(rank.idle_s for rank in running) < longest:
        assert isinstance(verdict(group), NoHang)
        assert isinstance(judge(group, nodes(group), POLICY, deadline_passed=True), NoHang)


@law
@given(groups())
def test_working_rank_is_not_hung_before_ceiling(group: Group) -> None:
    assume(live(group) and at_a_deadline(group))
    works = replace(live(group)[0], where="elsewhere", phase="step", cpu_s=2.0, window_s=2.0)
    group = [with_ranks(r, [works if rank.rank == works.rank else rank for rank in r.ranks]) for r in group]
    if min(rank.idle_s for rank in live(group)) < 100:
        assert not ends(verdict(group))


@law
@given(groups(), st.permutations(range(9)))
def test_renumbered_ranks_get_same_blame(group: Group, numbers: list[int]) -> None:
    def again(report: HangReport) -> HangReport:
        named = {"a": "y", "b": "z", "c": "x"}[report.node]
        return replace(report, node=named, ranks=tuple(replace(r, rank=numbers[r.rank]) for r in report.ranks[::-1]))

    def blamed(found: Judgement) -> object:
        if isinstance(found, Hang):
            return found.cause, {place.rank for place in found.culprits}
        return type(found)

    renamed = verdict([again(report) for report in group])
    before = blamed(verdict(group))
    if isinstance(before, tuple):
        before = before[0], {numbers[rank] for rank in before[1]}
    assert blamed(renamed) == before


@law
@given(groups(), st.sampled_from([0.5, 3.0, 100.0]))
def test_more_idle_time_keeps_the_verdict(group: Group, seconds: float) -> None:
    def later(rank: RankReport) -> RankReport:
        return replace(
            rank,
            idle_s=rank.idle_s + seconds,
            stopped_s=rank.stopped_s + seconds if rank.state == "T" else 0.0,
            # A heartbeat that has stopped stays so; the others continue.
            alive_s=rank.alive_s + seconds if rank.alive_s >= max(1.0, rank.idle_s / 2) else rank.alive_s,
        )

    older = [
        replace(with_ranks(r, [later(rank) for rank in r.ranks]), store_stopped_s=r.store_stopped_s + seconds)
        for r in group
    ]
    if isinstance(verdict(group), Hang):
        assert isinstance(verdict(older), Hang)
        assert ends(verdict(older)) or not ends(verdict(group))


@law
@given(groups(), st.data())
def test_no_hang_without_every_nodes_evidence(group: Group, data: st.DataObject) -> None:
    missing = data.draw(st.sampled_from(range(len(group))))
    silent, slow = group[:missing] + group[missing + 1 :], list(group)
    slow[missing] = replace(slow[missing], gathered=False)
    for reports in (silent, slow):
        assert not isinstance(judge(reports, nodes(group), POLICY), Hang)
    if isinstance(verdict(group), Hang):
        assert isinstance(judge(slow, nodes(group), POLICY), SuspectedHang)
        assert isinstance(judge(slow, nodes(group), POLICY, deadline_passed=True), Hang)


@law
@given(groups())
def test_hang_was_suspected_by_some_node(group: Group) -> None:
    if isinstance(verdict(group), Hang):
        assert any(reason_to_suspect(report, POLICY) for report in group)


@law
@given(st.integers(2, 6), st.data())
def test_single_idle_rank_among_waiting_ones(world: int, data: st.DataObject) -> None:
    """On any node, at any place, with or without a known stack or count."""
    odd = data.draw(st.integers(0, world - 1))
    waits = RankReport(
        0,
        0,
        "step",
        50,
        900,
        4,
        idle_s=6,
        alive_s=0.1,
        state="S",
        window_s=2,
        where="collective",
        function="all_reduce",
    )
    counted = data.draw(st.booleans())
    behind = data.draw(st.integers(0, 30))
    stands = replace(
        waits,
        collectives=waits.collectives - behind,
        where=data.draw(st.sampled_from(["elsewhere", ""] if counted and behind else ["elsewhere"])),
        function=data.draw(st.sampled_from(["", "x.py:1 f"])),
        state=data.draw(st.sampled_from("SD")),
        phase=data.draw(st.sampled_from(["step", "checkpoint", "eval"])),
        idle_s=data.draw(st.sampled_from([5.5, 6.0, 9.0])),
        io_bytes=data.draw(st.sampled_from([0, 4096])),
    )
    everyone = [replace(stands if rank == odd else waits, rank=rank, slot=rank) for rank in range(world)]
    if not counted:
        everyone = [replace(rank, collectives=-1, usual=-1) for rank in everyone]
    split = data.draw(st.integers(1, world))
    parts = {"a": everyone[:split], "b": everyone[split:]}
    group = [HangReport(1, node, tuple(part), deadline_s=5, gathered=True) for node, part in parts.items() if part]
    found = verdict(group)
    assert isinstance(found, Hang)
    assert [place.rank for place in found.culprits] == [odd], "without a stack its count is known"
    assert found.cause == "blocked"
