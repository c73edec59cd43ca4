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
from elasticd_agent.hangs.evidence import GatheredEvidence
from elasticd_agent.hangs.explain import summary_lines
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.job import state_machine as core
from elasticd_agent.job.monitor import GroupMonitor, PreparedGroup
from elasticd_agent.job.slots import Slots
from elasticd_agent.model.messages import (
    Action,
    Ended,
    Event,
    FirstStep,
    GroupEnded,
    Joining,
    KillGroup,
    Leave,
    Phase,
    ReportDone,
    ReportFailure,
    ReportLeaving,
    RoundPublished,
    SetTimer,
    StartFailed,
    StartGroup,
    StepRules,
    StopForced,
    StopGroup,
    StopRequested,
    TimerExpired,
    WorkerExited,
)
from elasticd_agent.model.notices import (
    HangReportRequested,
    LeaderNotice,
    MasterKnown,
    Notice,
    PauseRequested,
    Probed,
    Rejected,
    StoreAvailability,
    StragglersFound,
)
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.rendezvous.driver import DriverFailed, RendezvousDriver
from elasticd_agent.system.control_socket import DumpRequested
from elasticd_agent.workers.gpu_memory import MemoryChecked
from elasticd_agent.workers.launcher.client import OwnerLost, OwnerMessage
from elasticd_agent.workers.launcher.requests import WorkerSpec
from elasticd_agent.workers.manager import GroupStarted, ProcessReaped, ProcessUnkillable, StoreReady, WorkerManager

LATE_S = 0.25
"""Later than this and we were not there: the machine was suspended, or had no core for us."""
WAKE_DELAY_S = 0.1
"""For what happened meanwhile to be heard, before it counts that something else has not."""

LoopNotice = (
    Probed
    | MasterKnown
    | PauseRequested
    | HangReportRequested
    | HangVerdict
    | StragglersFound
    | StoreAvailability
    | LeaderNotice
    | Rejected
    | DriverFailed
)
Message = Notice | OwnerMessage | OwnerLost | DriverFailed | GatheredEvidence | DumpRequested | MemoryChecked


class JobListener(Protocol):
    """Everything that gets told of a job: to the event log, the metrics and the person."""

    def log(self, sentence: str) -> None: ...
    def launcher_ready(self, mode: str, reason: str, seconds: float | None) -> None: ...
    def round_published(self, round: Round, now: float) -> None: ...
    def store_seen(self, seen: StoreAvailability, now: float) -> None: ...
    def started(self, started: GroupStarted, now: float) -> None: ...
    def happened(self, event: Event) -> None: ...
    def asked_to_stop(self, event: StopRequested | StopForced, rules: StepRules) -> None: ...
    def asked_to_end(self, number: int) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def judged(self, judged: HangVerdict) -> None: ...
    def slow(self, seen: StragglersFound) -> None: ...
    def planning(self, news: LeaderNotice, now: float) -> None: ...
    def phase(self, name: str) -> None: ...
    def stuck(self, heard: ProcessUnkillable | ProcessReaped, sentence: str, now: float) -> None: ...
    def ended(self, exit_code: int, why: str, round: Round | None) -> None: ...


class JobLoop:
    """One agent's run of one job. `make_workers` builds the adapter anew when its owner was lost.

    `address` is this machine's, as the workers of other nodes reach it; asked for anew in every round.
    """

    def __init__(
        self,
        *,
        node: str,
        rules: StepRules,
        rendezvous: RendezvousDriver,
        address: Callable[[], str],
        monitor: GroupMonitor,
        workers: WorkerManager,
        make_workers: Callable[[], WorkerManager],
        prepare: Callable[[Round, str], PreparedGroup],
        listener: JobListener,
        inbox: queue.SimpleQueue[Message],
        max_workers: int,
        slots: Slots,
    ) -> None:
        self._node, self._rules, self._rendezvous = node, rules, rendezvous
        self._monitor, self._address = monitor, address
        self._make_workers, self._prepare, self._listener = make_workers, prepare, listener
        self._inbox, self._max_workers, self._slots = inbox, max_workers, slots
        self._phase: Phase = Joining()
        self._events: deque[Event] = deque()
        self._wake_times: list[float] = []
        self._kill_at: dict[int, float] = {}
        self._rendezvous_at: float | None = 0.0  # at once: nobody may ever send the first message
        self._waiting_for_master: tuple[Round, tuple[WorkerSpec, ...]] | None = (
            None  # waits to hear where the workers' store is
        )
        self._master: MasterKnown | None = None
        self._pause_round = 0  # the round that the planner wants held
        self._launcher_settled = False
        self._round: Round | None = None
        self._exit_code: int | None = None
        self._due_by: float | None = None
        self.workers = workers
        workers.set_listener(listener)

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
        return self._rendezvous.facts.high_water

    @property
    def observation(self) -> Observation | None:
        """The last look at this node's workers; None while there are none. Safe from any thread."""
        return self._monitor.observation

    def overdue_s(self) -> float:
        """For how long the deciding thread should have turned and has not. Safe from any thread."""
        awake_by = self._due_by
        return 0.0 if awake_by is None else max(0.0, time.monotonic() - awake_by)

    def run(self) -> int:
        """Until the job has ended. Returns the exit code."""
        while self._exit_code is None:
            self._turn(self._receive())
        return self._exit_code

    def _receive(self) -> Message | None:
        now = time.monotonic()
        times = [*self._wake_times, *self._kill_at.values(), self.workers.tick(now)]
        times += [self._rendezvous_at, self._monitor.at]
        timeout = min((at - now for at in times if at is not None), default=None)
        self._due_by = awake_by = None if timeout is None else now + timeout
        try:
            message = self._inbox.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            message = None
        if awake_by is not None and (overslept_s := time.monotonic() - awake_by) > LATE_S:
            self._wake_times = [
                at + overslept_s for at in self._wake_times
            ]  # nothing is overdue that nobody could have heard
        return message

    def _turn(self, message: Message | None) -> None:
        now = time.monotonic()
        match message:
            case OwnerMessage():
                for heard in self.workers.handle(message):
                    if isinstance(heard, GroupStarted):
                        self._monitor.started(heard)
                        self._listener.started(heard, now)
                        if heard.number == self._pause_round:
                            self._request_pause(heard.number, True)
                    elif isinstance(heard, StoreReady):
                        if self._rules.multi_node:
                            self._rendezvous.report_master(heard.number, self._address(), heard.port)
                    elif isinstance(heard, ProcessUnkillable | ProcessReaped):
                        self._slot_changed(heard, now)
                    else:
                        if isinstance(heard, WorkerExited) and heard.number == self._monitor.number:
                            self._observe(now)  # the round's first step, if it made it, comes before its end
                        self._events.append(heard)
                if self._rules.multi_node and not self._launcher_settled and self.workers.settled:
                    self._launcher_settled = True
                    self._rendezvous.update_record(warm=1)
            case MemoryChecked():
                self.workers.memory_checked(message)
            case OwnerLost():
                self._owner_lost()
            case DumpRequested(out, reply):
                self._monitor.detector.dump(out, reply)
            case GatheredEvidence():
                self._monitor.detector.evidence_gathered(message, now)
                self._monitor.soon(now)
            case Probed():
                self._monitor.hasten(now)
            case MasterKnown() | PauseRequested() | HangReportRequested() | HangVerdict() | StragglersFound():
                self._handle_notice(message, now)
            case StoreAvailability() | LeaderNotice() | Rejected() | DriverFailed():
                self._handle_notice(message, now)
            case None:
                pass
            case _:
                self._events.append(message)
        self._due(now)
        self._drain()
        self._turn_rendezvous(now)
        self._drain()

    def _handle_notice(self, news: LoopNotice, now: float) -> None:
        match news:
            case MasterKnown():
                self._master = news
                self._start_joining()
            case PauseRequested(number, on):
                self._pause_round = number if on else 0  # its group may not have been started yet
                self._request_pause(number, on)
            case HangReportRequested(number, on):
                self._monitor.detector.report_requested(number, on)
                self._monitor.soon(now)
            case HangVerdict():
                evidence = self._monitor.detector.hang_found(news)
                self._listener.judged(news)
                if evidence is not None:
                    self._listener.log(f"round {news.round}: stacks, and who waited where: elasticd explain {evidence}")
            case StragglersFound():
                self._listener.slow(news)
            case StoreAvailability():
                self._listener.store_seen(news, now)
            case LeaderNotice():
                self._listener.planning(news, now)
            case Rejected(why):
                if not isinstance(self._phase, Joining):
                    self._listener.log(why)
                else:
                    raise StoreRefused(why)
            case DriverFailed(error):
                raise error

    def _request_pause(self, number: int, on: bool) -> None:
        # The number makes every round's request a new one.
        self.workers.request(number, beat.PAUSE | number << 8 if on else 0, only=0)

    def _drain(self) -> None:
        while self._events and self._exit_code is None:
            event = self._events.popleft()
            if isinstance(event, StopRequested | StopForced) and not self._rules.leave_on_stop:
                self._rendezvous.update_facts(stop=event)
            if isinstance(event, RoundPublished) and (self._round is None or event.round.number > self._round.number):
                self._round = event.round
                self._listener.round_published(event.round, time.monotonic())
                if event.round.member(self._node) is None:
                    self.workers.end_store()
            if isinstance(event, GroupEnded):
                self._group_ended(event.number)
            if isinstance(event, WorkerExited) and event.status.ok:
                self._monitor.exited(event.rank)
            if isinstance(event, StopRequested | StopForced):
                self._listener.asked_to_stop(event, self._rules)
            self._listener.happened(event)
            before = type(self._phase)
            self._phase, actions = core.step(self._phase, event, self._rules)
            if type(self._phase) is not before:
                self._listener.phase(type(self._phase).__name__.lower())
            for action in actions:
                self._perform(action)

    def _group_ended(self, number: int) -> None:
        """The round's group is gone: read what its workers noted last, and look no more."""
        self._kill_at.pop(number, None)
        self._waiting_for_master = None
        self._slots.forget(number)
        self._stepped(self._monitor.end(number))

    def _due(self, now: float) -> None:
        """What time has brought: wakes, overdue kills, a look at the workers."""
        if any(at <= now for at in self._wake_times):
            self._wake_times = [at for at in self._wake_times if at > now]
            self._events.append(TimerExpired(now))
        for number in [number for number, at in self._kill_at.items() if at <= now]:
            del self._kill_at[number]
            self._listener.log(f"round {number}: the workers did not stop in time and are killed")
            self._events.extend(self.workers.signal(number, signal.SIGKILL))
        if (at := self._monitor.at) is not None and now >= at:
            self._observe(now)

    # --- performing -----------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case StartGroup(round):
                self._start(round)
            case KillGroup(number, _):
                self._monitor.ending()
                self._listener.asked_to_end(number)
                self._events.extend(self.workers.signal(number, signal.SIGKILL))
            case StopGroup(number, why, grace_s, name):
                self._stop(number, why, grace_s, name)
            case ReportFailure(failure):
                self._report(failure)
            case ReportDone(number):
                self._rendezvous.report_done(number)
            case ReportLeaving(why, code):
                self._listener.log(why)
                self._rendezvous.update_record(leaving=why, leaving_code=code)
            case SetTimer(at):
                self._wake_times.append(max(at, time.monotonic() + WAKE_DELAY_S))
            case Leave(exit_code, why):
                self._exit_code = exit_code
                self._log_hang_explanation()
                self._listener.ended(exit_code, why, self._round)

    def _log_hang_explanation(self) -> None:
        """A job that was given up for a hang ends with who was to blame; the page has more."""
        suspicion, round = self._monitor.detector, self._round
        if suspicion.last_verdict is not None and round is not None and round.outcome == "failed":
            for line in summary_lines(suspicion.last_verdict_dir, suspicion.last_verdict):
                self._listener.log(line)

    def _slot_changed(self, heard: ProcessUnkillable | ProcessReaped, now: float) -> None:
        """What does not die keeps its slot: the other nodes hear of it, and a Round that needs it waits."""
        sentence = self._slots.handle(heard)
        if sentence is not None:
            self._listener.stuck(heard, sentence, now)
        if (round := self._slots.unblocked()) is not None:
            self._start(round)  # before the others hear of the slot: who has it and has not started would be late
        self._rendezvous.update_record(slots=self._slots.usable, unusable=self._slots.why)

    def _start(self, round: Round) -> None:
        if self._slots.blocks(round):
            return  # the next Round will mind what this node announces; or the slot comes back before that
        self._monitor.drop()
        try:
            prepared = self._prepare(round, self._address())
        except OSError as error:  # no room for the beats, no right to the log directory
            self._events.append(StartFailed(round.number, str(error), time.monotonic()))
            return
        self._monitor.begin(round, prepared, time.monotonic())
        if round.group_rank(self._node) == 0:
            self.workers.start(round, prepared.workers, None)
        else:
            self._waiting_for_master = round, prepared.workers
            self._start_joining()

    def _start_joining(self) -> None:
        """Start the workers whose store is on another node, once it is known where."""
        if self._waiting_for_master is not None and self._master is not None:
            round, workers = self._waiting_for_master
            if self._master.number == round.number:
                self._waiting_for_master = None
                self.workers.start(round, workers, (self._master.address, self._master.port))

    def _stop(self, number: int, why: str, grace_s: float, name: str) -> None:
        self._listener.log(why)
        self._monitor.ending()
        self._listener.asked_to_end(number)
        self._kill_at[number] = time.monotonic() + grace_s
        self.workers.request(number, beat.STOP)
        self._events.extend(self.workers.signal(number, signal.Signals[name]))

    def _report(self, failure: Failure) -> None:
        now = time.monotonic()
        if self._monitor.number == failure.round:
            self._observe(now)
        facts = self._rendezvous.facts
        failure = replace(failure, high_water=facts.high_water, checkpoint=facts.checkpoint)
        self._listener.failed(failure)
        self._rendezvous.report_failure(failure)

    # --- looking and meeting --------------------------------------------------------------------------------------

    def _observe(self, now: float) -> None:
        self._stepped(self._monitor.observe(now))

    def _stepped(self, first: FirstStep | None) -> None:
        if first is not None:
            self._events.append(first)
            # With a store, wherever rank 0 is now: it may be here in the next round, and then there is no time to fork.
            self.workers.park(self._max_workers, with_store=True)

    def _turn_rendezvous(self, now: float) -> None:
        if isinstance(self._phase, Ended):
            return
        news, self._rendezvous_at = self._rendezvous.turn(now)
        for said in news:
            if isinstance(said, LoopNotice):
                self._handle_notice(said, now)
            else:
                self._events.append(said)

    def _owner_lost(self) -> None:
        """The owner was killed and its processes with it; begin again with another."""
        self._listener.log(
            "the process that owns the workers was killed: its workers have ended, another one takes over"
        )
        self.workers.close()
        self.workers = self._make_workers()
        self.workers.set_listener(self._listener)
        if (number := self._monitor.number) is not None:
            self._events.append(GroupEnded(number))
