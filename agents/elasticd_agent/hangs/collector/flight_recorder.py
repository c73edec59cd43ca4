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


def request_dump(beat: FilePath) -> int:
    """Have the heartbeat thread write. Returns the number that `await_dump` waits for; 0 without such a thread."""
    try:
        with HeartbeatReader(beat) as reader:
            return reader.request_dump() if reader.read().alive_ticks else 0
    except (OSError, WireError):
        return 0


def await_dump(beat: FilePath, request: int, path: FilePath, until: float) -> bytes:
    """What the heartbeat thread has written by `until`; b"" for nothing."""
    if not request:
        return b""
    try:
        with HeartbeatReader(beat) as reader:
            while reader.read().dump_done != request:
                if time.monotonic() >= until:
                    return b""
                time.sleep(POLL_S)
        return disk.read(path, LIMIT)
    except (OSError, WireError):
        return b""


def nccl_dump(pipe: FilePath, dump: FilePath, until: float) -> bytes:
    """As JSON what NCCL writes to `dump` when a byte comes through `pipe`; b"" without an answer by `until`."""
    before = _changed(dump)
    if not _poke_pipe(pipe):
        return b""
    while time.monotonic() < until:
        if _changed(dump) != before and (found := whole(dump)):
            return found
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


def whole(path: FilePath) -> bytes:
    """What was written to it at any time, as JSON; b"" if there is nothing."""
    try:
        return as_json(disk.read(path, LIMIT))
    except (OSError, ValueError):  # it does not exist yet, or is incomplete
        return b""


_BROKEN = (
    pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, MemoryError, OverflowError,
    RecursionError,
)  # fmt: skip
"""What damaged data raise: a length in a pickle may be anything."""


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
