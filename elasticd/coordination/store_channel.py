"""Short messages between the ranks, out of band: over the round's own store, never by a collective.

Every wait has a deadline and names the missing ranks with their last known status. Keys live under a prefix of one
session of one process group, so that no message of an earlier attempt in the same store (torchrun re-uses its store)
can be read. Messages are JSON or opaque bytes; no pickle is read from them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from elasticd import errors
from elasticd.bounded_json import JsonObject
from elasticd.coordination.missed_call import MissedCallDetector, SessionWait
from elasticd.coordination.rank_status import RankStatus, StatusReader, new_connection
from elasticd.errors import DecisionTimeout, ElasticdError
from elasticd.heartbeat.collectives import default_group, group_timeout_ms
from elasticd.heartbeat.record import HeartbeatWriter, NullHeartbeat

MIN_DEFAULT_TIMEOUT_S = 600.0
# Keys are polled: a wait inside torch without a limit lets no signal handler run, and one that reaches its limit prints
# two lines.
_POLL_INTERVAL_SHARE = 0.05
"""The pauses add at most this share of the wait."""
_POLL_INTERVALS_S = 0.0005, 0.25
_SILENT_WAIT_S = 1.0
"""A longer wait is in the status."""
_STATUS_READ_INTERVAL_S = 1.0
_LEAVE_TIMEOUT_S = 5.0
_ERRORS_BY_NAME = {
    name: found for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, ElasticdError)
}


class StoreChannel:
    """One per session. Rank 0 publishes or collects; the others read or report. A group of one needs no store.

    `attempt` must be the same on all ranks and new in this store. `timeout_s` is the deadline of every wait, after
    which DecisionTimeout is raised; a store that is gone raises torch.distributed's own error, and a rank that provably
    has not made the same session call, MissedCall. `call` is that call, and `status` this rank's own.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        attempt: str,
        timeout_s: float,
        heartbeat: HeartbeatWriter | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.store = store
        self.call = "the same session call"
        self.status: Callable[[], RankStatus] = lambda: RankStatus(0, "starting")
        self.current_wait: SessionWait | None = None
        self._heartbeat = heartbeat or NullHeartbeat()
        self._waits = 0
        self._calls: dict[str, int] = {}
        self._below = ""
        self.in_use = False  # by another thread, perhaps for ever: a frozen store answers nothing
        # With a counter, as a process may make a second session in the same group.
        self.prefix = f"{attempt}/{store.add(f'{attempt}/sessions/{rank}', 1)}/" if store is not None else ""

    def new_connection(self) -> Any:
        """Another connection to the same store, for another thread; the same keys under the same `prefix`."""
        return new_connection(self.store)

    @contextlib.contextmanager
    def numbered_call(self, call: str) -> Iterator[None]:
        """Number a session call that the script may repeat: no message of an earlier one is read."""
        self._calls[call] = number = self._calls.get(call, 0) + 1
        self._below = f"{call}/{number}/"
        try:
            yield
        finally:
            self._below = ""

    def _full_key(self, key: str) -> str:
        return self.prefix + self._below + key

    def put(self, key: str, value: bytes) -> None:
        self.store.set(self._full_key(key), value)

    def read_from_rank0(self, key: str, what: str, timeout_s: float | None = None) -> bytes:
        """Wait for rank 0's message and read it; the error calls it `what`. `timeout_s` overrides the channel's."""
        self._wait({key: 0}, key, what, timeout_s)
        value: bytes = self.store.get(self._full_key(key))
        return value

    def read_all(self, key: str, what: str) -> list[bytes]:
        """Every rank's message, as `put` under KEY/RANK."""
        if self.store is None:
            return []
        keys = {f"{key}/{rank}": rank for rank in range(self.world_size)}
        self._wait(keys, f"{key}/*", what)
        return list(self.store.multi_get([self._full_key(each) for each in keys]))

    def delete(self, key: str) -> None:
        self.store.delete_key(self._full_key(key))

    def exists(self, key: str) -> bool:
        return bool(self.store.check([self._full_key(key)]))

    def on_rank0(self, key: str, what: str, act: Callable[[], JsonObject]) -> JsonObject:
        """Rank 0 calls `act`; every rank returns its result (JSON) or raises its error, as ElasticdError if it is not
        ours.
        """
        if self.rank != 0:
            result: JsonObject = json.loads(self.read_from_rank0(key, what))
            if "error" in result:
                self.leave(f"{key}/received")
                raise _ERRORS_BY_NAME.get(result["error"], ElasticdError)(f"on rank 0: {result['message']}")
            return result
        try:
            answer = act()
        except Exception as error:
            kind = type(error).__name__
            message = str(error) if kind in _ERRORS_BY_NAME else f"{kind}: {error}"
            self._publish(key, {"error": kind, "message": message})
            self.leave(f"{key}/received")  # rank 0 may serve the store itself, and is about to leave
            raise
        self._publish(key, answer)
        return answer

    def _publish(self, key: str, value: JsonObject) -> None:
        if self.store is not None:
            self.put(key, json.dumps(value).encode())

    def gather_on_rank0(self, key: str, mine: bytes, what: str) -> list[bytes]:
        """Rank 0 gets every rank's message, in the order of ranks; the others get nothing and do not wait."""
        if self.rank != 0:
            self.put(f"{key}/{self.rank}", mine)
            return []
        keys = {f"{key}/{rank}": rank for rank in range(1, self.world_size)}
        if not keys:
            return [mine]
        self._wait(keys, f"{key}/*", what)
        values = [mine, *(self.store.get(self._full_key(other)) for other in keys)]
        for other in keys:
            self.delete(other)
        return values

    def leave(self, key: str = "left") -> None:
        """The last message of each rank; rank 0 waits for them, but only for some seconds and not for dead ranks."""
        if self.in_use:
            return
        usual_s = self.timeout_s
        self.timeout_s = min(usual_s, _LEAVE_TIMEOUT_S)
        with contextlib.suppress(DecisionTimeout, RuntimeError):  # torch's DistError is a RuntimeError
            self.gather_on_rank0(key, b"", "their last message")
        self.timeout_s = usual_s

    @contextlib.contextmanager
    def report_wait(self, key: str, any_step: bool = False) -> Iterator[MissedCallDetector]:
        """Meanwhile this rank's status says for what it waits; the arguments are those of SessionWait and
        MissedCallDetector.
        """
        self._waits += 1
        self.current_wait = SessionWait(self._waits, self.call, key)
        try:
            yield MissedCallDetector(self.call, self.rank, self.prefix, lambda: self.status(), any_step)
        finally:
            self.current_wait = None
            self._heartbeat.set_wait()

    def report_missing_ranks(self, missing: list[int]) -> None:
        """Put the ranks for which it waits into the status and the heartbeat."""
        wait = self.current_wait
        if wait is not None and missing:
            self.current_wait = wait.for_ranks(missing)
            self._heartbeat.set_wait(wait.call, missing[0], len(missing))

    def _wait(self, writers: dict[str, int], pattern: str, what: str, timeout_s: float | None = None) -> None:
        """Wait for these keys; the value is the rank that writes the key, and `pattern` the key of any of them."""
        full = [self._full_key(key) for key in writers]
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        while (waited := time.monotonic() - start) < min(_SILENT_WAIT_S, timeout_s):
            if self.store.check(full):
                return
            time.sleep(_poll_interval_s(waited))
        with self.report_wait(self._below + pattern) as missed:
            self._poll(writers, what, start, timeout_s, missed)

    def _poll(
        self, writers: dict[str, int], what: str, start: float, timeout_s: float, missed: MissedCallDetector
    ) -> None:
        full = [self._full_key(key) for key in writers]
        key_of = {rank: key for key, rank in writers.items()}
        statuses = StatusReader(self.prefix)
        read_at = start
        while not self.store.check(full):
            waited = time.monotonic() - start
            over = waited >= timeout_s
            if over or time.monotonic() >= read_at:
                missing = [rank for key, rank in writers.items() if not self.exists(key)]
                self.report_missing_ranks(missing)
                statuses.read(self.store, missing)
                read_at = time.monotonic() + _STATUS_READ_INTERVAL_S
                error = missed.find(self.store, missing, statuses, lambda rank: self.exists(key_of[rank]))
                if error is not None:
                    raise error
                if over and missing:
                    raise DecisionTimeout(self._timeout_message(missing, statuses, what, timeout_s))
            time.sleep(min(_poll_interval_s(waited), max(timeout_s - waited, 0.0)))

    def _timeout_message(self, missing: list[int], statuses: StatusReader, what: str, timeout_s: float) -> str:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        known = [rank for rank in missing if statuses.has_status(rank)]
        where = f" Last known status: {statuses.describe_all(known)}" if known else ""
        return (
            f"rank {self.rank} waited {timeout_s:g} s for {ranks}: {what}. All ranks must call the same session "
            f"functions at the same steps; check what that rank does.{where}"
        )


def _poll_interval_s(waited_s: float) -> float:
    shortest, longest = _POLL_INTERVALS_S
    return max(shortest, min(_POLL_INTERVAL_SHARE * waited_s, longest))


def default_timeout_s() -> float:
    """The seconds that a rank waits for another one's message by default: as for a collective, 10 minutes at least.

    A shorter wait would end jobs that torch lets wait, such as for the evaluation of one rank.
    """
    return max(group_timeout_ms(default_group()) / 1000, MIN_DEFAULT_TIMEOUT_S)


def open_channel(
    rank: int, world_size: int, round: int, device: torch.device, timeout_s: float, heartbeat: HeartbeatWriter
) -> StoreChannel:
    """A channel over the default process group's store; all ranks call it at the same place."""
    if world_size == 1:
        return StoreChannel(rank, world_size, None, "", timeout_s)
    # A connection of our own: a wait on the shared one would block NCCL's watchdog, which uses it too.
    store = new_connection(c10d._get_default_store())
    # An agent's store serves one round; another may have served an earlier attempt and needs a token.
    attempt = f"elasticd/r{round}" if round else f"elasticd/{_agree_on_token(device)}"
    return StoreChannel(rank, world_size, store, attempt, timeout_s, heartbeat)


def _agree_on_token(device: torch.device) -> str:
    """A number that no earlier process group used; from the system's entropy, so that no random stream moves."""
    token = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    dist.broadcast(token, src=0)
    return f"{int(token.item()):x}"
