"""Starts, signals and follows this node's worker groups through the owner.

It turns Rounds into requests to the owner, and the owner's messages into events. It belongs to the deciding thread and
never waits: a slow operation returns as a later message, or as a deadline in `tick`.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from elasticd.checkpointing.memory.memory_limit import oom_kills
from elasticd.heartbeat import record as heartbeat
from elasticd_agent.model.job import JobSpec
from elasticd_agent.model.messages import Event, ExitStatus, GroupEnded, StartFailed, StoreExited, WorkerExited
from elasticd_agent.model.records import Round
from elasticd_agent.system.processes import procfs
from elasticd_agent.workers.gpu_memory import MemoryChecked, MemoryWait
from elasticd_agent.workers.groups import (
    Master,
    ParkedGroup,
    PendingStart,
    WorkerGroup,
    keeps_store,
    read_exit_report,
    with_master,
    write_request,
)
from elasticd_agent.workers.launcher.owned_group import STORE_RANK
from elasticd_agent.workers.launcher.owner_client import OwnerClient, OwnerMessage
from elasticd_agent.workers.launcher.requests import ALWAYS, LaunchRequests, Preload, WorkerSpec


@dataclass(frozen=True, slots=True)
class LauncherReady:
    """It is known how workers start from now on."""

    mode: Literal["warm", "cold"]
    reason: str
    seconds: float | None = None
    """How long the template took."""


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """The workers of round `number` run."""

    number: int
    pids: list[int]
    store_pid: int
    """0: the round's store is on another node."""
    warm: bool
    held: tuple[int, ...] = ()
    """Local ranks that wait until their GPU's memory is free: WorkersReleased follows."""
    store_port: int = 0
    """The port of the round's store; 0: unknown."""


@dataclass(frozen=True, slots=True)
class WorkersReleased:
    """Workers of round `number` that were held run, by local rank."""

    number: int
    local_ranks: list[int]


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The store of round `number` accepts connections on `port`: other nodes' workers may be started.

    It precedes GroupStarted, at most once for a group, and only for one that was started without a master.
    """

    number: int
    port: int


@dataclass(frozen=True, slots=True)
class ProcessUnkillable:
    """A process of round `number`'s group has survived SIGKILL; GroupEnded follows all the same.

    It runs no code any more, but may hold its device.
    """

    number: int
    pid: int
    rank: int | None
    """Its worker's rank; None for the round's store, and for a process of no known worker. So is `slot`."""
    slot: int | None
    state: str
    """As /proc has it, "" if unknown. So is `wchan`."""
    wchan: str


@dataclass(frozen=True, slots=True)
class ProcessReaped:
    """An unkillable process has ended."""

    pid: int


START_WAIT_S = 180.0
"""Importing torch from a cold network file system can take minutes: a round waits so long for the template, from the
template's start, and then starts cold."""
PRELOAD_DEADLINE_S = 600.0
"""For one module."""
FORK_DEADLINE_S = 10.0
TEMPLATE_TRIES = 3

OwnerEvent = Event | GroupStarted | WorkersReleased | StoreReady | ProcessUnkillable | ProcessReaped


class WorkersListener(Protocol):
    def log(self, sentence: str) -> None: ...
    def on(self, event: LauncherReady, now: float) -> None: ...


class WorkerManager:
    """All groups of one job on this node: at most one running, at most one parked."""

    def __init__(
        self,
        spec: JobSpec,
        node: str,
        base_env: dict[str, str],
        preload: Preload,
        owner: OwnerClient,
        host: str = "127.0.0.1",
        memory: MemoryWait | None = None,
    ) -> None:
        """`host` is where the stores of rounds whose rank 0 is here listen: a literal address, "0.0.0.0" or "::"."""
        self._node = node
        self._owner = owner
        self._requests = LaunchRequests(spec, base_env, preload)
        self._store_at = {"host": host, "port": spec.master_port or 0}
        self._listener: WorkersListener | None = None
        self._unreported: list[LauncherReady | str] = []
        self._cold_reason = preload.cold
        self._template_ready = False
        self._template_since: float | None = None
        self._template_tries = 0
        self._preloading: tuple[str, float] = ("", 0.0)
        """The module that the template imports, and since when."""
        self._replacing_template = False
        """The template ends, and another one leaves a module out."""
        self._last_name = 0
        self._spare: ParkedGroup | None = None
        self._park_request: tuple[int, bool] | None = None
        """The group to park once the template is ready: size, with a store."""
        self._start: PendingStart | None = None
        self._memory = memory or MemoryWait()
        self._waiting_for_memory: PendingStart | None = None
        """The start that waits until memory of the last group is free on one of its GPUs."""
        self._unkillable: set[int] = set()
        self._groups: dict[int, WorkerGroup] = {}
        self._oom_kills = oom_kills()
        self._stores: list[int] = []
        """Groups that have ended except for their store."""
        self._owner.send(do="writer", **self._requests.writer())
        if self._cold_reason is None:
            self._begin_template()
        else:
            self._report(LauncherReady("cold", f"workers start cold: {self._cold_reason}"))

    @property
    def settled(self) -> bool:
        """True once it is known how workers start: forked from a ready template, or cold."""
        return self._template_ready or self._cold_reason is not None

    @property
    def preloading(self) -> str:
        """The module that the template imports, or imported last."""
        return self._preloading[0]

    def set_listener(self, listener: WorkersListener) -> None:
        """Report to `listener` from now on, and first what was not reported yet."""
        self._listener = listener
        unreported, self._unreported = self._unreported, []
        for report in unreported:
            self._report(report)

    def _report(self, report: LauncherReady | str) -> None:
        if self._listener is None:
            self._unreported.append(report)
        elif isinstance(report, str):
            self._listener.log(report)
        else:
            self._listener.on(report, time.monotonic())

    # --- requests of the loop --------------------------------------------------------------------------------------

    def start(self, round: Round, workers: tuple[WorkerSpec, ...], master: Master | None) -> None:
        """Begin to start this node's group of `round`; GroupStarted or StartFailed follows.

        Rank 0's node starts the round's store, too: `master` is None, and StoreReady has its port; elsewhere it is its
        address. Each worker waits until the last group's memory on its GPU is free; with no warm launcher all for all.
        """
        self.end_store()
        self._memory.begin(self._unkillable)
        start = PendingStart(round, with_master(master, workers), master, 0.0)
        if self._memory.due is None:
            self._begin(start)
            return
        self._waiting_for_memory = start
        if self._spare is not None and not self._spare.fits(start):
            self._end_spare()
        self.park(len(workers), with_store=master is None)
        self._begin_where_free()

    def memory_checked(self, memory: MemoryChecked) -> None:
        """What a check has found so far."""
        if not self._memory.take(memory):
            return
        waiting = [start.round for start in (self._waiting_for_memory, self._start) if start is not None]
        waiting += [group.round for group in self._groups.values() if group.held]
        held = ", ".join(f"process {pid} on GPU {gpu}" for pid, gpu in memory.holders)
        if waiting and (held or memory.trouble):
            what = f"ended processes still hold GPU memory ({held})" if held else memory.trouble
            self._report(f"round {waiting[0].number}: {what}; starting the workers after {memory.seconds:.1f} s")
        self._begin_where_free()
        for name, group in self._groups.items():
            busy = self._memory.held(self._slots(group.round))
            if free := [rank for rank in group.held if rank not in busy]:
                group.held = tuple(rank for rank in group.held if rank in busy)
                self._owner.send(do="release_held", group=name, ranks=free)

    def _begin_where_free(self) -> None:
        """Begin the start that waits, if a worker of it can run."""
        start, spare = self._waiting_for_memory, self._spare
        if start is None:
            return
        parked = spare is not None and spare.ready and spare.fits(start)
        held = self._memory.held(self._slots(start.round))
        if self._memory.due is None or (parked and len(held) < len(start.workers)):
            self._waiting_for_memory = None
            self._begin(start)

    def _slots(self, round: Round) -> tuple[int, ...]:
        member = round.member(self._node)
        return member.slots if member is not None else ()

    def _begin(self, start: PendingStart) -> None:
        now = time.monotonic()
        since = now if self._template_since is None else self._template_since
        start.deadline = now + FORK_DEADLINE_S if self._template_ready else max(now, since + START_WAIT_S)
        self._start = start
        self._park_request = None
        self._advance()

    def park(self, size: int, with_store: bool) -> None:
        """Fork the next group ahead, unless one is parked, as soon as forking works."""
        if self._spare is None and self._start is None and self._cold_reason is None:
            self._park_request = (size, with_store)
            self._advance()

    def end_store(self) -> None:
        """End the store of a round that is over, as the next start does.

        With several nodes the store outlives a group that succeeded: other nodes' workers may still run.
        """
        for name in self._stores:
            self._owner.send(do="signal", group=name, signal=int(signal.SIGKILL))
        self._stores.clear()

    def signal(self, number: int, signum: int, *, save: bool = False) -> list[Event]:
        """Signal every process of the round's group at once. Any signal ends a group that has not started yet.

        With `save`, workers that survive have a moment to save the state of their last step in memory.
        """
        wish = {"save": number} if save else {}
        running = [name for name, group in self._groups.items() if group.round.number == number]
        for name in running:
            self._owner.send(do="signal", group=name, signal=int(signum), **wish)
        if self._start is not None and self._start.round.number == number:
            self._start = None
        if self._waiting_for_memory is not None and self._waiting_for_memory.round.number == number:
            self._waiting_for_memory = None
        return [] if running else [GroupEnded(number)]

    def find_worker(self, pid: int) -> tuple[int, int] | None:
        """Round and rank of the worker that is this process, or whose tree or session it belongs to."""
        workers = {
            worker: (group.round.number, rank)
            for group in self._groups.values()
            for worker, rank in zip(group.pids, group.round.ranks(self._node), strict=False)
        }
        process = procfs.stat(pid)
        while process is not None and process.pid > 1:
            if (found := workers.get(process.pid) or workers.get(process.session)) is not None:
                return found
            process = procfs.stat(process.parent)
        return None

    def request(self, number: int, request: int, only: int | None = None) -> None:
        """Write `request` (STOP, PAUSE, 0) into the heartbeat records of the round's workers, or of rank `only`.

        A Session obeys at its next decision point. STOP is final.
        """
        for group in self._groups.values():
            if group.round.number == number and not group.stopping:
                group.stopping = request & heartbeat.REQUEST_KIND == heartbeat.STOP
                for rank, worker in zip(group.round.ranks(self._node), group.workers, strict=True):
                    if only is None or rank == only:
                        write_request(worker.heartbeat, request)

    def flush(self) -> None:
        """No round follows: write the newest state in memory. The owner's messages `flushing` and `flushed` follow."""
        self._owner.send(do="flush")

    def close(self) -> None:
        """End the owner and every process it has."""
        self._owner.close()

    def tick(self, now: float) -> float | None:
        """Abandon what is overdue. Returns the monotonic time of the next deadline, or None."""
        module, since = self._preloading
        if self._template_since is not None and now >= since + PRELOAD_DEADLINE_S:
            self._template_since = None
            self._owner.send(do="end_template")
            late = f"its import took longer than {PRELOAD_DEADLINE_S:.0f} s"
            if module in ALWAYS:
                self._go_cold(f"{module}: {late}")
            else:
                self._leave_out({module: late})
        elif self._start is not None and now >= self._start.deadline:
            if self._template_ready:
                self._go_cold("the template did not fork in time")
            else:
                self._report(
                    f"round {self._start.round.number} starts cold: the warm launcher still imports {module}, and "
                    f"later rounds may use it"
                )
                self._execute()
        if (overdue := self._memory.overdue(now)) is not None:
            self.memory_checked(overdue)
        deadlines = [] if self._start is None else [self._start.deadline]
        if self._memory.due is not None:
            deadlines.append(self._memory.due)
        if self._template_since is not None:
            deadlines.append(since + PRELOAD_DEADLINE_S)
        return min(deadlines, default=None)

    # --- messages of the owner -------------------------------------------------------------------------------------

    def handle(self, received: OwnerMessage) -> list[OwnerEvent]:
        message = received.message
        match message["kind"]:
            case "preloading":
                self._preloading = message["module"], time.monotonic()
            case "template_unfit":
                self._leave_out(message["leave_out"])
            case "template_ready":
                self._template_became_ready(message)
            case "template_ended":
                self._template_ended(message["why"])
            case "parked":
                self._parked(message["group"])
            case "refused":
                return self._refused(message)
            case "store_ready":
                group = self._groups.get(message["group"])
                if group is None:
                    return []
                group.store_port = message["port"]
                return [StoreReady(group.round.number, group.store_port)]
            case "started":
                return self._started(message)
            case "released":
                group = self._groups.get(message["group"])
                return [WorkersReleased(group.round.number, message["ranks"])] if group is not None else []
            case "exited":
                return self._exited(message)
            case "ended":
                return self._group_ended(message)
            case "unsaved":
                count, seconds = message["ranks"], message["seconds"]
                ranks = f"{count} rank{'s' if count > 1 else ''}"
                self._report(f"{ranks} of this node did not save the last step within {seconds:.1f} s of the fault")
            case "without_writer":
                self._report(f"there are no more copies of the state in memory: {message['why']}")
            case "reaped":
                self._unkillable.discard(message["pid"])
                return [ProcessReaped(message["pid"])]
        return []

    def _leave_out(self, modules: dict[str, str]) -> None:
        """Modules with the reason of each. The template ends, and another one preloads the rest."""
        for name, why in modules.items():
            self._report(f"{name} is not preloaded: {why}")
        self._requests.leave_out(modules)
        self._template_ready = False
        self._replacing_template = True
        self._template_tries = 0

    def _template_became_ready(self, message: dict[str, Any]) -> None:
        self._template_since = None
        if message["cold"] is not None:
            self._owner.send(do="end_template")
            self._template_tries = TEMPLATE_TRIES
            self._go_cold(message["cold"])
            return
        self._template_ready = True
        seconds = message["seconds"]
        self._report(LauncherReady("warm", f"the warm launcher is ready after {seconds:.1f} s", seconds))
        self._advance()

    def _template_ended(self, why: str) -> None:
        was_ready, self._template_ready, self._template_since = self._template_ready, False, None
        if self._spare is not None and not self._spare.ready:
            self._spare = None
        if self._cold_reason is not None:
            return
        if self._replacing_template:
            self._begin_template()
            return
        if self._start is not None:
            self._report(f"the warm launcher {why}: round {self._start.round.number} starts cold")
            self._execute()
        elif was_ready:
            self._report(f"the warm launcher {why}: the workers continue, and another one is started")
        if self._template_tries < TEMPLATE_TRIES:
            self._begin_template()
        else:
            self._go_cold(f"the launcher ended {TEMPLATE_TRIES} times, the last time because it {why}")

    def _parked(self, name: int) -> None:
        self._template_tries = 0
        if self._spare is not None and self._spare.name == name:
            self._spare.ready = True
        self._begin_where_free()
        self._advance()

    def _refused(self, message: dict[str, Any]) -> list[OwnerEvent]:
        """A cold group that could not be started is a failed start; a warm one starts cold instead."""
        name, why = message["group"], message["why"]
        was_spare = self._spare is not None and self._spare.name == name
        if was_spare:
            self._spare = None
        group = self._groups.pop(name, None)
        if group is not None and not group.warm:
            return [StartFailed(group.round.number, why, time.monotonic()), GroupEnded(group.round.number)]
        if group is not None:  # released, but its parked processes have ended
            self._start = PendingStart(group.round, group.workers, group.master, time.monotonic() + FORK_DEADLINE_S)
        if self._start is not None and (was_spare or group is not None):
            self._report(f"round {self._start.round.number}: {why}; starting its workers cold")
            self._execute()
        return []

    def _started(self, message: dict[str, Any]) -> list[OwnerEvent]:
        group = self._groups.get(message["group"])
        if group is None:
            return []
        group.pids, group.store_pid, group.started_at = message["pids"], message["store"], time.monotonic()
        self._memory.track(group.pids, self._slots(group.round))
        port = group.store_port if group.master is None else group.master[1]
        return [GroupStarted(group.round.number, group.pids, group.store_pid, group.warm, group.held, port)]

    def _exited(self, message: dict[str, Any]) -> list[OwnerEvent]:
        group = self._groups.get(message["group"])
        if group is None:
            return []
        number, local_rank, at = group.round.number, message["local_rank"], message["at"]
        status = ExitStatus.of(os.waitstatus_to_exitcode(message["status"]))
        if local_rank == STORE_RANK:
            return [StoreExited(number, status.text, at, status)]
        member = group.round.member(self._node)
        assert member is not None
        rank = group.round.ranks(self._node)[local_rank]
        report = read_exit_report(group.workers[local_rank].heartbeat)
        killed_before, self._oom_kills = self._oom_kills, oom_kills()
        if status.signal == signal.SIGKILL and self._oom_kills > killed_before:
            status = replace(status, out_of_memory=True)
        ran_s = at - group.started_at
        return [WorkerExited(number, rank, local_rank, member.slots[local_rank], status, report, at, ran_s)]

    def _group_ended(self, message: dict[str, Any]) -> list[OwnerEvent]:
        group = self._groups.pop(message["group"], None)
        if group is None:
            return []
        if group.store_pid and keeps_store(group.round):
            self._stores.append(message["group"])
        unkillable = [self._process_unkillable(group.round, process) for process in message["unkillable"]]
        self._unkillable.update(process.pid for process in unkillable)
        return [*unkillable, GroupEnded(group.round.number)]

    def _process_unkillable(self, round: Round, process: dict[str, Any]) -> ProcessUnkillable:
        member, local_rank, rank, slot = round.member(self._node), process["local_rank"], None, None
        if member is not None and local_rank is not None and local_rank != STORE_RANK:
            rank, slot = round.ranks(self._node)[local_rank], member.slots[local_rank]
        return ProcessUnkillable(round.number, process["pid"], rank, slot, process["state"], process["wchan"])

    # --- starting ---------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take the pending start, or the requested parked group, one step further; else wait for the template."""
        start, spare = self._start, self._spare
        if start is None:
            if self._park_request is not None and spare is None and self._template_ready:
                self._request_spare(*self._park_request)
        elif self._cold_reason is not None:
            self._execute()
        elif spare is not None and spare.ready and spare.fits(start):
            self._release(spare, start)
        elif spare is not None and spare.ready:
            self._end_spare()
            self._advance()
        elif spare is None and self._template_ready:
            start.deadline = time.monotonic() + FORK_DEADLINE_S
            self._request_spare(len(start.workers), start.master is None)

    def _request_spare(self, size: int, with_store: bool) -> None:
        self._last_name += 1
        self._spare = ParkedGroup(self._last_name, size, with_store)
        self._park_request = None
        self._owner.send(do="park", group=self._last_name, workers=size, store=with_store, **self._store_at)

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._owner.send(do="signal", group=self._spare.name, signal=int(signal.SIGKILL))
            self._spare = None

    def _release(self, spare: ParkedGroup, start: PendingStart) -> None:
        held = self._memory.held(self._slots(start.round))
        self._groups[spare.name] = WorkerGroup(start.round, start.workers, start.master, warm=True, held=held)
        self._spare = self._start = None
        self._owner.send(
            do="release",
            group=spare.name,
            store=start.master is None,
            keep=keeps_store(start.round),
            workers=[{"env": w.env, "stdout": w.stdout, "stderr": w.stderr} for w in start.workers],
            held=held,
            **self._store_at,
        )

    def _execute(self) -> None:
        """Start the pending group cold."""
        start, self._start = self._start, None
        assert start is not None
        self._last_name += 1
        self._groups[self._last_name] = WorkerGroup(start.round, start.workers, start.master, warm=False)
        cold = self._requests.cold(start.workers, with_store=start.master is None)
        self._owner.send(do="exec", group=self._last_name, keep=keeps_store(start.round), **self._store_at, **cold)

    def _go_cold(self, why: str) -> None:
        self._cold_reason = why
        self._template_ready = False
        self._park_request = None
        self._report(LauncherReady("cold", f"workers start cold from now on: {why}"))
        self._end_spare()
        self._advance()

    def _begin_template(self) -> None:
        self._template_tries += 1
        self._replacing_template = False
        self._template_since = time.monotonic()
        self._preloading = "torch", self._template_since
        self._owner.send(do="template", **self._requests.template())
