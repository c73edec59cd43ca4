"""Writes components/prometheus/rules.yaml and dashboard.yaml: the rules of deploy/prometheus as one PrometheusRule, the
Grafana dashboards as a ConfigMap; and copies the manifests into the Helm chart. `make docs` runs it.

kustomize reads no file outside of the component, and the operator needs the groups inside a PrometheusRule object. They
are copied verbatim, comments included. Helm reads no file outside of the chart, and warns of each symbolic link in it.
"""

from __future__ import annotations

from pathlib import Path

RULES = Path(__file__).parents[1] / "prometheus"
WRITTEN = Path(__file__).parent / "components" / "prometheus" / "rules.yaml"
DASHBOARDS = tuple(Path(__file__).parents[1] / "grafana" / name for name in ("elasticd.json", "elasticd-fleet.json"))
DASHBOARD_WRITTEN = WRITTEN.with_name("dashboard.yaml")
DASHBOARD_HEAD = """\
# Written by `make docs` from deploy/grafana; a test keeps it in step. Grafana's sidecar (as in the chart
# kube-prometheus-stack) loads every ConfigMap with this label.
apiVersion: v1
kind: ConfigMap
metadata:
  name: elasticd-dashboard
  namespace: elasticd
  labels:
    app.kubernetes.io/part-of: elasticd
    grafana_dashboard: "1"
data:
"""
CHART = Path(__file__).parents[1] / "helm" / "elasticd" / "manifests"
CHART_MANIFESTS = {
    "agent.toml": "base/agent.toml",
    "checkpoints.yaml": "base/checkpoints.yaml",
    "daemonset.yaml": "base/daemonset.yaml",
    "dashboard.yaml": "components/prometheus/dashboard.yaml",
    "etcd.yaml": "overlays/etcd/etcd.yaml",
    "host-network.yaml": "components/host-network/host-network.yaml",
    "metrics-network-policy.yaml": "components/prometheus/network-policy.yaml",
    "network-policy.yaml": "base/network-policy.yaml",
    "node-health-account.yaml": "components/node-health/account.yaml",
    "node-health-admission-policy-binding.yaml": "components/node-health/admission-policy-binding.yaml",
    "node-health-admission-policy.yaml": "components/node-health/admission-policy.yaml",
    "node-health-role-binding.yaml": "components/node-health/role-binding.yaml",
    "node-health-role.yaml": "components/node-health/role.yaml",
    "node-health.yaml": "components/node-health/node-health.yaml",
    "pod-monitor.yaml": "components/prometheus/pod-monitor.yaml",
    "priority-class.yaml": "base/priority-class.yaml",
    "rdma.yaml": "components/rdma/rdma.yaml",
    "rules.yaml": "components/prometheus/rules.yaml",
    "service.yaml": "base/service.yaml",
}
"""What the chart copies, and from which file below this directory."""
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


def dashboard() -> str:
    found = DASHBOARD_HEAD
    for path in DASHBOARDS:
        lines = path.read_text().splitlines(keepends=True)
        found += f"  {path.name}: |\n" + "".join(f"    {line}" for line in lines)
    return found


if __name__ == "__main__":
    WRITTEN.write_text(written())
    DASHBOARD_WRITTEN.write_text(dashboard())
    for name, source in CHART_MANIFESTS.items():
        (CHART / name).write_bytes((Path(__file__).parent / source).read_bytes())
