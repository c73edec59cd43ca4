"""Access to the agent's API: the kernel identifies callers on the unix socket, a token those on TCP.

Access is decided in one place, before more of a request than its head is read. A token is compared in constant time and
never logged or shown.
"""

from __future__ import annotations

import grp
import hashlib
import hmac
import logging
import os
import pwd
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticd.errors import UsageError
from elasticd_agent.system.files import read_secret

MIN_TOKEN_LENGTH = 32
"""A shorter one could be guessed; `openssl rand -hex 32` makes a good one."""
REPORT_INTERVAL_S = 60.0
_log = logging.getLogger("elasticd.http")
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))
_SO_PEERGROUPS = 59  # asm-generic/socket.h, Linux 4.13; Python has no name for it
_MAX_GROUPS = (
    256  # as many as fit into the 1,024 bytes that Python reads; of a user with more, only the primary group counts
)


@dataclass(frozen=True, slots=True)
class AccessDenied:
    """The HTTP status, and a sentence that says what would be right."""

    code: int
    why: str


class Authenticator(Protocol):
    def authenticate(self, sock: socket.socket, authorization: Sequence[str]) -> str | AccessDenied:
        """The caller, as `by` in records, or the denial. `authorization`: those headers, as received."""


@dataclass(frozen=True, slots=True)
class PeerCredentialAuth:
    """Admits root, the agent's user, and the users and groups in agent.toml, as the kernel identifies them."""

    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    @classmethod
    def from_names(cls, users: Sequence[str], groups: Sequence[str]) -> PeerCredentialAuth:
        """By name or number. Raises UsageError for a name that is unknown on this machine."""
        return cls(
            frozenset(_lookup_id(name, "users", lambda known: pwd.getpwnam(known).pw_uid) for name in users),
            frozenset(_lookup_id(name, "groups", lambda known: grp.getgrnam(known).gr_gid) for name in groups),
        )

    @property
    def socket_mode(self) -> int:
        """No wider than necessary, although the caller is identified in any case."""
        return 0o666 if self.users or len(self.groups) > 1 else 0o660 if self.groups else 0o600

    def authenticate(self, sock: socket.socket, authorization: Sequence[str]) -> str | AccessDenied:
        _, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid in (0, os.geteuid()) or uid in self.users or (self.groups and self.groups & {gid, *_groups(sock)}):
            return "root" if uid == 0 else f"uid {uid}"
        return AccessDenied(
            403,
            f"access denied for user {uid}: root, the agent's own user and those in http.users and http.groups "
            "of agent.toml have access",
        )


class TokenAuth:
    """Admits callers with the token in `file`, which is read again after a change. Thread-safe."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] = ()
        self._digest: bytes | None = None
        self._problem = ""
        self._wrong = 0
        """Not reported yet."""
        self._reported_at = float("-inf")

    def authenticate(self, sock: socket.socket, authorization: Sequence[str]) -> str | AccessDenied:
        if self._file is None:
            return AccessDenied(
                403,
                "this agent has no token, so only /metrics, /healthz and /readyz are public here; set "
                "http.token_file in agent.toml, or use its unix socket on the node itself",
            )
        digest, trouble = self._read(self._file)
        if digest is None:
            return AccessDenied(403, f"access denied, since the token cannot be used: {trouble}")
        if len(authorization) != 1:
            return AccessDenied(
                401, "a token is needed: Authorization: Bearer TOKEN, as in the agent's http.token_file"
            )
        scheme, _, given = authorization[0].strip().partition(" ")
        try:
            host = str(sock.getpeername()[0])
        except OSError:  # it has disconnected
            host = "?"
        if not self.matches(given) or scheme.lower() != "bearer":
            self.report_wrong(host)
            return AccessDenied(401, "this is not the agent's token")
        return f"the token's holder at {host}"

    def report_wrong(self, host: str) -> None:
        """Log a wrong token, at most once every REPORT_INTERVAL_S."""
        with self._lock:
            self._wrong += 1
            if time.monotonic() < self._reported_at + REPORT_INTERVAL_S:
                return
            count, self._wrong, self._reported_at = self._wrong, 0, time.monotonic()
        _log.warning("access denied: %d wrong token(s), the last from %s", count, host)

    def matches(self, given: str) -> bool:
        digest = self.signing_key()
        # Comparing digests also hides the token's length from a measurement of time.
        same = hmac.compare_digest(_digest(given.strip().encode("utf-8", "surrogateescape")), digest or b"")
        return same and digest is not None

    def signing_key(self) -> bytes | None:
        """A key for signatures that changes with the token; None without one."""
        return None if self._file is None else self._read(self._file)[0]

    def problem(self) -> str:
        """What is wrong with the token's file, "" if nothing."""
        return self._read(self._file)[1] if self._file is not None else ""

    def token(self) -> str | None:
        """The token itself, for requests to another agent; None if there is no usable one."""
        if self._file is None or self._read(self._file)[0] is None:
            return None
        try:
            return read_token(self._file, "http.token_file")
        except UsageError:  # it was removed between the two reads
            return None

    def _read(self, file: Path) -> tuple[bytes | None, str]:
        """Its digest, or None and the problem."""
        try:
            found = os.stat(file)
        except (OSError, ValueError) as error:
            return None, f"http.token_file: {file}: {(isinstance(error, OSError) and error.strerror) or error}"
        stamp = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode)
        with self._lock:
            if stamp != self._stamp:
                try:
                    self._digest = _digest(read_token(file, "http.token_file").encode())
                    self._problem = ""
                except UsageError as error:
                    self._digest = None
                    self._problem = str(error)
                self._stamp = stamp
            return self._digest, self._problem


def read_token(file: Path, key: str) -> str:
    """The token in `file`; `key` begins the sentences. Raises UsageError, which never quotes the file."""
    token = read_secret(file, key)
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii():
        raise UsageError(
            f"{key}: {str(file)!r} must hold at least {MIN_TOKEN_LENGTH} characters of ASCII; openssl rand -hex 32 "
            "makes a good token"
        )
    return token


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """The caller's supplementary groups; none where the kernel does not report them."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:
        return ()
    return struct.unpack(f"{len(data) // 4}I", data)


def _lookup_id(name: str, key: str, known: Callable[[str], int]) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return known(name)
    except KeyError:
        raise UsageError(
            f"http.{key}: there is no {name!r} on this machine; give an existing name, or a number"
        ) from None
