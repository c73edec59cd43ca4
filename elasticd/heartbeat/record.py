"""The heartbeat of a worker: 16 KiB of memory that it shares with its agent.

The agent creates the file before the worker starts; the worker maps it and writes with plain stores, so a heartbeat
costs well under a microsecond and no system call. The agent reads it with `pread`, never through a map of its own: a
worker that truncates the file can then only make a read fail (WireError), not kill the agent by SIGBUS. Ages are
measured on CLOCK_MONOTONIC, which both processes share; no wall clock appears here. The launcher also loads this file
by path, in environments without elasticd: it imports no torch, and of elasticd only what the launcher loads with it.

Layout 1.5, little-endian, offsets in bytes. A word is stored whole; the words marked * belong together
and are guarded by `seq`; `memory_order` says why that is enough where stores are seen in another order, as on ARM.

    0     8s   magic "ELASTICD"          written once, by the agent
    8     u32  major, 12 u32 minor       another major is refused; a newer minor only adds fields
    16    u64  request                   from the agent; low byte: 0 nothing, 1 stop, 2 pause; the other bits may
                                         number requests: another number is another request
    24    u64  dump_requested            from the agent to the background thread: another number is another request for
                                         a dump of PyTorch's flight recorder
    32    i32  wait_rank *               the first rank that the session call waits for, -1 unknown
    36    u32  wait_count *              how many ranks it waits for, 0 unknown
    40    24s  wait_call *               the session call in which it has waited for other ranks for a second: "save()",
                                         UTF-8, zero-padded; empty while it waits in none
    64    u64  seq                       odd while the worker is writing the words marked *
    72    i64  step *                    steps of this process (hook) or of the job (session)
    80    u64  progress_ns *             CLOCK_MONOTONIC of the last progress: a step, or a change of phase
    88    u64  first_step_ns *           CLOCK_MONOTONIC of this process's first step, 0 before
    96    u64  started_ns                CLOCK_MONOTONIC of the first map, 0 before
    104   u32  phase *                   see Phase
    108   u32  source *                  see StepSource: what counts the steps
    112   64s  barrier *                 name of the barrier it waits at, UTF-8, zero-padded
    176   u64  barrier_ms *              the timeout that the script gave this barrier, 0 if none
    184   u64  pid                       the process that maps this file, in its own process namespace, 0 unknown
    192   i64  collectives               issued by the default process group, -1 while there is none; this word,
                                         alive_ticks, wait_ticks and timeout_ms are a background thread's (thread.py)
    200   u64  alive_ticks               counts tenths of a second in which that thread gets the GIL, 0 while there is
                                         no such thread
    208   i64  collectives_per_step *    issued during the last finished step, -1 unknown
    216   u64  wait_ticks                those that saw the rank wait for others: in torch.distributed, or
                                         after all collectives of a usual step had been issued
    224   u64  timeout_ms                the longest timeout of the process groups, 0 unknown
    232   i64  collectives_at_step *     issued when the last step was finished, -1 unknown
    240   u64  dump_done                 the last dump_requested that was answered, even if there was nothing to write
    248   u64  moved_ticks               ticks that saw the main thread's Python at another place than the tick before
    256   u32  length of the exit report, written after it; 0 = none
    260        exit report: UTF-8 JSON {"kind", "type", "message", "traceback", "code", "bases"}
    16168 u64  the timeout (ms) that the script gave the collective it waits in, or that collective's group; 0 none
    16176 u64  odd while the background thread is writing what follows
    16184 u64  CLOCK_MONOTONIC of the reading of NCCL's recorder that follows, 0 never; outdated by later progress
    16192      8 NCCL groups, u64 group (the same on all of its ranks, 0 none), i64 enqueued, i64 completed: the numbers
               of its last collectives, both -1 for a group of which no recorder has them
    16384      end

1.4 had nothing at 16168: a longer exit report has overwritten it, and is read as before. 1.3 had nothing between 32
and 64, and exit reports up to the end: a longer one has overwritten the groups, and is read as before. 1.2 had nothing
at 248, 1.1 neither between 176 and 192, 1.0 neither at 24 and between 208 and 256, and left those words zero; their
readers skip them. An older writer leaves them as the agent made them, unknown.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticd.errors import WireError
from elasticd.heartbeat.exit_report import ExitReport, decode, encode
from elasticd.memory_order import order_stores, register_writer

INIT_PROCESS_GROUP_BARRIER = "init_process_group"
"""The name of the barrier in phase STARTING: torch's function in which all ranks wait for each other."""
PAUSE_BARRIER = "pause"
"""The name of the barrier at which a paused rank waits."""
FILE_BYTES = 16 * 1024
MAGIC = b"ELASTICD"
MAJOR, MINOR = 1, 5
STOP, PAUSE = 1, 2
"""An agent's requests; a worker without PAUSE ignores it."""
REQUEST_KIND_MASK = 0xFF
"""The bits of a request that hold its kind. The others may number it."""
ALL_STAY_FLAG = 1 << 62
"""A bit of PAUSE: no node leaves, so processes that can stay need no checkpoint."""
STACKS_SIGNAL = signal.SIGRTMAX - 3
"""Makes a worker that catches it (SigCgt in /proc/PID/status) write the stacks of its threads into ELASTICD_STACKS.

Scripts use SIGUSR1 and SIGUSR2 (Slurm's warnings, libraries' dumps) and, if any, the first real-time signals; Valgrind
has the last one to itself.
"""

# Indices into the map seen as 64-bit words (Q, q) and as 32-bit words (I).
_REQUEST, _DUMP_REQUESTED, _SEQ, _STEP, _PROGRESS, _FIRST_STEP, _STARTED = 2, 3, 8, 9, 10, 11, 12
_PHASE, _SOURCE, _STATE = 26, 27, 13  # _STATE is both, as one word of 64 bits
_BARRIER_MS, _PID = 22, 23
_COLLECTIVES, _ALIVE, _PER_STEP, _WAITS, _TIMEOUT, _AT_STEP, _DUMP_DONE, _MOVED = 24, 25, 26, 27, 28, 29, 30, 31
_UNKNOWN, _MAX_MS = -1, 1 << 40
_MAX_STEPS_BEFORE_SESSION = 4
"""Optimizers of a script with a Session may step this often before the first `session.step()`."""
_BARRIER, _BARRIER_BYTES, _REPORT_OFFSET = 112, 64, 256
_WAIT_CALL_BYTES = 24
_WAIT_STRUCT = struct.Struct(f"<iI{_WAIT_CALL_BYTES}s")
_WAIT_OFFSET = 32
MAX_GROUPS = 8
_GROUPS_STRUCT = struct.Struct("<QQ" + MAX_GROUPS * "Qqq")
_GROUPS_OFFSET = FILE_BYTES - _GROUPS_STRUCT.size
_GROUPS_SEQ_INDEX = _GROUPS_OFFSET // 8
_WAIT_TIMEOUT_OFFSET = _GROUPS_OFFSET - 8
_MAX_REPORT_BYTES = _WAIT_TIMEOUT_OFFSET - _REPORT_OFFSET - 4
_PYBUF_WRITE = 0x200  # from CPython's stable ABI
_MAP_FIXED = 0x10  # of linux/mman.h
_HEADER_STRUCT = struct.Struct("<8sIIQ8xiI24s QqQQQII64sQQ qQqQQqQQ I")
_UNCOUNTED = (_UNKNOWN, 0, _UNKNOWN, 0, 0, _UNKNOWN, 0, 0)
# A writer killed between two stores leaves `seq` odd for good: after this many reads the words are taken as they are.
# The later reads sleep, so that a writer that only lost its core gets it back.
_READS, _QUICK_READS = 16, 4


GroupCounts = tuple[tuple[int, int, int], ...]
"""(group, enqueued, completed) of each NCCL group of a process: the numbers of its last collectives, 0 for none."""


class Phase(enum.IntEnum):
    """The script's phase, as far as the heartbeat can know."""

    STARTING = 0
    STEP = 1
    BARRIER = 2
    CHECKPOINT = 3
    EVAL = 4
    EXIT = 5


class StepSource(enum.IntEnum):
    """The counter of steps: none yet, torch's optimizer hook, or the script through its Session."""

    NONE = 0
    HOOK = 1
    SESSION = 2


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One reading of a heartbeat file; the layout above says what each field means.

    Times are CLOCK_MONOTONIC nanoseconds, 0 when it has not happened.
    """

    step: int = 0
    progress_ns: int = 0
    first_step_ns: int = 0
    started_ns: int = 0
    phase: Phase = Phase.STARTING
    source: StepSource = StepSource.NONE
    collectives: int = _UNKNOWN
    alive_ticks: int = 0
    barrier: str = ""
    request: int = 0
    exit_report: ExitReport | None = None
    collectives_per_step: int = _UNKNOWN
    wait_ticks: int = 0
    collective_timeout_s: float = 0.0
    collectives_at_step: int = _UNKNOWN
    dump_done: int = 0
    barrier_s: float = 0.0
    pid: int = 0
    moved_ticks: int = 0
    wait_call: str = ""
    wait_rank: int = -1
    wait_count: int = 0
    groups: GroupCounts = ()
    wait_timeout_s: float = 0.0


def create(path: str | os.PathLike[str]) -> None:
    """Create the heartbeat file, 0600, all of it allocated: a store into a hole of a full tmpfs would be SIGBUS."""
    content = _HEADER_STRUCT.pack(MAGIC, MAJOR, MINOR, 0, -1, 0, b"", *([0] * 7), b"", 0, 0, *_UNCOUNTED, 0).ljust(
        FILE_BYTES, b"\0"
    )
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, content) != FILE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:  # a write's does not say where
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        os.close(fd)


class HeartbeatWriter:
    """The worker's side. Holds the map, no file descriptor. Forked processes write into a private copy."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            _check_header(os.pread(fd, _HEADER_STRUCT.size, 0), status.st_size, path)
            self._set_views(_map_file(fd, FILE_BYTES))
        finally:
            os.close(fd)
        register_writer()
        self._file = status.st_ino, os.path.basename(path)
        os.register_at_fork(after_in_child=self._detach)
        self._write_start()

    def switch_file(self, path: str | os.PathLike[str]) -> None:
        """Continue in another file: this process stays, and a round has files of its own.

        The new file takes the place of the old one at every address where this process has that, so the writers of the
        launcher and of the script follow at once, with all who hold parts of them. Raises OSError, WireError.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            _check_header(os.pread(fd, _HEADER_STRUCT.size, 0), status.st_size, path)
            for address in _mapped_addresses(self._file):
                _map_file(fd, FILE_BYTES, address)
        finally:
            os.close(fd)
        self._file = status.st_ino, os.path.basename(path)
        self._write_start()

    def _write_start(self) -> None:
        self._words[_PID] = os.getpid()
        if not self._words[_STARTED]:
            self._words[_STARTED] = time.monotonic_ns()

    def _set_views(self, view: memoryview) -> None:
        self._bytes = view
        self._words = view.cast("Q")
        self._signed = view.cast("q")
        self._halves = view.cast("I")

    def _detach(self) -> None:
        self._set_views(memoryview(bytearray(FILE_BYTES)))

    def step(self, step: int, source: StepSource = StepSource.SESSION, issued: int = _UNKNOWN) -> None:
        """One more step is done; `step` is the count now, `issued` the default process group's collectives so far."""
        now = time.monotonic_ns()
        words, signed, halves = self._words, self._signed, self._halves
        # "| 1", not "+ 1": two threads writing at once must never leave the count odd for good.
        seq = words[_SEQ] | 1
        words[_SEQ] = seq
        signed[_STEP] = step
        words[_PROGRESS] = now
        before = signed[_AT_STEP]
        # Another group starts counting again; another source's last step was not this one's.
        known = 0 <= before <= issued and halves[_SOURCE] == source
        signed[_PER_STEP] = issued - before if known else _UNKNOWN
        signed[_AT_STEP] = issued
        if not words[_FIRST_STEP]:
            words[_FIRST_STEP] = now
        words[_STATE] = source << 32 | 1  # Phase.STEP, without the enum's look-up
        words[_SEQ] = seq + 1

    def use_session(self) -> None:
        """A Session counts the job's steps from now on; a process that has made steps already continues its count."""
        seq = self._words[_SEQ] | 1
        self._words[_SEQ] = seq
        if not self._words[_FIRST_STEP]:
            self._halves[_SOURCE] = StepSource.SESSION
        self._words[_SEQ] = seq + 1

    def make_step_hook(self, issued: Callable[[], int]) -> Callable[[int], None]:
        """A faster `step` for the optimizer hook: it writes only what changes, and nothing where a Session counts."""
        words, signed = self._words, self._signed
        clock, hooked, counts = time.monotonic_ns, StepSource.HOOK << 32 | Phase.STEP, True

        started = before_file = 0

        def in_this_file(count: int) -> int:
            """Steps since the file began: a process that stays has counted those of earlier rounds, too."""
            nonlocal started, before_file
            if started != words[_STARTED]:
                started, before_file = words[_STARTED], count - 1
            return count - before_file

        def forked() -> None:
            nonlocal words, signed
            words, signed = self._words, self._signed

        def step(count: int) -> None:
            nonlocal counts
            if words[_STATE] == hooked:
                number, now = issued(), clock()
                seq = words[_SEQ] | 1
                words[_SEQ] = seq
                signed[_STEP] = count
                words[_PROGRESS] = now
                before = signed[_AT_STEP]
                signed[_PER_STEP] = number - before if 0 <= before <= number else _UNKNOWN
                signed[_AT_STEP] = number
                words[_SEQ] = seq + 1
            elif words[_STATE] >> 32 != StepSource.SESSION or (
                not words[_FIRST_STEP] and in_this_file(count) > _MAX_STEPS_BEFORE_SESSION
            ):
                # The first step, or the phase changed meanwhile, or there is a Session whose step() is not called.
                self.step(count, StepSource.HOOK, issued())
            elif counts:  # a Session of layout 1.0 would leave the hook's last value here
                counts, signed[_PER_STEP] = False, _UNKNOWN

        os.register_at_fork(after_in_child=forked)  # after `_detach`: a child's steps stay in its private copy
        return step

    def tick(self, issued: int, timeout_ms: int, waits: bool = False, moved: bool = False, periods: int = 1) -> None:
        """The background thread got the GIL; `issued` and `timeout_ms` are the default process group's.

        `waits`: the training thread waits for others; `moved`: it is at another place than at the tick before, which
        was `periods` of the thread ago.
        """
        words, signed = self._words, self._signed
        words[_ALIVE] += periods
        words[_MOVED] += moved
        signed[_COLLECTIVES] = issued
        words[_TIMEOUT] = timeout_ms
        if issued < signed[_AT_STEP]:  # the group is gone, or another one counts
            signed[_PER_STEP] = signed[_AT_STEP] = _UNKNOWN
        elif waits or 0 < signed[_PER_STEP] <= issued - signed[_AT_STEP]:
            words[_WAITS] += periods

    def write_groups(self, groups: GroupCounts) -> None:
        """Write NCCL's counts of now; MAX_GROUPS at most. Called by the background thread."""
        seq = self._words[_GROUPS_SEQ_INDEX] | 1
        self._words[_GROUPS_SEQ_INDEX] = seq
        self._words[_GROUPS_SEQ_INDEX + 1] = time.monotonic_ns()
        unused = [0] * (3 * (MAX_GROUPS - len(groups)))
        for at, value in enumerate([number for counts in groups for number in counts] + unused, _GROUPS_SEQ_INDEX + 2):
            self._signed[at] = value
        self._words[_GROUPS_SEQ_INDEX] = seq + 1

    def write_wait_timeout(self, timeout_ms: int) -> None:
        """Write the timeout that the script gave the collective the main thread waits in; 0: none. Called by the
        background thread."""
        self._words[_WAIT_TIMEOUT_OFFSET // 8] = min(timeout_ms, _MAX_MS)

    def on_thread_stop(self) -> None:
        """The background thread has ended."""
        self._words[_ALIVE] = 0

    @property
    def dump_requested(self) -> int:
        """The number of the agent's last request for a dump of the flight recorder, 0 for none."""
        return self._words[_DUMP_REQUESTED]

    @property
    def dump_done(self) -> int:
        """The number of the last request that was answered."""
        return self._words[_DUMP_DONE]

    @dump_done.setter
    def dump_done(self, number: int) -> None:
        self._words[_DUMP_DONE] = number

    def set_phase(self, phase: Phase, barrier: str = "", barrier_s: float = 0.0) -> None:
        """Change the phase; `barrier` names where it waits (cut to 64 bytes), `barrier_s` is that barrier's timeout."""
        name = barrier.encode("utf-8", "replace")[:_BARRIER_BYTES].ljust(_BARRIER_BYTES, b"\0")
        seq = self._words[_SEQ] | 1
        self._words[_SEQ] = seq
        self._halves[_PHASE] = phase
        self._words[_PROGRESS] = time.monotonic_ns()
        self._bytes[_BARRIER : _BARRIER + _BARRIER_BYTES] = name
        self._words[_BARRIER_MS] = min(int(barrier_s * 1000), _MAX_MS)
        self._words[_SEQ] = seq + 1

    def set_wait(self, call: str = "", rank: int = -1, count: int = 0) -> None:
        """A session call waits for `count` other ranks, `rank` the first of them; "": it waits no more."""
        name = call.encode("utf-8", "replace")
        if len(name) > _WAIT_CALL_BYTES:
            end = "…)".encode()
            name = name[: _WAIT_CALL_BYTES - len(end)].decode("utf-8", "ignore").encode() + end
        seq = self._words[_SEQ] | 1
        self._words[_SEQ] = seq
        _WAIT_STRUCT.pack_into(self._bytes, _WAIT_OFFSET, rank, count, name)
        self._words[_SEQ] = seq + 1

    @property
    def progress_ns(self) -> int:
        """CLOCK_MONOTONIC of the last progress, 0 before."""
        return self._words[_PROGRESS]

    @property
    def current_phase(self) -> Phase:
        """The phase last written."""
        return Phase(self._halves[_PHASE])

    @property
    def request(self) -> int:
        """The agent's request: 0 nothing, STOP, PAUSE (perhaps numbered, see REQUEST_KIND_MASK)."""
        return self._words[_REQUEST]

    def write_exit_report(self, report: ExitReport) -> None:
        """Leave the report for the agent, cut to fit; the end of the traceback is kept."""
        data = encode(report, _MAX_REPORT_BYTES)
        self._halves[_REPORT_OFFSET // 4] = 0
        self._bytes[_REPORT_OFFSET + 4 : _REPORT_OFFSET + 4 + len(data)] = data
        self._halves[_REPORT_OFFSET // 4] = len(data)
        self.set_phase(Phase.EXIT)


class NullHeartbeat(HeartbeatWriter):
    """A heartbeat without a reader: for a script that no elasticd agent started."""

    def __init__(self) -> None:
        self._detach()

    def switch_file(self, path: str | os.PathLike[str]) -> None:
        pass


class HeartbeatReader:
    """The agent's side, and the next round's: read the heartbeat, write requests. Holds one descriptor; `close` it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check_header(os.pread(self._fd, _HEADER_STRUCT.size, 0), os.fstat(self._fd).st_size, path)
        except BaseException:
            self.close()
            raise

    def read(self) -> Heartbeat:
        """The heartbeat as it is now, read again while the writer is between two stores; WireError for garbage."""
        raw = b""
        for attempt in range(_READS):
            raw = os.pread(self._fd, _HEADER_STRUCT.size, 0)
            order_stores()
            is_whole = len(raw) == _HEADER_STRUCT.size and not raw[_SEQ * 8] & 1
            if is_whole and raw == os.pread(self._fd, _HEADER_STRUCT.size, 0):
                break
            time.sleep(0 if attempt < _QUICK_READS else 0.001)
        return self._decode(raw)

    def _decode(self, raw: bytes) -> Heartbeat:
        _check_header(raw, FILE_BYTES, self._path)
        fields = _HEADER_STRUCT.unpack(raw)[2:]
        minor, request, *wait, _, step, progress, first, started, phase, source, name, barrier_ms, pid = fields[:15]
        *counts, length = fields[15:]
        wait_rank, wait_count, wait_call = wait
        issued, alive, per_step, waits, timeout_ms, at_step, dump_done, moved = counts if minor else _UNCOUNTED
        if minor > MINOR:
            # A newer layout may have more phases and sources; it is enough to know that the worker runs.
            phase = phase if phase in tuple(Phase) else Phase.STEP
            source = source if source in tuple(StepSource) else StepSource.SESSION
        try:
            known_phase, known_source = Phase(phase), StepSource(source)
        except ValueError as error:
            raise WireError(f"heartbeat file {os.fspath(self._path)}: {error} in layout {MAJOR}.{minor}") from error
        barrier = name.rstrip(b"\0").decode("utf-8", "replace")
        report = self._read_exit_report(length) if length else None
        seen = (step, progress, first, started, known_phase, known_source, issued, alive, barrier, request, report)
        call = wait_call.rstrip(b"\0").decode("utf-8", "replace")
        waiting: tuple[str, int, int] = (call, wait_rank, wait_count) if call else ("", -1, 0)
        counted = (per_step, waits, timeout_ms / 1000, at_step, dump_done, barrier_ms / 1000, pid, moved)
        groups = self._read_groups(progress) if minor >= 4 and length <= _MAX_REPORT_BYTES else ()
        timeout_ms = self._read_wait_timeout_ms() if minor >= 5 and length <= _MAX_REPORT_BYTES else 0
        return Heartbeat(*seen, *counted, *waiting, groups, timeout_ms / 1000)

    def _read_wait_timeout_ms(self) -> int:
        return int.from_bytes(os.pread(self._fd, 8, _WAIT_TIMEOUT_OFFSET), "little")

    def _read_groups(self, progress_ns: int) -> GroupCounts:
        """Read after the last progress, else empty; also while they are being written: the next reading has them."""
        raw = os.pread(self._fd, _GROUPS_STRUCT.size, _GROUPS_OFFSET)
        order_stores()
        if (
            len(raw) < _GROUPS_STRUCT.size
            or raw[0] & 1
            or raw != os.pread(self._fd, _GROUPS_STRUCT.size, _GROUPS_OFFSET)
        ):
            return ()
        _, read_ns, *numbers = _GROUPS_STRUCT.unpack(raw)
        counts = [(numbers[at], numbers[at + 1], numbers[at + 2]) for at in range(0, len(numbers), 3)]
        return tuple(group for group in counts if group[0]) if read_ns > progress_ns else ()

    def _read_exit_report(self, length: int) -> ExitReport:
        where = f"heartbeat file {os.fspath(self._path)}"
        if length > FILE_BYTES - _REPORT_OFFSET - 4:
            raise WireError(f"{where}: an exit report of {length} bytes does not fit")
        try:
            return decode(os.pread(self._fd, length, _REPORT_OFFSET + 4))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WireError(f"{where}: the exit report cannot be decoded: {error}") from error

    def write_request(self, request: int) -> None:
        """Write a request for the worker: STOP or PAUSE, or 0 to withdraw it."""
        os.pwrite(self._fd, struct.pack("<Q", request), _REQUEST * 8)

    def request_dump(self) -> int:
        """Request a dump of the flight recorder into ELASTICD_FLIGHT; `Heartbeat.dump_done` becomes the returned
        number.
        """
        (last,) = struct.unpack("<Q", os.pread(self._fd, 8, _DUMP_REQUESTED * 8).ljust(8, b"\0"))
        number = (int(last) + 1) % (1 << 64)
        os.pwrite(self._fd, struct.pack("<Q", number), _DUMP_REQUESTED * 8)
        return number

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> HeartbeatReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def from_environment() -> HeartbeatWriter:
    """The heartbeat that the agent made for this process (ELASTICD_HEARTBEAT), or one without a reader."""
    path = os.environ.get("ELASTICD_HEARTBEAT")
    return HeartbeatWriter(path) if path else NullHeartbeat()


def _mapped_addresses(file: tuple[int, str]) -> list[int]:
    """The addresses at which this process has mapped the file with this inode and name, also a deleted one."""
    inode, name = file
    addresses: list[int] = []
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            path = os.fsdecode(fields[5].strip()).removesuffix(" (deleted)") if len(fields) == 6 else ""
            if int(fields[4]) == inode and os.path.basename(path) == name:
                addresses.append(int(fields[0].split(b"-")[0], 16))
    return addresses


def _map_file(fd: int, size: int, at: int | None = None) -> memoryview:
    """The first `size` bytes of the file, shared, without the descriptor that Python's mmap keeps before 3.13.

    `at`: in place of what is mapped there.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | (0 if at is None else _MAP_FIXED)
    address = libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap of the heartbeat file failed")
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view: memoryview = prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))(address, size, _PYBUF_WRITE)
    return view


def _check_header(raw: bytes, size: int, path: str | os.PathLike[str]) -> None:
    where = f"heartbeat file {os.fspath(path)}"
    if size < FILE_BYTES or len(raw) < _HEADER_STRUCT.size:
        raise WireError(f"{where}: {min(size, len(raw))} bytes, a heartbeat file has {FILE_BYTES}")
    magic, major, minor = struct.unpack_from("<8sII", raw)
    if magic != MAGIC:
        raise WireError(f"{where}: it begins with {magic!r}, not with {MAGIC!r}")
    if major != MAJOR:
        raise WireError(
            f"{where}: layout {major}.{minor}, this elasticd reads {MAJOR}.x; "
            "run the same elasticd in the agent and the worker"
        )
