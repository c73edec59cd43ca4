"""Drives a RendezvousMember for the deciding loop: inline where the store is this process's memory, else in a thread.

Both drivers have one interface. With the thread, a store that does not answer costs the loop nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from elasticd.errors import ElasticdError
from elasticd_agent.model.notices import Notice
from elasticd_agent.model.records import Failure
from elasticd_agent.model.reports import HangReport
from elasticd_agent.rendezvous.member import RendezvousMember, TurnResult
from elasticd_agent.rendezvous.view import LocalFacts

LINGER_S = 5.0
"""How long the host of a store waits for the other nodes to leave, once the job has ended."""
CLOSE_S = 5.0
MAX_REST_S = 0.05
"""The leader rests after a turn for as long as the turn took, and no longer than this."""


class RendezvousDriver(Protocol):
    """The deciding loop's side of the rendezvous. RendezvousMember documents each method."""

    @property
    def facts(self) -> LocalFacts: ...
    def update_facts(self, **fields: Any) -> None: ...
    def update_record(self, **fields: Any) -> None: ...
    def report_failure(self, failure: Failure) -> None: ...
    def report_done(self, number: int) -> None: ...
    def report_master(self, number: int, address: str, port: int) -> None: ...
    def report_hang(self, report: HangReport | None) -> None: ...

    def turn(self, now: float) -> TurnResult:
        """The notices so far, and when to ask again at the latest."""
        ...


@dataclass(frozen=True, slots=True)
class DriverFailed:
    """The driver's thread has ended by an error in elasticd."""

    error: BaseException


class InlineDriver:
    """Every turn of the loop is a turn of the member."""

    def __init__(self, member: RendezvousMember) -> None:
        self._member = member
        self.update_facts = member.update_facts
        self.update_record = member.update_record
        self.report_done = member.report_done
        self.report_master = member.report_master
        self.report_hang = member.report_hang

    @property
    def facts(self) -> LocalFacts:
        return self._member.facts

    def report_failure(self, failure: Failure) -> None:
        self._member.report_failure(failure, time.monotonic())

    def turn(self, now: float) -> TurnResult:
        return self._member.turn(now)


class ThreadedDriver:
    """The member's turns belong to a thread, which posts their notices to the loop's inbox."""

    def __init__(self, member: RendezvousMember, post: Callable[[Notice | DriverFailed], None], hosts: bool) -> None:
        self._member = member
        self._post = post
        self._hosts = hosts
        self.update_facts = member.update_facts  # facts are read at the next turn; they need none of their own
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elasticd-store", daemon=True)

    @property
    def facts(self) -> LocalFacts:
        return self._member.facts

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Something has changed: take a turn soon. Safe from any thread."""
        self._changed.set()

    def update_record(self, **fields: Any) -> None:
        self._member.update_record(**fields)
        self._changed.set()

    def report_failure(self, failure: Failure) -> None:
        self._member.report_failure(failure, time.monotonic())
        self._changed.set()

    def report_done(self, number: int) -> None:
        self._member.report_done(number)
        self._changed.set()

    def report_master(self, number: int, address: str, port: int) -> None:
        self._member.report_master(number, address, port)
        self._changed.set()

    def report_hang(self, report: HangReport | None) -> None:
        self._member.report_hang(report)
        self._changed.set()

    def turn(self, now: float) -> TurnResult:
        return [], None

    def _run(self) -> None:
        try:
            while not self._closing:
                self._changed.clear()
                began = time.monotonic()
                notices, until = self._member.turn(began)
                took_s = time.monotonic() - began
                for notice in notices:
                    self._post(notice)
                self._changed.wait(None if until is None else max(0.0, until - time.monotonic()))
                if self._member.leads and not self._closing:
                    # Many nodes report at once: one turn answers all of them.
                    time.sleep(min(took_s, MAX_REST_S))
        except BaseException as error:  # noqa: BLE001 the loop must end with it
            self._post(DriverFailed(error))

    def abandon(self) -> None:
        """Take no more turns, and take nothing back: what a killed agent does."""
        self._closing = True
        self._changed.set()
        self._thread.join(CLOSE_S)

    def close(self) -> None:
        """Leave the job; the host of the store waits until the other nodes have left, too. Bounded."""
        self.abandon()
        deadline = time.monotonic() + LINGER_S
        try:
            while self._hosts and time.monotonic() < deadline and not self._member.others_left():
                time.sleep(0.05)
        except ElasticdError:
            pass  # the store is gone, and nothing can be reported any more
        self._member.close()
