"""The thread that looks: when, what it posts, what it keeps, and that nobody ever waits for it."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd_agent.node.health import monitor as watching
from elasticd_agent.node.health.checks import CheckTargets
from elasticd_agent.node.health.monitor import HealthChanged, HealthMonitor, MonitorSettings
from elasticd_agent.node.health.persistence import HealthFile
from elasticd_agent.node.health.policy import HealthRules
from elasticd_agent.node.health.result import CheckResult, failed, passed
from tests.node.health.conftest import PATIENCE_S, until


class ScriptedCheckSuite:
    """Checks that find what the test says."""

    def __init__(self) -> None:
        self.finds: list[CheckResult] = [passed("a", "")]
        self.sum = passed("all-reduce", "")
        self.looks, self.sums, self.gpus, self.closed = 0, 0, 0, False
        self.hangs, self.stopped = False, threading.Event()
        self.places: CheckTargets | None = None
        self.fails: OSError | None = None
        self.heard: Callable[[], None] = lambda: None

    def run(self, idle: bool, most_gpus: int) -> list[CheckResult]:
        if self.hangs:
            self.stopped.wait(PATIENCE_S)
        self.looks += 1
        if self.fails is not None:
            raise self.fails
        self.gpus = most_gpus
        return list(self.finds)

    def update(self, places: CheckTargets) -> None:
        self.places = places

    def all_reduce(self) -> CheckResult:
        self.sums += 1
        return self.sum

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed = True


Inbox = queue.SimpleQueue[HealthChanged]
Opened = Callable[..., HealthMonitor]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> ScriptedCheckSuite:
    monkeypatch.setattr(watching, "RECHECK_S", 0.02)
    return ScriptedCheckSuite()


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


@pytest.fixture
def opened(looks: ScriptedCheckSuite, inbox: Inbox, tmp_path: Path) -> Iterator[Opened]:
    made: list[HealthMonitor] = []

    def start(
        every_s: float = 0.05,
        rules: HealthRules | None = None,
        all_reduce: bool = False,
        idle: bool = True,
        boot: str = "boot",
    ) -> HealthMonitor:
        def checks(heard: Callable[[], None]) -> ScriptedCheckSuite:
            looks.heard = heard
            return looks

        made.append(
            HealthMonitor(
                checks,
                rules or HealthRules(2, 0.3, 0.6),
                HealthFile(tmp_path / "health.json", boot),
                every_s=every_s,
                all_reduce=all_reduce,
                idle=lambda: idle,
                count_gpus=2,
            )
        )
        made[-1].start(inbox.put)
        return made[-1]

    yield start
    for one in made:
        one.close()


def states(inbox: Inbox, count: int) -> list[str]:
    return [inbox.get(timeout=PATIENCE_S).state for _ in range(count)]


def test_a_node_joins_once_it_has_been_found_fit(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    looks.finds = [failed("a", "not mounted yet")]
    health = opened()
    first = inbox.get(timeout=PATIENCE_S)
    assert (first.state, first.why) == ("unhealthy", "a: not mounted yet")
    assert health.verdict() == (False, "a: not mounted yet")
    looks.finds = [passed("a", "")]
    assert states(inbox, 1) == ["healthy"]
    assert health.verdict() == (True, "")
    assert [reading.outcome for reading in health.readings()] == ["good"]


def test_until_the_first_look_it_is_not_fit(looks: ScriptedCheckSuite, opened: Opened) -> None:
    looks.hangs = True
    assert opened().verdict() == (False, "its health has not been looked at yet")


def test_trouble_a_cool_off_and_its_end_are_each_told_once(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox
) -> None:
    opened()
    assert states(inbox, 1) == ["healthy"]
    looks.finds = [failed("a", "full")]
    assert states(inbox, 1) == ["unhealthy"]
    looks.finds = [passed("a", "")]
    began = time.monotonic()
    cooling = inbox.get(timeout=PATIENCE_S)
    assert (cooling.state, 0 < cooling.left_s <= 0.3) == ("quarantined", True)
    assert states(inbox, 1) == ["healthy"]
    assert time.monotonic() - began < 5
    assert inbox.empty()


def test_a_cool_off_ends_when_it_ends_and_not_at_the_next_look(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox
) -> None:
    health = opened(every_s=3600.0)
    assert states(inbox, 1) == ["healthy"]
    health.record_job_failure("rank 1 hung")
    health.record_job_failure("rank 1 hung")
    assert states(inbox, 2) == ["quarantined", "healthy"]
    assert looks.looks == 1


def test_what_happens_between_looks_brings_one_at_once(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    opened(every_s=3600.0)
    assert states(inbox, 1) == ["healthy"]
    looks.finds = [CheckResult("gpu xid", "bad", "XID 79", certain=True)]
    looks.heard()
    assert states(inbox, 1) == ["unhealthy"]


def test_what_is_not_believed_yet_is_looked_at_again_soon(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox
) -> None:
    opened(every_s=3600.0)
    assert states(inbox, 1) == ["healthy"]
    looks.finds = [failed("a", "full")]
    looks.heard()
    assert states(inbox, 1) == ["unhealthy"]
    assert looks.looks == 3


def test_slots_add_up_before_joining_and_once_more_after_trouble(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox
) -> None:
    looks.sum = failed("all-reduce", "slot 1 did not come")
    opened(all_reduce=True)
    assert inbox.get(timeout=PATIENCE_S).why == "all-reduce: slot 1 did not come"
    looks.sum = passed("all-reduce", "")
    assert states(inbox, 1) == ["healthy"]
    sums = looks.sums
    at = looks.looks
    until(lambda: looks.looks > at + 3, "look")
    assert looks.sums == sums
    looks.finds = [failed("a", "full")]
    assert states(inbox, 1) == ["unhealthy"]
    assert looks.sums == sums, "there is nothing to add up while something else is wrong"
    looks.finds = [passed("a", "")]
    assert states(inbox, 2) == ["quarantined", "healthy"]
    assert looks.sums == sums + 1


def test_a_daemon_that_comes_back_goes_on_where_it_was(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    rules = HealthRules(2, 30.0, 60.0)
    first = opened(rules=rules, all_reduce=True)
    assert states(inbox, 1) == ["healthy"]
    first.close()
    assert (looks.closed, looks.sums) == (True, 1)
    looks.hangs = True  # its first look takes its time
    second = opened(rules=rules, all_reduce=True)
    assert second.verdict() == (True, "")
    second.record_job_failure("x")
    second.record_job_failure("x")
    looks.stop()
    until(lambda: second.verdict()[0] is False, "quarantine")
    second.close()
    third = opened(rules=rules)
    ok, why = third.verdict()
    assert (ok, "to blame 2 times" in why) == (False, True)
    assert 25 < third.current().left_s <= 30
    third.close()
    looks.hangs = False
    fourth = opened(rules=rules, boot="another", all_reduce=True)
    until(lambda: fourth.verdict()[0], "look after the reboot")
    assert looks.sums == 2
    assert looks.gpus == 2


def test_a_daemon_that_finds_jobs_running_stops_none_of_them_for_what_it_forgot(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox
) -> None:
    looks.hangs = True
    health = opened(idle=False, all_reduce=True)
    assert health.verdict() == (True, "")
    looks.stop()
    until(lambda: looks.looks > 3, "look")
    assert (looks.sums, inbox.empty(), health.verdict()) == (0, True, (True, ""))


def test_new_settings_count_at_once(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox, tmp_path: Path) -> None:
    health = opened(every_s=3600.0)
    assert states(inbox, 1) == ["healthy"]
    places = CheckTargets("n", 1, (), (), (), 1.0, tmp_path, 1.0)
    looks.finds = [failed("a", "full")]
    health.update(MonitorSettings(places, HealthRules(strikes=1, cooloff_s=9.0), 0.05, False))
    assert states(inbox, 1) == ["unhealthy"]
    assert (looks.looks, looks.places) == (2, places)


def test_removing_the_file_forgives(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox, tmp_path: Path) -> None:
    health = opened(rules=HealthRules(1, 3600.0, 3600.0))
    assert states(inbox, 1) == ["healthy"]
    health.record_job_failure("x")
    assert states(inbox, 1) == ["quarantined"]
    (tmp_path / "health.json").unlink()
    assert states(inbox, 1) == ["healthy"]
    looks.finds = [failed("a", "full")]
    assert states(inbox, 1) == ["unhealthy"]
    (tmp_path / "health.json").unlink()
    at = looks.looks
    until(lambda: looks.looks > at + 3, "look")
    assert health.verdict() == (False, "a: full"), "what is wrong now counts all the same"


def test_nobody_waits_for_a_look_and_one_that_hangs_is_trouble(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = opened()
    assert states(inbox, 1) == ["healthy"]
    monkeypatch.setattr(watching, "OVERDUE_S", 0.2)
    looks.hangs = True
    began = time.monotonic()
    health.record_job_failure("x")
    health.verdict()
    health.readings()
    assert time.monotonic() - began < 1.0
    until(lambda: not health.verdict()[0], "verdict on a look that hangs")
    assert "hangs" in health.verdict()[1]


def test_who_was_stopped_itself_blames_nobody(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = opened()
    assert states(inbox, 1) == ["healthy"]
    monkeypatch.setattr(watching, "OVERDUE_S", 0.2)
    monkeypatch.setattr(watching, "ATTENTIVE_S", 0.4)
    looks.hangs = True
    assert health.verdict()[0]
    time.sleep(0.6)  # as long as a stopped process asks nothing
    assert health.verdict()[0]
    until(lambda: not health.verdict()[0], "verdict once it asks again")


def test_a_machine_on_which_nothing_can_be_started_is_not_well(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox
) -> None:
    looks.fails = BlockingIOError(11, "Resource temporarily unavailable")
    health = opened()
    assert states(inbox, 1) == ["unhealthy"]
    assert health.verdict()[1] == "machine: nothing can be looked at: Resource temporarily unavailable"
    looks.fails = None
    assert states(inbox, 1) == ["healthy"]


def test_what_was_cut_short_by_the_end_counts_for_nothing(
    opened: Opened, looks: ScriptedCheckSuite, tmp_path: Path
) -> None:
    health = opened()
    until(lambda: health.verdict()[0], "look")
    looks.finds, looks.hangs = [CheckResult("a", "bad", "cut short", certain=True)], True
    looks.heard()
    time.sleep(0.05)
    health.close()
    assert json.loads((tmp_path / "health.json").read_bytes())["streak"] == 0
