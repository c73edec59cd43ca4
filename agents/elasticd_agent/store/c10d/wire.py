"""One connection to a TCPStore: the few requests that are used of it, counted, and what is odd about them.

All of it works with torch 2.6 and newer. torch itself is handed in, so this imports only the standard library.
Not thread-safe: torch serialises a connection's requests, and a blocking one would hold up the others.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

_GET_S = 0.2
_ROUNDING_S = 0.01
_GREETING = [2, 22, 4]
"""torch's VALIDATE and PING at the start of a connection."""
_HEADER_BYTES = 9
"""A request's type and one length, as TCPStore.cpp writes them."""


def set_host_lookup(where: bytes) -> None:
    """From now on this process looks up hosts there: b"files", or what nsswitch.conf calls it.

    torch asks for the name of every peer, for its logs, on both sides of a connection, the server on the one thread
    that serves everyone; a DNS that loses the question stops them for 5 s each time.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:  # glibc's; where it is missing there is no such file either
        configure(b"hosts", where)


class TcpStoreConnection:
    """Raises RuntimeError (torch's DistError is one) when the connection is lost."""

    def __init__(self, tcp_store: Callable[..., Any], host: str, port: int, timeout_s: float, **more: Any) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store = tcp_store(host, port, wait_for_workers=False, timeout=timeout, **{"is_master": False, **more})
        self._unmatchable = b"?" + secrets.token_hex(8).encode()
        # The only request that looks at it is multi_get, and it only ever waits for a key that has just been removed.
        self._store.set_timeout(timedelta(seconds=_GET_S))
        self._counts = list(_GREETING)

    def take_counts(self) -> list[int]:
        """Requests, bytes sent and bytes received since this was last asked. Bytes are the payload's, about."""
        counts, self._counts = self._counts, [0, 0, 0]
        return counts

    def read(self, key: bytes) -> bytes | None:
        """One request, while torch's get() makes two and blocks when there is nothing.

        It is a compare_set that cannot win, and that, where there is nothing, answers with what was expected.
        """
        found = self._counted(
            self._store.compare_set(key, self._unmatchable, self._unmatchable),
            key,
            self._unmatchable,
            self._unmatchable,
        )
        return None if found in (b"", self._unmatchable) else found

    def swap(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        """`value` must be unlike any other, or a lost race looks like a win."""
        found = self._counted(self._store.compare_set(key, expected or b"", value), key, expected or b"", value)
        return bool(found == value)

    def read_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if len(keys) > 2 and self._counted(self._store.check(keys), *keys):
            try:
                found: list[bytes] = self._store.multi_get(keys)
            except RuntimeError:  # one was removed in between; is the connection alive, reading one by one works
                self._counts[0] += 2
            else:
                self._counts[0] += 1  # it waits for the keys before it reads them
                self._counted(b"".join(found), *keys, *keys)
                return [value or None for value in found]
        return [self.read(key) for key in keys]

    def set(self, key: bytes, value: bytes) -> None:
        self._counted(self._store.set(key, value), key, value)

    def add(self, key: bytes, amount: int) -> int:
        return int(self._counted(self._store.add(key, amount), key, b"8 bytes."))

    def append(self, key: bytes, value: bytes) -> None:
        self._counted(self._store.append(key, value), key, value)

    def check(self, keys: Sequence[bytes]) -> bool:
        return bool(self._counted(self._store.check(keys), *keys))

    def delete(self, key: bytes) -> None:
        self._counted(self._store.delete_key(key), key)

    def wait(self, key: bytes, seconds: float) -> bool:
        """Until `key` is there; False: it was not in time. The server answers when it comes, nothing is polled."""
        started = time.monotonic()
        try:
            self._counted(self._store.wait([key], timedelta(seconds=seconds)), key)
        except RuntimeError:
            # What is raised for a lost connection and for the time being up differs from version to version.
            if time.monotonic() - started < seconds - _ROUNDING_S:
                raise
            self._counted(None, key)
            return False
        return True

    def _counted(self, answer: Any, *sent: bytes) -> Any:
        self._counts[0] += 1
        self._counts[1] += sum(map(len, sent)) + _HEADER_BYTES * len(sent)
        self._counts[2] += len(answer) + _HEADER_BYTES if isinstance(answer, bytes) else _HEADER_BYTES
        return answer
