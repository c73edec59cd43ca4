"""`session.barrier`: all ranks meet, out of band, and a rank that does not come is named.

It uses the round's store and never a collective, so it works on any backend and while the process group is broken. The
n-th barrier of every rank is the same barrier, whatever its name; the first to come fixes the name, and another name is
an error on all ranks at once. A barrier has one outcome, the same for all, fixed by one compare-and-set: the last to
come releases it, or a rank whose time is over breaks it, with the sentence that says who is missing. Those who wait
block in the store until the outcome is there. So a barrier of N ranks costs about 5 N messages, whichever way it ends;
only the rank that came first looks, now and then, for where the missing ones are.

A TCPStore client waits for ever for a store that is frozen, so the caller's thread never talks to the store: it lends
the channel's connection to a thread that does, and waits for it up to the deadline and a little more.

Keys, under the session's prefix: `came/<rank>` the number of the last barrier this rank came to; `barrier/<n>/name`,
`…/count`, `…/outcome`, deleted once all ranks have come to the next one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from datetime import timedelta
from typing import Any

from elasticd.coordination.rank_status import StatusPublisher, StatusReader
from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import BarrierTimeout, UsageError
from elasticd.heartbeat import record as beats

# The first to come looks for the others so long after it came, then after as long again, and then at least so often:
# what it learns is how old a last word is.
_FIRST_LOOK_S, _BETWEEN_LOOKS_S = 1.0, 15.0
# Words are said once a period: the look before the last one is a period and this before it, and so shows who is mute.
_SLACK_S = 0.3
# After its deadline a rank leaves the verdict to the first to come for so long, before it gives one itself (the higher
# the rank the later: one is enough) ...
_FALLBACK_S, _SPREAD_S = 0.5, 0.4
# ... and after so many looks the caller leaves without one, 1.7 s later: the store has not answered. They are counted,
# so that on a machine that gives this process no turn, the other thread gets none of the blame.
_GRACE_LOOKS, _LOOK_S = 34, 0.05
_LONGEST_WAIT_S = 86_400.0
# Any name will do, but a sentence shows no more of it.
_SHOWN = 80


class Barriers:
    """The barriers of one session. A group of one passes through all of them."""

    def __init__(self, channel: StoreChannel, roll: StatusPublisher, beat: beats.HeartbeatWriter) -> None:
        self._channel, self._roll, self._beat = channel, roll, beat
        self._number = 0
        self._one_at_a_time = threading.Lock()
        self._closed = False
        self.waiting_at: str | None = None

    def wait(self, name: str, timeout: float | timedelta | None = None) -> None:
        """Return once all ranks are here. Raises BarrierTimeout, UsageError, and torch's error for a lost store."""
        seconds = self._channel.timeout_s if timeout is None else timeout_seconds(timeout, "barrier(timeout=...)")
        if not isinstance(name, str):
            raise UsageError(f"barrier({name!r}): the name must be a string")
        if self._closed:
            raise UsageError(f"barrier({name!r}) after close()")
        if self._channel.world_size == 1:
            return
        if not self._one_at_a_time.acquire(blocking=False):
            raise UsageError(f"barrier({name!r}) while another thread waits at {self.waiting_at!r}: one at a time")
        before = self._beat.current_phase
        try:
            self._meet(name, seconds, said_s=0.0 if timeout is None else seconds)
        finally:
            self.waiting_at = None
            self._beat.set_phase(before)
            self._one_at_a_time.release()

    def close(self) -> None:
        """No more barriers. The roll's thread is closed by who made it, and after this."""
        self._closed = True

    def _meet(self, name: str, seconds: float, said_s: float) -> None:
        self._number += 1
        visit = _Visit(self._channel, self._roll, self._number, name, seconds)
        thread = threading.Thread(target=self._attend, args=(visit,), name="elasticd-barrier", daemon=True)
        try:
            self._beat.set_phase(beats.Phase.BARRIER, name, said_s)
            self.waiting_at = name
            thread.start()
            visit.over.wait(min(seconds, threading.TIMEOUT_MAX))
            visit.linger()
        except BaseException as error:
            # A signal's handler raised. The others must not wait for a rank that has left.
            visit.leave(f"{type(error).__name__} was raised in it")
            visit.linger()
            raise
        finally:
            self._roll.set_task(None)
        visit.result()

    def _attend(self, visit: _Visit) -> None:
        self._channel.in_use = True
        try:
            visit.attend(self._channel.store)
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for this one
            visit.error = error
        self._channel.in_use = False
        visit.over.set()


class _Visit:
    """One rank at one barrier: what its threads ask of the store, and what comes of it."""

    def __init__(self, channel: StoreChannel, roll: StatusPublisher, number: int, name: str, seconds: float) -> None:
        self._rank, self._world_size, self._roll = channel.rank, channel.world_size, roll
        self._prefix, self._number, self._name, self._seconds = channel.prefix, number, name, seconds
        self._key = f"{self._prefix}barrier/{number}/"
        self._what = f"barrier {name if len(name) <= _SHOWN else name[: _SHOWN - 3] + '...'!r}"
        self._began = time.monotonic()
        self._came = False
        self._left = ""  # why this rank does not wait any more
        self._looks = StatusReader(self._prefix)
        # Before the deadline by as much as shows who still speaks, where there is that much.
        margin_s = roll.period_s + _SLACK_S
        self._last_look_s = seconds - margin_s if seconds > margin_s else seconds / 2
        self._outcome: dict[str, Any] | None = None
        self.due = self._began + min(_FIRST_LOOK_S, self._last_look_s)
        self.over = threading.Event()
        self.error: Exception | None = None

    def attend(self, store: Any) -> None:
        """Come, and wait for the outcome."""
        store.set(f"{self._prefix}came/{self._rank}", str(self._number))
        mine = {"name": self._name, "rank": self._rank, "seconds": self._seconds}
        first = json.loads(store.compare_set(self._key + "name", "", json.dumps(mine)))
        self._came = True
        if first["name"] != self._name:
            why = (
                f"{self._what} on rank {self._rank} is barrier {first['name'][:_SHOWN]!r} on rank {first['rank']}: all "
                f"ranks must call the same barriers in the same order (this is number {self._number} of each)"
            )
            self._decide(store, {"usage": why})
        elif store.add(self._key + "count", 1) == self._world_size and not self._left:
            self._decide(store, {"released": True})
            if self._number > 1:
                self._roll.submit(self._forget_last)
        elif self._left:
            self._decide(store, self._leaving())
        else:
            # Who came first gives up first, unless this rank has less patience.
            if first["rank"] == self._rank or self._seconds < first["seconds"]:
                self._roll.set_task(self)
            self._await_outcome(store)

    def _await_outcome(self, store: Any) -> None:
        from torch.distributed import DistStoreError

        until = self._began + self._seconds + _FALLBACK_S + _SPREAD_S * self._rank / self._world_size
        while self._outcome is None:
            left = until - time.monotonic()
            if left <= 0:
                self._give_up(store, at_once=True)
                return
            asked, piece = time.monotonic(), min(left, _LONGEST_WAIT_S)
            try:
                store.wait([self._key + "outcome"], timedelta(seconds=max(piece, 0.001)))
            except DistStoreError:
                if time.monotonic() - asked < piece / 2:
                    raise  # not a wait that ran out: the store itself failed
            else:
                self._outcome = json.loads(store.get(self._key + "outcome"))

    def turn(self, store: Any) -> None:
        """The roll's thread: look where the missing ranks are; at the deadline, say so and end the barrier."""
        waited_s = time.monotonic() - self._began
        if waited_s >= self._seconds:
            self.due = math.inf
            self._give_up(store)
            return
        self._looks.read(store, self._missing(store))
        next_s = waited_s + min(max(waited_s, _FIRST_LOOK_S), _BETWEEN_LOOKS_S)
        self.due = self._began + (min(next_s, self._last_look_s) if waited_s < self._last_look_s else self._seconds)

    def leave(self, why: str) -> None:
        """This rank does not wait any more, and the others need not."""
        self._left = why

        def tell(store: Any) -> None:
            self._decide(store, self._leaving())
            self.over.set()

        self._roll.submit(tell, now=True)

    def _leaving(self) -> dict[str, Any]:
        told = f"{self._what}: rank {self._rank} has left it: {self._left}"
        return {"why": told, "missing": [self._rank], "by": self._rank}

    def linger(self) -> None:
        """Give the threads the time they need to find out what came of it, but no more."""
        for _ in range(_GRACE_LOOKS):
            if self.over.wait(_LOOK_S):
                return

    def result(self) -> None:
        """Return if the barrier was released, else raise what came of it."""
        waited_s = time.monotonic() - self._began
        if self.error is not None:
            raise self.error
        told = self._outcome
        if told is None:
            self._left = "the store answered too late"
            raise BarrierTimeout(self._silence(waited_s), name=self._name, missing=(), waited_s=waited_s)
        if "usage" in told:
            raise UsageError(told["usage"])
        if "why" in told:
            missing = tuple(told["missing"])
            late = self._rank in missing and told["by"] != self._rank
            why = f"rank {self._rank} came too late to {told['why']}" if late else told["why"]
            raise BarrierTimeout(why, name=self._name, missing=missing, waited_s=waited_s)

    def _missing(self, store: Any) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._is_here(store, rank)]

    def _is_here(self, store: Any, rank: int) -> bool:
        key = f"{self._prefix}came/{rank}"
        return bool(store.check([key])) and int(store.get(key)) >= self._number

    def _give_up(self, store: Any, at_once: bool = False) -> None:
        missing = self._missing(store)
        if not missing and not at_once:
            return  # the last one has just come, and is about to release all
        self._looks.read(store, missing)
        count = f"{len(missing)} of {self._world_size} ranks {'is' if len(missing) == 1 else 'are'} missing"
        told = f"{count} after {self._seconds:g} s: {self._looks.describe_all(missing)}"
        if not missing:
            told = f"every rank has come, but the last of them did not say so within {self._seconds:g} s"
        self._decide(store, {"why": f"{self._what}: {told}", "missing": missing, "by": self._rank})

    def _decide(self, store: Any, told: dict[str, Any]) -> None:
        """Fix the outcome, unless another rank has; either way it is known then."""
        self._outcome = json.loads(store.compare_set(self._key + "outcome", "", json.dumps(told)))

    def _forget_last(self, store: Any) -> None:
        for key in ("name", "count", "outcome"):
            with contextlib.suppress(RuntimeError):
                store.delete_key(f"{self._prefix}barrier/{self._number - 1}/{key}")

    def _silence(self, waited_s: float) -> str:
        since = f"for {waited_s - self._seconds:.1f} s" if self._came else f"since this rank came {waited_s:.1f} s ago"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            served = "served by a process of its own on rank 0's node"
        else:
            served = "served by rank 0's process"
        return f"{self._what}: the round's store ({served}) has not answered {since}"


def timeout_seconds(timeout: float | timedelta, what: str) -> float:
    """A timeout in seconds. Raises UsageError for one that cannot be."""
    seconds: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UsageError(f"{what} is {timeout!r}: give seconds, more than 0, or a timedelta")
    return float(seconds)
