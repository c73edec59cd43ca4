"""Login to the dashboard: a signed cookie with an expiry time instead of the token.

The token never is in the browser's storage, and agents store no sessions: every agent with the same token accepts its
cookies, and a new token invalidates all. A cookie opens the dashboard, never the API. A caller of the API can get a
one-time code that logs a browser in: `elasticd open`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from elasticd_agent.system.http_auth import TokenAuth

COOKIE = "elasticd"
TLS_COOKIE = "__Host-elasticd"
"""Browsers accept this name only over TLS and for this host alone (RFC 6265bis, 4.1.3.2)."""
COOKIE_LIFETIME_S = 12 * 3600
"""A working day."""
CODE_LIFETIME_S = 120.0
"""Of a one-time code: long enough to copy its URL to a browser."""
MAX_CODES = 64
_PURPOSE = b"elasticd page 1\0"


@dataclass(frozen=True, slots=True)
class LoginCookies:
    """`clock` is unix seconds, since other agents and restarts check the cookies, too."""

    token: TokenAuth
    clock: Callable[[], float]
    tls: bool

    @property
    def name(self) -> str:
        return TLS_COOKIE if self.tls else COOKIE

    def may_log_in(self, sender: str, server_name: str) -> bool:
        """Without TLS only a browser on this machine or at the end of a tunnel, that asked for this machine: another
        site's name could lead to our port."""
        return self.tls or (_is_loopback(sender) and _is_loopback(_host_of(server_name)))

    def issue(self) -> str | None:
        """The Set-Cookie header's value; None without a token."""
        key = self.token.signing_key()
        if key is None:
            return None
        until = int(self.clock()) + COOKIE_LIFETIME_S
        return self._header(f"{until}.{_signature(key, until)}", COOKIE_LIFETIME_S)

    def expire(self) -> str:
        """The Set-Cookie header's value that deletes the cookie."""
        return self._header("", 0)

    def has_valid(self, cookies: str) -> bool:
        """Whether a Cookie header's value has a valid cookie."""
        key = self.token.signing_key()
        return key is not None and any(self._is_valid(value, key) for value in _cookie_values(cookies, self.name))

    def _is_valid(self, value: str, key: bytes) -> bool:
        expiry, _, signature = value.partition(".")
        if not (expiry.isascii() and expiry.isdigit() and len(expiry) <= 12 and signature.isascii()):
            return False
        until = int(expiry)
        return (
            hmac.compare_digest(signature, _signature(key, until))
            and self.clock() < until <= self.clock() + COOKIE_LIFETIME_S
        )

    def _header(self, value: str, seconds: int) -> str:
        secure = "; Secure" if self.tls else ""
        return f"{self.name}={value}; Max-Age={seconds}; Path=/; HttpOnly; SameSite=Strict{secure}"


class OneTimeCodes:
    """Codes that log one browser in, each once. In this agent's memory only. Thread-safe, bounded in size."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._expiry: OrderedDict[bytes, float] = OrderedDict()
        """By the code's digest: how long a look-up takes reveals nothing about the code."""

    def issue(self) -> str:
        code = secrets.token_urlsafe(24)
        with self._lock:
            self._expiry[_code_digest(code)] = self._clock() + CODE_LIFETIME_S
            while len(self._expiry) > MAX_CODES:
                self._expiry.popitem(last=False)
        return code

    def redeem(self, code: str) -> bool:
        """Whether the code is valid; from now on it is not."""
        with self._lock:
            return self._clock() < self._expiry.pop(_code_digest(code), 0.0)


def _code_digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def _host_of(server_name: str) -> str:
    """HOST of HOST:PORT or [HOST]:PORT."""
    bracket, _, _ = server_name.partition("]")
    return bracket[1:] if bracket.startswith("[") else server_name.partition(":")[0]


def _cookie_values(cookies: str, wanted: str) -> list[str]:
    pairs = (one.strip().partition("=") for one in cookies.split(";")[:50])
    return [value for name, _, value in pairs if name == wanted]


def _signature(key: bytes, until: int) -> str:
    return hmac.new(key, _PURPOSE + str(until).encode(), hashlib.sha256).hexdigest()
