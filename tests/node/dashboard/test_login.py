"""The cookie that stands for the token, and how often somebody may guess."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from elasticd_agent.node.dashboard.login import (
    BURST,
    BURST_OF_ALL,
    COOKIE,
    EVERY_S,
    LASTS_S,
    MOST_ADDRESSES,
    Guesses,
    Passes,
)


@dataclass
class Fixed:
    secret: bytes | None = b"k" * 32
    now: float = 1_800_000_000.0

    def knows(self, given: str) -> bool:
        return False

    def key(self) -> bytes | None:
        return self.secret

    def clock(self) -> float:
        return self.now


def cookie(header: str | None) -> str:
    assert header is not None
    return header.partition(";")[0]


def test_a_pass_counts_for_a_working_day_at_every_agent_with_that_token() -> None:
    token, other = Fixed(), Fixed()
    made = cookie(Passes(token, token.clock, tls=True).made())
    elsewhere = Passes(other, other.clock, tls=False)
    assert elsewhere.good(f"theme=dark; {made}; x=y")
    other.now += LASTS_S - 1
    assert elsewhere.good(made)
    other.now += 1
    assert not elsewhere.good(made)


def test_another_token_ends_all_passes_and_without_one_there_are_none() -> None:
    token = Fixed()
    passes = Passes(token, token.clock, tls=False)
    made = cookie(passes.made())
    token.secret = b"j" * 32
    assert not passes.good(made)
    token.secret = None
    assert not passes.good(made) and passes.made() is None


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
def test_a_pass_that_was_changed_is_none(change: object) -> None:
    token = Fixed()
    passes = Passes(token, token.clock, tls=False)
    until, _, mac = cookie(passes.made()).partition("=")[2].partition(".")
    assert callable(change)
    assert passes.good(f"{COOKIE}={until}.{mac}")
    assert not passes.good(f"{COOKIE}={change(int(until), mac)}")


def test_what_a_cookie_allows_a_browser() -> None:
    token = Fixed()
    flags = {"HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={LASTS_S}"}
    plain = set((Passes(token, token.clock, tls=False).made() or "").split("; ")[1:])
    assert plain == flags
    assert set((Passes(token, token.clock, tls=True).made() or "").split("; ")[1:]) == flags | {"Secure"}


def test_guesses_from_one_address_are_few() -> None:
    time = Fixed(now=0.0)
    guesses = Guesses(time.clock)
    assert [guesses.take("10.0.0.1") for _ in range(BURST)] == [0.0] * BURST
    assert guesses.take("10.0.0.1") == EVERY_S
    assert guesses.take("10.0.0.2") == 0.0
    time.now += EVERY_S
    assert guesses.take("10.0.0.1") == 0.0
    assert guesses.take("10.0.0.1") > 0.0
    # In a day: the first five, and one every ten seconds.
    heard = 0
    for _ in range(86_400):
        time.now += 1
        heard += guesses.take("10.0.0.1") == 0.0
    assert heard <= 86_400 / EVERY_S + 1


def test_who_has_many_addresses_has_no_more_guesses_in_all() -> None:
    time = Fixed(now=0.0)
    guesses = Guesses(time.clock)
    assert sum(guesses.take(f"10.0.{i // 250}.{i % 250}") == 0.0 for i in range(1000)) == BURST_OF_ALL
    guesses = Guesses(time.clock)
    assert sum(guesses.take(f"2001:db8::{i:x}") == 0.0 for i in range(100)) == BURST
    assert guesses.take("::ffff:10.0.0.1") == 0.0
    for i in range(3 * MOST_ADDRESSES):
        guesses.take(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}")
    assert len(guesses._by) <= MOST_ADDRESSES


def test_the_right_token_forgives() -> None:
    guesses = Guesses(Fixed(now=0.0).clock)
    for _ in range(3 * BURST):
        assert guesses.take("10.0.0.1") == 0.0
        guesses.right("10.0.0.1")
