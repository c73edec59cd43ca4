"""The node's health as metrics: names, help and labels in one table, and the page they make. docs/node-metrics.md's.

Pure: it is given what stands. A check that was skipped has no series, so that an alert on one that fails stays honest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elasticd_agent.node.health.result import Reading
from elasticd_agent.telemetry.metric_table import Spec, escaped

HEALTHY = Spec("elasticd_node_healthy", "gauge", "1 while nothing is held against this node: it is given work.")
QUARANTINED = Spec(
    "elasticd_node_quarantined",
    "gauge",
    "1 while nothing is wrong any more, or a job's trouble was this node's doing, and a cool-off lasts.",
)
LEFT = Spec("elasticd_node_quarantine_left_seconds", "gauge", "How long that cool-off still lasts; 0 without one.")
TROUBLE = Spec(
    "elasticd_node_troubles", "gauge", "How often in a row the node was in trouble; a long good time forgives."
)
BAD = Spec("elasticd_health_check_bad", "gauge", "1 if the last look at this found it bad.", ("check",), many=0)
SECONDS = Spec("elasticd_health_check_seconds", "gauge", "How long the last look at this took.", ("check",), many=0)

METRICS = (HEALTHY, QUARANTINED, LEFT, TROUBLE, BAD, SECONDS)


def page(node: str, state: str, left_s: float, troubles: int, readings: Sequence[Reading]) -> bytes:
    """The text format, version 0.0.4. `state`: of HealthChanged."""
    seen = [reading for reading in readings if reading.outcome != "skipped"]
    samples: list[tuple[Spec, list[tuple[str, float]]]] = [
        (HEALTHY, [("", state == "healthy")]),
        (QUARANTINED, [("", state == "quarantined")]),
        (LEFT, [("", left_s)]),
        (TROUBLE, [("", troubles)]),
        (BAD, [(reading.check, reading.outcome == "bad") for reading in seen]),
        (SECONDS, [(reading.check, reading.seconds) for reading in seen]),
    ]
    return "".join(line for spec, values in samples if values for line in _family(spec, node, values)).encode()


def _family(spec: Spec, node: str, values: Iterable[tuple[str, float]]) -> list[str]:
    lines = [f"# HELP {spec.name} {spec.help}\n", f"# TYPE {spec.name} {spec.kind}\n"]
    for check, value in values:
        labels = f'node="{escaped(node)}"' + (f',check="{escaped(check)}"' if spec.labels else "")
        lines.append(f"{spec.name}{{{labels}}} {float(value)!r}\n")
    return lines
