"""The node's health as metrics: names, help and labels in one table, and the page they make. docs/node-metrics.md's.

Pure: it is given what stands. A check that was skipped has no series, so that an alert on one that fails stays honest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elasticd_agent.node.health.result import CheckResult
from elasticd_agent.telemetry.metric_table import MetricSpec, escape_label

HEALTHY = MetricSpec("elasticd_node_healthy", "gauge", "1 while nothing is held against this node: it is given work.")
QUARANTINED = MetricSpec(
    "elasticd_node_quarantined",
    "gauge",
    "1 while nothing is wrong any more, or a job's trouble was this node's doing, and a cool-off lasts.",
)
QUARANTINE_LEFT = MetricSpec(
    "elasticd_node_quarantine_left_seconds", "gauge", "How long that cool-off still lasts; 0 without one."
)
FAILURE_STREAK = MetricSpec(
    "elasticd_node_failure_streak", "gauge", "How often in a row the node was in trouble; a long good time forgives."
)
CHECK_FAILING = MetricSpec(
    "elasticd_health_check_failing", "gauge", "1 if the last look at this found it bad.", ("check",), label_sets=0
)
CHECK_SECONDS = MetricSpec(
    "elasticd_health_check_seconds", "gauge", "How long the last look at this took.", ("check",), label_sets=0
)

METRICS = (HEALTHY, QUARANTINED, QUARANTINE_LEFT, FAILURE_STREAK, CHECK_FAILING, CHECK_SECONDS)


def render_health(node: str, state: str, left_s: float, troubles: int, readings: Sequence[CheckResult]) -> bytes:
    """The text format, version 0.0.4. `state`: of HealthChanged."""
    seen = [reading for reading in readings if reading.outcome != "skipped"]
    samples: list[tuple[MetricSpec, list[tuple[str, float]]]] = [
        (HEALTHY, [("", state == "healthy")]),
        (QUARANTINED, [("", state == "quarantined")]),
        (QUARANTINE_LEFT, [("", left_s)]),
        (FAILURE_STREAK, [("", troubles)]),
        (CHECK_FAILING, [(reading.check, reading.outcome == "bad") for reading in seen]),
        (CHECK_SECONDS, [(reading.check, reading.seconds) for reading in seen]),
    ]
    return "".join(line for spec, values in samples if values for line in _family(spec, node, values)).encode()


def _family(spec: MetricSpec, node: str, values: Iterable[tuple[str, float]]) -> list[str]:
    lines = [f"# HELP {spec.name} {spec.help}\n", f"# TYPE {spec.name} {spec.kind}\n"]
    for check, value in values:
        labels = f'node="{escape_label(node)}"' + (f',check="{escape_label(check)}"' if spec.labels else "")
        lines.append(f"{spec.name}{{{labels}}} {float(value)!r}\n")
    return lines
