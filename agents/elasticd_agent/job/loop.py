"""One inbox, one deciding thread: the shell around `core.step` and the planner.

Every turn takes one message or a deadline, lets the core decide, performs what it says, looks at the workers, and asks
the planner. Turns are level-triggered: nothing is remembered that the store, the workers or a clock could tell again.
It decides nothing by itself.
"""

from __future__ import annotations

import queue
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from elasticd.errors import StoreRefused
from elasticd.heartbeat import record as beat
from elasticd_agent.hangs.evidence import Gathered
from elasticd_agent.hangs.explain import last_lines
from elasticd_agent.hangs.observer import Seen
from elasticd_agent.job import state_machine as core
from elasticd_agent.job.monitor import Looking, Prepared
from elasticd_agent.job.slots import Slots
from elasticd_agent.model.messages import (
    Action,
    Ended,
    Event,
    FirstStep,
    GroupGone,
    Joining,
    KillGroup,
    Leave,
    Phase,
    ReportDone,
    ReportFailure,
    ReportLeaving,
    RoundPublished,
    Rules,
    StartFailed,
    StartGroup,
    StopForced,
    StopGroup,
    StopRequested,
    TimeCame,
    Wake,
    WorkerExited,
)
from elasticd_agent.model.notices import (
    HoldAsked,
    Knocked,
    MasterKnown,
    News,
    Planning,
    Rejected,
    ReportAsked,
    SlowSeen,
    StoreSeen,
)
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.model.reports import Judged
from elasticd_agent.rendezvous.driver import Broken, Meeting
from elasticd_agent.system.control_socket import DumpAsked
from elasticd_agent.workers.gpu_memory import MemoryChecked
from elasticd_agent.workers.launcher.client import OwnerLost, OwnerSaid
from elasticd_agent.workers.launcher.requests import Worker
from elasticd_agent.workers.manager import Freed, Started, StoreReady, Stuck, Workers

OVERSLEPT_S = 0.25
"""Later than this and we were not there: the machine was suspended, or had no core for us."""
HEAR_S = 0.1
"""For what happened meanwhile to be heard, before it counts that something else has not."""

Word = Knocked | MasterKnown | HoldAsked | ReportAsked | Judged | SlowSeen | StoreSeen | Planning | Rejected | Broken
Message = News | OwnerSaid | OwnerLost | Broken | Gathered | DumpAsked | MemoryChecked


class Story(Protocol):
    """Everything that gets told of a job: to the event log, the metrics and the person."""

    def said(self, sentence: str) -> None: ...
    def launcher(self, mode: str, reason: str, seconds: float | None) -> None: ...
    def round_published(self, round: Round, now: float) -> None: ...
    def store_seen(self, seen: StoreSeen, now: float) -> None: ...
    def started(self, started: Started, now: float) -> None: ...
    def happened(self, event: Event) -> None: ...
    def asked_to_stop(self, event: StopRequested | StopForced, rules: Rules) -> None: ...
    def asked_to_end(self, number: int) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def judged(self, judged: Judged) -> None: ...
    def slow(self, seen: SlowSeen) -> None: ...
    def planning(self, news: Planning, now: float) -> None: ...
    def phase(self, name: str) -> None: ...
    def stuck(self, heard: Stuck | Freed, sentence: str, now: float) -> None: ...
    def ended(self, exit_code: int, why: str, round: Round | None) -> None: ...


class Loop:
    """One agent's run of one job. `make_workers` builds the adapter anew when its owner was lost.

    `address` is this machine's, as the workers of other nodes reach it; asked for anew in every round.
    """

    def __init__(
        self,
        *,
        node: str,
        rules: Rules,
        meeting: Meeting,
        address: Callable[[], str],
        looking: Looking,
        workers: Workers,
        make_workers: Callable[[], Workers],
        prepare: Callable[[Round, str], Prepared],
        story: Story,
        inbox: queue.SimpleQueue[Message],
        most_workers: int,
        slots: Slots,
    ) -> None:
        self._node, self._rules, self._meeting = node, rules, meeting
        self._looking, self._address = looking, address
        self._make_workers, self._prepare, self._story = make_workers, prepare, story
        self._inbox, self._most_workers, self._slots = inbox, most_workers, slots
        self._phase: Phase = Joining()
        self._events: deque[Event] = deque()
        self._wakes: list[float] = []
        self._kill_at: dict[int, float] = {}
        self._meet_at: float | None = 0.0  # at once: nobody may ever send the first message
        self._start_with: tuple[Round, tuple[Worker, ...]] | None = None  # waits to hear where the workers' store is
        self._master: MasterKnown | None = None
        self._held = 0  # the round that the planner wants held
        self._warm = False
        self._round: Round | None = None
        self._exit_code: int | None = None
        self._awake_by: float | None = None
        self.workers = workers
        workers.tell(story)

    @property
    def node(self) -> str:
        return self._node

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def round(self) -> Round | None:
        """The Round published last."""
        return self._round

    @property
    def high_water(self) -> int:
        """The highest step seen so far."""
        return self._meeting.facts.high_water

    @property
    def seen(self) -> Seen | None:
        """The last look at this node's workers; None while there are none. Safe from any thread."""
        return self._looking.seen

    def overdue_s(self) -> float:
        """For how long the deciding thread should have turned and has not. Safe from any thread."""
        awake_by = self._awake_by
        return 0.0 if awake_by is None else max(0.0, time.monotonic() - awake_by)

    def run(self) -> int:
        """Until the job has ended. Returns the exit code."""
        while self._exit_code is None:
            self._turn(self._receive())
        return self._exit_code

    def _receive(self) -> Message | None:
        now = time.monotonic()
        times = [*self._wakes, *self._kill_at.values(), self.workers.tick(now)]
        times += [self._meet_at, self._looking.at]
        timeout = min((at - now for at in times if at is not None), default=None)
        self._awake_by = awake_by = None if timeout is None else now + timeout
        try:
            message = self._inbox.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            message = None
        if awake_by is not None and (overslept_s := time.monotonic() - awake_by) > OVERSLEPT_S:
            self._wakes = [at + overslept_s for at in self._wakes]  # nothing is overdue that nobody could have heard
        return message

    def _turn(self, message: Message | None) -> None:
        now = time.monotonic()
        match message:
            case OwnerSaid():
                for heard in self.workers.heard(message):
                    if isinstance(heard, Started):
                        self._looking.started(heard)
                        self._story.started(heard, now)
                        if heard.number == self._held:
                            self._hold(heard.number, True)
                    elif isinstance(heard, StoreReady):
                        if self._rules.shared:
                            self._meeting.master(heard.number, self._address(), heard.port)
                    elif isinstance(heard, Stuck | Freed):
                        self._slot(heard, now)
                    else:
                        if isinstance(heard, WorkerExited) and heard.number == self._looking.number:
                            self._look(now)  # the round's first step, if it made it, comes before its end
                        self._events.append(heard)
                if self._rules.shared and not self._warm and self.workers.settled:
                    self._warm = True
                    self._meeting.update(warm=1)
            case MemoryChecked():
                self.workers.checked(message)
            case OwnerLost():
                self._owner_lost()
            case DumpAsked(out, reply):
                self._looking.suspicion.dump(out, reply)
            case Gathered():
                self._looking.suspicion.gathered(message, now)
                self._looking.soon(now)
            case Knocked():
                self._looking.hasten(now)
            case MasterKnown() | HoldAsked() | ReportAsked() | Judged() | SlowSeen():
                self._heard(message, now)
            case StoreSeen() | Planning() | Rejected() | Broken():
                self._heard(message, now)
            case None:
                pass
            case _:
                self._events.append(message)
        self._due(now)
        self._drain()
        self._meet(now)
        self._drain()

    def _heard(self, news: Word, now: float) -> None:
        match news:
            case MasterKnown():
                self._master = news
                self._start_joining()
            case HoldAsked(number, on):
                self._held = number if on else 0  # its group may not have been started yet
                self._hold(number, on)
            case ReportAsked(number, on):
                self._looking.suspicion.asked(number, on)
                self._looking.soon(now)
            case Judged():
                evidence = self._looking.suspicion.judged(news)
                self._story.judged(news)
                if evidence is not None:
                    self._story.said(f"round {news.round}: stacks, and who waited where: elasticd explain {evidence}")
            case SlowSeen():
                self._story.slow(news)
            case StoreSeen():
                self._story.store_seen(news, now)
            case Planning():
                self._story.planning(news, now)
            case Rejected(why):
                if not isinstance(self._phase, Joining):
                    self._story.said(why)
                else:
                    raise StoreRefused(why)
            case Broken(error):
                raise error

    def _hold(self, number: int, on: bool) -> None:
        # The number makes every round's request a new one.
        self.workers.request(number, beat.HOLD | number << 8 if on else 0, only=0)

    def _drain(self) -> None:
        while self._events and self._exit_code is None:
            event = self._events.popleft()
            if isinstance(event, StopRequested | StopForced) and not self._rules.leaves:
                self._meeting.facts.stop = event
            if isinstance(event, RoundPublished) and (self._round is None or event.round.number > self._round.number):
                self._round = event.round
                self._story.round_published(event.round, time.monotonic())
                if event.round.member(self._node) is None:
                    self.workers.end_store()
            if isinstance(event, GroupGone):
                self._forget(event.number)
            if isinstance(event, WorkerExited) and event.status.ok:
                self._looking.exited(event.rank)
            if isinstance(event, StopRequested | StopForced):
                self._story.asked_to_stop(event, self._rules)
            self._story.happened(event)
            before = type(self._phase)
            self._phase, actions = core.step(self._phase, event, self._rules)
            if type(self._phase) is not before:
                self._story.phase(type(self._phase).__name__.lower())
            for action in actions:
                self._perform(action)

    def _forget(self, number: int) -> None:
        """The round's group is gone: read what its workers noted last, and look no more."""
        self._kill_at.pop(number, None)
        self._start_with = None
        self._slots.forget(number)
        self._stepped(self._looking.end(number))

    def _due(self, now: float) -> None:
        """What time has brought: wakes, overdue kills, a look at the workers."""
        if any(at <= now for at in self._wakes):
            self._wakes = [at for at in self._wakes if at > now]
            self._events.append(TimeCame(now))
        for number in [number for number, at in self._kill_at.items() if at <= now]:
            del self._kill_at[number]
            self._story.said(f"round {number}: the workers did not stop in time and are killed")
            self._events.extend(self.workers.signal(number, signal.SIGKILL))
        if (at := self._looking.at) is not None and now >= at:
            self._look(now)

    # --- performing -----------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case StartGroup(round):
                self._start(round)
            case KillGroup(number, _):
                self._looking.ending()
                self._story.asked_to_end(number)
                self._events.extend(self.workers.signal(number, signal.SIGKILL))
            case StopGroup(number, why, grace_s, name):
                self._stop(number, why, grace_s, name)
            case ReportFailure(failure):
                self._report(failure)
            case ReportDone(number):
                self._meeting.done(number)
            case ReportLeaving(why, code):
                self._story.said(why)
                self._meeting.update(leaving=why, leaving_code=code)
            case Wake(at):
                self._wakes.append(max(at, time.monotonic() + HEAR_S))
            case Leave(exit_code, why):
                self._exit_code = exit_code
                self._explain()
                self._story.ended(exit_code, why, self._round)

    def _explain(self) -> None:
        """A job that was given up for a hang ends with who was to blame; the page has more."""
        suspicion, round = self._looking.suspicion, self._round
        if suspicion.verdict is not None and round is not None and round.outcome == "failed":
            for line in last_lines(suspicion.verdict_in, suspicion.verdict):
                self._story.said(line)

    def _slot(self, heard: Stuck | Freed, now: float) -> None:
        """What does not die keeps its slot: the other nodes hear of it, and a Round that needs it waits."""
        sentence = self._slots.heard(heard)
        if sentence is not None:
            self._story.stuck(heard, sentence, now)
        if (round := self._slots.unblocked()) is not None:
            self._start(round)  # before the others hear of the slot: who has it and has not started would be late
        self._meeting.update(slots=self._slots.usable, unusable=self._slots.why)

    def _start(self, round: Round) -> None:
        if self._slots.blocks(round):
            return  # the next Round will mind what this node announces; or the slot comes back before that
        self._looking.drop()
        try:
            prepared = self._prepare(round, self._address())
        except OSError as error:  # no room for the beats, no right to the log directory
            self._events.append(StartFailed(round.number, str(error), time.monotonic()))
            return
        self._looking.begin(round, prepared, time.monotonic())
        if round.group_rank(self._node) == 0:
            self.workers.start(round, prepared.workers, None)
        else:
            self._start_with = round, prepared.workers
            self._start_joining()

    def _start_joining(self) -> None:
        """Start the workers whose store is on another node, once it is known where."""
        if self._start_with is not None and self._master is not None:
            round, workers = self._start_with
            if self._master.number == round.number:
                self._start_with = None
                self.workers.start(round, workers, (self._master.address, self._master.port))

    def _stop(self, number: int, why: str, grace_s: float, name: str) -> None:
        self._story.said(why)
        self._looking.ending()
        self._story.asked_to_end(number)
        self._kill_at[number] = time.monotonic() + grace_s
        self.workers.request(number, beat.STOP)
        self._events.extend(self.workers.signal(number, signal.Signals[name]))

    def _report(self, failure: Failure) -> None:
        now = time.monotonic()
        if self._looking.number == failure.round:
            self._look(now)
        facts = self._meeting.facts
        failure = replace(failure, high_water=facts.high_water, checkpoint=facts.checkpoint)
        self._story.failed(failure)
        self._meeting.failed(failure)

    # --- looking and meeting --------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        self._stepped(self._looking.look(now))

    def _stepped(self, first: FirstStep | None) -> None:
        if first is not None:
            self._events.append(first)
            # With a store, wherever rank 0 is now: it may be here in the next round, and then there is no time to fork.
            self.workers.park(self._most_workers, with_store=True)

    def _meet(self, now: float) -> None:
        if isinstance(self._phase, Ended):
            return
        news, self._meet_at = self._meeting.turn(now)
        for said in news:
            if isinstance(said, Word):
                self._heard(said, now)
            else:
                self._events.append(said)

    def _owner_lost(self) -> None:
        """The owner was killed and its processes with it; begin again with another."""
        self._story.said("the process that owns the workers was killed: its workers have ended, another one takes over")
        self.workers.close()
        self.workers = self._make_workers()
        self.workers.tell(self._story)
        if (number := self._looking.number) is not None:
            self._events.append(GroupGone(number))
