"""PyTorch's flight recorder of one worker: asked of the worker's background thread, and of NCCL's own by its pipe.

The background thread (elasticd/heartbeat/thread.py) needs the GIL to answer; NCCL's monitor thread does not, it writes
when a byte comes through its pipe. NCCL's file is a pickle of plain values, read by
an unpickler that can make nothing else, and written as JSON. Each has a deadline; a stopped worker is not asked.
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

LIMIT = 64 << 20
"""20,000 entries with stacks are some 20 MB."""
POLL_S = 0.01


def request_dump(beat: str) -> int:
    """Have the background thread write; what `written` waits for. 0: there is nobody to ask."""
    try:
        with HeartbeatReader(beat) as reader:
            return reader.request_dump() if reader.read().alive_ticks else 0
    except (OSError, WireError):
        return 0


def await_dump(beat: str, wanted: int, path: str, until: float) -> bytes:
    """What the background thread has written by `until`; b"" if nothing, or if it has nothing to write."""
    if not wanted:
        return b""
    try:
        with HeartbeatReader(beat) as reader:
            while reader.read().dump_done != wanted:
                if time.monotonic() >= until:
                    return b""
                time.sleep(POLL_S)
        return disk.read(path, LIMIT)
    except (OSError, WireError):
        return b""


def nccl_dump(pipe: str, dump: str, until: float) -> bytes:
    """As JSON what NCCL writes to `dump` when a byte comes through `pipe`; b"" if nobody listens there.

    One that does not write by `until` may have written before, when asked then or because it has found out itself.
    """
    before = _changed(dump)
    if not _poke_pipe(pipe):
        return b""
    while time.monotonic() < until:
        if _changed(dump) != before and (found := _whole(dump)):
            return found
        time.sleep(POLL_S)
    return _whole(dump)


def _poke_pipe(pipe: str) -> bool:
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


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _whole(path: str) -> bytes:
    try:
        return as_json(disk.read(path, LIMIT))
    except (OSError, ValueError):  # it is not there yet, or only half of it
        return b""


class _Plain(pickle.Unpickler):
    """Reads a pickle of numbers, words, lists and dicts, and refuses everything that would call anything."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recording")


def as_json(data: bytes) -> bytes:
    """A recording as JSON, whatever it is in. Raises ValueError for what is neither, or not whole."""
    if data[:1] == b"{":
        json.loads(data)
        return data
    try:
        return json.dumps(_Plain(io.BytesIO(data)).load(), default=str).encode()
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"not a flight recording: {error}") from error
