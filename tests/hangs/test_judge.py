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
        function="load (data.py:8)" if behind else "all_reduce (ddp.py:1)",
        stack="x" if behind else "y",
        evidence=True,
    )
    return HangReport(3, node, (seen,), why="quiet", deadline_s=5.0, gathered=gathered)


A, B = report("a", 0, 0, behind=False), report("b", 1, 4, behind=True)


def test_single_report_waits_for_others() -> None:
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [A], NOBODY, NOW) is None
    assert judge.suspected, "the others are asked"
    late = NOW + POLICY.evidence_s + POLICY.seen_timeout_s + POLICY.renewal_s
    assert judge.turn(ROUND, [A], NOBODY, late - 0.01) is None
    assert judge.turn(ROUND, [A], NOBODY, late) is None, "one rank that waits says little"
    found = judge.turn(ROUND, [report("a", 0, 0, behind=False, idle_s=90.0)], NOBODY, late + 84)
    assert found is not None
    assert found.why.endswith("b did not answer")


def test_evidence_comes_before_verdict() -> None:
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [A, replace(B, gathered=False)], NOBODY, NOW) is None
    found = judge.turn(ROUND, [A, B], NOBODY, NOW + 0.1)
    assert found is not None
    assert (found.culprits, found.cause, found.restarts) == ((("b", 1, 4),), "blocked", True)
    assert found.hung_s == 6.0
    assert judge.new_verdicts == [found]


def test_verdict_is_new_once_and_repeats() -> None:
    """The store may go away between the verdict and the Failure that it becomes."""
    judge = HangJudge(POLICY)
    assert judge.turn(ROUND, [A, B], NOBODY, NOW) is not None
    older = [replace(r, ranks=tuple(replace(seen, idle_s=9.0) for seen in r.ranks), turn=1) for r in (A, B)]
    assert judge.turn(ROUND, older, NOBODY, NOW + 3) is not None
    assert len(judge.new_verdicts) == 1, "the same one, only older"


def test_withdrawn_report_ends_the_hang() -> None:
    judge = HangJudge(POLICY)
    waits = [report(node, rank, rank, behind=False, idle_s=90.0) for rank, node in enumerate("ab")]
    assert judge.turn(ROUND, [replace(waits[0], why=""), replace(waits[1], gathered=False)], NOBODY, NOW) is None
    assert judge.turn(ROUND, [waits[1]], NOBODY, NOW + 100) is None
    assert judge.new_verdicts == []


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
    assert found is not None
    assert found.cause == "missed_collective"
    assert found.culprits == (("b", 1, 4),)


def test_on_hang_report() -> None:
    judge = HangJudge(replace(POLICY, on_hang="report"))
    assert judge.turn(ROUND, [A, B], NOBODY, NOW) is None
    assert [judged.restarts for judged in judge.new_verdicts] == [False]


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


def test_repeated_wait_gets_more_time() -> None:
    """A restart does not cure an intended wait; if it is a hang after all, a minute is lost."""
    policy = Policy()

    def turn(judge: HangJudge, number: int, idle_s: float, **more: object) -> HangVerdict | None:
        reports = [report(node, rank, rank, behind=node == "b", idle_s=idle_s) for rank, node in enumerate("ab")]
        seen = tuple(replace(one.ranks[0], **more) for one in reports)  # type: ignore[arg-type]
        again = [replace(r, round=number, ranks=(one,)) for r, one in zip(reports, seen, strict=True)]
        return judge.turn(replace(ROUND, number=number), again, NOBODY, NOW + 100 * number + idle_s)

    judge = HangJudge(policy)
    assert turn(judge, 3, 6.0) is not None
    assert turn(judge, 3, 7.0) is not None, "until it has been obeyed"
    assert turn(judge, 4, 59.0) is None
    found = turn(judge, 4, 60.0)
    assert found is not None
    assert found.why.endswith(
        "without using CPU, for 60.0 s; 1 rank waits in all_reduce (ddp.py:1) for it, as in the previous hang"
    )
    assert turn(judge, 5, 119.0) is None
    assert turn(judge, 5, 120.0) is not None, "no pause that is meant costs more than a few restarts"
    assert turn(judge, 6, 6.0, step=31) is not None
    assert turn(judge, 7, 6.0, step=31) is None
    given = HangJudge(replace(policy, hang_floor_s=5.0))
    assert turn(given, 3, 6.0) is not None
    assert turn(given, 4, 11.9) is None
    assert turn(given, 4, 12.0) is not None, "who gives a floor means it, as far as that goes"
    assert turn(given, 5, 6.0, step=31) is not None, "it is another place"
    done = HangJudge(replace(policy, hang_floor_s=5.0))
    assert turn(done, 3, 6.0, phase="exit") is not None
    assert turn(done, 4, 11.9, phase="exit") is None, "what comes last is trained for again by nobody's wish"
    ceiling = HangJudge(replace(policy, hang_floor_s=5.0, slow_ceiling_s=8.0))
    assert turn(ceiling, 3, 6.0) is not None
    assert turn(ceiling, 4, 8.0) is not None
