"""Real faults of a real job: the right alert reaches the webhook in time, says who and why, and goes with the fault.

What is measured is printed (`pytest -s`): from the fault, and from what the alert is about being true, to the webhook.
The second must be `for` and two scrapes at most. Where a test divides the rules' times, it says by how much (rules.py).
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.alerting.conftest import Watched
from tests.alerting.pair import JOB, Pair
from tests.alerting.watching import SCRAPE_S, Notice, Watch
from tests.daemon.node import until

SOON = 60.0


def in_time(watch: Watch, notice: Notice, fault: float, true_since: float | None = None) -> Notice:
    """It reached the webhook within `for` and two scrapes of what it is about being true; says how long it took."""
    since = fault if true_since is None else true_since
    patience = watch.patience(notice.name, notice.severity)
    print(
        f"\n{notice.name} ({notice.severity}): {notice.at - fault:.1f} s after the fault, "
        f"{notice.at - since:.1f} s after it was true, for {patience:g} s"
    )
    assert notice.at - since <= patience + 2 * SCRAPE_S, f"{notice}\n{watch.told()}"
    assert notice.annotations["summary"] and notice.annotations["description"]
    assert "<no value>" not in "".join(notice.annotations.values()) and "error" not in notice.annotations["description"]
    assert notice.annotations["runbook"].endswith(f"#{notice.name.lower()}")
    return notice


def quiet(watch: Watch, pages: set[str]) -> None:
    """No page but these."""
    assert watch.pages() <= pages, watch.told()


def hit(nodes: Pair, node: str, signum: int) -> float:
    """Signal the worker there; when that was."""
    at = time.monotonic()
    os.kill(nodes.worker(node), signum)
    return at


def happened(both: Pair, kind: str, **having: object) -> float:
    """When the job's event was, on any node, by time.monotonic()."""
    look: Callable[[], list[float]] = lambda: [  # noqa: E731
        event["mono"] for node in both.nodes.values() for event in node.job_events(JOB, kind, **having)
    ]
    return min(until(look, both.told))


def true_since(watch: Watch, expression: str, series: int = 1, within: float = SOON) -> float:
    """When Prometheus had scraped so many series of it, by time.monotonic()."""
    until(lambda: len(watch.query(expression)) >= series, watch.told, within)
    return time.monotonic()


def test_a_rank_that_hangs(watched: Watched) -> None:
    """The rules' times are divided by 15: the ticket lasts 20 s instead of 5 minutes."""
    nodes, watch = watched(scale=15)
    fault = hit(nodes, "n2", signal.SIGSTOP)
    judged = happened(nodes, "hang_detected")
    told = in_time(watch, watch.fired("ElasticdJobHung", SOON, job_id=JOB), fault, judged)
    assert (told.severity, told.labels["cause"], told.labels["node"]) == ("ticket", "stopped", "n2")
    assert "n2" in told.annotations["summary"]
    watch.over(within=SOON)
    quiet(watch, set())


def test_a_hang_that_is_only_reported(watched: Watched) -> None:
    """The rules' times are divided by 60: two minutes of no step page, and 45 minutes of none once more."""
    nodes, watch = watched(scale=60, on_hang="report")
    stopped = nodes.worker("n2")
    fault = hit(nodes, "n2", signal.SIGSTOP)
    judged = happened(nodes, "hang_detected")
    in_time(watch, watch.fired("ElasticdJobHung", SOON, severity="ticket", node="n2"), fault, judged)
    page = watch.fired("ElasticdJobHung", SOON, severity="page", job_id=JOB)
    assert (page.labels["cause"], page.labels["node"]) == ("stopped", "n2")
    still = watch.fired("ElasticdNoProgress", 120, job_id=JOB)
    in_time(watch, still, fault, fault + 2700 / 60)
    os.kill(stopped, signal.SIGCONT)
    watch.over("ElasticdJobHung", "ElasticdNoProgress", within=SOON)
    quiet(watch, {"ElasticdJobHung", "ElasticdNoProgress"})


def test_one_fault_is_one_page(watched: Watched) -> None:
    """The same with alertmanager.yaml's inhibit rules: while the page for the hang lasts, nothing else is heard."""
    nodes, watch = watched(scale=60, inhibits=True, on_hang="report")
    stopped = nodes.worker("n2")
    hit(nodes, "n2", signal.SIGSTOP)
    page = watch.fired("ElasticdJobHung", SOON, severity="page", node="n2")
    until(lambda: "ElasticdNoProgress" in watch.suppressed(), watch.told, 120)
    assert [n for n in watch.heard if n.at > page.at] == [], watch.told()
    os.kill(stopped, signal.SIGCONT)
    watch.over("ElasticdJobHung", within=SOON)


def test_a_worker_that_is_killed_again_and_again(watched: Watched) -> None:
    """It gets further each time, so that it is not given up. The rules' times are divided by 15."""
    nodes, watch = watched(scale=15)
    fault = time.monotonic()
    for _ in range(3):
        before = nodes.round()
        hit(nodes, "n2", signal.SIGKILL)
        nodes.on_both(after=before)
        nodes.further()
    third = sorted(e["mono"] for e in nodes.n1.job_events(JOB, "round_published") if e["round"] == nodes.round())[0]
    told = in_time(watch, watch.fired("ElasticdJobCrashLooping", SOON, job_id=JOB), fault, third)
    assert told.severity == "page" and "crash on n2" in told.annotations["description"], told.annotations
    watch.over(within=120)
    quiet(watch, {"ElasticdJobCrashLooping"})


def test_a_job_that_is_about_to_be_given_up_and_then_is(watched: Watched) -> None:
    """The rules' times are divided by 60."""
    nodes, watch = watched(scale=60, max_restarts=2)
    fault = hit(nodes, "n2", signal.SIGKILL)
    second = happened(nodes, "round_published", round=nodes.round() + 1)
    told = in_time(watch, watch.fired("ElasticdRestartBudgetLow", SOON, job_id=JOB), fault, second)
    assert told.severity == "page"
    # The nodes by turns: one that crashes twice in a row would be set aside, and the job go on without it.
    nodes.on_both(after=1)
    nodes.further()
    hit(nodes, "n1", signal.SIGKILL)
    nodes.on_both(after=2)
    nodes.further()
    last = hit(nodes, "n2", signal.SIGKILL)
    ends = [node.event("runner_ended", outcome="failed")["mono"] for node in nodes.nodes.values()]
    failed = in_time(watch, watch.fired("ElasticdJobFailed", SOON), last, min(ends))
    assert failed.severity == "ticket"
    assert any(f"(reported by {node})" in failed.annotations["description"] for node in nodes.nodes), failed.annotations
    watch.over(within=SOON)
    quiet(watch, {"ElasticdRestartBudgetLow", "ElasticdJobCrashLooping"})


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_store_that_is_away(watched: Watched, how: str) -> None:
    nodes, watch = watched()
    fault = time.monotonic()
    if how == "stopped":
        nodes.etcd.stop()
    else:
        nodes.etcd.kill()
    away = true_since(watch, "elasticd_node_store_up == 0", series=2)
    told = in_time(watch, watch.fired("ElasticdStoreUnreachable", 90), fault, away)
    assert told.severity == "page"
    assert "n1" in told.annotations["description"] and "n2" in told.annotations["description"]
    reached = nodes.n1.steps()[-1]
    if how == "stopped":
        nodes.etcd.cont()
    else:
        nodes.etcd.restart()
    watch.over("ElasticdStoreUnreachable", within=SOON)
    until(lambda: nodes.n1.steps()[-1] > reached, nodes.told)
    quiet(watch, {"ElasticdStoreUnreachable"})


def test_an_agent_that_is_killed(watched: Watched) -> None:
    """Its job trains on: only a ticket."""
    nodes, watch = watched(settings={"adopt_timeout": "10m"})
    round_ = nodes.round()
    fault = time.monotonic()
    nodes.n2.kill()
    told = in_time(watch, watch.fired("ElasticdAgentDown", 120), fault)
    assert (told.severity, told.labels["node"]) == ("ticket", "n2")
    nodes.n2.start()
    watch.over(within=SOON)
    assert nodes.round() == round_
    quiet(watch, set())


def test_a_checkpoint_directory_that_is_full(watched: Watched, small_disk: Path) -> None:
    """Failing is said at once, stale after 10 minutes of training and a minute more: divided by 20 here."""
    nodes, watch = watched("--ballast", "300000", scale=20, checkpoint_dir=str(small_disk / "ck"))
    filler = small_disk / "filler"
    fault = time.monotonic()
    fill(filler)
    failed = happened(nodes, "checkpoint_failed")
    told = in_time(watch, watch.fired("ElasticdCheckpointFailing", SOON, job_id=JOB), fault, failed)
    assert told.severity == "ticket" and told.labels["node"] in nodes.nodes
    stale = in_time(watch, watch.fired("ElasticdCheckpointStale", 90, job_id=JOB), fault, fault + 600 / 20)
    assert stale.severity == "page"
    filler.unlink()
    watch.over(within=SOON)
    quiet(watch, {"ElasticdCheckpointStale"})


def test_a_node_that_falls_ill(watched: Watched) -> None:
    """Its job goes on without it, which is said, too. The rules' times are divided by 20: 2 minutes are 6 s."""
    nodes, watch = watched(scale=20)
    before = nodes.round()
    fault = time.monotonic()
    nodes.fall_ill("n2")
    ill = nodes.n2.event("node_unhealthy")["mono"]
    told = in_time(watch, watch.fired("ElasticdNodeQuarantined", SOON, node="n2"), fault, ill)
    assert told.severity == "ticket" and "plugin 10-link" in told.annotations["description"], told.annotations
    less = watch.fired("ElasticdWorldSizeBelowTarget", 120, job_id=JOB)
    in_time(watch, less, fault, happened(nodes, "round_published", nodes=["n1"]))
    assert less.severity == "ticket"
    nodes.recover("n2")
    nodes.on_both(after=before)
    watch.over(within=SOON)
    quiet(watch, set())


def test_a_slow_rank(watched: Watched) -> None:
    """elasticd takes a minute to be sure, at most two; the rules' 5 minutes are divided by 20 here."""
    nodes, watch = watched(scale=20)
    (nodes.work / "lag-1").write_text("0.1")
    fault = time.monotonic()
    slow = true_since(watch, "elasticd_straggler_ratio", within=180)
    told = in_time(watch, watch.fired("ElasticdSlowRank", 180, rank="1", job_id=JOB), fault, slow)
    assert (told.severity, told.labels["node"]) == ("ticket", nodes.node_of(1))
    (nodes.work / "lag-1").unlink()
    watch.over(within=180)
    quiet(watch, set())


def test_a_store_that_answers_slowly(watched: Watched) -> None:
    """etcd stands still for 0.7 s again and again, out of step with renewals. The rules' times are divided by 10."""
    nodes, watch = watched(scale=10)
    fault = time.monotonic()
    with nodes.stuttering(0.7, 0.6):
        told = watch.fired("ElasticdLeaseRenewalsSlow", 120)
        print(f"\n{told.name}: {told.at - fault:.1f} s after the fault")
        assert told.severity == "ticket"
    watch.over("ElasticdLeaseRenewalsSlow", within=120)
    quiet(watch, set())


def test_a_job_that_only_recovers(watched: Watched) -> None:
    """Workers are killed again and again, after some new steps. The rules' times are divided by 60."""
    nodes, watch = watched("--every", "2s", scale=60, max_restarts=1_000)
    fault = time.monotonic()
    turns = itertools.cycle(("n2", "n1"))
    while time.monotonic() < fault + 180 and not any(n.name == "ElasticdGoodputLow" for n in watch.heard):
        before = nodes.round()
        hit(nodes, next(turns), signal.SIGKILL)
        nodes.on_both(after=before)
        nodes.further(5)
    told = watch.fired("ElasticdGoodputLow", 1, job_id=JOB)
    print(f"\n{told.name}: {told.at - fault:.1f} s after the first fault")
    assert told.severity == "ticket" and "lost" in told.annotations["description"]
    watch.over(within=180)
    quiet(watch, {"ElasticdJobCrashLooping", "ElasticdCheckpointStale"})  # too short between two kills to save one


def fill(filler: Path) -> None:
    """Until not one byte more fits."""
    with open(filler, "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be made here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)
