"""Maintenance of the TCPStore by the process that hosts it: ends leases, removes tombstones, repairs watches.

A TCPStore has no leases and removes nothing by itself. Renewals are counters in the store: one that has not moved for
its lease's time on this process's clock, while this process was awake, has ended.

Time is the host's own and counts only turns in which it ran (`awake_s`). A host that was stopped or suspended for ten
seconds could not have seen a renewal in them, and ending a lease for that would kill a healthy job. For the same reason
no other clock is read: holders send no times, only counts.

Every decision is a compare-and-swap against the value that was read. A lease is ended by swapping the resting count for
ENDED_LEASE_COUNT, so a renewal that arrives in between wins; a key is removed by swapping its envelope for a tombstone,
so a new value that arrives in between stays.

A tombstone keeps the version of a deleted key for `TOMBSTONE_S`, much longer than any request takes. Within that time
no client still holds an older version of the key, so its removal cannot make an old version valid again. Removal has
three steps (REMOVING, the name out of the index, the key itself); a client that meets the first one waits for the host.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elasticd_agent.store.c10d import tcp_store as tcp
from elasticd_agent.store.c10d.client_process import PROTOCOL_VERSION, WATCH_RECHECK_S, remove
from elasticd_agent.system.network.tcp_store import with_listening_socket

TURN_S = 0.2
"""A lease may end so late; 0.2 s cost 0.2 % of a core."""
SWEEP_INTERVAL_S = 5.0
TOMBSTONE_S = 30.0
"""Much longer than any request: a client that read a key before its deletion, or its name, is done by then."""
DROP_UNWATCHED_AFTER_S = 4 * WATCH_RECHECK_S
MAX_CHANGES_PER_TURN = 256
_EMPTY_TOMBSTONE = tcp.Envelope(tcp.KeyState.TOMBSTONE, 0, "", b"")


def serve(
    tcp_store: Callable[..., Any],
    listener: socket.socket,
    channel: socket.socket,
    standalone: bool = False,
    term: int = 0,
) -> None:
    """Serve on an already listening socket until the channel's end of file. `standalone`: by no agent of a job."""
    port = listener.getsockname()[1]
    # The store listens on all addresses of the listener's family; this process uses the nearest.
    wire = tcp.TcpStoreConnection(
        with_listening_socket(tcp_store), "127.0.0.1", port, 10.0, is_master=True, master_listen_fd=listener.detach()
    )
    maintenance = HostMaintenance(wire)
    maintenance.initialize(standalone, term)
    channel.settimeout(TURN_S)
    while True:
        try:
            if not channel.recv(1):
                return
        except TimeoutError:
            maintenance.turn(time.monotonic())


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    count: bytes | None
    count_moved_at: float
    ended_at: float | None = None


@dataclass(slots=True)
class _WatchedPrefix:
    last_change: int
    watchers_moved_at: float
    watchers_count: bytes | None = None
    gap_number: int | None = None  #: the number that was missing at the last turn
    old_changes: deque[tuple[float, int]] = field(default_factory=deque)
    last_deleted: int = 0


class HostMaintenance:
    """`turn` is called every TURN_S with a monotonic time."""

    def __init__(self, wire: tcp.TcpStoreConnection) -> None:
        self._wire = wire
        self.awake_s = 0.0
        """Seconds for which this process was awake: a suspended host must not end all leases."""
        self._last: float | None = None
        self._leases: dict[str, _Lease] = {}
        self._watched: dict[str, _WatchedPrefix] = {}
        self._gone_since: dict[str, tuple[bytes | None, float]] = {}
        self._swept_at = 0.0
        self._swept: bytes | None = None

    def initialize(self, standalone: bool = False, term: int = 0) -> None:
        # A restarted host has an empty store, whose versions must differ from those before. Milliseconds grow faster
        # than versions, and the random part separates two starts in one millisecond or after a clock set back.
        self._wire.set(tcp.VERSION_COUNTER, str((time.time_ns() // 1_000_000 << 20) + secrets.randbits(20)).encode())
        for register in (tcp.DIRECTORY_REGISTER, tcp.LEASE_REGISTER, tcp.WATCHED_PREFIX_REGISTER):
            self._wire.set(register, tcp.encode_entries(()))
        host = tcp.STANDALONE_SUFFIX if standalone else f"{tcp.TERM_FIELD}{term}" if term else ""
        self._wire.set(tcp.HOST_MARKER, f"{PROTOCOL_VERSION} {secrets.token_hex(8)}{host}".encode())

    def turn(self, monotonic: float) -> None:
        if self._last is not None:
            self.awake_s += min(monotonic - self._last, 2 * TURN_S)
        self._last = monotonic
        leases, watched = list(self._leases), list(self._watched)
        keys = [
            tcp.VERSION_COUNTER,
            tcp.LEASE_REGISTER,
            tcp.WATCHED_PREFIX_REGISTER,
            *map(tcp.lease_counter_key, leases),
        ]
        keys += [*map(tcp.change_counter_key, watched), *map(tcp.watcher_counter_key, watched)]
        version, registered, prefixes, *values = self._wire.read_all(keys)
        self._discover(registered, prefixes)
        for lease, count in zip(leases, values, strict=False):
            self._check_lease(lease, self._leases[lease], count)
        counts = values[len(leases) :]
        for prefix, count, watchers_count in zip(watched, counts, counts[len(watched) :], strict=False):
            self._repair_changes(prefix, self._watched[prefix], tcp.parse_number(count) or 0)
            self._drop_if_unwatched(prefix, self._watched[prefix], watchers_count)
        if self.awake_s - self._swept_at >= SWEEP_INTERVAL_S and (version != self._swept or self._gone_since):
            self._swept_at = self.awake_s
            self._swept = version
            self.sweep()

    def _discover(self, registered: bytes | None, prefixes: bytes | None) -> None:
        """Take up leases and watched prefixes that clients have registered since the last turn."""
        for line in tcp.decode_entries(registered):
            lease, _, ttl_ms = line.partition(" ")
            if lease not in self._leases and ttl_ms.isdigit():
                self._leases[lease] = _Lease(int(ttl_ms) / 1000, None, self.awake_s)
        for prefix in tcp.decode_entries(prefixes):
            if prefix not in self._watched:
                self._watched[prefix] = _WatchedPrefix(0, self.awake_s)

    def _check_lease(self, name: str, lease: _Lease, count: bytes | None) -> None:
        """End a lease whose count rests, and forget one that ended `TOMBSTONE_S` ago."""
        if lease.ended_at is None:
            if count is not None and (tcp.parse_number(count) or -1) > 0:
                if count != lease.count:
                    lease.count, lease.count_moved_at = count, self.awake_s
                    return
                # Compared with the count that was read: a renewal in between wins.
                if self.awake_s - lease.count_moved_at < lease.ttl_s or not self._wire.swap(
                    tcp.lease_counter_key(name), count, tcp.ENDED_LEASE_COUNT
                ):
                    return
            lease.ended_at = self.awake_s
            self._drop_keys(name)
        elif self.awake_s - lease.ended_at >= TOMBSTONE_S:
            self._drop_keys(name)  # a late holder may have put its key since
            self._remove_entry(tcp.LEASE_REGISTER, f"{name} {round(lease.ttl_s * 1000)}")
            self._wire.delete(tcp.lease_members_key(name))
            self._wire.delete(tcp.lease_counter_key(name))
            del self._leases[name]

    def _drop_keys(self, lease: str) -> None:
        """Remove every key of an ended lease. Keys that have another lease since stay."""
        for key in tcp.decode_entries(self._wire.read(tcp.lease_members_key(lease))):
            remove(self._wire, key, lease)

    def _repair_changes(self, prefix: str, watched: _WatchedPrefix, count: int) -> None:
        """A writer killed between counting a change and naming it leaves a gap, at which every watch would stop."""
        upto = min(count, watched.last_change + MAX_CHANGES_PER_TURN)
        missing = range(watched.last_change + 1, upto + 1)
        if missing and self._wire.check([tcp.change_key(prefix, n) for n in missing]):
            watched.last_change = upto
        elif missing:
            gap = next((n for n in missing if not self._wire.check([tcp.change_key(prefix, n)])), upto + 1)
            if gap == watched.gap_number:
                self._wire.swap(tcp.change_key(prefix, gap), None, tcp.to_bytes(prefix) or b"/")
            watched.last_change, watched.gap_number = gap - 1, gap
        if watched.last_change > (watched.old_changes[-1][1] if watched.old_changes else 0):
            watched.old_changes.append((self.awake_s, watched.last_change))
        while watched.old_changes and self.awake_s - watched.old_changes[0][0] >= TOMBSTONE_S:
            for n in range(watched.last_deleted + 1, watched.old_changes.popleft()[1] + 1):
                self._wire.delete(tcp.change_key(prefix, n))
                watched.last_deleted = n

    def _drop_if_unwatched(self, prefix: str, watched: _WatchedPrefix, watchers_count: bytes | None) -> None:
        """Remove a prefix that no client watches any more, and its changes."""
        if watchers_count != watched.watchers_count:
            watched.watchers_count, watched.watchers_moved_at = watchers_count, self.awake_s
        elif self.awake_s - watched.watchers_moved_at >= DROP_UNWATCHED_AFTER_S:
            self._remove_entry(tcp.WATCHED_PREFIX_REGISTER, prefix)
            # A client that still saw it listed relies on it.
            if self._wire.read(tcp.watcher_counter_key(prefix)) != watchers_count:
                self._wire.append(tcp.WATCHED_PREFIX_REGISTER, tcp.encode_entry(prefix))
                return
            for n in range(watched.last_deleted + 1, watched.last_change + 1):
                self._wire.delete(tcp.change_key(prefix, n))
            self._wire.delete(tcp.change_counter_key(prefix))
            self._wire.delete(tcp.watcher_counter_key(prefix))
            del self._watched[prefix]

    def sweep(self) -> None:
        """Remove old tombstones, and the names of keys that were never created."""
        gone: dict[str, tuple[bytes | None, float]] = {}
        for directory in tcp.decode_entries(self._wire.read(tcp.DIRECTORY_REGISTER)):
            leaves = tcp.decode_entries(self._wire.read(tcp.index_key(directory)))
            keys = [directory + leaf for leaf in leaves]
            removed: set[str] = set()
            for key, raw in zip(keys, self._wire.read_all([tcp.value_key(key) for key in keys]), strict=True):
                envelope = tcp.decode_envelope(raw)
                if envelope is not None and envelope.state is tcp.KeyState.PRESENT:
                    continue
                before = self._gone_since.get(key)
                since = before[1] if before is not None and before[0] == raw else self.awake_s
                if self.awake_s - since < TOMBSTONE_S:
                    gone[key] = (raw, since)
                elif self._wire.swap(
                    tcp.value_key(key), raw, (envelope or _EMPTY_TOMBSTONE).encode_tombstone(tcp.KeyState.REMOVING)
                ):
                    removed.add(key[len(directory) :])
            self._remove_tombstones(directory, removed)
        self._gone_since = gone

    def _remove_tombstones(self, directory: str, removed: set[str]) -> None:
        """No client creates a key in state REMOVING, so every name that is removed here is unused."""
        if not removed:
            return
        index = tcp.index_key(directory)
        while True:  # ends: only an append makes the swap fail, and appends are finished within a turn
            raw = self._wire.read(index)
            remaining = [leaf for leaf in tcp.decode_entries(raw) if leaf not in removed]
            if self._wire.swap(index, raw, tcp.encode_entries(remaining) if remaining else tcp.CLOSING_INDEX):
                break
        for leaf in removed:
            self._wire.delete(tcp.value_key(directory + leaf))
        if not remaining:
            self._remove_entry(tcp.DIRECTORY_REGISTER, directory)
            self._wire.delete(index)

    def _remove_entry(self, register: bytes, entry: str) -> None:
        """Remove one entry of a register by compare-and-swap."""
        while True:  # ends: as above
            raw = self._wire.read(register)
            if self._wire.swap(register, raw, tcp.encode_entries(e for e in tcp.decode_entries(raw) if e != entry)):
                return
