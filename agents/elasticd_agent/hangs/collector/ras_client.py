"""Asks NCCL's RAS on this machine's loopback: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html

Any process of any job of the user may answer, also a stopped one, which never does: all of them share the port.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

from elasticd_agent.hangs.collector.ras import parse_differences
from elasticd_agent.model.reports import LaunchCount

MAX_ANSWER_BYTES = 16 << 20
"""10,000 ranks in eight communicators each; RAS itself keeps no more than it prints."""
TRY_TIME_SHARE = 1 / 3
"""The part of the time left that one process has to answer."""
PAUSE_BETWEEN_ANSWERS_S = 0.5
"""Between two answers, which must agree: ranks that launch change them a thousand times in it."""
_REQUEST = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"
"""NCCL before 2.28.7 does not know the format, says so, and answers as text."""
_LOOPBACK = ("127.0.0.1", "::1")


def unchanged_counts(port: int, pids: Collection[int], until: float) -> dict[int, tuple[LaunchCount, ...]]:
    """The launches of these processes, by pid, where their communicators' ranks differ, the same in two answers."""
    first = _counts(port, pids, until)
    if not first or time.monotonic() + PAUSE_BETWEEN_ANSWERS_S > until:
        return {}
    time.sleep(PAUSE_BETWEEN_ANSWERS_S)
    second = _counts(port, pids, until)
    same = {pid: tuple(count for count in counts if count in second.get(pid, ())) for pid, counts in first.items()}
    return {pid: counts for pid, counts in same.items() if counts}


def _counts(port: int, pids: Collection[int], until: float) -> dict[int, list[LaunchCount]]:
    """Tries again: another process may answer. Numbers of another host, or another job, are not ours."""
    found: dict[int, list[LaunchCount]] = {}
    for answer in _answers(port, until):
        for process in parse_differences(answer):
            if process.pid in pids and _is_local_address(process.host):
                found.setdefault(process.pid, []).append(process.count)
        if found:
            break
    return found


def _answers(port: int, until: float) -> Iterator[bytes]:
    for address in (*_LOOPBACK, *_LOOPBACK):
        if (left_s := until - time.monotonic()) > 0:
            with suppress(OSError):
                yield _ask((address, port), until - left_s * (1 - TRY_TIME_SHARE))


def _ask(address: tuple[str, int], until: float) -> bytes:
    """Raises OSError, also for an answer that is not whole in time."""
    with socket.create_connection(address, timeout=max(0.01, until - time.monotonic())) as connection:
        connection.sendall(_REQUEST)
        answer = bytearray()
        while True:
            connection.settimeout(max(0.01, until - time.monotonic()))
            data = connection.recv(1 << 16)
            if not data:
                return bytes(answer)
            answer += data
            if len(answer) > MAX_ANSWER_BYTES or time.monotonic() > until:
                raise TimeoutError


def _is_local_address(host: str) -> bool:
    """The address is one of this machine."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.bind((host, 0))
        return True
    return False
