"""The metrics page of a node, and its documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.generate import metrics
from elasticd_agent.node.metrics import NodeFacts, NodeMetrics

FACTS = NodeFacts(
    slots=8,
    slots_used=3,
    state="draining",
    registered=True,
    is_scheduler=False,
    runners={"running": 2, "refused": 1},
    jobs_waiting=4,
    store_up=True,
    loop_lag_s=0.5,
    event_log_lines_lost=0,
)


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    return {
        (one.name, *(f"{k}={v}" for k, v in sorted(one.labels.items()) if k != "node")): one.value
        for family in text_string_to_metric_families(page.decode())
        for one in family.samples
    }


def test_page_of_a_node() -> None:
    node = NodeMetrics('n"1\\', "1.0")
    node.runner_started()
    node.runner_ended("lost")
    node.store_lost()
    found = samples(node.render(FACTS))
    assert found["elasticd_node_slots",] == 8
    assert found["elasticd_node_slots_used",] == 3
    assert found["elasticd_node_state", "state=draining"] == 1
    assert found["elasticd_node_state", "state=ready"] == 0
    assert found["elasticd_node_runners", "state=running"] == 2
    assert found["elasticd_node_runner_starts_total",] == 1
    assert found["elasticd_node_runner_exits_total", "outcome=lost"] == 1
    assert found["elasticd_node_runner_exits_total", "outcome=succeeded"] == 0
    assert found["elasticd_node_store_outages_total",] == 1
    with pytest.raises(KeyError):
        node.runner_ended("elsewhere")


def test_lease_of_the_node_status() -> None:
    node = NodeMetrics("n1", "1.0")
    assert ("elasticd_node_lease_seconds",) not in samples(node.render(FACTS)), "it has none yet"
    for renewal_s in (None, 0.001, 0.003, 7.0):
        node.lease(3.0, renewal_s)
    found = samples(node.render(FACTS))
    assert found["elasticd_node_lease_seconds",] == 3
    buckets = {key[1]: value for key, value in found.items() if key[0] == "elasticd_node_lease_renewal_seconds_bucket"}
    assert (buckets["le=0.001"], buckets["le=0.0025"], buckets["le=0.005"], buckets["le=+Inf"]) == (1, 1, 2, 3)
    assert found["elasticd_node_lease_renewal_seconds_count",] == 3
    assert found["elasticd_node_lease_renewal_seconds_sum",] == 7.004


def test_the_docs_are_in_step() -> None:
    page = Path(__file__).parents[2] / "docs" / "node-metrics.md"
    assert page.read_text() == metrics.node_page(), "make docs"
