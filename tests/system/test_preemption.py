"""Preemption notices by stand-ins for each service: what is asked, what is a notice, and what a job does with one."""

from __future__ import annotations

import json
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_agent.config import notice_options
from elasticd_agent.system.network import kubernetes, preemption
from tests.daemon.node import COLD, AgentNode, until
from tests.faults.job import Job

POD = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}, "metadata": {}, "spec": {"nodeName": "gpu-7"}}
NODE = {"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}
PODS, NODES = "/api/v1/namespaces/ml/pods/pod-3", "/api/v1/nodes/gpu-7"
UNREACHABLE = "node.kubernetes.io/unreachable"
TAINTED = {"spec": {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}}
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
META, GCP = "/latest/meta-data", "/computeMetadata/v1/instance"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
VM_NAME = "/metadata/instance/compute/name?api-version=2020-09-01&format=text"
QUIET = {
    "aws": {"/latest/api/token": "t"},
    "gcp": {f"{GCP}/preempted": "FALSE", f"{GCP}/maintenance-event": "NONE"},
    "azure": {EVENTS: json.dumps({"Events": [{"EventType": "Freeze", "NotBefore": ""}]})},
    "kubernetes": {PODS: json.dumps(POD), NODES: json.dumps(NODE)},
}
HEADERS = {
    "aws": ("X-aws-ec2-metadata-token", "t"),
    "gcp": ("Metadata-Flavor", "Google"),
    "azure": ("Metadata", "true"),
    "kubernetes": ("Authorization", "Bearer secret"),
}
NOTICES = [
    (
        "aws",
        {f"{META}/spot/instance-action": '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}'},
        "AWS will terminate this spot instance at 2026-01-01T00:00:00Z",
    ),
    ("aws", {f"{META}/events/recommendations/rebalance": '{"noticeTime": "now"}'}, "(rebalance, now)"),
    ("gcp", {f"{GCP}/preempted": "TRUE\n"}, "GCP preempts this VM"),
    ("gcp", {f"{GCP}/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, "GCP: TERMINATE_ON_HOST_MAINTENANCE"),
    (
        "azure",
        {EVENTS: '{"Events": [{"EventType": "Preempt", "NotBefore": "noon"}]}'},
        "Preempt of this VM, not before noon",
    ),
    (
        "azure",
        {EVENTS: '{"Events": [{"EventType": "Preempt", "Resources": ["gpu_2", "gpu_3"]}]}', VM_NAME: "GPU_3"},
        "Preempt of this VM, not before now",
    ),
    ("kubernetes", {PODS: json.dumps({**POD, "status": {"conditions": [DISRUPTED]}})}, "EvictionByEvictionAPI"),
    ("kubernetes", {PODS: json.dumps({**POD, "metadata": {"deletionTimestamp": "x"}})}, "deletes pod pod-3"),
    ("kubernetes", {NODES: json.dumps(TAINTED)}, "node gpu-7 has the taint karpenter.sh/disrupted"),
]
Serve = Callable[[Mapping[str, str]], str]


@pytest.fixture
def asked() -> list[tuple[str, Mapping[str, str]]]:
    """Path and headers of each request."""
    return []


@pytest.fixture
def serve(asked: list[tuple[str, Mapping[str, str]]]) -> Iterator[Serve]:
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Mapping[str, str]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                body = answers.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.end_headers()
                self.wfile.write((body or "").encode())

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("token", "secret\n"), ("namespace", "ml")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT_DIR", tmp_path)
    monkeypatch.setattr(kubernetes, "TIMEOUT_S", 30.0)
    monkeypatch.setenv("POD_NAME", "pod-3")


def test_every_service_can_be_named() -> None:
    assert tuple(preemption.NOTICE_QUERIES) == notice_options.NOTICE_SERVICES


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n{", b"other\r\n\r\n"], ids=["cut", "other"]
)
def test_answer_that_is_none_is_an_error_like_others(answer: bytes) -> None:
    """Any other one would end the thread that asks."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        service = threading.Thread(target=reply)
        service.start()
        with pytest.raises(OSError, match=r"http://127\.0\.0\.1"):
            preemption.azure_notice(f"http://127.0.0.1:{server.getsockname()[1]}")
        service.join()


@pytest.mark.parametrize(("service", "answers", "notice"), NOTICES)
def test_notice_is_found(service: str, answers: Mapping[str, str], notice: str, serve: Serve) -> None:
    assert notice in preemption.NOTICE_QUERIES[service](serve({**QUIET[service], **answers}))


@pytest.mark.parametrize("service", QUIET)
def test_quiet_service_has_no_notice(
    service: str, serve: Serve, asked: list[tuple[str, Mapping[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert preemption.NOTICE_QUERIES[service](serve(QUIET[service])) == ""
    name, value = HEADERS[service]
    assert all(headers.get(name.lower()) == value for _, headers in asked[1:])


def test_end_of_another_vm_of_the_scale_set_is_no_notice(serve: Serve) -> None:
    events = '{"Events": [{"EventType": "Preempt", "Resources": ["gpu_2"]}, {"EventType": "Terminate"}]}'
    only = '{"Events": [{"EventType": "Preempt", "Resources": ["gpu_2"]}]}'
    assert preemption.azure_notice(serve({EVENTS: only, VM_NAME: "gpu_3"})) == ""
    assert "Terminate of this VM" in preemption.azure_notice(serve({EVENTS: events, VM_NAME: "gpu_3"}))
    assert "Preempt of this VM" in preemption.azure_notice(serve({EVENTS: only})), "its name is not known"


@pytest.mark.parametrize("answers", [{NODES: "{}"}, {}], ids=["refused", "gone"])
def test_node_that_cannot_be_read_is_left_out(serve: Serve, answers: Mapping[str, str]) -> None:
    assert preemption.kubernetes_notice(serve({PODS: json.dumps(POD), **answers})) == ""


@pytest.mark.parametrize(
    ("toleration", "notice"),
    [
        ({"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}, ""),
        ({"operator": "Exists"}, ""),
        ({"key": UNREACHABLE, "effect": "NoExecute"}, ""),
        ({"key": UNREACHABLE, "value": "yes"}, UNREACHABLE),
        ({"key": UNREACHABLE, "operator": "Exists", "effect": "NoSchedule"}, UNREACHABLE),
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, UNREACHABLE),
    ],
)
def test_taint_that_the_pod_tolerates_is_no_notice(serve: Serve, toleration: dict[str, object], notice: str) -> None:
    """Kubernetes adds the first one to every pod: a kubelet that is restarted must end no job."""
    pod = {**POD, "spec": {"nodeName": "gpu-7", "tolerations": [toleration]}}
    node = {"spec": {"taints": [{"key": UNREACHABLE, "effect": "NoExecute"}]}}
    assert notice in (found := preemption.kubernetes_notice(serve({PODS: json.dumps(pod), NODES: json.dumps(node)})))
    assert bool(found) == bool(notice)


def test_service_that_is_away_is_reported_once(serve: Serve) -> None:
    said: list[str] = []
    notices: list[str] = []
    found = threading.Event()
    services = (("azure", "http://127.0.0.1:1"), ("gcp", serve({**QUIET["gcp"], f"{GCP}/preempted": "TRUE"})))

    def on_notice(notice: str) -> None:
        notices.append(notice)
        found.set()

    monitor = preemption.PreemptionMonitor(services, on_notice, said.append)
    assert found.wait(20)
    monitor.close()
    assert notices == ["GCP preempts this VM"]
    assert [text.partition(" for now")[0] for text in said] == [
        "no preemption notices from azure at http://127.0.0.1:1"
    ]


def test_withdrawn_notice_is_reported_once_every_service_has_none(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "POLL_S", 0.01)
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    first, second = {**QUIET["gcp"], f"{GCP}/preempted": "TRUE"}, {**QUIET["aws"], f"{META}/spot/instance-action": "{"}
    services = (("gcp", serve(first)), ("aws", serve(second)))
    monitor = preemption.PreemptionMonitor(services, heard.put, lambda _: None)
    try:
        assert heard.get(timeout=20) == "GCP preempts this VM"
        first[f"{GCP}/preempted"] = "FALSE"
        with pytest.raises(queue.Empty):  # the other one's answer makes no sense, and may be a notice
            heard.get(timeout=0.3)
        del second[f"{META}/spot/instance-action"]
        assert heard.get(timeout=20) == ""
    finally:
        monitor.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [("oracle", "none of aws, gcp"), ("aws=169.254.169.254", "SERVICE=http"), ("kubernetes", "outside of a pod")],
)
def test_service_that_cannot_be_asked_is_refused(text: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match=why):
        notice_options.parse_notice_service(text)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    found = [notice_options.parse_notice_service(text) for text in ("aws", "gcp=http://h:1/", "kubernetes")]
    assert found == [("aws", "http://169.254.169.254"), ("gcp", "http://h:1"), ("kubernetes", "https://[fd00::1]:443")]


def test_job_stops_with_the_notice_as_its_reason(serve: Serve, tmp_path: Path) -> None:
    """As by SIGTERM: its workers hear of it, and it has a moment to save."""
    answers = dict(QUIET["gcp"])
    run = Job(tmp_path, "plain.py", "${local_rank}", "polite", flags=["--preemption-notices", f"gcp={serve(answers)}"])
    try:
        run.file("ready-0"), run.file("ready-1")
        answers[f"{GCP}/preempted"] = "TRUE"
        assert run.wait() == 128 + signal.SIGTERM
        assert run.event("job_ended", outcome="stopped")["reason"] == "GCP preempts this VM"
        assert run.file("got-0") == "SIGTERM"
    finally:
        run.end()


def test_agent_with_a_notice_stays_drained_until_it_is_withdrawn(serve: Serve, tmp_path: Path) -> None:
    """A service manager would start it again: until it has read the notice, the node would be given jobs."""
    answers = {**QUIET["gcp"], f"{GCP}/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
    node = AgentNode(tmp_path, "n1", "DAEMON_TEST=stays", preemption_notices=[f"gcp={serve(answers)}"])
    try:
        node.start()
        node.wait_for_log("jobs have 60 s to leave this node")
        node.job("one", "plain.py", COLD, "sleep", workers=1)
        node.submit_jobs()

        def reason() -> str:
            return str(node.unix().get("/v1/jobs").result()["jobs"][0]["reason"])

        until(lambda: "n1 is draining: GCP: TERMINATE_ON_HOST_MAINTENANCE" in reason(), node.diagnostics)
        answers[f"{GCP}/maintenance-event"] = "NONE"
        until(lambda: (node.work / "ready-0").exists(), node.diagnostics)
        assert node.drain() == 0
    finally:
        node.end()


@pytest.mark.parametrize("notice_first", [True, False])
def test_notice_and_the_signal_that_comes_with_it_are_one_request(
    serve: Serve, tmp_path: Path, notice_first: bool
) -> None:
    """Together they would be a second SIGTERM, which kills jobs before they have saved."""
    answers = dict(QUIET["gcp"])
    node = AgentNode(tmp_path, "n1", "DAEMON_TEST=notice", preemption_notices=[f"gcp={serve(answers)}"])
    node.job("one", "plain.py", COLD, "slow", workers=1)
    try:
        node.start()
        until(lambda: (node.work / "ready-0").exists(), node.diagnostics)
        for is_notice in (notice_first, not notice_first):
            if is_notice:
                answers[f"{GCP}/preempted"] = "TRUE"
                node.wait_for_log("GCP preempts this VM")
            else:
                node.signal(signal.SIGTERM)
                node.wait_for_log("SIGTERM")
        assert node.wait() == 0
        assert (node.work / "got-0").read_text() == "SIGTERM", node.diagnostics()
        assert "remaining jobs are killed" not in node.log
    finally:
        node.end()
