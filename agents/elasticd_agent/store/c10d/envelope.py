"""What stands in a TCPStore that elasticd keeps: the names, and the envelope around every value.

A TCPStore knows bytes, not versions, so each value carries its own. It cannot delete a key only if it is unchanged
either, so a deleted key first becomes a gravestone by compare-and-set; the host buries those later (server_process.py).
This runs in the helper process and imports nothing but the standard library; it decides nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

ROOT = b"elasticd/1/"
MARKER = ROOT + b"host"
"""Which host start this is. Set last, so that whoever reads it finds everything else in place."""
STANDALONE = " apart"
"""Ends the mark of a host that is no agent of a job: any of its agents may plan then."""
VERSION = ROOT + b"version"
"""The counter all versions are drawn from."""
DIRECTORIES = ROOT + b"directories"
LEASES = ROOT + b"leases"
WATCHED = ROOT + b"watched"
"""Which prefixes anyone watches: only their counters are moved by a change, so that nobody else is woken by it."""
CLOSING = b"!closing\n"
"""An index that the host is about to remove: what is added to it now is lost."""
ENDED = b"-4611686018427387904"
"""A lease's counter after its end, so low that no renewal brings it back above zero."""


def value_key(key: str) -> bytes:
    return ROOT + b"value/" + _bytes(key)


def index_key(directory: str) -> bytes:
    return ROOT + b"index/" + _bytes(directory)


def lease_key(lease: str) -> bytes:
    return ROOT + b"lease/" + _bytes(lease)


def lease_members_key(lease: str) -> bytes:
    """The keys that may belong to a lease."""
    return ROOT + b"held/" + _bytes(lease)


def counter_key(prefix: str) -> bytes:
    """How many changes there were below a watched prefix."""
    return ROOT + b"changes/" + _bytes(prefix)


def watchers_key(prefix: str) -> bytes:
    """Moves as long as anyone watches the prefix."""
    return ROOT + b"watching/" + _bytes(prefix)


def event_key(prefix: str, number: int) -> bytes:
    """Which key the change `number` was about; it appears when the change is done, and watches wait for it."""
    return ROOT + b"change/%d/" % number + _bytes(prefix)


def split_key(key: str) -> tuple[str, str]:
    """A key's directory, with its last '/', and its name in there."""
    directory, slash, leaf = key.rpartition("/")
    return directory + slash, leaf


def entry(text: str) -> bytes:
    """One entry of a register, which is a value that everyone only appends to."""
    return b"=" + _bytes(text) + b"\n"


def entries(raw: bytes | None) -> dict[str, None]:
    """The entries of a register, each once, in order; what is none of ours is passed over."""
    return dict.fromkeys(_lines(raw or b""))


def _lines(raw: bytes) -> Iterator[str]:
    for part in raw.split(b"\n"):
        if part.startswith(b"="):
            yield part[1:].decode(errors="surrogateescape")


def join_entries(entries: Iterable[str]) -> bytes:
    """A register with these entries. Never empty: to a TCPStore an empty value is like none."""
    return b"".join(map(entry, entries)) or b"\n"


def parse_number(raw: bytes | None) -> int | None:
    try:
        return None if raw is None else int(raw)
    except ValueError:
        return None


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


class KeyState(Enum):
    PRESENT = b"here"
    TOMBSTONE = b"gone"
    """Deleted; the next creation replaces it."""
    REMOVING = b"buried"
    """The host removes it at this moment; nobody may replace it, so that nothing new is removed with it."""


_MAGIC = b"elasticd1"


@dataclass(frozen=True, slots=True)
class Envelope:
    """A value, its version and its lease ("": none). The nonce makes any two envelopes differ, and so any two swaps."""

    state: KeyState
    version: int
    lease: str
    value: bytes
    nonce: str = ""

    def encode(self) -> bytes:
        nonce = secrets.token_hex(8)
        return b"%s %s %d %s %s\n%s" % (
            _MAGIC,
            self.state.value,
            self.version,
            nonce.encode(),
            self.lease.encode() or b"-",
            self.value,
        )

    def as_tombstone(self, state: KeyState) -> bytes:
        """The gravestone of this value."""
        return replace(self, state=state, lease="", value=b"").encode()


def decode(raw: bytes | None) -> Envelope | None:
    """What `raw` holds; None: nothing. Bytes that are not ours are a value of version 0, for others to complain of."""
    if not raw:
        return None
    head, newline, value = raw.partition(b"\n")
    try:
        name, state, version, nonce, lease = head.split(b" ")
        if name != _MAGIC or not newline:
            raise ValueError
        owner = "" if lease == b"-" else lease.decode("ascii")
        return Envelope(KeyState(state), int(version), owner, value, nonce.decode("ascii"))
    except ValueError:
        return Envelope(KeyState.PRESENT, 0, "", raw)
