"""The login cookie and the rate limit of attempts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from elasticd_agent.system.network.http_auth import ATTEMPT_BURST, ATTEMPT_INTERVAL_S, MAX_LIMITED_ADDRESSES, GuessLimit
from elasticd_daemon.dashboard.login import (
    CODE_LIFETIME_S,
    COOKIE_LIFETIME_S,
    COOKIE_NAME,
    MAX_CODES,
    TLS_COOKIE_NAME,
    LoginCookies,
    OneTimeCodes,
)

USER = 1000
KEY = b"x" * 32


@dataclass
class Fixed:
    secret: bytes | None = b"k" * 32
    now: float = 1_800_000_000.0
    readers: tuple[str, ...] = ()

    def fingerprint(self, name: str) -> bytes | None:
        return self.secret

    def may_operate(self, name: str) -> bool:
        return name not in self.readers

    def clock(self) -> float:
        return self.now


def cookie(header: str | None) -> str:
    return header.partition(";")[0]


def test_cookie_is_valid_for_twelve_hours_and_across_restarts() -> None:
    token, other = Fixed(), Fixed()
    made = cookie(LoginCookies(token, token.clock, True, KEY).login_header("root", True, USER))
    assert made.startswith(f"{TLS_COOKIE_NAME}=") and TLS_COOKIE_NAME.startswith("__Host-")
    assert not LoginCookies(other, other.clock, False, KEY).visitor(made, USER)
    elsewhere = LoginCookies(other, other.clock, True, KEY)
    assert elsewhere.visitor(f"theme=dark; {made}; x=y", USER)
    other.now += COOKIE_LIFETIME_S - 1
    assert elsewhere.visitor(made, USER)
    other.now += 1
    assert not elsewhere.visitor(made, USER)


def test_new_token_invalidates_cookies() -> None:
    token = Fixed()
    passes = LoginCookies(token, token.clock, tls=False)
    made = cookie(passes.login_header("root", True, USER))
    token.secret = b"j" * 32
    assert not passes.visitor(made, USER)
    token.secret = None
    assert not passes.visitor(made, USER) and passes.login_header("root", True, USER) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda until, mac: f"{until + 1}.{mac}",
        lambda until, mac: f"{until + 10**9}.{mac}",
        lambda until, mac: f"{until}.{mac[:-1]}0" if mac[-1] != "0" else f"{until}.{mac[:-1]}1",
        lambda until, mac: f"{until}.",
        lambda until, mac: f"{until}",
        lambda until, mac: f"-{until}.{mac}",
        lambda until, mac: f"{until}.{mac.upper()}",
        lambda until, mac: f"{until}é.{mac}",
        lambda until, mac: f"{until}.{mac}é",
        lambda until, mac: f"{'9' * 5000}.{mac}",
        lambda until, mac: "",
    ],
)
def test_modified_cookie_is_invalid(change: object) -> None:
    token = Fixed()
    passes = LoginCookies(token, token.clock, tls=False)
    until, _, mac = cookie(passes.login_header("root", True, USER)).partition("=")[2].partition(".")
    assert callable(change)
    assert passes.visitor(f"{COOKIE_NAME}={until}.{mac}", USER)
    assert not passes.visitor(f"{COOKIE_NAME}={change(int(until), mac)}", USER)
    assert not passes.visitor(f"{COOKIE_NAME}={until}.{mac.replace('root', 'eve')}", USER)


def test_cookie_says_who_may_operate() -> None:
    token = Fixed()
    passes = LoginCookies(token, token.clock, tls=False)
    ann, eve = (
        passes.visitor(cookie(passes.login_header(name, name == "ann.1 <b>", USER)), USER)
        for name in ("ann.1 <b>", "eve")
    )
    assert (ann.name, ann.may_operate, eve.may_operate) == ("ann.1 <b>", True, False)
    assert (
        ann.owns_form_key(ann.form_key)
        and not ann.owns_form_key(eve.form_key)
        and not ann.owns_form_key("")
        and not ann.owns_form_key("é")
    )
    read_only = cookie(passes.login_header("eve", False, USER))
    assert passes.visitor(read_only.replace("read", "operate"), USER) is None


def test_knowing_the_tokens_signs_no_cookie() -> None:
    """One who may only read knows the only token, and what else a signature is made of."""
    token = Fixed()
    theirs = LoginCookies(token, token.clock, tls=False)
    made = cookie(theirs.login_header("root", True, USER))
    assert theirs.visitor(made, USER)
    assert not LoginCookies(token, token.clock, tls=False).visitor(made, USER), "another key"


def test_token_that_may_no_longer_operate_demotes_its_cookies() -> None:
    token = Fixed()
    passes = LoginCookies(token, token.clock, tls=False)
    made = cookie(passes.login_header("token ann", True, USER))
    token.readers = ("token ann",)
    found = passes.visitor(made, USER)
    assert found is not None and not found.may_operate


def test_cookie_is_good_for_the_browsers_user_only() -> None:
    """Browsers send it to every port of 127.0.0.1, also to another user's."""
    token = Fixed()
    plain = LoginCookies(token, token.clock, tls=False)
    made = cookie(plain.login_header("root", True, USER))
    assert plain.visitor(made, USER)
    assert not plain.visitor(made, USER + 1) and not plain.visitor(made, None)
    assert plain.login_header("root", True, None) is None
    secure = LoginCookies(token, token.clock, tls=True)
    assert secure.visitor(cookie(secure.login_header("root", True, None)), None), "from another machine"


def test_cookie_attributes() -> None:
    token = Fixed()
    flags = {"HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={COOKIE_LIFETIME_S}"}
    plain = set((LoginCookies(token, token.clock, tls=False).login_header("root", True, USER) or "").split("; ")[1:])
    assert plain == flags
    assert set(
        (LoginCookies(token, token.clock, True, KEY).login_header("root", True, USER) or "").split("; ")[1:]
    ) == flags | {"Secure"}


def test_attempts_per_address_are_limited() -> None:
    time = Fixed(now=0.0)
    guesses = GuessLimit(time.clock)
    assert [guesses.attempt("10.0.0.1") for _ in range(ATTEMPT_BURST)] == [0.0] * ATTEMPT_BURST
    assert guesses.attempt("10.0.0.1") == ATTEMPT_INTERVAL_S
    assert guesses.attempt("10.0.0.2") == 0.0
    time.now += ATTEMPT_INTERVAL_S
    assert guesses.attempt("10.0.0.1") == 0.0
    assert guesses.attempt("10.0.0.1") > 0.0
    # In a day: the first five, and one every ten seconds.
    received = 0
    for _ in range(86_400):
        time.now += 1
        received += guesses.attempt("10.0.0.1") == 0.0
    assert received <= 86_400 / ATTEMPT_INTERVAL_S + 1


def test_limit_is_bounded_in_size() -> None:
    time = Fixed(now=0.0)
    guesses = GuessLimit(time.clock)
    assert sum(guesses.attempt(f"2001:db8::{i:x}") == 0.0 for i in range(100)) == ATTEMPT_BURST
    assert guesses.attempt("::ffff:10.0.0.1") == 0.0
    assert guesses.attempt("2001:db8::1") > 0.0
    for i in range(MAX_LIMITED_ADDRESSES):
        guesses.attempt(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}")
    assert guesses.attempt("2001:db8::1") == 0.0, "what lies furthest back has made room"


def test_code_is_valid_once_and_for_a_short_time() -> None:
    time = Fixed(now=0.0)
    codes = OneTimeCodes(time.clock)
    code = codes.issue("root")
    assert not codes.redeem("") and not codes.redeem(code[:-1])
    assert codes.redeem(code) and not codes.redeem(code)
    code = codes.issue("root")
    time.now += CODE_LIFETIME_S
    assert not codes.redeem(code)
    first, *_, last = [codes.issue("root") for _ in range(MAX_CODES + 1)]
    assert not codes.redeem(first) and codes.redeem(last)
