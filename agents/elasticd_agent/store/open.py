"""Opens the store a rendezvous names. Adapters are imported when they are needed: a job on one node pays for none."""

from __future__ import annotations

import socket
from collections.abc import Callable

from elasticd_agent.model.job import Policy, Rendezvous
from elasticd_agent.store import Store
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.system.addresses import is_local

FIRST_REQUEST_S = 30.0
"""How long the first request to a c10d store waits: its host may start later than everybody else, and imports torch."""


def open_store(rendezvous: Rendezvous, python: str, policy: Policy, log: Callable[[str], None]) -> tuple[Store, bool]:
    """The store, and whether it is this agent that hosts it. Raises StoreRefused for what can never work."""
    match rendezvous.backend:
        case "etcd":
            from elasticd_agent.store.etcd.store import EtcdStore

            return (
                EtcdStore(
                    rendezvous.endpoints,
                    tls=rendezvous.tls,
                    user=rendezvous.user,
                    password=rendezvous.password,
                    timeout_s=policy.store_timeout_s,
                    log=log,
                ),
                False,
            )
        case "c10d":
            from elasticd_agent.store.c10d.store import C10dStore

            ((host, port),) = rendezvous.endpoints
            serve = (is_local(host) and _is_free(port)) if rendezvous.is_host is None else rendezvous.is_host
            timeout_s, first_s = policy.store_timeout_s, min(FIRST_REQUEST_S, policy.join_timeout_s)
            store = C10dStore(
                host, port, serve=serve, python=python, timeout_s=timeout_s, start_timeout_s=first_s, log=log
            )
            return store, serve
        case "memory":
            return MemoryStore(), False


def any_agent_may_lead(backend: str, store: Store) -> bool:
    """Whether any agent may plan, not only the store's host: not where an agent hosts it, with whom it would end."""
    return backend != "c10d" or bool(getattr(store, "standalone", False))


def _is_free(port: int) -> bool:
    """False where somebody listens there already: several agents on one machine, of which the first is the host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
