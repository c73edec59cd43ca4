"""`core.step` case by case: what each event does in each phase, and that nothing else does anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_agent.job import state_machine as core
from elasticd_agent.job.state_machine import MULTI_NODE_EXIT_WAIT_S, ROOT_CAUSE_EXIT_WAIT_S, TRANSITIONS, step
from elasticd_agent.model.messages import (
    Action,
    Ended,
    Event,
    ExitReport,
    ExitStatus,
    FirstStep,
    Flush,
    Flushed,
    Flushing,
    FlushStarted,
    GroupEnded,
    Joining,
    KillGroup,
    Leave,
    PeerLost,
    PendingStop,
    Phase,
    ReportDone,
    ReportFailure,
    ReportLeaving,
    RoundPublished,
    Running,
    SetTimer,
    Settling,
    StartFailed,
    StartGroup,
    StateMachineRules,
    StopForced,
    StopGroup,
    Stopping,
    StopRequested,
    StoreExited,
    TimerExpired,
    WorkerExited,
)
from elasticd_agent.model.records import Failure, Member, QuarantinedSlot, Round

RULES = StateMachineRules("a", user_error_wait_s=0.5, shutdown_timeout_s=30.0)
HERE = (Member("a", "i", (4, 5)),)
R3 = Round(3, HERE, reason="three")
R4 = Round(4, HERE, reason="four")
ELSEWHERE = Round(5, (Member("b", "i", (0,)),), reason="not here")
STOPPED = Round(6, (), reason="stopped by SIGTERM", outcome="stopped", exit_code=143)
FAILED = Round(6, (), reason="no restart left", outcome="failed", exit_code=1)
STOP = PendingStop("SIGTERM", 143, 40.0)
MISTAKE = ExitReport("exception", "ValueError", "bad", "Traceback: bad")
ECHO = ExitReport("exception", "RuntimeError", "[gloo/transport/tcp/pair.cc:537] Connection reset by peer", "")


def exited(rank: int, code: int, words: ExitReport | None = None, number: int = 3, at: float = 10.0) -> WorkerExited:
    return WorkerExited(number, rank, rank, 4 + rank, ExitStatus.from_returncode(code), words, at)


DONE0 = exited(0, 0)
RAISED0 = exited(0, 1, MISTAKE)

PHASES: list[Phase] = [
    Joining(3),
    Joining(3, STOP),
    Running(R3),
    Running(R3, (DONE0,), has_stepped=True),
    Settling(R3, (RAISED0,), 10.5),
    Settling(R3, (exited(0, 1, ECHO),), 13.0),
    Stopping(R3),
    Stopping(R3, R4),
    Stopping(R3, None, STOP),
    Stopping(R3, STOPPED, STOP),
    Flushing(3, 0, "done"),
    Ended(3, 0),
]


def flushing(round: int, exit_code: int, why: str, *, failed: bool = False) -> tuple[Phase, list[Action]]:
    return Flushing(round, exit_code, why, failed), [Flush(failed)]


def of_round(n: int) -> list[Event]:
    return [
        exited(1, 0, number=n), exited(1, -9, number=n), StoreExited(n, "died", 9.0), GroupEnded(n), FirstStep(n, 9.0),
        StartFailed(n, "no memory", 9.0),
    ]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_events_of_another_round_change_nothing(phase: Phase) -> None:
    for n in (1, 2, 4, 9):
        for event in of_round(n):
            assert step(phase, event, RULES) == (phase, []), event


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_rounds_that_are_not_newer_change_nothing(phase: Phase) -> None:
    for n in (1, 2, 3):
        for r in (Round(n, HERE), Round(n, (), outcome="failed", exit_code=1)):
            assert step(phase, RoundPublished(r), RULES) == (phase, [])


events = st.sampled_from([
    *of_round(3), *of_round(4), exited(0, 0), exited(0, 1, MISTAKE), exited(1, 1, MISTAKE),
    exited(1, 2, MISTAKE, at=11.0), exited(0, 1, ECHO), exited(1, 1, ECHO), PeerLost(exited(1, 1, ECHO)),
    RoundPublished(R3), RoundPublished(R4), RoundPublished(ELSEWHERE), RoundPublished(STOPPED), RoundPublished(FAILED),
    StopRequested("SIGTERM", 143, 10.0), StopForced("SIGTERM", 143, 10.0), TimerExpired(10.4), TimerExpired(50.0),
    FlushStarted(0, 10.0), FlushStarted(1 << 30, 10.1), Flushed(7),
])  # fmt: skip


@given(st.lists(events, max_size=12))
def test_no_sequence_of_events_makes_an_illegal_move_or_two_groups(history: list[Event]) -> None:
    phase: Phase = Joining(2)
    alive: int | None = None
    newest = 2
    for event in history:
        if isinstance(event, GroupEnded) and event.round_number == alive:
            alive = None
        phase, actions = step(phase, event, RULES)
        for action in actions:
            if isinstance(action, StartGroup):
                assert alive is None
                assert action.round.number > newest
                alive = newest = action.round.number
            if isinstance(action, KillGroup | StopGroup):
                assert action.round_number == alive


def test_a_move_that_is_not_in_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSITIONS, Joining, ((), ""))
    with pytest.raises(AssertionError, match="illegal move from Joining"):
        core.step(Joining(), RoundPublished(R3), RULES)


def test_joining_starts_a_newer_round_of_this_node() -> None:
    assert step(Joining(2), RoundPublished(R3), RULES) == (Running(R3), [StartGroup(R3)])
    assert step(Joining(2), RoundPublished(ELSEWHERE), RULES) == (Joining(5), [])
    assert step(Joining(2, STOP), RoundPublished(R3), RULES) == (Joining(2, STOP), [])


def test_stop_while_joining() -> None:
    """A stop while joining waits for the end of the job but not for ever."""
    phase, actions = step(Joining(2), StopRequested("SIGTERM", 143, 10.0), RULES)
    assert (phase, actions) == (Joining(2, STOP), [SetTimer(40.0)])
    assert step(phase, TimerExpired(39.9), RULES) == (phase, [])
    late, actions = step(phase, TimerExpired(40.0), RULES)
    assert isinstance(late, Flushing) and late.exit_code == 143
    assert actions == [Flush(False)]
    assert step(phase, RoundPublished(STOPPED), RULES) == flushing(6, 143, "stopped by SIGTERM")
    assert step(phase, StopForced("SIGTERM", 143, 11.0), RULES) == flushing(2, 143, "SIGTERM twice: leaving at once")


def test_terminal_round_ends_the_group() -> None:
    """The terminal round ends what runs with grace only for a stop."""
    why = "round 6: stopped by SIGTERM"
    for phase in (Running(R3), Settling(R3, (RAISED0,), 10.5)):
        assert step(phase, RoundPublished(STOPPED), RULES) == (
            Stopping(R3, STOPPED),
            [StopGroup(3, why, 30.0, "SIGTERM")],
        )
        assert step(phase, RoundPublished(FAILED), RULES) == (
            Stopping(R3, FAILED),
            [KillGroup(3, "round 6: no restart left")],
        )
    assert step(Stopping(R3, FAILED), GroupEnded(3), RULES) == flushing(6, 1, "no restart left", failed=True)


def test_a_newer_round_waits_until_the_old_group_is_gone() -> None:
    phase, actions = step(Running(R3), RoundPublished(R4), RULES)
    assert (phase, actions) == (Stopping(R3, R4), [KillGroup(3, "round 4: four", keep=True)])
    assert step(phase, GroupEnded(3), RULES) == (Running(R4), [StartGroup(R4)])
    assert step(Stopping(R3), GroupEnded(3), RULES) == (Joining(3), [])
    assert step(Stopping(R3, R4), RoundPublished(ELSEWHERE), RULES) == (Stopping(R3, ELSEWHERE), [])
    assert step(Stopping(R3, ELSEWHERE), GroupEnded(3), RULES) == (Joining(5), [])


def test_workers_are_kept_for_the_next_round_of_their_node_only() -> None:
    """A round without it, the end of the job and a stop keep none; nor is a slot kept whose rank hangs."""
    hung = (QuarantinedSlot("a", 5, 1, hung=True), QuarantinedSlot("a", 4, 1), QuarantinedSlot("b", 4, 1, hung=True))
    stop = PendingStop("SIGTERM", 143, 40.0)
    for phase, then, keep, slots in (
        (Running(R3), R4, True, ()),
        (Running(R3), replace(R4, cause="hung", quarantined_slots=hung), True, (5,)),
        (Running(R3), replace(R4, cause="crash", quarantined_slots=hung), True, ()),
        (Running(R3), ELSEWHERE, False, ()),
        (Running(R3), FAILED, False, ()),
        (Running(R3, stop=stop), R4, False, ()),
    ):
        _, (kill,) = step(phase, RoundPublished(then), RULES)
        assert isinstance(kill, KillGroup)
        assert (kill.keep, kill.hung_slots) == (keep, slots)


def test_after_a_stop_only_the_end_of_the_job_is_still_taken_in() -> None:
    stopping = Stopping(R3, None, STOP)
    assert step(stopping, RoundPublished(R4), RULES) == (stopping, [])
    assert step(stopping, RoundPublished(STOPPED), RULES) == (Stopping(R3, STOPPED, STOP), [])
    assert step(stopping, GroupEnded(3), RULES) == flushing(3, 143, "stopped by SIGTERM")
    for then in (None, R4):
        phase, actions = step(Stopping(R3, then), StopRequested("SIGTERM", 143, 40.0), RULES)
        assert (phase, actions) == (stopping, [])


def test_a_crash_kills_the_rest_at_once_and_names_the_culprit() -> None:
    phase, actions = step(Running(R3, (), True), exited(1, -9), RULES)
    why = "rank 1 was killed by SIGKILL"
    assert phase == Stopping(R3)
    assert actions == [KillGroup(3, why, keep=True), ReportFailure(Failure(3, "a", "crash", ((1, 5),), why))]


def test_rank_that_has_lost_a_peer_counts_as_its_exit() -> None:
    """Until its process has left the round; its own mistake only counts when it ends by it."""
    lost = PeerLost(replace(exited(0, 1, ECHO), still_runs=True))
    waiting, actions = step(Running(R3, (), True), lost, RULES)
    assert (waiting, actions) == (
        Settling(R3, (lost.exit,), 10.0 + ROOT_CAUSE_EXIT_WAIT_S),
        [SetTimer(10.0 + ROOT_CAUSE_EXIT_WAIT_S)],
    )
    assert step(waiting, lost, RULES) == step(waiting, exited(0, -9), RULES) == (waiting, [])
    _, (kill, report) = step(waiting, exited(1, -9), RULES)
    assert kill == KillGroup(3, "rank 1 was killed by SIGKILL", keep=True)
    assert isinstance(report, ReportFailure) and report.failure.culprits == ((1, 5),)
    _, (kill, _) = step(waiting, TimerExpired(13.0), RULES)
    assert kill == KillGroup(3, f"rank 0 lost its peers: it raised RuntimeError: {ECHO.message}", keep=True)
    running = Running(R3, (), True)
    assert step(running, PeerLost(replace(exited(0, 1, MISTAKE), still_runs=True)), RULES) == (running, [])


def test_peer_loss_names_ranks_with_code_0() -> None:
    """They may have left too early, and nothing else would say so."""
    waiting, _ = step(Running(R3, (), True), exited(1, 1, ECHO), RULES)
    for phase, event in ((Running(R3, (DONE0,), True), exited(1, 1, ECHO)), (waiting, DONE0)):
        _, (kill, *_) = step(phase, event, RULES)
        assert isinstance(kill, KillGroup)
        assert kill.why.startswith(
            "rank 1 lost its peers after rank 0 had ended with code 0: it exited with code 1 (Runtime"
        )


@pytest.mark.parametrize("first_step", [False, True])
def test_secondary_failure_waits_for_the_root_cause(first_step: bool) -> None:
    """Who lost a peer is not the last word while that peer may still be heard."""
    echo = exited(0, 1, ECHO)
    waiting, actions = step(Running(R3, (), first_step), echo, RULES)
    assert (waiting, actions) == (
        Settling(R3, (echo,), 10.0 + ROOT_CAUSE_EXIT_WAIT_S),
        [SetTimer(10.0 + ROOT_CAUSE_EXIT_WAIT_S)],
    )
    assert step(waiting, TimerExpired(9.9 + ROOT_CAUSE_EXIT_WAIT_S), RULES) == (waiting, [])
    assert step(waiting, FirstStep(3, 10.1), RULES) == (waiting, [])
    lost = "rank 0 lost its peers: it exited"
    cases: list[tuple[Event, tuple[tuple[int, int], ...], str]] = [
        (exited(1, 1, MISTAKE), ((1, 5),), "rank 1 exited with code 1 (ValueError: bad)"),
        (exited(1, -9), ((1, 5),), "rank 1 was killed by SIGKILL"),
        (exited(1, 3), ((1, 5),), "rank 1 exited with code 3"),
        (exited(1, 1, ECHO), (), lost),
        (TimerExpired(10.0 + ROOT_CAUSE_EXIT_WAIT_S), (), lost),
        (StoreExited(3, "died", 10.1), (), "the workers' store died"),
    ]
    for event, culprits, why in cases:
        after, (kill, report) = step(waiting, event, RULES)
        assert after == Stopping(R3), event
        assert isinstance(kill, KillGroup), event
        assert isinstance(report, ReportFailure), event
        assert (report.failure.culprits, report.failure.why[: len(why)]) == (culprits, why), event


def test_a_peer_on_another_node_is_hardly_waited_for() -> None:
    """That node says it, if it can; if it is dead, its loss shall be found soon."""
    both = Round(3, (*HERE, Member("b", "i", (0,))), reason="three")
    _, actions = step(Running(both, (), True), exited(0, 1, ECHO), RULES)
    assert actions == [SetTimer(10.0 + MULTI_NODE_EXIT_WAIT_S)]


def test_a_leaving_agent_waits_for_no_peer() -> None:
    after, _ = step(Running(R3, (), True, STOP), exited(0, 1, ECHO), RULES)
    assert after == Stopping(R3, stop=STOP)


def test_exception_after_the_first_step() -> None:
    """An exception after the first step is a crash with its traceback."""
    _, (_, report) = step(Running(R3, (), True), RAISED0, RULES)
    why, key = "rank 0 exited with code 1 (ValueError: bad)", "a rank exited with code 1 (ValueError: bad)"
    assert report == ReportFailure(
        Failure(3, "a", "crash", ((0, 4),), why, error="ValueError", detail="Traceback: bad", repeat_key=key)
    )


def test_every_rank_must_make_the_same_mistake_in_time() -> None:
    phase, actions = step(Running(R3), RAISED0, RULES)
    assert (phase, actions) == (Settling(R3, (RAISED0,), 10.5), [SetTimer(10.5)])
    cases: list[tuple[Event, str, tuple[tuple[int, int], ...]]] = [
        (exited(1, 1, MISTAKE), "shared_error", ((0, 4),)),
        (exited(1, 1, ExitReport("exception", "OSError", "", "")), "crash", ((0, 4),)),
        (replace(exited(1, 1, MISTAKE), stayed=True), "crash", ((0, 4),)),
        (exited(1, 0), "crash", ((0, 4),)),
        (exited(1, -11), "crash", ((1, 5),)),
        (TimerExpired(10.5), "crash", ((0, 4),)),
        (FirstStep(3, 10.1), "crash", ((0, 4),)),
        (StoreExited(3, "died", 10.1), "store_lost", ()),
    ]
    for event, kind, culprits in cases:
        after, (kill, report) = step(phase, event, RULES)
        assert after == Stopping(R3), event
        assert isinstance(kill, KillGroup), event
        assert isinstance(report, ReportFailure), event
        assert (report.failure.kind, report.failure.culprits) == (kind, culprits), event
    assert step(phase, TimerExpired(10.49), RULES) == (phase, [])
    assert step(phase, RAISED0, RULES) == (phase, [])


def test_all_workers_must_end_well() -> None:
    phase, actions = step(Running(R3, (), True), DONE0, RULES)
    assert (phase, actions) == (Running(R3, (DONE0,), True), [])
    assert step(phase, DONE0, RULES) == (phase, [])
    assert step(phase, exited(1, 0), RULES) == (Stopping(R3), [ReportDone(3)])
    assert step(phase, exited(1, 1, MISTAKE), RULES)[0] == Stopping(R3)


@pytest.mark.parametrize(
    ("event", "kind", "why"),
    [
        (StoreExited(3, "was killed by SIGKILL", 9.0), "store_lost", "the workers' store was killed by SIGKILL"),
        (StartFailed(3, "no memory", 9.0), "start_failed", "the group could not be started: no memory"),
    ],
)
def test_other_failures_blame_no_rank(event: Event, kind: str, why: str) -> None:
    expected = Stopping(R3), [KillGroup(3, why, keep=True), ReportFailure(Failure(3, "a", kind, (), why))]
    assert step(Running(R3), event, RULES) == expected


def test_group_that_ends_without_exits() -> None:
    """A group that vanishes is a failure with nobody left to kill."""
    phase, actions = step(Running(R3, (DONE0,)), GroupEnded(3), RULES)
    assert phase == Joining(3)
    assert [type(a) for a in actions] == [ReportFailure]


def test_reason_of_a_leaving_node() -> None:
    """A node leaves for what whoever asked had to say."""
    rules = replace(RULES, leave_on_stop=True, leave_grace_s=60.0)
    asked = StopRequested("SIGTERM", 143, 9.0, "drained: a fan")
    two = replace(R3, members=(*R3.members, replace(R3.members[0], node="b")))
    leaving, actions = step(Running(two), asked, rules)
    assert actions == [ReportLeaving("a leaves: drained: a fan", 143), SetTimer(39.0), SetTimer(69.0)]
    soon = ReportLeaving("a leaves: drained: a fan", 143, soon=True)
    for phase, at, actions in ((leaving, 38.9, []), (leaving, 39.0, [soon])):
        leaving, found = step(phase, TimerExpired(at), rules)
        assert found == actions
    assert step(leaving, TimerExpired(68.9), rules) == (leaving, [])
    _, (kill,) = step(leaving, TimerExpired(69.0), rules)
    assert kill == KillGroup(3, "drained: a fan: no round without a was published in time")
    ending, _ = step(leaving, RoundPublished(replace(R4, members=())), rules)
    assert step(ending, GroupEnded(3), rules) == flushing(3, 143, "drained: a fan")
    assert step(Joining(), asked, rules) == flushing(0, 143, "drained: a fan")


def test_node_alone_stops_its_group_without_a_round() -> None:
    """Nobody else has to agree, and without the store its own planner cannot publish one."""
    rules = replace(RULES, leave_on_stop=True, leave_grace_s=60.0)
    leaving, _ = step(Running(R3), StopRequested("SIGTERM", 143, 9.0, "drained: a fan"), rules)
    stopping, actions = step(leaving, TimerExpired(39.0), rules)
    why = "drained: a fan: no other round was published; workers have 30 s to stop"
    assert actions == [StopGroup(3, why, 30.0, "SIGTERM")]
    assert step(stopping, GroupEnded(3), rules) == flushing(3, 143, "drained: a fan")


def test_first_and_second_stop() -> None:
    """A stop gives grace and a second one does not."""
    stopping, (stop,) = step(Running(R3), StopRequested("SIGINT", 130, 9.0), RULES)
    assert stop == StopGroup(3, "SIGINT: workers have 30 s to stop; Ctrl-C again kills them at once", 30.0, "SIGINT")
    assert step(stopping, StopRequested("SIGTERM", 143, 9.5), RULES) == (stopping, [])
    assert step(stopping, exited(0, -2), RULES) == (stopping, [])
    forced, (kill,) = step(stopping, StopForced("SIGINT", 130, 10.0), RULES)
    assert forced == stopping
    assert kill == KillGroup(3, "SIGINT twice: killed without grace", save=False)
    assert isinstance(step(forced, GroupEnded(3), RULES)[0], Flushing)
    assert step(Running(R3), StopForced("SIGINT", 130, 9.0), RULES)[1] == [kill]


@pytest.mark.parametrize(
    ("failed", "size", "wait_s"), [(True, 1000, 30.0), (True, 2_000_000_000, 70.0), (False, 2_000_000_000, 6.0)]
)
def test_larger_state_has_more_time_where_the_job_has_failed(failed: bool, size: int, wait_s: float) -> None:
    phase: Phase = Flushing(3, 1, "no restart left", failed)
    for started in (FlushStarted(0, 10.0), FlushStarted(size, 10.0)):
        phase, _ = step(phase, started, RULES)
    assert isinstance(phase, Flushing)
    assert (phase.until, step(phase, started, RULES)) == (pytest.approx(10 + wait_s), (phase, []))
    assert step(phase, TimerExpired(9.9 + wait_s), RULES) == (phase, [])
    given_up = Ended(3, 1), [Leave(1, "no restart left")]
    for event in (TimerExpired(10.1 + wait_s), StopRequested("SIGTERM", 143, 11.0), StopForced("SIGTERM", 143, 11.0)):
        assert step(phase, event, RULES) == given_up
    assert step(phase, Flushed(7), RULES) == (Ended(3, 1), [Leave(1, "no restart left", saved_step=7)])


def test_job_that_ends_while_a_node_leaves_has_one_end() -> None:
    """The terminal Round is read while the last state is written: it decides the exit code, as before that."""
    phase, _ = step(Joining(3), StopRequested("SIGTERM", 143, 9.0, "n2 is absent"), replace(RULES, leave_on_stop=True))
    over = replace(R4, members=(), outcome="succeeded", exit_code=0, reason="all workers ended with code 0")
    phase, actions = step(phase, RoundPublished(over), RULES)
    assert actions == []
    assert step(phase, RoundPublished(R4), RULES) == (phase, []), "another Round is for those that stay"
    ended = Ended(4, 0), [Leave(0, "all workers ended with code 0", 7)]
    assert step(phase, Flushed(7), RULES) == ended
