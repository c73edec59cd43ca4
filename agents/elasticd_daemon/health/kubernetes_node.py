"""This node as Kubernetes has it: its taints and conditions as a check, and a condition with this agent's own verdict.

Both work on the node's object as it was read last: what another program has changed meanwhile is put right after the
next check. Without an answer the one before counts, and without any the check is skipped: an API server that is away
makes no node ill, and none healthy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from elasticd_agent.config.notice_options import parse_notice_service
from elasticd_daemon.config.agent_settings import HealthSettings
from elasticd_daemon.health.policy import NOT_CHECKED_YET_REASON, HealthVerdict
from elasticd_daemon.health.result import CheckResult, passed, skipped

CHECK_NAME = "kubernetes"
CONDITION_TYPE = "ElasticdGPUQuarantined"
_NO_ANSWER_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)

_log = logging.getLogger("elasticd.health")


class KubernetesNode:
    """Belongs to one thread."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._found: Mapping[str, Any] = {}
        self._failed: CheckResult | None = None  #: by the newest answer
        self._before = ""  #: the state of the verdict before
        self._trouble = ""

    def check(self, health: HealthSettings) -> list[CheckResult]:
        if health.kubernetes == "off":
            return []
        from elasticd_agent.system.network import kubernetes  # it takes an HTTP client

        try:
            self._found = kubernetes.get(self._api_url, self._node_path)
            taint = kubernetes.find_taint(self._found, health.kubernetes_taints)
            why = f"this node has the taint {taint}" if taint else ""
            why = why or kubernetes.find_true_condition(self._found, health.kubernetes_conditions)
        except _NO_ANSWER_ERRORS as error:
            self._found = {}
            missing = skipped(CHECK_NAME, f"node {self._node} cannot be read from Kubernetes: {error}")
            return [self._failed or missing]
        # It counts at once: the program that set it has judged already.
        self._failed = CheckResult(CHECK_NAME, "failed", why, certain=True) if why else None
        return [self._failed or passed(CHECK_NAME, "no such taint or condition")]

    def write_condition(self, health: HealthSettings, verdict: HealthVerdict) -> None:
        """Write the condition, if it is not what the node has."""
        before, self._before = self._before, verdict.state
        if health.kubernetes != "report" or not self._found:
            return
        from elasticd_agent.system.network import kubernetes

        try:
            listed = self._found.get("status", {}).get("conditions", [])
            present: dict[str, Any] = next((one for one in listed if one["type"] == CONDITION_TYPE), {})
            status = wanted_condition_status(verdict, before, present.get("status", "False"))
            if status is None:
                return
            reason = "NotQuarantined" if status == "False" else "HealthCheckOrJobFailed"
            message = "elasticd gives this node work" if status == "False" else verdict.why
            wanted = {"type": CONDITION_TYPE, "status": status, "reason": reason, "message": message}
            if {**present, **wanted} == present:
                return
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            since = {} if present.get("status") == status else {"lastTransitionTime": now}
            change = {"status": {"conditions": [{**wanted, "lastHeartbeatTime": now, **since}]}}
            self._found = kubernetes.patch(self._api_url, f"{self._node_path}/status", change)
            self._trouble = ""
        except _NO_ANSWER_ERRORS as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning(
                    "the condition %s of node %s cannot be written for now: %s", CONDITION_TYPE, self._node, error
                )

    @property
    def _api_url(self) -> str:
        return parse_notice_service("kubernetes")[1]

    @property
    def _node_path(self) -> str:
        return f"/api/v1/nodes/{self._node}"


def wanted_condition_status(verdict: HealthVerdict, before: str, present: str) -> str | None:
    """Pure. The condition's status; None: it stays as it is.

    It is about what this agent has found itself. If it repeated a taint or condition, a controller that taints nodes
    for ours would keep the node tainted for good. The quarantine after such a failure therefore changes nothing.
    """
    if verdict.state == "healthy":
        return "False"
    if verdict.why == NOT_CHECKED_YET_REASON:
        return None
    own = set(verdict.failing_checks) - {CHECK_NAME}
    if own or (verdict.state == "quarantined" and (before == "healthy" or present == "True")):
        return "True"
    return None
