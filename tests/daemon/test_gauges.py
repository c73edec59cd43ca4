"""The page of a node's metrics: every family once, whoever has samples of it, and docs that say what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticd_agent.control import Unanswered
from elasticd_agent.daemon import gauges
from elasticd_agent.daemon.gauges import Facts, NodeMetrics, merged, scraped
from elasticd_agent.metrics import Metrics

FACTS = Facts(
    slots=8,
    used=3,
    state="draining",
    joined=True,
    places=False,
    runners={"running": 2, "refused": 1},
    waiting=4,
    store_up=True,
    late_s=0.5,
    lines_lost=0,
)


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    return {
        (one.name, *(f"{k}={v}" for k, v in sorted(one.labels.items()) if k != "node")): one.value
        for family in text_string_to_metric_families(page.decode())
        for one in family.samples
    }


def job_page(job: str, step: int) -> bytes:
    metrics = Metrics(job, "n1", "1.0")
    metrics.progress({0: step}, 5.0, 1000.0)
    return metrics.render()


def test_what_the_node_says_of_itself() -> None:
    node = NodeMetrics('n"1\\', "1.0")
    node.runner_started()
    node.runner_ended("lost")
    node.store_away()
    found = samples(node.render(FACTS))
    assert found["elasticd_node_slots",] == 8
    assert found["elasticd_node_slots_used",] == 3
    assert found["elasticd_node_state", "state=draining"] == 1
    assert found["elasticd_node_state", "state=ready"] == 0
    assert found["elasticd_node_runners", "state=running"] == 2
    assert found["elasticd_node_runner_starts_total",] == 1
    assert found["elasticd_node_runner_ends_total", "outcome=lost"] == 1
    assert found["elasticd_node_runner_ends_total", "outcome=succeeded"] == 0
    assert found["elasticd_node_store_outages_total",] == 1
    with pytest.raises(KeyError):
        node.runner_ended("elsewhere")


def test_pages_of_several_jobs_are_one_page() -> None:
    page = merged([NodeMetrics("n1", "1.0").render(FACTS), job_page("a", 7), job_page("b", 9)])
    heads = [line for line in page.splitlines() if line.startswith(b"# TYPE")]
    assert len(heads) == len(set(heads))
    found = samples(page)
    assert found["elasticd_step", "job_id=a"] == 7
    assert found["elasticd_step", "job_id=b"] == 9
    alone = {key: value for one in (job_page("a", 7), job_page("b", 9)) for key, value in samples(one).items()}
    assert alone.keys() <= found.keys()


def test_a_runner_that_does_not_answer_is_left_out() -> None:
    def ask(job: str, number: int, within_s: float) -> bytes:
        assert 0 < within_s <= gauges.ASK_S
        if job == "b":
            raise Unanswered("it is stopped")
        return job_page(job, number)

    assert [len(samples(page)) > 5 for page in scraped([("a", 1), ("b", 1), ("c", 2)], ask)] == [True, True]


def test_a_runner_speaks_of_its_own_job_only() -> None:
    (page,) = scraped([("a", 1)], lambda job, number, within_s: job_page("a", 7) + job_page("b", 9))
    assert {label for key in samples(page) for label in key if label.startswith("job_id=")} == {"job_id=a"}


def test_the_docs_are_in_step() -> None:
    page = Path(__file__).parents[2] / "docs" / "node-metrics.md"
    assert page.read_text() == gauges.document(), "make docs"
