"""Writes components/prometheus/rules.yaml: the rules of deploy/prometheus as one PrometheusRule. `make docs` runs it.

The operator needs the groups inside a PrometheusRule object. They are copied verbatim, comments included.
"""

from __future__ import annotations

from pathlib import Path

RULES = Path(__file__).parents[1] / "prometheus"
WRITTEN = Path(__file__).parent / "components" / "prometheus" / "rules.yaml"
HEAD = """\
# Written by `make docs` from deploy/prometheus/recording.yaml and alerts.yaml; a test keeps it in step.
# EDIT: `release`, where your Prometheus selects by it.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: elasticd
  namespace: elasticd
  labels:
    app.kubernetes.io/part-of: elasticd
    release: prometheus
spec:
  groups:
"""


def groups(text: str) -> str:
    """The text below `groups:`, indented by two more."""
    _, mark, below = text.partition("\ngroups:\n")
    assert mark, "a rule file has its groups at the top"
    return "".join(f"  {line}" if line.strip() else line for line in below.splitlines(keepends=True))


def written() -> str:
    return HEAD + "".join(groups(f"\n{(RULES / name).read_text()}") for name in ("recording.yaml", "alerts.yaml"))


if __name__ == "__main__":
    WRITTEN.write_text(written())
