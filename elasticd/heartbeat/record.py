"""What a worker last said of itself, in 16 KiB of memory it shares with its agent.

The agent creates the file before the worker starts; the worker maps it and writes with plain stores, so a beat costs
well under a microsecond and no system call. The agent reads it with `pread`, never through a map of its own: a worker
that truncates the file can then only make a read fail (WireError), not kill the agent by SIGBUS. Ages are taken on
CLOCK_MONOTONIC, which both processes share; no wall clock appears here. This module never waits for anybody and
never imports torch. It is also loaded by file, where elasticd is not installed: with what it imports.

Layout 1.3, little-endian, offsets in bytes. A word is stored whole; the words marked * belong together
and are guarded by `seq`.

    0     8s   magic "ELASTICD"          written once, by the agent
    8     u32  major, 12 u32 minor       another major is refused; a newer minor only adds fields
    16    u64  request                   the agent's word to the worker; low byte: 0 nothing, 1 please stop, 2 please
                                         hold; the rest may number holds: another number is another request
    24    u64  dump_wanted               the agent's word to the background thread: another number is another dump
                                         of PyTorch's flight recorder that it wants
    64    u64  seq                       odd while the worker is writing the words marked *
    72    i64  step *                    steps of this process (hook) or of the job (session)
    80    u64  progress_ns *             CLOCK_MONOTONIC of the last progress: a step, or a change of phase
    88    u64  first_step_ns *           CLOCK_MONOTONIC of this process's first step, 0 before
    96    u64  started_ns                CLOCK_MONOTONIC of the first map, 0 before
    104   u32  phase *                   see Phase
    108   u32  source *                  see Source: who counts the steps
    112   64s  barrier *                 name of the barrier it waits at, UTF-8, zero-padded
    176   u64  barrier_ms *              the timeout that the script gave this barrier, 0 if none
    184   u64  pid                       the process that maps this file, in its own process namespace, 0 unknown
    192   i64  collectives               issued by the default process group, -1 while there is none; this word, alive,
                                         waited and timeout_ms are a background thread's (thread.py)
    200   u64  alive                     counts while that thread gets the GIL, 0 while there is no such thread
    208   i64  usual *                   collectives issued during the last finished step, -1 unknown
    216   u64  waited                    pulses that saw the rank wait for others: in torch.distributed, or
                                         after the usual collectives of a step had all been issued
    224   u64  timeout_ms                the default process group's own timeout, 0 unknown
    232   i64  issued_at_step *          collectives issued when the last step was finished, -1 unknown
    240   u64  dumped                    the dump_wanted that has been seen to, even if there was nothing to write
    248   u64  moved                     pulses that saw the main thread's Python elsewhere than the one before did
    256   u32  length of the last words, written after them; 0 = none
    260        last words: UTF-8 JSON {"kind", "type", "message", "traceback", "code", "bases"}
    16384      end

1.2 had nothing at 248, 1.1 neither between 176 and 192, 1.0 neither at 24 and between 208 and 256, and left those
words zero; their readers skip them. An older writer leaves them as the agent made them, unknown.
"""

from __future__ import annotations

import enum
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticd.errors import WireError
from elasticd.heartbeat.exit_report import ExitReport, decode, encode
from elasticd.heartbeat.shared_memory import map_file

INIT_PROCESS_GROUP = "init_process_group"
"""The name of the barrier in phase STARTING: torch's function in which all ranks wait for each other."""
SIZE = 16 * 1024
MAGIC = b"ELASTICD"
MAJOR, MINOR = 1, 3
STOP, PAUSE = 1, 2
"""What an agent may ask for; a worker that does not know HOLD takes it for nothing."""
REQUEST_KIND = 0xFF
"""The bits of a request that say which it is. The others may number it."""
STACKS_SIGNAL = signal.SIGRTMAX - 3
"""Has a worker write the stacks of its threads into ELASTICD_STACKS, if it catches it (SigCgt in /proc/PID/status).

Scripts use SIGUSR1 and SIGUSR2 (Slurm's warnings, libraries' dumps) and, if any, the first real-time signals; Valgrind
has the last one to itself.
"""

# Indices into the map seen as 64-bit words (Q, q) and as 32-bit words (I).
_REQUEST, _DUMP_WANTED, _SEQ, _STEP, _PROGRESS, _FIRST_STEP, _STARTED = 2, 3, 8, 9, 10, 11, 12
_PHASE, _SOURCE, _STATE = 26, 27, 13  # the last one, of 64 bits, is both of them
_BARRIER_MS, _PID = 22, 23
_COLLECTIVES, _ALIVE, _USUAL, _WAITED, _TIMEOUT, _ISSUED_AT_STEP, _DUMPED, _MOVED = 24, 25, 26, 27, 28, 29, 30, 31
_UNKNOWN, _MOST_MS = -1, 1 << 40
_SESSIONS_FIRST = 4
"""A script with a Session may make so many optimizers step before it calls `session.step()` for the first time."""
_BARRIER, _BARRIER_BYTES, _WORDS_AT = 112, 64, 256
_WORDS_ROOM = SIZE - _WORDS_AT - 4
_HEADER = struct.Struct("<8sIIQ40x QqQQQII64sQQ qQqQQqQQ I")
_NOTHING_ISSUED = (_UNKNOWN, 0, _UNKNOWN, 0, 0, _UNKNOWN, 0, 0)
# A writer killed between two stores leaves `seq` odd for good: after this many looks the words are taken as they are.
# One that has only lost its core to somebody else gets it back if the later looks make room.
_LOOKS, _HASTY_LOOKS = 16, 4


class Phase(enum.IntEnum):
    """Where the script is, as far as the beat can know."""

    STARTING = 0
    STEP = 1
    BARRIER = 2
    CHECKPOINT = 3
    EVAL = 4
    EXIT = 5


class Source(enum.IntEnum):
    """Who counts the steps: nobody yet, torch's optimizer hook, or the script through its Session."""

    NONE = 0
    HOOK = 1
    SESSION = 2


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One reading of a beat file. Times are CLOCK_MONOTONIC nanoseconds, 0 when the thing has not happened.

    `collectives` were issued by the default process group, `usual` of them during the last finished step and
    `issued_at_step` until its end, -1: unknown. `timeout_s` is that group's own, 0: unknown. `alive` counts while the
    background thread gets the GIL, 0: there is none; `waited` counts its pulses that saw the rank wait for
    others. `dumped` is the answer to `want_dump`. `barrier_s` is the timeout that the script gave the barrier it waits
    at, 0: none. `pid`: as the worker's own process namespace knows it. `moved`: pulses that saw the main thread move.
    """

    step: int = 0
    progress_ns: int = 0
    first_step_ns: int = 0
    started_ns: int = 0
    phase: Phase = Phase.STARTING
    source: Source = Source.NONE
    collectives: int = _UNKNOWN
    alive_ticks: int = 0
    barrier: str = ""
    request: int = 0
    exit_report: ExitReport | None = None
    collectives_per_step: int = _UNKNOWN
    wait_ticks: int = 0
    timeout_s: float = 0.0
    collectives_at_step: int = _UNKNOWN
    dump_done: int = 0
    barrier_s: float = 0.0
    pid: int = 0
    moved_ticks: int = 0


def create(path: str | os.PathLike[str]) -> None:
    """Make the beat file, 0600. Raises OSError, also if it exists.

    All of it is written, hence allocated: a store into a hole of a full tmpfs would be SIGBUS.
    """
    content = _HEADER.pack(MAGIC, MAJOR, MINOR, 0, *([0] * 7), b"", 0, 0, *_NOTHING_ISSUED, 0).ljust(SIZE, b"\0")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, content) != SIZE:
            raise OSError(f"beat file {os.fspath(path)}: short write")
    finally:
        os.close(fd)


class HeartbeatWriter:
    """The worker's side. Holds the map, no file descriptor. Processes the worker forks keep a copy that reaches nobody.

    Raises OSError when the file cannot be mapped and WireError when it is not a beat file of this layout.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check_header(os.pread(fd, _HEADER.size, 0), os.fstat(fd).st_size, path)
            self._view(map_file(fd, SIZE))
        finally:
            os.close(fd)
        os.register_at_fork(after_in_child=self._mute)
        self._words[_PID] = os.getpid()
        if not self._words[_STARTED]:
            self._words[_STARTED] = time.monotonic_ns()

    def _view(self, view: memoryview) -> None:
        self._bytes, self._words, self._signed, self._halves = view, view.cast("Q"), view.cast("q"), view.cast("I")

    def _mute(self) -> None:
        self._view(memoryview(bytearray(SIZE)))

    def step(self, step: int, source: Source = Source.SESSION, issued: int = _UNKNOWN) -> None:
        """One more step is done; `step` is the count now, `issued` what the default process group has issued so far."""
        now = time.monotonic_ns()
        words, signed, halves = self._words, self._signed, self._halves
        # "| 1", not "+ 1": two threads writing at once must never leave the count odd for good.
        seq = words[_SEQ] | 1
        words[_SEQ] = seq
        signed[_STEP] = step
        words[_PROGRESS] = now
        before = signed[_ISSUED_AT_STEP]
        # Another group counts anew; another source's last step was not this one's.
        known = 0 <= before <= issued and halves[_SOURCE] == source
        signed[_USUAL] = issued - before if known else _UNKNOWN
        signed[_ISSUED_AT_STEP] = issued
        if not words[_FIRST_STEP]:
            words[_FIRST_STEP] = now
        words[_STATE] = source << 32 | 1  # Phase.STEP, without the enum's look-up
        words[_SEQ] = seq + 1

    def use_session(self) -> None:
        """A Session is there, and counts the job's steps; a process that has made some already goes on by itself."""
        seq = self._words[_SEQ] | 1
        self._words[_SEQ] = seq
        if not self._words[_FIRST_STEP]:
            self._halves[_SOURCE] = Source.SESSION
        self._words[_SEQ] = seq + 1

    def hook_step(self, issued: Callable[[], int]) -> Callable[[int], None]:
        """`step` for the optimizer hook, quicker: it writes only what changes, and nothing where a Session counts."""
        words, signed = self._words, self._signed
        clock, hooked, counts = time.monotonic_ns, Source.HOOK << 32 | Phase.STEP, True

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
                before = signed[_ISSUED_AT_STEP]
                signed[_USUAL] = number - before if 0 <= before <= number else _UNKNOWN
                signed[_ISSUED_AT_STEP] = number
                words[_SEQ] = seq + 1
            elif words[_STATE] >> 32 != Source.SESSION or (not words[_FIRST_STEP] and count > _SESSIONS_FIRST):
                # The first one, or it has been somewhere else meanwhile, or there is a Session that hears of no steps.
                self.step(count, Source.HOOK, issued())
            elif counts:  # the Session may be of layout 1.0, and leave here what was usual before
                counts, signed[_USUAL] = False, _UNKNOWN

        os.register_at_fork(after_in_child=forked)  # after `_mute`: a child's steps reach nobody
        return step

    def tick(self, issued: int, timeout_ms: int, waits: bool = False, moved: bool = False) -> None:
        """The background thread got the GIL; `issued` and `timeout_ms` are the default process group's.

        `waits`: the training thread was seen to wait for others; `moved`: at another place than by the pulse before.
        """
        words, signed = self._words, self._signed
        words[_ALIVE] += 1
        words[_MOVED] += moved
        signed[_COLLECTIVES] = issued
        words[_TIMEOUT] = timeout_ms
        if issued < signed[_ISSUED_AT_STEP]:  # the group has gone, or another one counts
            signed[_USUAL] = signed[_ISSUED_AT_STEP] = _UNKNOWN
        elif waits or 0 < signed[_USUAL] <= issued - signed[_ISSUED_AT_STEP]:
            words[_WAITED] += 1

    def thread_stopped(self) -> None:
        """There is no background thread any more."""
        self._words[_ALIVE] = 0

    @property
    def dump_requested(self) -> int:
        """The number of the dump of the flight recorder that the agent wants, 0 for none."""
        return self._words[_DUMP_WANTED]

    @property
    def dump_done(self) -> int:
        """The number of the last one that was seen to."""
        return self._words[_DUMPED]

    @dump_done.setter
    def dump_done(self, number: int) -> None:
        self._words[_DUMPED] = number

    def set_phase(self, phase: Phase, barrier: str = "", barrier_s: float = 0.0) -> None:
        """The script is somewhere else now; `barrier` names where it waits (cut to 64 bytes), `barrier_s` at most."""
        name = barrier.encode("utf-8", "replace")[:_BARRIER_BYTES].ljust(_BARRIER_BYTES, b"\0")
        seq = self._words[_SEQ] | 1
        self._words[_SEQ] = seq
        self._halves[_PHASE] = phase
        self._words[_PROGRESS] = time.monotonic_ns()
        self._bytes[_BARRIER : _BARRIER + _BARRIER_BYTES] = name
        self._words[_BARRIER_MS] = min(int(barrier_s * 1000), _MOST_MS)
        self._words[_SEQ] = seq + 1

    @property
    def current_phase(self) -> Phase:
        """The phase last written."""
        return Phase(self._halves[_PHASE])

    @property
    def request(self) -> int:
        """What the agent asks for: 0 nothing, STOP, HOLD (perhaps numbered, see REQUEST_KIND)."""
        return self._words[_REQUEST]

    def write_exit_report(self, words: ExitReport) -> None:
        """Leave `words` for the agent, cut to fit; of the traceback the end is kept."""
        data = encode(words, _WORDS_ROOM)
        self._halves[_WORDS_AT // 4] = 0
        self._bytes[_WORDS_AT + 4 : _WORDS_AT + 4 + len(data)] = data
        self._halves[_WORDS_AT // 4] = len(data)
        self.set_phase(Phase.EXIT)


class NullHeartbeat(HeartbeatWriter):
    """A beat nobody reads: for a script that no elasticd agent started."""

    def __init__(self) -> None:
        self._mute()


class HeartbeatReader:
    """The agent's side: read the beat, leave a request. Holds one descriptor; close it, or use it as a context manager.

    Raises OSError when the file cannot be opened and WireError when it is not a beat file of this layout.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check_header(os.pread(self._fd, _HEADER.size, 0), os.fstat(self._fd).st_size, path)
        except BaseException:
            self.close()
            raise

    def read(self) -> Heartbeat:
        """The beat as it is now; a writer caught between two stores is looked at again, a few times.

        Raises WireError for garbage.
        """
        raw = b""
        for look in range(_LOOKS):
            before = os.pread(self._fd, 8, _SEQ * 8)
            raw = os.pread(self._fd, _HEADER.size, 0)
            quiet = len(before) == 8 and not before[0] & 1 and before == raw[_SEQ * 8 : _SEQ * 8 + 8]
            if quiet and os.pread(self._fd, 8, _SEQ * 8) == before:
                break
            time.sleep(0 if look < _HASTY_LOOKS else 0.001)
        return self._decode(raw)

    def _decode(self, raw: bytes) -> Heartbeat:
        _check_header(raw, SIZE, self._path)
        fields = _HEADER.unpack(raw)[2:]
        minor, request, _, step, progress, first, started, phase, source, name, barrier_ms, pid, *counts, length = (
            fields
        )
        issued, alive, usual, waited, timeout_ms, at_step, dumped, moved = counts if minor else _NOTHING_ISSUED
        if minor > MINOR:
            # A newer layout may know more phases and sources; what counts here is that the worker runs.
            phase = phase if phase in tuple(Phase) else Phase.STEP
            source = source if source in tuple(Source) else Source.SESSION
        try:
            where, who = Phase(phase), Source(source)
        except ValueError as error:
            raise WireError(f"beat file {os.fspath(self._path)}: {error} in layout {MAJOR}.{minor}") from error
        barrier = name.rstrip(b"\0").decode("utf-8", "replace")
        words = self._last_words(length) if length else None
        seen = (step, progress, first, started, where, who, issued, alive, barrier, request, words)
        return Heartbeat(*seen, usual, waited, timeout_ms / 1000, at_step, dumped, barrier_ms / 1000, pid, moved)

    def _last_words(self, length: int) -> ExitReport:
        if length > _WORDS_ROOM:
            raise WireError(f"beat file {os.fspath(self._path)}: last words of {length} bytes do not fit")
        try:
            return decode(os.pread(self._fd, length, _WORDS_AT + 4))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WireError(f"beat file {os.fspath(self._path)}: last words cannot be understood: {error}") from error

    def request(self, word: int) -> None:
        """Ask the worker for something: STOP or HOLD, or 0 to take it back."""
        os.pwrite(self._fd, struct.pack("<Q", word), _REQUEST * 8)

    def request_dump(self) -> int:
        """Have the flight recorder's content written to ELASTICD_FLIGHT. It is there once `Beat.dumped` is the answer.

        If there is no such file then, this torch has no flight recorder, or nothing to write it with.
        """
        (last,) = struct.unpack("<Q", os.pread(self._fd, 8, _DUMP_WANTED * 8).ljust(8, b"\0"))
        wanted = (int(last) + 1) % (1 << 64)
        os.pwrite(self._fd, struct.pack("<Q", wanted), _DUMP_WANTED * 8)
        return wanted

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> HeartbeatReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def from_environment() -> HeartbeatWriter:
    """The beat the agent made for this process (ELASTICD_BEAT), or one that nobody reads. Raises as BeatWriter does."""
    path = os.environ.get("ELASTICD_BEAT")
    return HeartbeatWriter(path) if path else NullHeartbeat()


def _check_header(raw: bytes, size: int, path: str | os.PathLike[str]) -> None:
    where = f"beat file {os.fspath(path)}"
    if size < SIZE or len(raw) < _HEADER.size:
        raise WireError(f"{where}: {min(size, len(raw))} bytes, a beat file has {SIZE}")
    magic, major, minor = struct.unpack_from("<8sII", raw)
    if magic != MAGIC:
        raise WireError(f"{where}: it begins with {magic!r}, not with {MAGIC!r}")
    if major != MAJOR:
        raise WireError(
            f"{where}: layout {major}.{minor}, this elasticd reads {MAJOR}.x; "
            "run the same elasticd in the agent and the worker"
        )
