"""The node's health in events, and the job failures that count against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elasticd_agent.model import log_events as events
from elasticd_daemon.health.job_failures import JobFailures
from elasticd_daemon.health.monitor import report_change
from elasticd_daemon.health.policy import HealthVerdict


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (HealthVerdict("healthy", "", 0.0), "node_healthy", "this node is healthy"),
        (
            HealthVerdict("unhealthy", "disk /x: full", 0.0),
            "node_unhealthy",
            "this node is unhealthy and gets no work: disk /x: full",
        ),
        (
            HealthVerdict("quarantined", "root cause of a hang", 59.96),
            "node_quarantined",
            "this node gets no work for 60 s: root cause of a hang",
        ),
    ],
)
def test_each_change_is_an_event(change: HealthVerdict, kind: str, reason: str) -> None:
    recorded: list[events.LogEvent] = []

    def happened(kind: Callable[..., events.LogEvent], sentence: str, **fields: object) -> None:
        recorded.append(kind(round=0, mono=0.0, reason=sentence, **fields))

    report_change(change, happened)
    assert [(record.kind, record.reason) for record in recorded] == [(kind, reason)]
    assert type(recorded[0]) in events.EVENT_TYPES


def status(*quarantined: dict[str, Any], number: int = 3) -> dict[str, Any]:
    return {"round": number, "reason": "rank 1 hung", "quarantined_slots": list(quarantined), "alone": False}


def slot(number: int, times: int, node: str = "me") -> dict[str, Any]:
    return {"node": node, "slot": number, "times": times}


def test_new_quarantine_of_own_slot_is_reported_once() -> None:
    blames, key = JobFailures("me"), ("j", 1)
    assert blames.update({key: status()}) == []
    assert blames.update({key: status(slot(0, 0), slot(1, 1), slot(2, 1, "other"))}) == [
        "job j, round 3 quarantined slot 1: rank 1 hung"
    ]
    assert blames.update({key: status(slot(1, 1), number=4)}) == []
    assert blames.update({key: status(number=5)}) == []
    assert blames.update({key: status(slot(1, 1), number=6)}) == []
    assert blames.update({key: status(slot(1, 2), slot(0, 1), number=7)}) == [
        "job j, round 7 quarantined slots 0, 1: rank 1 hung"
    ]
    assert blames.update({}) == []
    assert len(blames.update({("j", 2): status(slot(1, 1))})) == 1


def test_first_status_of_an_adopted_runner_is_the_baseline() -> None:
    blames, key = JobFailures("me"), ("j", 1)
    assert blames.update({key: status(slot(1, 2))}, adopted=[key]) == []
    assert len(blames.update({key: status(slot(1, 3))}, adopted=[key])) == 1


@pytest.mark.parametrize("quarantined", [None, "x", [1], [{}], [{"node": "me", "slot": "1", "times": 1}]])
def test_senseless_status_is_ignored(quarantined: object) -> None:
    assert JobFailures("me").update({("j", 1): {"quarantined_slots": quarantined, "alone": False}}) == []


def test_one_user_takes_the_node_from_no_other() -> None:
    """The first failure of each user counts, and then by turns."""
    blames = JobFailures("me")
    a, b, users = ("a", 1), ("b", 2), {("a", 1): 1000, ("b", 2): 1001}
    counted = []
    for key, times in ((a, 1), (a, 2), (b, 1), (b, 2), (a, 3)):
        counted.append(len(blames.update({a: status(), b: status(), key: status(slot(0, times))}, uids=users)))
    assert counted == [1, 0, 1, 0, 1]
    assert len(blames.update({a: status(slot(0, 4))}, uids={a: 1000})) == 1, "nobody else has a job here"


def test_job_on_this_node_alone_counts_nothing() -> None:
    assert JobFailures("me").update({("j", 1): {**status(slot(1, 1)), "alone": True}}) == []


def test_long_reason_of_a_runner_is_cut() -> None:
    answer = {"quarantined_slots": [{"node": "me", "slot": 0, "times": 1}], "alone": False, "reason": "." * 100_000}
    (sentence,) = JobFailures("me").update({("j", 1): answer})
    assert len(sentence) == 1000
