"""PyTorch's flight recorder of one worker, requested from its heartbeat thread, and from NCCL's own thread by a pipe.

The heartbeat thread (elasticd/heartbeat/thread.py) needs the GIL to answer. NCCL's monitor thread writes when a byte
comes through its pipe: a pickle of plain values, read by an unpickler that can make nothing else, and kept as JSON.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import time

from elasticd.errors import WireError
from elasticd.heartbeat.record import HeartbeatReader
from elasticd_agent.hangs.collector import files as disk
from elasticd_agent.hangs.collector.request import FilePath

LIMIT = 64 << 20
"""20,000 entries with stacks are some 20 MB."""
POLL_S = 0.01


DumpRequest = tuple[int, int]
"""The number that `await_dump` waits for, 0 for none, and the heartbeat thread's ticks before it."""
NO_REQUEST: DumpRequest = (0, 0)


def request_dump(beat: FilePath) -> DumpRequest:
    """Have the heartbeat thread write, where there is one."""
    try:
        with HeartbeatReader(beat) as reader:
            ticks = reader.read().alive_ticks
            return (reader.request_dump(), ticks) if ticks else NO_REQUEST
    except (OSError, WireError):
        return NO_REQUEST


def await_dump(beat: FilePath, request: DumpRequest, path: FilePath, until: float, last: float) -> bytes | None:
    """The dump that the heartbeat thread has written by `until`, or by `last` if it runs; b"" for nothing.

    None: it runs, and has not come so far. On a busy machine 25 ms of work take seconds; without the GIL it never runs.
    """
    number, ticks = request
    if not number:
        return b""
    try:
        with HeartbeatReader(beat) as reader:
            while (seen := reader.read()).dump_done != number:
                runs = seen.alive_ticks != ticks
                if time.monotonic() >= (last if runs else until):
                    return None if runs else b""
                time.sleep(POLL_S)
        return disk.read(path, LIMIT)
    except (OSError, WireError):
        return b""


def nccl_dump(pipe: FilePath, dump: FilePath, until: float) -> bytes:
    """The dump, as JSON, that NCCL writes to `dump` when a byte comes through `pipe`; b"" without an answer by
    `until`."""
    before = _changed(dump)
    if not _poke_pipe(pipe):
        return b""
    while time.monotonic() < until:
        if _changed(dump) != before and (content := read_as_json(dump)):
            return content
        time.sleep(POLL_S)
    return b""


def _poke_pipe(pipe: FilePath) -> bool:
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _changed(path: FilePath) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def read_as_json(path: FilePath) -> bytes:
    """The dump in the file, written at any time, as JSON; b"" if there is none."""
    try:
        return as_json(disk.read(path, LIMIT))
    except (OSError, ValueError):  # it does not exist yet, or is incomplete
        return b""


_BROKEN = (
    pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, MemoryError, OverflowError,
    RecursionError,
)  # fmt: skip
"""The exceptions that damaged data raise: a length in a pickle may be anything."""


class _Plain(pickle.Unpickler):
    """Reads a pickle of numbers, strings, lists and dicts, and refuses everything that would call a function."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recording")


def as_json(data: bytes) -> bytes:
    """A recording, JSON or pickle, as JSON. Raises ValueError for anything else, and for an incomplete one."""
    try:
        if data[:1] == b"{":
            json.loads(data)
            return data
        return json.dumps(_Plain(io.BytesIO(data)).load(), default=str).encode()
    except _BROKEN as error:
        raise ValueError(f"not a flight recording: {error}") from error
