"""The background thread of a worker: ten times a second it writes into the beat what the training thread cannot say.

It exists because a hung training thread is silent. The thread counts `alive` for as long as it gets the GIL, and
writes how many collectives the default process group has issued, so that the rank the others wait for can be named.
It says when the script waits for the others to make that group, so that one that never comes is missed, whether its
Python moves at all, so that a long evaluation is no dead kernel, and when the script is over and only its exit
handlers run; and it writes down what PyTorch's flight recorder holds when the agent asks.

It starts when torch has been imported: before that there is nothing to count, and a script could tell that its process
has a second thread (/proc, and a DeprecationWarning at os.fork() from Python 3.12 on). Threading knows nothing of
it, it takes none of the script's signals, holds no file descriptor, is not in forked children, and ends in an exit
handler, before the interpreter is taken down: a thread that comes back from torch's C++ after that would abort the
process. It never imports torch, never waits for the script, and never raises. Like record.py it is also loaded by file.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from elasticd.heartbeat.collectives import UNKNOWN, Collectives, default_group, flight_recorder_dump, timeout_ms
from elasticd.heartbeat.exit_report import report_exception
from elasticd.heartbeat.record import INIT_PROCESS_GROUP, STACKS_SIGNAL, HeartbeatWriter, Phase

PERIOD_S = 0.1
"""The agent looks every 0.25 s; a pulse costs the training thread 40 to 160 µs (benchmarks/beat.py)."""
TIMEOUT_EVERY = 10
"""The group's timeout is read once a second: it takes as long as all the rest, and holds on to the group meanwhile."""
STOP_TIMEOUT_S = 1.0
"""How long the exit waits for a pulse to be over. One takes 0.1 ms, a dump of the flight recorder 25 ms."""
NAME = b"elasticd-pulse"
"""The thread's name in /proc/PID/task/*/comm."""
_PR_SET_NAME = 15
_WAITS_IN = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
"""Whoever is in a C function that was called here waits for other ranks, as a rule."""
_BACKWARD = ("/torch/autograd/graph.py", "/torch/autograd/__init__.py")
"""The same of a backward pass, which ends with DDP's wait for the gradients, but only while nothing is computed."""


class HeartbeatThread:
    """One process's background thread. Made before the script runs, so that its exit handler comes after the script's.

    `dump_to`: where the flight recorder's content goes when asked for; "" for nowhere.
    """

    def __init__(self, writer: HeartbeatWriter, dump_to: str = "", period_s: float = PERIOD_S) -> None:
        self._writer, self._dump_to, self._period_s = writer, dump_to, period_s
        self._collectives = Collectives()
        self._group: Callable[[], Any] = nothing  # a weak reference to the group seen last
        self._issued = UNKNOWN
        self._place = (0, 0)
        self._timeout_ms = self._looks = 0
        self._leaving = self._joining = False
        self._main = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._main)
        self._may_start = True
        self._running = False
        self._stop, self._over = _thread.allocate_lock(), _thread.allocate_lock()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.stop)

    def start(self) -> None:
        """Pulse from now on. Calls after the first do nothing, nor do those in a forked child."""
        if not self._may_start:
            return
        self._may_start = False
        self._stop.acquire()
        self._over.acquire()
        # Whatever else this process gets is the script's, and goes to the threads it would go to without us.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {STACKS_SIGNAL})
        try:
            _thread.start_new_thread(self._run, ())
            self._running = True
        except RuntimeError:
            pass  # the process may have no more threads: then nobody counts, and `alive` stays 0
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """End the thread; `alive` is 0 then. An exit handler."""
        if self._running:
            self._running = False
            self._stop.release()
            self._over.acquire(timeout=STOP_TIMEOUT_S)

    def _forked(self) -> None:
        self._may_start = self._running = False

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME, 0, 0, 0)
        try:
            self._pulse()
            while not self._stop.acquire(timeout=self._period_s):
                self._pulse()
        finally:
            self._writer.thread_stopped()
            self._over.release()

    def _pulse(self) -> None:
        used = self._used_ns()
        issued = self._look()
        file, place = self._stands()
        moved, self._place = place != self._place, place
        self._writer.tick(issued, self._timeout_ms, issued > 0 and self._waits(file, used), moved)
        if not self._leaving and script_is_over():
            self._leaving = True
            self._writer.set_phase(Phase.EXIT)
            report_exception(self._writer)  # exit handlers may take any time, and the others fall before they are done
        wanted = self._writer.dump_requested
        if wanted != self._writer.dump_done:
            if self._dump_to:
                write_flight_recorder(self._dump_to)
            self._writer.dump_done = wanted

    def _stands(self) -> tuple[str, tuple[int, int]]:
        """The file that the main thread's innermost Python frame is of, and the place in its code."""
        frame = sys._current_frames().get(self._main)
        return ("", (0, 0)) if frame is None else (frame.f_code.co_filename, (id(frame.f_code), frame.f_lasti))

    def _waits(self, file: str, used_ns: int) -> bool:
        """The main thread, in that file, and with so much processor time when this pulse began, waits for others."""
        if file.endswith(_BACKWARD):
            return used_ns == self._used_ns()
        return any(part in file for part in _WAITS_IN)

    def _used_ns(self) -> int:
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:  # the thread has ended
            return 0

    def _look(self) -> int:
        """What has been issued; for one pulse unknown where another group, which counts anew, has come."""
        group = default_group()
        if group is None:
            self._issued, self._timeout_ms = UNKNOWN, 0
            if not self._joining and self._writer.current_phase == Phase.STARTING and is_in_init_process_group():
                self._joining = True
                self._writer.set_phase(Phase.STARTING, INIT_PROCESS_GROUP)
            return UNKNOWN
        issued = self._collectives.issued()
        another = self._group() is not group
        if another:
            self._collectives.reset()
            self._group = weak(group)
        self._looks += 1
        # It can be changed while the group lives. A group that refuses to say it is not asked again.
        if another or (self._timeout_ms and self._looks % TIMEOUT_EVERY == 0):
            self._timeout_ms = timeout_ms(group)
        before, self._issued = self._issued, issued
        return UNKNOWN if issued < before or (another and before >= 0) else issued


def weak(group: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(group)
    except TypeError:  # a class of the script's own, with slots
        return nothing


def nothing() -> None:
    return None


def is_in_init_process_group() -> bool:
    """The main thread is inside init_process_group, where it waits for all other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == INIT_PROCESS_GROUP and "distributed" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def script_is_over() -> bool:
    """The main thread has returned: what still runs are other threads and exit handlers."""
    main = threading.main_thread()
    # Up to 3.12 is_alive() takes a lock for an instant, and the exit asserts at that very moment that nobody has it.
    stopped = getattr(main, "_is_stopped", None)
    return stopped if isinstance(stopped, bool) else not main.is_alive()


def write_flight_recorder(path: str) -> None:
    """Write what the flight recorder holds to `path`, whole or not at all."""
    content = flight_recorder_dump()
    if content is None:
        return
    try:
        with open(f"{path}.part", "wb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        pass  # no room: the agent finds no file, and says that there is none
