"""The audit log: which requests it records, who it says they are from, and what cannot flood it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from elasticd_agent.model.log_events import AuditEvent, LogEvent
from elasticd_agent.system.network.http_auth import AccessDenied
from elasticd_agent.system.network.http_server import HttpRequest, HttpResponse
from elasticd_daemon.api.audit import REPEAT_INTERVAL_S, AuditedRoutes, action_and_target
from elasticd_daemon.api.routes import ApiRoutes
from tests.daemon.served import TOKEN, Served


class Lines:
    """A log in memory."""

    lines_lost = 0

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []
        self.counted: list[str] = []
        self.now = 0.0

    def write(self, record: LogEvent) -> None:
        assert isinstance(record, AuditEvent)
        self.events.append(record)

    def close(self) -> None:
        pass

    def routes(self, api: ApiRoutes, *_: object) -> AuditedRoutes:
        return AuditedRoutes(api, self, self.counted.append, lambda: self.now)

    def rows(self) -> list[tuple[str, str, str, int]]:
        return [(one.by, one.action, one.target, one.status) for one in self.events]


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("POST", "/v1/jobs", ("submit", "")),
        ("POST", "/v1/jobs/lm/cancel", ("cancel", "lm")),
        ("POST", "/v1/jobs/l%20m/dump", ("dump", "l m")),
        ("POST", "/v1/local/jobs/lm/dump", ("dump", "lm")),
        ("POST", "/v1/nodes/n1/cordon", ("cordon", "n1")),
        ("POST", "/v1/nodes/n1/drain", ("drain", "n1")),
        ("POST", "/v1/nodes/n1/uncordon", ("uncordon", "n1")),
        ("POST", "/login", ("login", "")),
        ("GET", "/login", ("login", "")),
        ("POST", "/v1/login", ("login", "code")),
        ("GET", "/v1/jobs/lm/logs", ("read", "lm")),
        ("GET", "/v1/local/jobs/lm/logs", ("read", "lm")),
        ("GET", "/v1/jobs/lm/explain", ("read", "lm")),
        ("GET", "/jobs/lm", ("read", "lm")),
        ("GET", "/v1/jobs", None),
        ("GET", "/v1/jobs/lm", None),
        ("GET", "/metrics", None),
        ("GET", "/", None),
    ],
)
def test_recorded_requests(method: str, path: str, found: tuple[str, str] | None) -> None:
    assert action_and_target(method, path) == found


def test_who_did_what(tmp_path: Path) -> None:
    lines = Lines()
    with closing(Served(tmp_path / "one", front=lines.routes)) as one:
        number = one.submit("lm")
        one.announce()
        one.log(1, 0, "stdout", "hello", job="lm")
        one.place("lm", number, "n1")
        for _ in range(3):
            assert one.unix().get("/v1/jobs/lm/logs").code == 200
        assert one.tcp().post("/v1/nodes/n1/drain").code == 200
        assert one.tcp().post("/v1/jobs/no/cancel").code == 404
        for number in range(3):
            assert one.tcp().get(f"/v1/jobs/invented-{number}/logs").code == 404
        for _ in range(3):
            assert one.tcp("x" * 40).get("/v1/jobs").code == 401
    me = lines.events[0].by
    assert lines.rows() == [
        (me, "submit", "lm", 201),
        (me, "read", "lm", 200),
        ("the token's holder at 127.0.0.1", "drain", "n1", 200),
        ("the token's holder at 127.0.0.1", "cancel", "no", 404),
        ("the token's holder at 127.0.0.1", "read", "invented-0", 404),
        ("127.0.0.1", "denied", "GET /v1/jobs", 401),
    ]
    assert lines.counted == [one.action for one in lines.events]
    assert TOKEN not in repr(lines.events)


def test_a_denied_caller_is_named_once_a_minute_for_each_action(tmp_path: Path) -> None:
    lines = Lines()
    file = tmp_path / "grafana"
    file.write_text("g" * 40)
    file.chmod(0o600)
    where = {"tokens": {"grafana": file}, "read_only": ("grafana",)}
    with closing(Served(tmp_path / "one", front=lines.routes, where=where)) as one:
        grafana = one.tcp("g" * 40)
        for path in ("jobs/lm/cancel", "nodes/n1/drain", *(f"jobs/x{n}/cancel" for n in range(50)), "no", "no2"):
            assert grafana.post(f"/v1/{path}").code == 403
        assert one.tcp("x" * 40).get("/v1/jobs").code == 401
    by = "token grafana at 127.0.0.1"
    assert lines.rows() == [
        (by, "denied", "POST /v1/jobs/lm/cancel", 403),
        (by, "denied", "POST /v1/nodes/n1/drain", 403),
        (by, "denied", "POST /v1/no", 403),
        ("127.0.0.1", "denied", "GET /v1/jobs", 401),
    ]


def test_an_error_is_recorded() -> None:
    lines = Lines()

    class Broken:
        def answer(self, request: HttpRequest) -> HttpResponse:
            raise RuntimeError

    audited = AuditedRoutes(cast(Any, Broken()), lines, lines.counted.append, lambda: lines.now)
    with pytest.raises(RuntimeError):
        audited.answer(HttpRequest("POST", "/v1/nodes/n1/drain", "", "root"))
    assert lines.rows() == [("root", "drain", "n1", 500)]


def test_strangers_cannot_flood_it(tmp_path: Path) -> None:
    lines = Lines()
    denied = AccessDenied(401, "no")
    reject: Callable[[str, str], object]
    with closing(Served(tmp_path / "one")) as one:
        audited = lines.routes(ApiRoutes(one.service, one.pages))
        reject = lambda path, host: audited.admit_or_reject(HttpRequest("GET", path, "", client_host=host), denied)  # noqa: E731
        for i in range(100):
            reject(f"/{i}\n", "10.0.0.1")
        assert lines.rows() == [("10.0.0.1", "denied", "GET /0\\n", 401)]
        lines.now += REPEAT_INTERVAL_S
        reject("/" + "x" * 9000, "10.0.0.1")
        assert len(lines.events) == 2 and len(lines.events[1].target) == 200
        for i in range(5000):
            reject("/", f"10.1.{i >> 8}.{i & 255}")
        written = len(lines.events)
        reject("/", "10.1.0.0")
        assert len(lines.events) == written + 1, "that caller has made room"
        reject("/", "10.1.19.135")
        assert len(lines.events) == written + 1


def test_login_attempts_cannot_flood_it() -> None:
    lines = Lines()
    statuses = [*[401] * 100, 303, 303, 429]

    class Login:
        def answer(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(statuses.pop(0), b"")

    audited = AuditedRoutes(cast(Any, Login()), lines, lines.counted.append, lambda: lines.now)
    while statuses:
        audited.answer(HttpRequest("POST", "/login", "", "", client_host="10.0.0.1"))
    assert [one.status for one in lines.events] == [401, 303, 303]
