"""The metrics page of a node, and its documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.generate import metrics
from elasticd_daemon import metrics as specs
from elasticd_daemon.metrics import LabelValues, NodeMetrics, Samples
from elasticd_daemon.records import JobResult
from elasticd_daemon.runners.spec import RunnerExit
from tests.daemon.conftest import MakeNode
from tests.daemon.test_unhealthy_node import ill

GAUGES: Samples = {
    (specs.SLOTS, ()): 8,
    (specs.SLOTS_USED, ()): 3,
    **{(specs.NODE_STATE, (state,)): state == "draining" for state in specs.NODE_STATES},
    **{(specs.RUNNERS, (state,)): state == "running" for state in specs.RUNNER_STATES},
    (specs.REGISTERED, ()): True,
    (specs.IS_SCHEDULER, ()): False,
    (specs.JOBS_WAITING, ()): 4,
    (specs.STORE_UP, ()): True,
    (specs.LOOP_LAG, ()): 0.5,
    (specs.EVENT_LOG_LINES_LOST, ()): 0,
    (specs.HEALTHY, ()): True,
    (specs.QUARANTINED, ()): False,
    (specs.QUARANTINE_LEFT_S, ()): 0.0,
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


def test_failed_job_keeps_its_reason_for_a_while() -> None:
    """The alert says which job failed, and why, when nothing else on the page knows it any more."""
    why = "rank 0 exited\nwith code 1"

    def shown(*ends: JobResult | RunnerExit, scheduler: bool = False, age_s: float = 10.0) -> list[LabelValues]:
        now = 1000.0 + age_s
        return [labels for _, labels in specs.failed_job_samples(ends, "a", is_scheduler=scheduler, now=now)]

    here = JobResult("llm", 1, "failed", 1, why, 1000.0, ("a", "b"))
    everywhere_refused = replace(here, nodes=())
    series = ("llm", "rank 0 exited with code 1")
    assert shown(here) == [series]
    assert shown(RunnerExit("llm", 1, 1, "failed", why, ended_at=1000.0)) == [series], "not in the store yet"
    assert shown(RunnerExit("llm", 1, 2, "refused", why, ended_at=1000.0)) == []
    assert shown(here, age_s=specs.FAILED_JOB_KEPT_S) == []
    assert shown(replace(here, outcome="cancelled"), replace(here, nodes=("b",)), scheduler=True) == []
    assert shown(everywhere_refused) == []
    assert shown(everywhere_refused, scheduler=True) == [series]
    many = [replace(here, job=f"job-{job}", ended_at=1000.0 + job) for job in range(specs.MAX_FAILED_JOBS + 3)]
    assert [job for job, _ in shown(*reversed(many))] == [one.job for one in many[3:]]


def test_process_of_the_agent() -> None:
    found = samples(NodeMetrics("n1", "1.0").render(GAUGES))
    assert found["process_resident_memory_bytes",] > 1e6
    assert found["process_open_fds",] > 2


def test_lease_of_the_node_status() -> None:
    node = NodeMetrics("n1", "1.0")
    assert ("elasticd_node_lease_seconds",) not in samples(node.render(GAUGES)), "it has none yet"
    for renewal_s in (None, 0.001, 0.003, 7.0):
        node.on_renewal(3.0, renewal_s)
    found = samples(node.render(GAUGES))
    assert found["elasticd_node_lease_seconds",] == 3
    buckets = {key[1]: value for key, value in found.items() if key[0] == "elasticd_node_lease_renewal_seconds_bucket"}
    assert (buckets["le=0.001"], buckets["le=0.0025"], buckets["le=0.005"], buckets["le=+Inf"]) == (1, 1, 2, 3)
    assert found["elasticd_node_lease_renewal_seconds_count",] == 3
    assert found["elasticd_node_lease_renewal_seconds_sum",] == 7.004


def test_the_docs_are_in_step() -> None:
    page = Path(__file__).parents[2] / "docs" / "node-metrics.md"
    assert page.read_text() == metrics.node_page(), "make docs"


@pytest.mark.system
def test_failed_job_outlives_the_agent(node: MakeNode) -> None:
    """Through an upgrade and a crash of the agent, and for a job that ran nowhere."""
    n1 = node(slots=1)
    n1.job("toy", "ticking.py", "--fails", workers=1, max_restarts=0, env={"WORK": "/nowhere"})
    n1.start()
    api = n1.unix()

    def failed() -> list[str]:
        page = api.get("/metrics").body.decode()
        return [line for line in page.splitlines() if line.startswith("elasticd_node_job_failed")]

    (series,) = n1.until(failed, "the series of the failed job")
    assert 'job_id="toy"' in series
    n1.upgrade()
    n1.until(lambda: failed() == [series], "the series after the upgrade")
    n1.kill()
    n1.start()
    n1.until(lambda: failed() == [series], "the series after the crash")
    assert n1.drain() == 0


@pytest.mark.system
def test_cordon_is_the_state_also_of_a_node_that_fails(node: MakeNode, tmp_path: Path) -> None:
    """Alerts know by it that a person has set the node aside, whatever else is wrong with it."""
    (tmp_path / "broken").touch()
    n1 = node(health=ill(tmp_path / "broken"))
    n1.start()
    api = n1.unix()

    def state() -> list[str]:
        found = samples(api.get("/metrics").body)
        return [key[1] for key, value in found.items() if key[0] == "elasticd_node_state" and value]

    n1.until(lambda: state() == ["state=quarantined"], "the node's own state")
    assert api.post("/v1/nodes/n1/cordon").code == 200
    n1.until(lambda: state() == ["state=cordoned"], "the cordon")
    assert api.post("/v1/nodes/n1/uncordon").code == 200
    n1.until(lambda: state() == ["state=quarantined"], "the node's own state")
