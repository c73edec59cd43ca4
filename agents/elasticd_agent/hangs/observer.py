"""Observes the group that runs on this node: heartbeats, worker events and processes -> Observation.

Ages count observed time only: over a gap in which the agent could not look (the machine was suspended, the agent was
starved), or before its process has been started, no rank grows older. Nothing here waits.

Ages are kept here and not in the heartbeats: a worker that hangs cannot say for how long. Each look adds the time since
the last one to every age that nothing has reset, so a look that comes late (`MAX_LOOK_GAP_S`) cannot make a rank older
than this process has watched it. While all ranks are stopped at once, by a scheduler or with the machine, no age grows.

A rank is idle when its heartbeat shows no progress; it is quiet when, beside that, its processes use neither cores nor
disks nor sockets. The difference is the work that heartbeats do not show: a compilation, a download, an evaluation
without a session call. Usage is read only once the group is idle, since reading /proc for every process is not free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticd.errors import WireError
from elasticd.heartbeat.record import GroupCounts, Heartbeat, HeartbeatReader, Phase, StepSource
from elasticd.heartbeat.worker_events import WorkerEvent, WorkerEventReader
from elasticd_agent.hangs.rank import BUSY_BYTES_PER_S, BUSY_CORES
from elasticd_agent.model.reports import RankReport
from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.process_usage import TreeUsage, UsageReader

LATE_EVENT_KINDS = ("checkpoint_saved", "checkpoint_failed", "checkpoint_dropped", "message")
"""The events that the writer may report of a save after its group has ended."""
MAX_LOOK_GAP_S = 1.0
"""A gap between two looks counts as at most this much."""
USAGE_AFTER_IDLE_S = 0.5
"""The processes of a group without progress for this long are worth a scan of /proc."""
MIN_USAGE_INTERVAL_S = 0.4
"""The least time between two scans, however often the group is observed."""
KEEPALIVE_BYTES = 64
"""A connection that is only kept alive moves as many bytes in a window (a ping of HTTP/2 or a web socket), or
nothing."""
STARVED_SHARE = 0.5
"""A process tree that is able to run for more of the time than this, and does not get to, is starved."""
USAGE_WINDOW_S = 3.0
"""A rank's usage is that of the last seconds: what it did before it became idle says nothing."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at the group."""

    round: int
    heartbeats: tuple[Heartbeat, ...]
    worker_events: tuple[WorkerEvent, ...]  #: since the last look
    idle_s: float  #: the time for which no rank here has made progress
    ranks: tuple[RankReport, ...] = ()
    store_state: str = ""
    """The /proc state of the round's store, "" where it is not here, and for how long it has been "T"."""
    store_stopped_s: float = 0.0
    observed_s: float = 0.0
    training_pids: tuple[int, ...] = ()  #: the processes that train, by local rank; none before they have been started

    @property
    def step(self) -> int:
        return max((beat.step for beat in self.heartbeats), default=0)

    @property
    def first_step_at(self) -> float | None:
        """CLOCK_MONOTONIC seconds."""
        times = [beat.first_step_ns for beat in self.heartbeats if beat.first_step_ns]
        return min(times) / 1e9 if times else None

    @property
    def last_progress_at(self) -> float | None:
        times = [beat.progress_ns for beat in self.heartbeats if beat.progress_ns]
        return max(times) / 1e9 if times else None

    @property
    def has_session(self) -> bool:
        return any(beat.source == StepSource.SESSION for beat in self.heartbeats)


@dataclass(slots=True)
class _Ages:
    """Ages of one process, from one look to the next."""

    last_progress: tuple[object, ...] = ()
    idle_s: float = 0.0
    alive_ticks: int = 0
    alive_s: float = -1.0
    moved_ticks: int = 0
    moved_s: float = -1.0
    nccl_groups: GroupCounts = ()
    device_s: float = -1.0
    wait_ticks: int = 0
    waiting_s: float = 0.0
    quiet_s: float = -1.0
    sockets_s: float = -1.0
    state: str = ""
    stopped_s: float = 0.0

    def on_heartbeat(self, beat: Heartbeat, passed_s: float, now: float) -> None:
        """Take a heartbeat: reset the ages of what has moved, and let the others grow by `passed_s`."""
        progress = beat.step, beat.progress_ns, beat.phase, beat.barrier, beat.collectives
        if progress == self.last_progress:
            self.idle_s += passed_s
        else:  # since the heartbeat if that changed, else since some time after the last look
            self.idle_s = min(passed_s, max(0.0, now - beat.progress_ns / 1e9))
        self.last_progress = progress
        if self.quiet_s >= 0:
            self.quiet_s += passed_s
        if self.sockets_s >= 0:
            self.sockets_s += passed_s
        ticks, waits = beat.alive_ticks - self.alive_ticks, beat.wait_ticks - self.wait_ticks
        self.wait_ticks = beat.wait_ticks
        if waits < ticks or waits < 0:
            self.waiting_s = 0.0
        elif ticks or self.waiting_s:  # a tick more, or none because of the GIL
            self.waiting_s += passed_s
        if beat.alive_ticks != self.alive_ticks:  # 0: the thread has ended, the last act of an exit
            self.alive_ticks = beat.alive_ticks
            self.alive_s = 0.0 if beat.alive_ticks else -1.0
            self.state = ""  # it has run since: cpulimit and the like stop it for a part of each moment
        elif self.alive_s >= 0:
            self.alive_s += passed_s
        if beat.moved_ticks != self.moved_ticks:
            self.moved_ticks = beat.moved_ticks
            self.moved_s = 0.0
        elif self.moved_s >= 0:
            self.moved_s += passed_s
        if beat.groups != self.nccl_groups:
            self.nccl_groups = beat.groups
            self.device_s = 0.0 if beat.groups else -1.0
        elif self.device_s >= 0:
            self.device_s += passed_s

    def on_usage(self, cores: float, bytes_per_s: float, before: TreeUsage, after: TreeUsage) -> None:
        """Take the usage between two samples. A wait for a server, or for one process after the other, moves little."""
        moves = after.tcp_moved_bytes - before.tcp_moved_bytes > KEEPALIVE_BYTES
        if moves:
            self.sockets_s = 0.0
        elif self.sockets_s < 0:
            self.sockets_s = self.idle_s
        if moves or cores > BUSY_CORES or bytes_per_s > BUSY_BYTES_PER_S or after.pids - before.pids:
            self.quiet_s = 0.0
        elif self.quiet_s < 0:
            self.quiet_s = self.idle_s

    def on_state(self, state: str, passed_s: float) -> None:
        """Stopped since the first look that saw it, so that the age is never more than the truth."""
        self.stopped_s = self.stopped_s + passed_s if state == self.state == "T" else 0.0
        self.state = state
        if state == "T" and self.alive_s > 0:
            self.alive_s = 0.0  # nobody holds the GIL against a heartbeat that is stopped


@dataclass(slots=True)
class _BytesWithoutDumps:
    """The bytes that a worker reads and writes by itself: a flight recorder of 0.9 MB, written on request, is no work.

    The request is answered when all of it is written, perhaps after a sample in the middle, so everything since the
    last sample but one is left out.
    """

    answered_dumps: int = 0
    dump_bytes: int = 0
    last_two_totals: tuple[int, int] | None = None

    def count(self, io_bytes: int, answered_dumps: int) -> int:
        if answered_dumps != self.answered_dumps and self.last_two_totals is not None:
            self.dump_bytes = io_bytes - self.last_two_totals[0]
        self.answered_dumps = answered_dumps
        own = io_bytes - self.dump_bytes
        self.last_two_totals = (own if self.last_two_totals is None else self.last_two_totals[1], own)
        return own


@dataclass(slots=True)
class GroupObserver:
    """Observes one round's workers on this node. `rank_slots` are their (rank, slot), by local rank."""

    round: int
    rank_slots: Sequence[tuple[int, int]]
    heartbeat_files: Sequence[Path]
    worker_event_files: Sequence[Path]
    read_state: Callable[[int], str] = procfs.state_or_exiting
    read_usage: Callable[[Sequence[int], int], Mapping[int, TreeUsage]] = field(
        default_factory=lambda: UsageReader().read
    )
    earlier_event_readers: Sequence[WorkerEventReader] = ()
    """The readers of the group before: its last save may still be written."""
    _pids: tuple[int, ...] = ()
    _store_pid: int = 0
    _store_port: int = 0
    _held_local_ranks: set[int] = field(default_factory=set)
    _heartbeat_readers: list[HeartbeatReader] = field(default_factory=list)
    event_readers: list[WorkerEventReader] = field(default_factory=list)
    _ages: list[_Ages] = field(default_factory=list)
    _own_bytes: list[_BytesWithoutDumps] = field(default_factory=list)
    _suspended: bool = False
    _store_ages: _Ages = field(default_factory=_Ages)
    _last_look: float | None = None
    _observed_s: float = 0.0
    _usage_samples: deque[tuple[float, Mapping[int, TreeUsage]]] = field(default_factory=deque)
    _exited: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._heartbeat_readers = [HeartbeatReader(path) for path in self.heartbeat_files]
        self.event_readers = [WorkerEventReader(path) for path in self.worker_event_files]
        self._ages = [_Ages() for _ in self.heartbeat_files]
        self._own_bytes = [_BytesWithoutDumps() for _ in self.heartbeat_files]

    def set_processes(self, pids: Sequence[int], store_pid: int, held: Sequence[int] = (), store_port: int = 0) -> None:
        """The processes of this group: the workers' by local rank, and the round's store, 0 if it is not here.

        `held` ones do not run yet, by local rank: they grow no older.
        """
        self._pids = tuple(pids)
        self._store_pid = store_pid
        self._store_port = store_port
        self._held_local_ranks = set(held)

    def released(self, local_ranks: Sequence[int]) -> None:
        """These are not held any more."""
        self._held_local_ranks -= set(local_ranks)

    def worker_exited(self, rank: int) -> None:
        """The worker has exited with code 0."""
        self._exited.add(rank)

    def observe(self, now: float) -> Observation:
        """Read everything once. A heartbeat that cannot be decoded counts as empty."""
        passed_s = 0.0 if self._last_look is None else min(now - self._last_look, MAX_LOOK_GAP_S)
        self._last_look = now
        self._observed_s += passed_s
        beats = tuple(read_heartbeat_or_empty(heartbeat_reader) for heartbeat_reader in self._heartbeat_readers)
        events: list[WorkerEvent] = []
        for reader in self.event_readers:
            with suppress(OSError):  # no file descriptor is left, for example: the next look reads them
                events += reader.read()[0]
        for reader in self.earlier_event_readers:
            with suppress(OSError):
                events += [event for event in reader.read()[0] if event.kind in LATE_EVENT_KINDS]
        pids = tuple(_training_pid(beat, pid) for beat, pid in zip(beats, self._pids, strict=bool(self._pids)))
        states = [self.read_state(pid) for pid in pids] or [""] * len(beats)
        runs = [at for at, slot in enumerate(self.rank_slots) if slot[0] not in self._exited]
        suspended = bool(runs) and all(states[at] == "T" for at in runs)  # by a scheduler, like a suspended machine
        for at, (ages, beat) in enumerate(zip(self._ages, beats, strict=True)):
            ages.on_heartbeat(
                beat, passed_s if self._pids and at not in self._held_local_ranks and not suspended else 0.0, now
            )
        idle_s = min((ages.idle_s for ages in self._ages), default=0.0)
        for ages, state in zip(self._ages, states, strict=True):
            if self._suspended and not suspended:
                ages.state = ""  # they are continued one after the other, and none has been stopped alone
            ages.on_state(state, passed_s)
        self._suspended = suspended
        store_state = self.read_state(self._store_pid) if self._store_pid else ""
        self._store_ages.on_state(store_state, passed_s)
        self._sample_usage(idle_s, beats)
        return Observation(
            self.round,
            beats,
            tuple(sorted(events, key=lambda event: event.mono)),
            idle_s,
            tuple(self._report_of(i, beat, states[i]) for i, beat in enumerate(beats)),
            store_state,
            self._store_ages.stopped_s,
            self._observed_s,
            pids,
        )

    def _sample_usage(self, idle_s: float, beats: Sequence[Heartbeat]) -> None:
        """Sample the usage of the ranks' processes while the group is idle, and see who is quiet."""
        if not self._pids or (idle_s < USAGE_AFTER_IDLE_S and not any(ages.state == "T" for ages in self._ages)):
            self._usage_samples.clear()
            return
        if self._usage_samples and self._observed_s < self._usage_samples[-1][0] + MIN_USAGE_INTERVAL_S:
            return
        used = dict(self.read_usage(self._pids, self._store_port))
        for pid, bytes_, beat in zip(self._pids, self._own_bytes, beats, strict=True):
            if pid in used:
                own = bytes_.count(used[pid].io_bytes, beat.dump_done)
                used[pid] = replace(used[pid], io_bytes=own)
        if self._usage_samples:
            began, before = self._usage_samples[0]
            for pid, ages in zip(self._pids, self._ages, strict=True):
                if pid in used and pid in before:
                    passed_s = self._observed_s - began
                    cpu_s, io_bytes = _usage_between(before[pid], used[pid], passed_s)
                    ages.on_usage(cpu_s / passed_s, io_bytes / passed_s, before[pid], used[pid])
        self._usage_samples.append((self._observed_s, used))
        while len(self._usage_samples) > 2 and self._usage_samples[1][0] <= self._observed_s - USAGE_WINDOW_S:
            self._usage_samples.popleft()

    def _report_of(self, index: int, beat: Heartbeat, state: str) -> RankReport:
        """Return the report of one rank, from its heartbeat, its ages and its usage."""
        rank, slot = self.rank_slots[index]
        ages = self._ages[index]
        exited = rank in self._exited
        waits = beat.phase == Phase.BARRIER or (beat.phase == Phase.STARTING and beat.collectives < 0)
        report = RankReport(
            rank,
            slot,
            phase=beat.phase.name.lower(),
            step=beat.step,
            called_step=beat.source == StepSource.SESSION and beat.first_step_ns > 0,
            # The thread that counts them may have been stopped before, or not get the GIL.
            # Of an exited rank only the last tick counts, which comes after the exit handlers, and not after os._exit.
            collectives=_collectives_at_exit(beat) if exited else max(beat.collectives, beat.collectives_at_step),
            usual=beat.collectives_per_step,
            barrier=beat.barrier if waits else "",
            barrier_s=beat.barrier_s if beat.phase == Phase.BARRIER else 0.0,
            wait_call=beat.wait_call,
            wait_rank=beat.wait_rank,
            timeout_s=beat.collective_timeout_s,
            wait_timeout_s=beat.wait_timeout_s,
            idle_s=ages.idle_s,
            alive_s=ages.alive_s,
            moved_s=ages.moved_s,
            nccl_groups=ages.nccl_groups,
            device_s=ages.device_s,
            waiting_s=ages.waiting_s,
            quiet_s=ages.quiet_s,
            sockets_s=ages.sockets_s,
            state=state,
            stopped_s=ages.stopped_s,
            exited=exited,
        )
        if not self._usage_samples:
            return report
        pid = self._pids[index]
        (began, before), (ended, after) = self._usage_samples[0], self._usage_samples[-1]
        if pid not in before or pid not in after:
            return report
        cpu_s, io_bytes = _usage_between(before[pid], after[pid], ended - began)
        state = "t" if after[pid].is_traced and state in ("R", "S", "D") else state
        queued = after[pid].tcp_queued_bytes
        unsent = -1 if queued is None else queued
        report = replace(report, state=state, cpu_s=cpu_s, io_bytes=io_bytes, window_s=ended - began, unsent=unsent)
        return replace(report, shows_sockets=queued is not None)

    def close(self) -> None:
        for reader in self._heartbeat_readers:
            reader.close()


def _usage_between(before: TreeUsage, after: TreeUsage, passed_s: float) -> tuple[float, int]:
    """The processor time between two samples, and the bytes.

    What waits for a processor for most of the time is as good as running: a quota or a busy machine makes it slow. An
    idle thread that only wakes up now and then waits a little, too. Where the kernel does not say how long it waited, a
    process that could run in both samples counts as running in between. A quota so small that each thread runs too
    little to count shows in the time for which it stopped the control group.
    """
    cpu_s = max(0.0, after.cpu_s - before.cpu_s)
    throttled_s = after.throttled_s - before.throttled_s
    if throttled_s > STARVED_SHARE * passed_s:
        cpu_s = max(cpu_s, passed_s)
    if before.wait_s is not None and after.wait_s is not None:
        ready_s = cpu_s + after.wait_s - before.wait_s
        cpu_s = ready_s if ready_s > STARVED_SHARE * passed_s else cpu_s
    elif before.is_runnable and after.is_runnable:
        cpu_s = max(cpu_s, passed_s)
    return cpu_s, max(0, after.io_bytes - before.io_bytes)


def _collectives_at_exit(beat: Heartbeat) -> int:
    return -1 if beat.alive_ticks else beat.collectives


def _training_pid(beat: Heartbeat, pid: int) -> int:
    """The process that trains: a child in the session of worker `pid` where that is only a shell, else `pid`."""
    if beat.pid in (0, pid):
        return pid
    process = procfs.stat(beat.pid)
    return beat.pid if process is not None and process.session == pid else pid


def read_heartbeat_or_empty(reader: HeartbeatReader) -> Heartbeat:
    try:
        return reader.read()
    except (OSError, WireError):
        return Heartbeat()
