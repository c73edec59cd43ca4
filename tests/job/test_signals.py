"""Which signals stop a job, and which kill it."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator

import pytest

from elasticd.sigterm import TOGETHER_S
from elasticd_agent.job.run import Message, handled_signals
from elasticd_agent.model.messages import StopForced, StopRequested
from elasticd_daemon.agent import signals_to_inbox
from elasticd_daemon.loop import Message as AgentMessage
from elasticd_daemon.loop import SignalRequest


def test_signals_of_one_request_do_not_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout(1) sends its signal to its child and, at once, to the child's process group."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    inbox = queue.SimpleQueue[Message]()
    with handled_signals(("SIGTERM", "SIGINT"), inbox, lambda: "") as received:
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(signum)
        assert inbox.get_nowait() == StopRequested("SIGTERM", 143, now, "")
        assert inbox.empty()
        now += TOGETHER_S
        signal.raise_signal(signal.SIGINT)
        assert inbox.get_nowait() == StopForced("SIGINT", 130, now)
        assert received[0] == signal.SIGTERM


@pytest.fixture
def signal_mask() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_signals_of_one_request_to_an_agent_do_not_kill_its_jobs(
    monkeypatch: pytest.MonkeyPatch, signal_mask: None
) -> None:
    """An agent that ends leaves its signals blocked."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    inbox = queue.SimpleQueue[AgentMessage]()
    with signals_to_inbox(inbox):
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(signum)
        now += TOGETHER_S
        signal.raise_signal(signal.SIGTERM)
    asked = [inbox.get_nowait() for _ in range(inbox.qsize())]
    assert asked == [SignalRequest(*of) for of in (("drain", "SIGTERM"), ("reload", "SIGHUP"), ("drain", "SIGTERM"))]
