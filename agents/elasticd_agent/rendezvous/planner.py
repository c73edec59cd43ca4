"""The planner's hands: reads the view of a job from the store, asks `plan`, publishes by compare-and-swap.

Whatever it knows is in the store, but for the times at which it saw things, which are its own clock's, and who answered
its knocks: any other agent can take over at any moment. Of what it reads it keeps copies, and reads again what a watch
has named. A lost race is no news: the Round that won is read at the next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from elasticd_agent.hangs.judge import HangJudge, failures
from elasticd_agent.hangs.stragglers import RankWaitCounts, find_stragglers
from elasticd_agent.model.codec import Document
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.messages import StopForced, StopRequested
from elasticd_agent.model.records import Failure, NodeRecord, Round
from elasticd_agent.model.reports import HangReport
from elasticd_agent.rendezvous.faults import FaultLog
from elasticd_agent.rendezvous.membership import STALLED_S
from elasticd_agent.rendezvous.plan import ROOT_CAUSE_WAIT_S, plan
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeNoAnswer, ProbeRefused
from elasticd_agent.rendezvous.view import Pause, PresentNode, ProbeResult, Requirements, View, Wait
from elasticd_agent.store import Store, Versioned
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.system.addresses import try_parse_endpoint

PROBE_INTERVAL_S = 1.0
JOINER_PROBE_INTERVAL_S = 5.0
"""Those who want to join are asked so often whether they can be reached."""
MAX_PROBE_INTERVAL_S = 30.0
"""How far apart knocks get while no worker advances and everybody answers: it may be a long evaluation."""
REFRESH_S = 20.0
"""Everything is read again so often, in case a watch missed something."""
DELETES_A_TURN = 32
ENDED_S = 600.0
"""An ended job's records stay so long for those who come late; then its id may be used again."""

Probe = Callable[[Mapping[str, tuple[str, int]]], Mapping[str, ProbeAlive | ProbeRefused | ProbeNoAnswer]]
D = TypeVar("D", bound=Document)


@dataclass(slots=True)
class LocalFacts:
    """What this node's loop knows and the planner here may use. Written by one thread, read by another."""

    first_number: int = 1
    checkpoint: tuple[int, int] | None = None
    high_water: int = 0
    stop: StopRequested | StopForced | None = None
    next_step_due: float | None = None


@dataclass(slots=True)
class Planner:
    """One job's planner, asleep until its agent holds the planner's key. Times are monotonic seconds.

    `met`: incarnations that have answered a knock of this agent's, whoever planned then; who refuses the next is gone.
    """

    store: Store
    keys: Keys
    policy: Policy
    requirements: Requirements
    facts: LocalFacts
    probe: Probe
    node: str
    say: Callable[[str], None]
    store_up_since: float = 0.0
    suspects: set[str] = field(default_factory=set)
    met: set[tuple[str, str]] = field(default_factory=set)
    _decoded: tuple[Versioned, Round] | None = None
    _read_at: float = float("-inf")
    _round_at: dict[int, float] = field(default_factory=dict)
    _failed_at: dict[int, float] = field(default_factory=dict)
    _joined_at: dict[tuple[str, str], float] = field(default_factory=dict)
    _addresses: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    _silent: dict[str, float] = field(default_factory=dict)
    _stuck_knocks: int = 0
    _unreachable: frozenset[str] = frozenset()
    _applicants: set[str] = field(default_factory=set)
    _applicants_at: float = float("-inf")
    _resigned: int = 0
    cut_off: bool = False
    own_record_missing: bool = False
    _absent: dict[str, float] = field(default_factory=dict)
    _short_since: float | None = None
    _short: bool = False
    _knocked: dict[str, ProbeResult] = field(default_factory=dict)
    _knocked_for: tuple[object, ...] = ()
    _knock_at: float = 0.0
    _garbage: list[str] = field(default_factory=list)
    _not_shared: bool = False
    judge: HangJudge = field(init=False)
    _copies: StoreCache = field(init=False)
    stragglers: tuple[tuple[int, float], ...] = ()
    faults: FaultLog = field(init=False)

    def __post_init__(self) -> None:
        self.judge = HangJudge(self.policy)
        self.faults = FaultLog(self.policy)
        self._copies = StoreCache(self.store, self.say)

    def hint(self, key: str) -> None:
        """`key` may have changed. Safe from any thread."""
        self._copies.invalidate(key)

    def reset(self) -> None:
        """Somebody else plans, or the store was away: what was read and heard so far is not to be trusted."""
        self._copies.clear()
        self.judge.reset()
        self._absent.clear()
        self._knocked.clear()
        self._silent.clear()
        self._knocked_for = ()
        self._short_since = None
        self.cut_off = False

    def turn(self, current: Versioned | None, now: float, guard: tuple[str, int] | None) -> Round | Pause | Wait:
        """Look at the job once; publish the next Round if there shall be one. Raises StoreUnavailable."""
        if now >= self._read_at + REFRESH_S:
            self._copies.clear()
            self._read_at = now
        round = self._understood(current)
        view = self._view(round, now)
        if round is not None and not round.terminal:
            view = self._knocking(view, round, now)
            view = self._see_applicants(view, round, now)
            self._see_who_is_cut_off(view, round, now)
            if self.cut_off:
                return Wait("another node shall plan", now)
            view = self._see_hangs(view, round, now)
            self._see_slow(view, round)
        verdict = plan(view, self.policy, now)
        self._short = isinstance(verdict, Wait) and verdict.too_few_nodes
        if isinstance(verdict, Round):
            version = None if current is None else current.version
            if not self.store.compare_and_swap(self.keys.round, version, verdict.to_json(), guard):
                return Wait("another planner was faster", now)
            self.faults.observe(view, now)
            self._forget_before(verdict.number)
            self._say_what_is_odd(verdict, view)
            if verdict.terminal:
                self.delete_records(verdict)
        elif isinstance(verdict, Wait) and (verdict.too_few_nodes or view.failures):
            self.faults.observe(view, now)
        self._hold(verdict, current is not None)
        self._ask_for_reports(round)
        self._delete_garbage()
        if self._garbage and isinstance(verdict, Wait):
            return replace(verdict, until=now)
        if self.judge.suspected and isinstance(verdict, Wait):
            again = self.judge.next_turn_at(now)
            return replace(verdict, until=again if verdict.until is None else min(again, verdict.until))
        return verdict

    def _understood(self, current: Versioned | None) -> Round | None:
        if current is not None and (self._decoded is None or self._decoded[0] != current):
            self._decoded = current, decode_record(Round, self.keys.round, current.value)
        return self._decoded[1] if current is not None and self._decoded is not None else None

    def others_can_lead(self, round: Round | None) -> bool:
        """True if a member of `round` is here that could plan as well as we, or better."""
        return round is not None and any(
            record.seen_round == round.number
            and (member := round.member(record.id)) is not None
            and member.incarnation == record.incarnation
            and record.id != self.node
            and not record.leaving
            for record in self._copies.records(self.keys.nodes, NodeRecord)
        )

    def addresses(self, round: Round) -> dict[str, tuple[str, int]]:
        """Where the other members' agents answer, as far as it is known."""
        found = {m.node: self._addresses.get((m.node, m.incarnation)) for m in round.members if m.node != self.node}
        return {node: address for node, address in found.items() if address}

    def record_answer(self, record: NodeRecord) -> None:
        """This agent has answered a knock before: should it refuse the next one, it is gone."""
        self.met.add((record.id, record.incarnation))

    # --- the view ---------------------------------------------------------------------------------------------------

    def _view(self, current: Round | None, now: float) -> View:
        number = current.number if current is not None else 0
        records = self._copies.records(self.keys.nodes, NodeRecord)
        failures = self._copies.records(self.keys.failures(number), Failure)
        done = self._copies.list(self.keys.done(number))
        if failures:
            self._failed_at.setdefault(number, now)
        here = {r.id for r in records}
        self.own_record_missing = self.node not in here
        if self.own_record_missing:  # perhaps others, too
            self.store_up_since = max(self.store_up_since, now)
        members = {m.node for m in current.members} if current is not None else set()
        self._absent = {node: self._absent.get(node, now) for node in sorted(members - here)}
        self._forget_who_left(records, current)
        few = self._short or len([r for r in records if r.slots and not r.leaving]) < self.requirements.min_nodes
        self._short_since = (self._short_since or now) if few else None
        proposed = [
            *(r.checkpoint for r in records),
            self.facts.checkpoint,
            current.last_checkpoint if current else None,
        ]
        return View(
            current=current,
            nodes=tuple(PresentNode(r, self._joined_at.setdefault((r.id, r.incarnation), now)) for r in records),
            requirements=self.requirements,
            failures=tuple(failures),
            done=frozenset(key.rpartition("/")[2] for key in done),
            stop=self.facts.stop,
            first_number=self.facts.first_number,
            checkpoint=max((c for c in proposed if c is not None), default=None),
            high_water=max([self.facts.high_water, *(r.high_water for r in records)]),
            round_at=self._round_at.setdefault(number, now),
            failed_at=self._failed_at.get(number, now),
            absent_since=tuple(self._absent.items()),
            store_up_since=self.store_up_since,
            next_step_due=self.facts.next_step_due,
            short_since=self._short_since,
            silent_since=tuple(self._silent.items()),
        )

    def _forget_who_left(self, records: list[NodeRecord], current: Round | None) -> None:
        """Who comes back joins anew then: once it has a record again and, if it was left out, can be taken again."""
        here = {(r.id, r.incarnation) for r in records}
        if current is not None and not current.terminal:
            out = {e.node for e in current.excluded} - {m.node for m in current.members}
            here -= {
                (r.id, r.incarnation)
                for r in records
                if r.id in out and (r.seen_round != current.number or r.id in self._unreachable)
            }
        self._joined_at = {who: at for who, at in self._joined_at.items() if who in here}

    # --- knocking ---------------------------------------------------------------------------------------------------

    def _knocking(self, view: View, round: Round, now: float) -> View:
        """Ask members' agents whether they are there: once while all is well, and at every new sign of trouble."""
        others = {m.node: m.incarnation for m in round.members if m.node != self.node}
        late = now >= view.round_at + self.policy.seen_timeout_s
        unseen = (
            tuple(n for n in others if (r := view.record(n)) is not None and r.seen_round < round.number)
            if late
            else ()
        )
        suspects = tuple(sorted(self.suspects & others.keys()))
        trouble = (tuple(f.node for f in view.failures), unseen, tuple(node for node, _ in view.absent_since), suspects)
        stuck = view.next_step_due is not None and now >= view.next_step_due + STALLED_S
        if not any(trouble) and not stuck:
            self._knocked.clear()
            self._silent.clear()
            self._stuck_knocks = 0
            unknown = {n: i for n, i in others.items() if (n, i) not in self.met}
            if unknown and now >= self._knock_at:
                self._ask(view, unknown, now)
                self._knocked.clear()
                self._silent.clear()
            return view
        # Who answered at the first word of a failure may have been about to die: its workers end before it does.
        settled = bool(view.failures) and now >= view.failed_at + ROOT_CAUSE_WAIT_S
        signs = (round.number, *trouble, stuck, settled)
        if signs != self._knocked_for or now >= self._knock_at:
            self._knocked_for = signs
            self._ask(view, others, now)
            if stuck and not any(trouble) and not self._silent:
                self._stuck_knocks += 1
                self._knock_at = now + min(PROBE_INTERVAL_S * 2.0 ** min(self._stuck_knocks, 16), MAX_PROBE_INTERVAL_S)
            self.hint(self.keys.failures(round.number))
            if unseen:
                self.hint(self.keys.nodes)
            view = self._view(round, now)  # the answers took a moment
        return replace(view, probe_results=((self.node, "answered"), *self._knocked.items()))

    def _ask(self, view: View, incarnations: dict[str, str], now: float) -> None:
        for present in view.nodes:
            who = present.record.id, present.record.incarnation
            if who not in self._addresses and (where := try_parse_endpoint(present.record.address)) is not None:
                self._addresses[who] = where
        found = {node: self._addresses.get((node, incarnation)) for node, incarnation in incarnations.items()}
        addresses = {node: address for node, address in found.items() if address}
        self._knocked.clear()
        for node, answer in (self.probe(addresses) if addresses else {}).items():
            incarnation = incarnations[node]
            match answer:
                case ProbeAlive():
                    same = (answer.node, answer.incarnation) == (node, incarnation)
                    self._knocked[node] = "answered" if same else "refused"
                    if same:
                        self.met.add((node, incarnation))
                        self.suspects.discard(node)
                case ProbeRefused():
                    self._knocked[node] = "refused" if (node, incarnation) in self.met else "silent"
                case ProbeNoAnswer():
                    self._knocked[node] = "silent"
        known = {node for node, incarnation in incarnations.items() if (node, incarnation) in self.met}
        silent = {node for node, answer in self._knocked.items() if answer == "silent"}
        self._silent = {node: self._silent.get(node, now) for node in sorted(silent & known)}
        self._knock_at = now + PROBE_INTERVAL_S

    def _see_applicants(self, view: View, round: Round, now: float) -> View:
        """Who was lost because it cannot be reached shall not be taken again before it can."""
        members = {m.node for m in round.members}
        applicants = {
            p.record.id: where
            for p in view.nodes
            if p.record.id not in members
            and (p.record.id, p.record.incarnation) in self.met
            and (where := try_parse_endpoint(p.record.address)) is not None
        }
        if now >= self._applicants_at or applicants.keys() != self._applicants:
            self._applicants, self._applicants_at = set(applicants), now + JOINER_PROBE_INTERVAL_S
            answers = self.probe(applicants) if applicants else {}
            self._unreachable = frozenset(n for n, answer in answers.items() if isinstance(answer, ProbeNoAnswer))
        return replace(view, unreachable=self._unreachable)

    def _see_who_is_cut_off(self, view: View, round: Round, now: float) -> None:
        """Where we reach fewer members than do not answer us, it is us: once a Round, somebody else shall judge it."""
        silent = [node for node, since in view.silent_since if now >= since + self.policy.lease_s and view.record(node)]
        self.cut_off = len(silent) > len(round.members) / 2 and self._resigned < round.number
        if self.cut_off:
            self._resigned = round.number
            self.say(f"{self.node} does not reach {', '.join(silent)}, who reach the store: another node shall plan")

    # --- hangs ------------------------------------------------------------------------------------------------------

    def _see_hangs(self, view: View, round: Round, now: float) -> View:
        """Put a hang that was found among the failures, in the store, whoever plans next."""
        if view.failures:
            return view  # the group ends anyway
        reports = self._copies.records(self.keys.hang_reports(round.number), HangReport)
        judged = self.judge.turn(round, reports, view.done, now)
        if judged is None:
            return view
        for failure in failures(judged, self.node, view.high_water, view.checkpoint):
            key = f"{self.keys.failures(round.number)}{failure.node}.hung"
            self.store.compare_and_swap(key, None, failure.to_json())
        self.hint(self.keys.failures(round.number))
        return self._view(round, now)

    def _see_slow(self, view: View, round: Round) -> None:
        records = [r for m in round.members if (r := view.record(m.node)) is not None and r.ready_round == round.number]
        self.stragglers = find_stragglers(
            [RankWaitCounts(*counts) for record in records for counts in record.wait_counts], self.policy
        )

    def _ask_for_reports(self, round: Round | None) -> None:
        """While one node is suspicious, all shall say what they see."""
        if round is None or self.requirements.max_nodes == 1:
            return
        asked = self._copies.list(self.keys.hang_report_request).get(self.keys.hang_report_request)
        wanted = str(round.number).encode() if self.judge.suspected and not round.terminal else None
        if wanted is None and asked is not None:
            self.store.delete(self.keys.hang_report_request)
            self.hint(self.keys.hang_report_request)
        elif wanted is not None and (asked is None or asked.value != wanted):
            self.store.compare_and_swap(self.keys.hang_report_request, None if asked is None else asked.version, wanted)
            self.hint(self.keys.hang_report_request)

    # --- after the verdict ------------------------------------------------------------------------------------------

    def _hold(self, verdict: Round | Pause | Wait, started: bool) -> None:
        """Ask rank 0's agent to hold its round, or take that back."""
        if not started:
            return
        asked = self._copies.list(self.keys.pause).get(self.keys.pause)
        wanted = str(verdict.number).encode() if isinstance(verdict, Pause) else None
        if wanted is None and asked is not None:
            self.store.delete(self.keys.pause)
        elif wanted is not None and (asked is None or asked.value != wanted):
            self.store.compare_and_swap(self.keys.pause, None if asked is None else asked.version, wanted)

    def _forget_before(self, number: int) -> None:
        """Records of rounds before this one serve nobody any more."""
        gone = self.keys.failures(), self.keys.done(), self.keys.hang_reports()
        self._garbage += self._copies.drop(gone)
        self._garbage.append(self.keys.master(number - 1))
        for times in (self._round_at, self._failed_at):
            for old in [known for known in times if known < number]:
                del times[old]
        self.suspects.clear()
        self._knocked_for = ()
        self._short_since = None

    def _say_what_is_odd(self, round: Round, view: View) -> None:
        directories = {r.directory for m in round.members if (r := view.record(m.node)) is not None}
        if len(directories) > 1 and not self._not_shared:
            self._not_shared = True
            self.say(
                "THE CHECKPOINT DIRECTORY IS NOT SHARED: the nodes of this job have directories of their own. Only "
                "rank 0's node holds checkpoints; if it is lost, training starts again from what another one has. Put "
                "--checkpoint-dir on storage that all nodes mount"
            )

    def delete_records(self, round: Round) -> None:
        """Leave the ended job's records to the store's clock, and take the rest away. Whoever ended it may not have."""
        if not round.terminal or round.run != self.requirements.run:
            return
        for prefix in (self.keys.failures(), self.keys.done(), self.keys.hang_reports(), self.keys.master()):
            self._garbage += self.store.list(
                prefix
            )  # of earlier planners, too, who may have died before they tidied up
        while self._garbage:
            self._delete_garbage()
        for key in (self.keys.pause, self.keys.hang_report_request):
            self.store.delete(key)
        lease = self.store.announce(self.keys.ended, b"", ENDED_S) if self.requirements.max_nodes > 1 else None
        if lease is not None:
            for key in (self.keys.round, self.keys.spec):
                found = self.store.read(key)
                if found is not None:
                    lease.put(key, found.value, found.version)

    def _delete_garbage(self) -> None:
        """A few at a time: nobody waits for it."""
        for _ in range(min(DELETES_A_TURN, len(self._garbage))):
            self.store.delete(self._garbage.pop())
