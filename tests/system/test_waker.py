"""Waking a thread that waits in poll."""

from __future__ import annotations

import select

from elasticd_agent.system.waker import Waker


def test_many_wakes_are_one_and_none_blocks() -> None:
    waker, poll = Waker(), select.poll()
    poll.register(waker, select.POLLIN)
    assert poll.poll(0) == []
    for _ in range(100_000):
        waker.wake()
    while poll.poll(0):
        waker.drain()
    waker.drain()
    assert poll.poll(0) == []
    waker.close()
    waker.wake()
