"""Pure: classifies a failed call to etcd, with a sentence for people.

gRPC's status codes are not enough: etcd uses INVALID_ARGUMENT for a wrong password and for a request that is too large.
The texts are those of etcd's `api/v3rpc/rpctypes/error.go` (3.4 to 3.6), which its own clients compare, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class LeaseNotFound(Exception):
    """The request names a lease that has ended; nothing has changed. EtcdStore makes a value of it."""


class ErrorKind(Enum):
    UNAVAILABLE = auto()  # nothing is known about the request; later, or another member, may answer it
    FULL = auto()  # the same, of what writes only
    REFUSED = auto()  # repeating it will not help
    TOKEN = auto()  # the request was not processed, because the token has expired
    AUTH_DISABLED = auto()  # this etcd issues no tokens
    PERMISSION_DENIED = auto()  # refused for this key only
    LEASE_NOT_FOUND = auto()


@dataclass(frozen=True, slots=True)
class ClassifiedError:
    kind: ErrorKind
    sentence: str


# Part of etcd's message: what it means, and what to do about it.
_MEANINGS = {
    "invalid auth token": (ErrorKind.TOKEN, "our token has expired"),
    "revision of auth store is old": (ErrorKind.TOKEN, "users or roles have changed since our token was issued"),
    "authentication is not enabled": (ErrorKind.AUTH_DISABLED, "it does not require a password"),
    "invalid user ID or password": (ErrorKind.REFUSED, "the user or the password is wrong; check both"),
    "user name is empty": (ErrorKind.REFUSED, "it requires a user and a password, and none were given; give both"),
    "user name not found": (ErrorKind.REFUSED, "it has no such user; check the name"),
    "permission denied": (
        ErrorKind.PERMISSION_DENIED,
        "this user may not use {key!r}; grant its role readwrite on that prefix",
    ),
    "requested lease not found": (ErrorKind.LEASE_NOT_FOUND, "the lease has ended"),
    "database space exceeded": (
        ErrorKind.FULL,
        "its disk quota is used up; compact, defragment and disarm its alarm",
    ),
    "request is too large": (ErrorKind.REFUSED, "the value is too large for it; raise its --max-request-bytes"),
    "no leader": (ErrorKind.UNAVAILABLE, "it has no leader: fewer than half of its members are up and connected"),
}

# What gRPC adds to the reason: a status, the address again, the operation.
_GRPC_ADDITIONS = re.compile(r"^[A-Z_]+: |ipv[46]:\S+: |Failed to connect to remote host: |: OK$")


def classify(code: str, details: str, where: str, key: str) -> ClassifiedError:
    """`code` is the name of a gRPC status code, `where` an endpoint, `key` what the request was about."""
    for words, (kind, meaning) in _MEANINGS.items():
        if words in details:
            return ClassifiedError(kind, f"etcd at {where}: {meaning.format(key=key)}")
    if code == "UNIMPLEMENTED":
        return ClassifiedError(ErrorKind.REFUSED, not_etcd_message(where, "it does not implement etcd's v3 calls"))
    if code in ("INVALID_ARGUMENT", "OUT_OF_RANGE"):
        return ClassifiedError(ErrorKind.REFUSED, f"etcd at {where} rejects a request for {key!r}: {details}")
    if code == "DEADLINE_EXCEEDED":
        return ClassifiedError(ErrorKind.UNAVAILABLE, f"etcd at {where} did not answer in time")
    reason = _GRPC_ADDITIONS.sub("", details.rpartition("last error: ")[2]) or code
    return ClassifiedError(ErrorKind.UNAVAILABLE, f"etcd at {where} cannot be reached: {reason}")


def not_etcd_message(where: str, reason: str) -> str:
    return f"{where} is not an etcd v3 server: {reason}; give the address of etcd's client port (2379 as a rule)"
