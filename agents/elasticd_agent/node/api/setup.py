"""Builds what the daemon serves over HTTP, from its settings: the desk, the routes and the server before them.

It exists so that the agent has one thing to open and to close. It answers nothing itself, and never reads a secret: who
needs the token reads its file whenever it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticd_agent.config.agent_settings import Settings
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.config.limits import refusal
from elasticd_agent.node.api.local import Here
from elasticd_agent.node.api.peers import Peers
from elasticd_agent.node.api.routes import Api
from elasticd_agent.node.api.server import DaemonServer, Listening, Routes
from elasticd_agent.node.api.service import Desk
from elasticd_agent.store import Store
from elasticd_agent.system.http_auth import TokenDoor
from elasticd_agent.telemetry.metrics_server import Pages


@dataclass(frozen=True, slots=True)
class Serving:
    """Open until closed. `address` is HOST:PORT's two parts; with `bind` 0.0.0.0 others need another host than that."""

    server: DaemonServer
    desk: Desk

    @property
    def address(self) -> tuple[str, int] | None:
        return self.server.address

    def close(self, within: float = 2.0) -> bool:
        return self.server.close(within)


Front = Callable[[Api, TokenDoor, bool], Routes]
"""What is served before the routes of the API; it hears whether browsers see TLS."""


def open_serving(
    settings: Callable[[], Settings],
    store: Store,
    pages: Callable[[Desk], Pages],
    front: Front = lambda api, token, tls: api,
) -> Serving:
    """`settings` are those that count now; those of where to listen, only now. Raises UsageError."""
    chosen = settings()
    http = chosen.http

    def check(job: JobFile) -> None:
        now = settings()
        wrong = refusal(now.limits, job, now.user)
        if wrong is not None:
            raise wrong

    here = Here(chosen.node, chosen.state_dir)
    token, tls = TokenDoor(http.token_file), http.tls_cert is not None
    peers = Peers(token.token, tls, http.tls_ca, http.tls_name)
    desk = Desk(store, here, peers, check)
    where = Listening(
        chosen.socket, http.bind, http.port, http.token_file, http.tls_cert, http.tls_key, http.users, http.groups
    )
    return Serving(DaemonServer(where, front(Api(desk, pages(desk)), token, tls)), desk)
