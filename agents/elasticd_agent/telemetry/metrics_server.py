"""The agent's HTTP port: /metrics for Prometheus, /healthz and /readyz for whoever supervises it, /status for a person.

It only reads: every page is a callable given at the start, called on a connection's own thread, which must answer from
a snapshot without waiting for the deciding thread. Connections are bounded in number, size and time, so neither a slow
reader nor a flood ever reaches the job. It never takes a request body and never resolves a name while serving.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from elasticd.errors import UsageError
from elasticd_agent.system.addresses import format_endpoint
from elasticd_agent.system.http_listener import HttpListener

DEFAULT_ADDRESS = "127.0.0.1"
# Prometheus, two probes and a person fit many times; a leak in a prober must not cost the agent memory.
MAX_CONNECTIONS = 16
# Prometheus' own default scrape timeout is 10 s: nobody who is still there is cut off.
CONNECTION_SECONDS = 10.0
TEXT_TYPE = "text/plain; charset=utf-8"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger("elasticd.http")


@dataclass(frozen=True, slots=True)
class HealthProbeResult:
    """Whether a probe passes, and the sentence that says why."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class MonitoringPages:
    """What is served. Each is called from another thread, up to MAX_CONNECTIONS at once, and must not wait."""

    metrics: Callable[[], bytes]
    status: Callable[[], Mapping[str, Any]]
    healthy: Callable[[], HealthProbeResult]
    ready: Callable[[], HealthProbeResult]


class NullMetricsServer:
    """The server of an agent without --metrics-port."""

    address: tuple[str, int] | None = None
    url = ""

    def close(self, within: float = 2.0) -> bool:
        return True


class MetricsServer:
    """Serves `pages` until closed. `address` is where, with the real port when 0 was asked for."""

    def __init__(
        self, address: str, port: int, pages: MonitoringPages, connection_s: float = CONNECTION_SECONDS
    ) -> None:
        """Raises UsageError when the port cannot be had. A connection is cut after `connection_s` seconds."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made = type("_Bound", (_Listener,), {"address_family": family})
        try:
            self._listener: _Listener = made((address, port), pages, connection_s)
        except (OSError, OverflowError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            advice = "choose another one, or 0 for any that is free"
            raise UsageError(f"--metrics-port {port}: {address} port {port}: {why}; {advice}") from error
        host, bound = self._listener.server_address[:2]
        self.address: tuple[str, int] | None = (str(host), int(bound))
        self.url = f"http://{format_endpoint(*self.address)}"
        self._listener.start()

    def close(self, within: float = 2.0) -> bool:
        """Stop listening, cut every connection; True when every thread is gone within `within` seconds."""
        return self._listener.close(within)


def open_metrics_server(
    address: str | None, port: int | None, pages: MonitoringPages
) -> MetricsServer | NullMetricsServer:
    """The server at `address`:`port`, or one that does nothing without a port. Raises UsageError."""
    return NullMetricsServer() if port is None else MetricsServer(address or DEFAULT_ADDRESS, port, pages)


class _Listener(HttpListener):
    def __init__(self, address: tuple[str, int], pages: MonitoringPages, connection_s: float) -> None:
        self.pages = pages
        super().__init__(address, _Handler, connection_s=connection_s, most=MAX_CONNECTIONS, name="the metrics port")


class _Handler(BaseHTTPRequestHandler):
    # One request a connection: nothing to keep alive, nothing to pipeline.
    protocol_version = "HTTP/1.0"
    server_version, sys_version = "elasticd", ""
    server: _Listener

    def setup(self) -> None:
        self.request.settimeout(self.server.connection_s)
        super().setup()

    def do_GET(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self._answer(413, "a request here has no body\n")
            return
        path = self.path.partition("?")[0]
        try:
            code, body, kind = self._page(path)
        except Exception:  # noqa: BLE001 a page's defect is that page's, never the agent's
            _log.warning("the metrics port could not make %s", path, exc_info=True)
            code, body, kind = 500, "this page could not be made; the agent's log says why\n", TEXT_TYPE
        self._answer(code, body, kind)

    def _page(self, path: str) -> tuple[int, str | bytes, str]:
        pages = self.server.pages
        if path == "/metrics":
            return 200, pages.metrics(), METRICS_TYPE
        if path == "/status":
            return 200, json.dumps(pages.status(), indent=2, default=str) + "\n", "application/json"
        if path in ("/healthz", "/readyz"):
            verdict = pages.healthy() if path == "/healthz" else pages.ready()
            return 200 if verdict.ok else 503, verdict.reason + "\n", TEXT_TYPE
        return 404, "there are /metrics /healthz /readyz /status\n", TEXT_TYPE

    do_HEAD = do_GET  # noqa: N815 the names are http.server's

    def _refuse(self) -> None:
        self._answer(405, "only GET and HEAD\n", allow="GET, HEAD")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse  # noqa: N815

    def _answer(self, code: int, body: str | bytes, kind: str = TEXT_TYPE, allow: str = "") -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        if allow:
            self.send_header("Allow", allow)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
