"""What a worker last said of itself, in 16 KiB of memory it shares with its agent.

The agent creates the file before the worker starts; the worker maps it and writes with plain stores, so a beat costs
well under a microsecond and no system call. The agent reads it with `pread`, never through a map of its own: a worker
that truncates the file can then only make a read fail (WireError), not kill the agent by SIGBUS. Ages are taken on
CLOCK_MONOTONIC, which both processes share; no wall clock appears here. This module never waits for anybody, and
imports torch only when the optimizer hook is asked for.

Layout 1.0, little-endian, offsets in bytes. A word is stored whole; the words marked * belong together
and are guarded by `seq`.

    0     8s   magic "ELASTICD"          written once, by the agent
    8     u32  major, 12 u32 minor       another major is refused; a newer minor only adds fields
    16    u64  request                   the agent's word to the worker; low byte: 0 nothing, 1 please stop, 2 please
                                         hold; the rest may number holds: another number is another request
    64    u64  seq                       odd while the worker is writing the words marked *
    72    i64  step *                    steps of this process (hook) or of the job (session)
    80    u64  progress_ns *             CLOCK_MONOTONIC of the last progress: a step, or a change of phase
    88    u64  first_step_ns *           CLOCK_MONOTONIC of this process's first step, 0 before
    96    u64  started_ns                CLOCK_MONOTONIC of the first map, 0 before
    104   u32  phase *                   see Phase
    108   u32  source *                  see Source: who counts the steps
    112   64s  barrier *                 name of the barrier it waits at, UTF-8, zero-padded
    192   i64  collectives               collectives issued; reserved for a background thread
    200   u64  alive                     counts while that thread gets the GIL; reserved likewise
    256   u32  length of the last words, written after them; 0 = none
    260        last words: UTF-8 JSON {"kind", "type", "message", "traceback", "code", "bases"}
    16384      end
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import json
import mmap
import os
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticd.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 16 * 1024
MAGIC = b"ELASTICD"
MAJOR, MINOR = 1, 0
STOP, HOLD = 1, 2
"""What an agent may ask for; a worker that does not know HOLD takes it for nothing."""
REQUEST_KIND = 0xFF
"""The bits of a request that say which it is. The others may number it."""

# Indices into the map seen as 64-bit words (Q, q) and as 32-bit words (I).
_REQUEST, _SEQ, _STEP, _PROGRESS, _FIRST_STEP, _STARTED = 2, 8, 9, 10, 11, 12
_PHASE, _SOURCE = 26, 27
_BARRIER, _BARRIER_BYTES = 112, 64
_WORDS_AT = 256
_WORDS_ROOM = SIZE - _WORDS_AT - 4
_HEADER = struct.Struct("<8sIIQ40x QqQQQII64s16x qQ48x I")
# A writer killed between two stores leaves `seq` odd for good: after this many looks the words are taken as they are.
_LOOKS = 8
_MESSAGE_CHARACTERS, _BASES = 1000, 8
_PYBUF_WRITE = 0x200  # from CPython's stable ABI


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
class LastWords:
    """What ended the script, as far as python could see; believe an "exception" only beside a non-zero exit code.

    `kind` "exception": it went unhandled; `bases` names its type's base classes, nearest first. "exit": python ended in
    order, so by no os._exit and no signal; with which exit code is the agent's to know.
    """

    kind: str
    type: str = ""
    message: str = ""
    traceback: str = ""
    code: int | None = None
    bases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading of a beat file. Times are CLOCK_MONOTONIC nanoseconds, 0 when the thing has not happened."""

    step: int = 0
    progress_ns: int = 0
    first_step_ns: int = 0
    started_ns: int = 0
    phase: Phase = Phase.STARTING
    source: Source = Source.NONE
    collectives: int = 0
    alive: int = 0
    barrier: str = ""
    request: int = 0
    last_words: LastWords | None = None


def create(path: str | os.PathLike[str]) -> None:
    """Make the beat file, 0600. Raises OSError, also if it exists.

    All of it is written, hence allocated: a store into a hole of a full tmpfs would be SIGBUS.
    """
    content = _HEADER.pack(MAGIC, MAJOR, MINOR, 0, *([0] * 7), b"", 0, 0, 0).ljust(SIZE, b"\0")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, content) != SIZE:
            raise OSError(f"beat file {os.fspath(path)}: short write")
    finally:
        os.close(fd)


class BeatWriter:
    """The worker's side. Holds the map, no file descriptor. Processes the worker forks keep a copy that reaches nobody.

    Raises OSError when the file cannot be mapped and WireError when it is not a beat file of this layout.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check_header(os.pread(fd, _HEADER.size, 0), os.fstat(fd).st_size, path)
            self._view(_mapped(fd))
        finally:
            os.close(fd)
        os.register_at_fork(after_in_child=self._mute)
        if not self._words[_STARTED]:
            self._words[_STARTED] = time.monotonic_ns()

    def _view(self, view: memoryview) -> None:
        self._bytes, self._words, self._signed, self._halves = view, view.cast("Q"), view.cast("q"), view.cast("I")

    def _mute(self) -> None:
        self._view(memoryview(bytearray(SIZE)))

    def step(self, step: int, source: Source = Source.SESSION) -> None:
        """One more step is done; `step` is the count now."""
        now = time.monotonic_ns()
        words = self._words
        # "| 1", not "+ 1": two threads writing at once must never leave the count odd for good.
        seq = words[_SEQ] | 1
        words[_SEQ] = seq
        self._signed[_STEP] = step
        words[_PROGRESS] = now
        if not words[_FIRST_STEP]:
            words[_FIRST_STEP] = now
        self._halves[_PHASE] = 1  # Phase.STEP, without the enum's look-up
        self._halves[_SOURCE] = source
        words[_SEQ] = seq + 1

    def phase(self, phase: Phase, barrier: str = "") -> None:
        """The script is somewhere else now; `barrier` names where it waits (cut to 64 bytes)."""
        name = barrier.encode("utf-8", "replace")[:_BARRIER_BYTES].ljust(_BARRIER_BYTES, b"\0")
        seq = self._words[_SEQ] | 1
        self._words[_SEQ] = seq
        self._halves[_PHASE] = phase
        self._words[_PROGRESS] = time.monotonic_ns()
        self._bytes[_BARRIER : _BARRIER + _BARRIER_BYTES] = name
        self._words[_SEQ] = seq + 1

    @property
    def source(self) -> int:
        """Who counts the steps; read from the shared memory, so that two writers of one file agree."""
        return self._halves[_SOURCE]

    @property
    def current(self) -> Phase:
        """The phase last written."""
        return Phase(self._halves[_PHASE])

    @property
    def request(self) -> int:
        """What the agent asks for: 0 nothing, STOP, HOLD (perhaps numbered, see REQUEST_KIND)."""
        return self._words[_REQUEST]

    def last_words(self, words: LastWords) -> None:
        """Leave `words` for the agent, cut to fit; of the traceback the end is kept."""
        data = _fit(words)
        self._halves[_WORDS_AT // 4] = 0
        self._bytes[_WORDS_AT + 4 : _WORDS_AT + 4 + len(data)] = data
        self._halves[_WORDS_AT // 4] = len(data)
        self.phase(Phase.EXIT)


class NullBeat(BeatWriter):
    """A beat nobody reads: for a script that no elasticd agent started."""

    def __init__(self) -> None:
        self._mute()


class BeatReader:
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

    def read(self) -> Beat:
        """The beat as it is now; a writer caught between two stores is looked at again, a few times.

        Raises WireError for garbage.
        """
        raw = b""
        for _ in range(_LOOKS):
            before = os.pread(self._fd, 8, _SEQ * 8)
            raw = os.pread(self._fd, _HEADER.size, 0)
            quiet = len(before) == 8 and not before[0] & 1 and before == raw[_SEQ * 8 : _SEQ * 8 + 8]
            if quiet and os.pread(self._fd, 8, _SEQ * 8) == before:
                break
            time.sleep(0)
        return self._decode(raw)

    def _decode(self, raw: bytes) -> Beat:
        _check_header(raw, SIZE, self._path)
        fields = _HEADER.unpack(raw)[2:]
        minor, request, _, step, progress, first, started, phase, source, name, issued, alive, length = fields
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
        return Beat(step, progress, first, started, where, who, issued, alive, barrier, request, words)

    def _last_words(self, length: int) -> LastWords:
        if length > _WORDS_ROOM:
            raise WireError(f"beat file {os.fspath(self._path)}: last words of {length} bytes do not fit")
        data = os.pread(self._fd, length, _WORDS_AT + 4)
        try:
            found = json.loads(data)
            texts = tuple(found[key] for key in ("kind", "type", "message", "traceback"))
            code, bases = found["code"], found.get("bases", [])
            if not all(isinstance(text, str) for text in (*texts, *bases)) or not isinstance(code, int | None):
                raise TypeError("a field is of the wrong type")
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"beat file {os.fspath(self._path)}: last words cannot be understood: {error}") from error
        kind, name, message, text = texts
        return LastWords(kind, name, message, text, code, tuple(bases))

    def request(self, word: int) -> None:
        """Ask the worker for something: STOP or HOLD, or 0 to take it back."""
        os.pwrite(self._fd, struct.pack("<Q", word), _REQUEST * 8)

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> BeatReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def install_last_words(writer: BeatWriter) -> None:
    """Have the way this process ends written to its beat.

    Call it before anybody else registers an exit handler: the first registered runs last. Python keeps the unhandled
    exception in `sys.last_*`, so no hook is replaced and the script cannot tell. SystemExit leaves no trace there: then
    "exit" is written, with no code, and means that python went down in order.
    """
    atexit.register(_say_last_words, writer)


def _say_last_words(writer: BeatWriter) -> None:
    # Whatever goes wrong here would be printed as the script's own failure.
    with contextlib.suppress(Exception):
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if not isinstance(error, BaseException):
            writer.last_words(LastWords("exit"))
            return
        name, *bases = (_name_of(base) for base in type(error).__mro__[:-1])
        lines = traceback.TracebackException(type(error), error, error.__traceback__)
        # "Type: message", with python's own words for a message that cannot be printed.
        message = "".join(lines.format_exception_only()).partition(": ")[2].rstrip("\n")
        writer.last_words(LastWords("exception", name, message, "".join(lines.format()), bases=tuple(bases)))


def _name_of(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def install_optimizer_hook(writer: BeatWriter, register: Callable[[Any], Any] | None = None) -> Callable[[], None]:
    """Beat at every optimizer step of this process until a Session counts the steps. Returns what removes the hook.

    `register` is torch's register_optimizer_step_post_hook; without it torch is imported. A step is over when an
    optimizer steps again: a script that trains a generator and a discriminator in turn counts its iterations once.
    """
    if register is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register = register_optimizer_step_post_hook
    stepped: set[int] = set()
    steps = 0

    def beat(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal steps
        if id(optimizer) in stepped:
            stepped.clear()
        if not stepped:
            steps += 1
        stepped.add(id(optimizer))
        if writer.source != Source.SESSION:
            writer.step(steps, Source.HOOK)

    handle = register(beat)
    return lambda: handle.remove()


def from_environment() -> BeatWriter:
    """The beat the agent made for this process (ELASTICD_BEAT), or one that nobody reads. Raises as BeatWriter does."""
    path = os.environ.get("ELASTICD_BEAT")
    return BeatWriter(path) if path else NullBeat()


def _mapped(fd: int) -> memoryview:
    """The file as shared memory, for as long as the process lives.

    Not python's mmap: before 3.13 it keeps a duplicate of the descriptor, which a script would see.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap of the beat file failed")
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view: memoryview = prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))(address, SIZE, _PYBUF_WRITE)
    return view


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


def _fit(words: LastWords) -> bytes:
    name, message = words.type[:_MESSAGE_CHARACTERS], words.message[:_MESSAGE_CHARACTERS]
    fields = {"kind": words.kind, "type": name, "message": message, "code": words.code}
    bases = [base[:_MESSAGE_CHARACTERS] for base in words.bases[:_BASES]]
    text = words.traceback[-_WORDS_ROOM:]
    while True:
        data = json.dumps({**fields, "bases": bases, "traceback": text}, ensure_ascii=False).encode("utf-8", "replace")
        if len(data) <= _WORDS_ROOM:
            return data
        if not text:
            bases.pop()
        text = text[len(text) // 8 + 1 :]
