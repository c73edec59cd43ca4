"""The node's health as metrics, described in docs/node-metrics.md. Pure.

A skipped check has no series, so that an alert on a failing check stays honest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elasticd_agent.node.health.result import CheckResult
from elasticd_agent.telemetry.metric_table import MetricSpec, escape_label

HEALTHY = MetricSpec("elasticd_node_healthy", "1 while the node is healthy: it gets work.")
QUARANTINED = MetricSpec(
    "elasticd_node_quarantined",
    "1 during the cool-off after a failed check or after job failures that this node caused.",
)
QUARANTINE_LEFT = MetricSpec("elasticd_node_quarantine_left_seconds", "Remaining time of the cool-off; 0 without one.")
FAILURE_STREAK = MetricSpec(
    "elasticd_node_failure_streak", "Failures of the node in a row; a day without failures resets it."
)
CHECK_FAILING = MetricSpec(
    "elasticd_health_check_failing", "1 if the check failed in its last run.", ("check",), label_sets=0
)
CHECK_SECONDS = MetricSpec(
    "elasticd_health_check_seconds", "Duration of the check's last run.", ("check",), label_sets=0
)

METRICS = (HEALTHY, QUARANTINED, QUARANTINE_LEFT, FAILURE_STREAK, CHECK_FAILING, CHECK_SECONDS)


def render_health(node: str, state: str, left_s: float, streak: int, results: Sequence[CheckResult]) -> bytes:
    """The text format, version 0.0.4. `state`: of HealthChanged."""
    shown = [result for result in results if result.outcome != "skipped"]
    samples: list[tuple[MetricSpec, list[tuple[str, float]]]] = [
        (HEALTHY, [("", state == "healthy")]),
        (QUARANTINED, [("", state == "quarantined")]),
        (QUARANTINE_LEFT, [("", left_s)]),
        (FAILURE_STREAK, [("", streak)]),
        (CHECK_FAILING, [(result.check, result.outcome == "failed") for result in shown]),
        (CHECK_SECONDS, [(result.check, result.seconds) for result in shown]),
    ]
    return "".join(line for spec, values in samples if values for line in _family(spec, node, values)).encode()


def _family(spec: MetricSpec, node: str, values: Iterable[tuple[str, float]]) -> list[str]:
    lines = [f"# HELP {spec.name} {spec.help}\n", f"# TYPE {spec.name} {spec.kind}\n"]
    for check, value in values:
        labels = f'node="{escape_label(node)}"' + (f',check="{escape_label(check)}"' if spec.labels else "")
        lines.append(f"{spec.name}{{{labels}}} {float(value)!r}\n")
    return lines
