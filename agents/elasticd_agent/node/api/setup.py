"""Builds what the daemon serves over HTTP, from its settings: the desk, the routes and the server before them.

It exists so that the agent has one thing to open and to close. It answers nothing itself, and never reads a secret: who
needs the token reads its file whenever it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.config.limits import refusal
from elasticd_agent.node.api.local import LocalJobs
from elasticd_agent.node.api.peers import Peers
from elasticd_agent.node.api.routes import ApiRoutes
from elasticd_agent.node.api.server import ApiServer, ListenOptions, Routes
from elasticd_agent.node.api.service import JobService
from elasticd_agent.store import Store
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.system.http_auth import TokenAuth
from elasticd_agent.telemetry.metrics_server import MonitoringPages


@dataclass(frozen=True, slots=True)
class RunningApi:
    """Open until closed. `address` is HOST:PORT's two parts; with `bind` 0.0.0.0 others need another host than that."""

    server: ApiServer
    service: JobService

    @property
    def address(self) -> tuple[str, int] | None:
        return self.server.address

    def close(self, within: float = 2.0) -> bool:
        return self.server.close(within)


WrapRoutes = Callable[[ApiRoutes, TokenAuth, bool], Routes]
"""What is served before the routes of the API; it hears whether browsers see TLS."""


def open_api(
    settings: Callable[[], NodeSettings],
    store: Store,
    cache: StoreCache,
    pages: Callable[[JobService], MonitoringPages],
    front: WrapRoutes = lambda api, token, tls: api,
) -> RunningApi:
    """`settings` are those that count now; those of where to listen, only now. Raises UsageError."""
    chosen = settings()
    http = chosen.http

    def check(job: JobFile) -> None:
        now = settings()
        wrong = refusal(now.limits, job, now.user)
        if wrong is not None:
            raise wrong

    here = LocalJobs(chosen.node, chosen.state_dir)
    token, tls = TokenAuth(http.token_file), http.tls_cert is not None
    peers = Peers(token.token, tls, http.tls_ca, http.tls_name)
    desk = JobService(store, here, peers, check, cache=cache)
    where = ListenOptions(
        chosen.socket_path, http.bind, http.port, http.token_file, http.tls_cert, http.tls_key, http.users, http.groups
    )
    return RunningApi(ApiServer(where, front(ApiRoutes(desk, pages(desk)), token, tls)), desk)
