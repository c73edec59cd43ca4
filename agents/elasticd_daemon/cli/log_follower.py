"""`elasticd logs`: a rank's output, read in pieces from wherever it is, through all rounds of the job.

Every round has a log of its own, on the node that the rank had in that round. A piece (`LogChunk`) says which round and
node it is of, where the next one begins (`next`), how long the log is now (`size`), the newest round the agents know of
(`newest`), and whether the job has ended and left all its nodes (`over`). The first piece decides the round to begin
with; from then on one round follows the other without a gap:

- A round is left only when a read found nothing more *after* a later round was known. The workers of a round have ended
  before the next one begins, so nothing can be added to it then; a read that was made before proves nothing.
- Without --follow the end is where the log ended at the first read, however much is written meanwhile.
- With --follow it is where every stream is read to its end and a piece was `over`. A stream that has nothing in some
  round gets a 404 there, which says nothing of the job: the job itself is asked.

With --follow an outage of the agent or of its store is waited out for a while. Nothing is lost by that: the position is
the follower's, and agents keep none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from elasticd.errors import WireError
from elasticd_daemon.api.client import AgentClient, Reply, RequestFailed, Unreachable, job_path
from elasticd_daemon.api.schema import LogChunk

POLL_S = 0.5
OUTAGE_TIMEOUT_S = 120.0
"""The time for which -f waits for an agent that is being restarted or upgraded, or for its store."""
POLLS_UNTIL_MENTIONED = 20
"""After so many -f says that there is no such log yet: there may never be one, of a rank that the job does not have."""
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LogQuery:
    job: str
    rank: int
    streams: tuple[str, ...]
    node: str | None
    round: int | None
    tail_lines: int | None
    follow: bool


@dataclass(slots=True)
class _Stream:
    name: str
    out: BinaryIO
    offset: int = 0
    at_end: bool = False
    is_final: bool = False
    started: bool = False
    stop_offset: int | None = None


@dataclass(slots=True)
class LogFollower:
    """`log` gets a sentence whenever the follower waits."""

    client: AgentClient
    query: LogQuery
    out: BinaryIO
    err: BinaryIO
    log: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _streams: list[_Stream] = field(init=False)
    _round: int | None = field(init=False)
    _node: str | None = field(init=False)
    _newest_round: int = 0
    _last_error: str = ""

    def __post_init__(self) -> None:
        self._streams = [_Stream(name, self.err if name == "stderr" else self.out) for name in self.query.streams]
        self._round = self.query.round
        self._node = self.query.node

    def run(self) -> None:
        """Until everything is printed, or, with follow, until the log is final. Raises RequestFailed, Unreachable."""
        if self.query.follow:
            self._await_start()
        polls = 0
        while True:
            newest = self._newest_round
            moved = [self._print_next_chunk(stream) for stream in self._streams]
            if any(moved):
                continue
            if not any(stream.started for stream in self._streams) and not self.query.follow:
                raise RequestFailed(self._last_error)
            if not self.query.follow:
                break
            # Only if it existed before the last read: then nothing is added to this round any more.
            if self._advance_round(newest):
                continue
            if self._log_is_final():
                break
            polls += 1
            if polls == POLLS_UNTIL_MENTIONED and not any(stream.started for stream in self._streams):
                self.log(f"{self._last_error}; waiting for it until the job ends")
            self.sleep(POLL_S)

    def _await_start(self) -> None:
        """Raises RequestFailed for a job that does not exist."""
        waiting = ""
        while True:
            answer = self._ask_with_retries(lambda: self.client.get(job_path(self.query.job))).result()
            if answer.get("ended_at") is not None or answer.get("progress"):
                return
            if answer.get("reason") != waiting:
                waiting = str(answer.get("reason"))
                state = str(answer.get("state"))  # with which the scheduler's reasons for a pending job begin
                self.log(waiting if waiting.startswith(state) else f"{state}: {waiting}")
            self.sleep(2 * POLL_S)

    def _print_next_chunk(self, stream: _Stream) -> bool:
        """Print what was added to this stream; True if there was something."""
        if stream.stop_offset is not None and stream.offset >= stream.stop_offset:
            return False
        tail = self.query.tail_lines is not None and not stream.started
        query = {
            "rank": self.query.rank,
            "stream": stream.name,
            "round": self._round,
            "node": self._node,
            "offset": -_TAIL_BYTES if tail else stream.offset,
        }
        reply = self._ask_with_retries(lambda: self.client.get(f"{job_path(self.query.job)}/logs", query))
        if reply.code == 404:
            self._last_error, stream.at_end = reply.why, True
            if stream.started:  # it has nothing in this round
                stream.is_final = self._job_has_ended()
            return False
        if reply.code != 200:
            raise RequestFailed(reply.why)
        try:
            chunk = LogChunk.from_reply(reply.body, reply.headers)
        except WireError as error:
            raise RequestFailed(str(error)) from None
        self._round = self._round or chunk.round or None
        if not stream.started or self._node is None:
            self._node = chunk.node
        if not stream.started and not self.query.follow:
            stream.stop_offset = chunk.size  # lines that are added meanwhile are not awaited
        stream.started = True
        stream.offset = chunk.next
        stream.at_end = chunk.next >= chunk.size
        stream.is_final = chunk.is_final
        self._newest_round = max(self._newest_round, chunk.newest)
        self._write_out(stream, _last_lines(chunk.data, self.query.tail_lines or 0) if tail else chunk.data)
        return bool(chunk.data)

    def _advance_round(self, newest: int) -> bool:
        """Continue with the next round once this one is read; True if there is one."""
        if self.query.round is not None or self._round is None or newest <= self._round:
            return False
        self._round += 1
        self._node = self.query.node
        for stream in self._streams:
            stream.offset, stream.at_end = 0, False
        return True

    def _log_is_final(self) -> bool:
        """Nothing will be added: every log is final, or, without any log, the job has ended."""
        begun = [stream for stream in self._streams if stream.started]
        if begun:
            return all(stream.at_end and stream.is_final for stream in begun)
        return self._job_has_ended()

    def _job_has_ended(self) -> bool:
        job = self._ask_with_retries(lambda: self.client.get(job_path(self.query.job)))
        answer = job.document() if job.code == 200 else {}
        return job.code != 200 or (answer.get("ended_at") is not None and not answer.get("leaving"))

    def _ask_with_retries(self, ask: Callable[[], Reply]) -> Reply:
        """The reply; with follow an outage is waited out. Raises Unreachable."""
        until, logged = self.clock() + OUTAGE_TIMEOUT_S, False
        while True:
            try:
                reply = ask()
                if reply.code < 500 or not self.query.follow:
                    return reply
                why = reply.why
            except Unreachable as error:
                if not self.query.follow:
                    raise
                why = str(error)
            if self.clock() >= until:
                raise Unreachable(f"{why}; gave up after {OUTAGE_TIMEOUT_S:.0f} s")
            if not logged:
                self.log(f"{why}; retrying for {OUTAGE_TIMEOUT_S:.0f} s")
                logged = True
            self.sleep(POLL_S)

    def _write_out(self, stream: _Stream, data: bytes) -> None:
        if data:
            stream.out.write(data)
            stream.out.flush()


def _last_lines(data: bytes, count: int) -> bytes:
    if count <= 0:
        return b""
    lines = data.splitlines(keepends=True)
    return b"".join(lines[-count:])
