"""Taints and conditions of a Kubernetes node as health, and the agent's own condition; against a stand-in API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd_agent.system.network import kubernetes
from elasticd_daemon.config.agent_settings import HealthSettings, NodeSettings
from elasticd_daemon.health import monitor
from elasticd_daemon.health.checks import NodeChecks
from elasticd_daemon.health.kubernetes_node import CHECK_NAME, CONDITION_TYPE, KubernetesNode, wanted_condition_status
from elasticd_daemon.health.monitor import HealthMonitor
from elasticd_daemon.health.persistence import HealthFile
from elasticd_daemon.health.policy import NOT_CHECKED_YET_REASON, HealthVerdict
from tests.daemon.health.conftest import until
from tests.daemon.kubernetes_api import Api, serving

HEALTHY = HealthVerdict("healthy")
XID = HealthVerdict("unhealthy", "gpu xid: 79", failing_checks=("gpu xid",))
REPORT, READ = HealthSettings(kubernetes="report"), HealthSettings(kubernetes="read")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT_DIR", tmp_path)
    with serving("gpu-7", tmp_path) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


def test_node_is_healthy_while_nothing_listed_is_there(api: Api) -> None:
    """The taint of every GPU node, and conditions that are False or unknown to the lists."""
    api.set("CSPMaintenance", "True")
    assert [result.outcome for result in KubernetesNode("gpu-7").check(READ)] == ["passed"]
    assert KubernetesNode("gpu-7").check(HealthSettings()) == [], "off unless configured"


@pytest.mark.parametrize(
    ("spec", "condition", "why"),
    [
        ([{"key": "nvidia.com/gpu-xid-error", "effect": "NoSchedule"}], "", "the taint nvidia.com/gpu-xid-error:NoSc"),
        ([{"key": "AggregatedNodeHealth", "effect": "PreferNoSchedule"}], "", "the taint AggregatedNodeHealth:Prefer"),
        ([], "GpuNvlinkWatch", "GpuNvlinkWatch: 3 links are down"),
        ([], "SysLogsXIDError", "SysLogsXIDError: 3 links are down"),
        ([], "KernelDeadlock", "KernelDeadlock: 3 links are down"),
    ],
)
def test_node_is_ill_as_others_say(api: Api, spec: list[dict[str, str]], condition: str, why: str) -> None:
    api.node["spec"]["taints"] += spec
    if condition:
        api.set(condition, "True", "3 links are down")
    (result,) = KubernetesNode("gpu-7").check(READ)
    assert (result.outcome, result.certain) == ("failed", True)
    assert why in result.why


def test_lists_of_the_operator_replace_the_defaults(api: Api) -> None:
    own = HealthSettings(kubernetes="read", kubernetes_taints=("*:NoExecute",), kubernetes_conditions=("Rack*",))
    api.set("GpuMemWatch", "True")
    assert KubernetesNode("gpu-7").check(own)[0].outcome == "passed"
    api.set("RackPower", "True", "one feed")
    assert KubernetesNode("gpu-7").check(own)[0].why == "RackPower: one feed"


def test_answer_before_counts_while_there_is_none(api: Api) -> None:
    """A server that is away, or refuses, makes no node ill, and none healthy."""
    node = KubernetesNode("gpu-7")
    api.forbidden = {"GET"}
    assert node.check(READ)[0].outcome == "skipped"
    api.forbidden = set()
    api.set("GpuMemWatch", "True", "ECC")
    assert node.check(READ)[0].outcome == "failed"
    api.forbidden = {"GET"}
    assert node.check(READ)[0].why == "GpuMemWatch: ECC"


def test_unknown_node_is_no_illness(api: Api) -> None:
    (result,) = KubernetesNode("gpu-8").check(READ)
    assert (result.outcome, "there is no /api/v1/nodes/gpu-8" in result.why) == ("skipped", True)


def test_condition_is_written_when_it_changes(api: Api) -> None:
    node = KubernetesNode("gpu-7")
    for verdict in (HEALTHY, HEALTHY, XID, XID, HEALTHY):
        node.check(REPORT)
        node.write_condition(REPORT, verdict)
    written = [patch["status"]["conditions"][0] for patch in api.patches]
    assert [(one["status"], one["message"]) for one in written] == [
        ("False", "elasticd gives this node work"), ("True", "gpu xid: 79"), ("False", "elasticd gives this node work"),
    ]  # fmt: skip
    assert all("lastTransitionTime" in one for one in written)
    assert api.condition("Ready") == {"type": "Ready", "status": "True"}, "nothing else is touched"


def test_another_reason_is_no_transition(api: Api) -> None:
    node = KubernetesNode("gpu-7")
    for why in ("gpu xid: 79", "gpu ecc: 2 errors"):
        node.check(REPORT)
        node.write_condition(REPORT, HealthVerdict("unhealthy", why, failing_checks=("gpu",)))
    assert ["lastTransitionTime" in patch["status"]["conditions"][0] for patch in api.patches] == [True, False]
    assert api.condition(CONDITION_TYPE)["message"] == "gpu ecc: 2 errors"


def test_nothing_is_written_where_it_is_only_read(api: Api) -> None:
    node = KubernetesNode("gpu-7")
    node.check(READ)
    node.write_condition(READ, XID)
    assert api.patches == []


def test_condition_that_may_not_be_written_is_reported_once(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.forbidden = {"PATCH"}
    node = KubernetesNode("gpu-7")
    for _ in range(3):
        node.check(REPORT)
        node.write_condition(REPORT, XID)
    assert [record.message for record in caplog.records if "403" in record.message] != []
    assert len(caplog.records) == 1


QUARANTINED = HealthVerdict("quarantined", "quarantined for 60 s after a failure", 60.0)
OF_OTHERS = HealthVerdict("unhealthy", "kubernetes: GpuMemWatch", failing_checks=(CHECK_NAME,))


@pytest.mark.parametrize(
    ("verdict", "before", "present", "status"),
    [
        (HEALTHY, "quarantined", "True", "False"),
        (XID, "healthy", "False", "True"),
        (HealthVerdict("unhealthy", "both", failing_checks=(CHECK_NAME, "gpu ecc")), "healthy", "False", "True"),
        (OF_OTHERS, "healthy", "False", None),
        (QUARANTINED, "unhealthy", "False", None),  # after a failure of others: no echo
        (QUARANTINED, "unhealthy", "True", "True"),  # after one of our own
        (QUARANTINED, "healthy", "False", "True"),  # jobs failed because of it
        (QUARANTINED, "", "True", "True"),  # the agent was replaced
        (HealthVerdict("unhealthy", NOT_CHECKED_YET_REASON), "", "True", None),
    ],
)
def test_condition_has_what_elasticd_found_itself(
    verdict: HealthVerdict, before: str, present: str, status: str | None
) -> None:
    assert wanted_condition_status(verdict, before, present) == status


def test_health_follows_the_node_and_reports_failures_of_jobs(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole thread, with all checks of this machine."""
    monkeypatch.setattr(monitor, "RECHECK_S", 0.1)
    health = HealthSettings(
        kubernetes="report", every_s=0.1, all_reduce=False, disk_free_min_bytes=1, plugins_dir=tmp_path / "none",
        cooloff_s=0.3, strikes=1,
    )  # type: ignore[arg-type]  # fmt: skip
    (tmp_path / "state").mkdir()
    settings = NodeSettings(node="gpu-7", state_dir=tmp_path / "state", health=health)
    file = HealthFile(tmp_path / "state" / "health.json", "boot")
    watched = HealthMonitor(lambda event: NodeChecks(settings, {}, event), settings, file, idle=lambda: True)
    posted = [watched.current()]
    try:
        watched.start(posted.append)
        until(lambda: api.condition(CONDITION_TYPE).get("status") == "False", "a healthy node")
        api.set("GpuMemWatch", "True", "ECC on GPU 3")
        until(lambda: posted[-1].why == "kubernetes: GpuMemWatch: ECC on GPU 3", "the others' condition")
        assert posted[-1].state == "unhealthy"
        api.set("GpuMemWatch", "False")
        until(lambda: posted[-1].state == "healthy", "the end of the quarantine")
        assert len(api.patches) == 1, "no echo of the others' condition"
        watched.record_job_failure("rank 3 is hung in an all-reduce")
        until(lambda: len(api.patches) > 1, "our condition")
        ours = api.patches[1]["status"]["conditions"][0]
        assert (ours["type"], ours["status"]) == (CONDITION_TYPE, "True")
        assert "rank 3 is hung in an all-reduce" in ours["message"]
        until(lambda: api.condition(CONDITION_TYPE)["status"] == "False", "its end")
    finally:
        watched.close()
