"""Pieces of the logs of a job's ranks on this node.

The reader (an agent, often root) is not the writer (the job's user): below the job's folder no link is followed, only
plain files with one name are read, and only a bounded piece of them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from elasticd_agent.system.files import open_plain
from elasticd_daemon.api.schema import LogChunk
from elasticd_daemon.job_dir import JobFiles

LogStream = Literal["stdout", "stderr", "elasticd", "events"]
NODE_STREAMS = ("elasticd", "events")
"""Streams of a node and not of a rank: the runner's own output, and the event log."""
MAX_CHUNK_BYTES = 1 << 20
_ROUND_FOLDER = re.compile(r"round-([1-9][0-9]{0,17})")
_RANK_FOLDER = re.compile(r"rank-(0|[1-9][0-9]{0,9})")
_MAX_ENTRIES = 100_000


NaturalNumber = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class LogRequest(msgspec.Struct, frozen=True):
    """The query of a request for a log, except the job's number."""

    rank: NaturalNumber = 0
    round: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)] | None = None  #: none: the rank's newest
    stream: LogStream = "stdout"
    offset: Annotated[int, msgspec.Meta(ge=-(1 << 50), le=1 << 50)] = 0  #: bytes from the start; below 0 from the end
    limit: NaturalNumber = MAX_CHUNK_BYTES
    node: str | None = None  #: search this node only

    def query(self) -> dict[str, object]:
        """The parameters of the HTTP request, except the node."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name != "node"}

    def __str__(self) -> str:
        if self.stream in NODE_STREAMS:
            return "of its runner" if self.stream == "elasticd" else "of its events"
        return f"of rank {self.rank}" + ("" if self.round is None else f" in round {self.round}") + f" ({self.stream})"


def rounds_with_logs(files: JobFiles) -> list[int]:
    """The rounds that have logs here, ascending."""
    return sorted(_numbered_entries(files, (), _ROUND_FOLDER))


def ranks_with_logs(files: JobFiles, number: int) -> list[int]:
    return sorted(_numbered_entries(files, (f"round-{number}",), _RANK_FOLDER))


def newest_round_of(files: JobFiles, rank: int) -> int | None:
    """The newest round that has logs of this rank here; it reads few of many folders."""
    for number in reversed(rounds_with_logs(files)):
        if rank in ranks_with_logs(files, number):
            return number
    return None


def read_log(files: JobFiles, node: str, request: LogRequest) -> LogChunk | None:
    """The requested piece; None if there is no such file. `node` is this node.

    A negative offset counts from the end. One beyond the end means that the file was rotated: it is read from its
    start.
    """
    file, round = files.runner_log if request.stream == "elasticd" else files.events, 0
    root, parts = file.parent, [file.name]
    if request.stream not in NODE_STREAMS:
        newest = newest_round_of(files, request.rank) if request.round is None else request.round
        if newest is None:
            return None
        root, round = files.logs, newest
        parts = [f"round-{round}", f"rank-{request.rank}", f"{request.stream}.log"]
    offset = request.offset
    try:
        with open_below(root, parts) as fd:
            size = os.fstat(fd).st_size
            start = max(0, size + offset) if offset < 0 else offset if offset <= size else 0
            data = os.pread(fd, max(0, min(request.limit, MAX_CHUNK_BYTES, size - start)), start)
    except (OSError, ValueError):
        return None
    return LogChunk(data, node, round, start, start + len(data), size, round)


@contextlib.contextmanager
def open_below(root: Path, parts: Sequence[str]) -> Iterator[int]:
    """A plain file below `root`, for reading. Raises OSError for anything else, and for a link on the way to it."""
    with _open_directory(root, parts[:-1]) as directory:
        fd = open_plain(parts[-1], os.O_RDONLY, dir_fd=directory)
        try:
            yield fd
        finally:
            os.close(fd)


@contextlib.contextmanager
def _open_directory(root: Path, parts: Sequence[str]) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(root, flags)
    try:
        for part in parts:
            deeper = os.open(part, flags, dir_fd=fd)
            os.close(fd)
            fd = deeper
        yield fd
    finally:
        os.close(fd)


def _numbered_entries(files: JobFiles, parts: Sequence[str], pattern: re.Pattern[str]) -> set[int]:
    try:
        with _open_directory(files.logs, parts) as fd, os.scandir(fd) as entries:
            names = (entry.name for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False))
            return {int(match[1]) for match in map(pattern.fullmatch, names) if match is not None}
    except (OSError, ValueError):
        return set()
