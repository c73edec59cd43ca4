"""Requests to other nodes' agents, with a credential from this agent's token, and its TLS settings.

Requests go to /v1/local/…, so that no agent forwards them again. Each has a deadline, and one silent node does not
delay the answers of the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticd import bounded_json
from elasticd.errors import UsageError
from elasticd_agent.system.network.addresses import parse_endpoint
from elasticd_agent.system.network.http_auth import AGENT_AUTH_SCHEME, agent_credential, token_digest
from elasticd_daemon.api.client import AgentClient, Reply, Unreachable, client_tls_context
from elasticd_daemon.api.schema import Answer

MAX_PARALLEL_REQUESTS = 16
MAX_ASKED_NODES = 256
MAX_ANSWER_BYTES = 4 << 20
"""The limit for a node that need not be trusted; many answer at once."""


@dataclass(frozen=True, slots=True)
class Peers:
    token: Callable[[], str | None]  #: called for each request, so that a new token counts at once
    tls: bool = False
    ca: Path | None = None
    tls_name: str | None = None  #: the name in the others' certificates, if not their addresses

    def request(
        self,
        address: str,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        within_s: float = 5.0,
    ) -> Reply:
        """Raises Unreachable, also if the agent denies access."""
        if not address:
            raise Unreachable("its agent has no address that other nodes can reach (http.bind in its agent.toml)")
        try:
            host, port = parse_endpoint(address)
            context = client_tls_context(self.ca) if self.tls else None
        except UsageError as error:
            raise Unreachable(str(error)) from None
        token = self.token()
        given = None if token is None else agent_credential(token_digest(token), address)
        client = AgentClient(
            None,
            host,
            port,
            given,
            context,
            self.tls_name,
            AGENT_AUTH_SCHEME,
            MAX_ANSWER_BYTES,
            bounded_json.MAX_VALUES,
        )
        reply = client.request(method, path, query, within_s=within_s)
        if reply.code in (401, 403):
            raise Unreachable(f"the agent at {client} denies access: {reply.why}")
        return reply

    def request_all(
        self,
        addresses: Mapping[str, str],
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        within_s: float = 5.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, Answer | str]:
        """Each node's answer, or why there is none; within `within_s`. `meanwhile` runs on the caller's thread."""
        answers: dict[str, Answer | str] = {}
        left = list(addresses.items())[:MAX_ASKED_NODES]
        until = time.monotonic() + within_s

        def work() -> None:
            while left and (rest := until - time.monotonic()) > 0:
                try:
                    node, address = left.pop()
                except IndexError:  # another thread took the last one
                    return
                try:
                    reply = self.request(address, method, path, query, rest)
                    answers[node] = reply.document() if reply.code == 200 else reply.why
                except Unreachable as error:
                    answers[node] = str(error)
                except Exception as error:  # noqa: BLE001 one node's answer must not cost the others'
                    answers[node] = f"{type(error).__name__}: {error}"

        names = range(min(MAX_PARALLEL_REQUESTS, len(left)))
        threads = [threading.Thread(target=work, name="elasticd-http-peers", daemon=True) for _ in names]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(max(0.0, until + 0.5 - time.monotonic()))
        late = f"it did not answer within {within_s:.0f} s"
        beyond = f"not asked: at most {MAX_ASKED_NODES} nodes are"
        reached = list(addresses)[:MAX_ASKED_NODES]
        return {node: answers.get(node, late) if node in reached else beyond for node in addresses}
