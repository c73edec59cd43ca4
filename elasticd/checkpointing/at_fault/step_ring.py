"""The small state of a rank as of its last commits, and which of them the memory is at.

A device runs behind its processor: `session.step()` returns before the kernels of the step have run. They run in the
order in which they were queued, so an event before each optimizer step and one at each commit say where the device is:
at the newest commit that it has passed, unless it has begun the optimizer step after it. A collective that hangs keeps
it from that. On a processor the last commit counts, and a lock says whether it is being changed.

What a forward pass changes on a device, buffers of modules, is copied there, too: the copy is queued at the commit, and
so has the values of that step. So are pieces of parameters, which show changes that torch does not count. The state of
a device's random generator is the processor's, and is kept like the rest.

All of that is true of one stream. A commit in another stream than that of the optimizer step before it is none.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

DEPTH = 4
"""Steps that a device may be behind. A processor that is further ahead waits in a launch, and its rank is no donor; the
commit records have two."""


class Event(Protocol):
    """The part of torch.cuda.Event that is used."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool:
        """The device has passed it."""


class Commit:
    """A commit of one step; `small_state` is what the script may change later, `buffers` the same on the device."""

    __slots__ = ("begun", "buffers", "done", "is_spoilt", "revision", "small_state", "step")

    def __init__(self, step: int = 0, small_state: Any = None, done: Event | None = None) -> None:
        self.step, self.small_state, self.done = step, small_state, done
        self.buffers: list[torch.Tensor] = []
        """The copy of each of the ring's buffers, on the device. A state may have no two types in one memory, so each
        has its own."""
        self.begun: Event | None = None
        """Before the optimizer step after it."""
        self.revision = 0
        self.is_spoilt = False
        """The state was changed after it."""

    def is_intact(self) -> bool:
        """The device has not begun to change the state of this commit."""
        return not self.is_spoilt and (self.begun is None or not self.begun.query())


class StepRing:
    """`mark` makes an event of the device and queues it in the current stream; None: the state is the processor's.

    `buffers` are the device's; `copy(targets, sources)`, such as torch._foreach_copy_, queues a copy of them. `stream`
    gives the current stream.
    """

    def __init__(
        self,
        mark: Callable[[], Event] | None = None,
        buffers: Sequence[torch.Tensor] = (),
        copy: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] | None = None,
        stream: Callable[[], Any] = int,
    ) -> None:
        self._mark, self._stream = mark, stream
        self._begun_on: Any = None
        self._buffers, self._copy = list(buffers), copy
        self.last = Commit()
        self._commits = deque([self.last], DEPTH)

    def before_optimizer_step(self) -> None:
        """Before an optimizer step is queued."""
        if self._mark is not None:
            self.last.begun, self._begun_on = self._mark(), self._stream()

    def commit(self, step: int, small_state: Any) -> None:
        """The step is queued."""
        if self._mark is None:
            self.last.step, self.last.small_state = step, small_state
            return
        if self._stream() == self._begun_on:
            copied = self._copy_buffers()
            self.last = Commit(step, small_state, self._mark())
            self.last.buffers = copied
        else:
            self.last = Commit()
        self._commits.append(self.last)

    def _copy_buffers(self) -> list[torch.Tensor]:
        """Into the memory of the commit that leaves the ring: the device has passed the optimizer step after it."""
        if self._copy is None or not self._buffers:
            return []
        oldest = self._commits[0].buffers if len(self._commits) == DEPTH else []
        targets = oldest or [buffer.new_empty(buffer.shape) for buffer in self._buffers]
        self._copy(targets, self._buffers)
        return targets

    def is_device_behind(self) -> bool:
        """The device has not passed the last commit."""
        return self.last.done is not None and not self.last.done.query()

    def commit_in_memory(self) -> Commit | None:
        """The commit that the memory is at; None between two, and where the device is further behind than DEPTH."""
        passed = (commit for commit in reversed(self._commits) if commit.done is None or commit.done.query())
        newest = next(passed, None)
        return newest if newest is not None and newest.step and newest.is_intact() else None


class _Stream:
    """The stream of a GPU that is current at each call. What torch.cuda offers for that takes 5 µs."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event
        self._found = functools.partial(torch.cuda.current_stream, device)
        self._number = functools.partial(torch._C._cuda_getCurrentRawStream, self._found().device_index)
        self._known: Any = None

    def current_number(self) -> int:
        number: int = self._number()
        return number

    def record_event(self) -> Event:
        if self._known is None or self._number() != self._known.cuda_stream:
            self._known = self._found()
        event: Event = self._event()
        event.record(self._known)
        return event


def make_ring(device: torch.device, buffers: Sequence[torch.Tensor]) -> StepRing:
    """The ring of a rank that trains on `device`."""
    if device.type != "cuda":
        return StepRing()

    stream = _Stream(device)
    return StepRing(stream.record_event, buffers, torch._foreach_copy_, stream.current_number)
