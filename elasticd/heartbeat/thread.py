"""The background thread of a worker: ten times a second, or five, it writes into the heartbeat what a hung training
thread cannot.

It counts `alive_ticks` while it gets the GIL and reports the collectives issued, waits in init_process_group, whether
the main thread moves, and the end of the script; on request it dumps PyTorch's flight recorder. It starts when torch
has been imported: before that a script could notice a second thread (a DeprecationWarning at os.fork() from Python 3.12
on). `threading` does not list it, it takes no signal of the script, holds no descriptor, is not in forked children, and
ends in an exit handler, because a thread that returns from torch's C++ during finalization would abort the process.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from elasticd.heartbeat.collectives import (
    UNKNOWN_COUNT,
    CollectiveCounter,
    default_group,
    group_timeout_ms,
    longest_timeout_ms,
    process_group_table,
    sequence_number,
)
from elasticd.heartbeat.exit_report import report_exception
from elasticd.heartbeat.main_thread import MainThread
from elasticd.heartbeat.record import INIT_PROCESS_GROUP_BARRIER, MAX_GROUPS, STACKS_SIGNAL, HeartbeatWriter, Phase
from elasticd.heartbeat.recorders import GroupCountReader, flight_recorder_dump
from elasticd.heartbeat.worker_events import WorkerEventWriter

PERIOD_S = 0.1
"""The agent reads every 0.25 s; a tick costs the training thread 40 to 160 µs (benchmarks/heartbeat.py), nearly all of
it two switches of threads."""
STEPPING_PERIODS, STEPPING_AFTER = 2, 10
"""Steps are shorter than the period where each of so many ticks has seen progress: half as many ticks are enough, and
each counts twice. The first one without progress ends that."""
TICKS_PER_TIMEOUT_READ = 10
"""The group's timeout is read once in so many ticks: it takes as long as all the rest, and references the group."""
READ_GROUPS_AFTER_NS = 1_000_000_000
"""NCCL's recorder is read once the rank has made no progress for so long, and no more often than that."""
READ_GROUPS_WHILE_MOVING_NS = 5_000_000_000
"""The same while its Python moves: torch takes no lock for the counts, and Python may be about to use a new group."""
READ_GROUPS_INTERVAL_FACTOR = 1000
"""A reading that was slow is repeated after this many times its duration."""
REPORT_SIZE_AFTER_S = 10.0
"""A rank that waits for so long in init_process_group says if it waits for more ranks than the job has."""
STOP_TIMEOUT_S = 1.0
"""The exit waits this long for a tick to end. One takes 0.1 ms, a dump of the flight recorder 25 ms."""
THREAD_NAME = b"elasticd-heartb"
"""The thread's name in /proc/PID/task/*/comm."""
_PR_SET_NAME = 15


class HeartbeatThread:
    """Made before the script runs, so that its exit handler runs after the script's. `dump_to`: for the flight
    recorder.
    """

    def __init__(self, writer: HeartbeatWriter, dump_to: str = "", period_s: float = PERIOD_S) -> None:
        self._writer = writer
        self._dump_to = dump_to
        self._read_environment()
        self._period_s = period_s
        self._collectives = CollectiveCounter()
        self._groups = GroupCountReader()
        self._group: Callable[[], Any] = lambda: None  # a weak reference to the last group
        self._issued = UNKNOWN_COUNT
        self._position = (0, 0)
        self._timeout_ms = 0
        self._ticks_with_group = 0
        self._read_groups_at = 0  # CLOCK_MONOTONIC nanoseconds
        self._progress_ns = 0
        self._stepping = 0  # ticks in a row that have seen progress
        self._stands = False
        self._waited_in = (0, UNKNOWN_COUNT)  # the id of the group, and what it had issued
        self._exiting = False
        self._joining = False
        self._report_size_at = math.inf
        self._main = MainThread()
        self._may_start = True
        self._running = False
        self._stop = _thread.allocate_lock()
        self._over = _thread.allocate_lock()
        os.register_at_fork(after_in_child=self._on_fork)
        atexit.register(self.stop)

    def _read_environment(self) -> None:
        """Read what the agent has given this process for a round; a script may change the variables."""
        self._given = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        self._given_with = os.environ.get("ELASTICD_HEARTBEAT", "")
        self._round = os.environ.get("ELASTICD_ROUND", "")

    def _update_environment(self) -> None:
        if self._given_with != os.environ.get("ELASTICD_HEARTBEAT", ""):  # this process has stayed for a new round
            self._dump_to = os.environ.get("ELASTICD_FLIGHT", "")
            self._read_environment()

    def start(self) -> None:
        """Start the thread. Calls after the first do nothing, nor do calls in a forked child."""
        if not self._may_start:
            return
        self._may_start = False
        self._stop.acquire()
        self._over.acquire()
        # All other signals are the script's, and go to the threads they would go to without us.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {STACKS_SIGNAL})
        try:
            _thread.start_new_thread(self._run, ())
            self._running = True
        except RuntimeError:
            pass  # the process may have no more threads: then nothing counts, and `alive_ticks` stays 0
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """End the thread; `alive_ticks` is 0 afterwards. An exit handler."""
        if self._running:
            self._running = False
            self._stop.release()
            self._over.acquire(timeout=STOP_TIMEOUT_S)

    def _on_fork(self) -> None:
        self._may_start = self._running = False

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD_NAME, 0, 0, 0)
        try:
            self.tick()
            while not self._stop.acquire(timeout=self._period_s * self.periods_per_tick):
                self.tick()
            self.tick()  # of an exited rank all collectives are counted
        finally:
            self._writer.on_thread_stop()
            self._over.release()

    @property
    def periods_per_tick(self) -> int:
        """Between the last tick and the next one."""
        return STEPPING_PERIODS if self._stepping >= STEPPING_AFTER else 1

    def tick(self) -> None:
        used, periods, progress_ns = self._main.cpu_time_ns(), self.periods_per_tick, self._writer.progress_ns
        self._stepping = self._stepping + 1 if progress_ns != self._progress_ns else 0
        self._progress_ns = progress_ns
        issued = self._observe_collectives()
        file, _, position = self._main.position()
        moved = position != self._position
        self._position = position
        waits = issued > 0 and self._main.waits_for_ranks(file, used)
        moved = self._observe_wait(waits and not moved) or moved
        self._writer.tick(issued, self._timeout_ms, waits, moved, periods)
        if issued >= 0:
            self.update_groups(moved)
        if not self._exiting and script_is_over():
            self._exiting = True
            self._writer.set_phase(Phase.EXIT)
            report_exception(self._writer)  # exit handlers may take long, and peers fail before they are done
        requested = self._writer.dump_requested
        if requested != self._writer.dump_done:
            self._update_environment()
            if self._dump_to:
                write_flight_recording(self._dump_to, *self._given)
            self._writer.dump_done = requested

    def _observe_wait(self, stands: bool) -> bool:
        """Write the timeout that the script gave the wait; True if its group, which is not the default one, has issued
        more since the last reading. Now and then: a wait may follow another one in the same place.

        What equals the default group's timeout is torch's default, or was not meant for this wait.
        """
        if stands == self._stands and not (stands and self._ticks_with_group % TICKS_PER_TIMEOUT_READ == 0):
            return False
        self._stands, found_ms, before = stands, 0, self._waited_in
        if stands:
            timeout, group = self._main.wait_arguments()
            self._waited_in = id(group), sequence_number(group)
            if isinstance(timeout, timedelta):
                found_ms = int(timeout.total_seconds() * 1000)
            elif group is not None:
                found_ms = group_timeout_ms(group)
            found_ms = 0 if found_ms == group_timeout_ms(default_group()) else found_ms
        self._writer.write_wait_timeout(found_ms)
        return self._waited_in[0] == before[0] and self._waited_in[1] > before[1]

    def update_groups(self, moved: bool) -> None:
        began = time.monotonic_ns()
        quiet_ns = READ_GROUPS_WHILE_MOVING_NS if moved else READ_GROUPS_AFTER_NS
        if began < max(self._read_groups_at, self._writer.progress_ns + quiet_ns):
            return
        self._writer.write_groups(self._groups.read(MAX_GROUPS))
        ended = time.monotonic_ns()
        self._read_groups_at = ended + max(READ_GROUPS_AFTER_NS, READ_GROUPS_INTERVAL_FACTOR * (ended - began))

    def _observe_collectives(self) -> int:
        """The collectives issued so far; unknown for one tick after a change of group, which starts counting again."""
        group = default_group()
        if group is None:
            self._issued = UNKNOWN_COUNT
            if self._joining and self._timeout_ms:
                if time.monotonic() >= self._report_size_at:
                    self._report_size_at = math.inf
                    self._report_larger_group()
                return UNKNOWN_COUNT
            self._timeout_ms = 0
            if self._writer.current_phase == Phase.STARTING and (joins := call_of_init_process_group()) is not None:
                timeout = joins.get("timeout")
                self._timeout_ms = int(timeout.total_seconds() * 1000) if isinstance(timeout, timedelta) else 0
                if not self._joining:
                    self._writer.set_phase(Phase.STARTING, INIT_PROCESS_GROUP_BARRIER)
                    self._report_size_at = time.monotonic() + REPORT_SIZE_AFTER_S
                self._joining = True
            return UNKNOWN_COUNT
        self._joining = False
        issued = self._collectives.issued()
        another = self._group() is not group
        if another:
            self._collectives.on_new_group()
            try:
                self._group = weakref.ref(group)
            except TypeError:  # a class of the script's own, with slots
                self._group = lambda: None
        self._ticks_with_group += 1
        # The timeout can change while the group lives. A group without one is not read again.
        if another or (self._timeout_ms and self._ticks_with_group % TICKS_PER_TIMEOUT_READ == 0):
            self._timeout_ms = longest_timeout_ms(group)
        before = self._issued
        self._issued = issued
        return UNKNOWN_COUNT if issued < before or (another and before >= 0) else issued

    def _report_larger_group(self) -> None:
        """It is only said: a script may start the others itself."""
        self._update_environment()
        size = (call_of_init_process_group() or {}).get("world_size")
        round, (rank, job_size) = self._round, self._given
        if isinstance(size, int) and all(map(str.isdecimal, (round, rank, job_size))) and size > int(job_size):
            WorkerEventWriter(os.environ.get("ELASTICD_WORKER_EVENTS"), int(round), int(rank)).write(
                "message",
                f"rank {rank} waits in init_process_group(world_size={size}), and the job has {job_size} ranks: unless "
                "the script starts the others, give it the variable WORLD_SIZE, or no world_size",
            )


def call_of_init_process_group() -> Mapping[str, Any] | None:
    """The variables of the init_process_group in which the main thread waits for all other ranks; None: of none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == INIT_PROCESS_GROUP_BARRIER and "distributed" in frame.f_code.co_filename:
            return frame.f_locals
        frame = frame.f_back
    return None


def script_is_over() -> bool:
    """The main thread has returned: only other threads and exit handlers still run."""
    main = threading.main_thread()
    # Up to 3.12 is_alive() takes a lock for an instant, and the exit asserts at that very moment that it is free.
    stopped = getattr(main, "_is_stopped", None)
    return stopped if isinstance(stopped, bool) else not main.is_alive()


def write_flight_recording(path: str, rank: str, world_size: str) -> None:
    """Write the flight recorder's content to `path`, whole or not at all, with a list of the process groups."""
    content = flight_recorder_dump()
    if content is None:
        return
    if content.endswith(b"}"):
        table = json.dumps(process_group_table(rank, world_size))
        content = content[:-1] + b', "process_groups": ' + table.encode() + b"}"
    try:
        with open(f"{path}.part", "wb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        pass  # no space: the agent finds no file, and reports that
