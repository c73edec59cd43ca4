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

from elasticd import beat
from elasticd.errors import StoreRefused
from elasticd.wire import Failure, Round
from elasticd_agent import core
from elasticd_agent.launcher.client import OwnerLost, OwnerSaid, end_orphans
from elasticd_agent.launcher.commands import Worker
from elasticd_agent.meeting import Broken, Meeting
from elasticd_agent.messages import (
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
    Stalled,
    StartFailed,
    StartGroup,
    StopForced,
    StopGroup,
    StopRequested,
    TimeCame,
    Wake,
)
from elasticd_agent.news import Awaited, HoldAsked, MasterKnown, News, Rejected, StoreSeen
from elasticd_agent.stall import Stall
from elasticd_agent.watch import Seen, Watch
from elasticd_agent.workers import Started, StoreReady, Workers

EAGER_LOOK_S = 0.02
"""How often a group is looked at until its first step, so that the next one is parked soon."""
LOOK_S = 0.25
TELL_CHECKPOINT_S = 10.0
"""How often other nodes hear of a new checkpoint: what a Round says it resumes from is a proposal, and rank 0 looks."""

Message = News | OwnerSaid | OwnerLost | Broken


class Story(Protocol):
    """Everything that gets told of a job: to the event log, the metrics and the person."""

    def said(self, sentence: str) -> None: ...
    def launcher(self, mode: str, reason: str, seconds: float | None) -> None: ...
    def round_published(self, round: Round, now: float) -> None: ...
    def store_seen(self, seen: StoreSeen, now: float) -> None: ...
    def started(self, started: Started, now: float) -> None: ...
    def happened(self, event: Event) -> None: ...
    def asked_to_end(self, number: int) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def seen(self, seen: Seen, now: float) -> None: ...
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
        stall: Stall,
        workers: Workers,
        make_workers: Callable[[], Workers],
        prepare: Callable[[Round, str], tuple[tuple[Worker, ...], Watch]],
        story: Story,
        inbox: queue.SimpleQueue[Message],
        most_workers: int,
    ) -> None:
        self._node, self._rules, self._meeting, self._stall = node, rules, meeting, stall
        self._address = address
        self._make_workers, self._prepare, self._story = make_workers, prepare, story
        self._inbox, self._most_workers = inbox, most_workers
        self._phase: Phase = Joining()
        self._events: deque[Event] = deque()
        self._wakes: list[float] = []
        self._kill_at: dict[int, float] = {}
        self._meet_at: float | None = 0.0  # at once: nobody may ever send the first message
        self._start_with: tuple[Round, tuple[Worker, ...]] | None = None  # waits to hear where the workers' store is
        self._master: MasterKnown | None = None
        self._held = 0  # the round that the planner wants held
        self._step_at: tuple[int, float] = (0, 0.0)
        self._told_at = float("-inf")
        self._warm = False
        self._watch: Watch | None = None
        self._look_at = 0.0
        self._stepped = 0  # the newest round that was seen to step
        self._round: Round | None = None
        self._exit_code: int | None = None
        self._awake_by: float | None = None
        self.workers = workers
        workers.tell(story)

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
        times += [self._meet_at, self._look_at if self._watch is not None else None]
        timeout = min((at - now for at in times if at is not None), default=None)
        self._awake_by = None if timeout is None else now + timeout
        try:
            return self._inbox.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return None

    def _turn(self, message: Message | None) -> None:
        now = time.monotonic()
        match message:
            case OwnerSaid():
                for heard in self.workers.heard(message):
                    if isinstance(heard, Started):
                        self._story.started(heard, now)
                    elif isinstance(heard, StoreReady):
                        if self._rules.shared:
                            self._meeting.master(heard.number, self._address(), heard.port)
                    else:
                        self._events.append(heard)
                if self._rules.shared and not self._warm and self.workers.settled:
                    self._warm = True
                    self._meeting.update(warm=1)
            case OwnerLost():
                self._owner_lost()
            case MasterKnown() | HoldAsked() | StoreSeen() | Awaited() | Rejected() | Broken():
                self._heard(message, now)
            case None:
                pass
            case _:
                self._events.append(message)
        self._due(now)
        self._drain()
        self._meet(now)
        self._drain()

    def _heard(self, news: MasterKnown | HoldAsked | StoreSeen | Awaited | Rejected | Broken, now: float) -> None:
        match news:
            case MasterKnown():
                self._master = news
                self._start_joining()
            case HoldAsked(number, on):
                self._held = number if on else 0
                # The number makes every round's request a new one.
                self.workers.request(number, beat.HOLD | number << 8 if on else 0, only=0)
            case StoreSeen():
                self._story.store_seen(news, now)
            case Awaited(why):
                self._story.said(why)
            case Rejected(why):
                if not isinstance(self._phase, Joining):
                    self._story.said(why)
                else:
                    raise StoreRefused(why)
            case Broken(error):
                raise error

    def _drain(self) -> None:
        while self._events and self._exit_code is None:
            event = self._events.popleft()
            if isinstance(event, StopRequested | StopForced) and not self._rules.shared:
                self._meeting.facts.stop = event
            if isinstance(event, RoundPublished) and (self._round is None or event.round.number > self._round.number):
                self._round = event.round
                self._story.round_published(event.round, time.monotonic())
                if event.round.member(self._node) is None:
                    self.workers.end_store()
            if isinstance(event, GroupGone):
                self._forget(event.number)
            self._story.happened(event)
            self._phase, actions = core.step(self._phase, event, self._rules)
            for action in actions:
                self._perform(action)

    def _forget(self, number: int) -> None:
        """The round's group is gone: read what its workers noted last, and look no more."""
        self._kill_at.pop(number, None)
        self._start_with = None
        self._meeting.facts.advances_by = None
        if self._watch is not None and self._watch.number == number:
            self._look(time.monotonic())
            self._watch.close()
            self._watch = None

    def _due(self, now: float) -> None:
        """What time has brought: wakes, overdue kills, a look at the workers."""
        if any(at <= now for at in self._wakes):
            self._wakes = [at for at in self._wakes if at > now]
            self._events.append(TimeCame(now))
        for number in [number for number, at in self._kill_at.items() if at <= now]:
            del self._kill_at[number]
            self._story.said(f"round {number}: the workers did not stop in time and are killed")
            self._events.extend(self.workers.signal(number, signal.SIGKILL))
        if self._watch is not None and now >= self._look_at:
            self._look(now)

    # --- performing -----------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case StartGroup(round):
                self._start(round)
            case KillGroup(number, _):
                self._story.asked_to_end(number)
                self._events.extend(self.workers.signal(number, signal.SIGKILL))
            case StopGroup(number, why, grace_s, name):
                self._stop(number, why, grace_s, name)
            case ReportFailure(failure):
                self._report(failure)
            case ReportDone(number):
                self._meeting.done(number)
            case ReportLeaving(why):
                self._story.said(why)
                self._meeting.update(leaving=why)
            case Wake(at):
                self._wakes.append(at)
            case Leave(exit_code, why):
                self._exit_code = exit_code
                self._story.ended(exit_code, why, self._round)

    def _start(self, round: Round) -> None:
        if self._watch is not None:
            self._watch.close()
        try:
            workers, self._watch = self._prepare(round, self._address())
        except OSError as error:  # no room for the beats, no right to the log directory
            self._watch = None
            self._events.append(StartFailed(round.number, str(error), time.monotonic()))
            return
        self._stall.begin(round.number)
        now = time.monotonic()
        self._look_at, self._step_at = now + EAGER_LOOK_S, (0, now)
        self._meeting.facts.advances_by = now
        self._meeting.update(ready=round.number)
        if round.group_rank(self._node) == 0:
            self.workers.start(round, workers, None)
        else:
            self._start_with = round, workers
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
        self._story.asked_to_end(number)
        self._kill_at[number] = time.monotonic() + grace_s
        self.workers.request(number, beat.STOP)
        self._events.extend(self.workers.signal(number, signal.Signals[name]))

    def _report(self, failure: Failure) -> None:
        now = time.monotonic()
        if self._watch is not None and self._watch.number == failure.round:
            self._look(now)
        facts = self._meeting.facts
        failure = replace(failure, high_water=facts.high_water, checkpoint=facts.checkpoint)
        self._story.failed(failure)
        self._meeting.failed(failure)

    # --- looking and meeting --------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        assert self._watch is not None
        seen = self._watch.look(now)
        number = seen.number
        first = seen.first_step_at
        if first is not None and number != self._stepped:
            self._stepped = number
            self._events.append(FirstStep(number, first))
            self._meeting.update(stepped=number)
            # With a store, wherever rank 0 is now: it may be here in the next round, and then there is no time to fork.
            self.workers.park(self._most_workers, with_store=True)
        facts = self._meeting.facts
        for note in seen.notes:
            self._noted(note.kind, note.round, note.step)
        facts.high_water = self._stall.high_water(seen)
        self._advanced(seen.step, now)
        why = self._stall.judge(seen)
        if why is not None:
            self._events.append(Stalled(number, why, now))
        self._story.seen(seen, now)
        self._look_at = now + (LOOK_S if number == self._stepped else EAGER_LOOK_S)

    def _advanced(self, step: int, now: float) -> None:
        """Work out when the next step should be done: what the planner may rely on to see that nobody trains."""
        before, at = self._step_at
        if step > before:
            step_s = (now - at) / (step - before)
            self._step_at = step, now
            self._meeting.facts.advances_by = now + 2 * step_s

    def _noted(self, kind: str, number: int, step: int | None) -> None:
        """What a Session said that other agents must know."""
        match kind:
            case "checkpoint_saved" if step is not None:
                self._meeting.facts.checkpoint = (number, step)
                now = time.monotonic()
                if self._rules.shared and now >= self._told_at + TELL_CHECKPOINT_S:
                    self._told_at = now
                    self._meeting.update(checkpoint=(number, step), high_water=self._meeting.facts.high_water)
            case "can_hold":
                self._meeting.update(can_hold=number)
            case "holding" if step is not None:
                self._meeting.update(held=number, checkpoint=(number, step), high_water=step)
            case "hold_over" | "cannot_hold":
                self._meeting.update(held=0, can_hold=0)

    def _meet(self, now: float) -> None:
        if isinstance(self._phase, Ended):
            return
        news, self._meet_at = self._meeting.turn(now)
        for said in news:
            if isinstance(said, MasterKnown | HoldAsked | StoreSeen | Awaited | Rejected):
                self._heard(said, now)
            else:
                self._events.append(said)

    def _owner_lost(self) -> None:
        """The owner was killed and its processes with it; begin again with another."""
        self._story.said("the process that owns the workers was killed: its workers have ended, another one takes over")
        self.workers.close()
        end_orphans()
        self.workers = self._make_workers()
        self.workers.tell(self._story)
        if self._watch is not None:
            self._events.append(GroupGone(self._watch.number))
