"""The Round this node follows and the requests to its members: each key is read again once a watch has named it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elasticd.errors import StoreUnavailable
from elasticd_agent.model.keys import Keys, decode_address, decode_record, encode_record
from elasticd_agent.model.notices import HangReportRequested, MasterKnown, Notice, PauseRequested
from elasticd_agent.model.records import Identity, Round
from elasticd_agent.rendezvous.spec_check import stopped_round
from elasticd_agent.store import Store, Versioned


class RoundFollower:
    """One node's. It belongs to the thread that talks to the store; `invalidate` may be called from any."""

    def __init__(
        self, store: Store, keys: Keys, me: Identity, run: str, restore_spec: Callable[[], None] = lambda: None
    ) -> None:
        self._restore_spec = restore_spec
        self._store = store
        self._keys = keys
        self._me = me
        self._run = run
        # what every agent watches
        self.keys = (keys.round, keys.planner, keys.master(), keys.pause, keys.hang_report_request)
        self._stale: set[str] = set()
        self.round: Round | None = None
        self.stored: Versioned | None = None  #: the round key as last read: what a planner's verdict builds on
        self._accepted: Versioned | None = None
        self._is_member = False  # of `round`; a Round may have thousands of members, and every turn asks
        self._hosts_rank_0 = False
        self.ended_before_joining = False  #: the first Round this node read was terminal
        self._master_of = 0  # the newest round whose store a watch has named
        self._master_known = 0
        self._requested = {keys.pause: 0, keys.hang_report_request: 0}  # the round of which something is requested
        self._replaced = False

    @property
    def running(self) -> Round | None:
        """The Round, unless it is terminal."""
        return self.round if self.round is not None and not self.round.terminal else None

    def is_replaced(self) -> bool:
        """True once a later run of the job has begun: this node has no part in it."""
        return self._replaced

    @property
    def is_non_member(self) -> bool:
        """True if a Round runs without this node."""
        return self.running is not None and not self._is_member

    def invalidate(self, key: str) -> None:
        """A watch has named `key`."""
        master = self._keys.master()
        if (number := key.removeprefix(master)) != key and number.isdecimal():
            self._master_of = max(self._master_of, int(number))
        self._stale |= {master if key.startswith(master) else key} & set(self.keys)

    def invalidate_all(self) -> None:
        """Read everything again, in case a watch missed something.

        A missed request for hang reports costs nothing: a node whose group stands still reports unasked. A missed end
        of that request does: the node would report for ever.
        """
        self._stale |= set(self.keys) - (
            set() if self._requested[self._keys.hang_report_request] else {self._keys.hang_report_request}
        )

    def take(self, key: str) -> bool:
        """True once after `key` was invalidated."""
        if key not in self._stale:
            return False
        self._stale.discard(key)
        return True

    def read_round(self) -> Round | None:
        """The Round in the store, if it is news; once replaced, the end of this run. Raises StoreUnavailable."""
        if not self.take(self._keys.round):
            return None
        try:
            self.stored = found = self._store.read(self._keys.round)
        except StoreUnavailable:
            self._stale.add(self._keys.round)
            raise
        known = self.running
        if found is not None and found == self._accepted:
            return None  # read again in case a watch missed something; it did not
        if found is None:
            if known is not None:
                self._restore(known, None)  # the store came back empty
            return None
        round = decode_record(Round, self._keys.round, found.value)
        if known is not None and round.precedes(known):
            self._restore(known, found.version)
            return None
        self._accepted = found
        if self.round is not None and not self.round.precedes(round):
            return None
        if self.round is not None and round.run != self.round.run == self._run:
            self._replaced = True
            why = f"a later run of this job, {round.run}, has begun"
            return stopped_round(replace(round, number=self.round.number + 1), why)
        other_run = round.run != self._run or (self.round is None and round.outcome == "stopped")
        return None if round.terminal and other_run else round

    def follow(self, round: Round) -> None:
        """Take `round` for the current one."""
        self.ended_before_joining = self.round is None and round.terminal
        self.round = round
        self._is_member = any(m.identity == self._me for m in round.members)
        self._hosts_rank_0 = bool(round.members) and round.members[0].node == self._me[0]
        self._stale.add(self._keys.pause)
        # The round's store usually starts later, and its watch names it then; it may also have started earlier.
        if self._master_of >= round.number:
            self._stale.add(self._keys.master())

    def publish(self, round: Round) -> None:
        """`round` is this node's own, just published."""
        self._accepted = None
        self._stale.add(self._keys.round)
        self.follow(round)

    def fence(self) -> None:
        """Give the round key another version, its value unchanged.

        For a store that compares one key at a time: a former leader that read the leader key before it was taken, and
        was then held up, must find another version of the round than the one its verdict builds on.
        """
        if self.stored is not None:
            self._store.compare_and_swap(self._keys.round, self.stored.version, self.stored.value)
            self._stale.add(self._keys.round)  # lost or won, the version is another

    def read_requests(self) -> list[Notice]:
        """What the leader asks of this node, and where the workers' store is. Raises StoreUnavailable."""
        round, keys = self.running, self._keys
        if round is None or not self._is_member:
            return []
        notices: list[Notice] = []
        if self.take(keys.hang_report_request) and self._is_changed(keys.hang_report_request, round):
            notices.append(HangReportRequested(round.number, bool(self._requested[keys.hang_report_request])))
        rank_0_here = self._hosts_rank_0
        if not rank_0_here and self._master_known != round.number and self.take(keys.master()):
            found = self._store.read(keys.master(round.number))
            if found is not None:
                host, port = decode_address(keys.master(round.number), found.value)
                self._master_known = round.number
                notices.append(MasterKnown(round.number, host, port))
        if rank_0_here and self.take(keys.pause) and self._is_changed(keys.pause, round):
            notices.append(PauseRequested(round.number, bool(self._requested[keys.pause])))
        return notices

    def _restore(self, round: Round, version: int | None) -> None:
        """Every member of a Round writes it again where the store has lost it, its spec first; the last Round wins."""
        self._restore_spec()
        self._store.compare_and_swap(self._keys.round, version, encode_record(round))
        self._stale.add(self._keys.round)

    def _is_changed(self, key: str, round: Round) -> bool:
        """Read a request; True if it begins or ends."""
        found, before = self._store.read(key), self._requested[key]
        requested = found is not None and found.value == str(round.number).encode()
        self._requested[key] = round.number if requested else 0
        return self._requested[key] != before
