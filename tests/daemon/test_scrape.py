"""The merged page of metrics: each family once, runners in parallel, and no runner can corrupt it."""

from __future__ import annotations

import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.generate.metrics import CHECKS, GPUS, max_node_series, max_series
from elasticd_agent.system.network.control_socket import ControlSocketError
from elasticd_agent.telemetry.metrics import Metrics
from elasticd_daemon import metrics as node_metrics
from elasticd_daemon.metrics import NodeMetrics, RunnerScraper, filter_samples, merge_pages
from tests.daemon.test_metrics import GAUGES, samples
from tests.telemetry.test_metrics import promtool, worst


def job_page(job: str, step: int, node: str = "n1") -> bytes:
    metrics = Metrics(job, node, "1.0")
    metrics.progress({0: step}, 5.0, 1000.0)
    return metrics.render()


def test_merge_of_pages() -> None:
    page = merge_pages([NodeMetrics("n1", "1.0").render(GAUGES), job_page("a", 7), job_page("b", 9)])
    heads = [line for line in page.splitlines() if line.startswith(b"# TYPE")]
    assert len(heads) == len(set(heads))
    found = samples(page)
    assert found["elasticd_step", "job_id=a"] == 7
    assert found["elasticd_step", "job_id=b"] == 9
    alone = {key: value for one in (job_page("a", 7), job_page("b", 9)) for key, value in samples(one).items()}
    assert alone.keys() <= found.keys()


def test_silent_runner_is_left_out() -> None:
    def ask(job: str, number: int, within_s: float) -> bytes:
        assert 0 < within_s <= node_metrics.RUNNER_TIMEOUT_S
        if job == "b":
            raise ControlSocketError("it is stopped")
        return job_page(job, number)

    assert [len(samples(page)) > 5 for page in RunnerScraper("n1", ask).scrape([("a", 1), ("b", 1), ("c", 2)])] == [
        True,
        True,
    ]
    assert RunnerScraper("n1", ask).scrape([("b", 1)]) == RunnerScraper("n1", ask).scrape([]) == []


def test_two_scrapes_at_once() -> None:
    scraper = RunnerScraper("n1", lambda job, number, within_s: job_page(job, number))

    class Jobs(list[tuple[str, int]]):
        def __contains__(self, key: object) -> bool:
            scraper.fetch_page(("b", 1), time.monotonic() + 1)  # what another thread may do at this moment
            return True

    scraper.scrape([("a", 1)])
    assert len(scraper.scrape(Jobs([("a", 1)]))) == 1


def test_job_that_was_submitted_again_while_it_leaves_has_each_series_once() -> None:
    asked = []

    def ask(job: str, number: int, within_s: float) -> bytes:
        asked.append((job, number))
        return job_page(job, number)

    assert len(RunnerScraper("n1", ask).scrape([("b", 1), ("a", 2), ("a", 1)])) == 2
    assert sorted(asked) == [("a", 2), ("b", 1)]


def test_busy_runner_keeps_its_series_for_a_while() -> None:
    now, answers, answer = [0.0], [True], job_page("a", 7)

    def ask(job: str, number: int, within_s: float) -> bytes:
        if not answers[0]:
            raise ControlSocketError("it did not answer")
        return answer

    scraper = RunnerScraper("n1", ask, lambda: now[0])
    (page,) = scraper.scrape([("a", 1)])
    answers[0] = False
    now[0] = node_metrics.LAST_PAGE_KEPT_S - 1
    assert scraper.scrape([("a", 1)]) == [page]
    assert scraper.scrape([("a", 2)]) == [], "another run"
    assert scraper.scrape([("a", 1)]) == [], "it has ended and begun again since"
    answers[0] = True
    assert scraper.scrape([("a", 1)]) == [page]
    answers[0] = False
    now[0] += node_metrics.LAST_PAGE_KEPT_S
    assert scraper.scrape([("a", 1)]) == []


def test_runners_are_queried_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_metrics, "SCRAPE_TIMEOUT_S", 30.0)
    together = threading.Barrier(3, timeout=30)

    def ask(job: str, number: int, within_s: float) -> bytes:
        together.wait()
        return job_page(job, number)

    assert len(RunnerScraper("n1", ask).scrape([("a", 1), ("b", 1), ("c", 1)])) == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("elasticd-scrape")]


def test_own_samples_pass() -> None:
    page = Metrics('a "job"\\', "n1").render()
    assert samples(filter_samples("n1", 'a "job"\\', page)) == samples(page)
    page = worst("a", 8).render()
    assert samples(filter_samples("node-a", "a", page)) == samples(page)


def test_samples_without_a_node_label_pass() -> None:
    """Runners of an older version omit the label."""
    page = b'# TYPE elasticd_round gauge\nelasticd_round{job_id="a"} 3.0\n'
    assert filter_samples("n1", "a", page) == page


@pytest.mark.parametrize(
    "line",
    [
        b'elasticd_round{job_id="b",node="n1"} 3.0',
        b'elasticd_round{job_id="a",node="n2"} 3.0',
        b'elasticd_round{job_id="b",node="n1",x="job_id=\\"a\\""} 3.0',
        b'elasticd_round{node="n1"} 3.0',
        b'elasticd_round{xjob_id="a",job_id="b",node="n1"} 3.0',
        b'elasticd_round{job_id="a",node="n2",xnode="n1"} 3.0',
        b'elasticd_round{job_id="ab",node="n1"} 3.0',
        b'elasticd_round{job_id="b",job_id="a",node="n1"} 3.0',
        b'elasticd_round{x=",job_id=",a=",job_id=",job_id="b",node="n1"} 3.0',
        b"elasticd_round 3.0",
        b'elasticd_node_slots{job_id="a",node="n1"} 3.0',
        b'up{job_id="a",node="n1"} 0.0',
        b'elasticd_round{job_id="a",node="n1" 3.0',
        b'elasticd_round{job_id="a",node="n1",x="\r"} 3.0',
        b'elasticd_round{job_id="a",node="n1",x="\\t"} 3.0',
        b'elasticd_round{job_id="a",node="n1"} three',
        b'elasticd_round{job_id="a",node="n1"} 3.0 99999999999999999999',
        b"# TYPE elasticd_round nonsense",
        b"# EOF",
        b'{"nonsense"}',
        b"\0" * 1000,
    ],
)
def test_other_text_is_removed(line: bytes) -> None:
    head, good_line = b"# TYPE elasticd_round gauge", b'elasticd_round{job_id="a",node="n1"} 2.0'
    assert filter_samples("n1", "a", b"\n".join([head, line, good_line])) == b"\n".join([head, good_line, b""])


def test_invalid_utf8_is_replaced() -> None:
    page = filter_samples(
        "n1", "a", b'# TYPE elasticd_round gauge\nelasticd_round{job_id="a",node="n1",x="\xff"} 3.0\n'
    )
    assert 'x="\ufffd"' in page.decode()


def test_number_of_series_is_bounded() -> None:
    page = b"# TYPE elasticd_x gauge\n" + b"".join(
        b'elasticd_x{job_id="a",node="n1",x="%d"} 1.0\n' % n for n in range(20_000)
    )
    began = time.monotonic()
    assert len(samples(filter_samples("n1", "a", page))) == node_metrics.MAX_SERIES_PER_JOB >= max_series(8)
    assert time.monotonic() - began < 30


def test_node_with_3_jobs_of_8_ranks_has_about_1000_series() -> None:
    pages = {job: worst(job, 8).render() for job in ("a", "b", "c")}
    node = NodeMetrics("n1", "1.0")
    node.on_renewal(3.0, 0.01)
    failed = {
        (node_metrics.JOB_FAILED_AT, (f"job-{job}", "rank 0 exited with code 1")): 1.0
        for job in range(node_metrics.MAX_FAILED_JOBS)
    }
    checks = {
        (spec, (f"plugin {number}",)): 0.1
        for spec in (node_metrics.CHECK_FAILING, node_metrics.CHECK_SECONDS)
        for number in range(CHECKS)
    }
    gpus = {(spec, (str(gpu),)): 1.0 for spec in node_metrics.METRICS if "gpu" in spec.labels for gpu in range(GPUS)}
    jobs = RunnerScraper("node-a", lambda job, number, within_s: pages[job]).scrape([(job, 1) for job in pages])
    page = merge_pages([node.render({**GAUGES, **failed, **checks, **gpus}), *jobs])
    series = [line for line in page.splitlines() if not line.startswith((b"#", b"process_"))]
    assert len(series) == len(set(series)) == 3 * max_series(8) + max_node_series(CHECKS, GPUS)
    assert len(series) <= 1010
    assert len(list(text_string_to_metric_families(page.decode()))) > 40
    assert promtool(page) == (0, b"")
