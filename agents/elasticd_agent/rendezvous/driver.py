"""How the deciding loop takes part in its job: at once where the store is this process's memory, else through a thread.

Both ways have the same face, so that the loop is one. The thread owns the coordinator's turns: a store that does not
answer costs the loop nothing. Neither decides anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from elasticd.errors import ElasticdError
from elasticd_agent.model.notices import News
from elasticd_agent.model.records import Failure
from elasticd_agent.model.reports import Report
from elasticd_agent.rendezvous.member import Coordinator, Turned
from elasticd_agent.rendezvous.planner import Facts

LINGER_S = 5.0
"""How long the host of a store waits, once the job has ended, for the others to have heard of it."""
CLOSE_S = 5.0
GATHER_S = 0.05
"""The planner rests after a turn for as long as the turn took, and no longer than this."""


class Meeting(Protocol):
    """What the loop may say to the other agents of its job, and when it hears from them."""

    @property
    def facts(self) -> Facts: ...
    def update(self, **fields: Any) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def done(self, number: int) -> None: ...
    def master(self, number: int, address: str, port: int) -> None: ...
    def report(self, report: Report | None) -> None: ...

    def turn(self, now: float) -> Turned:
        """What there is to hear, and when to ask again at the latest."""
        ...


@dataclass(frozen=True, slots=True)
class Broken:
    """The thread that talks to the store has ended by a mistake of ours."""

    error: BaseException


class LocalMeeting:
    """Every turn of the loop is a turn of the coordinator."""

    def __init__(self, coordinator: Coordinator, facts: Facts) -> None:
        self._coordinator, self.facts = coordinator, facts
        self.update, self.done, self.master = coordinator.update, coordinator.done, coordinator.master
        self.report = coordinator.report

    def failed(self, failure: Failure) -> None:
        self._coordinator.failed(failure, time.monotonic())

    def turn(self, now: float) -> Turned:
        return self._coordinator.turn(now)


class RemoteMeeting:
    """The coordinator's turns are a thread's, which puts what the loop must hear into its inbox."""

    def __init__(
        self, coordinator: Coordinator, facts: Facts, post: Callable[[News | Broken], None], hosts: bool
    ) -> None:
        self._coordinator, self.facts, self._post, self._hosts = coordinator, facts, post, hosts
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elasticd-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Something has changed: take a turn soon. Safe from any thread."""
        self._changed.set()

    def update(self, **fields: Any) -> None:
        self._coordinator.update(**fields)
        self._changed.set()

    def failed(self, failure: Failure) -> None:
        self._coordinator.failed(failure, time.monotonic())
        self._changed.set()

    def done(self, number: int) -> None:
        self._coordinator.done(number)
        self._changed.set()

    def master(self, number: int, address: str, port: int) -> None:
        self._coordinator.master(number, address, port)
        self._changed.set()

    def report(self, report: Report | None) -> None:
        self._coordinator.report(report)
        self._changed.set()

    def turn(self, now: float) -> Turned:
        return [], None

    def _run(self) -> None:
        try:
            while not self._closing:
                self._changed.clear()
                began = time.monotonic()
                news, until = self._coordinator.turn(began)
                took_s = time.monotonic() - began
                for said in news:
                    self._post(said)
                self._changed.wait(None if until is None else max(0.0, until - time.monotonic()))
                if self._coordinator.plans and not self._closing:
                    # What many nodes say at once is answered by one look at all of them.
                    time.sleep(min(took_s, GATHER_S))
        except BaseException as error:  # noqa: BLE001 nobody else would hear of it
            self._post(Broken(error))

    def abandon(self) -> None:
        """Take no more turns, and take nothing back: what a killed agent does."""
        self._closing = True
        self._changed.set()
        self._thread.join(CLOSE_S)

    def close(self) -> None:
        """Leave the job's table; a host waits until the others have, too. Bounded."""
        self.abandon()
        deadline = time.monotonic() + LINGER_S
        try:
            while self._hosts and time.monotonic() < deadline and not self._coordinator.others_gone():
                time.sleep(0.05)
        except ElasticdError:
            pass  # nobody can be told any more
        self._coordinator.close()
