"""Opens the store of a job's rendezvous. Backends are imported here only: a job on one node needs none of them.

A new backend is a module below store/, a function here with a line in OPENERS, and its name in Rendezvous.backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from elasticd_agent.model.job import Policy, Rendezvous
from elasticd_agent.store import Store
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.system.addresses import is_local

FIRST_REQUEST_S = 30.0
"""How long the first request to a c10d store waits: its host may start later than the others, and imports torch."""
Log = Callable[[str], None]


def open_store(
    rendezvous: Rendezvous, python: str, policy: Policy, log: Log, may_host: bool = True
) -> tuple[Store, bool]:
    """The store, and whether this agent hosts it: it may, unless `may_host` is False and `is_host` not given.

    Raises StoreRefused for a store that can never work.
    """
    if rendezvous.is_host is None and not may_host:
        rendezvous = replace(rendezvous, is_host=False)
    return OPENERS[rendezvous.backend](rendezvous, python, policy, log)


def any_agent_may_lead(backend: str, store: Store) -> bool:
    """Whether any agent may lead, not only the store's host: if an agent hosts the store, the store ends with it."""
    return backend != "c10d" or bool(getattr(store, "standalone", False))


def _open_memory(rendezvous: Rendezvous, python: str, policy: Policy, log: Log) -> tuple[Store, bool]:
    return MemoryStore(), False


def _open_c10d(rendezvous: Rendezvous, python: str, policy: Policy, log: Log) -> tuple[Store, bool]:
    from elasticd_agent.store.c10d.connection import listen
    from elasticd_agent.store.c10d.store import C10dStore

    ((host, port),) = rendezvous.endpoints
    serve, listener = rendezvous.is_host, None
    if serve is None:
        # Of the agents on this machine, the first to listen hosts the store, also if they start at the same time.
        with contextlib.suppress(OSError):
            listener = listen(port) if is_local(host) else None
        serve = listener is not None
    first_s = min(FIRST_REQUEST_S, policy.join_timeout_s)
    times = {"timeout_s": policy.store_timeout_s, "start_timeout_s": first_s}
    return C10dStore(host, port, serve=serve, listener=listener, python=python, log=log, **times), serve


def _open_etcd(rendezvous: Rendezvous, python: str, policy: Policy, log: Log) -> tuple[Store, bool]:
    from elasticd_agent.store.etcd.store import EtcdStore

    login = {"tls": rendezvous.tls, "user": rendezvous.user, "password": rendezvous.password}
    return EtcdStore(rendezvous.endpoints, **login, timeout_s=policy.store_timeout_s, log=log), False  # type: ignore[arg-type]


OPENERS = {"memory": _open_memory, "c10d": _open_c10d, "etcd": _open_etcd}
