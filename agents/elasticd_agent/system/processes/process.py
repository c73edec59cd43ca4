"""Starts, signals and reaps child processes: the owner's tools, and the agent's when the owner was killed.

Standard library only: the owner runs without site-packages. Every wait is bounded, only children of the caller are
signalled, and a forked child never returns into the owner's loop.

A child dies with its parent (PR_SET_PDEATHSIG), leads a session of its own, and has the default action of every signal
that the owner handles, before it runs a byte of foreign code. Between fork and exec it executes only what is listed
here, since another thread may have held a lock at the fork.

Ending children is a loop, because each death makes the dead one's children ours. It is bounded, and gives two kinds of
processes a moment longer: those of torch and of multiprocessing that free shared memory once their parent has died.
Killed together with it, they would leave the memory behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Any, TypedDict

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36
_CRASH_SIGNALS = {
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGSEGV,
    signal.SIGSYS,
}
_NONFATAL_SIGNALS = {
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGSTOP,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STRAY_SIGNALS = tuple(
    sorted(
        signal.valid_signals() - _CRASH_SIGNALS - _NONFATAL_SIGNALS - {*STOP_SIGNALS, signal.SIGKILL, signal.SIGWINCH}
    )
)
"""All others that end a process by default. Schedulers, limits, timers and people send them; none asks for an end."""
IGNORED_SIGNALS = (*STOP_SIGNALS, *STRAY_SIGNALS)
"""They do not end the owner, and keep their usual meaning for its children. A batch system sends them to every process
of a job."""


def handle_signals_unless_ignored(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> dict[int, Any]:
    """Handle these signals, except those ignored on purpose, as by nohup, and those that a library in C handles, as a
    profiler does. Returns the handlers before. Other programs inherit SIG_IGN, but no handler.
    """
    taken = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in taken}


def ignore_signal(number: int, frame: FrameType | None) -> None:
    pass


def prctl(option: int, argument: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def spawn(
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    stdout: str | None,
    stderr: str | None,
    ignored: Collection[int] = (),
    prepare: Callable[[], object] = lambda: None,
) -> int:
    """Fork and exec as `Popen(start_new_session=True)` would; the child dies with its parent.

    `ignored`: some of IGNORED_SIGNALS, for a program of ours. `prepare` is called in the child.
    """
    owner = os.getpid()
    # Until its exec the child has our handlers: a signal in between waits for the default action.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:  # also after a fork that failed: later children would inherit the blocked signals
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid:
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:
            os._exit(0)
        signal.set_wakeup_fd(-1)
        for signum in IGNORED_SIGNALS:
            if signum in ignored:
                signal.signal(signum, signal.SIG_IGN)
            elif signal.getsignal(signum) is not signal.SIG_IGN or signum in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        redirect_output(stdout, stderr)
        prepare()
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except BaseException as error:  # noqa: BLE001 a forked child must not return into the owner's loop
        # The name may contain bytes that are not UTF-8.
        os.write(2, f"elasticd: cannot start {argv[0]}: {error}\n".encode("utf-8", "backslashreplace"))
    finally:
        os._exit(127)


def redirect_output(stdout: str | None, stderr: str | None) -> None:
    """Append this process' output to files with mode 0600; None keeps a stream as inherited."""
    for path, fd in ((stdout, 1), (stderr, 2)):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(opened, fd)
            os.close(opened)


SHELL_NAMES = frozenset({"ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh"})
LEFTOVER_GRACE_S = 5.0
"""The time that processes which a script left running have to end after SIGTERM, and cleaners after their parents'
death: torch's waits for 2 s whether another process needs it."""
SHARED_MEMORY_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""They free the shared memory of their parents within milliseconds of their death, and then end; if they were killed
together with them, it would stay."""


def end_children(within_s: float, except_pids: Collection[int] = ()) -> None:
    """Kill and reap all children: each death makes the dead one's children ours. Bounded.

    `except_pids`: children known to survive SIGKILL, which are not waited for.
    """
    started = now = time.monotonic()
    while now < started + within_s:
        for pid in children():
            if now > started + LEFTOVER_GRACE_S or not may_be_cleaner(pid):
                signal_child(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if not set(children()).difference(except_pids):
            return
        time.sleep(0.002)
        now = time.monotonic()


def reap_children() -> dict[int, int]:
    """The wait status of each child that has ended, by pid; orphans that became ours are among them."""
    ended = {}
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    except ChildProcessError:
        pass
    return ended


def children(parent: int = 0) -> list[int]:
    """Pids of the direct children of a process with one thread, zombies among them; 0: of this one."""
    parent = parent or os.getpid()
    try:
        with open(f"/proc/{parent}/task/{parent}/children", "rb") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, or it has ended
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == parent]


def parent_of(pid: int) -> int:
    fields = _read_proc(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


class KernelState(TypedDict):
    state: str
    wchan: str


def kernel_state(pid: int) -> KernelState:
    """`state` and `wchan` of a process that survives SIGKILL, "" where unknown.

    Its own memory is not read: reading its command line could wait for the very lock that it holds.
    """
    wchan = _read_proc(pid, "wchan").strip()
    return {"state": _read_proc(pid, "stat").rpartition(")")[2].strip()[:1], "wchan": "" if wchan == "0" else wchan}


def may_be_cleaner(pid: int) -> bool:
    """True also in state D, as a cleaner that reads its own code from disk is: its memory is not read then."""
    return kernel_state(pid)["state"] == "D" or any(
        name in _read_proc(pid, "cmdline") for name in SHARED_MEMORY_CLEANERS
    )


def program_of(pid: int) -> str:
    """The first two words of its command line: further ones may be secrets. "" for a zombie, and for a worker of a
    DataLoader, which ends by itself within 5 s of its parent."""
    if _read_proc(pid, "comm").strip() == "pt_data_worker":
        return ""
    return " ".join(" ".join(_read_proc(pid, "cmdline").split("\0")[:2]).split())[:80]


def _read_proc(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def signal_child(pid: int, signum: int) -> None:
    """Signal a child that is not reaped yet, so that the pid is still its own.

    Its own children get no signal: a script whose DataLoader has lost its workers cannot save any more. They become our
    children when it has ended, and are signalled then. A shell that catches the signal, or ignores it, first waits for
    the program that it runs, which therefore gets the signal as well.
    """
    if signum != signal.SIGKILL and is_shell(pid) and not _has_default_action(pid, signum):
        for program in children(pid):
            signal_child(program, signum)
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def session_of(pid: int) -> int:
    """0 for a process that is gone. A worker leads the session of what it has started, unless that has left it."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def is_shell(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in SHELL_NAMES
    except OSError:
        return False


def _has_default_action(pid: int, signum: int) -> bool:
    """True if the signal has its default action there."""
    fields = dict(line.split(":\t", 1) for line in _read_proc(pid, "status").splitlines() if ":\t" in line)
    return not any(int(fields.get(name, "0"), 16) >> signum - 1 & 1 for name in ("SigIgn", "SigCgt"))


def describe_wait_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal_name(os.WTERMSIG(status))}"
    return f"exited with code {os.WEXITSTATUS(status)}"


def signal_name(number: int) -> str:
    """Goes after "by": "SIGKILL"; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
