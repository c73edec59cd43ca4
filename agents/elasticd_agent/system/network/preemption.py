"""Notices that this machine or pod is about to be taken away, from the services of clouds and of Kubernetes.

A notice is asked for, since none of these services sends one: every POLL_S, by one request or two that take
milliseconds. Only services that the operator has named are asked, at their link-local address or at the one that he
gives. A service that cannot be reached is reported once, and asked again.

    aws         a spot interruption, two minutes ahead, and a rebalance recommendation, earlier: instance metadata, v2
    gcp         the preemption of a spot VM, 30 s ahead, and a host's maintenance: the metadata server
    azure       a Preempt, Terminate or Redeploy among the scheduled events, 30 s to 15 minutes ahead
    kubernetes  the pod's DisruptionTarget condition or its deletion; a taint of its node that ends pods. Needs the
                pod's service account, with the right to read this pod, and the node for its taints
"""

from __future__ import annotations

import json
import os
import threading
import urllib.error
from collections.abc import Callable, Mapping
from contextlib import suppress

from elasticd_agent.system.network import kubernetes as kubernetes_api
from elasticd_agent.system.network.kubernetes import TIMEOUT_S, http_request

POLL_S = 2.0
"""A spot VM of GCP has 30 s from the notice."""
PREEMPTION_TAINTS = (
    *("ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "node.kubernetes.io/out-of-service"),
    *("aws-node-termination-handler/spot-itn", "cloud.google.com/impending-node-termination"),
)
"""Taints of a node that is about to go."""
EVICTING_TAINTS = ("*:NoExecute",)
"""Taints that end the pods that do not tolerate them. Every pod tolerates a node that is unreachable, for five minutes
as a rule, since most come back.
"""
_AZURE_END_EVENTS = ("Preempt", "Terminate", "Redeploy")

NoticeQuery = Callable[[str], str]
"""Asks the service at a base URL. Returns the notice in words, "" for none. Raises OSError, ValueError."""


def aws_notice(base: str) -> str:
    token = {"X-aws-ec2-metadata-token": http_request(f"{base}/latest/api/token", _AWS_TOKEN_HEADERS, "PUT").decode()}
    if action := http_request(f"{base}/latest/meta-data/spot/instance-action", token):
        told = json.loads(action)
        return f"AWS will {told['action']} this spot instance at {told['time']}"
    if advice := http_request(f"{base}/latest/meta-data/events/recommendations/rebalance", token):
        return f"AWS recommends to leave this spot instance (rebalance, {json.loads(advice)['noticeTime']})"
    return ""


def gcp_notice(base: str) -> str:
    headers = {"Metadata-Flavor": "Google"}
    if http_request(f"{base}/computeMetadata/v1/instance/preempted", headers).strip() == b"TRUE":
        return "GCP preempts this VM"
    event = http_request(f"{base}/computeMetadata/v1/instance/maintenance-event", headers).decode().strip()
    return f"GCP: {event} of this VM's host" if event.startswith("TERMINATE") else ""


def azure_notice(base: str) -> str:
    """Azure's notice: every VM of a scale set or an availability set hears of the events of all of them."""
    headers = {"Metadata": "true"}
    text = http_request(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers)
    events = [e for e in json.loads(text or b"{}").get("Events", []) if e["EventType"] in _AZURE_END_EVENTS]
    if not events:
        return ""
    name = http_request(f"{base}/metadata/instance/compute/name?api-version=2020-09-01&format=text", headers)
    own = name.decode().strip().lower()
    for event in events:
        named = [vm.lower() for vm in event.get("Resources") or ()]
        if not own or not named or own in named:
            return f"Azure: {event['EventType']} of this VM, not before {event.get('NotBefore') or 'now'}"
    return ""


def kubernetes_notice(base: str) -> str:
    namespace = (kubernetes_api.SERVICE_ACCOUNT_DIR / "namespace").read_text(encoding="ascii").strip()
    pod = os.environ.get("POD_NAME") or os.uname().nodename
    told = kubernetes_api.get(base, f"/api/v1/namespaces/{namespace}/pods/{pod}")
    for condition in told.get("status", {}).get("conditions", []):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"Kubernetes disrupts pod {pod}: {condition.get('message') or condition.get('reason', '')}"
    if told["metadata"].get("deletionTimestamp"):
        return f"Kubernetes deletes pod {pod}"
    name, node = told["spec"].get("nodeName", ""), {}
    with suppress(urllib.error.HTTPError, ValueError):  # this account may not read nodes, or there is no such node now
        node = kubernetes_api.get(base, f"/api/v1/nodes/{name}")
    taint = kubernetes_api.find_taint(node, PREEMPTION_TAINTS) or kubernetes_api.find_taint(
        node, EVICTING_TAINTS, told["spec"].get("tolerations", [])
    )
    return f"node {name} has the taint {taint}" if taint else ""


NOTICE_QUERIES: Mapping[str, NoticeQuery] = {
    "aws": aws_notice,
    "gcp": gcp_notice,
    "azure": azure_notice,
    "kubernetes": kubernetes_notice,
}
_AWS_TOKEN_HEADERS = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}


class PreemptionMonitor:
    """A thread that asks the services. It calls `on_notice(words)` once one has a notice, and `on_notice("")` once none
    has it any more: not every notice is followed by the end.
    """

    def __init__(
        self, services: tuple[tuple[str, str], ...], on_notice: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._services, self._on_notice, self._warn = services, on_notice, warn
        self._reported: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        is_noticed = False
        while not self._stop.is_set():
            answers: list[str | None] = []
            for name, base in self._services:
                answers.append(self._ask_service(name, base))
                if answers[-1]:  # the others may take seconds
                    break
            notice = answers[-1] or ""
            if bool(notice) != is_noticed and (notice or None not in answers):
                is_noticed = bool(notice)
                self._on_notice(notice)
            self._stop.wait(POLL_S)

    def _ask_service(self, name: str, base: str) -> str | None:
        """The service's notice, "" for none; None: it cannot be asked."""
        try:
            return NOTICE_QUERIES[name](base)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if name not in self._reported:
                self._reported.add(name)
                self._warn(f"no preemption notices from {name} at {base} for now: {error}")
            return None
