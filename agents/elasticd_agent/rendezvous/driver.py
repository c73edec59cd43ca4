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
from elasticd_agent.model.notices import Notice
from elasticd_agent.model.records import Failure
from elasticd_agent.model.reports import HangReport
from elasticd_agent.rendezvous.member import RendezvousMember, TurnResult
from elasticd_agent.rendezvous.planner import LocalFacts

LINGER_S = 5.0
"""How long the host of a store waits, once the job has ended, for the others to have heard of it."""
CLOSE_S = 5.0
MAX_REST_S = 0.05
"""The planner rests after a turn for as long as the turn took, and no longer than this."""


class RendezvousDriver(Protocol):
    """What the loop may say to the other agents of its job, and when it hears from them."""

    @property
    def facts(self) -> LocalFacts: ...
    def update_record(self, **fields: Any) -> None: ...
    def report_failure(self, failure: Failure) -> None: ...
    def report_done(self, number: int) -> None: ...
    def report_master(self, number: int, address: str, port: int) -> None: ...
    def report_hang(self, report: HangReport | None) -> None: ...

    def turn(self, now: float) -> TurnResult:
        """What there is to hear, and when to ask again at the latest."""
        ...


@dataclass(frozen=True, slots=True)
class DriverFailed:
    """The thread that talks to the store has ended by a mistake of ours."""

    error: BaseException


class InlineDriver:
    """Every turn of the loop is a turn of the coordinator."""

    def __init__(self, member: RendezvousMember, facts: LocalFacts) -> None:
        self._member, self.facts = member, facts
        self.update_record, self.report_done, self.report_master = (
            member.update_record,
            member.report_done,
            member.report_master,
        )
        self.report_hang = member.report_hang

    def report_failure(self, failure: Failure) -> None:
        self._member.report_failure(failure, time.monotonic())

    def turn(self, now: float) -> TurnResult:
        return self._member.turn(now)


class ThreadedDriver:
    """The coordinator's turns are a thread's, which puts what the loop must hear into its inbox."""

    def __init__(
        self, member: RendezvousMember, facts: LocalFacts, post: Callable[[Notice | DriverFailed], None], hosts: bool
    ) -> None:
        self._member, self.facts, self._post, self._hosts = member, facts, post, hosts
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elasticd-store", daemon=True)

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
                news, until = self._member.turn(began)
                took_s = time.monotonic() - began
                for said in news:
                    self._post(said)
                self._changed.wait(None if until is None else max(0.0, until - time.monotonic()))
                if self._member.leads and not self._closing:
                    # What many nodes say at once is answered by one look at all of them.
                    time.sleep(min(took_s, MAX_REST_S))
        except BaseException as error:  # noqa: BLE001 nobody else would hear of it
            self._post(DriverFailed(error))

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
            while self._hosts and time.monotonic() < deadline and not self._member.others_left():
                time.sleep(0.05)
        except ElasticdError:
            pass  # nobody can be told any more
        self._member.close()
