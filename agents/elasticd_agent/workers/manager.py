"""Starts, signals and follows this node's worker groups through the owner.

Rounds become requests to the owner, and the owner's reports become events. A start needs two things: free GPU memory
(`GpuGate`) and, unless workers start cold, a parked group (`WarmLauncher` says whether there can be one). Whatever
changes one of them ends in `_advance`, which takes the start as far as it can go.

The manager belongs to the deciding thread and never waits: a slow operation returns as a later report, or as a deadline
in `tick`.

A process of a worker is in one of four places, and in one only:
- parked: forked from the template, waits for its release, belongs to no round (`_parked_group`);
- in a group: released into a round (`_groups`), until it exits or leaves the round;
- kept: it has left its round, or come to its entry as a newcomer, and waits for the next round with its slot (`_kept`);
- on its way: a newcomer that runs the script up to its entry (`_newcomers`).

A start takes each worker from where it can be had: the kept process of its slot, else a parked one, else a cold start.
A kept process that has died since is replaced by the owner without more ado, since only the owner knows at the moment
of the release. What a round does not name ends: two processes of one slot never wait at the same time.

The owner reports in the order in which things happened, and every request has an answer: Started or Refused, Ended for
each group, an exit for each process. If the owner is killed, its processes die with it, and the loop builds a new
manager.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from elasticd.checkpointing.memory.memory_limit import oom_kills
from elasticd.heartbeat import exit_report
from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat.exit_report import ExitReport
from elasticd_agent.model.job import JobSpec
from elasticd_agent.model.messages import (
    ExitStatus,
    Flushed,
    FlushStarted,
    GroupEnded,
    PeerLost,
    StartFailed,
    StoreExited,
    WorkerExited,
)
from elasticd_agent.model.phrases import listing, plural
from elasticd_agent.model.records import Round
from elasticd_agent.system.processes import procfs
from elasticd_agent.workers.events import (
    GroupEntered,
    GroupStarted,
    NewcomerEnded,
    NewcomerLost,
    NewcomerReady,
    OwnerEvent,
    ProcessUnkillable,
    StartModeKnown,
    StoreReady,
    UnkillableProcessEnded,
    WorkersReleased,
)
from elasticd_agent.workers.gpu_memory import GpuGate, MemoryChecked
from elasticd_agent.workers.groups import (
    KeepRequest,
    KeptWorker,
    MasterAddress,
    Newcomers,
    ParkedGroup,
    PendingStart,
    WorkerGroup,
    read_exit_report,
    store_outlives_group,
    with_master,
    write_request,
)
from elasticd_agent.workers.launcher import messages
from elasticd_agent.workers.launcher.messages import STORE_RANK
from elasticd_agent.workers.launcher.owner_client import OwnerClient, OwnerReport
from elasticd_agent.workers.launcher.requests import LaunchRequests, PreloadPlan, WorkerSpec
from elasticd_agent.workers.warm_launcher import FORK_DEADLINE_S, WarmLauncher

NEWCOMER_ENTRY_FACTOR = 3.0
"""A newcomer may take so many times as long to its entry as the workers that began together; they have had the cores
for themselves."""


class WorkersListener(Protocol):
    """The sentences and events that the manager reports while it handles something else."""

    def log(self, sentence: str) -> None: ...
    def on(self, event: StartModeKnown, now: float) -> None: ...


class WorkerManager:
    """All groups of one job on this node: at most one running, at most one parked."""

    def __init__(
        self,
        spec: JobSpec,
        node: str,
        base_env: dict[str, str],
        preload: PreloadPlan,
        owner: OwnerClient,
        host: str = "127.0.0.1",
        memory: GpuGate | None = None,
        entry_limit_s: float = 600.0,
    ) -> None:
        """`host` is where the stores of rounds whose rank 0 is here listen: a literal address, "0.0.0.0" or "::"."""
        self._node = node
        self._owner = owner
        self._requests = LaunchRequests(spec, base_env, preload)
        self._host, self._port = host, spec.master_port or 0
        self._listener: WorkersListener | None = None
        self._unreported: list[StartModeKnown | str] = []
        self._launcher = WarmLauncher(owner, self._requests, self._report)
        self._last_name = 0
        self._parked_group: ParkedGroup | None = None
        self._park_request: tuple[int, bool] | None = None
        """The group to park once the template is ready: size, with a store."""
        self._start: PendingStart | None = None
        self._memory = memory or GpuGate()
        self._unkillable: set[int] = set()
        self._groups: dict[int, WorkerGroup] = {}
        self._oom_kills = oom_kills()
        self._stores: list[int] = []
        """Groups that have ended except for their store."""
        self._kept: dict[int, KeptWorker] = {}
        """Workers that wait at their entry for the next round, by slot."""
        self._held_round = 0
        """The round whose state they may hold."""
        self._newcomers = Newcomers()
        self._entry_limit_s = entry_limit_s
        """The time that a newcomer has to come to its entry."""
        self._owner.send(self._requests.writer_request())
        if preload.cold_reason is None:
            self._launcher.start_template()
        else:
            self._launcher.give_up(preload.cold_reason, since="")

    @property
    def start_mode_is_known(self) -> bool:
        """True once it is known how workers start: forked from a ready template, or cold."""
        return self._launcher.ready or self._launcher.cold_reason is not None

    @property
    def preloading_module(self) -> str:
        """The module that the template imports, or imported last."""
        return self._launcher.preloading_module

    def set_listener(self, listener: WorkersListener) -> None:
        """Report to `listener` from now on, and first what was not reported yet."""
        self._listener = listener
        unreported, self._unreported = self._unreported, []
        for report in unreported:
            self._report(report)

    def _report(self, report: StartModeKnown | str) -> None:
        if self._listener is None:
            self._unreported.append(report)
        elif isinstance(report, str):
            self._listener.log(report)
        else:
            self._listener.on(report, time.monotonic())

    # --- requests of the loop --------------------------------------------------------------------------------------

    def start(self, round: Round, workers: tuple[WorkerSpec, ...], master: MasterAddress | None) -> None:
        """Begin to start this node's group of `round`; GroupStarted or StartFailed follows.

        Rank 0's node starts the round's store, too: `master` is None, and StoreReady has its port; elsewhere it is its
        address. Each worker waits until the last group's memory on its GPU is free; with no warm launcher all for all.
        """
        # Workers of other nodes may still be in the last round. A port of the user's is for one store at a time.
        self.end_stores(but_newest=0 if self._port else 1)
        kept = self._assign_kept(round, workers)
        self._memory.start_check(self._unkillable.union(kept, self._newcomers.by_pid))
        self._start = PendingStart(round, with_master(master, workers), master, kept)
        self._park_request = (len(workers), master is None)  # if it waits for memory
        self._advance()

    def park(self, size: int, with_store: bool) -> None:
        """Fork the next group ahead, unless one is parked, as soon as forking works."""
        if self._parked_group is None and self._start is None:
            self._park_request = (size, with_store)
            self._advance()

    def memory_checked(self, memory: MemoryChecked) -> None:
        """Start workers whose GPUs are free by now."""
        if not self._memory.accept_answer(memory):
            return
        waiting = [self._start.round] if self._start is not None else []
        waiting += [group.round for group in self._groups.values() if group.held_ranks]
        holders = ", ".join(f"process {pid} on GPU {gpu}" for pid, gpu in memory.holders)
        if waiting and (holders or memory.trouble):
            what = f"ended processes still hold GPU memory ({holders})" if holders else memory.trouble
            self._report(f"round {waiting[0].number}: {what}; starting the workers after {memory.waited_s:.1f} s")
        self._advance()
        for name, group in self._groups.items():
            busy = self._memory.waiting_ranks(self._slots_of(group.round))
            if free := [rank for rank in group.held_ranks if rank not in busy]:
                group.held_ranks = tuple(rank for rank in group.held_ranks if rank in busy)
                self._owner.send(messages.ReleaseHeld(name, free))

    def end_stores(self, but_newest: int = 0) -> None:
        """End the stores of rounds that are over, except for the newest `but_newest` of them.

        With several nodes a store outlives its group, unless that has failed: other nodes' workers may still run, or
        have not left the round yet. All of them have once the next one has made a step.
        """
        over = self._stores[: len(self._stores) - but_newest]
        for name in over:
            self._owner.send(messages.Signal(name, signal.SIGKILL))
        del self._stores[: len(over)]

    def release_ahead(self, workers: Mapping[int, WorkerSpec]) -> None:
        """Have these workers, by slot, run the script up to its entry, and wait there for a round that has their slots.

        NewcomerReady or NewcomerEnded follows for each.
        """
        self._newcomers.wanted.update(workers)
        self._advance()

    @property
    def newcomer_slots(self) -> set[int]:
        """The slots of workers that are on their way to their entry."""
        return self._newcomers.slots

    @property
    def ready_newcomer_slots(self) -> set[int]:
        """The slots of workers that have come to their entry ahead of their round."""
        return {slot for slot, kept in self._kept.items() if kept.is_new}

    @property
    def can_release_ahead(self) -> bool:
        return self._launcher.cold_reason is None

    def keepable_and_other_slots(self, number: int, keep: KeepRequest) -> tuple[list[int], list[int]]:
        """The slots of the round's workers that may keep their process, and the others: none of both if none has ever
        entered, so that all start anew together."""
        kept: list[int] = []
        others: list[int] = []
        for group in self._groups.values():
            if group.round.number == number and group.entered:
                for at, slot in enumerate(self._slots_of(group.round)):
                    stays = at in group.entered - group.exited and at in keep.local_ranks
                    (kept if stays else others).append(slot)
        return kept, others

    def end_kept(self, *, newcomers: bool = True) -> None:
        """End processes at their entry, or on their way: no round of this node follows, or it starts cold.

        Without `newcomers`, only those that have been in a round.
        """
        self._newcomers.mark_ended(self._newcomers.slots if newcomers else set())
        stay = {slot: kept for slot, kept in self._kept.items() if kept.is_new and not newcomers}
        if self._kept or self._newcomers.slots:
            on_their_way = self._newcomers.by_pid.keys() - self._newcomers.asked_to_end
            self._owner.send(messages.EndKept([*on_their_way, *(kept.pid for kept in stay.values())]))
        self._kept = stay

    def _end_late_newcomers(self, now: float) -> None:
        """End those that have not come to their entry. Nobody waits for them, but their slots are out of use."""
        newcomers = self._newcomers
        if late := [pid for pid, due in newcomers.entry_due_at.items() if now >= due]:
            for pid in late:
                del newcomers.entry_due_at[pid]
                newcomers.ended_late[pid] = self._entry_limit_s
            self._owner.send(messages.EndKept([], late))

    def signal(
        self, number: int, signum: int, *, save: bool = False, keep: KeepRequest | None = None
    ) -> list[GroupEnded]:
        """Signal every process of the round's group at once. Any signal ends a group that has not started yet.

        With `save`, workers that survive have a moment to save the state of their last step in memory. Those that
        `keep` names leave the round and wait for the next one in their process, where their script can.
        """
        keep = keep or KeepRequest()
        running = [name for name, group in self._groups.items() if group.round.number == number]
        for name in running:
            group = self._groups[name]
            group.is_signalled, group.ranks_to_keep = True, keep.local_ranks
            self._owner.send(
                messages.Signal(name, int(signum), number if save else None, keep.local_ranks, keep.park_s, keep.why)
            )
        if self._start is not None and self._start.round.number == number:
            self._start = None
        return [] if running else [GroupEnded(number)]

    def awaits_kept_workers(self, number: int) -> bool:
        """Workers of the round have kept their process, and some of these do not train yet."""
        return any(
            pid and at not in group.ever_entered
            for group in self._groups.values()
            if group.round.number == number
            for at, pid in enumerate(group.kept_pids)
        )

    def round_and_rank_of(self, pid: int) -> tuple[int, int] | None:
        """Round and rank of the worker that is this process, or whose tree or session it belongs to."""
        workers = {
            worker: (group.round.number, rank)
            for group in self._groups.values()
            for worker, rank in zip(group.pids, group.round.ranks(self._node), strict=False)
        }
        process = procfs.stat(pid)
        while process is not None and process.pid > 1:
            worker = workers.get(process.pid) or workers.get(process.session)
            if worker is not None:
                return worker
            process = procfs.stat(process.parent)
        return None

    def request_stop_or_pause(self, number: int, request: int, only: int | None = None) -> None:
        """Write `request` (STOP, PAUSE, 0) into the heartbeat records of the round's workers, or of rank `only`.

        A Session obeys at its next decision point. STOP is final.
        """
        for group in self._groups.values():
            if group.round.number == number and not group.stop_requested:
                group.stop_requested = request & heartbeat.REQUEST_KIND_MASK == heartbeat.STOP
                for rank, worker in zip(group.round.ranks(self._node), group.workers, strict=True):
                    if only is None or rank == only:
                        write_request(worker.heartbeat_file, request)

    def flush(self) -> None:
        """No round follows: write the newest state in memory. FlushStarted and Flushed follow."""
        self._newcomers.mark_ended(self._newcomers.slots)
        self._owner.send(messages.Flush(self._held_round if self._kept else 0))
        self._kept = {}

    def close(self) -> None:
        """End the owner and every process it has, bounded by the owner's own deadlines."""
        self._owner.close()

    def tick(self, now: float) -> float | None:
        """Abandon what is overdue. Returns the monotonic time of the next deadline, or None."""
        start, preload_deadline = self._begun_start(), self._launcher.preload_deadline()
        if preload_deadline is not None and now >= preload_deadline:
            self._launcher.end_late_preload()
        elif start is not None and start.cold_start_at is not None and now >= start.cold_start_at:
            if self._launcher.ready:
                self._launcher.give_up("the template did not fork in time")
            else:
                self._report(
                    f"round {start.round.number} starts cold: the warm launcher still imports {self.preloading_module}"
                    ", and later rounds may use it"
                )
                self._start_cold(start)
        if (overdue := self._memory.overdue_answer(now)) is not None:
            self.memory_checked(overdue)
        self._end_late_newcomers(now)
        self._advance()
        deadlines = [
            self._memory.check_deadline,
            self._launcher.preload_deadline(),
            *self._newcomers.entry_due_at.values(),
        ]
        if self._start is not None:
            deadlines.append(self._start.cold_start_at)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # --- reports of the owner --------------------------------------------------------------------------------------

    def handle(self, received: OwnerReport) -> list[OwnerEvent]:
        """Turn one report of the owner into events, and take a waiting start as far as it can go now."""
        events = self._events_of(received.report)
        self._advance()
        return events

    def _events_of(self, report: messages.Report) -> list[OwnerEvent]:
        match report:
            case messages.Preloading(module):
                self._launcher.module_import_started(module)
            case messages.TemplateUnfit(modules):
                self._launcher.leave_out(modules)
            case messages.TemplateReady():
                self._launcher.template_ready(report)
            case messages.TemplateEnded(why):
                self._template_ended(why)
            case messages.Parked(name):
                self._launcher.fork_succeeded()
                if self._parked_group is not None and self._parked_group.name == name:
                    self._parked_group.ready = True
            case messages.Refused(why, name):
                return self._start_refused(why, name)
            case messages.Unsaved(_, count, seconds):
                ranks = f"{count} rank{'s' if count > 1 else ''}"
                self._report(f"{ranks} of this node did not save the last step within {seconds:.1f} s of the fault")
            case messages.ReleasedAhead(name, pids):
                workers = self._newcomers.released.pop(name, {})
                self._newcomers.by_pid.update(zip(pids, workers.items(), strict=True))
                self._newcomers.entry_due_at.update(dict.fromkeys(pids, time.monotonic() + self._entry_limit_s))
                if name in self._newcomers.asked_to_end:
                    self._newcomers.asked_to_end.update(pids)
                    self._newcomers.asked_to_end.discard(name)
                self._memory.track(pids, list(workers))
            case messages.Waits(pid):
                if pid not in self._newcomers.by_pid or pid in self._newcomers.ended_late:
                    return []
                slot, worker = self._newcomers.by_pid.pop(pid)
                self._newcomers.entry_due_at.pop(pid, None)
                self._kept[slot] = KeptWorker(pid, f"the new process of slot {slot}", worker, is_new=True)
                return [NewcomerReady(slot)]
            case messages.KeptExited(pid, status):
                return self._kept_exited(pid, ExitStatus.from_returncode(os.waitstatus_to_exitcode(status)))
            case messages.WithoutWriter(why):
                self._report(f"there are no more copies of the state in memory: {why}")
            case messages.Reaped(pid):
                self._unkillable.discard(pid)
                return [UnkillableProcessEnded(pid)]
            case messages.Flushing(size):
                return [FlushStarted(size, time.monotonic())]
            case messages.Flushed(step, path, why):
                if why:
                    self._report(f"the last state in memory could not be written: {why}")
                return [Flushed(step if path else None)]
            case _ if (group := self._groups.get(report.group)) is not None:
                return self._events_of_group(group, report)
        return []

    def _events_of_group(self, group: WorkerGroup, report: messages.Report) -> list[OwnerEvent]:
        number = group.round.number
        match report:
            case messages.StoreListens(_, port):
                group.store_port = port
                return [StoreReady(number, port)]
            case messages.Started(_, pids, store):
                group.pids, group.store_pid, group.started_at = pids, store, time.monotonic()
                self._memory.track(pids, self._slots_of(group.round))
                port = group.store_port if group.master is None else group.master[1]
                kept = tuple(at for at, pid in enumerate(group.kept_pids) if pid == pids[at])
                return [GroupStarted(number, pids, store, group.warm, group.held_ranks, port, kept)]
            case messages.Released(_, ranks):
                return [WorkersReleased(number, ranks)]
            case messages.Entered(_, local_rank):
                if local_rank not in group.ever_entered:
                    started_s = time.monotonic() - group.started_at
                    self._entry_limit_s = max(self._entry_limit_s, NEWCOMER_ENTRY_FACTOR * started_s)
                group.entered.add(local_rank)
                group.ever_entered.add(local_rank)
                return [GroupEntered(number)] if len(group.entered) == len(group.workers) else []
            case messages.Left(_, local_rank):
                group.entered.discard(local_rank)
            case messages.Exited():
                group.exited.add(report.local_rank)
                if report.status and not group.ranks_to_keep:
                    group.failed.add(report.local_rank)
                exited = self._exited(group, report)
                if isinstance(exited, WorkerExited) and report.local_rank in group.entered.intersection(
                    group.ranks_to_keep
                ):
                    self._report_lost(exited)
                return [exited]
            case messages.RankLostPeer(_, local_rank, text, at):
                with suppress(ValueError, KeyError, TypeError):
                    return [self._peer_lost(group, local_rank, exit_report.decode(text.encode()), at)]
            case messages.NotParked(_, late, seconds):
                names = listing(group.round.ranks(self._node)[at] for at in late)
                left = f"{plural(len(late), 'rank')} {names} did not leave it within {seconds:.1f} s"
                self._report(f"round {number}: {left}: killed, and replaced by a new process")
            case messages.Ended(name, processes, waiting, left_behind):
                del self._groups[name]
                if left_behind:
                    self._report(f"round {number}: what outlived its workers got SIGTERM: {listing(left_behind)}")
                over = group.ever_entered - group.entered - group.failed
                if group.ranks_to_keep and over:
                    names = listing(group.round.ranks(self._node)[at] for at in sorted(over))
                    who = f"train had ended on {plural(len(over), 'rank')} {names}, by a result or an error"
                    self._report(f"round {number}: {who}: a new process follows, without what it held")
                self._add_kept(group, waiting)
                if group.store_pid and store_outlives_group(group.round):
                    self._stores.append(name)
                unkillable = [self._process_unkillable(group.round, process) for process in processes]
                self._unkillable.update(process.pid for process in unkillable)
                return [*unkillable, GroupEnded(number, tuple(waiting) if group.ranks_to_keep else ())]
        return []

    def _add_kept(self, group: WorkerGroup, local_ranks: Sequence[int]) -> None:
        """These wait at their entry, unless they are not wanted any more."""
        ranks, slots = group.round.ranks(self._node), self._slots_of(group.round)
        self._held_round = group.round.number
        for at in local_ranks:
            self._kept[slots[at]] = KeptWorker(group.pids[at], f"rank {ranks[at]}", group.workers[at])
        if not group.ranks_to_keep:
            self.end_kept()

    def _kept_exited(self, pid: int, status: ExitStatus) -> list[OwnerEvent]:
        """React to the end of a process that waits at its entry, or was on its way there."""
        if pid in self._newcomers.by_pid:
            slot, worker = self._newcomers.by_pid.pop(pid)
            self._newcomers.entry_due_at.pop(pid, None)
            late_s = self._newcomers.ended_late.pop(pid, None)
            if pid in self._newcomers.asked_to_end:
                self._newcomers.asked_to_end.discard(pid)
                return [NewcomerEnded(slot, "")]
            if late_s is not None:
                return [NewcomerEnded(slot, f"did not come to session.run within {late_s:.0f} s", is_late=True)]
            report = read_exit_report(worker.heartbeat_file)
            why = f"{status.text} ({report.type}: {report.message})" if report is not None else status.text
            is_refused = report is not None and report.type.rpartition(".")[2] == "UsageError"
            return [NewcomerEnded(slot, f"{why} before session.run", is_refused=is_refused)]
        for slot, kept in list(self._kept.items()):
            if kept.pid == pid:
                del self._kept[slot]
                self._report(f"{kept.who} {status.text} while it waited for the next round: a new process follows")
                return [NewcomerLost(slot)] if kept.is_new else []
        return []

    def _assign_kept(self, round: Round, workers: tuple[WorkerSpec, ...]) -> list[int]:
        """The process at its entry for each local rank, 0: a new one. The other processes there end now, except new
        ones for other slots."""
        taken, slots = [0] * len(workers), self._slots_of(round)
        for at, (slot, worker) in enumerate(zip(slots, workers, strict=True)):
            if (kept := self._kept.get(slot)) is not None and kept.can_become(worker):
                taken[at] = kept.pid
        others = {slot: kept for slot, kept in self._kept.items() if kept.is_new and slot not in slots}
        if self._kept or self._newcomers.slots:
            self._newcomers.mark_ended(set(slots))
            pids = {*taken, *self._newcomers.by_pid, *(kept.pid for kept in others.values())}
            pids -= self._newcomers.asked_to_end
            self._owner.send(messages.EndKept(sorted(pids - {0})))
        self._kept = others | {slot: kept for slot, kept in self._kept.items() if kept.pid in taken}
        return taken

    def _template_ended(self, why: str) -> None:
        if self._parked_group is not None and not self._parked_group.ready:
            self._parked_group = None
        start = self._begun_start()
        is_replaced = self._launcher.template_ended(why, None if start is None else start.round.number)
        if start is not None and not is_replaced:
            self._start_cold(start)

    def _start_refused(self, why: str, name: int | None) -> list[OwnerEvent]:
        """A cold group that could not be started is a failed start; a warm one starts cold, unless it is to end."""
        was_parked = self._parked_group is not None and self._parked_group.name == name
        if was_parked:
            self._parked_group = None
        if name is not None and name in self._newcomers.released:  # they have died while they were parked
            return [NewcomerEnded(slot, f"did not start ({why})") for slot in self._newcomers.released.pop(name)]
        group = None if name is None else self._groups.pop(name, None)
        if group is not None and (group.is_signalled or not group.warm):
            return [StartFailed(group.round.number, why, time.monotonic()), GroupEnded(group.round.number)]
        start = self._begun_start() if was_parked else None
        if group is not None:  # released, but its parked processes have ended
            start = PendingStart(group.round, group.workers, group.master, [0] * len(group.workers))
        if start is not None:
            self._report(f"round {start.round.number}: {why}; starting its workers cold")
            self._start_cold(start)
        return []

    def _exited(self, group: WorkerGroup, report: messages.Exited) -> StoreExited | WorkerExited:
        number, local_rank = group.round.number, report.local_rank
        status = ExitStatus.from_returncode(os.waitstatus_to_exitcode(report.status))
        if local_rank == STORE_RANK:
            return StoreExited(number, status.text, report.at, status)
        rank, slot = group.round.ranks(self._node)[local_rank], self._slots_of(group.round)[local_rank]
        raised = read_exit_report(group.workers[local_rank].heartbeat_file)
        killed_before, self._oom_kills = self._oom_kills, oom_kills()
        if status.signal == signal.SIGKILL and self._oom_kills > killed_before:
            status = replace(status, out_of_memory=True)
        ran_s = report.at - group.started_at
        stayed = report.pid in group.kept_pids
        return WorkerExited(number, rank, local_rank, slot, status, raised, report.at, ran_s, stayed=stayed)

    def _report_lost(self, exit: WorkerExited) -> None:
        """Say of a worker that was to keep its process that it has ended. SIGKILL has sentences of its own."""
        if exit.status.signal != signal.SIGKILL or exit.status.out_of_memory:
            who = f"rank {exit.rank} {exit.status.text}"
            self._report(f"round {exit.round_number}: {who} while it left the round: a new process follows")

    def _peer_lost(self, group: WorkerGroup, local_rank: int, raised: ExitReport, at: float) -> PeerLost:
        number, ran_s = group.round.number, at - group.started_at
        rank, slot = group.round.ranks(self._node)[local_rank], self._slots_of(group.round)[local_rank]
        exit = WorkerExited(number, rank, local_rank, slot, ExitStatus(1), raised, at, ran_s, still_runs=True)
        return PeerLost(exit)

    def _process_unkillable(self, round: Round, process: messages.UnkillableProcess) -> ProcessUnkillable:
        local_rank, rank, slot = process["local_rank"], None, None
        if local_rank is not None and local_rank != STORE_RANK and round.member(self._node) is not None:
            rank, slot = round.ranks(self._node)[local_rank], self._slots_of(round)[local_rank]
        return ProcessUnkillable(round.number, process["pid"], rank, slot, process["state"], process["wchan"])

    def _slots_of(self, round: Round) -> tuple[int, ...]:
        member = round.member(self._node)
        return member.slots if member is not None else ()

    # --- starting ---------------------------------------------------------------------------------------------------

    def _begun_start(self) -> PendingStart | None:
        """The start, unless it waits for GPU memory."""
        return self._start if self._start is not None and self._start.cold_start_at is not None else None

    def _advance(self) -> None:
        """Take the start, or the group to park, as far as GPU memory and the template allow now."""
        if self._start is not None and self._start.cold_start_at is None and self._memory_allows(self._start):
            self._start.cold_start_at = self._launcher.start_deadline(time.monotonic())
            self._park_request = None
        begun, parked = self._begun_start(), self._parked_group
        if self._launcher.cold_reason is not None:
            self._end_parked_group()
            self._park_request = None
            if begun is not None:
                self._start_cold(begun)
        elif begun is not None and parked is not None and parked.ready and parked.fits(begun):
            self._release(parked, begun)
        elif self._start is None and (wanted := self._newcomers.wanted):
            self._release_newcomers(parked, wanted)
        else:
            self._park_ahead(begun)

    def _memory_allows(self, start: PendingStart) -> bool:
        """True if the GPU of some worker is free; all of them, unless a parked group can be released in part."""
        if self._memory.check_deadline is None:
            return True
        is_parked = self._parked_group is not None and self._parked_group.ready and self._parked_group.fits(start)
        return is_parked and len(self._ranks_without_memory(start)) < len(start.workers)

    def _ranks_without_memory(self, start: PendingStart) -> tuple[int, ...]:
        """Local ranks whose GPU is not free; what a kept process has there is its own."""
        waiting = self._memory.waiting_ranks(self._slots_of(start.round))
        return tuple(at for at in waiting if not start.kept_pids[at])

    def _park_ahead(self, begun: PendingStart | None) -> None:
        """Request a group for the start, or the one that `park` asked for."""
        if self._start is not None and self._parked_group is not None and not self._parked_group.fits(self._start):
            if not self._parked_group.ready:
                return
            self._end_parked_group()
        wanted = self._park_request if begun is None else (len(begun.workers), begun.master is None)
        if wanted is None or self._parked_group is not None or not self._launcher.ready:
            return
        self._park_request = None
        self._last_name += 1
        self._parked_group = ParkedGroup(self._last_name, *wanted)
        if begun is not None:
            begun.cold_start_at = time.monotonic() + FORK_DEADLINE_S
        self._owner.send(messages.Park(self._parked_group.name, *wanted, self._host, self._port))

    def _end_parked_group(self) -> None:
        if self._parked_group is not None:
            self._owner.send(messages.Signal(self._parked_group.name, signal.SIGKILL))
            self._parked_group = None

    def _release(self, parked: ParkedGroup, start: PendingStart) -> None:
        busy, kept = self._ranks_without_memory(start), start.kept_pids
        group = WorkerGroup(start.round, start.workers, start.master, warm=True, held_ranks=busy, kept_pids=kept)
        self._groups[parked.name] = group
        self._parked_group = self._start = None
        workers, keep = [worker.fields() for worker in start.workers], store_outlives_group(start.round)
        has_store = start.master is None
        self._kept = {slot: one for slot, one in self._kept.items() if one.pid not in kept}
        self._owner.send(messages.Release(parked.name, has_store, keep, self._host, self._port, workers, busy, kept))

    def _release_newcomers(self, parked: ParkedGroup | None, wanted: dict[int, WorkerSpec]) -> None:
        """Release them by the parked group, and park another one for the next round."""
        if parked is None or parked.size < len(wanted):
            size, with_store = self._park_request or (0, False)
            self._park_request = max(size, len(wanted)), with_store
            if parked is not None and parked.ready:
                self._end_parked_group()
            self._park_ahead(None)
        elif parked.ready:
            self._park_request = parked.size, parked.with_store
            self._newcomers.released[parked.name], self._newcomers.wanted = wanted, {}
            self._parked_group = None
            self._owner.send(messages.ReleaseAhead(parked.name, [worker.fields() for worker in wanted.values()]))
            self._park_ahead(None)

    def _start_cold(self, start: PendingStart) -> None:
        """Start the group cold, which no process at its entry can take part in."""
        self.end_kept()
        self._start = None
        self._last_name += 1
        self._groups[self._last_name] = WorkerGroup(start.round, start.workers, start.master, warm=False)
        has_store, keep = start.master is None, store_outlives_group(start.round)
        self._owner.send(
            self._requests.cold_start_request(
                self._last_name, start.workers, self._host, self._port, store=has_store, keep=keep
            )
        )
