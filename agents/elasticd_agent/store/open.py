"""Opens the store of a job's rendezvous. Backends are imported here only: a job on one node needs none of them.

A new backend is a module below store/, a function here with a line in OPENERS, and its name in Rendezvous.backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from elasticd_agent.model.job import Policy, Rendezvous
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.records import store_term
from elasticd_agent.store import JobStore, Store
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.system.network.addresses import is_local

if TYPE_CHECKING:
    from elasticd_agent.store.c10d.signpost import Signpost

FIRST_REQUEST_TIMEOUT_S = 30.0
"""The first request to a c10d store waits so long: its host may start later than the others, and imports torch."""
MIN_NODES_FOR_TAKEOVER = 3
"""Nodes of a job of which another one may host the store."""
Log = Callable[[str], None]


def open_store(
    rendezvous: Rendezvous, python: str, policy: Policy, log: Log, may_host: bool = True, incarnation: str = ""
) -> JobStore:
    """The store. This agent may host it, unless `may_host` is False and `is_host` not given.

    Raises StoreRefused for a store that can never work.
    """
    if rendezvous.is_host is None and not may_host:
        rendezvous = replace(rendezvous, is_host=False)
    return OPENERS[rendezvous.backend](rendezvous, python, policy, log, incarnation)


def _open_c10d(rendezvous: Rendezvous, python: str, policy: Policy, log: Log, incarnation: str) -> JobStore:
    from elasticd_agent.store.c10d.connection import listen
    from elasticd_agent.store.c10d.store import C10dStore

    ((host, port),) = rendezvous.endpoints
    serve, listener = rendezvous.is_host, None
    if serve is None:
        # Of the agents on this machine, the first to listen hosts the store, also if they start at the same time.
        with contextlib.suppress(OSError):
            listener = listen(port) if is_local(host) else None
        serve = listener is not None
    first_s = min(FIRST_REQUEST_TIMEOUT_S, policy.join_timeout_s)
    times = {"timeout_s": policy.store_timeout_s, "start_timeout_s": first_s}
    # Of two members, the one that is left is no majority: it waits for the host.
    term = store_term(0, incarnation) if serve and rendezvous.max_nodes >= MIN_NODES_FOR_TAKEOVER else 0
    return C10dStore(host, port, serve=serve, listener=listener, term=term, python=python, log=log, **times)


def open_signpost(rendezvous: Rendezvous, python: str, policy: Policy, keys: Keys, log: Log) -> Signpost:
    """The signpost at the original endpoint of a job whose store an agent hosts."""
    from elasticd_agent.store.c10d.signpost import Signpost
    from elasticd_agent.store.c10d.store import C10dStore

    (endpoint,) = rendezvous.endpoints

    def open_store() -> Store:
        return C10dStore(
            *endpoint,
            serve=False,
            python=python,
            timeout_s=policy.store_timeout_s,
            start_timeout_s=FIRST_REQUEST_TIMEOUT_S,
        )

    return Signpost(endpoint, keys.round, open_store, log)


def _open_etcd(rendezvous: Rendezvous, python: str, policy: Policy, log: Log, incarnation: str) -> JobStore:
    from elasticd_agent.store.etcd.store import EtcdStore

    login = {"tls": rendezvous.tls, "user": rendezvous.user, "password": rendezvous.password}
    return EtcdStore(rendezvous.endpoints, **login, timeout_s=policy.store_timeout_s, log=log)  # type: ignore[arg-type]


OPENERS = {"memory": lambda *_: MemoryStore(), "c10d": _open_c10d, "etcd": _open_etcd}
