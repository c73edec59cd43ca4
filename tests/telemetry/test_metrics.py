"""Metrics: the names keep Prometheus' rules, the values are what happened, and nobody pays who did not ask."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from docs.generate import metrics as pages
from docs.generate.metrics import max_series, series
from elasticd_agent.hangs.causes import CAUSES as HANGS
from elasticd_agent.telemetry.goodput import TimeSplit
from elasticd_agent.telemetry.metric_table import (
    EXIT_KINDS,
    FAULT_CAUSES,
    MAX_CULPRITS,
    MAX_REASON_CHARS,
    METRICS,
    OTHER_CULPRITS,
    PHASES,
    RECOVERY_PARTS,
    RESTART_CAUSES,
    TIME_STATES,
    MetricSpec,
)
from elasticd_agent.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
NAMES = {spec.name for spec in METRICS}


def samples(metrics: Metrics) -> dict[str, float]:
    """`name{labels but job_id and node}` to value."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert 'job_id="j"' in name
            name = re.sub(r'(job_id|node)="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
            found[name] = float(value)
    return found


def lived() -> Metrics:
    """A job that started, lost a worker, came back smaller, saved a checkpoint and went on."""
    metrics = Metrics("j", "node-a", "0.1.0")
    metrics.round_published(1, 2, 2, [0, 1])
    metrics.set_budget_source(lambda: 3)
    metrics.group_started(2, warm=True)
    metrics.first_step(2.5, None)
    metrics.progress({0: 10, 1: 9}, 100.5, 1700000000.0)
    metrics.checkpoint_saved(4096, 0.25, 1.5)
    metrics.newest_checkpoint(10, 1700000001.0)
    metrics.snapshot(12, 1700000002.0)
    metrics.checkpoint_dropped()
    metrics.donor_resumed(3)
    metrics.worker_exited("signal")
    metrics.group_ended()
    metrics.round_published(2, 1, 2, [0], restart_cause="crash")
    metrics.set_budget_source(lambda: 2)
    metrics.group_started(1, warm=False)
    metrics.first_step(0.1, 0.12)
    metrics.progress({0: 11}, None, 1700000002.0)
    metrics.checkpoint_failed()
    metrics.checkpoint_skipped()
    metrics.event_lines_lost(2)
    metrics.event_lines_lost(5)
    metrics.event_lines_lost(1)
    return metrics


def test_what_happened_is_what_is_served() -> None:
    found = samples(lived())
    expected = {
        "elasticd_agent_up": 1, 'elasticd_agent_info{version="0.1.0"}': 1, "elasticd_round": 2,
        "elasticd_world_size": 1, "elasticd_world_size_target": 2, "elasticd_workers_running": 1,
        'elasticd_restarts_total{cause="crash"}': 1, 'elasticd_restarts_total{cause="other"}': 0,
        "elasticd_restart_budget_remaining": 2, 'elasticd_worker_exits_total{kind="signal"}': 1,
        "elasticd_step": 11, 'elasticd_worker_step{rank="0"}': 11,
        "elasticd_last_progress_timestamp_seconds": 1700000002.0, "elasticd_start_to_first_step_seconds": 0.1,
        "elasticd_recovery_seconds_count": 1, 'elasticd_recovery_seconds_bucket{le="0.15"}': 1,
        'elasticd_recovery_seconds_bucket{le="0.1"}': 0, "elasticd_checkpoints_saved_total": 1,
        "elasticd_checkpoint_failures_total": 1, "elasticd_checkpoints_skipped_total": 1,
        "elasticd_checkpoint_last_step": 10, "elasticd_checkpoint_last_timestamp_seconds": 1700000001.0,
        "elasticd_checkpoint_last_size_bytes": 4096, "elasticd_checkpoint_last_write_seconds": 0.25,
        "elasticd_checkpoint_last_written_seconds": 1.5, "elasticd_checkpoints_dropped_total": 1,
        "elasticd_snapshot_last_step": 12, "elasticd_snapshot_last_timestamp_seconds": 1700000002.0,
        "elasticd_donor_resumes_total": 1, "elasticd_donor_steps_saved_total": 3,
        'elasticd_launcher_starts_total{mode="warm"}': 1, 'elasticd_launcher_starts_total{mode="cold"}': 1,
        "elasticd_event_log_lines_lost_total": 5,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert time.time() - 60 < found["elasticd_agent_start_timestamp_seconds"] <= time.time()


def test_series_of_a_rank_that_left_are_removed() -> None:
    """The next report of the rank creates them again."""
    metrics = lived()
    assert 'elasticd_worker_step{rank="1"}' not in samples(metrics)
    metrics.round_published(3, 2, 2, [0, 1], restart_cause="resize")
    assert 'elasticd_worker_step{rank="1"}' not in samples(metrics)
    metrics.progress({0: 12, 1: 12}, 1.0, 1.0)
    assert samples(metrics)['elasticd_worker_step{rank="1"}'] == 12


def test_nothing_is_claimed_before_it_is_known() -> None:
    found = samples(Metrics("j"))
    assert "elasticd_last_progress_timestamp_seconds" not in found, "an alert on its age would fire at once"
    assert "elasticd_restart_budget_remaining" not in found
    for cause in RESTART_CAUSES:
        assert found[f'elasticd_restarts_total{{cause="{cause}"}}'] == 0, "increase() needs the zero"
    for kind in EXIT_KINDS:
        assert found[f'elasticd_worker_exits_total{{kind="{kind}"}}'] == 0


def test_labels_stay_bounded() -> None:
    metrics = Metrics("j")
    metrics.round_published(2, 1, 1, [0], restart_cause="some new cause")
    assert samples(metrics)['elasticd_restarts_total{cause="other"}'] == 1
    with pytest.raises(KeyError):
        metrics.worker_exited("SIGKILL of rank 17")


def test_two_jobs_have_two_registries_and_any_id_is_a_label() -> None:
    Metrics("j")
    assert b'job_id="with \\"quotes\\" \xc3\xbc"' in Metrics('with "quotes" ü').render()


def test_metrics_without_a_port_are_not_kept() -> None:
    assert worst("j", 8, served=False).render() == b""


def test_without_a_metrics_port_the_library_is_not_imported() -> None:
    code = "import sys, elasticd_agent.telemetry.metrics as m; print('prometheus_client' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ran.stdout.strip() == "False", ran.stderr


UNITS = ("seconds", "bytes")
OTHER_UNITS = re.compile(
    r"(^|_)((pico|nano|micro|milli|centi|deci|deca|hecto|kilo|kibi|mega|mibi|giga|gibi|tera|tebi|peta|pebi)"
    r"(seconds|bytes|bits|meters|grams)|minutes|hours|days|weeks|bits|s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d)(_|$)"
)


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_names_keep_the_rules_promtool_checks_and_ours(spec: MetricSpec) -> None:
    assert re.fullmatch(r"elasticd_[a-z][a-z0-9]*(_[a-z0-9]+)*", spec.name)
    assert not OTHER_UNITS.search(spec.name), "base units, spelled out"
    assert not re.search(r"_(gauge|counter|histogram|summary)(_|$)", spec.name), "the type is no part of the name"
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert not spec.name.endswith(("_count", "_sum", "_bucket", "_created")), "reserved for histograms"
    if spec.name.endswith("_info"):
        assert spec.kind == "gauge"
    if "timestamp" in spec.name:
        assert spec.name.endswith("_timestamp_seconds")
    assert spec.help.strip() == spec.help
    assert spec.help[0].isupper() or spec.help[0].isdigit()
    assert spec.help.endswith(".")
    assert "|" not in spec.help, "it would break the table in docs/metrics.md"
    assert not {"job", "instance", "le", "quantile", "job_id", "node"} & set(spec.labels)
    assert all(re.fullmatch(r"[a-z_]+", label) for label in spec.labels)
    assert (spec.kind == "histogram") == bool(spec.buckets)
    assert list(spec.buckets) == sorted(set(spec.buckets))


def test_names_are_unique_and_nothing_else_is_served() -> None:
    names = [spec.name for spec in METRICS]
    assert len(set(names)) == len(names)
    assert re.findall(r"^# TYPE (\S+)", lived().render().decode(), re.M) == names


def promtool(page: bytes) -> tuple[int, bytes]:
    """tests/install-servers puts Debian's promtool into .venv; where it cannot, the rules above are the check."""
    found = shutil.which("promtool") or shutil.which("promtool", path=ROOT / ".venv" / "prometheus" / "usr" / "bin")
    if found is None:
        pytest.skip("no promtool, and tests/install-servers could not fetch it")
    ran = subprocess.run([found, "check", "metrics"], input=page, capture_output=True, timeout=30)
    return ran.returncode, ran.stdout + ran.stderr


def test_promtool_has_nothing_to_say() -> None:
    for metrics in (Metrics("j"), lived(), worst("j", 8)):
        assert promtool(metrics.render()) == (0, b"")


def test_the_page_is_the_one_the_code_generates() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == pages.job_page(), "make docs"


def test_processes_that_do_not_die_are_counted_while_they_are_there() -> None:
    metrics = Metrics("j", "node-a", "0.1.0")
    for there in (2, 1, 0):
        metrics.unkillable_processes(there)
        assert samples(metrics)["elasticd_stuck_processes"] == there


def test_a_hang_is_counted_by_cause_and_its_recovery_by_part() -> None:
    metrics = Metrics("j")
    metrics.hang_suspected()
    metrics.hang_suspected()
    metrics.hang_detected("blocked", 5.2)
    metrics.recovered({"detect": 4.0, "evidence": 1.2, "first_step": 0.1})
    found = samples(metrics)
    assert found["elasticd_hang_suspicions_total"] == 2
    assert found['elasticd_hangs_total{cause="blocked",culprit=""}'] == 1
    assert found['elasticd_hangs_total{cause="network",culprit=""}'] == 0, (
        "there from the start, so that a rate can be taken"
    )
    assert found["elasticd_hang_detection_seconds_sum"] == 5.2
    assert found['elasticd_recovery_part_seconds_sum{part="detect"}'] == 4.0
    assert found['elasticd_recovery_part_seconds_count{part="stop"}'] == 0
    with pytest.raises(KeyError):
        metrics.hang_detected("gremlins", 1.0)


def test_only_slow_ranks_have_a_series() -> None:
    metrics = Metrics("j")
    metrics.stragglers({3: 1.8, 5: 2.0})
    metrics.stragglers({3: 1.9})
    found = {name: value for name, value in samples(metrics).items() if "straggler" in name}
    assert found == {'elasticd_straggler_ratio{rank="3"}': 1.9}
    metrics.stragglers({})
    assert not any("straggler" in name for name in samples(metrics))


def test_steps_are_counted_with_their_duration() -> None:
    """Within a round: a round repeats steps, and the time between rounds is no step."""
    metrics = Metrics("j")
    metrics.round_published(1, 1, 1, [0])
    for step, wall in ((10, 100.0), (10, 100.2), (12, 100.4), (13, 102.4)):
        metrics.progress({0: step}, None, wall)
    metrics.round_published(2, 1, 1, [0])
    for step, wall in ((5, 200.0), (6, 200.2)):
        metrics.progress({0: step}, None, wall)
    found = samples(metrics)
    assert (found["elasticd_steps_total"], found["elasticd_step_seconds_count"]) == (4, 4)
    buckets = [found[f'elasticd_step_seconds_bucket{{le="{le}"}}'] for le in ("0.1", "0.3", "1.0", "3.0")]
    assert buckets == [0, 3, 3, 4]
    metrics.progress({0: 10006}, None, 201.2)
    assert samples(metrics)["elasticd_steps_total"] == 10004
    assert samples(metrics)["elasticd_step_seconds_count"] == 20, "a part of very many"


def test_the_store_s_outages_are_counted() -> None:
    metrics = Metrics("j")
    assert "elasticd_store_up" not in samples(metrics), "nobody has met yet"
    for up in (False, True, False, True):
        metrics.store_available(up)
    found = samples(metrics)
    assert (found["elasticd_store_up"], found["elasticd_store_outages_total"]) == (1, 2)


def test_leader_series_are_removed_when_another_agent_leads() -> None:
    metrics = Metrics("j", "node-a")
    metrics.round_info(1, "start", "first round", 1700000000.0)
    found = samples(metrics)
    assert found["elasticd_round_start_timestamp_seconds"] == 1700000000.0
    assert not any("round_info" in name for name in found), "it does not plan"
    metrics.leading(True)
    metrics.stragglers({3: 1.8})
    metrics.round_info(2, "crash", "rank 1 was killed; " + "x" * 300, 1700000001.0)
    (info,) = (name for name in samples(metrics) if "round_info" in name)
    assert 'cause="crash"' in info and 'round="2"' in info
    reason = re.search(r'reason="([^"]*)"', info)
    assert reason and len(reason[1]) == MAX_REASON_CHARS and reason[1].endswith("x…")
    metrics.leading(False)
    assert not any("round_info" in name or "slowness" in name for name in samples(metrics))


def test_one_phase_at_a_time() -> None:
    metrics = Metrics("j")
    for phase in PHASES:
        metrics.phase(phase)
        found = {name: value for name, value in samples(metrics).items() if "job_phase" in name}
        assert len(found) == len(PHASES) and [name for name, value in found.items() if value] == [
            f'elasticd_job_phase{{phase="{phase}"}}'
        ]


def test_faults_are_counted_by_cause_and_culprit() -> None:
    """A large job has no series for each node."""
    metrics = Metrics("j")
    metrics.fault("crash", "b")
    metrics.fault("crash", "")
    metrics.fault("a newer kind", "")
    found = samples(metrics)
    assert found['elasticd_faults_total{cause="crash",culprit="b"}'] == 1
    assert found['elasticd_faults_total{cause="crash",culprit=""}'] == 1
    assert found['elasticd_faults_total{cause="other",culprit=""}'] == 1
    assert found['elasticd_faults_total{cause="hung",culprit=""}'] == 0, "or no rate could be taken"
    for number in range(100):
        metrics.fault("node_lost", f"node-{number}")
        metrics.hang_detected("stopped", 2.5, f"node-{number}")
    found = samples(metrics)
    assert found[f'elasticd_faults_total{{cause="node_lost",culprit="{OTHER_CULPRITS}"}}'] == 100 - (MAX_CULPRITS - 1)
    assert found['elasticd_faults_total{cause="node_lost",culprit="node-0"}'] == 1
    metrics.fault("node_lost", "node-0")
    assert samples(metrics)['elasticd_faults_total{cause="node_lost",culprit="node-0"}'] == 2
    assert sum(value for name, value in found.items() if name.startswith("elasticd_hangs_total")) == 100
    at = found['elasticd_last_hang_timestamp_seconds{cause="stopped",culprit="node-0"}']
    assert time.time() - 60 < at <= time.time()


def test_time_is_counted_as_far_as_counters_may_go() -> None:
    metrics = Metrics("j")
    spent = [TimeSplit(useful=10, idle=5)]
    metrics.set_time_source(lambda: spent[0])

    def told() -> tuple[float, ...]:
        found = samples(metrics)
        return tuple(found[f'elasticd_time_seconds_total{{state="{state}"}}'] for state in TIME_STATES)

    assert told() == (10, 0, 5)
    spent[0] = TimeSplit(useful=8, lost=4, idle=5)
    assert told() == (10, 2, 5)
    spent[0] = TimeSplit(useful=20, lost=4, idle=5)
    assert told() == (20, 4, 5)


def test_a_lease_has_series_once_there_is_one() -> None:
    metrics = Metrics("j")
    assert not any("lease" in name for name in samples(metrics)), "a job on one node has none"
    metrics.lease(4.0, None)
    metrics.lease(4.0, 0.003)
    found = samples(metrics)
    assert found["elasticd_lease_seconds"] == 4
    assert found["elasticd_lease_renewal_seconds_count"] == 1
    assert found['elasticd_lease_renewal_seconds_bucket{le="0.005"}'] == 1
    assert found['elasticd_lease_renewal_seconds_bucket{le="0.0025"}'] == 0


def test_a_checkpoint_s_interval_and_failure() -> None:
    metrics = Metrics("j")
    found = samples(metrics)
    assert "elasticd_checkpoint_interval_seconds" not in found
    assert "elasticd_checkpoint_last_failure_timestamp_seconds" not in found
    metrics.checkpoint_interval(300.0)
    metrics.checkpoint_failed()
    found = samples(metrics)
    assert found["elasticd_checkpoint_interval_seconds"] == 300
    assert time.time() - 60 < found["elasticd_checkpoint_last_failure_timestamp_seconds"] <= time.time()


def worst(job: str, ranks: int, *, served: bool = True) -> Metrics:
    """Everything has happened to this job, in every way and to every node of many, and it plans."""
    metrics = Metrics(job, "node-a", "0.1.0", served=served)
    metrics.leading(True)
    for number in range(1, 200):
        metrics.round_published(number, 8 * ranks, 8 * ranks, range(number, number + ranks), restart_cause="crash")
        metrics.round_info(number, "crash", f"reason {number}", 1.0)
        metrics.progress(dict.fromkeys(range(number, number + ranks), 5), 5.0, 1.0)
        metrics.stragglers({rank: 1.5 + rank for rank in range(number)})
        for cause in FAULT_CAUSES:
            metrics.fault(cause, f"node-{number}")
        for cause in HANGS:
            metrics.hang_detected(cause, 1.0, f"node-{number}")
            metrics.hang_detected(cause, 1.0)
    for phase in PHASES:
        metrics.phase(phase)
    metrics.set_budget_source(lambda: 3)
    metrics.group_started(ranks, warm=True)
    metrics.first_step(1.0, 1.0)
    metrics.recovered(dict.fromkeys(RECOVERY_PARTS, 1.0))
    metrics.checkpoint_saved(1, 1.0, 1.0)
    metrics.newest_checkpoint(1, 1.0)
    metrics.snapshot(1, 1.0)
    metrics.checkpoint_failed()
    metrics.checkpoint_interval(60.0)
    metrics.spares(1)
    metrics.unkillable_processes(1)
    metrics.store_available(up=True)
    metrics.lease(3.0, 0.01)
    return metrics


def test_series_of_a_job_stay_within_the_documented_limit() -> None:
    page = worst("j", 8).render().decode()
    by_name: dict[str, int] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            family = re.sub(r"_(bucket|sum|count)$", "", line.partition("{")[0])
            family = family if family in NAMES else line.partition("{")[0]
            by_name[family] = by_name.get(family, 0) + 1
    assert by_name == {spec.name: series(spec, 8) for spec in METRICS}, "the worst there is, and the table says so"
    assert sum(by_name.values()) == max_series(8)
