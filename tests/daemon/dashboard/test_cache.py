"""Concurrent readers share one answer until it expires."""

from __future__ import annotations

import functools
import threading

import pytest

from elasticd_daemon.dashboard.routes import ResponseCache


def test_concurrent_readers_share_one_answer() -> None:
    now, made = [0.0], list[int]()
    fresh: ResponseCache[int] = ResponseCache(1.0, clock=lambda: now[0])
    gate, inside = threading.Event(), threading.Event()

    def make() -> int:
        inside.set()
        assert gate.wait(60)
        made.append(len(made))
        return made[-1]

    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(fresh.get_or_make("a", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert inside.wait(60)
    gate.set()
    for thread in threads:
        thread.join(60)
    assert (answers, made) == ([0] * 8, [0])
    now[0] = 0.99
    assert fresh.get_or_make("a", make) == 0
    now[0] = 1.0
    assert fresh.get_or_make("a", make) == 1


def test_error_is_cached_and_expires() -> None:
    now, requested = [0.0], list[int]()
    fresh: ResponseCache[int] = ResponseCache(1.0, clock=lambda: now[0])

    def refuse() -> int:
        requested.append(1)
        raise LookupError("no")

    for _ in range(3):
        with pytest.raises(LookupError, match="no"):
            fresh.get_or_make("a", refuse)
    assert len(requested) == 1
    now[0] = 2.0
    assert fresh.get_or_make("a", lambda: 7) == 7


def test_cache_is_bounded() -> None:
    fresh: ResponseCache[int] = ResponseCache(1e9, max_entries=3)
    for number in range(100):
        assert fresh.get_or_make(number, functools.partial(int, number)) == number
    assert [fresh.get_or_make(number, lambda: -1) for number in (97, 98, 99, 96, 0)] == [97, 98, 99, -1, -1]
