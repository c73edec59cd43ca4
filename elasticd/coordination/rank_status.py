"""The status that every rank publishes, and the sentence about missing ranks: it tells a dead rank from a slow one.

Each rank's process publishes once a second its step, its phase, and for how long it has been there, from a thread with
a connection of its own. It is a plain `set`, which TCPStore does not answer: it costs some 20 µs, waits for nobody, and
is read only when a rank is missed. It is published all the time, not on request: polls for requests would be as many
messages, a blocking wait for them would make torch print two lines whenever it times out and Python abort a process
that exits while a thread returns from one, and a stopped rank could not answer. Ages are measured by the observer's own
reads: no two clocks are compared.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch._C._distributed_c10d import TCPStore

from elasticd.heartbeat.collectives import base_store

PERIOD_S = 1.0
# With more ranks the period grows: a status takes 10 µs of the store's time (benchmarks/barrier.py), all of them then
# half a hundredth of a core.
_MAX_STATUSES_PER_SECOND = 500
# A file store keeps every value ever written; there the period is longer.
_FILE_STORE_PERIOD_S = 60.0
_CLOSE_TIMEOUT_S = 1.0
MAX_RANKS_LISTED = 16
"""Nobody reads a list of hundreds of ranks; it also bounds what a read costs."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The place of a rank in the script."""

    step: int
    phase: str
    barrier: str = ""
    duration_s: float = 0.0  #: the time since then by the rank's own clock, with a period's resolution
    issued: int = -1  #: collectives of the default process group so far, and since the last step; -1: not counted
    issued_in_step: int = -1
    collective: str = ""
    """The collective of all ranks in which its main thread waits; "" where the process has a group besides."""
    wait: int = 0
    """The number of the session call's wait for other ranks, 0 for none; `call`, `key`, `ranks`: see SessionWait."""
    call: str = ""
    key: str = ""
    ranks: tuple[int, ...] = ()
    failed: bool = False  #: it ended by an exception

    def __str__(self) -> str:
        where = f"waits at barrier {self.barrier!r}" if self.phase == "barrier" else f"phase {self.phase}"
        duration = f" for {self.duration_s:.0f} s" if self.duration_s >= 2 else ""
        return f"step {self.step}, {where}{duration}"


@dataclass(frozen=True, slots=True)
class _ReceivedStatus:
    """A rank's newest status and when it was published, as far as the reader can know."""

    number: int
    status: RankStatus
    published_before: float
    published_after: float | None  #: the time of an earlier read that did not find it; None: there was none


class StatusReader:
    """The statuses that one observer has read of other ranks; all times are its own."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._read_at: dict[int, float] = {}
        self._received: dict[int, _ReceivedStatus] = {}

    def read(self, store: Any, ranks: Iterable[int]) -> None:
        """Read the status of these ranks, or of the first few of them. Raises what the store does."""
        for rank in list(ranks)[:MAX_RANKS_LISTED]:
            content = _read_numbered_status(store, f"{self._prefix}status/{rank}")
            now = time.monotonic()
            known = self._received.get(rank)
            if content is not None and (known is None or known.number != content[0]):
                self._received[rank] = _ReceivedStatus(
                    *content, published_before=now, published_after=self._read_at.get(rank)
                )
            self._read_at[rank] = now

    def last_with_number(self, rank: int) -> tuple[int, RankStatus | None]:
        """The rank's last status, and its number; 0 and None before the first."""
        received = self._received.get(rank)
        return (0, None) if received is None else (received.number, received.status)

    def has_status(self, rank: int) -> bool:
        """True if the rank has published a status."""
        return rank in self._received

    def describe(self, rank: int) -> str:
        """The rank's last status and its age, as far as this observer can know."""
        received = self._received.get(rank)
        if received is None:
            return "no status since the round began" if rank in self._read_at else "status not read"
        now = time.monotonic()
        least = now - received.published_before
        if received.published_after is None:
            age = f"reported more than {least:.1f} s ago" if least >= 0.1 else "reported at an unknown time"
        elif least < 0.1:
            age = f"reported in the last {now - received.published_after:.1f} s"
        else:
            age = f"reported {least:.1f} to {now - received.published_after:.1f} s ago"
        return f"{received.status}, {age}"

    def describe_all(self, ranks: Iterable[int]) -> str:
        """All of them in one line: "rank 1 (step 17, phase eval, reported in the last 1.3 s), rank 3 (…)"."""
        every = list(ranks)
        more = f" and {len(every) - MAX_RANKS_LISTED} more" if len(every) > MAX_RANKS_LISTED else ""
        return ", ".join(f"rank {rank} ({self.describe(rank)})" for rank in every[:MAX_RANKS_LISTED]) + more


def _read_numbered_status(store: Any, key: str) -> tuple[int, RankStatus] | None:
    """The status there, without waiting for one; None if it is absent or cannot be decoded."""
    if not store.check([key]):
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        fields = json.loads(store.get(key))
        number = int(fields.pop("n"))
        known = {name: kind(fields[name]) for name, kind in _FIELDS.items() if name in fields}
        return number, RankStatus(**known)
    return None


_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("step", "issued", "issued_in_step", "wait"), int),
    **dict.fromkeys(("phase", "barrier", "collective", "call", "key"), str),
    "duration_s": float,
    "ranks": lambda ranks: tuple(map(int, ranks)),
    "failed": bool,
}
"""The fields that a status may hold in the store; a rank of another version may leave out some, and add others."""


class PeriodicTask(Protocol):
    """Something that the publisher's thread does from time to time while this rank waits."""

    due_at: float

    def turn(self, store: Any) -> None:
        """It is due; sets when it is due again."""


class StatusPublisher:
    """The thread that publishes this rank's status, and does what the training thread must not do; it ends with the
    store.
    """

    def __init__(
        self, connect: Callable[[], Any], prefix: str, rank: int, world_size: int, status: Callable[[], RankStatus]
    ) -> None:
        self.period_s = max(PERIOD_S, world_size / _MAX_STATUSES_PER_SECOND)
        self._connect = connect
        self._status = status
        self._key = f"{prefix}status/{rank}"
        self._changed = threading.Condition()
        self._task: PeriodicTask | None = None
        self._calls: list[Callable[[Any], None]] = []
        self._wakes_at = 0.0
        self._awake = False
        self._closed = self._abandoned = False
        self._published = 0
        self._failed = False
        self._last = RankStatus(0, "starting")
        self._since = time.monotonic()
        self._store: Any = None
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name="elasticd-status", daemon=True)
        self._pid = os.getpid()

    def start(self, store: Any) -> None:
        """Publish the first status with the caller's store, and begin; `close` is also called when Python ends.

        The thread uses the caller's store again only at `close`, if it has no connection of its own by then.
        """
        self._publish(store, self._status())
        self._store = store
        self._thread.start()
        atexit.register(self.close)

    def set_task(self, task: PeriodicTask | None) -> None:
        """Give this task its turns from now on, in place of the one before."""
        with self._changed:
            self._task = task
            # As a rule the thread's regular turn comes first, so a barrier that is soon over costs the thread nothing.
            if task is not None and task.due_at < self._wakes_at:
                self._wake()

    def submit(self, call: Callable[[Any], None], *, now: bool = False) -> None:
        """Have this called with the thread's store, at its next turn at the latest."""
        with self._changed:
            self._calls.append(call)
            if now:
                self._wake()

    def close(self, failed: bool = False) -> None:
        """Make the calls that are left, publish that this rank leaves, and end the thread.

        `failed`: by an exception. One that ends the script is known to the exit handler.
        """
        self._failed = failed or getattr(sys, "last_value", None) is not None
        if self._pid != os.getpid() or self._thread.ident is None:
            return
        with self._changed:
            already = self._closed
            self._closed = True
            self._wake()
        if not already:
            atexit.unregister(self.close)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def publish_no_more(self) -> None:
        """Safe from any thread. Call it before the connection breaks: torch prints a warning at its next use."""
        self._abandoned = True

    def abandon(self) -> None:
        """End the thread without a word to the other ranks: its connection to the store is broken."""
        self.publish_no_more()
        self.close()
        self._store = self._connection = None

    def _wake(self) -> None:
        self._awake = True
        self._changed.notify()

    def _open_connection(self) -> None:
        """Connect: it may take longer than `close` waits, as torch asks DNS for the name of the store's address."""
        with contextlib.suppress(RuntimeError):
            connection = self._connect()
            with self._changed:
                self._connection = connection
                self._changed.notify()

    def _run(self) -> None:
        # torch's errors of a store are RuntimeErrors.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._open_connection, name="elasticd-connect", daemon=True).start()
            with self._changed:
                self._changed.wait_for(lambda: self._connection is not None or self._closed)
            store = self._store if self._connection is None else self._connection
            if not is_tcp(store):
                self.period_s = max(self.period_s, _FILE_STORE_PERIOD_S)
            publish_at = time.monotonic() + self.period_s
            while not self._abandoned:
                if time.monotonic() >= publish_at:
                    self._publish(store, self._status())
                    publish_at = time.monotonic() + self.period_s
                with self._changed:
                    task, calls, closed = self._task, self._calls, self._closed
                    self._calls = []
                for call in calls:
                    call(store)
                if closed:
                    self._publish(store, RankStatus(self._status().step, "exit", failed=self._failed))
                    return
                if task is not None and time.monotonic() >= task.due_at:
                    task.turn(store)
                with self._changed:
                    self._wakes_at = min(publish_at, self._task.due_at if self._task is not None else publish_at)
                    if not self._awake:
                        self._changed.wait(max(0.0, self._wakes_at - time.monotonic()))
                    self._awake = False

    def _publish(self, store: Any, status: RankStatus) -> None:
        now = time.monotonic()
        if status != self._last:
            self._last = status
            self._since = now
        self._published += 1
        fields = {name: getattr(status, name) for name in _FIELDS}
        content = {"n": self._published, **fields, "duration_s": round(now - self._since, 1)}
        # What is not known is left out: every rank publishes once a second.
        short = {name: value for name, value in content.items() if value not in ("", (), -1, False)}
        store.set(self._key, json.dumps({"step": status.step, "phase": status.phase, **short}))


def new_connection(store: Any) -> Any:
    """Another connection to the same store: one may wait while the other is used."""
    if hasattr(store, "clone"):
        return store.clone()
    # torch 2.6 cannot. Prefixes are left out, on every rank alike.
    root = base_store(store)
    return TCPStore(root.host, root.port, is_master=False) if isinstance(root, TCPStore) else store


def is_tcp(store: Any) -> bool:
    """True for a TCPStore under any prefixes."""
    return isinstance(base_store(store), TCPStore)
