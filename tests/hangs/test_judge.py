"""HangJudge: when reports become a verdict, how often it is returned, and its Failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.hangs.judge import HangJudge, failures
from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Member, Round
from elasticd_agent.model.reports import HangReport, HangVerdict, RankReport

ROUND = Round(3, (Member("a", "i", (0,)), Member("b", "i", (4,))))
POLICY = Policy(hang_floor_s=5.0)
NOW = 1000.0
NOBODY: frozenset[str] = frozenset()


def report(node: str, rank: int, slot: int, *, behind: bool, idle_s: float = 6.0, gathered: bool = True) -> HangReport:
    seen = RankReport(
        rank,
        slot,
        phase="step",
        step=30,
        collectives=89 if behind else 90,
        usual=3,
        timeout_s=1800.0,
        idle_s=idle_s,
        alive_s=0.1,
        state="S",
        window_s=3.0,
        where="elsewhere" if behind else "collective",
        function="data.py:8 load" if behind else "all_reduce (ddp.py:1)",
        stack="x" if behind else "y",
        evidence=True,
    )
    return HangReport(3, node, (seen,), why="quiet", deadline_s=5.0, gathered=gathered)


A, B = report("a", 0, 0, behind=False), report("b", 1, 4, behind=True)


def test_report_of_a_plain_script_can_be_read() -> None:
    """Of what is unknown it says -1."""
    assert HangReport.from_json(A.to_json()) == A


def test_single_report_waits_for_others() -> None:
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [A], NOBODY, NOW) is None
    assert judge.suspected, "the others are asked"
    late = NOW + POLICY.evidence_timeout_s + POLICY.seen_timeout_s + POLICY.renewal_s
    assert judge.turn(ROUND, [A], NOBODY, late - 0.01) is None
    assert judge.turn(ROUND, [A], NOBODY, late) is None, "one rank that waits says little"
    found = judge.turn(ROUND, [report("a", 0, 0, behind=False, idle_s=90.0)], NOBODY, late + 84)
    assert found.why.endswith("b did not answer")


def test_evidence_comes_before_verdict() -> None:
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [A, replace(B, gathered=False)], NOBODY, NOW) is None
    found = judge.turn(ROUND, [A, B], NOBODY, NOW + 0.1)
    assert (found.culprits, found.cause, found.kills_group) == ((("b", 1, 4),), "blocked", True)
    assert found.hung_s == 6.0
    assert judge.new_verdicts == [found]


def test_verdict_waits_for_a_raised_evidence_timeout() -> None:
    judge = HangJudge(replace(POLICY, evidence_timeout_s=20.0))
    reports = [A, replace(B, gathered=False)]
    assert judge.turn(ROUND, reports, NOBODY, NOW) is None
    assert judge.turn(ROUND, reports, NOBODY, NOW + 21.9) is None
    found = judge.turn(ROUND, reports, NOBODY, NOW + 22.0)
    assert found.culprits == (("b", 1, 4),)


def test_verdict_is_new_once_and_repeats() -> None:
    """The store may go away between the verdict and the Failure that it becomes."""
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [A, B], NOBODY, NOW) is not None
    older = [replace(r, ranks=tuple(replace(seen, idle_s=9.0) for seen in r.ranks), turn=1) for r in (A, B)]
    assert judge.turn(ROUND, older, NOBODY, NOW + 3) is not None
    assert len(judge.new_verdicts) == 1, "the same one, only older"


def test_next_round_is_judged_by_its_own_reports() -> None:
    judge = HangJudge(POLICY)
    found = judge.turn(ROUND, [A, B], NOBODY, NOW)
    following = [replace(each, round=4) for each in (A, B)]
    again = judge.turn(replace(ROUND, number=4), following, NOBODY, NOW + 1)
    assert (found.round, again.round) == (3, 4)
    assert judge.new_verdicts == [found, again]


def test_hang_is_as_old_as_the_culprits_silence() -> None:
    found = HangJudge(POLICY).turn(ROUND, [A, report("b", 1, 4, behind=True, idle_s=30.0)], NOBODY, NOW)
    assert (found.culprits, found.hung_s) == ((("b", 1, 4),), 30.0)


def test_withdrawn_report_ends_the_hang() -> None:
    judge = HangJudge(POLICY)
    waits = [report(node, rank, rank, behind=False, idle_s=90.0) for rank, node in enumerate("ab")]
    assert judge.turn(ROUND, [replace(waits[0], why=""), replace(waits[1], gathered=False)], NOBODY, NOW) is None
    assert judge.turn(ROUND, [waits[1]], NOBODY, NOW + 100) is None
    assert judge.new_verdicts == []


def test_node_whose_workers_have_ended_does_not_make_progress() -> None:
    """It has reported before, and withdrawn its report as its group ended: the others hang all the same."""
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [A, replace(B, ranks=(replace(B.ranks[0], idle_s=1.0),))], NOBODY, NOW) is None
    assert judge.turn(ROUND, [A], NOBODY, NOW + 1) is None, "it may be lost, or train again"
    found = judge.turn(ROUND, [A], frozenset({"b"}), NOW + 1)
    assert found is not None
    assert (found.cause, found.culprits) == ("missed_collective", (("b", 1, 4),))


def test_nothing_is_judged_while_a_node_ends_its_last_group() -> None:
    """Ranks wait for that node's, however short the floor is: a worker with a GPU may take 20 s to die."""
    policy = Policy(hang_floor_s=2.0)
    joins = replace(A.ranks[0], phase="starting", where="init", collectives=-1, evidence=True)
    reads = replace(joins, rank=2, slot=1, where="elsewhere", function="data.py:8 wait_until_rank_1_has_written_it")

    def waiting(second: int) -> HangReport:
        return replace(A, ranks=tuple(replace(rank, idle_s=float(second)) for rank in (joins, reads)))

    judge = HangJudge(policy)
    assert [judge.turn(ROUND, [waiting(s)], NOBODY, NOW + s, ending=["b"]) for s in range(20)] == [None] * 20
    assert judge.suspected, "the others are asked"
    assert judge.turn(ROUND, [waiting(20)], NOBODY, NOW + 20) is None, "b gets time to answer"
    started = replace(B, ranks=(RankReport(1, 4, idle_s=0.0),), gathered=False, why="")
    assert judge.turn(ROUND, [waiting(21), started], NOBODY, NOW + 21) is None
    without = HangJudge(policy)
    verdicts = [without.turn(ROUND, [waiting(s)], NOBODY, NOW + s) for s in range(20)]
    assert {found.cause for found in verdicts if found} == {"never_joined"}, "that is what it looks like"


def test_reset_gives_time_to_answer_again() -> None:
    judge = HangJudge(POLICY)
    late = report("a", 0, 0, behind=False, idle_s=90.0)
    assert judge.turn(ROUND, [late], NOBODY, NOW) is None
    judge.reset()
    assert judge.turn(ROUND, [late], NOBODY, NOW + 100) is None
    assert judge.turn(ROUND, [late], NOBODY, NOW + 200) is not None


def test_second_hang_after_progress() -> None:
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [A, B], NOBODY, NOW)
    assert judge.turn(ROUND, [], NOBODY, NOW + 1) is None
    assert not judge.suspected
    assert judge.turn(ROUND, [A, B], NOBODY, NOW + 20), "the reports were taken back in between"


def test_other_rounds_and_nonmembers_are_ignored() -> None:
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [replace(A, round=2), replace(B, node="z")], NOBODY, NOW) is None
    assert not judge.suspected


def test_requested_report_is_no_suspicion() -> None:
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [replace(A, why=""), replace(B, why="")], NOBODY, NOW) is None
    assert not judge.suspected


def test_done_node_is_blamed_by_waiting_ranks() -> None:
    """Its rank has left the loop too early: it counts as exited, without a report."""
    found = HangJudge(POLICY).turn(ROUND, [A], frozenset({"b"}), NOW)
    assert found.cause == "missed_collective"
    assert found.culprits == (("b", 1, 4),)


def test_hang_lasts_as_long_as_no_running_rank_made_progress() -> None:
    """Here the store is at fault, and no rank waits for another one."""
    stopped = replace(A, store_state="T", store_stopped_s=9.0)
    found = HangJudge(POLICY).turn(ROUND, [stopped], frozenset({"b"}), NOW)
    assert (found.cause, found.hung_s) == ("store", 6.0)


def test_on_hang_report() -> None:
    judge = HangJudge(replace(POLICY, on_hang="report"))
    assert judge.turn(ROUND, [A, B], NOBODY, NOW) is None
    assert [judged.kills_group for judged in judge.new_verdicts] == [False]


@pytest.mark.parametrize(
    ("culprits", "expected"),
    [
        ((), [("a", ())]),
        ((("b", 1, 4),), [("b", ((1, 4),))]),
        ((("b", 1, 4), ("c", 2, 0), ("b", 3, 5)), [("b", ((1, 4), (3, 5))), ("c", ((2, 0),))]),
    ],
)
def test_failures_of_a_verdict(
    culprits: tuple[tuple[str, int, int], ...], expected: list[tuple[str, tuple[tuple[int, int], ...]]]
) -> None:
    found = failures(HangVerdict(3, culprits, "blocked", "rank 1 waits", 6.0, True, ()), "a", 40, (3, 20))
    assert [(f.node, f.culprits) for f in found] == expected
    assert {(f.round, f.kind, f.why, f.high_water, f.checkpoint, f.cause) for f in found} == {
        (3, "hung", "rank 1 waits", 40, (3, 20), "blocked")
    }


@pytest.mark.parametrize(
    ("floor", "kills", "limit_s"),
    [(None, 0, 60.0), (None, 1, 120.0), (None, 2, 240.0), (5.0, 0, 5.0), (5.0, 1, 10.0), (5.0, 9, 1800.0)],
)
@pytest.mark.parametrize("place", ["elsewhere in data.py load", "elsewhere in other.py f", ""])
def test_killed_wait_gets_more_time(floor: float | None, kills: int, limit_s: float, place: str) -> None:
    """In any later round, at any step and line; a rank without a stack may be in the same wait."""
    function = {"elsewhere in data.py load": "data.py:99 load", "": ""}.get(place, "x.py:1 g")
    b = replace(B.ranks[0], function=function, where="elsewhere" if function else "")
    policy = Policy(hang_floor_s=floor)
    expected = limit_s if "load" in place or not place else (floor or 60.0)
    for idle_s, hung in ((expected - 1.0, False), (expected + 4.0, True)):
        judge = HangJudge(policy)
        reports = [
            replace(r, ranks=(replace(one, idle_s=idle_s),), restart_s=0.0) for r, one in ((A, A.ranks[0]), (B, b))
        ]
        found = judge.turn(replace(ROUND, hang_places=(("elsewhere in data.py load", kills),)), reports, NOBODY, NOW)
        assert (found is not None) is hung, idle_s
        if found is not None and function:
            waiting = "collective in all_reduce (ddp.py:1)"
            assert [(one.places, one.hang_step) for one in failures(found, "a", 0, None)] == [
                (("elsewhere in " + function.replace(":99", "").replace(":1", ""), waiting), 30)
            ]


def test_place_that_was_doubted_stays_so() -> None:
    """A false proof at the end of each epoch costs one restart: the next wait passes, and all later ones."""
    judge = HangJudge(Policy())
    place = "collective in all_reduce"
    killed = replace(ROUND, hang_places=((place, 1),), hang_steps=((place, 30),))

    def turn(step: int) -> HangVerdict | None:
        ranks = [replace(one.ranks[0], where="collective", step=step, idle_s=70.0) for one in (A, B)]
        found = zip((A, B), ranks, ("all_reduce", "broadcast"), strict=True)
        reports = [replace(one, ranks=(replace(rank, function=f, place=""),)) for one, rank, f in found]
        return judge.turn(killed, reports, NOBODY, NOW)

    assert HangJudge(Policy()).turn(killed, [A, B], NOBODY, NOW) is None
    assert turn(30) is None
    assert turn(90) is None, "three steps later"


def test_weak_hang_is_reported_once_and_then_ended() -> None:
    judge = HangJudge(Policy())

    def turn(idle_s: float) -> HangVerdict | None:
        return judge.turn(ROUND, [replace(r, ranks=(replace(r.ranks[0], idle_s=idle_s),)) for r in (A, B)], NOBODY, NOW)

    assert [turn(idle_s) for idle_s in (59.0, 61.0, 62.0, 1000.0)] == [None] * 4
    assert [one.kills_group for one in judge.new_verdicts] == [False]
    assert turn(1804.0) is not None
    assert [one.kills_group for one in judge.new_verdicts] == [False, True]


def test_group_that_resumes_is_not_overdue() -> None:
    """A debugger detaches after 70 s: for a moment its rank trains and the other still waits for it."""
    judge = HangJudge(Policy())

    def turn(at: float, *, traced: bool, idle_s: float) -> HangVerdict | None:
        waits = replace(A.ranks[0], idle_s=70.0 + at, waiting_s=70.0 + at)
        debugged = replace(B.ranks[0], idle_s=idle_s, state="t" if traced else "S")
        return judge.turn(ROUND, [replace(A, ranks=(waits,)), replace(B, ranks=(debugged,))], NOBODY, NOW + at)

    assert turn(0.0, traced=True, idle_s=70.0) is None
    assert [turn(at, traced=False, idle_s=0.3) for at in (0.25, 0.5, 5.0)] == [None] * 3
    judge.new_verdicts.clear()
    assert turn(5.5, traced=False, idle_s=0.3) is None, "it trains"
    assert [one.kills_group for one in judge.new_verdicts] == [False], "it steps and steps while the other waits"
