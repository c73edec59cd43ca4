"""Every test leaves the machine as it found it: this fails one that leaves a process, a thread, an fd or shared memory.

Processes are found by a mark in their environment, so that daemonised ones count too. What other people run on the same
machine at the same time never counts. LEAK_WAIT_S is how long a test's remains may take to go away by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

from elasticd_agent.system.processes import process as endings

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PF_KTHREAD = 0x00200000  # linux/sched.h
_MARK = f"TESTS_OF_ELASTICD={os.getpid()}.{time.monotonic_ns()}"  # not ELASTICD_…: daemons keep those from jobs
_WAIT_S = float(os.environ.get("LEAK_WAIT_S", "20"))
_SHM = Path("/dev/shm")
_BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
_FOREIGN: set[str] = set()  # what is in /proc and was seen to be others': not looked at before and after every test

# The same examples in every run, however busy the machine, or a change would be blamed for what it has not done;
# "search" draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
os.environ.update([_MARK.split("=", 1)])
# Tests start thousands of interpreters: each module is compiled once, also where the user keeps no compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if sys.version_info >= (3, 14):  # its server for forks would be what the first test with a DataLoader leaves behind
    multiprocessing.set_start_method("fork")
for _signal, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:  # as a shell's & or nohup leaves them for what it starts
        signal.signal(_signal, _usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write what the code does now into the transcripts (*.txt) of tests; read the diff before you commit it",
    )


@dataclass(frozen=True, slots=True)
class Remains:
    """What is there at one moment, each thing with the words a person needs to find it."""

    processes: dict[int, str]
    threads: dict[int, str]
    fds: dict[tuple[int, str], str]
    shared_memory: dict[str, str]

    def since(self, before: Remains) -> list[str]:
        """What is here and was not there before."""
        return [
            *(f"process {pid}: {what}" for pid, what in self.processes.items() if pid not in before.processes),
            *(f"thread {what}" for ident, what in self.threads.items() if ident not in before.threads),
            *(f"fd {key[0]}: {what}" for key, what in self.fds.items() if key not in before.fds),
            *(f"shared memory {what}" for name, what in self.shared_memory.items() if name not in before.shared_memory),
        ]


def _remains() -> Remains:
    return Remains(_processes(), _threads(), _fds(), {name: f"/dev/shm/{name}" for name in os.listdir(_SHM)})


def _processes() -> dict[int, str]:
    children = {*Path("/proc/self/task", str(os.getpid()), "children").read_text().split()}
    found = {}
    for entry in {*os.listdir("/proc")} - _FOREIGN | children:
        if not entry.isdigit():
            _FOREIGN.add(entry)
        elif int(entry) != os.getpid() and (entry in children or _marked(entry)):
            what = _command(entry)
            # Python's own, one per process that used shared memory; ends with us.
            if "multiprocessing.resource_tracker" not in what:
                found[int(entry)] = what
    return found


def _marked(pid: str) -> bool:
    try:
        environ = Path("/proc", pid, "environ").read_bytes()
    except OSError:  # it has ended, or is another user's or the kernel's
        environ = b""
    marked = _MARK.encode() in environ.split(b"\0")
    # It has none at its end, and for a moment at its start.
    if not marked and (environ or _is_kernel_thread(pid)):
        _FOREIGN.add(pid)
    return marked


def _is_kernel_thread(pid: str) -> bool:
    try:
        flags = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[6]
    except OSError:
        return False
    return bool(int(flags) & _PF_KTHREAD)


def _command(pid: str) -> str:
    try:
        command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return command or f"a zombie nobody waited for ({Path('/proc', pid, 'comm').read_text().strip()})"
    except OSError:
        return "(just ended)"


def _threads() -> dict[int, str]:
    # Python's own only: the pools torch makes at its first operation are not in this list and stay for good.
    return {thread.ident or 0: repr(thread.name) for thread in threading.enumerate()}


def _fds() -> dict[tuple[int, str], str]:
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the one that listed the directory
            continue
        if int(entry) != tracker:
            found[int(entry), target] = target
    return found


def _listening(fd: int, target: str) -> str:
    if not target.startswith("socket:"):
        return ""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return f", listening on {sock.getsockname()}" if listening else ""
    except OSError:  # a thread that is still there has just closed it
        return ""


def _held_by_others(path: Path) -> bool:
    """Another test run's, or a job's, on this machine: a living process is in its name, or has it open or mapped."""
    if _BESIDE_OTHERS and path.name.startswith("sem.mp-"):
        return True  # multiprocessing's: one whose owner was killed has no trace of it
    if path.name.startswith("libpod"):
        return True  # podman's, which keeps it for good
    ours = {os.getpid(), *_processes()}
    if any(int(pid) not in ours and Path("/proc", pid).exists() for pid in re.findall(r"\d{2,}", path.name)):
        return True
    # An agent that was killed with all it had started leaves its directory to the next agent, anybody's. Whose it was,
    # nobody can tell by now; those of this run are looked for by tests/faults/job.py, which knows their numbers.
    if (agent := re.match(r"elasticd-\d+-(\d+)-", path.name)) is not None and not Path("/proc", agent[1]).exists():
        return True
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if pid in ours:
            continue
        try:
            if str(path) in Path("/proc", str(pid), "maps").read_text(errors="replace"):
                return True
            if any(os.readlink(fd).startswith(str(path)) for fd in Path("/proc", str(pid), "fd").iterdir()):
                return True
        except OSError:  # it has ended, or is another user's
            continue
    return False


def _left_behind(before: Remains) -> list[str]:
    now = _remains()
    kept = {name: what for name, what in now.shared_memory.items() if name not in before.shared_memory}
    foreign = {name for name in kept if _held_by_others(_SHM / name) or not (_SHM / name).exists()}
    fds = {key: what + _listening(*key) for key, what in now.fds.items() if key not in before.fds}
    ours = {name: what for name, what in kept.items() if name not in foreign}
    return Remains(now.processes, now.threads, fds, ours).since(before)


def pytest_collectstart() -> None:
    """Without the collection of garbage a process of pytest takes a quarter less until its first test."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What pytest has made is no garbage, and need not be looked at."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: the last ones of a run leave processes of pytest without work."""
    items.sort(key=lambda item: "torchrun_parity" not in item.path.parts)


@pytest.fixture(autouse=True)
def _ends_its_own_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that plays the agent ends all children of its process, as agents may: not the servers of other tests."""
    theirs, children = frozenset(endings.children()), endings.children
    monkeypatch.setattr(endings, "children", lambda: [pid for pid in children() if pid not in theirs])


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    # A test that plays the agent becomes a subreaper, and the next one would inherit the zombies of those it kills.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    before = _remains()
    yield
    deadline = time.monotonic() + _WAIT_S
    # Twice, because a process that forks and ends while /proc is read can be missed once.
    left = _left_behind(before) or _left_behind(before)
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        left = _left_behind(before)
    if left:
        for pid in _processes().keys() - before.processes.keys():
            _end(pid)
        pytest.fail("left behind after the test:\n  " + "\n  ".join(left), pytrace=False)


def _end(pid: int) -> None:
    """So that one leak does not become every later test's leak."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


@pytest.fixture
def until() -> Callable[[Callable[[], object], float], object]:
    """Waits for a condition, never for a time: until(lambda: …, seconds) returns its first true value or fails."""

    def wait(condition: Callable[[], object], seconds: float) -> object:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not true within {seconds} s"
            time.sleep(0.01)
        return value

    return wait
