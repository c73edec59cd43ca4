"""`session.barrier`: all ranks meet, out of band, and the error names a rank that does not come.

It uses the round's store and never a collective, so it works while the process group is broken. The n-th barrier of
every rank is the same one; the first rank to come fixes its name, and another name is an error on all ranks. One
compare-and-set fixes the outcome for all: the last rank to come releases the barrier, or a rank whose timeout is over
breaks it. Waiting ranks block in the store until the outcome is there, so N ranks cost about 5 N messages. A TCPStore
client waits for ever for a frozen store, so a thread uses the channel's connection, and the caller waits for it a
little beyond the deadline.

Keys, under the session's prefix: `came/<rank>` is the number of the last barrier this rank came to; `barrier/<n>/name`,
`…/count` and `…/outcome` are deleted once all ranks have come to the next one.
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

from torch.distributed import DistStoreError

from elasticd.bounded_json import JsonObject
from elasticd.coordination.missed_call import MissedCallDetector
from elasticd.coordination.rank_status import StatusPublisher, StatusReader
from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import BarrierTimeout, MissedCall, UsageError
from elasticd.heartbeat.record import HeartbeatWriter, Phase

# The first rank to come reads the status of the others this long after it came, then after as long again, and then at
# least this often: two reads bound the age of a status.
_FIRST_READ_AFTER_S = 1.0
_MAX_READ_INTERVAL_S = 15.0
# Statuses are published once a period: the read before the last one is a period and this before it, which shows who is
# mute.
_PERIOD_SLACK_S = 0.3
# After its deadline a rank leaves the outcome to the first to come for this long, before it decides itself (the higher
# the rank the later: one is enough) ...
_FALLBACK_AFTER_S = 0.5
_FALLBACK_SPREAD_S = 0.4
# ... and after so many waits the caller leaves without one, 1.7 s later: the store has not answered. The waits are
# counted, so that the other thread gets no blame on a machine that gives this process no turn.
_GRACE_WAITS = 34
_GRACE_WAIT_S = 0.05
_MAX_STORE_WAIT_S = 86_400.0
# Any name is valid, but a sentence shows at most this much of it.
_SHOWN_NAME_CHARACTERS = 80


class Barriers:
    """The barriers of one session. A group of one passes through all of them."""

    def __init__(self, channel: StoreChannel, publisher: StatusPublisher, heartbeat: HeartbeatWriter) -> None:
        self._channel = channel
        self._publisher = publisher
        self._heartbeat = heartbeat
        self._number = 0
        self._one_at_a_time = threading.Lock()
        self._closed = False
        self.waiting_at: str | None = None

    def wait(self, name: str, timeout: float | timedelta | None = None) -> None:
        """Return once all ranks are here.

        `timeout` is in seconds or a timedelta; None: the session's decision timeout. Raises BarrierTimeout with the
        missing ranks and their last status, UsageError for an unusable name or a second thread at a barrier, MissedCall
        where a rank has passed this call by, and torch's error for a lost store.
        """
        seconds = self._channel.timeout_s if timeout is None else timeout_seconds(timeout, "barrier(timeout=...)")
        if not isinstance(name, str):
            raise UsageError(f"barrier({name!r}): the name must be a string")
        if self._closed:
            raise UsageError(f"barrier({name!r}) after close()")
        if self._channel.world_size == 1:
            return
        if not self._one_at_a_time.acquire(blocking=False):
            raise UsageError(f"barrier({name!r}) while another thread waits at {self.waiting_at!r}: one at a time")
        before, call = self._heartbeat.current_phase, self._channel.call
        self._channel.call = f"barrier({name!r})"
        try:
            self._number += 1
            with self._channel.report_wait(f"barrier/{self._number}/outcome", any_step=True) as missed:
                self._meet(name, seconds, 0.0 if timeout is None else seconds, missed)
        finally:
            self.waiting_at = None
            self._channel.call = call
            self._heartbeat.set_phase(before)
            self._one_at_a_time.release()

    @property
    def has_been_called(self) -> bool:
        """This rank has come to a barrier."""
        return self._number > 0

    def close(self) -> None:
        """Refuse further barriers. The session closes the publisher's thread after this."""
        self._closed = True

    def _meet(self, name: str, seconds: float, script_timeout_s: float, missed: MissedCallDetector) -> None:
        barrier = _Barrier(self._channel, self._publisher, self._number, name, seconds, missed)
        thread = threading.Thread(target=self._attend, args=(barrier,), name="elasticd-barrier", daemon=True)
        try:
            self._heartbeat.set_phase(Phase.BARRIER, name, script_timeout_s)
            self.waiting_at = name
            thread.start()
            barrier.over.wait(min(seconds, threading.TIMEOUT_MAX))
            barrier.wait_briefly_until_over()
        except BaseException as error:
            # A signal handler raised. The others must not wait for a rank that has left.
            barrier.leave(f"{type(error).__name__} was raised in it")
            barrier.wait_briefly_until_over()
            raise
        finally:
            self._publisher.set_task(None)
        barrier.raise_unless_released()

    def _attend(self, barrier: _Barrier) -> None:
        self._channel.in_use = True
        try:
            barrier.attend(self._channel.store)
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for this one
            barrier.error = error
        self._channel.in_use = False
        barrier.over.set()


class _Barrier:
    """One barrier of this rank: what it has written, what it has read, and the outcome.

    Two threads use it. `attend` runs in a thread of its own, since a frozen store holds its caller; `turn` runs in
    the publisher's thread, with a connection of its own, and reads the status of those that are missing. The outcome is
    written once, by compare-and-set, so the two agree, as all ranks do.
    """

    def __init__(
        self,
        channel: StoreChannel,
        publisher: StatusPublisher,
        number: int,
        name: str,
        seconds: float,
        missed: MissedCallDetector,
    ) -> None:
        self._missed = missed
        self._publisher = publisher
        self._channel = channel
        self._number = number
        self._name = name
        self._seconds = seconds
        self._key = f"{self._channel.prefix}barrier/{number}/"
        shown = name if len(name) <= _SHOWN_NAME_CHARACTERS else name[: _SHOWN_NAME_CHARACTERS - 3] + "..."
        self._what = f"barrier {shown!r}"
        self._began = time.monotonic()
        self._came = False
        self._left = ""  # why this rank does not wait any more
        self._statuses = StatusReader(self._channel.prefix)
        # Before the deadline by as much as shows which ranks still publish, where there is that much time.
        margin_s = publisher.period_s + _PERIOD_SLACK_S
        self._last_read_s = seconds - margin_s if seconds > margin_s else seconds / 2
        self._outcome: JsonObject | None = None
        self.due_at = self._began + min(_FIRST_READ_AFTER_S, self._last_read_s)
        self.over = threading.Event()
        self.error: Exception | None = None

    def attend(self, store: Any) -> None:
        """Come, and wait for the outcome.

        The number is written before the name is compared, so that others see that this rank has come to *a* barrier;
        the count is raised last, so that the last rank to count knows that all have the same name.
        """
        store.set(f"{self._channel.prefix}came/{self._channel.rank}", str(self._number))
        mine = {"name": self._name, "rank": self._channel.rank, "seconds": self._seconds}
        first = json.loads(store.compare_set(self._key + "name", "", json.dumps(mine)))
        self._came = True
        if first["name"] != self._name:
            why = (
                f"{self._what} on rank {self._channel.rank} is barrier {first['name'][:_SHOWN_NAME_CHARACTERS]!r} on "
                f"rank {first['rank']}: all ranks must call the same barriers in the same order (this is number "
                f"{self._number} of each)"
            )
            self._decide(store, {"usage": why})
            return
        # A rank that has left is not counted, else the last to come would release the others into work without it.
        last = not self._left and store.add(self._key + "count", 1) == self._channel.world_size
        if self._left:
            self._decide(store, self._outcome_of_leaving())
        elif last:
            self._decide(store, {"released": True})
            if self._number > 1:
                self._publisher.submit(self._delete_previous_keys)
        else:
            # The rank that came first times out first, unless this rank has a shorter timeout.
            if first["rank"] == self._channel.rank or self._seconds < first["seconds"]:
                self._publisher.set_task(self)
            self._await_outcome(store)

    def _await_outcome(self, store: Any) -> None:
        until = (
            self._began
            + self._seconds
            + _FALLBACK_AFTER_S
            + _FALLBACK_SPREAD_S * self._channel.rank / self._channel.world_size
        )
        while self._outcome is None:
            left = until - time.monotonic()
            if left <= 0:
                self._time_out(store, even_if_all_came=True)
                return
            start, piece = time.monotonic(), min(left, _MAX_STORE_WAIT_S)
            try:
                store.wait([self._key + "outcome"], timedelta(seconds=max(piece, 0.001)))
            except DistStoreError:
                if time.monotonic() - start < piece / 2:
                    raise  # no timeout: the store itself failed
            else:
                self._outcome = json.loads(store.get(self._key + "outcome"))

    def turn(self, store: Any) -> None:
        """Read the status of missing ranks, in the publisher's thread; at the deadline, end the barrier."""
        waited_s = time.monotonic() - self._began
        if waited_s >= self._seconds:
            self.due_at = math.inf
            self._time_out(store)
            return
        missing = self._missing_ranks(store)
        self._channel.report_missing_ranks(missing)
        self._statuses.read(store, missing)
        error = self._missed.find(store, missing, self._statuses, lambda rank: self._has_come(store, rank))
        if isinstance(error, MissedCall):
            self.due_at = math.inf
            self._decide(store, {"missed": str(error)})
            return
        next_s = waited_s + min(max(waited_s, _FIRST_READ_AFTER_S), _MAX_READ_INTERVAL_S)
        self.due_at = self._began + (min(next_s, self._last_read_s) if waited_s < self._last_read_s else self._seconds)

    def leave(self, why: str) -> None:
        """This rank does not wait any more, and the others need not."""
        self._left = why

        def publish(store: Any) -> None:
            self._decide(store, self._outcome_of_leaving())
            self.over.set()

        self._publisher.submit(publish, now=True)

    def _outcome_of_leaving(self) -> JsonObject:
        why = f"{self._what}: rank {self._channel.rank} has left it: {self._left}"
        return {"why": why, "missing": [self._channel.rank], "by": self._channel.rank}

    def wait_briefly_until_over(self) -> None:
        """Give the threads the time that they need to learn the outcome, but no more."""
        for _ in range(_GRACE_WAITS):
            if self.over.wait(_GRACE_WAIT_S):
                return

    def raise_unless_released(self) -> None:
        """Raise the barrier's outcome unless all ranks have come."""
        waited_s = time.monotonic() - self._began
        if self.error is not None:
            raise self.error
        outcome = self._outcome
        if outcome is None:
            self._left = "the store answered too late"
            raise BarrierTimeout(self._no_answer_message(waited_s), name=self._name, missing=(), waited_s=waited_s)
        for kind, error in (("usage", UsageError), ("missed", MissedCall)):
            if kind in outcome:
                raise error(outcome[kind])
        if "why" in outcome:
            missing = tuple(outcome["missing"])
            late = self._channel.rank in missing and outcome["by"] != self._channel.rank
            why = f"rank {self._channel.rank} came too late to {outcome['why']}" if late else outcome["why"]
            raise BarrierTimeout(why, name=self._name, missing=missing, waited_s=waited_s)

    def _missing_ranks(self, store: Any) -> list[int]:
        return [rank for rank in range(self._channel.world_size) if not self._has_come(store, rank)]

    def _has_come(self, store: Any, rank: int) -> bool:
        key = f"{self._channel.prefix}came/{rank}"
        return bool(store.check([key])) and int(store.get(key)) >= self._number

    def _time_out(self, store: Any, even_if_all_came: bool = False) -> None:
        """End the barrier with the names of those who are missing, unless the last one has just come."""
        missing = self._missing_ranks(store)
        if not missing and not even_if_all_came:
            return  # the last one has just come, and is about to release all
        self._statuses.read(store, missing)
        count = f"{len(missing)} of {self._channel.world_size} ranks {'is' if len(missing) == 1 else 'are'} missing"
        why = f"{count} after {self._seconds:g} s: {self._statuses.describe_all(missing)}"
        if not missing:
            why = f"every rank has come, but the last one did not release it within {self._seconds:g} s"
        self._decide(store, {"why": f"{self._what}: {why}", "missing": missing, "by": self._channel.rank})

    def _decide(self, store: Any, outcome: JsonObject) -> None:
        """Fix the outcome, unless another rank has; either way it is known afterwards."""
        self._outcome = json.loads(store.compare_set(self._key + "outcome", "", json.dumps(outcome)))

    def _delete_previous_keys(self, store: Any) -> None:
        """Delete the keys of the barrier before this one: every rank has come to this one, so none
        reads them any more.
        """
        for key in ("name", "count", "outcome"):
            with contextlib.suppress(RuntimeError):
                store.delete_key(f"{self._channel.prefix}barrier/{self._number - 1}/{key}")

    def _no_answer_message(self, waited_s: float) -> str:
        """Return the sentence for a store that has not answered, with the process that serves it."""
        since = f"for {waited_s - self._seconds:.1f} s" if self._came else f"since this rank came {waited_s:.1f} s ago"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            served = "served by a process of its own on rank 0's node"
        else:
            served = "served by rank 0's process"
        return f"{self._what}: the round's store ({served}) has not answered {since}"


def timeout_seconds(timeout: float | timedelta, what: str) -> float:
    """A timeout in seconds. Raises UsageError unless it is a positive, finite time."""
    seconds: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UsageError(f"{what} is {timeout!r}: give seconds, more than 0, or a timedelta")
    return float(seconds)
