"""The planner's hands: reads the view of a job from the store, asks `plan`, publishes by compare-and-swap.

Whatever it knows is in the store, but for the times at which it saw things, which are its own clock's, and who answered
its knocks: any other agent can take over at any moment. Of what it reads it keeps copies, and reads again what a watch
has named. A lost race is no news: the Round that won is read at the next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from elasticd_agent.hangs.judge import Judge, failures
from elasticd_agent.hangs.stragglers import Pace, slow
from elasticd_agent.model.codec import Document
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys, understood
from elasticd_agent.model.messages import StopForced, StopRequested
from elasticd_agent.model.records import Failure, NodeRecord, Round
from elasticd_agent.model.reports import Report
from elasticd_agent.rendezvous.faults import Faults
from elasticd_agent.rendezvous.membership import STUCK_S
from elasticd_agent.rendezvous.plan import VICTIMS_S, plan
from elasticd_agent.rendezvous.probe import Answered, Refused, Silent
from elasticd_agent.rendezvous.view import Asked, Hold, Knocked, Present, View, Wait
from elasticd_agent.store import Store, Versioned
from elasticd_agent.store.cache import Copies
from elasticd_agent.system.addresses import told

KNOCK_AGAIN_S = 1.0
APPLICANTS_S = 5.0
"""Those who want to join are asked so often whether they can be reached."""
STUCK_KNOCK_S = 30.0
"""How far apart knocks get while no worker advances and everybody answers: it may be a long evaluation."""
REFRESH_S = 20.0
"""Everything is read again so often, in case a watch missed something."""
DELETES_A_TURN = 32
ENDED_S = 600.0
"""An ended job's records stay so long for those who come late; then its id may be used again."""

Knock = Callable[[Mapping[str, tuple[str, int]]], Mapping[str, Answered | Refused | Silent]]
D = TypeVar("D", bound=Document)


@dataclass(slots=True)
class Facts:
    """What this node's loop knows and the planner here may use. Written by one thread, read by another."""

    first_number: int = 1
    checkpoint: tuple[int, int] | None = None
    high_water: int = 0
    stop: StopRequested | StopForced | None = None
    advances_by: float | None = None


@dataclass(slots=True)
class Planner:
    """One job's planner, asleep until its agent holds the planner's key. Times are monotonic seconds.

    `met`: incarnations that have answered a knock of this agent's, whoever planned then; who refuses the next is gone.
    """

    store: Store
    keys: Keys
    policy: Policy
    asked: Asked
    facts: Facts
    knock: Knock
    node: str
    say: Callable[[str], None]
    store_up_since: float = 0.0
    suspects: set[str] = field(default_factory=set)
    met: set[tuple[str, str]] = field(default_factory=set)
    _read: tuple[Versioned, Round] | None = None
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
    forgotten: bool = False
    _absent: dict[str, float] = field(default_factory=dict)
    _short_since: float | None = None
    _short: bool = False
    _knocked: dict[str, Knocked] = field(default_factory=dict)
    _knocked_for: tuple[object, ...] = ()
    _knock_at: float = 0.0
    _litter: list[str] = field(default_factory=list)
    _not_shared: bool = False
    judge: Judge = field(init=False)
    _copies: Copies = field(init=False)
    slow: tuple[tuple[int, float], ...] = ()
    faults: Faults = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(self.policy)
        self.faults = Faults(self.policy)
        self._copies = Copies(self.store, self.say)

    def hint(self, key: str) -> None:
        """`key` may have changed. Safe from any thread."""
        self._copies.hint(key)

    def forget(self) -> None:
        """Somebody else plans, or the store was away: what was read and heard so far is not to be trusted."""
        self._copies.forget()
        self.judge.forget()
        self._absent.clear()
        self._knocked.clear()
        self._silent.clear()
        self._knocked_for = ()
        self._short_since = None
        self.cut_off = False

    def turn(self, current: Versioned | None, now: float, guard: tuple[str, int] | None) -> Round | Hold | Wait:
        """Look at the job once; publish the next Round if there shall be one. Raises StoreUnavailable."""
        if now >= self._read_at + REFRESH_S:
            self._copies.forget()
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
        self._short = isinstance(verdict, Wait) and verdict.short
        if isinstance(verdict, Round):
            version = None if current is None else current.version
            if not self.store.compare_and_swap(self.keys.round, version, verdict.to_json(), guard):
                return Wait("another planner was faster", now)
            self.faults.see(view, now)
            self._forget_before(verdict.number)
            self._say_what_is_odd(verdict, view)
            if verdict.terminal:
                self.bury(verdict)
        elif isinstance(verdict, Wait) and (verdict.short or view.failures):
            self.faults.see(view, now)
        self._hold(verdict, current is not None)
        self._ask_for_reports(round)
        self._tidy()
        if self._litter and isinstance(verdict, Wait):
            return replace(verdict, until=now)
        if self.judge.suspected and isinstance(verdict, Wait):
            again = self.judge.until(now)
            return replace(verdict, until=again if verdict.until is None else min(again, verdict.until))
        return verdict

    def _understood(self, current: Versioned | None) -> Round | None:
        if current is not None and (self._read is None or self._read[0] != current):
            self._read = current, understood(Round, self.keys.round, current.value)
        return self._read[1] if current is not None and self._read is not None else None

    def others_can(self, round: Round | None) -> bool:
        """True if a member of `round` is here that could plan as well as we, or better."""
        return round is not None and any(
            record.seen == round.number
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

    def trust(self, record: NodeRecord) -> None:
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
        self.forgotten = self.node not in here
        if self.forgotten:  # perhaps others, too
            self.store_up_since = max(self.store_up_since, now)
        members = {m.node for m in current.members} if current is not None else set()
        self._absent = {node: self._absent.get(node, now) for node in sorted(members - here)}
        self._forget_who_left(records, current)
        few = self._short or len([r for r in records if r.slots and not r.leaving]) < self.asked.min_nodes
        self._short_since = (self._short_since or now) if few else None
        proposed = [*(r.checkpoint for r in records), self.facts.checkpoint, current.resume if current else None]
        return View(
            current=current,
            nodes=tuple(Present(r, self._joined_at.setdefault((r.id, r.incarnation), now)) for r in records),
            asked=self.asked,
            failures=tuple(failures),
            done=frozenset(key.rpartition("/")[2] for key in done),
            stop=self.facts.stop,
            first_number=self.facts.first_number,
            checkpoint=max((c for c in proposed if c is not None), default=None),
            high_water=max([self.facts.high_water, *(r.high_water for r in records)]),
            round_at=self._round_at.setdefault(number, now),
            failed_at=self._failed_at.get(number, now),
            absent=tuple(self._absent.items()),
            store_up_since=self.store_up_since,
            advances_by=self.facts.advances_by,
            short_since=self._short_since,
            silent=tuple(self._silent.items()),
        )

    def _forget_who_left(self, records: list[NodeRecord], current: Round | None) -> None:
        """Who comes back joins anew then: once it has a record again and, if it was left out, can be taken again."""
        here = {(r.id, r.incarnation) for r in records}
        if current is not None and not current.terminal:
            out = {e.node for e in current.excluded} - {m.node for m in current.members}
            here -= {
                (r.id, r.incarnation)
                for r in records
                if r.id in out and (r.seen != current.number or r.id in self._unreachable)
            }
        self._joined_at = {who: at for who, at in self._joined_at.items() if who in here}

    # --- knocking ---------------------------------------------------------------------------------------------------

    def _knocking(self, view: View, round: Round, now: float) -> View:
        """Ask members' agents whether they are there: once while all is well, and at every new sign of trouble."""
        others = {m.node: m.incarnation for m in round.members if m.node != self.node}
        late = now >= view.round_at + self.policy.seen_timeout_s
        unseen = tuple(n for n in others if (r := view.record(n)) is not None and r.seen < round.number) if late else ()
        suspects = tuple(sorted(self.suspects & others.keys()))
        trouble = (tuple(f.node for f in view.failures), unseen, tuple(node for node, _ in view.absent), suspects)
        stuck = view.advances_by is not None and now >= view.advances_by + STUCK_S
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
        settled = bool(view.failures) and now >= view.failed_at + VICTIMS_S
        signs = (round.number, *trouble, stuck, settled)
        if signs != self._knocked_for or now >= self._knock_at:
            self._knocked_for = signs
            self._ask(view, others, now)
            if stuck and not any(trouble) and not self._silent:
                self._stuck_knocks += 1
                self._knock_at = now + min(KNOCK_AGAIN_S * 2.0 ** min(self._stuck_knocks, 16), STUCK_KNOCK_S)
            self.hint(self.keys.failures(round.number))
            if unseen:
                self.hint(self.keys.nodes)
            view = self._view(round, now)  # the answers took a moment
        return replace(view, knocked=((self.node, "answered"), *self._knocked.items()))

    def _ask(self, view: View, incarnations: dict[str, str], now: float) -> None:
        for present in view.nodes:
            who = present.record.id, present.record.incarnation
            if who not in self._addresses and (where := told(present.record.address)) is not None:
                self._addresses[who] = where
        found = {node: self._addresses.get((node, incarnation)) for node, incarnation in incarnations.items()}
        addresses = {node: address for node, address in found.items() if address}
        self._knocked.clear()
        for node, answer in (self.knock(addresses) if addresses else {}).items():
            incarnation = incarnations[node]
            match answer:
                case Answered():
                    same = (answer.node, answer.incarnation) == (node, incarnation)
                    self._knocked[node] = "answered" if same else "refused"
                    if same:
                        self.met.add((node, incarnation))
                        self.suspects.discard(node)
                case Refused():
                    self._knocked[node] = "refused" if (node, incarnation) in self.met else "silent"
                case Silent():
                    self._knocked[node] = "silent"
        known = {node for node, incarnation in incarnations.items() if (node, incarnation) in self.met}
        silent = {node for node, answer in self._knocked.items() if answer == "silent"}
        self._silent = {node: self._silent.get(node, now) for node in sorted(silent & known)}
        self._knock_at = now + KNOCK_AGAIN_S

    def _see_applicants(self, view: View, round: Round, now: float) -> View:
        """Who was lost because it cannot be reached shall not be taken again before it can."""
        members = {m.node for m in round.members}
        applicants = {
            p.record.id: where
            for p in view.nodes
            if p.record.id not in members
            and (p.record.id, p.record.incarnation) in self.met
            and (where := told(p.record.address)) is not None
        }
        if now >= self._applicants_at or applicants.keys() != self._applicants:
            self._applicants, self._applicants_at = set(applicants), now + APPLICANTS_S
            answers = self.knock(applicants) if applicants else {}
            self._unreachable = frozenset(n for n, answer in answers.items() if isinstance(answer, Silent))
        return replace(view, unreachable=self._unreachable)

    def _see_who_is_cut_off(self, view: View, round: Round, now: float) -> None:
        """Where we reach fewer members than do not answer us, it is us: once a Round, somebody else shall judge it."""
        silent = [node for node, since in view.silent if now >= since + self.policy.lease_s and view.record(node)]
        self.cut_off = len(silent) > len(round.members) / 2 and self._resigned < round.number
        if self.cut_off:
            self._resigned = round.number
            self.say(f"{self.node} does not reach {', '.join(silent)}, who reach the store: another node shall plan")

    # --- hangs ------------------------------------------------------------------------------------------------------

    def _see_hangs(self, view: View, round: Round, now: float) -> View:
        """Put a hang that was found among the failures, in the store, whoever plans next."""
        if view.failures:
            return view  # the group ends anyway
        reports = self._copies.records(self.keys.suspects(round.number), Report)
        judged = self.judge.turn(round, reports, view.done, now)
        if judged is None:
            return view
        for failure in failures(judged, self.node, view.high_water, view.checkpoint):
            key = f"{self.keys.failures(round.number)}{failure.node}.hung"
            self.store.compare_and_swap(key, None, failure.to_json())
        self.hint(self.keys.failures(round.number))
        return self._view(round, now)

    def _see_slow(self, view: View, round: Round) -> None:
        records = [r for m in round.members if (r := view.record(m.node)) is not None and r.ready == round.number]
        self.slow = slow([Pace(*counts) for record in records for counts in record.pace], self.policy)

    def _ask_for_reports(self, round: Round | None) -> None:
        """While one node is suspicious, all shall say what they see."""
        if round is None or self.asked.max_nodes == 1:
            return
        asked = self._copies.list(self.keys.suspect).get(self.keys.suspect)
        wanted = str(round.number).encode() if self.judge.suspected and not round.terminal else None
        if wanted is None and asked is not None:
            self.store.delete(self.keys.suspect)
            self.hint(self.keys.suspect)
        elif wanted is not None and (asked is None or asked.value != wanted):
            self.store.compare_and_swap(self.keys.suspect, None if asked is None else asked.version, wanted)
            self.hint(self.keys.suspect)

    # --- after the verdict ------------------------------------------------------------------------------------------

    def _hold(self, verdict: Round | Hold | Wait, started: bool) -> None:
        """Ask rank 0's agent to hold its round, or take that back."""
        if not started:
            return
        asked = self._copies.list(self.keys.hold).get(self.keys.hold)
        wanted = str(verdict.number).encode() if isinstance(verdict, Hold) else None
        if wanted is None and asked is not None:
            self.store.delete(self.keys.hold)
        elif wanted is not None and (asked is None or asked.value != wanted):
            self.store.compare_and_swap(self.keys.hold, None if asked is None else asked.version, wanted)

    def _forget_before(self, number: int) -> None:
        """Records of rounds before this one serve nobody any more."""
        gone = self.keys.failures(), self.keys.done(), self.keys.suspects()
        self._litter += self._copies.drop(gone)
        self._litter.append(self.keys.master(number - 1))
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

    def bury(self, round: Round) -> None:
        """Leave the ended job's records to the store's clock, and take the rest away. Whoever ended it may not have."""
        if not round.terminal or round.run != self.asked.run:
            return
        for prefix in (self.keys.failures(), self.keys.done(), self.keys.suspects(), self.keys.master()):
            self._litter += self.store.list(prefix)  # of earlier planners, too, who may have died before they tidied up
        while self._litter:
            self._tidy()
        for key in (self.keys.hold, self.keys.suspect):
            self.store.delete(key)
        lease = self.store.announce(self.keys.ended, b"", ENDED_S) if self.asked.max_nodes > 1 else None
        if lease is not None:
            for key in (self.keys.round, self.keys.spec):
                found = self.store.read(key)
                if found is not None:
                    lease.hold(key, found.value, found.version)

    def _tidy(self) -> None:
        """A few at a time: nobody waits for it."""
        for _ in range(min(DELETES_A_TURN, len(self._litter))):
            self.store.delete(self._litter.pop())
