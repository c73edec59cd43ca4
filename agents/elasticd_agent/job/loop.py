"""The deciding thread of one job on one node: one inbox, one thread, the shell around `state_machine.step`.

Every turn takes one message or reaches a deadline, passes it to the state machine, performs the actions that follow,
observes the workers, and takes a turn of the rendezvous. Turns are level-triggered: the loop remembers nothing that the
store, the workers or a clock could tell again, so a lost message costs time and no decision.

Who may do what
- Other threads (the owner's reader, the store's watcher, evidence, signals, the control socket) only put messages into
  the inbox. They never read or change the state of the job, so none of it needs a lock.
- The thread never waits for anything but its inbox. A call that may take long belongs to another thread, and its result
  comes back as a message. A turn that takes longer than the lease would make this node look dead to the others.
- `state_machine.step` decides what an event means in a phase; `_perform` does it. What an event means in every phase
  (the slots, the monitor and the record of this node) is in `_before_transition` and `_handle`.

The order of a turn
1. The message is handled. One that concerns the phase is appended to the queue of events.
2. Timers that are due append an event each; kills and observations that are due happen now.
3. The queue is drained: each event passes through the state machine, and its actions may append further events.
4. The rendezvous takes its turn with the facts that the first three have changed, and returns notices, which are
   handled as messages are.
5. The queue is drained again, so a Round that has just arrived starts its group within the same turn.

The workers are observed before one of their exits is handled. A first step that a worker made comes before its exit
then, and a job that makes progress is never counted as one that fails at the start.

A timer is set `TIMER_DELAY_S` late, and all of them are put off after this thread has slept through a deadline. Both
have the same reason: a message may lie in the inbox whose arrival the timer would report as missing. The machine may
have been suspended, or all of its cores taken; silence that this thread could not have heard proves nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticd.errors import StoreRefused
from elasticd.heartbeat import record as heartbeat
from elasticd_agent.hangs.evidence import GatheredEvidence
from elasticd_agent.hangs.explain import summary_lines
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.job.listener import (
    GroupEnding,
    JobLeft,
    JobListener,
    PhaseChanged,
    SlotChanged,
    SparesChanged,
    StopStarted,
)
from elasticd_agent.job.monitor import EAGER_LIMIT_S, GroupMonitor, GroupSetup
from elasticd_agent.job.slots import Slots
from elasticd_agent.job.state_machine import step
from elasticd_agent.model import messages
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.rendezvous.member import MemberThreadFailed, RendezvousMember, TurnResult
from elasticd_agent.system.network.control_socket import DumpRequested
from elasticd_agent.workers.events import (
    GroupEntered,
    GroupStarted,
    NewcomerEnded,
    NewcomerLost,
    NewcomerReady,
    OwnerEvent,
    ProcessUnkillable,
    StoreReady,
    UnkillableProcessEnded,
    WorkersReleased,
)
from elasticd_agent.workers.file_timer import FileTimerExpired
from elasticd_agent.workers.gpu_memory import MemoryChecked
from elasticd_agent.workers.groups import KeepRequest
from elasticd_agent.workers.launcher.owner_client import OwnerLost, OwnerReport
from elasticd_agent.workers.launcher.requests import WorkerSpec
from elasticd_agent.workers.manager import WorkerManager

OWNER_RETRY_S, MAX_OWNERS_LOST = 1.0, 10
"""Owners that are lost in a row before any has started workers, and the time between two of them."""
LATE_WAKE_S = 0.25
"""A thread that wakes later than this did not run: the machine was suspended, or all cores were taken."""
LARGE_STATE_BYTES = 1e9
"""The end of a job says that it waits for the disk if the newest state is larger."""
TIMER_DELAY_S = 0.1
"""Messages that arrived meanwhile are read first, before a timer counts something as missing."""


@dataclass(frozen=True, slots=True)
class StraySignal:
    """A signal that neither stops the job nor may end the agent."""

    name: str


Message = (
    messages.Notice
    | OwnerReport
    | OwnerLost
    | MemberThreadFailed
    | GatheredEvidence
    | DumpRequested
    | StraySignal
    | MemoryChecked
    | FileTimerExpired
)


class JobLoop:
    """One agent's run of one job.

    All attributes belong to the deciding thread, except those whose docstring says that they are safe from any thread:
    these are read by the metrics port and the control socket, and are replaced as a whole.
    """

    def __init__(
        self,
        *,
        node: str,
        rules: messages.StateMachineRules,
        rendezvous: RendezvousMember,
        turn_rendezvous: Callable[[float], TurnResult],
        address: Callable[[], str],
        monitor: GroupMonitor,
        workers: WorkerManager,
        make_workers: Callable[[], WorkerManager],
        prepare: Callable[[Round, str], GroupSetup],
        prepare_ahead: Callable[[Round, Sequence[int], str], Mapping[int, WorkerSpec]],
        listener: JobListener,
        inbox: queue.SimpleQueue[Message],
        max_workers: int,
        slots: Slots,
        spares: int,
    ) -> None:
        """`address` returns this machine's address for the workers of other nodes, and is called in every round.
        `make_workers` builds the manager again after its owner was lost."""
        self.node = node
        self._rules = rules
        self._rendezvous = rendezvous
        self._take_turn = turn_rendezvous
        self._address = address
        self._monitor = monitor
        self._make_workers = make_workers
        self._prepare, self._prepare_ahead = prepare, prepare_ahead
        self._listener = listener
        self._inbox = inbox
        self._max_workers = max_workers
        self._slots = slots
        self.phase: messages.Phase = messages.Joining()
        self._events: deque[messages.Event] = deque()
        self._timers: list[float] = []
        self._kill_at: dict[int, float] = {}
        self._rendezvous_at: float | None = 0.0  # at once: there may be no other node to send the first message
        self._waiting_for_master: tuple[Round, tuple[WorkerSpec, ...]] | None = None
        self._master: messages.MasterKnown | None = None
        self._saved_last = False
        """The ranks of the last group had a moment to save their state before they were killed."""
        self._ahead_of = 0
        """The round that this node may join, once its workers are at their entry."""
        self.spares = SparesChanged()
        self._spares_wanted = spares > 0
        self._entered = 0
        """The round whose workers here could leave it in their processes."""
        self._newcomer_lost: tuple[int, int] | None = None
        """The round in which a process died at its entry, and its slot: another one follows once."""
        self._pause: messages.PauseRequested | None = None
        """The round for which the leader wants a pause."""
        self._launcher_settled = False
        self._owners_lost = 0
        self._replace_owner_at: float | None = None
        self.round: Round | None = None
        """The Round published last."""
        self._exit_code: int | None = None
        self._due_by: float | None = None
        self.workers = workers
        workers.set_listener(listener)

    @property
    def observation(self) -> Observation | None:
        """The last observation of this node's workers; None while there are none. Safe from any thread."""
        return self._monitor.observation

    @property
    def high_water(self) -> int:
        return self._rendezvous.facts.high_water

    def overdue_s(self) -> float:
        """The time for which the deciding thread should have turned and has not. Safe from any thread."""
        due_by = self._due_by
        return 0.0 if due_by is None else max(0.0, time.monotonic() - due_by)

    def run(self) -> int:
        """Take turns until the job has ended. Returns the exit code.

        Raises StoreRefused where the store's job is another one than this agent's, and the error of the rendezvous'
        driver where it failed for good.
        """
        while self._exit_code is None:
            self._turn(self._receive())
        return self._exit_code

    def _receive(self) -> Message | None:
        """Return the next message, or None when something is due.

        The earliest of all deadlines is the timeout: timers, kills, the owner's tick, the next turn of the rendezvous
        and the next observation. Without any the thread waits for a message without limit.
        """
        now = time.monotonic()
        times = [*self._timers, *self._kill_at.values(), self.workers.tick(now)]
        times += [self._rendezvous_at, self._monitor.next_observation_at, self._replace_owner_at]
        timeout = min((at - now for at in times if at is not None), default=None)
        self._due_by = due_by = None if timeout is None else now + timeout
        try:
            message = self._inbox.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            message = None
        if due_by is not None and (late_s := time.monotonic() - due_by) > LATE_WAKE_S:
            # What should have arrived meanwhile is not missing: this process could not receive it.
            self._timers = [at + late_s for at in self._timers]
        return message

    def _turn(self, message: Message | None) -> None:
        now = time.monotonic()
        if message is not None:
            self._handle(message, now)
        if self._replace_owner_at is not None and now >= self._replace_owner_at:
            self._replace_owner()
        self._run_timers(now)
        self._drain()
        self._turn_rendezvous(now)
        self._drain()

    def _handle(self, message: Message | OwnerEvent, now: float) -> None:
        """The reaction to each message that needs no phase; those of the state machine wait for their turn."""
        detector = self._monitor.detector
        match message:
            # --- the owner
            case OwnerReport():
                for event in self.workers.handle(message):
                    self._handle(event, now)
                if self._slots.starting and not self.workers.can_release_ahead:
                    self._give_up_starting_ahead("workers start cold")
                if self._rules.multi_node and not self._launcher_settled and self.workers.start_mode_is_known:
                    self._launcher_settled = True
                    self._rendezvous.update_node_record(warm=1)
            case OwnerLost():
                self._on_owner_lost()
            case GroupStarted(number):
                self._owners_lost = 0
                self._monitor.on_started(message)
                self._listener.on(message, now)
                if self._pause is not None and number == self._pause.round_number:
                    self._request_pause(self._pause)
            case WorkersReleased():
                self._monitor.on_released(message)
            case StoreReady(number, port):
                if self._rules.multi_node:
                    self._rendezvous.report_master(number, self._address(), port)
            case ProcessUnkillable() | UnkillableProcessEnded():
                self._on_slot_change(message, now)
            case GroupEntered(number):
                self._entered = number
                self._rendezvous.update_node_record(entered=number)
                self._start_spares(number)
            case NewcomerReady(slot):
                self._slots.mark_ready([slot])
                self._announce_slots()
            case NewcomerEnded(_, why):
                if why:
                    self._listener.log(self._slots.record_failure(message))
                    self._announce_slots()
                if self.round is not None and self._may_release_ahead(self.round):
                    self._release_ahead(self.round)
            case NewcomerLost(slot):
                self._replace_newcomer(slot)
            case messages.WorkerExited(number) | messages.PeerLost(messages.WorkerExited(number)):
                if number == self._monitor.number:
                    self._observe(now)  # a first step that the worker made comes before its exit
                self._events.append(message)
            # --- the rendezvous
            case messages.ProbeReceived():
                self._monitor.observe_eagerly(now)
            case messages.MasterKnown():
                self._master = message
                self._start_if_master_known()
            case messages.PauseRequested(number, on):
                self._pause = message if on else None  # its group may start later
                self._request_pause(message)
            case messages.StartAheadRequested(number):
                self._ahead_of = number
                self._start_node_ahead()
            case messages.HangReportRequested(number, on):
                detector.report_requested(number, on)
                self._monitor.observe_next_turn(now)
            case HangVerdict(number):
                evidence = detector.write_verdict(message)
                self._listener.on(message, now)
                if evidence is not None:
                    self._listener.log(f"round {number}: stacks and waiting ranks: elasticd explain {evidence}")
            case messages.StragglersFound() | messages.StoreAvailability() | messages.LeaderNotice():
                self._listener.on(message, now)
            case messages.JoinRejected(why):
                if isinstance(self.phase, messages.Joining):
                    raise StoreRefused(why)
                self._listener.log(why)
            case MemberThreadFailed(error):
                if not isinstance(self.phase, messages.Flushing):
                    raise error
            # --- this process
            case MemoryChecked():
                self.workers.memory_checked(message)
            case StraySignal(name):
                self._listener.log(f"{name} is ignored: --signals-to-handle names those that stop the job")
            case DumpRequested(out, reply):
                detector.dump(out, reply)
            case FileTimerExpired():
                self._signal_for_file_timer(message)
            case GatheredEvidence():
                detector.evidence_gathered(message, now)
                self._monitor.observe_next_turn(now)
            case _:
                self._events.append(message)

    def _signal_for_file_timer(self, timer: FileTimerExpired) -> None:
        """Send the process the signal that it asked for; if that ends a worker, its exit restarts the group."""
        worker = self.workers.round_and_rank_of(timer.pid)
        who = f"round {worker[0]}: rank {worker[1]}" if worker is not None else "a process outside this job"
        what = f"{who} did not release its timer {timer.scope!r} in time ({timer.late_s:.1f} s late)"
        if worker is None or not timer.signum:
            self._listener.log(f"{what}: process {timer.pid} gets no signal")
            return
        name = f"signal {timer.signum}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(timer.signum).name
        self._listener.log(f"{what}: process {timer.pid} gets {name}")
        with contextlib.suppress(OSError):
            os.kill(timer.pid, timer.signum)

    def _request_pause(self, pause: messages.PauseRequested) -> None:
        # The number makes every round's request a new one.
        request = heartbeat.PAUSE | pause.round_number << 8 | heartbeat.ALL_STAY_FLAG * pause.all_stay
        self.workers.request_stop_or_pause(pause.round_number, request if pause.on else 0, only=0)
        if pause.on:  # the ranks wait from the end of a step on until this agent has seen it
            self._monitor.observe_eagerly(time.monotonic(), EAGER_LIMIT_S)

    def _drain(self) -> None:
        """Pass the queued events through the state machine, one after the other, until none is left or the job has
        ended.

        Listeners hear of an event before its transition. Their log lines thus have the order in which things happened,
        and a sentence about the next Round follows the one about the failure that caused it.
        """
        while self._events and self._exit_code is None:
            event = self._events.popleft()
            now = time.monotonic()
            self._before_transition(event, now)
            self._listener.on(event, now)
            if isinstance(event, messages.RoundPublished):
                self._report_spares()
            before = type(self.phase)
            self.phase, actions = step(self.phase, event, self._rules)
            if type(self.phase) is not before:
                self._listener.on(PhaseChanged(type(self.phase).__name__.lower()), now)
            for action in actions:
                self._perform(action)

    def _before_transition(self, event: messages.Event, now: float) -> None:
        """Tell the rendezvous, the monitor and the slots what an event means for them, whatever the phase."""
        match event:
            case messages.RoundPublished(round) if self.round is None or round.number > self.round.number:
                self.round = round
                if round.member(self.node) is None:
                    self.workers.end_stores()
                    if not round.terminal:
                        self.workers.end_kept(newcomers=False)
                        self._release_ahead(round)
                        self._start_node_ahead()
            case messages.GroupEnded(number):
                self._kill_at.pop(number, None)
                self._waiting_for_master = None
                self._slots.forget_blocked(number)
                self._on_first_step(self._monitor.on_ended(number))
            case messages.WorkerExited(number, rank):
                if number == self._monitor.number:
                    self._monitor.on_exited(rank, event.status.ok)
                if not event.status.ok and number in self._kill_at:
                    self._saved_last = True  # it has ended by the signal, as by Ctrl-C, and without a checkpoint
            case messages.PeerLost(messages.WorkerExited(number, rank)) if number in self._kill_at:
                # Ranks stop together, and one has ended alone: the others would wait for the next round.
                self._kill_unstopped(number, f"rank {rank} lost its peers before all had stopped: saved and killed")
            case messages.FlushStarted(size) if size > LARGE_STATE_BYTES:
                if isinstance(self.phase, messages.Flushing) and self.phase.job_failed:
                    what = f"the newest state in memory ({size / 1e9:.1f} GB)"
                    self._listener.log(f"waiting for {what} to reach the disk; SIGTERM ends the wait")
            case messages.StopRequested() | messages.StopForced() if not isinstance(self.phase, messages.Flushing):
                if not self._rules.leave_on_stop:
                    self._rendezvous.update_local_facts(stop=event)
                self._listener.on(StopStarted(event, self._rules), now)

    def _run_timers(self, now: float) -> None:
        """Timers, kills and observations that are due."""
        if any(at <= now for at in self._timers):
            self._timers = [at for at in self._timers if at > now]
            self._events.append(messages.TimerExpired(now))
        for number in [number for number, at in self._kill_at.items() if at <= now]:
            self._kill_unstopped(number, "the workers did not stop in time and are killed")
        if (at := self._monitor.next_observation_at) is not None and now >= at:
            self._observe(now)

    def _kill_unstopped(self, number: int, why: str) -> None:
        """Kill what has not stopped, once the state of its last step is in memory."""
        del self._kill_at[number]
        self._listener.log(f"round {number}: {why}")
        self._saved_last = True
        self._events.extend(self.workers.signal(number, signal.SIGKILL, save=True))

    # --- actions --------------------------------------------------------------------------------------------------

    def _perform(self, action: messages.Action) -> None:
        """Perform one action of the state machine.

        KillGroup and StopGroup are answered by GroupEnded in any case, from the owner or from its loss, so no phase
        waits for a group without an end.
        """
        match action:
            case messages.StartGroup(round):
                self._start_group(round)
            case messages.KillGroup(number, _, save):
                self._saved_last = save
                keep = self._monitor.workers_to_keep(action) if action.keep else KeepRequest()
                self._mark_slots_starting(number, keep)
                self._end_group(number, signal.SIGKILL, save=save, keep=keep)
            case messages.StopGroup(number, why, grace_s, name):
                self._listener.log(why)
                self._kill_at[number] = time.monotonic() + grace_s
                self.workers.request_stop_or_pause(number, heartbeat.STOP)
                # After SIGTERM a session saves a checkpoint. Ctrl-C and others end a rank at once, wherever it is. One
                # that goes to the next round holds a state, and would answer SIGTERM only once all are there.
                self._saved_last = name != "SIGTERM" or self.workers.awaits_kept_workers(number)
                self._end_group(number, signal.Signals[name], save=self._saved_last)
            case messages.ReportFailure(failure):
                self._report_failure(failure)
            case messages.ReportDone(number):
                self._rendezvous.report_done(number)
            case messages.ReportLeaving(why, code, soon):
                if not soon:
                    self._listener.log(why)
                self._rendezvous.update_node_record(leaving=why, leaving_code=code, leaving_soon=soon)
                if soon and self.round is not None and self.workers.awaits_kept_workers(self.round.number):
                    # These cannot pause: what they hold is saved now, in what is left of the time.
                    self._events.appendleft(messages.TimerExpired(math.inf))
            case messages.SetTimer(at):
                self._timers.append(max(at, time.monotonic() + TIMER_DELAY_S))
            case messages.Flush(failed):
                self._flush(failed)
            case messages.Leave():
                self._leave(action)

    def _flush(self, failed: bool) -> None:
        """Have the newest state in memory written, where the end of the last group has left one there."""
        self._log_hang_summary()
        if self._saved_last or failed:
            self.workers.flush()
            self._events.append(messages.FlushStarted(0, time.monotonic()))
        else:
            self._events.append(messages.Flushed())

    def _leave(self, leave: messages.Leave) -> None:
        """The sentence of the end says where the next run resumes."""
        facts, outcome, step = self._rendezvous.facts, self.round and self.round.outcome, leave.saved_step
        # After a stop this node knows the last checkpoint where rank 0 was, which saved the last step.
        if step is None and facts.checkpoint is not None:
            step = facts.checkpoint[1] if outcome == "failed" or facts.checkpoint[1] >= facts.high_water else None
        why = leave.why
        if outcome in ("failed", "stopped") and step is not None:
            why = "; ".join(filter(None, (why, f"the next run resumes from step {step}")))
        self._exit_code = leave.exit_code
        self._listener.on(JobLeft(leave.exit_code, why, self.round), time.monotonic())

    def _log_hang_summary(self) -> None:
        """A job that failed by a hang ends with its culprit; `elasticd explain` shows more."""
        detector, round = self._monitor.detector, self.round
        if detector.last_verdict is not None and round is not None and round.outcome == "failed":
            for line in summary_lines(detector.last_verdict_dir, detector.last_verdict):
                self._listener.log(line)

    def _on_slot_change(self, cause: ProcessUnkillable | UnkillableProcessEnded, now: float) -> None:
        """An unkillable process keeps its slot: this node announces the rest, and a Round that needs the slot waits."""
        sentence = self._slots.handle(cause)
        if sentence is not None:
            self._listener.on(SlotChanged(cause, sentence), now)
        if (round := self._slots.take_unblocked()) is not None:
            self._start_group(
                round
            )  # before the slot is announced: a node that has it and has not started counts as late
        self._announce_slots()

    def _announce_slots(self, **fields: int) -> None:
        slots = {"slots": self._slots.usable, "unusable": self._slots.unusable_reason, "starting": self._slots.starting}
        self._rendezvous.update_node_record(**slots, **fields)
        self._report_spares()

    def _report_spares(self) -> None:
        slots = self._slots.spares(self.round) if self.round is not None else ()
        ready = tuple(slot for slot in slots if slot not in self._slots.starting)
        spares = SparesChanged(ready, tuple(slot for slot in ready if slot in self.workers.ready_newcomer_slots))
        if spares != self.spares:
            self.spares = spares
            self._listener.on(spares, time.monotonic())

    def _start_spares(self, number: int) -> None:
        """The workers here keep their processes: those of spare slots come to their entry, too."""
        if self.round is not None and self.round.number == number and self.workers.can_release_ahead:
            quarantined = {q.slot for q in self.round.quarantined_slots if q.node == self.node and q.left_s}
            if slots := set(self._slots.spares(self.round)) - quarantined - self.workers.ready_newcomer_slots:
                self._start_slots_ahead(self.round, slots)

    def _mark_slots_starting(self, number: int, keep: KeepRequest) -> None:
        """Before the failure is reported: the next Round need not wait for the workers that have to start anew."""
        kept, others = self.workers.keepable_and_other_slots(number, keep)
        if not others:
            return
        if self.workers.can_release_ahead and (kept or self._rules.multi_node):
            self._slots.mark_starting(others)
        else:  # nobody would wait for one of them alone
            self._slots.mark_ready(self._slots.starting)
        self._announce_slots()

    def _give_up_starting_ahead(self, why: str) -> None:
        self._listener.log(self._slots.give_up_starting_ahead(why))
        self._announce_slots()

    def _start_node_ahead(self) -> None:
        """This node may join a round whose workers keep their processes."""
        round, number = self.round, self._ahead_of
        if round is None or round.number != number or not self._may_release_ahead(round):
            return
        if self.workers.can_release_ahead:
            self._slots.mark_starting(set(self._slots.usable) - self.workers.ready_newcomer_slots)
        self._announce_slots(ahead=number)
        self._release_ahead(round)

    def _replace_newcomer(self, slot: int) -> None:
        """A process has died at its entry: another one follows, once in a round."""
        round = self.round
        if round is None or self._newcomer_lost == (round.number, slot):
            return
        self._newcomer_lost = round.number, slot
        member = round.member(self.node)
        if member is None or slot not in member.slots:
            self._start_slots_ahead(round, [slot])

    def _start_slots_ahead(self, round: Round, slots: Collection[int]) -> None:
        """New processes are to come to their entry there, now or once the round trains."""
        self._slots.mark_starting(slots)
        self._announce_slots()
        if self._may_release_ahead(round):
            self._release_ahead(round)

    def _may_release_ahead(self, round: Round) -> bool:
        """The round trains, or runs without this node."""
        if round.member(self.node) is not None:
            return isinstance(self.phase, messages.Running) and self.phase.has_stepped
        return isinstance(self.phase, messages.Joining) and not round.terminal

    def _release_ahead(self, round: Round) -> None:
        """Release the workers of slots that start and are in no round."""
        slots = sorted(self._slots.to_start_ahead - self.workers.newcomer_slots)
        if slots:
            try:
                self.workers.release_ahead(self._prepare_ahead(round, slots, self._address()))
            except OSError as error:
                self._give_up_starting_ahead(str(error))

    def _start_group(self, round: Round) -> None:
        """Start this node's group of `round`, or wait with it.

        It waits where a process that cannot be killed still has a slot of the Round: two processes on one GPU would
        take each other's memory. A Round that is published meanwhile respects what this node has announced.

        The group's master is on the node of rank 0. It starts at once; the others start when they know the address and
        the port of its store, which may come before or after the Round itself.
        """
        if self._slots.remember_if_blocked(round):
            return  # until the slot is free, or the next Round, which respects what this node announces
        self._monitor.forget_group()
        try:
            prepared = self._prepare(round, self._address())
        except OSError as error:  # no space for the heartbeat records, no access to the log directory
            self._events.append(messages.StartFailed(round.number, str(error), time.monotonic()))
            return
        self._saved_last = False
        if member := round.member(self.node):
            self._slots.mark_ready(member.slots)
            self._announce_slots()
        self._monitor.begin(round, prepared, time.monotonic())
        if round.group_rank(self.node) == 0:
            self.workers.start(round, prepared.workers, None)
        else:
            self._waiting_for_master = round, prepared.workers
            self._start_if_master_known()

    def _start_if_master_known(self) -> None:
        """Start workers whose store is on another node, as soon as its address is known."""
        if self._waiting_for_master is not None and self._master is not None:
            round, workers = self._waiting_for_master
            if self._master.round_number == round.number:
                self._waiting_for_master = None
                self.workers.start(round, workers, (self._master.address, self._master.port))

    def _end_group(
        self, number: int, signum: signal.Signals, *, save: bool = False, keep: KeepRequest | None = None
    ) -> None:
        self._monitor.on_ending()
        self._listener.on(GroupEnding(number), time.monotonic())
        self._events.extend(self.workers.signal(number, signum, save=save, keep=keep))

    def _report_failure(self, failure: Failure) -> None:
        """Report a failure with what only this node knows: the last step of the culprits, the highest step and the
        newest checkpoint.

        The leader sees from these whether the job has made progress since the last restart, and hence whether its
        budget is renewed.
        """
        now = time.monotonic()
        if self._monitor.number == failure.round:
            self._observe(now)
        facts = self._rendezvous.facts
        step = self._monitor.last_step({rank for rank, _ in failure.culprits})
        failure = replace(failure, high_water=facts.high_water, checkpoint=facts.checkpoint, step=step)
        self._listener.on(failure, now)
        self._rendezvous.report_failure(failure, now)

    # --- observation and rendezvous -------------------------------------------------------------------------------

    def _observe(self, now: float) -> None:
        self._on_first_step(self._monitor.observe(now))
        if (number := self._monitor.number) is None:
            return
        if why := self._monitor.take_late_reason():
            self._events.append(messages.StartFailed(number, why, now))
        if number in self._kill_at and (why := self._monitor.describe_lost_wait(now)):
            self._kill_unstopped(number, f"{why}: saved and killed")

    def _on_first_step(self, first: messages.FirstStep | None) -> None:
        """React to the first step of a round: it is the sign that the script works here.

        From now on a spare group of processes may be forked for the next restart, and slots that could not start in
        time may run ahead to their entry. Neither happens before, since both take the cores that the first step needs.
        """
        if first is not None:
            self._events.append(first)
            self.workers.end_stores()
            if self._spares_wanted and self._entered != first.round_number:
                self._spares_wanted = False
                why = "the workers do not stay in their processes at a change (session.run)"
                self._listener.log(f"--spares: {why}, so spares start theirs with their round")
            if self.round is not None and self.round.number == first.round_number:
                self._release_ahead(self.round)
            # With a store, wherever rank 0 is now: if it is here in the next round, there is no time to fork one.
            self.workers.park(self._max_workers, with_store=True)

    def _turn_rendezvous(self, now: float) -> None:
        if isinstance(self.phase, (messages.Flushing, messages.Ended)):
            self._rendezvous_at = None
            return
        received, self._rendezvous_at = self._take_turn(now)
        for notice in received:
            self._handle(notice, now)

    def _on_owner_lost(self) -> None:
        """The owner was killed, and its processes with it: start another one, except for a job that is over."""
        if isinstance(self.phase, messages.Flushing):
            self._events.append(messages.Flushed())
            return
        self._listener.log("the process that owns the workers was killed and its workers with it; starting another one")
        self.workers.close()
        self._on_no_owner()

    def _on_no_owner(self) -> None:
        """Start another owner: at once the first time, as somebody has killed it; then the machine may have no room."""
        self._owners_lost += 1
        if self._owners_lost == 1:
            self._replace_owner()
        elif self._owners_lost <= MAX_OWNERS_LOST:
            self._replace_owner_at = time.monotonic() + OWNER_RETRY_S
        else:
            if (number := self._monitor.number) is not None:
                self._events.append(messages.GroupEnded(number))
            why = f"the process that owns the workers was lost {self._owners_lost} times before it had started any"
            self._events += (messages.StoreAbandoned(why, time.monotonic()), messages.Flushed())

    def _replace_owner(self) -> None:
        self._replace_owner_at = None
        try:
            self.workers = self._make_workers()
        except OSError as error:
            self._listener.log(f"the process that owns the workers cannot be started: {error.strerror}")
            self._on_no_owner()
            return
        self.workers.set_listener(self._listener)
        if (number := self._monitor.number) is not None:
            self._events.append(messages.GroupEnded(number))
        else:
            self._start_node_ahead()
