"""Builds the HTTP API from the agent's settings. The token's file is read whenever the token is needed."""

from __future__ import annotations

from collections.abc import Callable

from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.config.limits import refusal
from elasticd_agent.node.api.local import LocalJobs
from elasticd_agent.node.api.peers import Peers
from elasticd_agent.node.api.routes import ApiRoutes
from elasticd_agent.node.api.server import ApiServer, ListenOptions
from elasticd_agent.node.api.service import JobService
from elasticd_agent.store import Store
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.system.http_auth import TokenAuth
from elasticd_agent.system.http_server import Routes
from elasticd_agent.telemetry.metrics_server import MonitoringPages

WrapRoutes = Callable[[ApiRoutes, TokenAuth, bool], Routes]
"""Makes the routes in front of the API's; the flag: browsers use TLS."""


def open_api(
    settings: Callable[[], NodeSettings],
    store: Store,
    cache: StoreCache,
    pages: Callable[[JobService], MonitoringPages],
    wrap: WrapRoutes = lambda api, token, tls: api,
) -> ApiServer:
    """`settings` returns the present ones; the listeners keep those of the start. Raises UsageError."""
    chosen = settings()
    http = chosen.http

    def check(job: JobFile) -> None:
        now = settings()
        wrong = refusal(now.limits, job, now.user)
        if wrong is not None:
            raise wrong

    token, tls = TokenAuth(http.token_file), http.tls_cert is not None
    peers = Peers(token.token, tls, http.tls_ca, http.tls_name)
    service = JobService(store, LocalJobs(chosen.node, chosen.state_dir), peers, check, cache=cache)
    options = ListenOptions(
        chosen.socket_path, http.bind, http.port, http.token_file, http.tls_cert, http.tls_key, http.users, http.groups
    )
    return ApiServer(options, wrap(ApiRoutes(service, pages(service)), token, tls))
