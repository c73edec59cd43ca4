"""A connection to a TCPStore, and how elasticd's records are stored in one: key names, registers and envelopes.

torch's TCPStore has get, set, add, compare-and-set and delete of single keys. The store's contract
(`elasticd_agent.store`) needs versions, leases, watches, lists and guarded writes. They are built from these few
verbs, by rules that every client keeps; `server_process` maintains what no client can.

    version     a value is in an envelope with a number from one counter, so that a compare-and-set of the whole
                envelope is a compare-and-set of the version. Two writes of one value differ
    deletion    a key cannot be deleted on the condition that it is unchanged. So a
                compare-and-set makes it a tombstone first, and the host removes the tombstone when it is older than any
                request. A client that has read the key, or its name in an index, is done by then; without the wait it
                would write into a key that is gone
    list        a directory is an index of names, to which a name is added before its key is written and from which the
                host removes it after the key is. So a list may name a key that is not there, and never lacks one that
                is
    lease       a counter that its holder adds to. The host ends a lease whose counter has not moved for its time on
                the host's clock, while the host itself was awake: a suspended host must not end all leases. An ended
                lease has so low a count that no renewal brings it above zero again
    watch       a change adds to the counters of the prefixes that some client watches, and only those clients wake. A
                watch says that a key is worth reading again: one that is missed costs time, never correctness
    guard       two keys cannot be compared at once. The guard is read first and the key written then; a new leader
                therefore gives the guarded key another version, and a former one loses its compare-and-set
    host        a restarted host has lost everything. `HOST_MARKER`, written last, names one start of the host: a client
                that finds another one treats all of its leases as ended and all versions as invalid

Everything works with torch 2.6 and newer and imports only the standard library: this runs in the helper process, which
passes torch in, so that no agent process loads torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any

_GET_TIMEOUT_S = 0.2
_TIMEOUT_ROUNDING_S = 0.01

# ---- key names

KEY_PREFIX = b"elasticd/1/"
HOST_MARKER = KEY_PREFIX + b"host"
"""Identifies one start of the host. Written last, so that everything else is in place once it is there."""
STANDALONE_SUFFIX = " standalone"
"""Ends the marker of a host that is no agent of a job: any of its agents may lead then."""
TERM_FIELD = " term="
"""Begins the end of the marker of a host that is an agent, where another agent may host the job's next store."""
VERSION_COUNTER = KEY_PREFIX + b"version"
"""The counter from which all versions are drawn."""
DIRECTORY_REGISTER = KEY_PREFIX + b"directories"
LEASE_REGISTER = KEY_PREFIX + b"leases"
WATCHED_PREFIX_REGISTER = KEY_PREFIX + b"watched"
"""The prefixes that any client watches: a change moves only their counters, and wakes no other client."""
CLOSING_INDEX = b"!closing\n"
"""An index that the host is about to remove: entries added to it now are lost."""
ENDED_LEASE_COUNT = b"-4611686018427387904"
"""A lease's counter after its end, so low that no renewal brings it above zero again."""


def to_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def to_text(raw: bytes) -> str:
    return raw.decode(errors="surrogateescape")


def _key(kind: bytes, name: str) -> bytes:
    return KEY_PREFIX + kind + to_bytes(name)


value_key = partial(_key, b"value/")
index_key = partial(_key, b"index/")
"""The names in a directory."""
lease_counter_key = partial(_key, b"lease/")
"""A lease's counter, which every renewal moves."""
lease_members_key = partial(_key, b"held/")
"""The keys that may belong to a lease."""
change_counter_key = partial(_key, b"changes/")
"""The number of changes below a watched prefix."""
watcher_counter_key = partial(_key, b"watching/")
"""Moves while any client watches the prefix."""


def change_key(prefix: str, number: int) -> bytes:
    """Names the key of change `number`; it appears when the change is done, and watches wait for it."""
    return _key(b"change/%d/" % number, prefix)


def split_key(key: str) -> tuple[str, str]:
    """A key's directory, with its last '/', and its name in there."""
    directory, slash, leaf = key.rpartition("/")
    return directory + slash, leaf


# ---- registers: values to which every client only appends


def encode_entry(text: str) -> bytes:
    return b"=" + to_bytes(text) + b"\n"


def decode_entries(raw: bytes | None) -> dict[str, None]:
    """The entries of a register, each once, in order. Foreign lines are ignored."""
    return dict.fromkeys(to_text(part[1:]) for part in (raw or b"").split(b"\n") if part.startswith(b"="))


def encode_entries(texts: Iterable[str]) -> bytes:
    """A register with these entries. Never empty: to a TCPStore an empty value is none."""
    return b"".join(map(encode_entry, texts)) or b"\n"


def parse_marker(start: str) -> tuple[bool, int]:
    """The facts in a marker: True if the host is no agent of a job, and the store's term, 0 for none."""
    return start.endswith(STANDALONE_SUFFIX), parse_number(start.partition(TERM_FIELD)[2].encode()) or 0


def parse_number(raw: bytes | None) -> int | None:
    try:
        return None if raw is None else int(raw)
    except ValueError:
        return None


# ---- envelopes


class KeyState(Enum):
    PRESENT = b"here"
    TOMBSTONE = b"gone"  #: deleted; the next creation replaces it
    REMOVING = b"buried"
    """The host removes it at this moment: no client may replace it, so that nothing new is removed with it."""


_MAGIC = b"elasticd1"


@dataclass(frozen=True, slots=True)
class Envelope:
    state: KeyState
    version: int
    lease: str  #: "" for none
    value: bytes

    def encode(self) -> bytes:
        """The envelope's bytes, with a nonce: any two differ, and a lost compare-and-set never looks like a success."""
        head = (
            _MAGIC,
            self.state.value,
            b"%d" % self.version,
            secrets.token_hex(8).encode(),
            self.lease.encode() or b"-",
        )
        return b" ".join(head) + b"\n" + self.value

    def encode_tombstone(self, state: KeyState = KeyState.TOMBSTONE) -> bytes:
        return replace(self, state=state, lease="", value=b"").encode()


def decode_envelope(raw: bytes | None) -> Envelope | None:
    """None: there is no value. Foreign bytes are a value of version 0, which its readers reject."""
    if not raw:
        return None
    head, newline, value = raw.partition(b"\n")
    try:
        name, state, version, _, lease = head.split(b" ")
        if name != _MAGIC or not newline:
            raise ValueError
        owner = "" if lease == b"-" else lease.decode("ascii")
        return Envelope(KeyState(state), int(version), owner, value)
    except ValueError:
        return Envelope(KeyState.PRESENT, 0, "", raw)


# ---- the connection


def set_host_lookup(where: bytes) -> None:
    """Make this process look up host names there: b"files", or the value of nsswitch.conf.

    torch looks up the name of every peer for its logs, on both sides of a connection, the server on the one thread that
    serves all clients; a DNS server that loses the request stops them for 5 s each time.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:  # glibc's; without it there is no nsswitch.conf either
        configure(b"hosts", where)


class TcpStoreConnection:
    """The requests that are used of a TCPStore. Raises RuntimeError when the connection is lost.

    Not thread-safe: torch runs one request of a connection at a time, and a blocking one would block the others.
    """

    def __init__(self, tcp_store: Callable[..., Any], host: str, port: int, timeout_s: float, **more: Any) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store = tcp_store(host, port, wait_for_workers=False, timeout=timeout, **{"is_master": False, **more})
        self._unmatchable = b"?" + secrets.token_hex(8).encode()
        # Only multi_get uses it, and it waits only for a key that has just been removed.
        self._store.set_timeout(timedelta(seconds=_GET_TIMEOUT_S))

    def read(self, key: bytes) -> bytes | None:
        """One request; torch's get() makes two, and blocks if there is no value.

        It is a compare_set that cannot succeed, and that returns the expected value if there is none.
        """
        never = self._unmatchable
        value: bytes = self._store.compare_set(key, never, never)
        return None if value in (b"", never) else value

    def swap(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        """`value` must differ from every other one, or a lost race looks like a success."""
        return bool(self._store.compare_set(key, expected or b"", value) == value)

    def read_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if len(keys) > 2 and self.check(keys):
            # One may be removed meanwhile; if the connection is alive, reading one by one works.
            with contextlib.suppress(RuntimeError):
                return [value or None for value in self._store.multi_get(keys)]
        return [self.read(key) for key in keys]

    def set(self, key: bytes, value: bytes) -> None:
        self._store.set(key, value)

    def add(self, key: bytes, amount: int) -> int:
        return int(self._store.add(key, amount))

    def append(self, key: bytes, value: bytes) -> None:
        self._store.append(key, value)

    def check(self, keys: Sequence[bytes]) -> bool:
        return bool(self._store.check(keys))

    def delete(self, key: bytes) -> None:
        self._store.delete_key(key)

    def wait(self, key: bytes, seconds: float) -> bool:
        """Wait until `key` is there. The server answers when it appears, without polling. False: not in time."""
        started = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            # What is raised for a lost connection and for a timeout differs from version to version.
            if time.monotonic() - started < seconds - _TIMEOUT_ROUNDING_S:
                raise
            return False
        return True
