"""What a report sums up, from lines of several nodes' logs."""

from __future__ import annotations

from typing import Any

import pytest

from elasticd_agent.model.log_events import LogLine, TimeSplit
from elasticd_agent.telemetry import report as sums
from elasticd_agent.telemetry.report import MAX_CLOCK_DIFFERENCE_S, NO_RESTART_CAUSE, Report
from tests import log_lines

T0 = 1_000_000.0
TWO_NODES = ("a", "b")


def at(after: float, kind: str, round: int = 1, *, node: str = "a", job: str = "j", **given: Any) -> LogLine:
    one = log_lines.line(kind, T0 + after, round, **given)
    return LogLine(one.event, one.wall, job, node)


def split(useful: float, lost: float = 0.0, idle: float = 0.0, state: Any = "useful") -> TimeSplit:
    return TimeSplit(useful, lost, idle, state)


def published(after: float, round: int, cause: str, **given: Any) -> LogLine:
    return at(after, "round_published", round, **{"cause": cause, "nodes": TWO_NODES, "world_size": 6, **given})


def crash_on_b(node: str, workers: int, began: float = 0.0) -> list[LogLine]:
    """10 s until the first step, 90 s of steps; rank 3 of node b crashes, which costs 20 s; 100 s more."""
    own = {"node": node}
    lines = [
        published(began, 1, "start", spent=split(0, 0, 0, "idle"), **own),
        at(began + 5, "group_started", 1, ranks=tuple(range(workers)), spent=split(0, 0, 5, "idle"), **own),
        at(began + 10, "first_step", 1, spent=split(0, 0, 10), **own),
        published(began + 101, 2, "crash", spent=split(90, 1, 10, "lost"), **own),
        at(began + 103, "group_started", 2, ranks=tuple(range(workers)), spent=split(90, 3, 10, "lost"), **own),
        at(began + 110, "first_step", 2, recovery_seconds=9.0, spent=split(90, 10, 10, "lost"), **own),
        at(began + 120, "work_recovered", 2, seconds=20.0, spent=split(90, 20, 10), **own),
        at(began + 220, "job_ended", 2, outcome="succeeded", spent=split(190, 20, 10), **own),
    ]
    if node == "b":
        exits = at(began + 100, "worker_exited", 1, rank=3, exit_code=1, spent=split(90, 0, 10, "lost"), **own)
        follows = at(began + 100.1, "worker_exited", 1, rank=2, exit_code=1, spent=split(90, 0.1, 10, "lost"), **own)
        lines[3:3] = [exits, follows]
    return lines


def document(*lines: LogLine, since: float = 0.0) -> dict[str, Any]:
    report = Report(since)
    for line in lines:
        report.feed(line)
    return report.to_json(T0 + 1e6)


def rows(told: dict[str, Any], name: str, *fields: str) -> list[tuple[Any, ...]]:
    return [tuple(row[field] for field in fields) for row in told[name]]


def test_time_counts_for_each_worker() -> None:
    """Two of node a, four of node b."""
    told = document(*crash_on_b("a", 2), *crash_on_b("b", 4))
    assert (told["useful_seconds"], told["lost_seconds"], told["idle_seconds"]) == (6 * 190, 6 * 20, 6 * 10)
    assert told["goodput"] == pytest.approx(190 / 220, abs=1e-4)
    assert rows(told, "nodes", "node", "worker_seconds") == [("b", 880.0), ("a", 440.0)]


@pytest.mark.parametrize("behind", [0.0, 40.0, MAX_CLOCK_DIFFERENCE_S])
@pytest.mark.parametrize("order", [1, -1])
def test_a_fault_that_two_nodes_log_is_one(behind: float, order: int) -> None:
    """All of its cost is that of its cause, of the node and of the rank that failed first. Node b's clock is behind."""
    first, second = [crash_on_b("b", 4), crash_on_b("a", 2, behind)][::order]
    told = document(*first, *second)
    assert rows(told, "causes", "cause", "faults", "lost_seconds", "recovery_seconds") == [("crash", 1, 120.0, 9.0)]
    assert rows(told, "ranks", "job", "rank", "node", "faults_of_it", "cost_seconds") == [("j", 3, "b", 1, 120.0)]
    assert rows(told, "nodes", "node", "faults_of_it", "cost_seconds") == [("b", 1, 120.0), ("a", 0, 0.0)]


def test_other_runs_of_an_id_are_other_faults() -> None:
    """The numbers of their rounds begin anew."""
    told = document(*crash_on_b("b", 4), *crash_on_b("b", 4, began=5000))
    assert (told["faults"], told["useful_seconds"], told["lost_seconds"]) == (2, 2 * 4 * 190, 2 * 4 * 20)
    assert rows(told, "ranks", "rank", "faults_of_it", "causes") == [(3, 2, {"crash": 2})]


def test_late_and_repeated_lines_begin_no_other_run() -> None:
    lines = crash_on_b("a", 1)
    lines.insert(3, published(100, 1, "start", spent=split(90, 0, 10)))
    lines.insert(6, at(103, "worker_exited", 1, rank=0, exit_code=-15, requested=True, spent=split(90, 3, 10, "lost")))
    told = document(*lines)
    assert (told["faults"], told["useful_seconds"], told["lost_seconds"]) == (1, 190, 20)


def test_planned_round_is_no_fault() -> None:
    told = document(*crash_on_b("a", 1)[:3], published(101, 2, "resize", spent=split(91, 0, 10)))
    assert (told["faults"], told["useful_seconds"]) == (0, 91)


def test_each_fault_has_its_own_cost() -> None:
    lines = crash_on_b("a", 1)[:7]
    for after, lost in ((200, 20), (201, 21)):
        lines.append(at(after, "worker_exited", 2, rank=0, exit_code=1, spent=split(170, lost, 10, "lost")))
    lines.append(published(203, 3, "hung", spent=split(170, 23, 10, "lost")))
    lines.append(at(210, "first_step", 3, spent=split(170, 30, 10)))
    assert rows(document(*lines), "causes", "cause", "lost_seconds") == [("crash", 20.0), ("hung", 10.0)]


def test_lines_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert document(at(1, "round_published", job=""), at(1, "scalars", step=1, values={}))["jobs"] == []
    monkeypatch.setattr(sums, "MAX_TIMELINES", 1)
    told = document(*crash_on_b("a", 2), *crash_on_b("b", 4))
    assert (told["left_out_lines"], told["useful_seconds"]) == (10, 2 * 190)


def test_only_what_happened_since_counts() -> None:
    told = document(*crash_on_b("a", 1), since=T0 + 170)
    assert (told["useful_seconds"], told["lost_seconds"], told["faults"]) == (50.0, 0.0, 0)
    assert rows(document(*crash_on_b("a", 1), since=T0 + 220), "jobs", "nodes", "useful_seconds") == [(["a"], 0.0)]
    assert document(*crash_on_b("a", 1), since=T0 + 1000)["jobs"] == []
    assert document(*crash_on_b("a", 1), since=T0 + 101)["faults"] == 1
    for lines in ((*crash_on_b("a", 1), *crash_on_b("b", 4, 40)), (*crash_on_b("b", 4, 40), *crash_on_b("a", 1))):
        told = document(*lines, since=T0 + 120)
        assert (told["faults"], told["since"]) == (1, T0 + 120), "by the clock of one of its nodes"


def test_a_lost_node_costs_where_the_others_wait() -> None:
    lines = crash_on_b("a", 2)
    lines[3] = published(101, 2, "resize", lost=("b",), spent=split(90, 1, 10, "lost"))
    told = document(*lines)
    assert rows(told, "causes", "cause", "faults", "lost_seconds") == [("node lost", 1, 40.0)]
    assert rows(told, "nodes", "node", "faults_of_it", "cost_seconds", "goodput")[0] == ("b", 1, 40.0, None)


def test_a_hang_is_of_the_rank_in_the_verdict() -> None:
    lines = crash_on_b("a", 2)
    lines[3] = published(101, 2, "hung", spent=split(90, 1, 10, "lost"))
    where = {"nodes": ("b",), "ranks": (5,), "slots": (1,), "seconds": 30.0}
    lines.insert(3, at(100, "hang_detected", 1, **where, action="restart", spent=split(90, 0, 10, "lost")))
    assert rows(document(*lines), "ranks", "rank", "node", "cost_seconds") == [(5, "b", 40.0)]


REPORTED = (
    published(0, 1, "start", world_size=2, spent=split(0, 0, 0, "idle")),
    at(5, "group_started", 1, ranks=(0, 1), spent=split(0, 0, 5, "idle")),
    at(10, "first_step", 1, spent=split(0, 0, 10)),
    at(160, "hang_detected", 1, action="report", nodes=("a",), ranks=(1,), slots=(1,), spent=split(90, 60, 10, "lost")),
)


@pytest.mark.parametrize(
    ("after", "causes"),
    [
        ((at(170, "work_recovered", 1, spent=split(90, 70, 10)),), [("reported hang", 1, 140.0)]),
        (
            (
                at(170, "work_recovered", 1, spent=split(90, 70, 10)),
                published(200, 2, "join", spent=split(120, 70, 10, "idle")),
            ),
            [("reported hang", 1, 140.0)],
        ),
        (
            (
                at(170, "work_recovered", 1, spent=split(90, 70, 10)),
                at(200, "worker_exited", 1, rank=0, exit_code=1, spent=split(120, 70, 10, "lost")),
                published(201, 2, "crash", spent=split(120, 71, 10, "lost")),
            ),
            [("reported hang", 1, 140.0), ("crash", 1, 2.0)],
        ),
        (
            (
                at(190, "hang_detected", 1, action="restart", spent=split(90, 90, 10, "lost")),
                published(191, 2, "hung", spent=split(90, 91, 10, "lost")),
                at(195, "work_recovered", 2, spent=split(90, 95, 10)),
            ),
            [("hung", 1, 190.0)],
        ),
        ((), [("reported hang", 1, 120.0)]),
    ],
    ids=["it resumes", "and a node joins", "and a rank fails later", "it is ended", "it lasts"],
)
def test_a_hang_that_is_only_reported_ends_no_job(after: tuple[LogLine, ...], causes: list[tuple[Any, ...]]) -> None:
    told = document(*REPORTED, *after)
    assert rows(told, "causes", "cause", "faults", "lost_seconds") == causes
    assert sum(one["lost_seconds"] for one in told["causes"]) == told["lost_seconds"]


def test_a_fault_without_a_round_after_it() -> None:
    ended = at(130, "job_ended", 1, outcome="failed", exit_code=1, spent=split(90, 30, 10, "lost"))
    lines = [*crash_on_b("b", 4)[:4], LogLine(ended.event, ended.wall, "j", "b")]
    told = document(*lines, since=T0 + 130)
    assert rows(told, "jobs", "outcome", "faults") == [("failed", 1)]
    for more in ([], crash_on_b("b", 4, 5000)[:3]):
        told = document(*lines, *more)
        assert rows(told, "causes", "cause", "faults", "lost_seconds") == [(NO_RESTART_CAUSE, 1, 120.0)]
        assert rows(told, "ranks", "rank", "cost_seconds") == [(3, 120.0)]
    assert rows(document(*lines[:4]), "causes", "cause", "faults", "lost_seconds") == [(NO_RESTART_CAUSE, 1, 0.0)]
    told = document(*lines, published(140, 2, "crash", node="b", spent=split(90, 40, 10, "lost")))
    assert rows(told, "causes", "cause", "faults", "lost_seconds") == [("crash", 1, 160.0)]


def test_a_job_without_an_end_counts_until_its_newest_line() -> None:
    """It may run, or was killed long ago."""
    told = document(*crash_on_b("a", 1)[:-1])
    assert told["worker_seconds"] == 120.0
    assert rows(told, "jobs", "outcome", "newest") == [(None, T0 + 120)]


@pytest.mark.parametrize(("after", "outcome"), [(220 + MAX_CLOCK_DIFFERENCE_S, "succeeded"), (9000, "left")])
def test_outcome_is_not_that_of_a_node_that_leaves_at_the_end(after: float, outcome: str) -> None:
    left = at(after, "job_ended", 2, node="b", outcome="left", spent=split(190, 20, 10))
    assert rows(document(*crash_on_b("a", 2), left), "jobs", "outcome") == [(outcome,)]


def test_saves_count_for_all_workers() -> None:
    saved = at(50, "checkpoint_saved", 1, step=3, seconds=0.5, spent=split(40, 0, 10))
    told = document(*crash_on_b("a", 2)[:3], saved)
    assert (told["saves"], told["save_seconds"]) == (1, 3.0)
    assert document(*crash_on_b("a", 2)[:3], saved, since=saved.wall)["saves"] == 1


def test_lines_of_an_older_version_have_no_times() -> None:
    """Faults count, and the page has no goodput."""
    lines = [
        LogLine(log_lines.line(one.event.kind, one.wall, one.event.round).event, one.wall, "j", "a")
        for one in crash_on_b("a", 1)
    ]
    told = document(*lines[:3], published(101, 2, "crash"))
    assert (told["faults"], told["goodput"], told["jobs"][0]["is_timed"]) == (1, None, False)


def test_costs_add_up_to_what_is_lost() -> None:
    """Whatever order the lines have."""
    told = document(*crash_on_b("a", 3), *crash_on_b("b", 5), *crash_on_b("a", 3, 9000), *crash_on_b("c", 7, 20000)[:6])
    assert sum(row["lost_seconds"] for row in told["causes"]) == pytest.approx(told["lost_seconds"])
