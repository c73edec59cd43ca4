"""The checking thread: its schedule, its posts, its history, and callers that never wait."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd_agent.config.quantities import Seconds
from elasticd_daemon.config.agent_settings import HealthSettings, NodeSettings
from elasticd_daemon.health import monitor
from elasticd_daemon.health.monitor import HealthMonitor
from elasticd_daemon.health.persistence import HealthFile
from elasticd_daemon.health.policy import HealthVerdict
from elasticd_daemon.health.result import CheckResult, GpuUsage, failed, passed, skipped
from elasticd_daemon.metrics import METRICS, NodeMetrics, health_samples
from tests.daemon.health.conftest import PATIENCE_S, until
from tests.daemon.test_metrics import samples


class ScriptedCheckSuite:
    """Checks that find what the test says."""

    def __init__(self) -> None:
        self.finds: list[CheckResult] = [passed("a", "")]
        self.sum = passed("all-reduce", "")
        self.looks, self.sums, self.gpus, self.closed = 0, 0, 0, False
        self.hangs, self.stopped = False, threading.Event()
        self.settings: NodeSettings | None = None
        self.fails: OSError | None = None
        self.received: Callable[[], None] = lambda: None
        self.gpu_usage = (GpuUsage(0, 97, 61 << 30, 80 << 30), GpuUsage(3))
        self.time_limit_s = 0.0

    def run(self, idle: bool, most_gpus: int) -> list[CheckResult]:
        if self.hangs:
            self.stopped.wait(PATIENCE_S)
        self.looks += 1
        if self.fails is not None:
            raise self.fails
        self.gpus = most_gpus
        return list(self.finds)

    def update(self, settings: NodeSettings) -> None:
        self.settings = settings

    def report_to_kubernetes(self, verdict: HealthVerdict) -> None:
        pass

    def all_reduce(self) -> CheckResult:
        self.sums += 1
        return self.sum

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed = True


def settings(
    every_s: float, all_reduce: bool, strikes: int = 2, cooloff_s: float = 60.0, cooloff_max_s: float = 3600.0
) -> NodeSettings:
    health = HealthSettings(
        every_s=Seconds(every_s),
        all_reduce=all_reduce,
        strikes=strikes,
        cooloff_s=Seconds(cooloff_s),
        cooloff_max_s=Seconds(cooloff_max_s),
    )
    return NodeSettings(node="n", health=health)


def verdict(health: HealthMonitor) -> tuple[bool, str]:
    now = health.current()
    return now.state == "healthy", now.why


Inbox = queue.SimpleQueue[HealthVerdict]
Opened = Callable[..., HealthMonitor]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> ScriptedCheckSuite:
    monkeypatch.setattr(monitor, "RECHECK_S", 0.02)
    return ScriptedCheckSuite()


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


@pytest.fixture
def opened(looks: ScriptedCheckSuite, inbox: Inbox, tmp_path: Path) -> Iterator[Opened]:
    made: list[HealthMonitor] = []

    def start(
        every_s: float = 0.05,
        rules: tuple[int, float, float] = (2, 0.3, 0.6),
        all_reduce: bool = False,
        idle: bool = True,
        boot: str = "boot",
    ) -> HealthMonitor:
        file = HealthFile(tmp_path / "health.json", boot)
        file.max_gpus = 2

        def checks(received: Callable[[], None]) -> ScriptedCheckSuite:
            looks.received = received
            return looks

        made.append(HealthMonitor(checks, settings(every_s, all_reduce, *rules), file, idle=lambda: idle))
        made[-1].start(inbox.put)
        return made[-1]

    yield start
    for one in made:
        one.close()


def states(inbox: Inbox, count: int) -> list[str]:
    return [inbox.get(timeout=PATIENCE_S).state for _ in range(count)]


def test_metrics_of_the_current_state(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    looks.finds = [passed("gpus", "8", 0.5), failed('disk /"odd"\n', "full", 0.01), skipped("memory", "a job runs")]
    health = opened()
    until(lambda: health.results, "first run of the checks")
    gauges = health_samples(health.current(), health.failure_streak(), health.results, health.gpu_usage())
    found = samples(NodeMetrics("node-1", "1.0").render(gauges))
    words = ("health", "quarantined", "streak", "gpu")
    assert {name: value for name, value in found.items() if any(word in name[0] for word in words)} == {
        ("elasticd_node_healthy",): 0,
        ("elasticd_node_quarantined",): 0,
        ("elasticd_node_failure_streak",): 0,
        ("elasticd_health_check_failing", "check=gpus"): 0,
        ("elasticd_health_check_failing", 'check=disk /"odd"\n'): 1,
        ("elasticd_health_check_seconds", "check=gpus"): 0.5,
        ("elasticd_health_check_seconds", 'check=disk /"odd"\n'): 0.01,
        ("elasticd_node_gpu_utilization_ratio", "gpu=0"): 0.97,
        ("elasticd_node_gpu_memory_used_bytes", "gpu=0"): 65498251264,
        ("elasticd_node_gpu_memory_bytes", "gpu=0"): 85899345920,
    }
    assert all("|" not in spec.help for spec in METRICS)


def test_node_is_healthy_after_the_first_run(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    looks.finds = [failed("a", "not mounted yet")]
    health = opened()
    first = inbox.get(timeout=PATIENCE_S)
    assert (first.state, first.why) == ("unhealthy", "a: not mounted yet")
    assert verdict(health) == (False, "a: not mounted yet")
    looks.finds = [passed("a", "")]
    assert states(inbox, 1) == ["healthy"]
    assert verdict(health) == (True, "")
    assert [reading.outcome for reading in health.results] == ["passed"]


def test_node_is_unhealthy_before_the_first_run(looks: ScriptedCheckSuite, opened: Opened) -> None:
    looks.hangs = True
    assert verdict(opened()) == (False, "its health has not been checked yet")


def test_failure_cool_off_and_its_end_are_posted_once(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    opened()
    assert states(inbox, 1) == ["healthy"]
    looks.finds = [failed("a", "full")]
    assert states(inbox, 1) == ["unhealthy"]
    looks.finds = [passed("a", "")]
    cooling = inbox.get(timeout=PATIENCE_S)
    assert (cooling.state, cooling.quarantine_left_s) == ("quarantined", pytest.approx(0.3))
    assert states(inbox, 1) == ["healthy"]
    assert inbox.empty()


def test_end_of_cool_off_does_not_wait_for_the_next_run(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox
) -> None:
    health = opened(every_s=3600.0)
    assert states(inbox, 1) == ["healthy"]
    health.record_job_failure("rank 1 hung")
    health.record_job_failure("rank 1 hung")
    assert states(inbox, 2) == ["quarantined", "healthy"]
    assert looks.looks == 1


def test_event_between_runs_starts_a_run(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    opened(every_s=3600.0)
    assert states(inbox, 1) == ["healthy"]
    looks.finds = [CheckResult("gpu xid", "failed", "XID 79", certain=True)]
    looks.received()
    assert states(inbox, 1) == ["unhealthy"]


def test_unconfirmed_failure_is_checked_again_soon(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    opened(every_s=3600.0)
    assert states(inbox, 1) == ["healthy"]
    looks.finds = [failed("a", "full")]
    looks.received()
    assert states(inbox, 1) == ["unhealthy"]
    assert looks.looks == 3


def test_all_reduce_before_registration_and_after_failures(
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


def test_restarted_agent_keeps_the_history(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    rules = (2, 3000.0, 6000.0)
    first = opened(rules=rules, all_reduce=True)
    assert states(inbox, 1) == ["healthy"]
    first.close()
    assert (looks.closed, looks.sums) == (True, 1)
    looks.hangs = True  # its first look takes its time
    second = opened(rules=rules, all_reduce=True)
    assert verdict(second) == (True, "")
    second.record_job_failure("x")
    second.record_job_failure("x")
    looks.stop()
    until(lambda: verdict(second)[0] is False, "quarantine")
    second.close()
    third = opened(rules=rules)
    ok, why = verdict(third)
    assert (ok, "root cause 2 times" in why) == (False, True)
    assert 2900 < third.current().quarantine_left_s <= 3000
    third.close()
    looks.hangs = False
    fourth = opened(rules=rules, boot="another", all_reduce=True)
    until(lambda: verdict(fourth)[0], "look after the reboot")
    assert looks.sums == 2
    assert looks.gpus == 2


def test_running_jobs_survive_a_lost_history(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    looks.hangs = True
    health = opened(idle=False, all_reduce=True)
    assert verdict(health) == (True, "")
    looks.stop()
    until(lambda: looks.looks > 3, "look")
    assert (looks.sums, inbox.empty(), verdict(health)) == (0, True, (True, ""))


def test_new_settings_count_at_once(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    health = opened(every_s=3600.0)
    assert states(inbox, 1) == ["healthy"]
    new = settings(3600.0, False, 1, 9.0)
    looks.finds = [failed("a", "full")]
    health.update(new)
    assert states(inbox, 1) == ["unhealthy"]
    assert (looks.looks, looks.settings) == (2, new)


def test_deleted_file_resets_the_history(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox, tmp_path: Path
) -> None:
    health = opened(rules=(1, 3600.0, 3600.0))
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
    assert verdict(health) == (False, "a: full"), "what is wrong now counts all the same"


def test_hanging_run_blocks_no_caller_and_is_unhealthy(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = opened()
    assert states(inbox, 1) == ["healthy"]
    monkeypatch.setattr(monitor, "OVERDUE_S", 0.2)
    looks.hangs = True
    began = time.monotonic()
    health.record_job_failure("x")
    verdict(health)
    assert time.monotonic() - began < 10
    until(lambda: not verdict(health)[0], "verdict on a look that hangs")
    assert "hang" in verdict(health)[1]


def test_plugins_that_may_take_long_do_not_hang(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = opened()
    assert states(inbox, 1) == ["healthy"]
    monkeypatch.setattr(monitor, "OVERDUE_S", 0.1)
    looks.time_limit_s = 2 * PATIENCE_S  # health.plugin_timeout allows it
    looks.hangs = True
    until(lambda: time.monotonic() > health.checked_at + 0.5, "a run longer than OVERDUE_S")
    assert verdict(health)[0]


def test_stopped_agent_is_not_unhealthy(
    opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = opened()
    assert states(inbox, 1) == ["healthy"]
    monkeypatch.setattr(monitor, "OVERDUE_S", 0.2)
    monkeypatch.setattr(monitor, "MAX_QUERY_GAP_S", 0.4)
    looks.hangs = True
    time.sleep(0.6)  # as long as a stopped process asks nothing
    assert verdict(health)[0]
    until(lambda: not verdict(health)[0], "verdict once it asks again")


def test_machine_that_starts_no_process_is_unhealthy(opened: Opened, looks: ScriptedCheckSuite, inbox: Inbox) -> None:
    looks.fails = BlockingIOError(11, "Resource temporarily unavailable")
    health = opened()
    assert states(inbox, 1) == ["unhealthy"]
    assert verdict(health)[1] == "machine: no check can run: Resource temporarily unavailable"
    looks.fails = None
    assert states(inbox, 1) == ["healthy"]


def test_interrupted_run_does_not_count(opened: Opened, looks: ScriptedCheckSuite, tmp_path: Path) -> None:
    health = opened()
    until(lambda: verdict(health)[0], "look")
    looks.finds, looks.hangs = [CheckResult("a", "failed", "cut short", certain=True)], True
    looks.received()
    time.sleep(0.05)
    health.close()
    assert json.loads((tmp_path / "health.json").read_bytes())["streak"] == 0
