"""Login to the dashboard: a signed cookie with an expiry time instead of the token.

The token never is in the browser's storage, and an agent stores no sessions: it signs cookies with a key that nobody
else knows, and a new token invalidates those of its holder. A cookie opens this agent's dashboard, never the API; it
says who logged in, and whether that one may operate. Browsers send a host's cookies to all its ports: without TLS a
cookie is good only for the user of this machine whose browser got it. Forms carry a second signature, of the cookie,
which no other site knows. A caller of the API can get a one-time code that logs a browser in: `elasticd open`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import quote, unquote

from elasticd_agent.system.network.http_auth import TokenAuth, token_digest

COOKIE_NAME = "elasticd"
TLS_COOKIE_NAME = "__Host-elasticd"
"""Browsers accept this name only over TLS and for this host alone (RFC 6265bis, 4.1.3.2)."""
COOKIE_LIFETIME_S = 12 * 3600
"""A working day."""
CODE_LIFETIME_S = 120.0
"""The lifetime of a one-time code: long enough to copy its URL to a browser."""
MAX_CODES = 64
_PURPOSE, _BUTTON_PURPOSE = b"elasticd page 3\0", b"elasticd button 1\0"


@dataclass(frozen=True, slots=True)
class Visitor:
    """A logged-in browser."""

    name: str
    may_operate: bool
    form_key: str  #: every form of this visitor that changes something has it

    def __str__(self) -> str:
        """The name of this visitor in records."""
        return f"{self.name}, in a browser"

    def owns_form_key(self, form_key: str) -> bool:
        """True if a form with this key comes from one of this visitor's pages."""
        return hmac.compare_digest(form_key.encode(), self.form_key.encode())


@dataclass(frozen=True, slots=True)
class LoginCookies:
    """`clock` is unix seconds, since the agent's next start checks the cookies, too, with the same `signing_key`."""

    token_auth: TokenAuth
    clock: Callable[[], float]
    tls: bool
    signing_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def name(self) -> str:
        return TLS_COOKIE_NAME if self.tls else COOKIE_NAME

    def may_log_in(self, client_host: str, host_header: str, uid: int | None) -> bool:
        """Without TLS only a browser of a known user on this machine or at the end of a tunnel, that asked for this
        machine: another site's name could lead to our port."""
        return self.tls or (uid is not None and _is_loopback(client_host) and _is_loopback(_host_of(host_header)))

    def login_header(self, name: str, may_operate: bool, uid: int | None) -> str | None:
        """The Set-Cookie header's value for `name`, as in Caller, and the browser's `uid`; None without a token."""
        until = int(self.clock()) + COOKIE_LIFETIME_S
        text = f"{until}.{'operate' if may_operate else 'read'}.{quote(name, safe='')}"
        signature = self._signature(text, name, uid)
        return None if signature is None else self._set_cookie(f"{text}.{signature}", COOKIE_LIFETIME_S)

    def logout_header(self) -> str:
        """The Set-Cookie header's value that deletes the cookie."""
        return self._set_cookie("", 0)

    def visitor(self, cookies: str, uid: int | None) -> Visitor | None:
        """Whose valid cookie is in a Cookie header's value that a browser of `uid` has sent."""
        visitors = (self._visitor(value, uid) for value in _cookie_values(cookies, self.name))
        return next((visitor for visitor in visitors if visitor is not None), None)

    def _visitor(self, value: str, uid: int | None) -> Visitor | None:
        text, _, signature = value.rpartition(".")
        name = unquote(text.split(".", 2)[-1])
        right = self._signature(text, name, uid)
        if right is None or not value.isascii() or not hmac.compare_digest(signature, right):
            return None
        expiry, access, _ = text.split(".", 2)  # the signature is right, so all three are
        if not self.clock() < int(expiry) <= self.clock() + COOKIE_LIFETIME_S:
            return None
        may_operate = access == "operate" and self.token_auth.may_operate(name)
        return Visitor(name, may_operate, _signature(self.signing_key, _BUTTON_PURPOSE, value))

    def _signature(self, text: str, name: str, uid: int | None) -> str | None:
        token = self.token_auth.fingerprint(name)
        if token is None or (uid is None and not self.tls):
            return None
        return _signature(self.signing_key, _PURPOSE + token, text if self.tls else f"{uid}.{text}")

    def _set_cookie(self, value: str, seconds: int) -> str:
        secure = "; Secure" if self.tls else ""
        return f"{self.name}={value}; Max-Age={seconds}; Path=/; HttpOnly; SameSite=Strict{secure}"


class OneTimeCodes:
    """Codes that log one browser in, each once. In this agent's memory only. Thread-safe, bounded in size."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._issued: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        """When each expires and to whom it was issued, by its digest: how long a look-up takes reveals nothing."""

    def issue(self, name: str) -> str:
        code = secrets.token_urlsafe(24)
        with self._lock:
            self._issued[token_digest(code)] = self._clock() + CODE_LIFETIME_S, name
            while len(self._issued) > MAX_CODES:
                self._issued.popitem(last=False)
        return code

    def redeem(self, code: str) -> str | None:
        """To whom the code was issued, if it is valid; from now on it is not."""
        with self._lock:
            expiry, name = self._issued.pop(token_digest(code), (0.0, ""))
        return name if self._clock() < expiry else None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def _host_of(host_header: str) -> str:
    """HOST of HOST:PORT or [HOST]:PORT."""
    bracket, _, _ = host_header.partition("]")
    return bracket[1:] if bracket.startswith("[") else host_header.partition(":")[0]


def _cookie_values(cookies: str, wanted: str) -> list[str]:
    pairs = (cookie.strip().partition("=") for cookie in cookies.split(";")[:50])
    return [value for name, _, value in pairs if name == wanted]


def _signature(key: bytes, purpose: bytes, text: str) -> str:
    return hmac.new(key, purpose + text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
