"""Registers this node: keeps its status in the store under a lease, and other keys of this agent under the same lease.

`inventory` collects the static part of the status. A status left by an earlier process of this agent, killed or
replaced, is taken over at once. Another agent's is never touched while its lease lives.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from elasticd.errors import ElasticdError, StoreRefused, StoreUnavailable, WireError
from elasticd_agent.model.keys import decode_record
from elasticd_agent.model.version import version
from elasticd_agent.store import Store
from elasticd_agent.store.lease import LeasedKey, RenewalListener, ignore_renewals
from elasticd_agent.system.gpus.devices import cpu_count
from elasticd_agent.system.processes import procfs
from elasticd_daemon import keys
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.records import KnownNode, NodeStatus

RegisteredAnew = bool
"""True: the store had no status of the node from this agent."""


class NodeNameConflict(ElasticdError):
    """Another agent has this node's name; the sentence says which."""


class NodeStatusPublisher:
    """Belongs to one thread. Every method, and those of `key`, the status in the store, may raise StoreUnavailable."""

    def __init__(
        self,
        store: Store,
        status: NodeStatus,
        lease_s: float,
        renewal_s: float,
        on_renewal: RenewalListener = ignore_renewals,
    ) -> None:
        self._store = store
        self._status = status
        self._known_node_written = False
        self.key = LeasedKey(
            store, keys.NODES + status.node, lease_s, renewal_s, is_own=self._is_own, on_renewal=on_renewal
        )

    @property
    def registered(self) -> bool:
        return self.key.lease is not None

    def publish(self, status: NodeStatus, now: float) -> RegisteredAnew:
        """Have `status` in the store. Raises NodeNameConflict."""
        alive = self.key.renew(now)
        self._known_node_written &= status.address == self._status.address
        if alive and (status == self._status or self.key.replace(status.to_json())):
            self._status = status
            self._write_known_node()
            return False
        if not self.key.create(status.to_json(), now, self._own_or_raise):
            raise StoreUnavailable(f"{self.key.key}: other agents write it as fast as this one")
        self._status = status
        self._known_node_written = False
        return True

    def leave(self) -> None:
        """Nobody misses this node then, unless another agent has its name. May raise StoreRefused."""
        self.key.withdraw()
        other = self._store.read(self.key.key)
        if other is None or self._is_own(other.value):
            self._store.delete(keys.KNOWN_NODES + self._status.node)

    def _write_known_node(self) -> None:
        """A lost race is the scheduler's, which sees that this node is there."""
        if self._known_node_written:
            return
        key, value = keys.KNOWN_NODES + self._status.node, KnownNode(self._status.node, self._status.address).to_json()
        with contextlib.suppress(StoreRefused):  # by the role of a node that an older version's page has made
            entry = self._store.read(key)
            if entry is None or entry.value != value:
                self._store.compare_and_swap(key, None if entry is None else entry.version, value)
        self._known_node_written = True

    def _own_or_raise(self, value: bytes) -> bool:
        other = self._decode(value)
        if other is not None and other.incarnation == self._status.incarnation:
            return True
        where = f", at {other.address}" if other is not None and other.address else ""
        raise NodeNameConflict(
            f"another agent is node {self._status.node!r}{where}: give this one another name (node in agent.toml), "
            "or stop that one"
        )

    def _is_own(self, value: bytes) -> bool:
        other = self._decode(value)
        return other is not None and other.incarnation == self._status.incarnation

    def _decode(self, value: bytes) -> NodeStatus | None:
        try:
            return decode_record(NodeStatus, self.key.key, value)
        except WireError:
            return None


def inventory(settings: NodeSettings, incarnation: str, environ: Mapping[str, str]) -> NodeStatus:
    return NodeStatus(
        node=settings.node,
        incarnation=incarnation,
        slots=settings.slot_count(environ),
        gpus=settings.devices(environ),
        cpus=cpu_count(),
        memory_bytes=_memory_bytes(),
        elasticd=version(),
        python=platform.python_version(),
        torch=_torch_version(),
        driver=_driver_version(),
        labels=settings.labels,
    )


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _torch_version() -> str:
    """The version in the agent's environment; a job may use another one."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    version = re.search(rb"Kernel Module(?: for \S+)?\s+([0-9.]+)", procfs.read(str(path)))
    return version[1].decode() if version else ""
