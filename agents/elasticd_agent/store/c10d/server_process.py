"""What the process that hosts the TCPStore does beside serving it: ends leases, buries deleted keys, mends watches.

A TCPStore has no leases and removes nothing by itself. Renewals are counters in the store; one that has not moved for
its lease's time on this process's clock, while this process was awake, has ended. It never looks at a value.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elasticd_agent.store.c10d.client_process import PROTOCOL, WATCH_RECHECK_S, remove
from elasticd_agent.store.c10d.envelope import (
    CLOSING,
    DIRECTORIES,
    ENDED,
    LEASES,
    MARKER,
    STANDALONE,
    VERSION,
    WATCHED,
    Envelope,
    KeyState,
    counter_key,
    decode,
    entries,
    entry,
    event_key,
    index_key,
    join_entries,
    lease_key,
    lease_members_key,
    parse_number,
    value_key,
    watchers_key,
)
from elasticd_agent.store.c10d.wire import TcpStoreConnection
from elasticd_agent.system.tcp_store import serving

TURN_S = 0.2
"""How late a lease may end; 0.2 s cost 0.2 % of a core."""
SWEEP_S = 5.0
TOMBSTONE_S = 30.0
"""Much longer than any request takes: whoever saw a key deleted, or its name announced, is done by then."""
UNWATCHED_S = 4 * WATCH_RECHECK_S
MAX_GAPS_PER_TURN = 256
_NOTHING = Envelope(KeyState.TOMBSTONE, 0, "", b"")


def serve(
    tcp_store: Callable[..., Any], listener: socket.socket, channel: socket.socket, standalone: bool = False
) -> None:
    """Serve on an already listening socket until the channel's end of file. `apart`: no job's agent does so."""
    port = listener.getsockname()[1]
    # The family the listener was made for; the store listens on all addresses, the keeper uses the nearest.
    wire = TcpStoreConnection(
        serving(tcp_store), "127.0.0.1", port, 10.0, is_master=True, master_listen_fd=listener.detach()
    )
    keeper = HostMaintenance(wire)
    keeper.initialize(standalone)
    channel.settimeout(TURN_S)
    while True:
        try:
            if not channel.recv(1):
                return
        except TimeoutError:
            keeper.turn(time.monotonic())


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    count: bytes | None
    moved_at: float
    ended_at: float | None = None


@dataclass(slots=True)
class _Watched:
    last_change: int
    moved_at: float
    presence: bytes | None = None
    gap_at: int | None = None
    """The number that was missing at the last turn."""
    old: deque[tuple[float, int]] = field(default_factory=deque)
    deleted: int = 0


class HostMaintenance:
    """`turn` is called again and again with a monotonic time."""

    def __init__(self, wire: TcpStoreConnection) -> None:
        self._wire = wire
        self._now = 0.0
        """Seconds of this process's life in which it was awake: a suspended host must not end everyone's leases."""
        self._last: float | None = None
        self._leases: dict[str, _Lease] = {}
        self._watched: dict[str, _Watched] = {}
        self._gone_since: dict[str, tuple[bytes | None, float]] = {}
        self._swept_at = 0.0
        self._swept: bytes | None = None

    def initialize(self, standalone: bool = False) -> None:
        # A host that starts anew has an empty store; its versions must not meet those of before. Milliseconds grow
        # faster than anyone writes, and the random part tells apart two starts of one millisecond or a clock set back.
        self._wire.set(VERSION, str((time.time_ns() // 1_000_000 << 20) + secrets.randbits(20)).encode())
        for register in (DIRECTORIES, LEASES, WATCHED):
            self._wire.set(register, join_entries(()))
        self._wire.set(MARKER, f"{PROTOCOL} {secrets.token_hex(8)}{STANDALONE if standalone else ''}".encode())

    def turn(self, monotonic: float) -> None:
        if self._last is not None:
            self._now += min(monotonic - self._last, 2 * TURN_S)
        self._last = monotonic
        leases, watched = list(self._leases), list(self._watched)
        registers, rest = (VERSION, LEASES, WATCHED), [*map(lease_key, leases), *map(counter_key, watched)]
        rest += map(watchers_key, watched)
        version, registered, prefixes, *values = self._wire.read_all([*registers, *rest])
        self._discover(registered, prefixes)
        for lease, count in zip(leases, values, strict=False):
            self._check_lease(lease, self._leases[lease], count)
        counts, present = values[len(leases) :][: len(watched)], values[len(leases) + len(watched) :]
        for prefix, count, presence in zip(watched, counts, present, strict=True):
            self._repair_changes(prefix, self._watched[prefix], parse_number(count) or 0)
            self._drop_if_unwatched(prefix, self._watched[prefix], presence)
        if self._now - self._swept_at >= SWEEP_S and (version != self._swept or self._gone_since):
            self._swept_at, self._swept = self._now, version
            self._sweep()

    def _discover(self, registered: bytes | None, prefixes: bytes | None) -> None:
        for line in entries(registered):
            lease, _, ttl_ms = line.partition(" ")
            if lease not in self._leases and ttl_ms.isdigit():
                self._leases[lease] = _Lease(int(ttl_ms) / 1000, None, self._now)
        for prefix in entries(prefixes):
            if prefix not in self._watched:
                self._watched[prefix] = _Watched(0, self._now)

    def _check_lease(self, name: str, lease: _Lease, count: bytes | None) -> None:
        if lease.ended_at is None:
            if count is not None and (parse_number(count) or -1) > 0:
                if count != lease.count:
                    lease.count, lease.moved_at = count, self._now
                    return
                # Compared with what was read: a renewal in between wins.
                if self._now - lease.moved_at < lease.ttl_s or not self._wire.swap(lease_key(name), count, ENDED):
                    return
            lease.ended_at = self._now
            self._drop_keys(name)
        elif self._now - lease.ended_at >= TOMBSTONE_S:
            self._drop_keys(name)  # a holder that was late has put its key since
            self._remove_entry(LEASES, f"{name} {round(lease.ttl_s * 1000)}")
            self._wire.delete(lease_members_key(name))
            self._wire.delete(lease_key(name))
            del self._leases[name]

    def _drop_keys(self, lease: str) -> None:
        for key in entries(self._wire.read(lease_members_key(lease))):
            remove(self._wire, key, lease)

    def _repair_changes(self, prefix: str, watched: _Watched, count: int) -> None:
        """A writer that died between counting a change and naming it left a hole at which every watch would stop."""
        upto = min(count, watched.last_change + MAX_GAPS_PER_TURN)
        missing = range(watched.last_change + 1, upto + 1)
        if missing and self._wire.check([event_key(prefix, n) for n in missing]):
            watched.last_change = upto
        elif missing:
            hole = next((n for n in missing if not self._wire.check([event_key(prefix, n)])), upto + 1)
            if hole == watched.gap_at:
                self._wire.swap(event_key(prefix, hole), None, prefix.encode(errors="surrogateescape") or b"/")
            watched.last_change, watched.gap_at = hole - 1, hole
        if watched.last_change > (watched.old[-1][1] if watched.old else 0):
            watched.old.append((self._now, watched.last_change))
        while watched.old and self._now - watched.old[0][0] >= TOMBSTONE_S:
            for n in range(watched.deleted + 1, watched.old.popleft()[1] + 1):
                self._wire.delete(event_key(prefix, n))
                watched.deleted = n

    def _drop_if_unwatched(self, prefix: str, watched: _Watched, presence: bytes | None) -> None:
        """Strike off a prefix that nobody watches any more, and forget its changes."""
        if presence != watched.presence:
            watched.presence, watched.moved_at = presence, self._now
        elif self._now - watched.moved_at >= UNWATCHED_S:
            self._remove_entry(WATCHED, prefix)
            if self._wire.read(watchers_key(prefix)) != presence:  # somebody who still saw it listed relies on it
                self._wire.append(WATCHED, entry(prefix))
                return
            for n in range(watched.deleted + 1, watched.last_change + 1):
                self._wire.delete(event_key(prefix, n))
            self._wire.delete(counter_key(prefix))
            self._wire.delete(watchers_key(prefix))
            del self._watched[prefix]

    def _sweep(self) -> None:
        """Remove what has been deleted for long, and the names of what never came."""
        gone: dict[str, tuple[bytes | None, float]] = {}
        for directory in entries(self._wire.read(DIRECTORIES)):
            leaves = entries(self._wire.read(index_key(directory)))
            keys = [directory + leaf for leaf in leaves]
            removed: set[str] = set()
            for key, raw in zip(keys, self._wire.read_all([value_key(key) for key in keys]), strict=True):
                found = decode(raw)
                if found is not None and found.state is KeyState.PRESENT:
                    continue
                before = self._gone_since.get(key)
                since = before[1] if before is not None and before[0] == raw else self._now
                if self._now - since < TOMBSTONE_S:
                    gone[key] = (raw, since)
                elif self._wire.swap(value_key(key), raw, (found or _NOTHING).as_tombstone(KeyState.REMOVING)):
                    removed.add(key[len(directory) :])
            self._remove_tombstones(directory, removed)
        self._gone_since = gone

    def _remove_tombstones(self, directory: str, removed: set[str]) -> None:
        """Nobody creates a key under a buried gravestone, so no name that is removed here is of use to anyone."""
        if not removed:
            return
        index = index_key(directory)
        while True:  # ends: only an append makes the swap fail, and those are done in less than a turn
            raw = self._wire.read(index)
            kept = [leaf for leaf in entries(raw) if leaf not in removed]
            if self._wire.swap(index, raw, join_entries(kept) if kept else CLOSING):
                break
        for leaf in removed:
            self._wire.delete(value_key(directory + leaf))
        if not kept:
            self._remove_entry(DIRECTORIES, directory)
            self._wire.delete(index)

    def _remove_entry(self, register: bytes, entry: str) -> None:
        while True:  # ends: as above
            raw = self._wire.read(register)
            if self._wire.swap(register, raw, join_entries(e for e in entries(raw) if e != entry)):
                return
