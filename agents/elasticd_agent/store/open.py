"""Opens the store a rendezvous names. Adapters are imported when they are needed: a job on one node pays for none."""

from __future__ import annotations

import socket
from collections.abc import Callable

from elasticd_agent.model.job import Policy, Rendezvous
from elasticd_agent.store import Store
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.system.addresses import is_own

FIRST_S = 30.0
"""How long the first request to a c10d store waits: its host may start later than everybody else, and imports torch."""


def open_store(meets: Rendezvous, python: str, policy: Policy, say: Callable[[str], None]) -> tuple[Store, bool]:
    """The store, and whether it is this agent that hosts it. Raises StoreRefused for what can never work."""
    match meets.backend:
        case "etcd":
            from elasticd_agent.store.etcd.store import EtcdStore

            return (
                EtcdStore(
                    meets.endpoints,
                    tls=meets.tls,
                    user=meets.user,
                    password=meets.password,
                    timeout_s=policy.store_timeout_s,
                    say=say,
                ),
                False,
            )
        case "c10d":
            from elasticd_agent.store.c10d.store import C10dStore

            ((host, port),) = meets.endpoints
            serve = (is_own(host) and _free(port)) if meets.is_host is None else meets.is_host
            timeout_s, first_s = policy.store_timeout_s, min(FIRST_S, policy.join_timeout_s)
            store = C10dStore(
                host, port, serve=serve, python=python, timeout_s=timeout_s, start_timeout_s=first_s, say=say
            )
            return store, serve
        case "memory":
            return MemoryStore(), False


def others_plan(backend: str, store: Store) -> bool:
    """Whether any agent may plan, not only the store's host: not where an agent hosts it, with whom it would end."""
    return backend != "c10d" or bool(getattr(store, "apart", False))


def _free(port: int) -> bool:
    """False where somebody listens there already: several agents on one machine, of which the first is the host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
