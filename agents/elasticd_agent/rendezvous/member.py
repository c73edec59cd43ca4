"""This node's rendezvous client: registers the node under a lease, follows the current Round, plans while it leads.

The deciding loop never waits for a store: each turn reads what a watch has named, sends what the loop has reported, and
returns notices for the loop. While the store is unavailable, reports wait in the outbox, and turns are tried again.
Turns are taken by a thread, or by the loop itself where the store is this process's memory.

A turn does the following, in this order, and each position has its reason.
1. Find the store: another agent may host it now (c10d), and then nothing that was read before counts.
2. Agree on the job: an agent with another script or other limits must not register, let alone lead.
3. Watch, then read: a change between the two is named by the watch. The other order would lose it.
4. Read the Round before anything is registered. A Round without this node ends its group, also where its name has
   become another agent's.
5. Register, or renew. A new lease means that the store lost the old record, and perhaps those of others: their absence
   proves nothing for a while.
6. Send reports: failures, the end of workers, the store's address, changes of the record.
7. Answer requests, check who can be reached, and probe agents whose standing connection broke.
8. Lead, if this agent holds the key or can take it: the planner makes one decision a turn.

An exception leaves the turn at any point without harm: whatever was not sent is still in the outbox, whatever was not
read is still marked. StoreUnavailable begins an outage with retries that double; StoreRefused and WireError are a
rejection, repeated as a sentence every ten seconds and never fatal while workers run. Only an outage beyond the
policy's limit abandons the store, since running workers need none.

The leader is one of the members, and nobody else knows more than it: every decision is derived from keys that all can
read. When it dies, the next one reads the same keys and continues.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elasticd.errors import ElasticdError, StoreRefused, StoreUnavailable, UsageError, WireError
from elasticd_agent.model.keys import ALL_JOBS
from elasticd_agent.model.messages import (
    JoinRejected,
    LeadershipChanged,
    Notice,
    RoundPublished,
    StoreAbandoned,
    StoreAvailability,
    WaitingFor,
)
from elasticd_agent.model.records import Failure, NodeRecord, Round
from elasticd_agent.model.reports import HangReport
from elasticd_agent.rendezvous.membership import STALL_GRACE_S
from elasticd_agent.rendezvous.membership_client import (
    SEEN_ROUND_DELAY_S,
    JobTerms,
    LeaderElection,
    NodeRegistration,
    Outbox,
    RoundFollower,
)
from elasticd_agent.rendezvous.peers import PeerNetwork, PeerObservations, ReachabilityMonitor
from elasticd_agent.rendezvous.planner import HandOver, Planner
from elasticd_agent.rendezvous.probe import Address
from elasticd_agent.rendezvous.spec_check import SpecAgreement
from elasticd_agent.rendezvous.takeover import TakeOver
from elasticd_agent.rendezvous.view import LocalFacts, Wait
from elasticd_agent.store import JobStore, Watch
from elasticd_agent.store.lease import RenewalListener, ignore_renewals
from elasticd_agent.system.network.addresses import try_parse_endpoint

JOIN_RETRY_S = 0.5
REREAD_S = 10.0
"""Every agent reads its keys again so often, in case a watch missed something; and repeats why it is rejected."""
CUT_OFF_ABSTAIN_S = 5.0
"""A leader that is cut off from most members leaves the leader key to them for so long."""
OUTAGE_RETRIES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
HOST_LINGER_S = 5.0
"""The node that hosts the store waits so long for the others to leave, once the job has ended."""
CLOSE_S = 5.0
MAX_LEADER_REST_S = 0.05
"""The leader rests after a turn for as long as the turn took, and no longer than this."""


TurnResult = tuple[list[Notice], float | None]


class RendezvousMember:
    """One agent's part in one job. `turn` belongs to one thread; reports, facts and hints may come from another."""

    def __init__(
        self,
        store: JobStore,
        terms: JobTerms,
        record: NodeRecord,
        facts: LocalFacts,
        network: PeerNetwork,
        log: Callable[[str], None],
        *,
        attentive: Callable[[], bool] = lambda: True,
        renewed: RenewalListener = ignore_renewals,
        take_over: TakeOver | None = None,
    ) -> None:
        """`attentive`: the lease is renewed while it returns True. `renewed` is called with each renewal.
        `take_over`: where an agent hosts the store."""
        self.facts = facts
        self._store = store
        self._keys = keys = terms.keys
        self._policy = policy = terms.policy
        self._node = record.id
        self._network = network
        self._log = log
        self._take_over = take_over
        self._observations = PeerObservations(record.id, network)
        self._planner = Planner(store, terms, record.id, self._observations, log)
        self._agreement = SpecAgreement(store, keys, terms.spec, policy.join_timeout_s, log)
        self._registration = NodeRegistration(store, terms, record, self._observations, attentive, renewed)
        self._follower = RoundFollower(store, terms, record.identity, self._agreement)
        self._outbox = Outbox(store, keys, record.id)
        self._reachability = ReachabilityMonitor(policy, record.identity, self._observations)
        self._election = LeaderElection(store, terms, self._registration, self._observations, self._follower)
        self._watch: Watch | None = None
        self._planner_watch: Watch | None = None
        self._disconnected: deque[str] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._reread_at = float("-inf")
        self._last_turn = float("-inf")
        self._unavailable_since: float | None = None
        self._blocked_since: float | None = None
        self._retries = 0
        self._notices: list[Notice] = []
        self._leadership_reported = False
        self._led_with: int | None = None  # the version of the leader key with which this agent began to lead
        self._posted = "", 0
        self._rejected = ""
        self._rejected_at = 0.0
        self._waiting_for = ""
        self._job_of_host: str | None = None  # another one that the host of the store leads; None: not looked up

    def set_wake(self, wake: Callable[[], None]) -> None:
        """`wake` is called when a turn is due early: after a report or a hint, from any thread."""
        self._wake = wake

    # --- reports, from the deciding thread --------------------------------------------------------------------------

    def update_local_facts(self, **fields: Any) -> None:
        """Replace the facts whole: only the deciding thread writes them, so that any thread reads one state."""
        self.facts = replace(self.facts, **fields)

    def update_node_record(self, **fields: Any) -> None:
        """Set fields of this node's record."""
        self._registration.update(**fields)
        self._wake()

    def report_failure(self, failure: Failure, now: float) -> None:
        """Report a failure of this node's group; the leader's answer, a Round, is expected within a time."""
        self._outbox.add_failure(failure)
        self._election.expect_round(now)
        self._wake()

    def report_done(self, number: int) -> None:
        """Report that every worker of this node has exited with code 0 in round `number`."""
        self._outbox.add_done(number)
        self._wake()

    def report_master(self, number: int, address: str, port: int) -> None:
        """Report where the workers' store of round `number` listens. Sent by the node of rank 0."""
        self._outbox.add_master(number, address, port)
        self._wake()

    def report_hang(self, report: HangReport | None) -> None:
        """This node's observations of its ranks while any node suspects a hang; None: no node does any more."""
        self._outbox.hang_report = report
        self._wake()

    def hint(self, key: str) -> None:
        """A watch has named `key`."""
        self._follower.invalidate(key)
        self._planner.hint(key)
        self._wake()

    def peer_disconnected(self, node: str) -> None:
        """The standing connection to `node`'s agent has broken: it may have been killed. Safe from any thread."""
        self._disconnected.append(node)
        self._wake()

    @property
    def leads(self) -> bool:
        """True while this agent holds the leader key."""
        return self._election.key_version is not None

    @property
    def hosts_store(self) -> bool:
        return self._store.hosts

    # --- turns ------------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> TurnResult:
        """Do what is due. Returns notices for the loop, and when to come back at the latest."""
        self._notices = []
        if now > self._last_turn + 2 * self._policy.renewal_s:
            self._observations.distrust_absences(now)  # this agent did not listen meanwhile
        self._last_turn = now
        try:
            self._find_store(now)
            until = self._turn(now)
        except StoreUnavailable as error:
            until = self._on_unavailable_store(str(error), now)
        except (StoreRefused, WireError) as error:
            if str(error) != self._rejected or now >= self._rejected_at + REREAD_S:
                self._rejected = str(error)
                self._rejected_at = now
                self._notices.append(JoinRejected(self._rejected))
            until = now + self._policy.renewal_s
        if self.leads != self._leadership_reported:
            self._leadership_reported = self.leads
            if not self.leads:
                self._planner.reset()
            self._notices.append(LeadershipChanged(self.leads))
        return self._notices, until

    def _find_store(self, now: float) -> None:
        """Use the job's store that another agent hosts now, or host it. Raises StoreUnavailable while there is none."""
        if self._take_over is None:
            return
        leaving, used = bool(self._registration.record.leaving), self._planner.succession.published_term
        if self._take_over.turn(self._follower.running, leaving, used, now):
            self._store_replaced(now)

    def _store_replaced(self, now: float) -> None:
        """Nothing that was read or written before is in the store."""
        self._planner.reset()
        self._observations.distrust_absences(now)
        self._registration.key.lease = None
        self._election.key_lost()
        self._follower.invalidate_all()
        self._reread_at = float("-inf")

    def _turn(self, now: float) -> float:
        """Do what is due while the store answers. Returns when to come back at the latest. Raises StoreUnavailable,
        StoreRefused, WireError.
        """
        if self._follower.is_run_replaced():
            return now + REREAD_S
        reread = now >= self._reread_at
        if reread:
            self._reread_at = now + REREAD_S
            self._follower.invalidate_all()
            if self._follower.is_non_member:
                self._agreement.invalidate()
            number = self._follower.round.number if self._follower.round is not None else 0
            # After the group's first step nothing connects to its store any more.
            self._outbox.queue_again(number, without_master_of=self._registration.record.stepped_round)
        if not self._agreement.try_to_agree(now):
            return now + JOIN_RETRY_S
        self._watch_keys()
        self._follow_round()  # first: a Round without this node ends its group, also where its name is another agent's
        if self._follower.is_run_replaced():
            return now + REREAD_S
        if not self._agreement.try_to_agree(now):
            return now + JOIN_RETRY_S
        if not self._register(now, check=reread):
            self._report_wait(self._registration.waits_for, more_nodes=False)
            return now + JOIN_RETRY_S
        self._send_reports(now)
        self._notices += self._follower.read_requests()
        reachability_at = self._check_reachability(now)
        self._send_reports(now)
        self._suspect_disconnected(now)
        lead_at = self._lead(now)
        self._network.keep_links(self._links(), self.peer_disconnected)
        if self._take_over is not None:
            self._take_over.store_answered(now, self.leads and self._planner.succession.lacks_quorum)
        self._end_outage(now)
        times = (
            self._registration.key.renew_at,
            self._reread_at,
            lead_at,
            self._election.probe_leader_at,
            reachability_at,
        )
        return min(at for at in (*times, self._registration.send_at) if at is not None)

    def _end_outage(self, now: float) -> None:
        if self._unavailable_since is not None:
            away_s = now - self._unavailable_since
            self._notices.append(StoreAvailability(False, "the store answers again", away_s))
            self._unavailable_since = None
            self._retries = 0

    def _on_unavailable_store(self, why: str, now: float) -> float:
        """Begin or continue an outage. Returns when to try again.

        A store that has never answered may start later than its clients, and is given the join timeout. One that
        answered before is given `store_away_s`, in which workers train on.
        """
        if self._unavailable_since is None:
            self._unavailable_since = now
            self._notices.append(StoreAvailability(True, why, 0.0))
            self._planner.reset()
        self._observations.store_unavailable()
        self._follower.invalidate_all()
        self._registration.key.renew_at = now
        self._reread_at = float("-inf")  # it may come back without this node's record, or with an older one
        away_s = now - self._unavailable_since
        if not self._agreement.agreed:  # it may start later than its clients
            if away_s >= self._policy.join_timeout_s:
                self._notices.append(StoreAbandoned(f"no answer from the store within {away_s:.0f} s: {why}", now))
        elif away_s >= self._policy.store_away_s:
            self._notices.append(StoreAbandoned(f"the store has been unavailable for {away_s:.0f} s: {why}", now))
        retry_s = OUTAGE_RETRIES_S[min(self._retries, len(OUTAGE_RETRIES_S) - 1)]
        self._retries += 1
        return now + min(retry_s, self._policy.lease_s / 3)

    def _watch_keys(self) -> None:
        """Have a watch on the keys that concern this node, and on those that it plans from while it leads."""
        keys = self._keys
        if self._watch is None:
            self._watch = self._store.watch(self.hint, *self._follower.keys)
        if self.leads and self._planner_watch is None:
            planned_from = keys.nodes, keys.failures(), keys.done(), keys.hang_reports()
            self._planner_watch = self._store.watch(self.hint, *planned_from)
        elif not self.leads and self._planner_watch is not None:
            self._planner_watch.close()
            self._planner_watch = None

    def _register(self, now: float, check: bool) -> bool:
        """Take part in the job under a lease, or renew it. `check`: read the record first, in case the store has lost
        it.
        """
        lease = self._registration.lease
        try:
            if check or self._observations.take_own_record_missing():
                self._registration.check()
            return self._registration.turn(self._follower.running, now)
        finally:
            if self._registration.lease is not lease:
                self._observations.distrust_absences(now)  # a store that lost this record may have lost others
                if lease is not None:
                    self._election.key_lost()

    def _send_reports(self, now: float) -> None:
        if self._registration.lease is not None and not self._registration.send(now):
            self._election.key_lost()
        self._outbox.send()  # a failure comes after the slots that start because of it
        lease = self._registration.lease
        if lease is not None and self._outbox.send_hang_report(lease) and self.leads:
            self._planner.hint(self._keys.hang_reports())

    def _follow_round(self) -> None:
        round = self._follower.read_round(is_registered=self._registration.lease is not None)
        if round is None:
            return
        if self._follower.is_run_replaced():
            self._notices.append(RoundPublished(round))
            self._election.key_lost()
            self._registration.key.withdraw()
            return
        self._follower.follow(round)
        if self._follower.ended_before_joining and self._registration.lease is None:
            self._log(
                f"run {round.run or 0} of job {self._keys.job!r} ended before this node came, which starts nothing: "
                "a new run needs a higher --run, or another --rdzv-id"
            )
        self._report_round(round)
        if self._take_over is not None and self._take_over.follow_store_of(round, self._last_turn):
            self._store_replaced(self._last_turn)
            raise StoreUnavailable("the store of this job is another one now")

    def _report_round(self, round: Round) -> None:
        """Report a new Round to the loop, once, and say in the record that this node has seen it."""
        self._waiting_for = ""
        if self._follower.is_non_member:
            self._agreement.invalidate()
        self._election.round_published()
        news = {"seen_round": round.number, "seen_term": round.store_term}
        if (round.run, round.number) != self._posted:  # an earlier store's Round is published again in the next one
            self._posted = round.run, round.number
            news["paused"] = 0
            self._notices.append(RoundPublished(round))
        # A node outside the Round can join once it has seen it.
        send_at = float("-inf") if self._follower.is_non_member else self._last_turn + SEEN_ROUND_DELAY_S
        self._registration.update(send_at=send_at, **news)

    def _check_reachability(self, now: float) -> float | None:
        record = self._registration.record
        again_at = self._reachability.turn(self._follower.round, record.stepped_round, self.facts.next_step_due, now)
        if self._reachability.unreachable != record.unreachable:
            self._registration.update(unreachable=self._reachability.unreachable)
        return again_at

    def _suspect_disconnected(self, now: float) -> None:
        """A broken connection is a reason to probe: every member probes the leader, the leader all others."""
        while self._disconnected:
            node = self._disconnected.popleft()
            self._observations.suspect(node)
            leader = self._election.other_leader
            if leader is not None and leader.id == node:
                self._election.leader_disconnected(now)

    def _links(self) -> dict[str, Address]:
        """Agents whose death concerns this one: every member's if it leads, else the leader's."""
        round = self._follower.running
        if round is None:
            return {}
        if self.leads:
            return self._observations.member_addresses(round)
        record = self._election.other_leader
        address = try_parse_endpoint(record.address) if record is not None else None
        return {record.id: address} if record is not None and address is not None else {}

    # --- leading ----------------------------------------------------------------------------------------------------

    def _lead(self, now: float) -> float | None:
        if self._registration.lease is None:
            return now
        if self._clean_up_if_ended():
            return None
        if self._follower.take_invalidated(self._keys.planner):
            self._election.refresh_leader(now)
        if not (self._store.standalone or self._store.hosts):
            return self._check_host_leads(now)
        claim_at = None if self.leads else self._election.claim(now, non_member=self._follower.is_non_member)
        if not self.leads:
            return claim_at
        if self._led_with != self._election.key_version:
            self._begin_to_lead()
        elif self._a_member_should_lead():
            return self._election.resign(now, 0.0)
        return self._plan(now)

    def _check_host_leads(self, now: float) -> float | None:
        """The host of the store leads alone: its agent may be stuck while its store answers."""
        since = self._election.free_since
        if since is None:
            return None
        silent_s = now - since
        why = f"the agent that hosts the store has not led the job for {silent_s:.0f} s, although its store answers"
        is_new = self._follower.round is None
        if is_new and self._job_of_host is None and silent_s >= self._policy.lease_s:
            self._job_of_host = self._find_job_of_host()
        if is_new and self._job_of_host:  # it may be about to end, and this job's host about to start
            why = f"the store there is that of job {self._job_of_host!r}, and this is job {self._keys.job!r}: "
            why += "the nodes of one job need the same --rdzv-id, and two jobs two ports in --rdzv-endpoint"
            self._report_wait(why, more_nodes=False)
        if silent_s >= self._policy.store_away_s:
            self._notices.append(StoreAbandoned(why, now))
        return max(since + self._policy.store_away_s, now + self._policy.renewal_s)

    def _find_job_of_host(self) -> str:
        """The other job that the host of the store leads, or "". It reads all keys, of all nodes of a large job."""
        ends = [key.removeprefix(ALL_JOBS).split("/") for key in self._store.list(ALL_JOBS)]
        return next((job for job, *rest in ends if job != self._keys.job and rest == ["planner"]), "")

    def _begin_to_lead(self) -> None:
        self._planner.reset()
        self._watch_keys()
        self._follow_round()
        if self._store.compares_one_key:
            self._follower.fence_former_leader()
            self._follow_round()
        self._led_with = self._election.key_version

    def _a_member_should_lead(self) -> bool:
        """A leader outside the Round leaves the leader key to a member: it notices at once that workers stand still."""
        return (
            self._follower.is_non_member
            and self._planner.others_can_lead(self._follower.round)
            and self._store.standalone
        )

    def _plan(self, now: float) -> float | None:
        """One turn of the planner; returns when to take the next."""
        key = self._election.key_version
        if key is None:
            return now
        self._observations.store_answers(now)
        life = self._take_over.hosted if self._take_over is not None else None
        verdict = self._planner.turn(self._follower.stored, self.facts, now, (self._keys.planner, key), life)
        self._abandon_if_blocked(now)
        self._notices += self._planner.take_notices()
        match verdict:
            case Round():
                self._follower.follow_own(verdict)
                self._report_round(verdict)
                return now
            case HandOver():
                if self._store.standalone:
                    return self._election.resign(now, CUT_OFF_ABSTAIN_S)
                self._follower.invalidate_leader()
                return now
            case Wait():
                if verdict.until == now:
                    self._follower.invalidate_leader()
                if verdict.too_few_nodes or verdict.notable:
                    self._report_wait(verdict.why, verdict.too_few_nodes)
        return verdict.until

    def _report_wait(self, why: str, more_nodes: bool) -> None:
        """Say what this node or the job waits for, once."""
        if why and why != self._waiting_for:
            self._waiting_for = why
            self._notices.append(WaitingFor(why, more_nodes))

    def _abandon_if_blocked(self, now: float) -> None:
        """The side of a partition that may not continue gives up as one does whose store is away."""
        why, due = self._planner.succession.blocked_why, self.facts.next_step_due
        if not why or (due is not None and now < due + STALL_GRACE_S):
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
        elif (blocked_s := now - self._blocked_since) >= self._policy.store_away_s:
            self._notices.append(StoreAbandoned(f"{why}; waited for {blocked_s:.0f} s", now, group_stuck=True))

    def _clean_up_if_ended(self) -> bool:
        """True if the job has ended. Its leader may have died before it deleted the records: then a joiner does."""
        round = self._follower.round
        if self._follower.ended_before_joining and round is not None:
            self._planner.delete_job_records(round)
        return round is not None and round.terminal

    # --- the end ----------------------------------------------------------------------------------------------------

    def is_last_node(self) -> bool:
        """True once no other node is left in the store: its host leaves last. Raises StoreUnavailable."""
        return set(self._store.list(self._keys.nodes)) <= {self._keys.node(self._node)}

    def close(self) -> None:
        """Leave the job: the record and the leader key go at once. Raises nothing."""
        for watch in filter(None, (self._watch, self._planner_watch)):
            watch.close()
        try:
            self._registration.key.withdraw()
        except (StoreUnavailable, UsageError):
            pass  # the lease expires by itself


# --- the thread -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberThreadFailed:
    """The thread has ended by an error in elasticd."""

    error: BaseException


class MemberThread:
    """The thread that takes a member's turns. It posts the notices of each turn to the loop's inbox."""

    def __init__(self, member: RendezvousMember, post: Callable[[Notice | MemberThreadFailed], None]) -> None:
        self._member = member
        self._post = post
        self._turn_due = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elasticd-store", daemon=True)
        member.set_wake(self._turn_due.set)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn_due.clear()
                began = time.monotonic()
                notices, until = self._member.turn(began)
                took_s = time.monotonic() - began
                for notice in notices:
                    self._post(notice)
                self._turn_due.wait(None if until is None else max(0.0, until - time.monotonic()))
                if self._member.leads and not self._closing:
                    # Many nodes report at once: one turn answers all of them.
                    time.sleep(min(took_s, MAX_LEADER_REST_S))
        except BaseException as error:  # noqa: BLE001 the loop must end with it
            self._post(MemberThreadFailed(error))

    def abandon(self) -> None:
        """Take no more turns, and take nothing back: what a killed agent does."""
        self._closing = True
        self._turn_due.set()
        self._thread.join(CLOSE_S)

    def close(self) -> None:
        """Leave the job; the host of the store waits until the other nodes have left, too. Bounded."""
        self.abandon()
        deadline = time.monotonic() + HOST_LINGER_S
        try:
            while self._member.hosts_store and time.monotonic() < deadline and not self._member.is_last_node():
                time.sleep(0.05)
        except ElasticdError:
            pass  # the store is gone, and nothing can be reported any more
        self._member.close()
