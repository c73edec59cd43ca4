"""What a failed call to etcd means, and the sentence a person gets: pure, no network.

gRPC's status codes alone do not tell: etcd uses INVALID_ARGUMENT for a wrong password and for a request that is too
large. The words are those of etcd's `api/v3rpc/rpctypes/error.go` (3.4 to 3.6), which its clients compare, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    UNAVAILABLE = auto()  # nothing is known about the request; another time, or another member, may answer
    REFUSED = auto()  # asking again will not help
    TOKEN = auto()  # the request was not looked at, because the token is no longer good
    NO_PASSWORDS = auto()  # asked for a token, but this etcd gives none out
    NOT_ALLOWED = auto()  # refused for this key only
    LEASE_GONE = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    sentence: str


# Part of what etcd says -> what it means, and what to do about it.
_WORDS: tuple[tuple[str, Kind, str], ...] = (
    ("invalid auth token", Kind.TOKEN, "our token has ended"),
    ("revision of auth store is old", Kind.TOKEN, "users or roles have changed since our token was given out"),
    ("authentication is not enabled", Kind.NO_PASSWORDS, "it asks nobody for a password"),
    ("invalid user ID or password", Kind.REFUSED, "the user or the password is wrong; check both"),
    ("user name is empty", Kind.REFUSED, "it asks for a user and a password, and none were given; give both"),
    ("user name not found", Kind.REFUSED, "it does not know this user; check the name"),
    ("permission denied", Kind.NOT_ALLOWED, "this user may not use {key!r}; grant its role readwrite on that prefix"),
    ("requested lease not found", Kind.LEASE_GONE, "the lease has ended"),
    (
        "database space exceeded",
        Kind.UNAVAILABLE,
        "its disk quota is used up; compact, defragment and disarm its alarm",
    ),
    ("request is too large", Kind.REFUSED, "the value is too large for it; raise its --max-request-bytes"),
    ("no leader", Kind.UNAVAILABLE, "it has no leader: fewer than half of its members are up and see each other"),
)

# What gRPC puts around the reason: a status, the address once more, what it was about to do.
_AROUND = re.compile(r"^[A-Z_]+: |ipv[46]:\S+: |Failed to connect to remote host: |: OK$")


def judge(code: str, details: str, where: str, key: str) -> Verdict:
    """`code` is the name of a gRPC status code, `where` an endpoint, `key` what the request was about."""
    for words, kind, meaning in _WORDS:
        if words in details:
            return Verdict(kind, f"etcd at {where}: {meaning.format(key=key)}")
    if code == "UNIMPLEMENTED":
        return Verdict(Kind.REFUSED, not_an_etcd(where, "it does not know etcd's v3 calls"))
    if code in ("INVALID_ARGUMENT", "OUT_OF_RANGE"):
        return Verdict(Kind.REFUSED, f"etcd at {where} refuses a request about {key!r}: {details}")
    if code == "DEADLINE_EXCEEDED":
        return Verdict(Kind.UNAVAILABLE, f"etcd at {where} did not answer in time")
    reason = _AROUND.sub("", details.rpartition("last error: ")[2]) or code
    return Verdict(Kind.UNAVAILABLE, f"etcd at {where} cannot be reached: {reason}")


def not_an_etcd(where: str, reason: str) -> str:
    return f"{where} is not an etcd v3 server: {reason}; give the address of etcd's client port (2379 as a rule)"
