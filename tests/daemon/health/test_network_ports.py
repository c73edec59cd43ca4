"""InfiniBand ports: which are missed, and how a link that flaps counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticd_daemon.health import network_ports, policy
from elasticd_daemon.health.network_ports import judge_ports, read_ports
from elasticd_daemon.health.policy import HealthHistory, HealthRules, after_checks, health_verdict
from tests.daemon.health.conftest import Node


def ports(root: Path, **states: tuple[str, int]) -> None:
    """By device; each has one port."""
    for device, (state, downed) in states.items():
        port = root / device / "ports" / "1"
        (port / "counters").mkdir(parents=True, exist_ok=True)
        (port / "state").write_text(f"{state}\n")
        (port / "counters" / "link_downed").write_text(f"{downed}\n")


UP, DOWN, INIT = ("4: ACTIVE", 2), ("1: DOWN", 2), ("2: INIT", 2)
CASES = {
    "no adapter": ([{}], "skipped", "no InfiniBand or RoCE port"),
    "all active": ([{"a": UP, "b": UP}], "passed", "2 of 2 ports active"),
    "never active, perhaps without a cable": ([{"a": UP, "b": DOWN}] * 2, "passed", "1 of 2 ports active"),
    "lost": ([{"a": UP, "b": UP}, {"a": UP, "b": DOWN}], "failed", "b port 1 is DOWN and was ACTIVE"),
    "still lost": ([{"a": UP}, {"a": INIT}, {"a": INIT}], "failed", "a port 1 is INIT and was ACTIVE"),
    "gone": ([{"a": UP, "b": UP}, {"a": UP}], "failed", "b port 1 is gone and was ACTIVE"),
    "back": ([{"a": UP}, {"a": DOWN}, {"a": UP}], "passed", "1 of 1 ports active"),
    "flapped": (
        [{"a": UP}, {"a": ("4: ACTIVE", 5)}],
        *("failed", "a port 1's link went down since the last check, 3 times"),
    ),
    "flapped once, long ago": (
        [{"a": UP}, {"a": ("4: ACTIVE", 5)}, {"a": ("4: ACTIVE", 5)}],
        "passed",
        "1 of 1 ports active",
    ),
    "driver loaded anew": ([{"a": UP}, {"a": ("4: ACTIVE", 0)}], "passed", "1 of 1 ports active"),
}


@pytest.mark.parametrize("name", CASES)
def test_ports(name: str, tmp_path: Path) -> None:
    runs, outcome, why = CASES[name]
    before: dict[str, dict[str, object]] = {}
    for number, states in enumerate(runs):
        ports(tmp_path / str(number), **states)
        found, before = judge_ports(before, read_ports(tmp_path / str(number)))
    assert (found.outcome, found.why) == (outcome, why)


def test_a_single_flap_costs_no_node() -> None:
    history = HealthHistory(fit_since_boot=True)
    seen: dict[str, dict[str, object]] = {}
    for downed in (0, 1, 1, 1, 1):
        now = {"a port 1": {"state": "ACTIVE", "link_downed": downed, "was_active": True}}
        found, seen = judge_ports(seen, now)
        history = after_checks(history, [found], 0.0, HealthRules())
        assert health_verdict(history, 0.0).state == "healthy"


def test_ports_are_read_in_a_process_of_their_own(node: Node) -> None:
    """And remembered for the next run: here, that there is none."""
    assert node.run()[network_ports.CHECK_NAME].outcome in ("passed", "skipped")
    assert policy.HealthRules().strikes > 1
