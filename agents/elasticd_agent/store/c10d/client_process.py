"""The Store verbs carried out on a TCPStore, in the helper process: a client of the store for one agent.

One request at a time, in order of arrival, answered with the request's id; each watch waits on a connection of its own.
A lost connection ends the process after it has reported why; the agent's side (connection.py) starts another. The host
decides when a lease ends (server_process.py).

A TCPStore knows set, get, append, add, compare_set and wait. The rest is built from these:
- A value is an envelope: state, version, lease, payload. `compare_set` of the whole envelope is the compare-and-swap.
  Versions come from one counter of the store and only grow, also across a deletion, because a deleted key leaves a
  tombstone with its version.
- `list` reads an index of names a directory, since a TCPStore cannot enumerate keys. A name is written before its key
  and again after it, so a process killed in between leaves a surplus name, never a key that nobody finds.
- A lease is a counter that its holder increments; the host ends a lease whose counter rests. Counters start above
  `_FIRST_LEASE_COUNT`, so a renewal in a store that lost its data is recognized by its small result.
- A change is a numbered key below the prefix that is watched; `wait` for the next number is the watch. A writer counts
  first and names the key second. If it is killed in between, the host fills the gap.

Any of these sequences may be cut off after each request, by a kill or by a frozen host. Each is ordered so that what
remains is harmless, or is found and repaired by the host's sweep.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from elasticd.channel import Message
from elasticd_agent.store.c10d import tcp_store as tcp

PROTOCOL_VERSION = "1"
HOST_MARKER_WAIT_S = 2.5
"""The host's marker follows a TCPStore's first answer within this time: milliseconds, more on a crowded machine."""
WATCH_RECHECK_S = 120.0
"""Between two checks for a missed change, which the host repairs long before. A leader's seven watches cost 0.25
requests a second."""
_FIRST_LEASE_COUNT = 1 << 40
"""Lease counters start above this, so that a renewal in a store that lost its data cannot look alive."""
_BUSY_RETRY_S = 0.002


class HostBusy(Exception):
    """The deadline passed while the host was removing what the request needs."""


class _IncompatibleStore(Exception):
    """The store there is not elasticd's, or of another version."""


class Operations:
    """The verbs; their names and arguments are the requests of connection.py."""

    def __init__(self, wire: tcp.TcpStoreConnection) -> None:
        self._wire = wire
        self.deadline = 0.0
        """Set for each request; only waiting for the host uses it."""

    def read(self, key: str) -> list[Any] | None:
        """Return [version, value as base64], or None if the key does not exist."""
        envelope = tcp.decode_envelope(self._wire.read(tcp.value_key(key)))
        return (
            [envelope.version, _to_base64(envelope.value)] if envelope is not None and _is_present(envelope) else None
        )

    def list_below(self, prefix: str) -> dict[str, list[Any]]:
        """Return {key: [version, value as base64]} of every key that begins with `prefix`."""
        keys: list[str] = []
        for directory in tcp.decode_entries(self._wire.read(tcp.DIRECTORY_REGISTER)):
            if directory.startswith(prefix) or prefix.startswith(directory):
                leaves = tcp.decode_entries(self._wire.read(tcp.index_key(directory)))
                keys += [directory + leaf for leaf in leaves if (directory + leaf).startswith(prefix)]
        keys = sorted(set(keys))
        envelopes = zip(
            keys, map(tcp.decode_envelope, self._wire.read_all(list(map(tcp.value_key, keys)))), strict=True
        )
        return {key: [e.version, _to_base64(e.value)] for key, e in envelopes if e is not None and _is_present(e)}

    def compare_and_swap(self, key: str, expected: int | None, value: str, guard: list[Any] | None = None) -> bool:
        """Set `key` if its version is `expected`, and the guard's version is the given one. False:
        the race was lost.
        """
        if guard is not None and (self.read(guard[0]) or [None])[0] != guard[1]:
            return False
        return self._swap(key, expected, base64.b64decode(value), None) is not None

    def delete(self, key: str) -> bool:
        return remove(self._wire, key, None)

    def announce(self, key: str, value: str, ttl_s: float) -> list[Any] | None:
        """Create `key` under a new lease. Returns [lease, first count, version]; None: the key exists.

        The lease is registered before the key is put: a holder that dies in between leaves a lease without a key, and
        its end removes it.
        """
        if self.read(key) is not None:
            return None
        lease, first = secrets.token_hex(8), _FIRST_LEASE_COUNT + secrets.randbits(32)
        self._wire.set(tcp.lease_counter_key(lease), str(first).encode())
        self._wire.append(tcp.LEASE_REGISTER, tcp.encode_entry(f"{lease} {round(ttl_s * 1000)}"))
        if (version := self.put(lease, first, key, value, None)) is None:
            self.withdraw(lease, first)
            return None
        return [lease, first, version]

    def put(self, lease: str, first: int, key: str, value: str, expected: int | None) -> int | None:
        """Set `key` under the lease if its version is `expected`. Returns the new version; None: the lease has ended,
        or the race was lost.
        """
        if not self._is_alive(lease, first):
            return None
        # Before the key itself: if this process is killed in between, the host finds the key when the lease ends.
        self._wire.append(tcp.lease_members_key(lease), tcp.encode_entry(key))
        version = self._swap(key, expected, base64.b64decode(value), lease)
        if version is not None and not self._is_alive(lease, first):
            remove(self._wire, key, lease)
            return None
        return version

    def renew(self, lease: str, first: int) -> bool:
        """Count the lease up. False: it has ended, or the store has lost its data since."""
        count = self._wire.add(tcp.lease_counter_key(lease), 1)
        if 0 < count < first:  # the store lost its data, and this request has just created the counter
            self._wire.delete(tcp.lease_counter_key(lease))
        return count > first

    def withdraw(self, lease: str, first: int) -> None:
        """End the lease now and remove its keys. An ended lease is left alone."""
        if self._is_alive(lease, first):
            self._wire.set(tcp.lease_counter_key(lease), tcp.ENDED_LEASE_COUNT)
            for key in tcp.decode_entries(self._wire.read(tcp.lease_members_key(lease))):
                remove(self._wire, key, lease)

    def _is_alive(self, lease: str, first: int) -> bool:
        return (tcp.parse_number(self._wire.read(tcp.lease_counter_key(lease))) or 0) >= first

    def _swap(self, key: str, expected: int | None, value: bytes, lease: str | None) -> int | None:
        """The new version; None: the race was lost. `lease` None: the key keeps its lease."""
        while True:
            raw = self._wire.read(tcp.value_key(key))
            before = tcp.decode_envelope(raw)
            present = before if before is not None and _is_present(before) else None
            if (None if present is None else present.version) != expected:
                return None
            if before is not None and before.state is tcp.KeyState.REMOVING:
                self._wait_for_host()
                continue
            if raw is None:
                self._add_to_index(key)
            version = self._next_version(0 if before is None else before.version)
            owner = lease if lease is not None else present.lease if present is not None else ""
            envelope = tcp.Envelope(tcp.KeyState.PRESENT, version, owner, value)
            if self._wire.swap(tcp.value_key(key), raw, envelope.encode()):
                if raw is None:
                    self._add_to_index(key)
                notify_watchers(self._wire, key)
                return version
            # Another client was faster, or a tombstone was removed: what is there now decides.

    def _next_version(self, above: int) -> int:
        """Take the next version from the store's counter. A counter below `above` belongs to a store that was filled by
        another one, and is moved.
        """
        version = self._wire.add(tcp.VERSION_COUNTER, 1)
        return version if version > above else self._wire.add(tcp.VERSION_COUNTER, above - version + 1)

    def _add_to_index(self, key: str) -> None:
        """Make `list` find `key`. Called before the key is created, because this process may be killed right after it,
        and a surplus name does no harm; and after it, because only then the host keeps the name."""
        directory, leaf = tcp.split_key(key)
        while True:
            index = self._wire.read(tcp.index_key(directory))
            if index is not None and tcp.CLOSING_INDEX in index:
                self._wait_for_host()
            elif leaf in tcp.decode_entries(index):
                break
            else:
                self._wire.append(tcp.index_key(directory), tcp.encode_entry(leaf))
        if directory not in tcp.decode_entries(self._wire.read(tcp.DIRECTORY_REGISTER)):
            self._wire.append(tcp.DIRECTORY_REGISTER, tcp.encode_entry(directory))

    def _wait_for_host(self) -> None:
        if time.monotonic() > self.deadline:
            raise HostBusy
        time.sleep(_BUSY_RETRY_S)


def remove(wire: tcp.TcpStoreConnection, key: str, lease: str | None) -> bool:
    """Replace `key` by a tombstone, if it is there and, with `lease`, belongs to that lease."""
    while True:
        raw = wire.read(tcp.value_key(key))
        envelope = tcp.decode_envelope(raw)
        if envelope is None or not _is_present(envelope) or lease not in (None, envelope.lease):
            return False
        if wire.swap(tcp.value_key(key), raw, envelope.encode_tombstone()):
            notify_watchers(wire, key)
            return True


def notify_watchers(wire: tcp.TcpStoreConnection, key: str) -> None:
    for prefix in tcp.decode_entries(wire.read(tcp.WATCHED_PREFIX_REGISTER)):
        if key.startswith(prefix):
            count = wire.add(tcp.change_counter_key(prefix), 1)
            wire.set(tcp.change_key(prefix, count), tcp.to_bytes(key))


def register_watch(wire: tcp.TcpStoreConnection, prefix: str) -> int:
    """Begin or continue to watch `prefix`; the host drops a prefix for which no client has done so for long."""
    wire.add(tcp.watcher_counter_key(prefix), 1)
    count = wire.add(tcp.change_counter_key(prefix), 0)
    if prefix not in tcp.decode_entries(wire.read(tcp.WATCHED_PREFIX_REGISTER)):
        wire.append(tcp.WATCHED_PREFIX_REGISTER, tcp.encode_entry(prefix))
    return count


class C10dClient:
    """Serves one agent over `channel`, a stream of JSON lines, until its end or until the store is lost."""

    def __init__(self, connect: Callable[[], tcp.TcpStoreConnection], channel: socket.socket) -> None:
        self._connect = connect
        self._channel = channel
        self._sending = threading.Lock()
        self._requests: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._wanted: set[str] = set()
        """The prefixes that the agent watches; the thread of any other one ends at its next turn."""
        self._threads: set[str] = set()
        self._watch_lock = threading.Lock()

    def serve(self) -> NoReturn:
        """Read only, so that the agent's end is noticed even while torch blocks for good."""
        threading.Thread(target=self._run_guarded, args=(self._carry_out_requests,), daemon=True).start()
        for line in self._channel.makefile("rb"):
            self._requests.put(json.loads(line))
        os._exit(0)

    def _run_guarded(self, run: Callable[..., None], *args: Any) -> None:
        """Run in a thread; any exception ends the process, after a message where people can act on it."""
        done = False
        try:
            run(*args)
            done = True
        except _IncompatibleStore as error:
            self._send({"refused": str(error)})
        except OSError as error:
            self._send({"lost": error.strerror or str(error) or type(error).__name__})
        except RuntimeError as error:
            # torch needs many lines for it, with addresses of C++ frames; the first one is for people.
            self._send({"lost": str(error).partition("\n")[0]})
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            if not done:
                os._exit(1)

    def _carry_out_requests(self) -> None:
        wire = self._connect()
        if not wire.wait(tcp.HOST_MARKER, HOST_MARKER_WAIT_S):
            raise _IncompatibleStore("a TCPStore answers there, but it is not served by elasticd")
        protocol, _, start = (wire.read(tcp.HOST_MARKER) or b"").decode(errors="replace").partition(" ")
        if protocol != PROTOCOL_VERSION:
            raise _IncompatibleStore(
                f"the store uses elasticd's c10d protocol {protocol[:32]!r}, this agent {PROTOCOL_VERSION}"
            )
        self._send({"ready": start})
        operations = Operations(wire)
        while True:
            request = self._requests.get()
            operations.deadline = time.monotonic() + request["within"]
            try:
                match request["op"]:
                    case "watch":
                        self._watch(wire, **request["args"])
                        answer: Message = {"ok": True}
                    case "unwatch":
                        self._wanted.discard(request["args"]["prefix"])
                        answer = {"ok": True}
                    case verb:
                        answer = {"ok": getattr(operations, verb)(**request["args"])}
            except HostBusy:
                answer = {"busy": True}
            self._send({"id": request["id"], **answer})

    def _watch(self, wire: tcp.TcpStoreConnection, prefix: str) -> None:
        """Changes from now on will be reported."""
        with self._watch_lock:
            self._wanted.add(prefix)
            if prefix in self._threads:
                return
            self._threads.add(prefix)
        count = register_watch(wire, prefix)
        threading.Thread(target=self._run_guarded, args=(self._follow_changes, prefix, count), daemon=True).start()

    def _follow_changes(self, prefix: str, seen: int) -> None:
        wire = self._connect()
        check_at = time.monotonic() + WATCH_RECHECK_S
        while True:
            appeared = wire.wait(tcp.change_key(prefix, seen + 1), max(check_at - time.monotonic(), 0.1))
            with self._watch_lock:
                if prefix not in self._wanted:
                    self._threads.discard(prefix)
                    return
            changed: str | None = None
            if time.monotonic() >= check_at:  # also among many changes: the host drops what no client registers
                check_at = time.monotonic() + WATCH_RECHECK_S
                if (count := register_watch(wire, prefix)) != seen:
                    seen, changed = count, prefix
            elif appeared:
                seen += 1
                changed = tcp.to_text(wire.read(tcp.change_key(prefix, seen)) or b"") or prefix
            if changed is not None:
                self._send({"changed": prefix, "key": changed})

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            try:
                self._channel.sendall(data)
            except OSError:
                os._exit(0)  # the agent has ended or given up, and has said why


def _is_present(envelope: tcp.Envelope) -> bool:
    return envelope.state is tcp.KeyState.PRESENT


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")
