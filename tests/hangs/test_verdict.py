"""Suspicion and judgement: thresholds, deadlines, missing reports. Culprits by situation are in transcripts/*.txt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd_agent.hangs import verdict as hang
from elasticd_agent.hangs.blame import blame, blame_overdue
from elasticd_agent.hangs.rank import RankState
from elasticd_agent.hangs.verdict import Hang, NoHang, RankLocation, SuspectedHang, judge, reason_to_suspect
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import DEFAULT_GROUP_NAME, GroupTail, HangReport, RankReport

POLICY = Policy(hang_floor_s=5.0)
WAITS = RankReport(
    0, 0, "step", 117, 4211, 36, idle_s=6, alive_s=0.1, state="S", window_s=2, where="collective", function="all_reduce"
)
SLEEPS = replace(WAITS, rank=1, slot=1, collectives=4210, where="elsewhere", function="x.py:1 f")


def report(
    *ranks: RankReport, node: str = "a", deadline_s: float = 5.0, gathered: bool = True, turn: int = 1
) -> HangReport:
    return HangReport(1, node, ranks, deadline_s=deadline_s, gathered=gathered, turn=turn)


def aged(seconds: float, *ranks: RankReport) -> tuple[RankReport, ...]:
    return tuple(replace(rank, idle_s=seconds) for rank in ranks)


def hang_of(*asked: Any, **more: Any) -> Hang:
    verdict = judge(*asked, **more)
    assert isinstance(verdict, Hang), verdict
    return verdict


# ---- one node's suspicion


@pytest.mark.parametrize(
    ("deadline_s", "first"), [(5, 3.0), (60, 57.0), (1.0, 0.6), (600, 597.0)], ids=["5 s", "60 s", "1 s", "600 s"]
)
def test_suspicion_leaves_time_for_evidence(deadline_s: float, first: float) -> None:
    def quiet(seconds: float) -> str | None:
        return reason_to_suspect(report(*aged(seconds, WAITS, SLEEPS), deadline_s=deadline_s), POLICY)

    assert quiet(first - 0.05) is None
    assert f"for {first:.1f} s; the deadline is {deadline_s:.1f} s" in (quiet(first) or "")


def test_one_rank_with_progress_prevents_suspicion() -> None:
    assert reason_to_suspect(report(WAITS, replace(SLEEPS, idle_s=0.1)), POLICY) is None
    done = replace(SLEEPS, idle_s=0.1, exited=True)
    assert reason_to_suspect(report(WAITS, done), POLICY) is not None, "one that has ended does not go on"
    assert reason_to_suspect(report(done), POLICY) is None


def test_long_wait_beside_progress_is_suspected_in_time_for_evidence() -> None:
    def beside_progress(seconds: float, moved_s: float = -1.0) -> str | None:
        waiting = replace(WAITS, idle_s=seconds, waiting_s=seconds, moved_s=moved_s)
        return reason_to_suspect(report(waiting, replace(SLEEPS, idle_s=0.1, waiting_s=0.1)), POLICY)

    assert beside_progress(21.9) is None
    assert beside_progress(22.0) == "rank 0 on a (step 117) waits for other ranks for 22.0 s; the limit is 25 s"
    assert beside_progress(100.0, moved_s=2.0) is None, "it receives one message after the other"


def test_no_suspicion_without_any_step() -> None:
    assert reason_to_suspect(report(*aged(1e6, WAITS, SLEEPS), deadline_s=0), POLICY) is None


def test_stopped_process_is_suspected_early() -> None:
    def stopped(seconds: float, state: str = "T") -> str | None:
        return reason_to_suspect(
            report(replace(WAITS, idle_s=0.2, state=state, stopped_s=seconds), deadline_s=0), POLICY
        )

    assert stopped(1.4) is None
    assert stopped(1.5) == "rank 0 on a (step 117) is stopped (state T) for 1.5 s"
    assert stopped(9, "t") is None, "a debugger's"


def test_unreaped_zombie_is_suspected() -> None:
    assert reason_to_suspect(report(replace(WAITS, idle_s=0.2, state="Z")), POLICY) is None
    assert reason_to_suspect(report(replace(WAITS, idle_s=1.1, state="Z"), deadline_s=0), POLICY) is not None
    assert reason_to_suspect(report(replace(WAITS, idle_s=1.1, state="Z", exited=True)), POLICY) is None


def test_stopped_store_is_suspected() -> None:
    calm = report(replace(WAITS, idle_s=0.1))
    early_s = hang.GATHER_FROM_FRACTION * POLICY.stopped_after_s
    assert reason_to_suspect(replace(calm, store_state="T", store_stopped_s=early_s - 0.1), POLICY) is None
    assert "round's store on a is stopped" in str(
        reason_to_suspect(replace(calm, store_state="T", store_stopped_s=early_s), POLICY)
    )
    stopped = replace(calm, store_state="T", store_stopped_s=POLICY.stopped_after_s)
    assert isinstance(judge([stopped], ["a"], POLICY), Hang)


@pytest.mark.parametrize(("collectives", "anything"), [(-1, False), (0, True)])
def test_rank_with_a_group_may_meet_another_program(collectives: int, anything: bool) -> None:
    rank = RankReport(0, 0, where="init", function="rendezvous", collectives=collectives)
    assert RankState("a", rank).waits_for_unknown is anything


# ---- the verdict


def test_rank_at_the_store_is_blamed_only_where_all_others_make_the_group() -> None:
    early = RankReport(0, 0, phase="starting", where="init", function="rendezvous", idle_s=70, state="S")
    joins = replace(early, rank=1, function="_new_process_group_helper")
    waits = replace(early, rank=2, where="barrier", function="session.barrier")
    grouped = replace(early, collectives=0)
    causes = [
        blame([RankState("a", one) for one in ranks], [], 1).cause
        for ranks in ((early, joins), (early, joins, waits), (grouped, joins))
    ]
    assert causes == ["never_joined", "mismatched_collectives", "blocked"]


def test_overdue_wait_blames_the_ranks_behind() -> None:
    others = [RankState("a", replace(SLEEPS, rank=rank, collectives=n)) for rank, n in ((1, 0), (2, 4211), (3, -1))]
    found = blame_overdue([RankState("a", WAITS)], others)
    assert (found.culprits, found.cause) == ((others[0],), "missed_collective")
    assert "has issued 0 collectives, the others 4,211" in found.why


def test_three_ranks_are_all_described() -> None:
    three = [RankState("a", replace(SLEEPS, rank=rank, slot=rank)) for rank in range(3)]
    assert "…" not in blame(three, [], 1).why
    assert "…" not in blame([*three, RankState("a", replace(WAITS, rank=3, slot=3))], [], 1).why


def test_rank_without_a_group_is_suspected_first() -> None:
    ranks = [replace(WAITS, collectives=0), replace(SLEEPS, collectives=-1), replace(SLEEPS, rank=2, collectives=0)]
    assert [rank.report.rank for rank in blame([RankState("a", one) for one in ranks], [], 1).culprits] == [1]


def test_places_are_those_of_the_ranks_at_fault() -> None:
    ranks = [replace(WAITS, rank=rank, place="x.py f") for rank in range(3)]
    ranks[2] = replace(ranks[2], collectives=4210, place="y.py g")
    assert blame([RankState("a", one) for one in ranks], [], 1).places == ("collective in y.py g",)


def test_first_collective_is_counted() -> None:
    ranks = [RankState("a", replace(WAITS, rank=rank, collectives=0)) for rank in (0, 1)]
    assert "none is behind after 0 collectives" in blame(ranks, [], 1).why


def test_hang_at_deadline_names_culprit() -> None:
    assert isinstance(judge([report(*aged(4.9, WAITS, SLEEPS))], ["a"], POLICY), NoHang)
    verdict = hang_of([report(*aged(5.0, WAITS, SLEEPS))], ["a"], POLICY)
    assert (verdict.culprits, verdict.cause) == ((RankLocation("a", 1, 1),), "blocked")


def test_no_hang_before_all_evidence() -> None:
    here, there = report(WAITS), report(SLEEPS, node="b")
    for reports in ([here], [here, replace(there, gathered=False)], [replace(here, gathered=False), there]):
        assert isinstance(judge(reports, ["a", "b"], POLICY), SuspectedHang)
    assert isinstance(judge([here, there], ["a", "b"], POLICY), Hang)


def test_hang_after_time_for_evidence() -> None:
    here, there = report(WAITS), report(SLEEPS, node="b", gathered=False)
    verdict = hang_of([here, there], ["a", "b"], POLICY, deadline_passed=True)
    assert verdict.culprits == (RankLocation("b", 1, 1),)


def test_silent_node_delays_network_verdict() -> None:
    waits = report(WAITS)
    assert isinstance(judge([waits], ["a", "b"], POLICY, deadline_passed=True), SuspectedHang)
    verdict = hang_of([report(*aged(60.0, WAITS))], ["a", "b"], POLICY, deadline_passed=True)
    assert verdict.why.endswith("b did not answer")
    stopped = report(replace(WAITS, state="T", stopped_s=3), SLEEPS)
    assert isinstance(judge([stopped], ["a", "b"], POLICY, deadline_passed=True), Hang)


def test_longest_deadline_counts() -> None:
    reports = [report(WAITS), report(SLEEPS, node="b", deadline_s=7)]
    assert isinstance(judge(reports, ["a", "b"], POLICY), NoHang)
    ended = report(replace(SLEEPS, exited=True), node="b", deadline_s=7)
    assert isinstance(judge([report(WAITS), ended], ["a", "b"], POLICY), Hang), "but not that of who has ended"


def test_node_without_deadline_joins_others() -> None:
    reports = [report(*aged(601, WAITS), deadline_s=600), report(*aged(601, SLEEPS), node="b", deadline_s=0)]
    assert isinstance(judge(reports, ["a", "b"], POLICY), Hang)


def test_newest_report_and_round_count() -> None:
    old, new = report(WAITS, SLEEPS), report(WAITS, replace(SLEEPS, idle_s=0.1), turn=2)
    for reports in ([old, new], [new, old], [new, old, old]):
        assert isinstance(judge(reports, ["a"], POLICY), NoHang)
    assert isinstance(judge([old, replace(new, round=2)], ["a"], POLICY), NoHang)


def test_no_hang_without_reports() -> None:
    assert isinstance(judge([], ["a"], POLICY, deadline_passed=True), NoHang)
    assert isinstance(judge([report()], ["a"], POLICY, deadline_passed=True), NoHang)


@pytest.mark.parametrize(
    ("changes", "busy"),
    [
        ({"cpu_s": 0.1}, False),
        ({"cpu_s": 0.3}, True),
        ({"quiet_s": 2.9}, True),
        ({"quiet_s": 3.1}, False),
        ({"moved_s": 2.9}, True),
        ({"state": "R"}, False),
        ({"state": "D"}, False),
        ({"io_bytes": 100_000}, False),
        ({"io_bytes": 200_000}, True),
        ({"io_bytes": 200_000, "window_s": 0.0}, False),
        ({"cpu_s": 2.0, "where": "collective"}, False),
        ({"cpu_s": 2.0, "where": "barrier"}, False),
        ({"cpu_s": 2.0, "where": ""}, True),
        ({"cpu_s": 2.0, "alive_s": 6.0}, True),
        ({"cpu_s": 2.0, "alive_s": 6.0, "where": "collective"}, True),
        ({"cpu_s": 2.0, "alive_s": 1.2, "where": "collective"}, False),
    ],
    ids=str,
)
def test_busy_rank_is_slow_until_ceiling(changes: dict[str, object], busy: bool) -> None:
    reports = [report(WAITS, replace(SLEEPS, **changes))]  # type: ignore[arg-type]
    assert isinstance(judge(reports, ["a"], POLICY), SuspectedHang if busy else Hang)
    assert isinstance(judge(reports, ["a"], Policy(hang_floor_s=5, slow_ceiling_s=5.5)), Hang)


def test_slow_ceiling_is_the_groups_timeout_or_30_minutes() -> None:
    works = replace(SLEEPS, cpu_s=2.0)

    def at(seconds: float, timeout_s: float, policy: Policy = POLICY) -> hang.Judgement:
        ranks = (replace(rank, timeout_s=timeout_s) for rank in aged(seconds, WAITS, works))
        return judge([report(*ranks)], ["a"], policy)

    assert isinstance(at(602, 600), SuspectedHang)
    assert isinstance(at(604, 600), Hang), "torch has not enforced a shorter one, although a rank waits in a collective"
    assert isinstance(at(3599, 3600), SuspectedHang)
    assert isinstance(at(3604, 3600), Hang)
    assert isinstance(at(1799, 0), SuspectedHang)
    assert isinstance(at(1801, 0), Hang)
    assert isinstance(at(31, 600, Policy(hang_floor_s=5, slow_ceiling_s=30)), Hang)


@pytest.mark.parametrize(
    ("ranks", "given", "kills", "can_restart", "ends"),
    [
        (1, {}, {}, True, True),
        (1, {}, {}, False, False),
        (1, {}, {"elsewhere in y.py g": hang.KillCount(1, 117)}, True, False),
        (1, {}, {"elsewhere in y.py g": hang.KillCount(1, 116)}, True, True),
        (2, {}, {}, False, False),
        (1, {"slow_ceiling_s": 1800.0}, {}, False, True),
    ],
)
def test_work_that_torch_never_ends_is_ended_once(
    ranks: int, given: dict[str, float], kills: hang.KillsByPlace, can_restart: bool, ends: bool
) -> None:
    """An evaluation of an hour on one rank, or on all of them: a restart meets it again, and the last one is the end of
    the job."""
    works = [replace(SLEEPS, rank=rank, slot=rank, cpu_s=2.0) for rank in range(ranks)]
    reports = [report(*aged(1801.0, *works))]
    found = judge(reports, ["a"], Policy(**given), kills=kills, can_restart=can_restart)  # type: ignore[arg-type]
    assert isinstance(found, Hang)
    assert found.kills_group == ends
    waits = judge([report(*aged(1801.0, WAITS, *works[1:]))], ["a"], Policy(), kills=kills, can_restart=can_restart)
    assert isinstance(waits, Hang) and waits.kills_group, "torch would end it"


@pytest.mark.parametrize(
    "changes",
    [
        {"function": "store.wait"},
        {"function": "store.wait", "groups": (GroupTail(DEFAULT_GROUP_NAME, 4211, 0, (), "gloo", in_job=True),)},
        {"where": "init", "function": "rendezvous"},
    ],
    ids=str,
)
def test_wait_with_a_time_of_its_own_has_no_group_timeout(changes: dict[str, object]) -> None:
    """Rank 1 prepares data for hours, and rank 0 waits for its key in a store, or for another program."""
    waits, works = replace(WAITS, **changes), replace(SLEEPS, cpu_s=2.0)  # type: ignore[arg-type]

    def at(seconds: float, *, can_restart: bool) -> hang.Judgement:
        ranks = (replace(rank, timeout_s=600.0) for rank in aged(seconds, waits, works))
        return judge([report(*ranks)], ["a"], Policy(), can_restart=can_restart)

    assert isinstance(at(1799, can_restart=True), SuspectedHang)
    for can_restart in (True, False):
        found = at(1801, can_restart=can_restart)
        assert isinstance(found, Hang)
        assert found.kills_group == can_restart


def test_ranks_that_all_compute_are_not_called_idle() -> None:
    loops = [replace(SLEEPS, rank=rank, slot=rank, cpu_s=2.0) for rank in range(2)]
    verdict = hang_of([report(*aged(1801.0, *loops))], ["a"], POLICY)
    assert (verdict.cause, verdict.culprits) == ("spinning", ())
    assert verdict.why.startswith("none of the 2 ranks waits for another: rank 0 on a (step 117) works in x.py:1 f")


def test_no_heartbeat_of_any_rank_is_not_gil() -> None:
    ranks = [replace(WAITS, rank=rank, alive_s=6) for rank in range(3)]
    verdict = hang_of([report(*ranks)], ["a"], POLICY)
    assert (verdict.culprits, verdict.cause) == ((), "network")
    one = hang_of([report(ranks[0], *(replace(rank, alive_s=0.1) for rank in ranks[1:]))], ["a"], POLICY)
    assert (one.culprits, one.cause) == ((RankLocation("a", 0, 0),), "gil")


def test_stopped_process_has_its_own_limit() -> None:
    """Somebody may stop a rank for 2 s; also inside of a collective, where all stand still with it."""
    stopped = replace(WAITS, rank=1, slot=1, state="T", stopped_s=1.5, alive_s=1.5, idle_s=2.5)
    verdict = judge([report(*aged(2.5, WAITS), stopped, deadline_s=1)], ["a"], POLICY)
    assert isinstance(verdict, SuspectedHang)
    assert verdict.why.endswith("is stopped (state T) for 1.5 s; the limit is 2.5 s")
    verdict = hang_of([report(*aged(2.6, WAITS), replace(stopped, stopped_s=2.5), deadline_s=1)], ["a"], POLICY)
    assert (verdict.culprits, verdict.cause) == ((RankLocation("a", 1, 1),), "stopped")
    slow = report(*aged(100, WAITS, replace(SLEEPS, state="T", stopped_s=1.5)), deadline_s=1)
    assert isinstance(judge([slow], ["a"], POLICY), SuspectedHang), "it was slow, and is stopped only now"


@pytest.mark.parametrize(("others", "so"), [((), ""), ((2,), "; so is rank 2 on a"), ((2, 3), "; so are rank 2 on a")])
def test_all_stopped_processes_are_named(others: tuple[int, ...], so: str) -> None:
    stopped = [replace(WAITS, rank=n, slot=n, state="T", stopped_s=2.5, alive_s=2.5, idle_s=2.6) for n in (1, *others)]
    verdict = hang_of([report(*aged(2.6, WAITS), *stopped, deadline_s=1)], ["a"], POLICY)
    assert verdict.why.startswith(f"rank 1 on a (step 117) is stopped (state T) for 2.5 s{so}")


@pytest.mark.parametrize(
    "changes", [{"state": "t", "alive_s": 6.0}, {"where": "debugger"}, {"where": "output"}], ids=str
)
def test_wait_for_someone_outside_is_only_reported(changes: dict[str, object]) -> None:
    debugged = replace(WAITS, rank=1, slot=1, **changes)  # type: ignore[arg-type]
    policy = Policy(hang_floor_s=5, slow_ceiling_s=5.5)
    assert isinstance(judge([report(*aged(59.0, WAITS, debugged))], ["a"], policy), SuspectedHang)
    verdict = hang_of([report(*aged(1e5, WAITS, debugged))], ["a"], policy)
    assert not verdict.kills_group and verdict.why.endswith("; it may still resume")


def test_worst_culprit_names_cause() -> None:
    ranks = [WAITS, SLEEPS, replace(SLEEPS, rank=2, slot=2, alive_s=6.0)]
    verdict = hang_of([report(*ranks)], ["a"], POLICY)
    assert ([place.rank for place in verdict.culprits], verdict.cause) == ([1, 2], "gil")


def test_devices_that_wait_in_what_all_have_enqueued_blame_nobody() -> None:
    pending = replace(WAITS, where="device", function="item", nccl_groups=((7, 500, 499),), device_s=6.0)
    found = blame([RankState("a", pending), RankState("a", replace(pending, rank=1, slot=1))], [], 1)
    assert not found.culprits and "every rank has enqueued what the others wait in" in found.why
    unrecorded = [RankState("a", replace(pending, rank=rank, nccl_groups=())) for rank in (0, 1)]
    assert blame(unrecorded, [], 1).evidence == "device"


def test_half_of_the_ranks_is_no_minority() -> None:
    """Of four ranks on one node, two are behind in the same collective, or issued fewer in their last step."""
    for odd in ({"collectives": 4210}, {"usual": 35}, {"step": 118}, {"usual": -1}):
        most = 2 if odd == {"usual": -1} else 1  # unknown: it counts for nothing, though it is a minority
        ranks = [replace(WAITS, rank=rank, slot=rank, **(odd if rank > most else {})) for rank in range(4)]
        verdict = hang_of([report(*ranks)], ["a"], POLICY)
        assert (verdict.culprits, verdict.cause) == ((), "network"), odd


def test_report_order_does_not_matter() -> None:
    there = [replace(report(WAITS, node=node), store_state="T", store_stopped_s=3) for node in ("b", "a")]
    older = [replace(one, turn=0) for one in there]
    assert judge([*there, older[0]], ["a", "b"], POLICY) == judge([older[1], *there[::-1]], ["a", "b"], POLICY)


def test_many_culprits_stay_one_line() -> None:
    blocked = [replace(SLEEPS, rank=rank, slot=rank) for rank in range(1, 64)]
    verdict = hang_of([report(WAITS, *blocked)], ["a"], POLICY)
    assert len(verdict.culprits) == 63
    assert len(verdict.why) < 500
    assert "and 60 more" in verdict.why


# ---- what a kill may cost

PLAIN = Policy()


def idle(seconds: float, restart_s: float = -1.0, *ranks: RankReport, **changes: float) -> HangReport:
    changed = (replace(rank, **changes) for rank in ranks or (WAITS, SLEEPS))  # type: ignore[arg-type]
    return replace(report(*aged(seconds, *changed)), restart_s=restart_s)


@pytest.mark.parametrize(
    ("found", "ends"),
    [
        (idle(61.0), False),
        (idle(1799.0), False),
        (idle(1801.0), True),
        (idle(602.0, timeout_s=600.0), False),
        (idle(604.0, timeout_s=600.0), True),
        (idle(61.0, 0.0), True),
        (idle(61.0, 59.0), True),
        (idle(61.0, 61.0), False),
        (idle(119.0, 62.0), True),
    ],
)
def test_weak_evidence_ends_a_group_only_where_a_restart_costs_less(found: HangReport, ends: bool) -> None:
    """A plain script, whose saves are its own, gets what torchrun would give it."""
    verdict = hang_of([found], ["a"], PLAIN)
    assert verdict.kills_group == ends
    assert verdict.why.endswith("; it may still resume: the limit is 1800 s") or found.ranks[0].timeout_s or ends
    assert isinstance(judge([replace(found, ranks=aged(59.0, *found.ranks))], ["a"], PLAIN), SuspectedHang)


def test_weak_evidence_does_not_spend_the_last_restart() -> None:
    verdict = hang_of([idle(61.0, 0.0)], ["a"], PLAIN, can_restart=False)
    assert not verdict.kills_group
    floor = hang_of([idle(6.0, 0.0)], ["a"], POLICY, can_restart=False)
    assert floor.kills_group, "the floor says so"


def test_saves_of_every_node_must_be_known() -> None:
    here, there = idle(61.0, 3.0, WAITS), replace(idle(61.0, -1.0, SLEEPS), node="b")
    for restart_s, ends in ((-1.0, False), (50.0, True)):
        verdict = hang_of([here, replace(there, restart_s=restart_s)], ["a", "b"], PLAIN)
        assert verdict.kills_group == ends, "rank 0's node knows of the newest save"


def test_rank_that_trains_is_not_hung() -> None:
    """A rank waits at the end of its fold while another one trains on, with a session or without."""
    waits = replace(WAITS, waiting_s=70.0, timeout_s=600.0)
    trains = replace(SLEEPS, idle_s=0.0)
    for seconds, ends in ((70.0, False), (602.0, False), (604.0, True)):
        ranks = (replace(waits, idle_s=seconds, waiting_s=seconds), trains)
        found = replace(report(*ranks), restart_s=0.0)
        verdict = hang_of([found], ["a"], PLAIN, progress_s=found.deadline_s)
        assert (verdict.kills_group, verdict.waited_s) == (ends, seconds)
        assert "makes progress; 1 rank waits in all_reduce for it" in verdict.why
        receives = replace(found, ranks=(replace(ranks[0], moved_s=2.0), trains))
        assert isinstance(judge([receives], ["a"], PLAIN, progress_s=found.deadline_s), NoHang)
        debugged = replace(trains, rank=2, slot=2, where="debugger")
        assert isinstance(judge([replace(found, ranks=(*found.ranks, debugged))], ["a"], PLAIN), NoHang)


OWN = GroupTail(DEFAULT_GROUP_NAME, 4211, 0, ((4211, "x"),), "gloo", in_job=True)
ENGINES = GroupTail("engine", 0, 0, (), "gloo", in_job=False)
PENDING = {"last": 7, "pending": 7, "kinds": ((7, "x"),)}


@pytest.mark.parametrize(
    ("waits", "ends"),
    [
        ({"function": "recv", "groups": (OWN,)}, True),
        ({"function": "recv", "groups": (OWN, ENGINES)}, False),
        ({"function": "broadcast", "groups": (OWN, replace(ENGINES, **PENDING))}, False),
        ({"function": "broadcast", "groups": (replace(OWN, **PENDING), ENGINES)}, True),
        ({"function": "worker.core_worker.wait", "groups": ()}, False),
        ({"function": "work.wait", "groups": (replace(OWN, **PENDING),)}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("exited", [False, True])
def test_wait_for_another_program_is_only_reported(waits: dict[str, object], exited: bool, ends: bool) -> None:
    """An inference engine that generates for minutes looks as a network does that lost a message. So does a call of
    some `wait`, as Ray's, where no recorder shows that it is a collective's."""
    alone = replace(WAITS, alone=True, groups=(OWN,))
    ranks = (replace(alone, **waits), replace(alone, rank=1, slot=1, exited=exited))  # type: ignore[arg-type]
    verdict = hang_of([idle(61.0, -1.0, *ranks)], ["a"], PLAIN)
    assert verdict.kills_group == ends


def test_thread_of_the_script_may_end_a_wait_in_a_group() -> None:
    """Ranks wait in groups that no count knows, and a thread of rank 1 may still issue what rank 0 waits in."""
    awaited, other = (replace(OWN, group=name, **PENDING) for name in ("group 1", "group 2"))  # type: ignore[arg-type]
    alike = (replace(WAITS, groups=(awaited,)), replace(WAITS, rank=1, slot=1, groups=(awaited,)))
    apart = (alike[0], replace(alike[1], groups=(replace(awaited, last=6, pending=0, kinds=()), other)))
    for ranks, ends in ((alike, True), (apart, False)):
        assert hang_of([idle(61.0, -1.0, *ranks)], ["a"], PLAIN).kills_group == ends


def test_stages_of_a_pipeline_have_sent_different_numbers_of_messages() -> None:
    """gloo counts these: the first and the last stage are not behind. A thread may still send what one receives."""
    counts = (100, 200, 200, 200, 100)
    receives = replace(WAITS, function="recv", alone=True, unsent=0, groups=(OWN,))
    stages = [
        replace(receives, rank=rank, slot=rank, collectives=count, usual=count // 10, step=117 + (rank == 4))
        for rank, count in enumerate(counts)
    ]
    verdict = hang_of([idle(61.0, -1.0, *stages)], ["a"], PLAIN)
    assert (verdict.culprits, verdict.kills_group) == ((), True)
    threads = [replace(stage, alone=False) for stage in stages]
    assert not hang_of([idle(61.0, -1.0, *threads)], ["a"], PLAIN).kills_group


def test_others_have_ended() -> None:
    verdict = hang_of([idle(61.0, 0.0, replace(WAITS, exited=True), SLEEPS)], ["a"], PLAIN)
    assert not verdict.kills_group


def test_rank_that_writes_a_distributed_checkpoint_does_not_wait() -> None:
    """Its heartbeat sees code of torch.distributed, and its stack which."""
    writes = replace(WAITS, idle_s=70.0, waiting_s=70.0, where="elsewhere", function="filesystem.py:80 write_data")
    found = report(writes, replace(SLEEPS, idle_s=0.0))
    assert isinstance(judge([found], ["a"], PLAIN, progress_s=5.0), NoHang)
    unknown = replace(found, ranks=(replace(writes, where="", function=""), found.ranks[1]))
    verdict = hang_of([unknown], ["a"], PLAIN, progress_s=5.0)
    assert "it makes progress; rank 0 on a (step 117) waits for others for 70.0 s;" in verdict.why


def test_timeout_of_the_script_is_awaited() -> None:
    for seconds, kind in ((600.0, NoHang), (604.0, Hang)):
        found = judge([idle(seconds, 0.0, replace(WAITS, wait_timeout_s=600.0), SLEEPS)], ["a"], PLAIN)
        assert isinstance(found, kind)


def test_any_byte_in_a_collective_counts() -> None:
    pair = [replace(WAITS, rank=rank, slot=rank) for rank in (0, 1)]
    for seconds, sockets_s, kind in (
        (90.0, -1.0, Hang),
        (90.0, 2.0, SuspectedHang),
        (90.0, 45.0, Hang),
        (130.0, 60.0, Hang),
        (1800.0, 2.0, Hang),
    ):
        ranks = [replace(rank, sockets_s=sockets_s) for rank in pair]
        assert isinstance(judge([idle(seconds, -1.0, *ranks)], ["a"], PLAIN), kind)


def test_bytes_that_the_kernel_does_not_show_may_move() -> None:
    pair = [replace(WAITS, rank=rank, slot=rank, shows_sockets=False) for rank in (0, 1)]
    for seconds, kind in ((90.0, SuspectedHang), (1800.0, Hang)):
        assert isinstance(judge([idle(seconds, -1.0, *pair)], ["a"], PLAIN), kind)


def test_all_ranks_of_a_node_are_stopped_by_a_scheduler() -> None:
    first = replace(WAITS, state="T", stopped_s=3.0, alive_s=0.0, idle_s=3.0)
    stopped = [first, replace(first, rank=1, slot=1)]
    waits = replace(report(replace(WAITS, rank=2, idle_s=1e5)), node="b")
    for seconds, kind in ((PLAIN.stopped_after_s, SuspectedHang), (61.0, Hang), (1e5, Hang)):
        found = judge([report(*(replace(one, stopped_s=seconds) for one in stopped)), waits], ["a", "b"], PLAIN)
        assert isinstance(found, kind)
        assert isinstance(found, SuspectedHang) or ("are stopped (state T)" in found.why and not found.kills_group)
    single = [report(stopped[0]), waits]
    for reports, ends in ((single, True), ([single[0], replace(waits, ranks=(replace(stopped[0], rank=2),))], False)):
        found = judge([*reports], ["a", "b"], PLAIN)
        assert (isinstance(found, Hang) and found.kills_group) == ends, "all ranks of the job, or that of one node only"
    one = hang_of([report(stopped[0], replace(stopped[1], state="S")), waits], ["a", "b"], PLAIN)
    assert (one.cause, one.kills_group) == ("stopped", True)


@pytest.mark.parametrize(
    ("changes", "limit_s"),
    [({}, 15.0), ({"loading": True}, 60.0), ({"where": "", "function": ""}, 60.0), ({"state": "D"}, 60.0)],
    ids=str,
)
def test_gil_in_an_import_or_a_page_fault_gets_more_time(changes: dict[str, object], limit_s: float) -> None:
    """A plain script is ended for it no sooner than for the same wait without the GIL: a file server may be away."""
    for seconds, kind in ((limit_s - 1, SuspectedHang), (limit_s + 1, Hang)):
        holds = replace(SLEEPS, alive_s=seconds, **changes)  # type: ignore[arg-type]
        found = judge([idle(seconds, -1.0, WAITS, holds)], ["a"], PLAIN)
        assert isinstance(found, kind)
        assert not isinstance(found, Hang) or found.kills_group == (not changes)


# ---- a verdict that repeats

WAITS_ALONE = replace(WAITS, place="x.py f", alone=True)
MISMATCHED = (WAITS_ALONE, replace(WAITS_ALONE, rank=1, slot=1, function="broadcast"))
WAITED_IN = "collective in x.py f"


@pytest.mark.parametrize(
    ("killed", "restart_s", "ends_at"),
    [
        ({}, -1.0, 60.0),
        ({"collective in y.py g": hang.KillCount(1, 117)}, -1.0, 60.0),
        ({WAITED_IN: hang.KillCount(1, 116)}, -1.0, 60.0),
        ({WAITED_IN: hang.KillCount(1, 117)}, -1.0, 1800.0),
        ({WAITED_IN: hang.KillCount(1, 117)}, 0.0, 120.0),
        ({WAITED_IN: hang.KillCount(2, 300)}, 0.0, 240.0),
    ],
)
def test_verdict_that_repeats_is_doubted(killed: hang.KillsByPlace, restart_s: float, ends_at: float) -> None:
    """Whatever the evidence was, if the group waits in the same place again without a step more."""
    for seconds, ends in ((ends_at - 1, False), (ends_at + 1, True)):
        found = judge([idle(seconds, restart_s, *MISMATCHED)], ["a"], PLAIN, kills=killed)
        assert (isinstance(found, Hang) and found.kills_group) == ends, seconds
