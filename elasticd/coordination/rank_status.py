"""Where every rank stands, in its own last word: so that a rank that does not come can be told from one that is slow.

Each rank's process says once a second which step it is at, in which phase, and for how long. The word goes to the
round's store from a thread with a connection of its own, and it is a plain `set`, which TCPStore does not answer: it
costs some 20 µs, waits for nobody, and nothing reads it until somebody is missed. It is said all the time, not
only while a rank waits, for two reasons. To ask once a second whether anybody waits would be as many messages; to wait
for the question would be none, but torch prints two lines whenever such a wait runs out, and python aborts a process
that exits while a thread comes back from one. And a rank that is stopped cannot be asked any more: its last word must
have been said before. In a large group words come more seldom, so that the store gets a few hundred of them a second.

Ages are those of an observer's own looks: no two clocks are compared. Nothing here decides anything.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

PERIOD_S = 1.0
# Above so many ranks the period grows: a word takes 10 µs of the store's time (benchmarks/barrier.py), all of them then
# half a hundredth of a core.
_WORDS_A_SECOND = 500
# A file store keeps every word ever written; there the words are few.
_FILE_PERIOD_S = 60.0
_FAREWELL_S = 1.0
# Nobody reads a list of hundreds of ranks; a look stays cheap, too.
MAX_RANKS_LISTED = 16


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank says of itself; `for_s` by its own clock, with a period's resolution."""

    step: int
    phase: str
    barrier: str = ""
    for_s: float = 0.0

    def __str__(self) -> str:
        where = f"waits at barrier {self.barrier!r}" if self.phase == "barrier" else f"phase {self.phase}"
        lasting = f" for {self.for_s:.0f} s" if self.for_s >= 2 else ""
        return f"step {self.step}, {where}{lasting}"


@dataclass(frozen=True, slots=True)
class _Heard:
    """A rank's newest word. It was said before `seen_at`, and after `not_before` if an earlier look knows that."""

    number: int
    standing: RankStatus
    seen_at: float
    not_before: float | None


class StatusReader:
    """What one observer has heard of other ranks, look by look; all times are its own."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._looked: dict[int, float] = {}
        self._heard: dict[int, _Heard] = {}

    def read(self, store: Any, ranks: Iterable[int]) -> None:
        """Read the words of these ranks, or of the first few of them. Raises what the store does."""
        for rank in list(ranks)[:MAX_RANKS_LISTED]:
            word = _read(store, f"{self._prefix}word/{rank}")
            now = time.monotonic()
            known = self._heard.get(rank)
            if word is not None and (known is None or known.number != word[0]):
                self._heard[rank] = _Heard(*word, seen_at=now, not_before=self._looked.get(rank))
            self._looked[rank] = now

    def has_status(self, rank: int) -> bool:
        """True if the rank has said anything."""
        return rank in self._heard

    def describe(self, rank: int) -> str:
        """The rank's last word and how old it is, as far as this observer can know."""
        heard = self._heard.get(rank)
        if heard is None:
            return "never heard of since the round began" if rank in self._looked else "not looked at"
        now = time.monotonic()
        least = now - heard.seen_at
        if heard.not_before is None:
            age = f"said more than {least:.1f} s ago" if least >= 0.1 else "said at some time before"
        elif least < 0.1:
            age = f"said in the last {now - heard.not_before:.1f} s"
        else:
            age = f"said {least:.1f} to {now - heard.not_before:.1f} s ago"
        return f"{heard.standing}, {age}"

    def describe_all(self, ranks: Iterable[int]) -> str:
        """All of them in one line: "rank 1 (step 17, phase eval, said in the last 1.3 s), rank 3 (…)"."""
        every = list(ranks)
        more = f" and {len(every) - MAX_RANKS_LISTED} more" if len(every) > MAX_RANKS_LISTED else ""
        return ", ".join(f"rank {rank} ({self.describe(rank)})" for rank in every[:MAX_RANKS_LISTED]) + more


def _read(store: Any, key: str) -> tuple[int, RankStatus] | None:
    """The word there, without waiting for one; one that cannot be understood is none."""
    if not store.check([key]):
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        told = json.loads(store.get(key))
        return int(told["n"]), RankStatus(
            int(told["step"]), str(told["phase"]), str(told["barrier"]), float(told["for_s"])
        )
    return None


class PeriodicTask(Protocol):
    """Something to be done from time to time while this rank waits."""

    due: float

    def turn(self, store: Any) -> None:
        """It is due; sets when it is due again."""


class StatusPublisher:
    """This rank's part: the thread that says its word, and does what else must not be done by the training thread.

    `connect` makes the thread's own connection; `standing` is asked from that thread. A store that is gone ends the
    thread: there is nobody left to tell.
    """

    def __init__(
        self, connect: Callable[[], Any], prefix: str, rank: int, world_size: int, standing: Callable[[], RankStatus]
    ) -> None:
        self.period_s = max(PERIOD_S, world_size / _WORDS_A_SECOND)
        self._connect, self._standing = connect, standing
        self._key = f"{prefix}word/{rank}"
        self._changed = threading.Condition()
        self._watch: PeriodicTask | None = None
        self._tasks: list[Callable[[Any], None]] = []
        self._wakes_at = 0.0
        self._awake = self._closed = False
        self._said, self._last, self._since = 0, RankStatus(0, "starting"), time.monotonic()
        self._thread = threading.Thread(target=self._run, name="elasticd-roll", daemon=True)
        self._pid = os.getpid()

    def start(self, store: Any) -> None:
        """Say the first word, with the caller's store, and begin; `close` is called when python ends, if not before."""
        self._say(store, self._standing())
        self._thread.start()
        atexit.register(self.close)

    def set_task(self, watch: PeriodicTask | None) -> None:
        """Give this its turns from now on, in place of what was there before."""
        with self._changed:
            self._watch = watch
            # As a rule its regular turn comes first, and a barrier that is soon over costs the thread nothing.
            if watch is not None and watch.due < self._wakes_at:
                self._wake()

    def submit(self, task: Callable[[Any], None], *, now: bool = False) -> None:
        """Have this done with the thread's store, at its next turn at the latest."""
        with self._changed:
            self._tasks.append(task)
            if now:
                self._wake()

    def close(self) -> None:
        """Do what is left, say that this rank leaves, and end the thread; a store that does not answer is left alone.

        A second call does nothing, and neither does one in a process that was forked.
        """
        if self._pid != os.getpid() or self._thread.ident is None:
            return
        with self._changed:
            already, self._closed = self._closed, True
            self._wake()
        if not already:
            atexit.unregister(self.close)
            self._thread.join(_FAREWELL_S)

    def _wake(self) -> None:
        self._awake = True
        self._changed.notify()

    def _run(self) -> None:
        # torch's errors of a store are RuntimeErrors.
        with contextlib.suppress(RuntimeError):
            store = self._connect()
            if not is_tcp(store):
                self.period_s = max(self.period_s, _FILE_PERIOD_S)
            says_at = time.monotonic() + self.period_s
            while True:
                if time.monotonic() >= says_at:
                    self._say(store, self._standing())
                    says_at = time.monotonic() + self.period_s
                with self._changed:
                    watch, tasks, closed = self._watch, self._tasks, self._closed
                    self._tasks = []
                for task in tasks:
                    task(store)
                if closed:
                    self._say(store, RankStatus(self._standing().step, "exit"))
                    return
                if watch is not None and time.monotonic() >= watch.due:
                    watch.turn(store)
                with self._changed:
                    self._wakes_at = min(says_at, self._watch.due if self._watch is not None else says_at)
                    if not self._awake:
                        self._changed.wait(max(0.0, self._wakes_at - time.monotonic()))
                    self._awake = False

    def _say(self, store: Any, standing: RankStatus) -> None:
        now = time.monotonic()
        if standing != self._last:
            self._last, self._since = standing, now
        self._said += 1
        word = {
            "n": self._said,
            "step": standing.step,
            "phase": standing.phase,
            "barrier": standing.barrier,
            "for_s": round(now - self._since, 1),
        }
        store.set(self._key, json.dumps(word))


def new_connection(store: Any) -> Any:
    """Another connection to the same store: one may wait while the other is used."""
    if hasattr(store, "clone"):
        return store.clone()
    # torch 2.6 cannot. Prefixes are left out, on every rank alike.
    from torch._C._distributed_c10d import TCPStore

    root = _root(store)
    return TCPStore(root.host, root.port, is_master=False) if isinstance(root, TCPStore) else store


def is_tcp(store: Any) -> bool:
    """True for a TCPStore under any prefixes."""
    from torch._C._distributed_c10d import TCPStore

    return isinstance(_root(store), TCPStore)


def _root(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
