"""Access to the agent's API: the kernel identifies callers on the unix socket, a token those on TCP.

Access is decided in one place, before more of a request than its head is read. A token is compared in constant time and
never logged or shown.

Three kinds of callers have three kinds of proof. A process on this machine is identified by the kernel, which no secret
could improve. A person or a program elsewhere has a token, of which the agent keeps the file and compares digests, so
neither the length nor a common beginning of a guess shows in the time that a comparison takes. Another agent has a
credential that is derived from the token for one address: a machine that it is lured to learns nothing that opens
another one.

Wrong tokens are slowed down by address, /64 networks counting as one, and reported at most once a minute. Right tokens
are never slowed down, so an attacker cannot lock the owner out. Files are read at each request, so a token that is
replaced on disk counts at once, and one that was removed is void at once.
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
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from elasticd.errors import UsageError
from elasticd_agent.system.files import read_secret
from elasticd_agent.system.network.sockets import peer_credentials

MIN_TOKEN_LENGTH = 32
"""A shorter one could be guessed; `openssl rand -hex 32` makes a good one."""
DENIAL_LOG_INTERVAL_S = 60.0
ATTEMPT_BURST = 5
ATTEMPT_INTERVAL_S = 10.0
"""Wrong tokens from one address at once, and the interval of further ones."""
MAX_LIMITED_ADDRESSES = 1024
AGENT_AUTH_SCHEME = "Elasticd-Agent"
AGENTS_PATH_PREFIX = "/v1/local/"
Access = Literal["read", "operate", "agent"]
"""`agent`: another node's, which asks only for what this node has itself."""
_log = logging.getLogger("elasticd.http")
_SO_PEERGROUPS = 59  # asm-generic/socket.h, Linux 4.13; Python has no name for it
_MAX_GROUPS = (
    256  # as many as fit into the 1,024 bytes that Python reads; of a user with more, only the primary group counts
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request whose credentials are valid."""

    name: str  #: root, uid 1000, or which token: what limits count
    host: str = ""  #: "" on the local socket
    access: Access = "operate"

    def __str__(self) -> str:
        return f"{self.name} at {self.host}" if self.host else self.name

    def refusal(self, method: str, path: str) -> str:
        """Why this caller may not make this request; "" if it may."""
        if self.access == "read" and method not in ("GET", "HEAD"):
            return "this token may only read: it is in http.read_only of agent.toml"
        if self.access == "agent" and not path.startswith(AGENTS_PATH_PREFIX):
            return f"an agent may only ask for {AGENTS_PATH_PREFIX}"
        return ""


@dataclass(frozen=True, slots=True)
class AccessDenied:
    """The HTTP status, and a sentence that says what would be right."""

    code: int
    why: str
    retry_after_s: float = 0.0
    caller: Caller | None = None


class Authenticator(Protocol):
    def authenticate(self, sock: socket.socket, authorization: Sequence[str]) -> Caller | AccessDenied:
        """The caller, or the denial. `authorization`: those headers, as received."""


@dataclass(frozen=True, slots=True)
class PeerCredentialAuth:
    """Admits root, the agent's user, and the users and groups in agent.toml, as the kernel identifies them."""

    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    @classmethod
    def from_names(cls, users: Sequence[str], groups: Sequence[str]) -> PeerCredentialAuth:
        """Users and groups by name or number. Raises UsageError for a name that is unknown on this machine."""
        return cls(
            frozenset(_lookup_id(name, "users", lambda known: pwd.getpwnam(known).pw_uid) for name in users),
            frozenset(_lookup_id(name, "groups", lambda known: grp.getgrnam(known).gr_gid) for name in groups),
        )

    @property
    def socket_mode(self) -> int:
        """No wider than necessary, although the caller is identified in any case."""
        return 0o666 if self.users or len(self.groups) > 1 else 0o660 if self.groups else 0o600

    def authenticate(self, sock: socket.socket, authorization: Sequence[str]) -> Caller | AccessDenied:
        _, uid, gid = peer_credentials(sock)
        if uid in (0, os.geteuid()) or uid in self.users or (self.groups and self.groups & {gid, *_peer_groups(sock)}):
            return Caller("root" if uid == 0 else f"uid {uid}")
        return AccessDenied(
            403,
            f"access denied for user {uid}: root, the agent's own user and those in http.users and http.groups "
            "of agent.toml have access",
            caller=Caller(f"uid {uid}"),
        )


@dataclass(frozen=True, slots=True)
class _TokenFile:
    """A token's file, which is read for every request: a new token counts at once."""

    file: Path
    key: str

    def read_digest(self) -> tuple[bytes | None, str]:
        """The token's digest, or None and the problem."""
        try:
            return token_digest(read_token(self.file, self.key)), ""
        except UsageError as error:
            return None, str(error)


class TokenAuth:
    """Admits callers with the token in `file`, with one of the `named` tokens, and other agents. Thread-safe.

    A right token is accepted at any time: the limit of wrong ones locks nobody out.
    """

    def __init__(
        self,
        file: Path | None,
        named: Mapping[str, Path] = MappingProxyType({}),
        read_only: Sequence[str] = (),
        agents: Path | None = None,
    ) -> None:
        """`read_only`: the names of tokens that change nothing. `agents`: their own; None: that in `file`."""
        self.address = ""
        """The address of this agent for other nodes: their requests are for it alone."""
        self.guesses = GuessLimit(time.monotonic)
        holders = None if file is None else _TokenFile(file, "http.token_file")
        self._agents = holders if agents is None else _TokenFile(agents, "http.agents_token_file")
        self._files = {} if holders is None else {Caller("the token's holder"): holders}
        for name, path in named.items():
            access: Access = "read" if name in read_only else "operate"
            self._files[Caller(f"token {name}", access=access)] = _TokenFile(path, f"http.tokens.{name}")
        self._lock = threading.Lock()
        self._unreported = 0
        """Wrong tokens since the last report."""
        self._reported_at = float("-inf")

    def authenticate(self, sock: socket.socket, authorization: Sequence[str]) -> Caller | AccessDenied:
        if not self._files and self._agents is None:
            return AccessDenied(
                403,
                "this agent has no token, so only /metrics, /healthz and /readyz are public here; set "
                "http.token_file in agent.toml, or use its unix socket on the node itself",
            )
        if self.fingerprint() is None and (self._agents is None or self._agents.read_digest()[0] is None):
            return AccessDenied(403, f"access denied, since the token cannot be used: {self.problem()}")
        if len(authorization) != 1:
            return AccessDenied(
                401, "a token is needed: Authorization: Bearer TOKEN, as in the agent's http.token_file"
            )
        scheme, _, given = authorization[0].strip().partition(" ")
        try:
            host = str(sock.getpeername()[0])
        except OSError:  # it has disconnected
            host = "?"
        caller: Caller | None = None
        if scheme.lower() == "bearer":
            caller = self.holder(given)
        elif scheme.lower() == AGENT_AUTH_SCHEME.lower():
            caller = self._authenticate_agent(given)
        return self.deny_wrong_token(host) if caller is None else replace(caller, host=host)

    def holder(self, given: str) -> Caller | None:
        """The caller whose token it is. All are compared, in constant time, by their digests, which hide lengths."""
        digest = token_digest(given.strip())
        holders = [
            caller for caller, file in self._files.items() if hmac.compare_digest(digest, file.read_digest()[0] or b"")
        ]
        return holders[0] if holders else None

    def _authenticate_agent(self, given: str) -> Caller | None:
        digest = None if self._agents is None else self._agents.read_digest()[0]
        if digest is None or not self.address or not given.isascii():
            return None
        right = hmac.compare_digest(given.strip(), agent_credential(digest, self.address))
        return Caller("an agent", access="agent") if right else None

    def deny_wrong_token(self, host: str) -> AccessDenied:
        """The denial of a wrong token. It is logged, at most once every DENIAL_LOG_INTERVAL_S."""
        wait_s = self.guesses.attempt(host)
        with self._lock:
            self._unreported += 1
            count, due = self._unreported, time.monotonic() >= self._reported_at + DENIAL_LOG_INTERVAL_S
            if due:
                self._unreported, self._reported_at = 0, time.monotonic()
        if due:
            _log.warning("access denied: %d wrong token(s), the last from %s", count, host)
        if wait_s:
            return AccessDenied(429, f"too many wrong tokens; try again in {wait_s:.0f} s", wait_s)
        return AccessDenied(401, "this is not the agent's token")

    def fingerprint(self, name: str = "") -> bytes | None:
        """Changes with the token of the caller `name`, or with every token where it has none; None without a usable
        one. No secret: who knows the tokens can compute it.
        """
        files = [file for caller, file in self._files.items() if caller.name == name] or [*self._files.values()]
        digests = [digest for file in files if (digest := file.read_digest()[0]) is not None]
        return hashlib.sha256(b"".join(digests)).digest() if digests else None

    def may_operate(self, name: str) -> bool:
        """True if the caller `name` still may; a caller without a token has come over the local socket."""
        return all(caller.access == "operate" for caller in self._files if caller.name == name)

    def problem(self) -> str:
        """The problems of the tokens' files, "" if there is none."""
        files = dict.fromkeys([*self._files.values(), *([] if self._agents is None else [self._agents])])
        return "; ".join(problem for file in files if (problem := file.read_digest()[1]))

    def agents_token(self) -> str | None:
        """The agents' token, for requests to another agent; None if there is no usable one."""
        if self._agents is None or self._agents.read_digest()[0] is None:
            return None
        try:
            return read_token(self._agents.file, self._agents.key)
        except UsageError:  # it was removed between the two reads
            return None


class GuessLimit:
    """Limits wrong tokens by address. Thread-safe, bounded in size."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address: OrderedDict[str, float] = OrderedDict()

    def attempt(self, host: str) -> float:
        """0: an attempt from there is allowed, and counted; else the seconds until the next one."""
        now, key = self._clock(), _address_key(host)
        with self._lock:
            # The time when all attempts so far have expired: one number holds how many are left.
            own = max(now, self._by_address.pop(key, 0.0))
            wait = max(0.0, own - (ATTEMPT_BURST - 1) * ATTEMPT_INTERVAL_S - now)
            self._by_address[key] = own if wait else own + ATTEMPT_INTERVAL_S
            while len(self._by_address) > MAX_LIMITED_ADDRESSES:
                self._by_address.popitem(last=False)
            return wait


def _address_key(host: str) -> str:
    """One client has 2^64 IPv6 addresses: the /64 counts."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host[:64]
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return f"{int(address) >> 64:x}::/64"
    return str(address.ipv4_mapped or address) if isinstance(address, IPv6Address) else str(address)


def agent_credential(digest: bytes, address: str) -> str:
    """The credential for the agent at `address`, sent instead of the token: it opens nothing anywhere else.

    An address comes from a node's record in the store, where a forged record could name any machine.
    """
    return hmac.new(digest, f"elasticd agent 1\0{address}".encode(), hashlib.sha256).hexdigest()


def read_token(file: Path, key: str) -> str:
    """The token in `file`; `key` begins the sentences. Raises UsageError, which never quotes the file."""
    token = read_secret(file, key)
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii():
        raise UsageError(
            f"{key}: {str(file)!r} must hold at least {MIN_TOKEN_LENGTH} characters of ASCII; openssl rand -hex 32 "
            "makes a good token"
        )
    return token


def token_digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _peer_groups(sock: socket.socket) -> tuple[int, ...]:
    """The caller's supplementary groups; none where the kernel does not report them."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:
        return ()
    return struct.unpack(f"{len(data) // 4}I", data)


def _lookup_id(name: str, key: str, lookup: Callable[[str], int]) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return lookup(name)
    except KeyError:
        raise UsageError(
            f"http.{key}: there is no {name!r} on this machine; give an existing name, or a number"
        ) from None
