"""The agent is killed, upgraded and started twice: no effect on its jobs' workers."""

from __future__ import annotations

import os
import re
import signal
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticd_agent.telemetry.metric_table import METRICS
from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, AgentNode, comm_of, lives, until
from tests.etcd import EtcdServers, free_ports


def page(port: int, name: str) -> str:
    """What the agent serves; it may be about to listen again."""

    def look() -> str:
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{port}/{name}", timeout=10) as answer:
                return str(answer.read().decode())
        except (ConnectionError, urllib.error.URLError):
            return ""

    return until(look, f"/{name}")


def series(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Of the job."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
        if "job_id" in one.labels
    }


def goes_on(before: dict[Any, float], after: dict[Any, float]) -> None:
    """All series from before exist, and no counter was reset."""
    assert before.keys() <= after.keys()
    counts = {key for key in before if key[0].endswith(("_total", "_count", "_bucket"))}
    assert all(after[key] >= before[key] for key in counts)
    spent = [
        sum(v for (name, _), v in page.items() if name == "elasticd_time_seconds_total") for page in (before, after)
    ]
    assert spent[1] > spent[0] > 0
    start = next(key for key in before if key[0] == "elasticd_agent_start_timestamp_seconds")
    assert after[start] == before[start], "the runner's, not the agent's"


def training(node: AgentNode) -> tuple[int, ...]:
    """A job of two workers that makes steps."""
    node.job("one", "ticking.py", COLD, workers=2)
    node.start()
    node.wait_for_step(20)
    return node.workers("one")


def go_on(node: AgentNode, workers: tuple[int, ...]) -> None:
    """The same processes train on."""
    assert node.workers("one") == workers
    assert all(map(lives, workers))
    node.wait_for_step(node.steps()[-1][1] + 20)
    steps = node.steps()  # it trains on while we look
    assert {number for number, _ in steps} == {1}
    assert [step for _, step in steps] == list(range(1, len(steps) + 1))


def test_restart_and_upgrade_of_the_agent_keep_the_workers(node: MakeNode) -> None:
    (port,) = free_ports(1)
    n1 = node(http={"port": port})
    workers, runner = training(n1), n1.runner("one")
    assert comm_of(runner) == "elasticd-job"
    assert os.getsid(runner) == runner
    before = series(
        until(lambda: "elasticd_workers_running" in (text := page(port, "metrics")) and text, n1.diagnostics)
    )
    assert {spec.name for spec in METRICS if spec.kind == "counter"} <= {name for name, _ in before}, (
        "as `elasticd run`'s"
    )
    n1.kill()
    go_on(n1, workers)
    n1.start()
    n1.wait_for_log(f"adopted its runner (pid {runner})")
    go_on(n1, workers)
    # A runner that is too busy to answer is left out of a scrape.
    until(lambda: 'elasticd_workers_running{job_id="one",node="n1"} 2.0' in page(port, "metrics"), n1.diagnostics)
    assert 'elasticd_node_slots_used{node="n1"} 2.0' in page(port, "metrics")
    goes_on(before, series(page(port, "metrics")))
    n1.upgrade()
    goes_on(
        before, series(until(lambda: "elasticd_workers" in (text := page(port, "metrics")) and text, n1.diagnostics))
    )
    assert page(port, "readyz") == "registered\n"
    go_on(n1, workers)
    (n1.work / "enough").touch()
    assert n1.wait_for_exit("one").outcome == "succeeded"
    n1.event("runner_ended", name="one", outcome="succeeded")
    assert len(n1.events("runner_started")) == 1, n1.diagnostics()
    assert n1.drain() == 0
    n1.assert_gone()


def test_registered_agent_stays_ready_without_the_store(nodes: MakeNode, etcd: EtcdServers) -> None:
    """A probe that followed the store would make every pod of the cluster unready at once, whose jobs train on."""
    (port,) = free_ports(1)
    n1 = nodes("n1", http={"port": port})
    n1.start()
    until(lambda: page(port, "readyz") == "registered\n", n1.diagnostics)
    etcd.kill()
    outage = r"registered; the store has been unavailable for \d+ s, and running jobs continue without it\n"
    until(lambda: re.fullmatch(outage, page(port, "readyz")), n1.diagnostics)  # of a 503 there is no text
    etcd.restart()
    until(lambda: page(port, "readyz") == "registered\n", n1.diagnostics)
    assert n1.drain() == 0


@pytest.mark.system
def test_killed_runner_ends_its_workers_and_is_restarted(node: MakeNode) -> None:
    n1 = node()
    workers, runner = training(n1), n1.runner("one")
    os.kill(runner, signal.SIGKILL)
    until(lambda: not any(map(lives, workers)), "the end of the workers of a killed runner", 15.0)
    n1.event("runner_ended", name="one", outcome="lost")
    until(lambda: n1.runner("one") != runner, "another runner")
    until(lambda: n1.workers("one") != workers and all(map(lives, n1.workers("one"))), n1.diagnostics)
    assert n1.drain() == 0
    n1.assert_gone()


@pytest.mark.system
def test_runner_with_an_unreadable_lock_is_adopted(node: MakeNode) -> None:
    """A full disk takes no signature, a damaged one loses it; the agent that comes back has nothing else to go by."""
    n1 = node()
    workers, runner = training(n1), n1.runner("one")
    n1.kill()
    os.truncate(n1.files("one").lock, 7)
    n1.start()
    asked = n1.unix()
    states = lambda: [one["state"] for one in asked.get("/status").document()["runners"]]  # noqa: E731
    n1.until(lambda: states() == ["running"], "a status of the runner, which would leave otherwise", 10)
    go_on(n1, workers)
    os.kill(runner, signal.SIGKILL)
    n1.event("runner_ended", name="one", outcome="lost")
    until(lambda: n1.runner("one") != runner, "another runner")
    assert n1.drain() == 0
    n1.assert_gone()


@pytest.mark.system
def test_runner_with_an_unreadable_spec_reports_what_it_runs(node: MakeNode) -> None:
    """Else its slots were free to the agent that comes back, and it would leave because nobody speaks to it."""
    n1 = node()
    workers, runner = training(n1), n1.runner("one")
    n1.kill()
    os.truncate(n1.files("one").runner_spec, 100)
    n1.start()
    n1.wait_for_log("its runner reports what it runs")
    n1.wait_for_log(f"adopted its runner (pid {runner})")
    go_on(n1, workers)
    (n1.work / "enough").touch()
    n1.event("runner_ended", name="one", outcome="succeeded")
    assert len(n1.events("runner_started")) == 1, n1.diagnostics()
    assert n1.drain() == 0
    n1.assert_gone()


@pytest.mark.system
def test_end_of_an_earlier_job_is_not_that_of_a_new_one_with_its_number(node: MakeNode) -> None:
    """A store that has lost its data numbers jobs anew; the node still has the folders of the jobs before."""
    n1 = node()
    n1.job("one", "ticking.py", COLD, workers=1)
    (n1.work / "enough").touch()
    n1.start()
    n1.event("runner_ended", name="one", outcome="succeeded")
    n1.kill()
    for path in [n1.work / "enough", n1.work / "steps-0", *n1.state.glob("store.sqlite*")]:
        path.unlink()
    n1.start()
    assert n1.unix().post("/v1/nodes/n1/cordon").code == 200
    n1.job("one", "ticking.py", COLD, workers=1)
    n1.submit_jobs()
    n1.kill()
    n1.start()
    assert n1.unix().post("/v1/nodes/n1/uncordon").code == 200
    n1.wait_for_step(5)
    assert n1.drain() == 0
