"""Processes that are killed at one of their system calls, by ptrace: before it, after it, or after half of a write.

A body runs in a fork and marks the beginning and the end of the part that counts by a signal, which only the tracer
sees. Calls of the thread that marks, and of threads that it starts, are counted per process. A killed process has done
exactly the calls before the point: one that is killed before a call has not made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

_CONT, _POKEUSER, _SYSCALL, _SEIZE, _SYSCALL_INFO = 7, 6, 24, 0x4206, 0x420E
_OPTIONS = 1 | 2 | 4 | 8 | 1 << 20  # SYSGOOD, FORK, VFORK, CLONE, EXITKILL
_WALL = 0x40000000
_ENTRY, _EXIT = 1, 2
_RDX = 12 * 8
Prefix = str | tuple[str, ...]
"""Of the paths of what counts as the directory."""
MARK = signal.SIGRTMIN + 7
CALLS = {
    1: "write", 2: "open", 3: "close", 18: "pwrite64", 20: "writev", 40: "sendfile", 74: "fsync", 75: "fdatasync",
    76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink",
    257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat", 285: "fallocate", 296: "pwritev",
    316: "renameat2", 326: "copy_file_range",
}  # fmt: skip
"""The calls of x86_64 that change files or make them durable. The others are counted by their number."""
_PATHS = {
    "open": (None, 0), "creat": (None, 0), "openat": (0, 1), "mkdir": (None, 0), "mkdirat": (0, 1), "rmdir": (None, 0),
    "unlink": (None, 0), "unlinkat": (0, 1), "truncate": (None, 0), "rename": (None, 0, None, 1),
    "renameat": (0, 1, 2, 3), "renameat2": (0, 1, 2, 3), "link": (None, 0, None, 1), "linkat": (0, 1, 2, 3),
}  # fmt: skip
"""The arguments that are a directory's descriptor and a path, one pair or two."""
_BY_DESCRIPTOR = ("write", "pwrite64", "writev", "pwritev", "fsync", "fdatasync", "ftruncate", "fallocate", "close")
_WRITES = ("write", "pwrite64")
_LIMIT_S = 60

supported = sys.platform == "linux" and os.uname().machine == "x86_64"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@dataclass(frozen=True)
class Point:
    """A place in the calls of one process: `when` is "before", "after" or "half"."""

    process: int
    call: int
    when: str


@dataclass
class Call:
    """One system call of the part that counts. `result` is None if it was not made."""

    process: int
    number: int
    paths: tuple[str, ...] = ()
    size: int = 0
    flags: int = 0
    is_new: bool = False  #: the first path was not there before
    result: int | None = None

    @property
    def name(self) -> str:
        return CALLS.get(self.number, f"call {self.number}")

    def changes(self, directory: Prefix) -> bool:
        """It may change what is there."""
        is_open = self.name in ("open", "openat")
        return (
            self.name in CALLS.values()
            and self.name not in ("close", "fsync", "fdatasync")
            and any(path.startswith(directory) for path in self.paths)
            and not (is_open and not self.flags & (os.O_CREAT | os.O_TRUNC))
        )

    def is_write(self, directory: Prefix) -> bool:
        return self.name in _WRITES and self.size > 1 and self.paths[0].startswith(directory)


@dataclass
class Trace:
    """One run."""

    calls: list[Call] = field(default_factory=list)
    fired: bool = False
    codes: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  #: the text that each process has told before its end

    changes: list[Call] = field(default_factory=list)
    """Calls that may have changed the directory, in the order in which they were done."""

    def points(self, directory: Prefix) -> list[Point]:
        """All points of a run that was not killed."""
        found, counted = [], dict.fromkeys(range(len(self.codes)), 0)
        for call in self.calls:
            counted[call.process] += 1
            whens = ["before", "half", "after"] if call.is_write(directory) else ["before", "after"]
            found += [Point(call.process, counted[call.process], when) for when in whens]
        return found


def mark() -> None:
    """The part that counts begins, or ends."""
    signal.raise_signal(MARK)


def fork(body: Callable[[Callable[[str], None]], None], waits: bool = False) -> tuple[int, int, int]:
    """Run `body(tell)` in a child; returns its pid, the pipe of what it tells, and one that lets it go if it waits."""
    told, tells = os.pipe()
    goes, go = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        os.close(tells)
        os.close(goes)
        return pid, told, go
    code = 9
    try:
        os.close(told)
        os.close(go)
        if waits:
            os.read(goes, 1)
        body(lambda text: os.write(tells, text.encode()) and None)
        code = 0
    except BaseException:  # noqa: BLE001 - as Python at the top of a script
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run(bodies: Sequence[Callable[[Callable[[str], None]], None]]) -> list[str]:
    """Run processes to their end, untraced; returns what they told. Raises AssertionError if one fails."""
    children = [fork(body) for body in bodies]
    told = [_read_all(pipe, go) for _, pipe, go in children]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _, _ in children]
    assert codes == [0] * len(codes), (codes, told)
    return told


def trace(
    bodies: Sequence[Callable[[Callable[[str], None]], None]],
    directory: Prefix,
    point: Point | None = None,
    on_change: Callable[[Call | None], None] = lambda call: None,
    done: Trace | None = None,
) -> Trace:
    """Run processes call by call, and kill them all where one of them comes to the point.

    Calls that change the directory are made one after the other. After each of them, and at the first mark, `on_change`
    is called: what is there now is what a kill would leave, up to the next of these calls.
    """
    children = [fork(body, waits=True) for body in bodies]
    pids = [pid for pid, _, _ in children]
    done = done or Trace()
    done.codes = [0] * len(pids)
    tracer = _Tracer(pids, done, point, directory, on_change)
    try:
        with _time_limit():
            for pid, _, go in children:
                _ptrace(_SEIZE, pid, 0, _OPTIONS)
                os.write(go, b"x")
            tracer.run()
    finally:
        tracer.kill()
        tracer.reap()
        done.told = [_read_all(pipe, go) for _, pipe, go in children]
    return done


class _Tracer:
    def __init__(
        self,
        pids: list[int],
        done: Trace,
        point: Point | None,
        directory: Prefix,
        on_change: Callable[[Call | None], None],
    ) -> None:
        self._pids, self._done, self._point = pids, done, point
        self._directory, self._on_change = directory, on_change
        self._changing: int | None = None
        """The thread whose call may change the directory."""
        self._held: list[int] = []
        """Threads that wait for that call before they make one of this kind."""
        self._process = {pid: number for number, pid in enumerate(pids)}
        """By thread."""
        self._alive = set(pids)
        self._counted = [0] * len(pids)
        self._marks = [0] * len(pids)
        self._counting: set[int] = set()
        """Threads whose calls are counted."""
        self._current: dict[int, Call] = {}
        self._half: set[int] = set()

    def kill(self) -> None:
        for pid in self._pids:
            if pid in self._alive:
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        while self._alive:
            self._turn()

    def run(self) -> None:
        while self._alive and not self._done.fired:
            self._turn()

    def _turn(self) -> None:
        thread, status = os.waitpid(-1, _WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            self._process.setdefault(thread, -1)
            if thread in self._alive:
                self._alive.discard(thread)
                self._done.codes[self._process[thread]] = os.waitstatus_to_exitcode(status)
            return
        if self._done.fired:  # it has been killed
            return
        number, event = os.WSTOPSIG(status), status >> 16
        process = self._process_of(thread)
        deliver = 0
        if number == signal.SIGTRAP | 0x80:
            self._at_call(thread, process)
        elif number == MARK and not event:
            self._marks[process] += 1
            if self._marks[process] == 1:
                if not self._counting:
                    self._on_change(None)
                self._counting.add(thread)
            else:
                self._counting -= {each for each, owner in self._process.items() if owner == process}
        elif event in (1, 2, 3):  # a thread or a process that this one starts
            started = ctypes.c_ulong()
            _ptrace(0x4201, thread, 0, ctypes.addressof(started))
            self._process[started.value] = process
            if thread in self._counting:
                self._counting.add(started.value)
        elif not event and number != signal.SIGTRAP:
            deliver = number
        if not self._done.fired and thread not in self._held:
            with contextlib.suppress(ProcessLookupError):
                _ptrace(_SYSCALL if thread in self._counting else _CONT, thread, 0, deliver)

    def _process_of(self, thread: int) -> int:
        """A new thread may stop before the event that announces it."""
        if thread not in self._process:
            group = re.search(r"Tgid:\s*(\d+)", Path(f"/proc/{thread}/status").read_text())
            assert group is not None
            self._process[thread] = self._process.get(int(group[1]), -1)
            if self._marks[self._process[thread]] == 1:
                self._counting.add(thread)
        return self._process[thread]

    def _at_call(self, thread: int, process: int) -> None:
        if thread not in self._counting:
            return
        info = ctypes.create_string_buffer(128)
        _ptrace(_SYSCALL_INFO, thread, len(info), ctypes.addressof(info))
        if info.raw[0] == _ENTRY:
            number, *arguments = struct.unpack_from("7Q", info.raw, 24)
            call = self._current[thread] = _call(process, thread, number, arguments)
            self._counted[process] += 1
            self._done.calls.append(call)
            where = self._point
            if call.changes(self._directory):
                if self._changing is None:
                    self._changing = thread
                else:
                    self._held.append(thread)
            if where is None or (where.process, where.call) != (process, self._counted[process]):
                return
            if where.when == "before":
                self._fire()
            elif where.when == "half" and call.name in _WRITES and call.size > 1:
                half = call.size // 2
                _ptrace(_POKEUSER, thread, _RDX, half & ~4095 if half > 4096 else half)
                self._half.add(thread)
            elif where.when == "after":
                self._half.add(thread)
        elif info.raw[0] == _EXIT and thread in self._current:
            call = self._current.pop(thread)
            call.result = struct.unpack_from("q", info.raw, 24)[0]
            if thread == self._changing:
                self._done.changes.append(call)
                self._on_change(call)
                self._changing = self._held.pop(0) if self._held else None
                if self._changing is not None:
                    _ptrace(_SYSCALL, self._changing, 0, 0)
            if thread in self._half:
                self._fire()

    def _fire(self) -> None:
        self.kill()
        self._done.fired = True


def _call(process: int, thread: int, number: int, arguments: list[int]) -> Call:
    call = Call(process, number)
    if pairs := _PATHS.get(call.name):
        call.paths = tuple(
            _path(thread, None if pairs[at] is None else arguments[pairs[at] or 0], arguments[pairs[at + 1] or 0])
            for at in range(0, len(pairs), 2)
        )
        call.flags = arguments[{"open": 1, "openat": 2}.get(call.name, 0)]
        call.is_new = not os.path.lexists(call.paths[0])
    elif call.name in _BY_DESCRIPTOR:
        call.paths = (_descriptor(thread, arguments[0]),)
    if call.name in _WRITES:
        call.size = arguments[2]
    return call


def _descriptor(thread: int, fd: int) -> str:
    try:
        return os.readlink(f"/proc/{thread}/fd/{fd & 0xFFFFFFFF}")
    except OSError:
        return ""


def _path(thread: int, directory: int | None, address: int) -> str:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        data = b""
        while b"\0" not in data and len(data) < 4096:
            data += os.pread(memory.fileno(), 4096 - (address + len(data)) % 4096, address + len(data))
    name = data.partition(b"\0")[0].decode(errors="replace")
    if name.startswith("/"):
        return name
    at_cwd = directory is None or directory & 0xFFFFFFFF == 0xFFFFFF9C  # AT_FDCWD
    base = os.readlink(f"/proc/{thread}/cwd") if at_cwd else _descriptor(thread, directory or 0)
    return f"{base}/{name}"


def _ptrace(request: int, thread: int, address: int, data: int) -> None:
    if _libc.ptrace(request, thread, address, data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request} of {thread}")


def _read_all(pipe: int, go: int) -> str:
    os.close(go)
    with open(pipe, "rb") as file:
        return file.read().decode()


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def raise_timeout(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end within {_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
