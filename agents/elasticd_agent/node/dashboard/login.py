"""What a browser shows instead of the token once somebody has typed that in: a cookie that says until when, signed.

It exists so that the token is never in a browser's store, and that nothing has to be remembered of who came in: any
agent with the same token knows its cookies, another token ends them all. A pass opens the page, never the API. How
often somebody may guess is bounded here, too.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Protocol

COOKIE = "elasticd"
COOKIE_LIFETIME_S = 12 * 3600
"""A working day; then the token is asked for again."""
BURST = 5
ATTEMPT_INTERVAL_S = 10.0
"""So many wrong guesses at once from one address, and then one every so often."""
TOTAL_BURST = 100
TOTAL_ATTEMPT_INTERVAL_S = 0.5
MAX_ADDRESSES = 1024
_PURPOSE = b"elasticd page 1\0"


class TokenVerifier(Protocol):
    """door.TokenDoor."""

    def matches(self, given: str) -> bool: ...
    def signing_key(self) -> bytes | None: ...


class LoginCookies:
    """`clock` is unix seconds: another agent, or this one after its restart, must know what it means."""

    def __init__(self, token: TokenVerifier, clock: Callable[[], float], *, tls: bool) -> None:
        self._token, self._clock, self._tls = token, clock, tls

    def issue(self) -> str | None:
        """The Set-Cookie header's value; None without a token."""
        key = self._token.signing_key()
        if key is None:
            return None
        until = int(self._clock()) + COOKIE_LIFETIME_S
        return self._header(f"{until}.{_signature(key, until)}", COOKIE_LIFETIME_S)

    def expire(self) -> str:
        """The Set-Cookie header's value that takes a pass away."""
        return self._header("", 0)

    def has_valid(self, cookies: str) -> bool:
        """Whether one of these (a Cookie header's value) is a pass that still counts."""
        key = self._token.signing_key()
        return key is not None and any(self._is_valid(value, key) for value in _cookie_values(cookies))

    def _is_valid(self, value: str, key: bytes) -> bool:
        said, _, signature = value.partition(".")
        if not (said.isascii() and said.isdigit() and len(said) <= 12 and signature.isascii()):
            return False
        until = int(said)
        return (
            hmac.compare_digest(signature, _signature(key, until))
            and self._clock() < until <= self._clock() + COOKIE_LIFETIME_S
        )

    def _header(self, value: str, seconds: int) -> str:
        secure = "; Secure" if self._tls else ""
        return f"{COOKIE}={value}; Max-Age={seconds}; Path=/; HttpOnly; SameSite=Strict{secure}"


class LoginRateLimit:
    """How many more wrong tokens are heard: from an address, and in all. Thread-safe, bounded in size."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address: OrderedDict[str, float] = OrderedDict()
        self._total = 0.0

    def attempt(self, host: str) -> float:
        """0: one may be heard from there, and is counted; else for how many seconds none is."""
        now, key = self._clock(), _address_key(host)
        with self._lock:
            # When all of its guesses so far will be forgiven: one number says how many are open.
            own, in_all = max(now, self._by_address.pop(key, 0.0)), max(now, self._total)
            wait = max(
                0.0,
                own - (BURST - 1) * ATTEMPT_INTERVAL_S - now,
                in_all - (TOTAL_BURST - 1) * TOTAL_ATTEMPT_INTERVAL_S - now,
            )
            if not wait:
                own, self._total = own + ATTEMPT_INTERVAL_S, in_all + TOTAL_ATTEMPT_INTERVAL_S
            self._by_address[key] = own
            while len(self._by_address) > MAX_ADDRESSES:
                self._by_address.popitem(last=False)
            return wait

    def reset(self, host: str) -> None:
        """It was the token: what was counted against that address is forgiven."""
        with self._lock:
            self._by_address.pop(_address_key(host), None)


def _cookie_values(cookies: str) -> list[str]:
    pairs = (one.strip().partition("=") for one in cookies.split(";")[:50])
    return [value for name, _, value in pairs if name == COOKIE]


def _signature(key: bytes, until: int) -> str:
    return hmac.new(key, _PURPOSE + str(until).encode(), hashlib.sha256).hexdigest()


def _address_key(host: str) -> str:
    """Who has an IPv6 address has 2^64 of them."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host[:64]
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return f"{int(address) >> 64:x}::/64"
    return str(address.ipv4_mapped or address) if isinstance(address, IPv6Address) else str(address)
