"""The metrics port: it answers, it refuses, and nobody on the other end of it can hold the agent up."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.errors import UsageError
from elasticd_agent.job.reporting import readiness
from elasticd_agent.model.records import Member, Round
from elasticd_agent.telemetry.metrics import Metrics
from elasticd_agent.telemetry.metrics_server import MAX_CONNECTIONS, HealthProbeResult, MetricsServer, MonitoringPages

DEADLINE = 10.0


def pages(**given: Any) -> MonitoringPages:
    defaults: dict[str, Any] = {
        "metrics": Metrics("j").render,
        "status": lambda: {"round": 3, "phase": "running", "members": ["a"], "steps": {"0": 7}},
        "healthy": lambda: HealthProbeResult(True, "the loop turns"),
        "ready": lambda: HealthProbeResult(False, "no group runs yet"),
    }
    return MonitoringPages(**(defaults | given))


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    before = threading.active_count()
    made = MetricsServer("127.0.0.1", 0, pages())
    yield made
    assert made.close(DEADLINE)
    assert threading.active_count() == before


def ask(server: MetricsServer, path: str, method: str = "GET", **more: Any) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*server.address, timeout=DEADLINE)
    try:
        connection.request(method, path, **more)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def connected(server: MetricsServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=DEADLINE)


def eventually(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + DEADLINE
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_the_four_pages(server: MetricsServer) -> None:
    code, body, headers = ask(server, "/metrics?x=1")
    assert (code, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'elasticd_agent_up{job_id="j",node=""} 1.0' in body
    assert ask(server, "/healthz")[:2] == (200, "the loop turns\n")
    assert ask(server, "/readyz")[:2] == (503, "no group runs yet\n")
    code, body, headers = ask(server, "/status")
    assert (code, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == {"round": 3, "phase": "running", "members": ["a"], "steps": {"0": 7}}


def test_what_is_refused(server: MetricsServer) -> None:
    assert ask(server, "/")[0] == 404
    assert ask(server, "/../etc/passwd")[0] == 404
    assert ask(server, "/status", "POST", body=b"x" * 100)[0] == 405
    assert ask(server, "/status", "GET", body=b"x" * 100)[0] == 413
    code, body, headers = ask(server, "/status", "HEAD")
    assert (code, body) == (200, "")
    assert int(headers["Content-Length"]) > 10


@pytest.mark.parametrize(
    ("address", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", ""), ("::1", "http://[::1]:")]
)
def test_it_listens_at_its_address_only(address: str, url: str) -> None:
    made = MetricsServer(address, 0, pages())
    assert made.address[0] == address
    assert made.url.startswith(url), "as a browser, or curl, takes it"
    assert ask(made, "/healthz")[0] == 200
    assert made.close(DEADLINE)


@pytest.mark.parametrize(
    ("address", "port", "said"),
    [
        ("127.0.0.1", None, ".*in use.*choose another one"),
        ("0.0.0.0", None, ".*in use.*choose another one"),
        ("203.0.113.7", 0, ""),
        ("127.0.0.1", 70000, ""),
        ("no.such.host.invalid", 0, ""),
    ],
)
def test_address_that_cannot_be_had_is_a_usage_error(
    server: MetricsServer, address: str, port: int | None, said: str
) -> None:
    """None: the port of another server."""
    with pytest.raises(UsageError, match=rf"--metrics-port{said}") as raised:
        MetricsServer(address, server.address[1] if port is None else port, pages())
    assert "\n" not in str(raised.value)


def test_who_opens_more_and_more_connections_closes_only_those_of_his_own() -> None:
    server = MetricsServer("127.0.0.1", 0, pages(), connection_s=DEADLINE)
    with contextlib.ExitStack() as stack:
        prober = stack.enter_context(socket.create_connection(server.address, DEADLINE, ("127.0.0.2", 0)))
        for _ in range(4 * MAX_CONNECTIONS):
            stack.enter_context(connected(server))
            assert eventually(lambda: len(server.listener.connection_threads()) <= MAX_CONNECTIONS)
        prober.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert prober.recv(100).startswith(b"HTTP/1.1 200 ")
    assert server.close(DEADLINE / 4)


def test_a_client_that_stops_reading_does_not_keep_the_port_open() -> None:
    server = MetricsServer("127.0.0.1", 0, pages(metrics=lambda: b"x" * 50_000_000))
    with connected(server) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert sock.recv(1) == b"H"
        begun = time.monotonic()
        assert server.close(DEADLINE / 4)
        assert time.monotonic() - begun < DEADLINE / 2


def test_a_page_that_hangs_cannot_hold_up_the_end() -> None:
    release = threading.Event()

    def hangs() -> dict[str, Any]:
        release.wait(DEADLINE)
        return {}

    server = MetricsServer("127.0.0.1", 0, pages(status=hangs))
    with connected(server) as sock:
        sock.sendall(b"GET /status HTTP/1.0\r\n\r\n")
        assert eventually(lambda: len(server.listener.connection_threads()) == 1)
        stuck = server.listener.connection_threads()
        begun = time.monotonic()
        assert not server.close(within=0.3)
        assert time.monotonic() - begun < DEADLINE / 2
        release.set()
        stuck[0].join(DEADLINE)
        assert not stuck[0].is_alive()


def test_out_of_file_descriptors_the_port_waits_and_then_answers() -> None:
    """The pending connection must neither end the server nor make it spin."""
    server = MetricsServer("127.0.0.1", 0, pages())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = socket.socket()
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        sock.settimeout(DEADLINE)
        sock.connect(server.address)
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        spent = time.process_time()
        time.sleep(0.4)
        assert time.process_time() - spent < 0.2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sock.recv(15) == b"HTTP/1.1 200 OK"
    sock.close()
    assert server.close(DEADLINE / 4)


@pytest.mark.parametrize(
    ("round", "ready", "said"),
    [
        (None, False, "no round yet"),
        (Round(3, (Member("a", "i", (0,)),)), True, "in round 3"),
        (Round(4, (Member("b", "i", (0,)),)), True, "round 4 runs without this node"),
        (Round(5, (), outcome="failed", exit_code=1), True, "the job has failed"),
    ],
)
def test_readyz_once_a_round_is_known(round: Round | None, ready: bool, said: str) -> None:
    """The answer names the round and whether the agent is a member."""
    loop: Any = SimpleNamespace(node="a", round=round)
    assert readiness(loop) == (ready, said)
