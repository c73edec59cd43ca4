"""This node's seat at the table: announced under a lease, it hears of every Round, and plans if the key is its own.

It exists so that the deciding loop never waits for a store. Each turn re-reads what a watch has named, sends what the
loop has reported, and answers with messages for the loop; a store that is away is tried again later, and nothing is
lost meanwhile: reports wait. It knows nothing of processes.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError, WireError
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys, decode_address, decode_record
from elasticd_agent.model.messages import RoundPublished, StoreAbandoned
from elasticd_agent.model.notices import (
    FaultDetected,
    HangReportRequested,
    LeadershipChanged,
    MasterKnown,
    Notice,
    PauseRequested,
    Rejected,
    StoreAvailability,
    StragglersFound,
    WaitingFor,
)
from elasticd_agent.model.records import Failure, NodeRecord, Round
from elasticd_agent.model.reports import HangReport
from elasticd_agent.rendezvous.election import LeaderElection
from elasticd_agent.rendezvous.planner import Planner
from elasticd_agent.rendezvous.reachability import ReachabilityMonitor
from elasticd_agent.rendezvous.registration import (
    HangReportPublisher,
    NodeRegistration,
    Outbox,
    SpecAgreement,
    agree_on_spec,
    stopped_round,
)
from elasticd_agent.rendezvous.view import Wait
from elasticd_agent.store import Store, Versioned, Watch
from elasticd_agent.store.lease import RenewalListener, ignore_renewals
from elasticd_agent.system.addresses import try_parse_endpoint

NAME_RETRY_S = 0.5
REREAD_S = 10.0
"""Every agent reads its keys again so often, in case a watch missed something; and says again why it is refused."""
CUT_OFF_S = 5.0
"""A planner that is cut off from most members leaves the key to them for so long."""
FIRST_CONTACT_S = 60.0
"""A store that has never answered is a wrong endpoint, or starts later than everybody else: torchrun waits as long."""
RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8)


TurnResult = tuple[list[Notice], float | None]


class RendezvousMember:
    """One agent's part in one job. `turn` belongs to one thread; the reports may come from another."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        policy: Policy,
        record: NodeRecord,
        planner: Planner,
        spec: bytes,
        differences: Callable[[bytes, bytes], str | None],
        *,
        may_lead: Callable[[], bool] = lambda: True,
        others_may_lead: Callable[[], bool] = lambda: True,
        single_key_cas: bool = False,
        attentive: Callable[[], bool] = lambda: True,
        keep_links: Callable[[Mapping[str, tuple[str, int]]], None] = lambda nodes: None,
        renewed: RenewalListener = ignore_renewals,
    ) -> None:
        """`keep_lines` is told to whom a standing connection shall be kept; `hung_up` hears of those that break.

        `may_plan` and `others_plan` are asked once the store has answered. `one_key`: it compares one key at a time.
        """
        self._keep_lines = keep_links
        self._hung_up: deque[str] = deque()
        self._store, self._keys, self._policy, self._planner = store, keys, policy, planner
        self._agreement = SpecAgreement(
            lambda: agree_on_spec(store, keys, spec, differences), policy.join_timeout_s, planner.say
        )
        self._concerning = keys.round, keys.planner, keys.master(), keys.pause, keys.hang_report_request
        self._may_plan, self._others_plan, self._one_key = may_lead, others_may_lead, single_key_cas
        self._me = record.id, record.incarnation
        self._presence = NodeRegistration(store, keys.node(record.id), policy, record, self._knock, attentive, renewed)
        self._reports, self._sight = Outbox(store), HangReportPublisher(store, keys, record.id)
        self._reach = ReachabilityMonitor(store, keys, policy, self._me, planner.probe, planner.met)
        self._stale: set[str] = set()
        self._reread_at = float("-inf")
        self._watches: dict[str, Watch] = {}
        self._round: Round | None = None
        self._stored: Versioned | None = None
        self._heard: Versioned | None = None
        self._late = False
        self._master_for = self._master_told = 0
        self._held_for = 0
        self._reports_for = 0
        self._planned = False
        self._replaced = False
        self._slow: tuple[tuple[int, float], ...] = ()
        self._chair = LeaderElection(
            store, keys, self._presence, planner, policy.renewal_s, self._knock, self._listen, self._read_key_again
        )
        self._away_since: float | None = None
        self._tries = 0
        self._last_turn = float("-inf")
        self._news: list[Notice] = []
        self._rejected = self._awaited = ""
        self._rejected_at = 0.0
        self._hinted: Callable[[], None] = lambda: None

    def on_hint(self, call: Callable[[], None]) -> None:
        """`call` after every hint, from whatever thread it came."""
        self._hinted = call

    # --- reports, from the deciding thread --------------------------------------------------------------------------

    def update_record(self, **fields: Any) -> None:
        """Set fields of this node's record."""
        self._presence.update(**fields)

    def report_failure(self, failure: Failure, now: float) -> None:
        self._reports.add(failure.round, self._keys.failures(failure.round) + self._me[0], failure.to_json())
        self._chair.expect_answer(now)

    def report_done(self, number: int) -> None:
        self._reports.add(number, self._keys.done(number) + self._me[0], b"done")

    def report_master(self, number: int, address: str, port: int) -> None:
        self._reports.add(number, self._keys.master(number), json.dumps([address, port]).encode())

    def report_hang(self, report: HangReport | None) -> None:
        """What this node sees of its ranks, while anybody suspects a hang; None: nobody does any more."""
        self._sight.report = report

    def hint(self, key: str) -> None:
        """A watch has named `key`."""
        master = self._keys.master()
        if (number := key.removeprefix(master)) != key and number.isdecimal():
            self._master_told = max(self._master_told, int(number))
        self._stale |= {master if key.startswith(master) else key} & set(self._concerning)
        self._planner.hint(key)
        self._hinted()

    def peer_disconnected(self, node: str) -> None:
        """The standing connection to `node`'s agent has broken: it may have been killed. Safe from any thread."""
        self._hung_up.append(node)
        self._hinted()

    @property
    def leads(self) -> bool:
        """True while this agent is the job's planner."""
        return self._chair.key_version is not None

    # --- turns ------------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> TurnResult:
        """Do what is to be done. Returns what the loop must hear, and when to come back at the latest."""
        self._news = []
        if now > self._last_turn + 2 * self._policy.renewal_s:
            self._planner.store_up_since = now  # nobody listened: what was not heard means nothing
        self._last_turn = now
        try:
            until = self._turn(now)
        except StoreUnavailable as error:
            until = self._away(str(error), now)
        except (StoreRefused, WireError) as error:
            if str(error) != self._rejected or now >= self._rejected_at + REREAD_S:
                self._rejected, self._rejected_at = str(error), now
                self._news.append(Rejected(self._rejected))
            until = now + self._policy.renewal_s
        if self.leads != self._planned:
            self._planned = self.leads
            self._news.append(LeadershipChanged(self._planned))
        return self._news, until

    def _turn(self, now: float) -> float | None:
        if self._out():
            return None
        again = now >= self._reread_at
        if again:
            self._reread_at = now + REREAD_S
            self._read_again()
            # Once the group has made a step, nobody looks for its store any more.
            number, stepped = (self._round.number if self._round else 0), self._presence.record.stepped_round
            self._reports.resend(number, without=self._keys.master(stepped))
        if not self._agreement.is_reached(now):
            return now + NAME_RETRY_S
        self._listen()
        if not self._here(now, check=again and not self.leads):
            return now + NAME_RETRY_S
        self._send()
        self._hear_rounds()
        if self._out():
            return None
        self._hear_details()
        record = self._presence.record
        reach_at = self._reach.turn(self._round, record.stepped_round, self._planner.facts.next_step_due, now)
        if self._reach.unreachable != record.unreachable:
            self.update_record(unreachable=self._reach.unreachable)
        self._send()
        self._suspect(now)
        until = self._lead(now)
        self._keep_lines(self._lines())
        if self._away_since is not None:
            self._news.append(StoreAvailability(False, "the store answers again", now - self._away_since))
            self._away_since, self._tries = None, 0
        times = (self._presence.key.renew_at, self._reread_at, until, self._chair.preempt_at, reach_at)
        return min(at for at in times if at is not None)

    def _away(self, why: str, now: float) -> float:
        if self._away_since is None:
            self._away_since = now
            self._news.append(StoreAvailability(True, why, 0.0))
            self._planner.reset()
        self._planner.store_up_since = float("inf")
        self._read_again()
        self._presence.key.renew_at = now
        away_s = now - self._away_since
        if not self._agreement.done and away_s >= min(FIRST_CONTACT_S, self._policy.join_timeout_s):
            self._news.append(Rejected(f"no answer from the store within {away_s:.0f} s: {why}"))
        elif away_s >= self._policy.store_away_s:
            self._news.append(StoreAbandoned(f"the store has been away for {away_s:.0f} s: {why}", now))
        retry_s = RETRY_S[min(self._tries, len(RETRY_S) - 1)]
        self._tries += 1
        return now + min(retry_s, self._policy.lease_s / 3)

    # --- being here -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Have a watch on every key that concerns us."""
        keys = self._keys
        plans = [keys.nodes, keys.failures(), keys.done(), keys.hang_reports()] if self.leads else []
        wanted = [*self._concerning, *plans]
        for prefix in [p for p in self._watches if p not in wanted]:
            self._watches.pop(prefix).close()
        for prefix in [p for p in wanted if p not in self._watches]:
            self._watches[prefix] = self._store.watch(prefix, self.hint)

    def _read_again(self) -> None:
        # A question after a hang that was missed costs nothing: who is asked sees for itself that nobody trains. Not to
        # hear that it was taken back does: one would report for ever.
        self._stale |= set(self._concerning) - (set() if self._reports_for else {self._keys.hang_report_request})

    def _read_key_again(self) -> None:
        self._stale |= {self._keys.planner, self._keys.round}

    def _here(self, now: float, check: bool) -> bool:
        lease = self._presence.lease
        try:
            if check or self._planner.own_record_missing:
                self._planner.own_record_missing = False
                self._presence.check()
            return self._presence.turn(now)
        finally:
            if self._presence.lease is not lease:
                self._planner.store_up_since = now  # a store that forgot us may have forgotten others
                self._chair.key_lost()

    def _send(self) -> None:
        self._reports.send()
        if self._presence.lease is not None and not self._presence.send():
            self._chair.key_lost()
        if self._presence.lease is not None and self._sight.send(self._presence.lease) and self.leads:
            self._planner.hint(self._keys.hang_reports())

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _hear_rounds(self) -> None:
        if self._keys.round not in self._stale:
            return
        self._stale.discard(self._keys.round)
        try:
            self._stored = found = self._store.read(self._keys.round)
        except StoreUnavailable:
            self._stale.add(self._keys.round)
            raise
        known = self._round
        if found is not None and found == self._heard:
            return  # read again in case a watch missed something, which it did not
        if found is None:
            if known is not None and not known.terminal:
                # A store that came back empty: whoever runs a Round says which.
                self._store.compare_and_swap(self._keys.round, None, known.to_json())
                self._stale.add(self._keys.round)
            return
        round = decode_record(Round, self._keys.round, found.value)
        if known is not None and not known.terminal and round.number < known.number:
            self._store.compare_and_swap(self._keys.round, found.version, known.to_json())
            self._stale.add(self._keys.round)
            return
        self._heard = found
        if (
            known is not None
            and round.number > known.number
            and round.run != known.run == self._planner.requirements.run
        ):
            self._leave_to(round)
            return
        another_run = round.run != self._planner.requirements.run or (known is None and round.outcome == "stopped")
        if (known is None or round.number > known.number) and not (round.terminal and another_run):
            self._published(round)

    def _leave_to(self, round: Round) -> None:
        """A later run of the job has begun while we heard nothing, so ours is over: what that must have said counts."""
        self._replaced = True
        why = f"a later run of this job, {round.run}, has begun"
        self._news.append(RoundPublished(stopped_round(replace(round, number=round.number - 1), why)))
        self._chair.key_lost()
        self._presence.withdraw()

    def _out(self) -> bool:
        """True once there is nothing here for us."""
        return self._replaced

    def _published(self, round: Round) -> None:
        self._late = self._round is None and round.terminal
        self._round = round
        self._awaited = ""
        self._chair.round_published()
        # As a rule a round's store is not there yet: its watch says when. It may have, before we heard of the round.
        self._stale |= {self._keys.pause} | ({self._keys.master()} if self._master_told >= round.number else set())
        self.update_record(seen_round=round.number, paused=0)
        self._news.append(RoundPublished(round))

    def _hear_details(self) -> None:
        """Where the workers' store is, and whether rank 0 shall hold: each for those it concerns."""
        round = self._round
        if round is None or round.terminal or round.member(self._me[0]) is None:
            return
        if self._keys.hang_report_request in self._stale:
            self._stale.discard(self._keys.hang_report_request)
            found = self._store.read(self._keys.hang_report_request)
            asked = round.number if found is not None and found.value == str(round.number).encode() else 0
            if asked != self._reports_for:
                self._reports_for = asked
                self._news.append(HangReportRequested(round.number, bool(asked)))
        first = round.group_rank(self._me[0]) == 0
        if not first and self._master_for != round.number and self._keys.master() in self._stale:
            self._stale.discard(self._keys.master())
            found = self._store.read(self._keys.master(round.number))
            if found is not None:
                where, port = decode_address(self._keys.master(round.number), found.value)
                self._master_for = round.number
                self._news.append(MasterKnown(round.number, where, port))
        if first and self._keys.pause in self._stale:
            self._stale.discard(self._keys.pause)
            found = self._store.read(self._keys.pause)
            wanted = round.number if found is not None and found.value == str(round.number).encode() else 0
            if wanted != self._held_for:
                self._held_for = wanted
                self._news.append(PauseRequested(round.number, bool(wanted)))

    # --- planning ---------------------------------------------------------------------------------------------------

    def _suspect(self, now: float) -> None:
        """Who has hung up is asked whether it is still there: the planner by everybody, the others by the planner."""
        while self._hung_up:
            node = self._hung_up.popleft()
            self._planner.suspects.add(node)
            if (holder := self._chair.other_leader) is not None and holder.id == node:
                self._chair.leader_disconnected(now)

    def _lines(self) -> dict[str, tuple[str, int]]:
        """Whose death concerns us: every member's if we plan, else the planner's."""
        if self._round is None or self._round.terminal:
            return {}
        if self.leads:
            return self._planner.addresses(self._round)
        record = self._chair.other_leader
        where = try_parse_endpoint(record.address) if record is not None else None
        return {record.id: where} if record is not None and where is not None else {}

    def _lead(self, now: float) -> float | None:
        if self._presence.lease is None:
            return now
        if not self._may_plan() or self._over():
            return None
        if self._keys.planner in self._stale:
            self._stale.discard(self._keys.planner)
            self._chair.read_leader(now)
        planned = self.leads
        until = None if planned else self._chair.claim(now, non_member=self._outsider)
        if (key := self._chair.key_version) is None:
            return until
        if not planned:
            self._hear_rounds()
            self._fence()
        elif self._outsider and self._planner.others_can_lead(self._round) and self._others_plan():
            return self._chair.resign(now, 0.0)
        if self._planner.store_up_since == float("inf"):
            self._planner.store_up_since = now
        verdict = self._planner.turn(self._stored, now, (self._keys.planner, key))
        self._news += self._planner.judge.new_verdicts
        self._planner.judge.new_verdicts.clear()
        self._news += [FaultDetected(number, fault.cause, fault.culprit) for number, fault in self._planner.faults.new]
        self._planner.faults.new.clear()
        if self._round is not None and self._planner.stragglers != self._slow:
            self._slow = self._planner.stragglers
            self._news.append(StragglersFound(self._round.number, self._slow))
        if isinstance(verdict, Round):
            self._heard = None
            self._stale.add(self._keys.round)
            self._published(verdict)
            return now
        if self._planner.cut_off and self._others_plan():
            return self._chair.resign(now, CUT_OFF_S)
        if isinstance(verdict, Wait) and verdict.until == now:
            self._stale |= {self._keys.round, self._keys.planner}
        if isinstance(verdict, Wait) and (verdict.too_few_nodes or verdict.notable) and verdict.why != self._awaited:
            self._awaited = verdict.why
            self._news.append(WaitingFor(verdict.why, verdict.too_few_nodes))
        return verdict.until

    def _fence(self) -> None:
        """Where a store compares one key at a time: whoever looked at the planner's key before it was ours, and was
        then held up, finds another version of the round than the one it has planned from.
        """
        if self._one_key and self._stored is not None:
            self._store.compare_and_swap(self._keys.round, self._stored.version, self._stored.value)
            self._stale.add(self._keys.round)  # lost or won, the version is another
            self._hear_rounds()

    def _over(self) -> bool:
        """True if the job has ended for us. Who ended it may have died before it was buried: who comes late looks."""
        if self._late and self._round is not None:
            self._planner.delete_records(self._round)
        return self._round is not None and self._round.terminal

    @property
    def _outsider(self) -> bool:
        """True if a Round runs, and not here."""
        round = self._round
        members = () if round is None or round.terminal else round.members
        return bool(members) and self._me not in {(m.node, m.incarnation) for m in members}

    def _knock(self, record: NodeRecord) -> object:
        where = try_parse_endpoint(record.address)
        return None if where is None else self._planner.probe({record.id: where}).get(record.id)

    def others_left(self) -> bool:
        """True once every other node has left: whoever hosts the store must not go before. Raises StoreUnavailable."""
        return set(self._store.list(self._keys.nodes)) <= {self._keys.node(self._me[0])}

    def close(self) -> None:
        """Leave the table: the record and the planner's key go at once. Raises nothing."""
        for watch in self._watches.values():
            watch.close()
        try:
            self._presence.withdraw()
        except (StoreUnavailable, UsageError):
            pass  # it runs out by itself
