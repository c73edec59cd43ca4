"""PyTorch's flight recorder of one worker, requested from its heartbeat thread, and from NCCL's own thread by a pipe.

The heartbeat thread (elasticd/heartbeat/thread.py) writes JSON, and needs the GIL to answer. NCCL's monitor thread
writes a pickle when a byte comes through its pipe: it is kept as it is, for torch's own tools, and never read.
"""

from __future__ import annotations

import os
import time

from elasticd.errors import WireError
from elasticd.heartbeat.record import HeartbeatReader
from elasticd_agent.hangs.collector import files as disk
from elasticd_agent.hangs.collector.request import FilePath

MAX_DUMP_BYTES = 64 << 20
"""20,000 entries with stacks are some 20 MB."""
POLL_S = 0.01
_PICKLE_END = b"."


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
        return disk.read_plain_file(path, MAX_DUMP_BYTES)
    except (OSError, WireError):
        return b""


def take_nccl_dump(pipe: FilePath | None, dump: FilePath, until: float) -> bytes:
    """The dump that NCCL writes to `dump` when a byte comes through `pipe`, else an older one; b"" if there is none."""
    before = _mtime_ns(dump)
    if pipe and _poke_pipe(pipe):
        while time.monotonic() < until and (_mtime_ns(dump) == before or not _read_dump(dump).endswith(_PICKLE_END)):
            time.sleep(POLL_S)
    return _read_dump(dump)


def _read_dump(path: FilePath) -> bytes:
    try:
        return disk.read_plain_file(path, MAX_DUMP_BYTES)
    except OSError:  # it does not exist yet
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


def _mtime_ns(path: FilePath) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
