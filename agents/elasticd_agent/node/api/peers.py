"""Asks other nodes' daemons, with the token and the TLS that this one has.

It exists because what a rank wrote lies on its node only. What is asked for is never passed on a second time: others
are asked for what they have themselves (/v1/here/…). Every question has a deadline, and one silent node costs nobody
else's answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticd.errors import UsageError
from elasticd_agent.node.api.client import AgentClient, Reply, Unreachable, client_context
from elasticd_agent.system.addresses import parse_endpoint

MAX_PARALLEL = 16
MAX_NODES = 256


@dataclass(frozen=True, slots=True)
class Peers:
    """`token` is read whenever one is asked, so that a new one counts at once. `tls`: others show certificates; for
    `tls_name`, or for their addresses.
    """

    token: Callable[[], str | None]
    tls: bool = False
    ca: Path | None = None
    tls_name: str | None = None

    def request(
        self, address: str, method: str, path: str, query: Mapping[str, object] | None = None, within_s: float = 5.0
    ) -> Reply:
        """Raises Unreachable, which covers a daemon that does not let us in."""
        if not address:
            raise Unreachable("its daemon has no address that others reach")
        try:
            host, port = parse_endpoint(address)
            context = client_context(self.ca) if self.tls else None
        except UsageError as error:
            raise Unreachable(str(error)) from None
        client = AgentClient(None, host, port, self.token(), context, self.tls_name)
        reply = client.request(method, path, query, within_s=within_s)
        if reply.code in (401, 403):
            raise Unreachable(f"the daemon at {client} does not let this one in: {reply.why}")
        return reply

    def request_all(
        self,
        addresses: Mapping[str, str],
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        within_s: float = 5.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, dict[str, Any] | str]:
        """By node: the object it answered with, or the sentence why there is none. Done within `within_s`.

        `meanwhile` is done at the same time, on the caller's thread.
        """
        answers: dict[str, dict[str, Any] | str] = {}
        left = list(addresses.items())[:MAX_NODES]
        until = time.monotonic() + within_s

        def work() -> None:
            while left and (rest := until - time.monotonic()) > 0:
                try:
                    node, address = left.pop()
                except IndexError:  # another thread had the last one
                    return
                try:
                    reply = self.request(address, method, path, query, rest)
                    answers[node] = reply.document() if reply.code == 200 else reply.why
                except Unreachable as error:
                    answers[node] = str(error)
                except Exception as error:  # noqa: BLE001 one node's answer must not cost the others'
                    answers[node] = f"{type(error).__name__}: {error}"

        names = range(min(MAX_PARALLEL, len(left)))
        threads = [threading.Thread(target=work, name="elasticd-http-peers", daemon=True) for _ in names]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(max(0.0, until + 0.5 - time.monotonic()))
        silent, most = f"it did not answer within {within_s:.0f} s", f"not asked: {MAX_NODES} nodes are at once"
        asked = list(addresses)[:MAX_NODES]
        return {node: answers.get(node, silent) if node in asked else most for node in addresses}
