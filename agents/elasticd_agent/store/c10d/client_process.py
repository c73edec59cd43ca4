"""The agent's verbs, carried out on a TCPStore. Runs in the helper process, as its client.

One request at a time, in the order of arrival, answered with the request's id; each watch waits on a connection of its
own. It never retries a lost connection: it says why and ends, and the agent's side (connection.py) starts another.
It never decides when a lease ends: that is the host's (server_process.py).
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

from elasticd_agent.store.c10d.envelope import (
    CLOSING,
    DIRECTORIES,
    ENDED,
    LEASES,
    MARKER,
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
    lease_key,
    lease_members_key,
    parse_number,
    split_key,
    value_key,
    watchers_key,
)
from elasticd_agent.store.c10d.wire import TcpStoreConnection

PROTOCOL = "1"
MARKER_WAIT_S = 2.5
"""Between a TCPStore's first answer and its host's mark lie milliseconds, on a crowded machine some more."""
WATCH_RECHECK_S = 120.0
"""How long a watch waits before it looks whether it missed something. Seven of them, a planner's, cost a quarter of a
request a second; the host mends a change that got lost long before."""
_FIRST_COUNT = 1 << 40
"""Leases count from above this, so that a renewal in a store that came back empty cannot look alive."""
_BUSY_S = 0.002


class HostBusy(Exception):
    """The deadline came while the host was removing what the request needs."""


class _Incompatible(Exception):
    """The store there is not for us."""


class Operations:
    """The verbs. `deadline` is set for each request; only waiting for the host's own work looks at it."""

    def __init__(self, wire: TcpStoreConnection) -> None:
        self._wire = wire
        self.deadline = 0.0

    def read(self, key: str) -> list[Any] | None:
        found = decode(self._wire.read(value_key(key)))
        return None if found is None or found.state is not KeyState.PRESENT else [found.version, _text(found.value)]

    def found_below(self, prefix: str) -> dict[str, list[Any]]:
        keys: list[str] = []
        for directory in entries(self._wire.read(DIRECTORIES)):
            if directory.startswith(prefix) or prefix.startswith(directory):
                leaves = entries(self._wire.read(index_key(directory)))
                keys += [directory + leaf for leaf in leaves if (directory + leaf).startswith(prefix)]
        keys = sorted(set(keys))
        found = zip(keys, map(decode, self._wire.read_all([value_key(key) for key in keys])), strict=True)
        return {k: [e.version, _text(e.value)] for k, e in found if e is not None and e.state is KeyState.PRESENT}

    def swap(self, key: str, expected: int | None, value: str, guard: list[Any] | None = None) -> bool:
        if guard is not None and (self.read(guard[0]) or [None])[0] != guard[1]:
            return False
        return self._swap(key, expected, base64.b64decode(value), None) is not None

    def delete(self, key: str) -> bool:
        return remove(self._wire, key, None)

    def announce(self, key: str, value: str, ttl_s: float) -> list[Any] | None:
        if self.read(key) is not None:
            return None
        lease, first = secrets.token_hex(8), _FIRST_COUNT + secrets.randbits(32)
        self._wire.set(lease_key(lease), str(first).encode())
        self._wire.append(LEASES, entry(f"{lease} {round(ttl_s * 1000)}"))
        if self.put(lease, first, key, value, None) is None:
            self.withdraw(lease, first)
            return None
        return [lease, first]

    def put(self, lease: str, first: int, key: str, value: str, expected: int | None) -> int | None:
        if not self._alive(lease, first):
            return None
        # Before the key itself, so that whatever happens to us in between, the host finds the key when the lease ends.
        self._wire.append(lease_members_key(lease), entry(key))
        version = self._swap(key, expected, base64.b64decode(value), lease)
        if version is not None and not self._alive(lease, first):
            remove(self._wire, key, lease)
            return None
        return version

    def renew(self, lease: str, first: int) -> bool:
        count = self._wire.add(lease_key(lease), 1)
        if 0 < count < first:  # the store came back empty, and we have just made this key
            self._wire.delete(lease_key(lease))
        return count > first

    def withdraw(self, lease: str, first: int) -> None:
        if self._alive(lease, first):
            self._wire.set(lease_key(lease), ENDED)
            for key in entries(self._wire.read(lease_members_key(lease))):
                remove(self._wire, key, lease)

    def _alive(self, lease: str, first: int) -> bool:
        return (parse_number(self._wire.read(lease_key(lease))) or 0) >= first

    def _swap(self, key: str, expected: int | None, value: bytes, lease: str | None) -> int | None:
        """`lease` None: the key stays with the lease it has. Returns the new version; None: the race was lost."""
        while True:
            raw = self._wire.read(value_key(key))
            found = decode(raw)
            here = found if found is not None and found.state is KeyState.PRESENT else None
            if (None if here is None else here.version) != expected:
                return None
            if found is not None and found.state is KeyState.REMOVING:
                self._wait_for_host()
                continue
            if raw is None:
                self._index(key)
            version = self._wire.add(VERSION, 1)
            if found is not None and version <= found.version:
                version = self._wire.add(VERSION, found.version - version + 1)
            owner = lease if lease is not None else here.lease if here is not None else ""
            if self._wire.swap(value_key(key), raw, Envelope(KeyState.PRESENT, version, owner, value).encode()):
                if raw is None:
                    self._index(key)
                notify_watchers(self._wire, key)
                return version
            # Somebody was faster, or a gravestone was removed: what is there now decides.

    def _index(self, key: str) -> None:
        """Make `list` find `key`. Called before it is created, since we may be killed right after, and a name too many
        hurts nobody; and after it, since only then the host will not take the name for one that never came."""
        directory, leaf = split_key(key)
        while True:
            index = self._wire.read(index_key(directory))
            if index is not None and CLOSING in index:
                self._wait_for_host()
            elif leaf in entries(index):
                break
            else:
                self._wire.append(index_key(directory), entry(leaf))
        if directory not in entries(self._wire.read(DIRECTORIES)):
            self._wire.append(DIRECTORIES, entry(directory))

    def _wait_for_host(self) -> None:
        if time.monotonic() > self.deadline:
            raise HostBusy
        time.sleep(_BUSY_S)


def remove(wire: TcpStoreConnection, key: str, lease: str | None) -> bool:
    """Turn `key` into a gravestone, if it is there and, where a lease is given, that lease's."""
    while True:
        raw = wire.read(value_key(key))
        found = decode(raw)
        if found is None or found.state is not KeyState.PRESENT or lease not in (None, found.lease):
            return False
        if wire.swap(value_key(key), raw, found.as_tombstone(KeyState.TOMBSTONE)):
            notify_watchers(wire, key)
            return True


def notify_watchers(wire: TcpStoreConnection, key: str) -> None:
    """Wake whoever watches `key`."""
    for prefix in entries(wire.read(WATCHED)):
        if key.startswith(prefix):
            count = wire.add(counter_key(prefix), 1)
            wire.set(event_key(prefix, count), key.encode(errors="surrogateescape"))


def register_watch(wire: TcpStoreConnection, prefix: str) -> int:
    """Begin or go on watching `prefix`; the host strikes it off when nobody has said so for long."""
    wire.add(watchers_key(prefix), 1)
    count = wire.add(counter_key(prefix), 0)
    if prefix not in entries(wire.read(WATCHED)):
        wire.append(WATCHED, entry(prefix))
    return count


class C10dClient:
    """Serves one agent over `channel`, a stream of JSON lines, until its end or until the store is lost."""

    def __init__(self, connect: Callable[[], TcpStoreConnection], channel: socket.socket) -> None:
        self._connect = connect
        self._channel = channel
        self._sending = threading.Lock()
        self._requests: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._watched: set[str] = set()
        """What the agent wants watched; a watch that finds itself no more in here ends at its next turn."""
        self._watching: set[str] = set()
        self._watch_lock = threading.Lock()

    def serve(self) -> NoReturn:
        """Only reads, so that the agent's end is noticed even while torch blocks for good."""
        threading.Thread(target=self._run_guarded, args=(self._work,), daemon=True).start()
        for text in self._channel.makefile("rb"):
            self._requests.put(json.loads(text))
        os._exit(0)

    def _run_guarded(self, run: Callable[..., None], *args: Any) -> None:
        """`run` in a thread; whatever it fails of ends the process, in words where the words are for people."""
        done = False
        try:
            run(*args)
            done = True
        except _Incompatible as refused:
            self._send({"refused": str(refused)})
        except OSError as error:
            self._send({"lost": error.strerror or str(error) or type(error).__name__})
        except RuntimeError as error:
            # torch says the same over many lines, with addresses of C++ frames; the first is for people.
            self._send({"lost": str(error).partition("\n")[0]})
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            if not done:
                os._exit(1)

    def _work(self) -> None:
        wire = self._connect()
        if not wire.wait(MARKER, MARKER_WAIT_S):
            raise _Incompatible("a TCPStore answers there, but no elasticd agent keeps it")
        protocol, _, start = (wire.read(MARKER) or b"").decode(errors="replace").partition(" ")
        if protocol != PROTOCOL:
            theirs = repr(protocol[:32])
            raise _Incompatible(f"the store there speaks elasticd's c10d protocol {theirs}, this agent {PROTOCOL}")
        self._send({"ready": start, "counts": wire.take_counts()})
        operations = Operations(wire)
        while True:
            request = self._requests.get()
            operations.deadline = time.monotonic() + request["within"]
            try:
                match request["op"]:
                    case "watch":
                        self._watch(wire, **request["args"])
                        answer: dict[str, Any] = {"ok": True}
                    case "unwatch":
                        self._watched.discard(request["args"]["prefix"])
                        answer = {"ok": True}
                    case verb:
                        answer = {"ok": getattr(operations, verb)(**request["args"])}
            except HostBusy:
                answer = {"busy": True}
            self._send({"id": request["id"], "counts": wire.take_counts(), **answer})

    def _watch(self, wire: TcpStoreConnection, prefix: str) -> None:
        """Changes from now on will be heard of."""
        with self._watch_lock:
            self._watched.add(prefix)
            if prefix in self._watching:
                return
            self._watching.add(prefix)
        count = register_watch(wire, prefix)
        threading.Thread(target=self._run_guarded, args=(self._follow_changes, prefix, count), daemon=True).start()

    def _follow_changes(self, prefix: str, seen: int) -> None:
        wire = self._connect()
        while True:
            came = wire.wait(event_key(prefix, seen + 1), WATCH_RECHECK_S)
            with self._watch_lock:
                if prefix not in self._watched:
                    self._watching.discard(prefix)
                    return
            if came:
                seen += 1
                raw = wire.read(event_key(prefix, seen)) or b""
                self._changed(wire, prefix, raw.decode(errors="surrogateescape") or prefix)
                continue
            count = register_watch(wire, prefix)
            if count != seen:
                seen = count
                self._changed(wire, prefix, prefix)
            else:
                self._send({"counts": wire.take_counts()})

    def _changed(self, wire: TcpStoreConnection, prefix: str, key: str) -> None:
        self._send({"changed": prefix, "key": key, "counts": wire.take_counts()})

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._channel.sendall(data)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")
