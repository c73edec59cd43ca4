"""Takes the stacks of a process: by py-spy, which reads them from outside, else by the process's own faulthandler.

py-spy always runs with `--nonblocking`: it then only reads the target's memory. Without, it would stop every thread for
a moment, which makes system calls of the target fail with EINTR, and a py-spy killed in that moment can leave the
target stopped for good. A stack that is torn because the target ran on is read again. Never `--locals`: they hold data.
faulthandler writes on a signal, so it is the second choice, and only if the process handles the signal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticd.heartbeat.record import STACKS_SIGNAL
from elasticd_agent.hangs.collector.request import FilePath
from elasticd_agent.hangs.stacks import Frame, ThreadStack
from elasticd_agent.system.processes import procfs

PY_SPY_TRIES = 4
NOT_PERMITTED = (
    "access denied to py-spy: it needs the right to trace "
    "(kernel.yama.ptrace_scope below 3; CAP_SYS_PTRACE in a container)"
)
FIRST_TRY_PART, FIRST_TRY_S = 0.5, 2.0
"""The first py-spy may take this part of the time if that is long enough for a busy machine. The rest is for more."""
FAULTHANDLER_TIMEOUT_S = 2.0
"""faulthandler writes a hundred threads in a few milliseconds, once the process gets a processor for the signal."""
TID_OFFSET = 0x2D0
"""The place of the kernel's id in glibc's `struct pthread` on x86-64: after 704 bytes and a list's two pointers."""
MAX_TEXT_BYTES = 4 << 20
MAX_THREADS, MAX_FRAMES = 256, 512
"""The limits of one process and of one thread."""
_FAULTHANDLER_THREAD_LINE = re.compile(
    r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FAULTHANDLER_FRAME_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_MAIN_OUTERMOST_FUNCTIONS = ("<module>", "_run_module_as_main")


@dataclass(frozen=True, slots=True)
class StackDump:
    """The stacks of one process, the main thread first. Without a `source` there are none, and `trouble` says why."""

    threads: tuple[ThreadStack, ...] = ()
    source: str = ""
    trouble: str = ""


def by_py_spy(program: str, pid: int, until: float, tid: int = 0) -> StackDump:
    """Have py-spy read the stacks of `pid`, by `until` on time.monotonic().

    `tid` is a living thread of it, where the main one has ended: only through that one /proc still shows the memory.
    """
    if not program:
        return StackDump(trouble="py-spy is not installed: pip install py-spy")
    trouble = "py-spy had no time"
    for _ in range(PY_SPY_TRIES):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        limit_s = left_s * FIRST_TRY_PART if left_s * FIRST_TRY_PART >= FIRST_TRY_S else left_s
        command = [program, "dump", "--nonblocking", "--json", "--pid", str(tid or pid)]
        ran = run_program(command, time.monotonic() + limit_s)
        if ran.code is None:
            trouble = f"py-spy {ran.trouble}"
        elif ran.code == 0:
            try:
                return StackDump(
                    with_kernel_tids(from_py_spy(json.loads(ran.stdout)), pid, tid or pid)[:MAX_THREADS], "py-spy"
                )
            except (ValueError, KeyError, TypeError) as error:
                trouble = f"the output of py-spy cannot be decoded: {error}"
        else:
            trouble = py_spy_error_line(ran.stderr)
            if trouble == NOT_PERMITTED:
                break
    return StackDump(trouble=trouble)


def from_py_spy(data: object) -> tuple[ThreadStack, ...]:
    """`py-spy dump --json` -> threads. Raises ValueError, KeyError or TypeError for anything else."""
    if not isinstance(data, list) or not data:
        raise ValueError("no threads")
    threads = []
    for dumped in data:
        named = dumped["frames"][:MAX_FRAMES]
        frames = tuple(Frame(str(f["name"]), str(f["filename"]), int(f["line"])) for f in named)
        state = "active+gil" if dumped.get("owns_gil") else "active" if dumped.get("active") else "idle"
        tid = dumped.get("os_thread_id") or dumped["thread_id"]
        threads.append(ThreadStack(str(dumped.get("thread_name") or ""), str(tid), frames, state))
    return tuple(threads)


def by_faulthandler(pid: int, pidfd: int, path: FilePath | None, until: float) -> StackDump:
    """Have the process itself write its stacks to `path`; a stopped one, or one stuck in the kernel, cannot.

    `pidfd` refers to the process, so that no other one gets the signal should it end now.
    """
    if pidfd < 0 or path is None or not handles_signal(pid, STACKS_SIGNAL):
        return StackDump(trouble="the process does not handle the signal for faulthandler")
    until = min(until, time.monotonic() + FAULTHANDLER_TIMEOUT_S)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return StackDump(trouble=f"faulthandler has no file: {error.strerror}")
    try:
        before = size = os.fstat(fd).st_size
        signal.pidfd_send_signal(pidfd, STACKS_SIGNAL)
        while time.monotonic() < until:
            time.sleep(0.02)
            last, size = size, os.fstat(fd).st_size
            if size > before and size == last:
                break
        text = os.pread(fd, MAX_TEXT_BYTES, before).decode("utf-8", "replace")
    except OSError as error:
        return StackDump(trouble=f"the signal for faulthandler failed: {error.strerror}")
    finally:
        os.close(fd)
    threads = from_faulthandler(text)
    if not threads:
        return StackDump(trouble="faulthandler did not answer")
    return StackDump(with_kernel_tids(threads, pid, pid), "faulthandler")


def from_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """faulthandler's text -> threads. It begins with the newest thread and does not mark the main one."""
    stacks: list[tuple[str, str, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _FAULTHANDLER_THREAD_LINE.fullmatch(line):
            stacks.append((thread[2] or "", f"0x{thread[1].lstrip('0')}", []))
        elif stacks and (frame := _FAULTHANDLER_FRAME_LINE.fullmatch(line)):
            stacks[-1][2].append(Frame(frame[3], frame[1], int(frame[2]) if frame[2].isdecimal() else 0))
    threads = [ThreadStack(name, tid, tuple(frames)) for name, tid, frames in reversed(stacks)]
    return tuple(sorted(threads, key=lambda t: not (t.frames and t.frames[-1].function in _MAIN_OUTERMOST_FUNCTIONS)))


def with_kernel_tids(threads: Sequence[ThreadStack], pid: int, living_tid: int) -> tuple[ThreadStack, ...]:
    """The threads with the kernel's ids in place of glibc's, the main one first.

    faulthandler knows glibc's only; so does py-spy before Python 3.11, since it does not block.
    """
    tids = {str(tid) for tid in procfs.tids(pid)}

    def kernel_tid(known: str) -> str:
        if known in tids:
            return known
        try:
            with open(f"/proc/{living_tid}/mem", "rb", buffering=0) as memory:
                read = os.pread(memory.fileno(), 4, int(known, 0) + TID_OFFSET)
        except (OSError, OverflowError, ValueError):
            return known
        tid = str(int.from_bytes(read, sys.byteorder))
        return tid if tid in tids else known

    numbered = [replace(thread, tid=kernel_tid(thread.tid)) for thread in threads]
    return tuple(sorted(numbered, key=lambda thread: (thread.tid != str(pid), thread.name != "MainThread")))


def handles_signal(pid: int, signum: int) -> bool:
    """True if the process has a handler for the signal: without one the signal would end it."""
    for line in procfs.read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def py_spy_error_line(output: str) -> str:
    """py-spy's error output in one line."""
    if "permission denied" in output.lower():
        return NOT_PERMITTED
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    causes = [line.partition(": ")[2] for line in lines if re.match(r"\d+: ", line)]
    return ": ".join(["py-spy", *(errors[:1] or lines[:1] or ["it failed without a message"]), *causes[-1:]])


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Without a `code` the program did not end in time, or could not be started; `trouble` says which."""

    code: int | None
    stdout: bytes = b""
    stderr: str = ""
    trouble: str = ""


def run_program(command: Sequence[str], until: float) -> ProgramResult:
    """Run it until `until` on time.monotonic(). `subprocess.run` waits without bound for a killed program, and one that
    hangs in the kernel does not die: here it is left behind, in the helper's session, which is killed as a whole."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "RUST_BACKTRACE": "0"},  # only the messages of its errors are used
        )
    except OSError as error:
        return ProgramResult(None, trouble=f"cannot be started: {error.strerror or error}")
    try:
        stdout, stderr = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return ProgramResult(None, trouble=f"did not answer within {time.monotonic() - began:.1f} s")
    return ProgramResult(process.returncode, stdout, stderr.decode("utf-8", "replace"))
