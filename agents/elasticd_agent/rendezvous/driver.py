"""The thread that takes a RendezvousMember's turns: the deciding loop never waits for a store that does not answer.

Where the store is this process's memory, the loop takes the turns itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticd.errors import ElasticdError
from elasticd_agent.model.notices import Notice
from elasticd_agent.rendezvous.member import RendezvousMember

LINGER_S = 5.0
"""How long the host of a store waits for the other nodes to leave, once the job has ended."""
CLOSE_S = 5.0
MAX_REST_S = 0.05
"""The leader rests after a turn for as long as the turn took, and no longer than this."""


@dataclass(frozen=True, slots=True)
class DriverFailed:
    """The thread has ended by an error in elasticd."""

    error: BaseException


class MemberThread:
    """Posts the notices of each turn to the loop's inbox."""

    def __init__(
        self, member: RendezvousMember, post: Callable[[Notice | DriverFailed], None], hosts: Callable[[], bool]
    ) -> None:
        """`hosts`: whether the store is a process of this agent."""
        self._member = member
        self._post = post
        self._hosts = hosts
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elasticd-store", daemon=True)
        member.on_change(self._changed.set)

    def start(self) -> None:
        self._thread.start()

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
            while self._hosts() and time.monotonic() < deadline and not self._member.others_left():
                time.sleep(0.05)
        except ElasticdError:
            pass  # the store is gone, and nothing can be reported any more
        self._member.close()
