"""The monitoring pages: /metrics for Prometheus, /healthz and /readyz for probes, /status for people; and a port
that answers nothing but probes.

Each page is a callable that answers from a snapshot, on a connection's thread, and never waits for the main loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticd_agent.system.network.addresses import format_endpoint
from elasticd_agent.system.network.http_server import (
    TEXT_TYPE,
    HttpResponse,
    RouteHandler,
    RouteTable,
    json_response,
    listen_tcp,
)

MAX_CONNECTIONS = 16
"""Prometheus, two probes and a person fit many times; a leak in a prober must not cost the agent memory."""
CONNECTION_TIMEOUT_S = 10.0
"""Prometheus' own default scrape timeout: a scrape that still waits is never cut."""
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HealthProbeResult:
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class MonitoringPages:
    """Each is called from other threads, up to MAX_CONNECTIONS at once, and must not wait."""

    metrics: Callable[[], bytes]
    status: Callable[[], Mapping[str, Any]]
    healthy: Callable[[], HealthProbeResult]
    ready: Callable[[], HealthProbeResult]

    def handlers(self) -> dict[str, RouteHandler]:
        """The handlers of a RouteTable."""
        return {
            "GET /metrics": lambda request: HttpResponse(200, self.metrics(), METRICS_CONTENT_TYPE),
            "GET /healthz": lambda request: _probe_response(self.healthy()),
            "GET /readyz": lambda request: _probe_response(self.ready()),
            "GET /status": lambda request: json_response(self.status()),
        }


@dataclass(frozen=True, slots=True)
class HealthPages:
    """The pages of a port for probes from other machines, which shows nothing else of the job."""

    healthy: Callable[[], HealthProbeResult]

    def handlers(self) -> dict[str, RouteHandler]:
        return dict.fromkeys(("GET /", "GET /healthz"), lambda request: _probe_response(self.healthy()))


def _probe_response(found: HealthProbeResult) -> HttpResponse:
    return HttpResponse(200 if found.ok else 503, found.reason.encode("utf-8", "replace") + b"\n", TEXT_TYPE)


class MetricsServer:
    """Serves `pages` until closed. `address` has the real port if 0 was requested."""

    def __init__(
        self,
        address: str,
        port: int,
        pages: MonitoringPages | HealthPages,
        connection_s: float = CONNECTION_TIMEOUT_S,
        option: str = "--metrics-port",
    ) -> None:
        """Raises UsageError, which begins with `option`, if it cannot listen there. A connection is cut after
        `connection_s` seconds.
        """
        self.listener = listen_tcp(
            address,
            port,
            RouteTable(pages.handlers()),
            option=option,
            advice="choose another one, or 0 for any free port",
            name="the metrics port",
            max_connections=MAX_CONNECTIONS,
            request_timeout_s=connection_s,
        )
        self.address = self.listener.bound_address
        self.url = f"http://{format_endpoint(*self.listener.bound_address)}"
        self.listener.start()

    def close(self, within: float = 2.0) -> bool:
        """Stop listening, cut every connection; True when every thread is gone within `within` seconds."""
        return self.listener.close(within)
