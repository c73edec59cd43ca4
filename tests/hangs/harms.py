"""Disturbances of ranks from outside: stop, trace, starve, suspend the whole machine; and a server that is slow.

Every function ends what it began, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.job import Job, descendants

_TRACE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
ATTACH, DETACH, WALL = 16, 17, 0x40000000  # <sys/ptrace.h>, <sys/wait.h>
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
if libc.ptrace(ATTACH, pid, None, None) != 0:
    raise OSError(ctypes.get_errno(), "ptrace")
os.waitpid(pid, WALL)
time.sleep(seconds)
libc.ptrace(DETACH, pid, None, None)
"""
_BUSY = "while True: pass"


def stop(pids: Sequence[int], seconds: float) -> None:
    """SIGSTOP, and SIGCONT after so long."""
    _send(pids, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: Sequence[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a helper of the agent's that has ended meanwhile
            os.kill(pid, signum)


def suspend(run: Job, seconds: float) -> None:
    """The machine sleeps: all processes of the job, its agent first, since it must not see the others stand still."""
    stop([run.pid, *descendants(run.pid)], seconds)


def trace(pid: int, seconds: float) -> None:
    """A debugger attaches to the process, and leaves it after so long."""
    subprocess.run([sys.executable, "-c", _TRACE, str(pid), str(seconds)], check=True, timeout=seconds + 30)


@contextlib.contextmanager
def busy(processes: int = 8) -> Iterator[None]:
    """So many processes want a core all the time."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def debug(pid: int, seconds: float) -> None:
    """gdb attaches to the process, and leaves it after so long."""
    command = ["gdb", "-nx", "-batch", "-iex", "set auto-solib-add off", "-p", str(pid)]  # torch's symbols take minutes
    command += ["-ex", f"shell sleep {seconds:g}", "-ex", "detach"]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds + 180)


def profile(pid: int, seconds: float) -> None:
    """py-spy samples the process, stopping it each time, for so long or, where it comes late to its samples, twice."""
    spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    command = [str(spy), "record", "--pid", str(pid), "--duration", f"{seconds:g}", "--format", "raw", "-o", os.devnull]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            process.wait(2 * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        if process.wait(180):
            raise subprocess.CalledProcessError(process.returncode, command)


_CGROUP_1, _CGROUP_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@contextlib.contextmanager
def quota(share: float) -> Iterator[Path]:
    """A control group that gets this share of one processor; raises OSError where none can be made."""
    first = (_CGROUP_1 / "cpu.cfs_quota_us").exists()
    group = (_CGROUP_1 if first else _CGROUP_2) / f"elasticd-test-{uuid.uuid4()}"
    group.mkdir()
    try:
        if first:
            (group / "cpu.cfs_quota_us").write_text(str(int(share * _PERIOD_US)))
        else:
            (group / "cpu.max").write_text(f"{int(share * _PERIOD_US)} {_PERIOD_US}")
        yield group
    finally:
        leave(group)
        group.rmdir()


def no_quota() -> str:
    """Why no control group can be made here; "" if one can."""
    try:
        with quota(0.5):
            return ""
    except OSError as error:
        return f"no control group can be made here: {error}"


def enter(group: Path, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def leave(group: Path) -> None:
    """Its processes return to the group above it."""
    enter(group.parent, [int(pid) for pid in (group / "cgroup.procs").read_text().split()])


class SlowServer(socketserver.ThreadingTCPServer):
    """A line "WHAT SECONDS" makes it send ("get") or read ("put") a megabyte a second for so long, or say "continue"
    ("continue"; for "ask" anything) after so long. "drip": it reads 30 kB/s; "judge": it answers 1 kB in 1.5 s."""

    daemon_threads = True
    allow_reuse_address = True


@contextlib.contextmanager
def slow_server() -> Iterator[int]:
    """Its port."""
    with SlowServer(("127.0.0.1", 0), _SlowAnswer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


class _SlowAnswer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            what, seconds = self._line().split()
            getattr(self, f"_{what}")(float(seconds))

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            if not (byte := self.request.recv(1)):
                raise OSError("no request")
            line += byte
        return line.decode()

    def _get(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.request.sendall(bytes(100_000))
            time.sleep(0.1)

    def _put(self, seconds: float) -> None:
        while self.request.recv(100_000, socket.MSG_WAITALL):
            time.sleep(0.1)

    def _drip(self, seconds: float) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 10_000)
        while self.request.recv(3_000, socket.MSG_WAITALL):
            time.sleep(0.1)

    def _judge(self, seconds: float) -> None:
        while self.request.recv(100, socket.MSG_WAITALL):
            time.sleep(1.5)
            self.request.sendall(bytes(1024))

    def _ask(self, seconds: float) -> None:
        time.sleep(seconds)
        self.request.sendall(b"continue\n")

    _continue = _ask
