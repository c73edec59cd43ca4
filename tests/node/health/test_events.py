"""What is told of a node's health: sentences and events, metrics, and what runners say of whom is to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elasticd_agent.node.health.events import report_change
from elasticd_agent.node.health.job_failures import JobFailures
from elasticd_agent.node.health.metrics import METRICS, render_health
from elasticd_agent.node.health.monitor import HealthChanged
from elasticd_agent.node.health.result import failed, passed, skipped
from elasticd_agent.telemetry import events


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (HealthChanged("healthy", "", 0.0), "node_healthy", "nothing is held against this node's health"),
        (
            HealthChanged("unhealthy", "disk /x: full", 0.0),
            "node_unhealthy",
            "this node is not well, and is given no work: disk /x: full",
        ),
        (
            HealthChanged("quarantined", "it was to blame", 59.96),
            "node_quarantined",
            "this node is given no work for 60 s: it was to blame",
        ),
    ],
)
def test_each_change_is_an_event_with_its_sentence(change: HealthChanged, kind: str, reason: str) -> None:
    told: list[events.LogEvent] = []

    def happened(kind: Callable[..., events.LogEvent], sentence: str, **fields: object) -> None:
        told.append(kind(round=0, mono=0.0, reason=sentence, **fields))

    report_change(change, happened)
    assert [(record.kind, record.reason) for record in told] == [(kind, reason)]
    assert type(told[0]) in events.EVENT_TYPES


def test_metrics_say_what_stands() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    readings = [passed("gpus", "8", 0.5), failed('disk /"odd"\n', "full", 0.01), skipped("memory", "a job runs")]
    text = render_health("node-1", "quarantined", 12.5, 3, readings).decode()
    found = {
        (sample.name, sample.labels.get("check", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {
        ("elasticd_node_healthy", ""): 0,
        ("elasticd_node_quarantined", ""): 1,
        ("elasticd_node_quarantine_left_seconds", ""): 12.5,
        ("elasticd_node_failure_streak", ""): 3,
        ("elasticd_health_check_failing", "gpus"): 0,
        ("elasticd_health_check_failing", 'disk /"odd"\n'): 1,
        ("elasticd_health_check_seconds", "gpus"): 0.5,
        ("elasticd_health_check_seconds", 'disk /"odd"\n'): 0.01,
    }
    assert all("|" not in spec.help for spec in METRICS)
    assert b"check" not in render_health("n", "healthy", 0.0, 0, ())


def said(*benched: dict[str, Any], number: int = 3) -> dict[str, Any]:
    return {"round": number, "reason": "rank 1 hung", "quarantined_slots": list(benched), "alone": False}


def slot(number: int, times: int, node: str = "me") -> dict[str, Any]:
    return {"node": node, "slot": number, "times": times}


def test_a_slot_of_ours_that_is_set_aside_is_told_once_each_time() -> None:
    blames, key = JobFailures("me"), ("j", 1)
    assert blames.update({key: said()}) == []
    assert blames.update({key: said(slot(0, 0), slot(1, 1), slot(2, 1, "other"))}) == [
        "job j, round 3 set aside slot 1: rank 1 hung"
    ]
    assert blames.update({key: said(slot(1, 1), number=4)}) == []
    assert blames.update({key: said(number=5)}) == []
    assert blames.update({key: said(slot(1, 1), number=6)}) == []
    assert blames.update({key: said(slot(1, 2), slot(0, 1), number=7)}) == [
        "job j, round 7 set aside slots 0, 1: rank 1 hung"
    ]
    assert blames.update({}) == []
    assert len(blames.update({("j", 2): said(slot(1, 1))})) == 1


def test_what_an_adopted_runner_says_first_is_no_news() -> None:
    blames, key = JobFailures("me"), ("j", 1)
    assert blames.update({key: said(slot(1, 2))}, adopted=[key]) == []
    assert len(blames.update({key: said(slot(1, 3))}, adopted=[key])) == 1


@pytest.mark.parametrize("benched", [None, "x", [1], [{}], [{"node": "me", "slot": "1", "times": 1}]])
def test_what_makes_no_sense_blames_nobody(benched: object) -> None:
    assert JobFailures("me").update({("j", 1): {"quarantined_slots": benched, "alone": False}}) == []


def test_a_job_that_runs_here_alone_blames_nobody() -> None:
    assert JobFailures("me").update({("j", 1): {**said(slot(1, 1)), "alone": True}}) == []


def test_a_runner_that_talks_on_and_on_does_not_make_the_nodes_card_too_large() -> None:
    said = {"quarantined_slots": [{"node": "me", "slot": 0, "times": 1}], "alone": False, "reason": "." * 100_000}
    (sentence,) = JobFailures("me").update({("j", 1): said})
    assert len(sentence) == 1000
