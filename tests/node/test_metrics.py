"""The metrics page of a node, and its documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.generate import metrics
from elasticd_agent.node import metrics as specs
from elasticd_agent.node.metrics import NodeMetrics, Samples

GAUGES: Samples = {
    (specs.SLOTS, ()): 8,
    (specs.SLOTS_USED, ()): 3,
    **{(specs.STATE, (state,)): state == "draining" for state in specs.NODE_STATES},
    **{(specs.RUNNERS, (state,)): state == "running" for state in specs.RUNNER_STATES},
    (specs.REGISTERED, ()): True,
    (specs.IS_SCHEDULER, ()): False,
    (specs.JOBS_WAITING, ()): 4,
    (specs.STORE_UP, ()): True,
    (specs.LOOP_LAG, ()): 0.5,
    (specs.EVENT_LOG_LINES_LOST, ()): 0,
    (specs.HEALTHY, ()): True,
    (specs.QUARANTINED, ()): False,
    (specs.QUARANTINE_LEFT, ()): 0.0,
    (specs.FAILURE_STREAK, ()): 0,
}


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    return {
        (one.name, *(f"{k}={v}" for k, v in sorted(one.labels.items()) if k != "node")): one.value
        for family in text_string_to_metric_families(page.decode())
        for one in family.samples
    }


def test_page_of_a_node() -> None:
    node = NodeMetrics('n"1\\', "1.0")
    node.count(specs.RUNNER_STARTS)
    node.count(specs.RUNNER_EXITS, "lost")
    node.count(specs.STORE_OUTAGES)
    found = samples(node.render(GAUGES))
    assert found["elasticd_node_slots",] == 8
    assert found["elasticd_node_slots_used",] == 3
    assert found["elasticd_node_state", "state=draining"] == 1
    assert found["elasticd_node_state", "state=ready"] == 0
    assert found["elasticd_node_runners", "state=running"] == 1
    assert found["elasticd_node_runner_starts_total",] == 1
    assert found["elasticd_node_runner_exits_total", "outcome=lost"] == 1
    assert found["elasticd_node_runner_exits_total", "outcome=succeeded"] == 0
    assert found["elasticd_node_store_outages_total",] == 1
    with pytest.raises(KeyError):
        node.count(specs.RUNNER_EXITS, "elsewhere")


def test_failed_job_keeps_its_reason_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alert says which job failed, and why, when nothing else on the page knows it any more."""
    node, now = NodeMetrics("n1", "1.0"), 1000.0
    monkeypatch.setattr(specs.time, "time", lambda: now)
    for job in range(specs.MAX_FAILED + 3):
        node.job_failed(f"job-{job}", "rank 0 exited\nwith code 1")
    failed = {key: at for key, at in samples(node.render(GAUGES)).items() if "job_failed" in key[0]}
    assert len(failed) == specs.MAX_FAILED
    newest = ("elasticd_node_job_failed_timestamp_seconds", f"job_id=job-{job}", "reason=rank 0 exited with code 1")
    assert failed[newest] == 1000.0
    now += specs.FAILED_KEPT_S
    assert newest not in samples(node.render(GAUGES))


def test_process_of_the_agent() -> None:
    found = samples(specs.merge_pages([NodeMetrics("n1", "1.0").render(GAUGES), specs.process_page()]))
    assert found["process_resident_memory_bytes",] > 1e6
    assert found["process_open_fds",] > 2


def test_lease_of_the_node_status() -> None:
    node = NodeMetrics("n1", "1.0")
    assert ("elasticd_node_lease_seconds",) not in samples(node.render(GAUGES)), "it has none yet"
    for renewal_s in (None, 0.001, 0.003, 7.0):
        node.lease(3.0, renewal_s)
    found = samples(node.render(GAUGES))
    assert found["elasticd_node_lease_seconds",] == 3
    buckets = {key[1]: value for key, value in found.items() if key[0] == "elasticd_node_lease_renewal_seconds_bucket"}
    assert (buckets["le=0.001"], buckets["le=0.0025"], buckets["le=0.005"], buckets["le=+Inf"]) == (1, 1, 2, 3)
    assert found["elasticd_node_lease_renewal_seconds_count",] == 3
    assert found["elasticd_node_lease_renewal_seconds_sum",] == 7.004


def test_the_docs_are_in_step() -> None:
    page = Path(__file__).parents[2] / "docs" / "node-metrics.md"
    assert page.read_text() == metrics.node_page(), "make docs"
