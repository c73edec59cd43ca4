"""The planner's I/O: it reads the View of a job from the store, calls `plan`, and publishes the verdict.

**Any agent can take the planner's place between two of its requests.** A planner lives in the agent that holds the
leader key, and that agent is killed, cut off or held up as often as any other. So nothing that a job needs is in a
planner's memory:

- The Round holds all that counts: members, budget, quarantined slots, exclusions, the quorum that must have read it.
- What nodes report (failures, ends, hang reports) is below the Round's number, written once by each node, and again
  after the store has lost it. A hang's verdict becomes Failures in the store before it becomes a Round, so that a
  successor need not judge again.
- What is lost with a planner are times: since when a record is absent, a member silent, the nodes too few. A successor
  counts from its own first sight, on its own clock. It may decide later than the planner before it, and never earlier.

A new leader begins in this order (`member._begin_to_lead`; the last step is `turn`):

1. It holds the leader key under its own lease. A key that outlived its holder would leave the job without a leader.
2. It forgets what it has read and seen when it led before: another planner may have decided since.
3. It follows the keys that a planner reads before it reads them for the first time, or it would miss a change between.
4. It reads the Round again, and where the store compares one key at a time, writes it once more, unchanged. A former
   leader that was held up between its two reads then finds another version, and loses. This step is repeated whenever
   the key's version is another one, also where the write that took the key has had no answer.
5. It plans, and publishes by compare-and-swap of the Round's version, guarded by the version of its leader key. A lost
   race needs no handling: the Round that won is read at the next turn.

A leader that reaches too few members resigns (`HandOver`), as does one outside the Round where a member could lead:
only a member notices at once that workers stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from elasticd_agent.hangs.judge import JUDGE_INTERVAL_S, HangJudge, failures
from elasticd_agent.hangs.stragglers import PersistentStragglers
from elasticd_agent.model.keys import Keys, decode_record, encode_record
from elasticd_agent.model.messages import FaultDetected, Notice, StragglersFound
from elasticd_agent.model.records import Failure, Identity, NodeRecord, Round, StoreLife
from elasticd_agent.model.reports import HangReport
from elasticd_agent.rendezvous.faults import FaultTracker
from elasticd_agent.rendezvous.membership import can_keep_processes, eligible_non_members
from elasticd_agent.rendezvous.membership_client import JobTerms
from elasticd_agent.rendezvous.peers import LivenessProber, PeerObservations
from elasticd_agent.rendezvous.plan import plan
from elasticd_agent.rendezvous.restart_budget import is_progress, restarts_left
from elasticd_agent.rendezvous.succession import Succession
from elasticd_agent.rendezvous.view import LocalFacts, Pause, PresentNode, Requirements, View, Wait
from elasticd_agent.store import Store, Versioned
from elasticd_agent.store.cache import StoreCache

REFRESH_S = 20.0
"""Everything is read again so often, in case a watch missed something."""
ENDED_JOB_TTL_S = 600.0
"""An ended job's records stay so long for nodes that come late; then its id may be used again."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """This agent reaches too few members to judge them; another member should lead."""

    why: str


@dataclass
class Planner:
    """One job's planner; it takes turns while its agent holds the leader key. Times are monotonic seconds."""

    _store: Store
    _terms: JobTerms
    _node: str
    _observations: PeerObservations
    _log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._keys, self._policy, self._requirements = self._terms.keys, self._terms.policy, self._terms.requirements
        self._cache = StoreCache(self._store, self._log)
        self._reader = ViewReader(self._cache, self._keys, self._requirements, self._observations)
        self._liveness = LivenessProber(self._node, self._policy, self._observations)
        self._judge = HangJudge(self._policy)
        self._faults = FaultTracker(self._policy)
        self.succession = Succession(self._node)
        self._persistent_stragglers = PersistentStragglers(self._policy)
        self._stragglers: tuple[tuple[int, float], ...] = ()
        self._notices: list[Notice] = []
        self._asked_ahead: bytes | None = None
        self._garbage: list[str] = []
        self._decoded: tuple[Versioned, Round] | None = None
        self._refreshed_at = float("-inf")
        self._unshared_reported = False

    def hint(self, key: str) -> None:
        """`key` may have changed. Safe from any thread."""
        self._cache.invalidate(key)

    def reset(self) -> None:
        """Another node led, or the store was away: what was read and seen so far is not to be trusted."""
        self._asked_ahead = None
        self._cache.clear()
        self._judge.reset()
        self._reader.reset()
        self._liveness.reset()
        self._observations.forget_results()

    def take_notices(self) -> list[Notice]:
        """The news for the deciding loop, each once."""
        notices, self._notices = self._notices, []
        return notices

    def turn(
        self,
        current: Versioned | None,
        facts: LocalFacts,
        now: float,
        guard: tuple[str, int] | None,
        life: StoreLife | None = None,
    ) -> Round | Pause | Wait | HandOver:
        """Evaluate the job once; publish the next Round if there is one. Raises StoreUnavailable.

        `life`: of the store, if an agent hosts it and another one may host the next.
        """
        if now >= self._refreshed_at + REFRESH_S:
            self._cache.clear()
            self._refreshed_at = now
        round = self._decode(current)
        view = self._reader.read(round, facts, now)
        self.succession.look(round, life, (p.record for p in view.nodes))
        if current is not None and (adopted := self.succession.adoption(now)) is not None:
            if isinstance(adopted, Wait):
                return adopted
            self._store.compare_and_swap(self._keys.round, current.version, adopted.to_json(), guard)
            return Wait("the round of an earlier store continues in this one", now)
        if round is not None and not round.terminal:
            view = self._probe_members(view, round, facts, now)
            self._liveness.probe_joiners_if_due(view, round, now)
            view = replace(view, unreachable_joiners=self._observations.unreachable_joiners)
            if silent := self._liveness.take_unreachable_majority(view, round, now):
                why = (
                    f"{self._node} does not reach {', '.join(silent)}, which reach the store; another node should lead"
                )
                self._log(why)
                return HandOver(why)
            view = self._judge_hangs(view, round, facts, now)
            self._report_stragglers(view, round)
        verdict = plan(view, self._policy, now)
        if isinstance(verdict, Round):
            verdict = self.succession.approve(verdict, now)
        elif isinstance(verdict, Wait):
            self.succession.note_wait(verdict)
        self._reader.too_few_nodes = isinstance(verdict, Wait) and verdict.too_few_nodes
        if isinstance(verdict, Round):
            verdict = replace(verdict, leader=self._node)
            version = None if current is None else current.version
            if not self._store.compare_and_swap(self._keys.round, version, encode_record(verdict), guard):
                return Wait("another leader has published a round", now)
            self._on_published(verdict, view, now)
        elif isinstance(verdict, Wait) and (verdict.too_few_nodes or view.failures):
            self._report_faults(view, now)
        if current is not None:
            pause = str(verdict.number).encode() if isinstance(verdict, Pause) else None
            self._set_request(self._keys.pause, pause)
            self._request_ahead(view, now)
        self._request_hang_reports(round)
        while self._garbage and not isinstance(verdict, Round):  # nothing waits for it
            self._store.delete(self._garbage[-1])
            self._garbage.pop()
        return self._limit_to_judge_interval(verdict, now)

    def others_can_lead(self, round: Round | None) -> bool:
        """True if a member of `round` is here that could lead as well as this agent, or better."""
        return round is not None and any(
            record.seen_round == round.number
            and (member := round.member(record.id)) is not None
            and member.incarnation == record.incarnation
            and record.id != self._node
            and not record.leaving
            for record in self._cache.records(self._keys.nodes, NodeRecord)
        )

    def delete_job_records(self, round: Round) -> None:
        """Delete the ended job's records, and let those of its end expire. Its leader may have died before."""
        if not round.terminal or round.run != self._requirements.run:
            return
        keys = self._keys
        for prefix in (keys.failures(), keys.done(), keys.hang_reports(), keys.master()):
            self._store.delete(prefix)  # an earlier leader may have died before it deleted its own
        for key in (keys.pause, keys.ahead, keys.hang_report_request):
            self._store.delete(key)
        lease = self._store.announce(keys.ended, b"", ENDED_JOB_TTL_S) if self._requirements.max_nodes > 1 else None
        if lease is not None:
            for key in (keys.round, keys.spec):
                stored = self._store.read(key)
                if stored is not None:
                    lease.put(key, stored.value, stored.version)

    # --- before the verdict -----------------------------------------------------------------------------------------

    def _decode(self, current: Versioned | None) -> Round | None:
        if current is None:
            return None
        if self._decoded is None or self._decoded[0] != current:
            self._decoded = current, decode_record(Round, self._keys.round, current.value)
        return self._decoded[1]

    def _probe_members(self, view: View, round: Round, facts: LocalFacts, now: float) -> View:
        trouble = self._liveness.trouble(view, round, now)
        if trouble is None:
            self._liveness.probe_unknown_members(view, round, now)
            return view
        if self._liveness.probe_if_due(view, round, trouble, now):
            self._cache.invalidate(self._keys.failures(round.number))
            if trouble.unseen_by:
                self._cache.invalidate(self._keys.nodes)
            view = self._reader.read(round, facts, now)  # the answers took a moment
        return replace(view, probe_results=((self._node, "answered"), *self._observations.results.items()))

    def _judge_hangs(self, view: View, round: Round, facts: LocalFacts, now: float) -> View:
        """Write a hang's failures to the store, for this leader and any later one."""
        if view.failures:
            return view  # the group ends anyway
        reports = self._cache.records(self._keys.hang_reports(round.number), HangReport)
        records = [record for member in round.members if (record := view.record(member.node)) is not None]
        ending = [record.id for record in records if record.ready_round < round.number]
        left = restarts_left(
            round.budget,
            self._policy,
            progress=is_progress(round, view.checkpoint, view.high_water),
            elapsed_s=now - view.round_seen_at,
        )
        verdict = self._judge.turn(round, reports, view.done, now, ending, can_restart=left > 0)
        self._notices += self._judge.new_verdicts
        self._judge.new_verdicts.clear()
        if verdict is None:
            return view
        for failure in failures(verdict, self._node, view.high_water, view.checkpoint):
            key = f"{self._keys.failures(round.number)}{failure.node}.hung"
            self._store.compare_and_swap(key, None, failure.to_json())
        self._cache.invalidate(self._keys.failures(round.number))
        return self._reader.read(round, facts, now)

    def _report_stragglers(self, view: View, round: Round) -> None:
        records = [r for m in round.members if (r := view.record(m.node)) is not None and r.ready_round == round.number]
        counts = tuple(rank for record in records for rank in record.wait_counts)
        stragglers = self._persistent_stragglers.update(counts)
        if stragglers != self._stragglers:
            self._stragglers = stragglers
            self._notices.append(StragglersFound(round.number, stragglers))

    # --- after the verdict ------------------------------------------------------------------------------------------

    def _on_published(self, round: Round, view: View, now: float) -> None:
        self._report_faults(view, now)
        keys = self._keys
        self._garbage += self._cache.drop_lists((keys.failures(), keys.done(), keys.hang_reports()))
        if view.current is not None:
            self._garbage.append(keys.master(view.current.number))
        self._reader.forget_before(round.number)
        self._observations.round_published()
        self._liveness.reset()
        self._report_unshared_directory(round, view)
        if round.terminal:
            self.delete_job_records(round)

    def _report_faults(self, view: View, now: float) -> None:
        for number, fault in self._faults.take_new(view, now):
            reported_at = None if fault.cause in ("hung", "node_lost") else view.failure_seen_at
            self._notices.append(FaultDetected(number, fault.cause, fault.culprit, reported_at))

    def _set_request(self, key: str, wanted: bytes | None) -> None:
        """Write, change or delete a request to the members."""
        stored = self._cache.list(key).get(key)
        if wanted is None and stored is not None:
            self._store.delete(key)
            self._cache.invalidate(key)
        elif wanted is not None and (stored is None or stored.value != wanted):
            self._store.compare_and_swap(key, None if stored is None else stored.version, wanted)
            self._cache.invalidate(key)

    def _request_ahead(self, view: View, now: float) -> None:
        """The nodes that may join, and the spares, start their workers ahead, where the others keep their processes."""
        current, nodes = view.current, list[str]()
        if self._requirements.max_nodes == 1 or current is None:
            return
        if not current.terminal and can_keep_processes(view, current):
            stay = [m for m in current.members if (r := view.record(m.node)) is None or not r.leaving]
            room = max(0, self._requirements.max_nodes - len(stay)) + self._requirements.spares
            nodes = [p.record.id for p in eligible_non_members(view, current, self._policy, now)[:room]]
        wanted = "\n".join([str(current.number), *nodes]).encode() if nodes else None
        if wanted != self._asked_ahead:  # an earlier leader's names an earlier round, or the same nodes
            self._set_request(self._keys.ahead, wanted)
            self._asked_ahead = wanted

    def _request_hang_reports(self, round: Round | None) -> None:
        """While one node suspects a hang, all nodes report their ranks."""
        if round is None or self._requirements.max_nodes == 1:
            return
        suspected = self._judge.suspected and not round.terminal
        self._set_request(self._keys.hang_report_request, str(round.number).encode() if suspected else None)

    def _report_unshared_directory(self, round: Round, view: View) -> None:
        directories = {r.directory for m in round.members if (r := view.record(m.node)) is not None}
        if len(directories) > 1 and not self._unshared_reported:
            self._unshared_reported = True
            self._log(
                "THE CHECKPOINT DIRECTORY IS NOT SHARED: the nodes of this job have directories of their own. Only "
                "rank 0's node holds checkpoints; if it is lost, training starts again from another node's older ones. "
                "Put --checkpoint-dir on storage that all nodes mount"
            )

    def _limit_to_judge_interval(self, verdict: Round | Pause | Wait, now: float) -> Round | Pause | Wait:
        """The verdict, due earlier while there is a hang to judge."""
        if isinstance(verdict, Wait) and self._judge.suspected:
            again = now + JUDGE_INTERVAL_S
            return replace(verdict, until=again if verdict.until is None else min(again, verdict.until))
        return verdict


class ViewReader:
    """Builds the View: the records in the store, and when this agent first saw each. May raise StoreUnavailable."""

    def __init__(
        self, cache: StoreCache, keys: Keys, requirements: Requirements, observations: PeerObservations
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._requirements = requirements
        self._observations = observations
        self._round_seen_at: dict[int, float] = {}
        self._failure_seen_at: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        self._joined_at: dict[Identity, float] = {}
        self._slots: dict[Identity, tuple[Collection[int], float]] = {}
        self._absent_since: dict[str, float] = {}
        self._leaving: dict[Identity, str] = {}
        self._too_few_nodes_since: float | None = None
        self._too_few_nodes_in, self._read_at, self._unseen = 0, 0.0, False
        self.too_few_nodes = False  #: by the last verdict; `too_few_nodes_since` counts from the first one

    def reset(self) -> None:
        """Another node led, or the store was away: what was absent then may have come back unseen.

        The time until the next `read` is not part of a wait for nodes. What came before it stays one: or a store that
        is away again and again, or leaders that change, would let the job wait for ever.
        """
        self._absent_since.clear()
        self._unseen = True

    def forget_before(self, number: int) -> None:
        """Round `number` was published."""
        for times in (self._round_seen_at, self._failure_seen_at):
            for old in [known for known in times if known < number]:
                del times[old]

    def read(self, current: Round | None, facts: LocalFacts, now: float) -> View:
        number = current.number if current is not None else 0
        failures = self._cache.records(self._keys.failures(number), Failure)
        if len(failures) > self._failures.get(number, 0):
            self._cache.invalidate(self._keys.nodes)  # whatever their nodes wrote before them counts
        self._failures = {number: len(failures)}
        records = self._cache.records(self._keys.nodes, NodeRecord)
        done = self._cache.list(self._keys.done(number))
        if failures:
            self._failure_seen_at.setdefault(number, now)
        present = {r.id for r in records}
        self._observations.nodes_listed(present, now)
        members = current.members if current is not None else ()
        missing = sorted({m.node for m in members} - present)
        self._absent_since = {node: self._absent_since.get(node, now) for node in missing}
        leaving = self._leaving | {r.identity: r.leaving for r in records if r.leaving}
        self._leaving = {m.identity: leaving[m.identity] for m in members if m.identity in leaving}
        self._forget_departed(records, current)
        return View(
            current=current,
            nodes=tuple(self._present(r, now) for r in records),
            requirements=self._requirements,
            failures=tuple(failures),
            done=frozenset(key.rpartition("/")[2] for key in done),
            stop=facts.stop,
            first_round_number=facts.first_round_number,
            checkpoint=_newest_checkpoint(records, facts, current),
            high_water=max([facts.high_water, *(r.high_water for r in records)]),
            round_seen_at=self._round_seen_at.setdefault(number, now),
            failure_seen_at=self._failure_seen_at.get(number, now),
            absent_since=tuple(self._absent_since.items()),
            leave_reasons=tuple((node, why) for (node, _), why in self._leaving.items() if node in self._absent_since),
            store_up_since=self._observations.store_up_since,
            next_step_due=facts.next_step_due,
            too_few_nodes_since=self._update_too_few_nodes_since(records, number, now),
            silent_since=tuple(self._observations.silent_since.items()),
        )

    def _present(self, record: NodeRecord, now: float) -> PresentNode:
        identity, ready = record.identity, set(record.slots) - set(record.starting)
        slots, at = self._slots.get(identity, (ready, now))
        self._slots[identity] = ready, at if slots == ready else now
        return PresentNode(record, self._joined_at.setdefault(identity, now), self._slots[identity][1])

    def _update_too_few_nodes_since(self, records: Sequence[NodeRecord], number: int, now: float) -> float | None:
        available = sum(1 for r in records if r.slots and not r.leaving)
        if not self.too_few_nodes and available >= self._requirements.min_nodes:
            self._too_few_nodes_since = None
        elif self._too_few_nodes_since is None or number != self._too_few_nodes_in:
            self._too_few_nodes_since = now
        elif self._unseen:
            self._too_few_nodes_since += now - self._read_at
        self._too_few_nodes_in, self._read_at, self._unseen = number, now, False
        return self._too_few_nodes_since

    def _forget_departed(self, records: Sequence[NodeRecord], current: Round | None) -> None:
        """A node that comes back joins anew: once it has a record again and, if it was left out, can be taken again."""
        here = {r.identity for r in records}
        if current is not None and not current.terminal:
            out = {e.node for e in current.excluded} - {m.node for m in current.members}
            unreachable = self._observations.unreachable_joiners
            here -= {
                r.identity for r in records if r.id in out and (r.seen_round != current.number or r.id in unreachable)
            }
        self._joined_at = {identity: at for identity, at in self._joined_at.items() if identity in here}
        self._slots = {identity: seen for identity, seen in self._slots.items() if identity in here}


def _newest_checkpoint(
    records: Sequence[NodeRecord], facts: LocalFacts, current: Round | None
) -> tuple[int, int] | None:
    proposed = [*(r.checkpoint for r in records), facts.checkpoint, current.last_checkpoint if current else None]
    return max((c for c in proposed if c is not None), default=None)
