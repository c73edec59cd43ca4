"""At which commit the memory of a device is, by a fake clock of its events."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticd.checkpointing.at_fault.step_ring import DEPTH, StepRing, make_ring


@dataclass
class Device:
    """Runs what is queued on it, in order, as far as the test says."""

    queued: int = 0
    done: int = 0
    kernels: deque[tuple[int, Callable[[], Any]]] = field(default_factory=deque)
    """Each with its place in the queue."""

    def mark(self) -> FakeEvent:
        self.queued += 1
        return FakeEvent(self, self.queued)

    def queue(self, kernel: Callable[[], Any]) -> None:
        self.queued += 1
        self.kernels.append((self.queued, kernel))

    def run(self, count: int = 1) -> None:
        self.done = min(self.done + count, self.queued)
        while self.kernels and self.kernels[0][0] <= self.done:
            self.kernels.popleft()[1]()


@dataclass
class FakeEvent:
    device: Device
    place: int

    def query(self) -> bool:
        return self.device.done >= self.place


def step(ring: StepRing, number: int) -> None:
    ring.before_optimizer_step()
    ring.commit(number, f"as of {number}")


def at(ring: StepRing) -> int | None:
    found = ring.commit_in_memory()
    assert found is None or found.small_state == f"as of {found.step}"
    return None if found is None else found.step


def test_memory_is_at_the_newest_commit_that_the_device_has_passed() -> None:
    device = Device()
    ring = StepRing(device.mark)
    for number in range(1, 1 + DEPTH):  # the processor runs ahead
        step(ring, number)
    seen, behind = [], []
    for _ in range(2 * DEPTH):
        behind.append(ring.is_device_behind())
        seen.append(at(ring))
        device.run()
    assert seen == [None, None, 1, None, 2, None, 3, None], "None: an optimizer step has begun"
    assert at(ring) == 4
    assert all(behind)
    assert not ring.is_device_behind()


def test_collective_that_hangs_keeps_the_memory_at_the_step_before() -> None:
    """The optimizer step is queued behind it: neither of its events is ever passed."""
    device = Device()
    ring = StepRing(device.mark)
    step(ring, 1)
    device.run(2)
    for number in range(2, 1 + DEPTH):
        step(ring, number)
    assert at(ring) == 1


def test_state_that_changes_during_a_copy_is_found() -> None:
    device = Device()
    ring = StepRing(device.mark)
    step(ring, 1)
    device.run(2)
    copied = ring.commit_in_memory()
    assert copied is not None and copied.is_intact()
    step(ring, 2)
    assert copied.is_intact(), "queued, and not begun"
    device.run()
    assert not copied.is_intact()


def test_device_further_behind_than_the_ring_is_nowhere() -> None:
    device = Device()
    ring = StepRing(device.mark)
    step(ring, 1)
    device.run(2)
    for number in range(2, 3 + DEPTH):
        step(ring, number)
    assert at(ring) is None
    device.run(2 * DEPTH)
    assert at(ring) == DEPTH + 1


def test_commit_in_another_stream_than_the_optimizers_step_is_none() -> None:
    """Its event does not follow that step."""
    device, stream = Device(), [1]
    ring = StepRing(device.mark, stream=lambda: stream[0])
    step(ring, 1)
    device.run(2)
    assert at(ring) == 1
    ring.before_optimizer_step()
    stream[0] = 2
    ring.commit(2, "as of 2")
    device.run(2)
    assert at(ring) is None
    step(ring, 3)
    device.run(2)
    assert at(ring) == 3


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_state_of_a_processor_is_that_of_its_last_commit(steps: int) -> None:
    ring = StepRing()
    for number in range(1, steps + 1):
        step(ring, number)
    assert at(ring) == (steps or None)


@pytest.mark.parametrize("ahead", [1, DEPTH - 2])
def test_buffers_and_random_state_are_those_of_the_commit_however_far_the_processor_is_ahead(ahead: int) -> None:
    """A step: the forward pass changes the buffer, then the optimizer, then the commit. What the device's generator
    draws follows from the processor's counter.
    """
    device = Device()
    running, counter = torch.zeros(3), 0
    ring = StepRing(device.mark, [running], lambda to, of: device.queue(lambda: torch._foreach_copy_(to, of)))
    seen = set()
    for number in range(1, 60):
        counter += 4
        device.queue(lambda value=float(number): running.fill_(value))
        ring.before_optimizer_step()
        ring.commit(number, counter)
        while device.queued - device.done > 4 * ahead:
            device.run()
            if (found := ring.commit_in_memory()) is not None:
                seen.add(found.step)
                assert found.buffers[0].tolist() == [found.step] * 3
                assert found.small_state == 4 * found.step
    assert len(seen) > 50


def test_rank_on_a_device_has_a_ring_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the stream that is current, also when that is another one. A rank on the processor has none."""
    device, streams = Device(), [SimpleNamespace(device_index=0, cuda_stream=number) for number in (5, 6)]
    used: list[Any] = []

    @dataclass
    class Event:
        """As torch's."""

        marked: FakeEvent | None = None

        def record(self, stream: Any) -> None:
            used.append(stream)
            self.marked = device.mark()

        def query(self) -> bool:
            return self.marked is not None and self.marked.query()

    inspect.signature(torch.cuda.Event.record).bind("self", streams[0])
    inspect.signature(torch.cuda.Event.query).bind("self")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: streams[index].cuda_stream, raising=False)
    running = torch.zeros(3)
    ring = make_ring(torch.device("cuda", 0), [running])
    step(ring, 1)
    assert at(ring) is None
    device.run(2)
    found = ring.commit_in_memory()
    assert found is not None and found.buffers[0].tolist() == [0.0] * 3
    running.fill_(1)
    assert found.buffers[0].tolist() == [0.0] * 3
    streams[:] = streams[1:]
    step(ring, 2)
    assert [each.cuda_stream for each in used] == [5, 5, 6, 6]
    processor = make_ring(torch.device("cpu"), [running])
    step(processor, 1)
    assert at(processor) == 1


def test_commit_after_which_the_state_was_changed_is_not_whole() -> None:
    device = Device()
    ring = StepRing(device.mark)
    step(ring, 1)
    ring.last.is_spoilt = True
    step(ring, 2)
    device.run(2)
    assert at(ring) is None
    device.run(2)
    assert at(ring) == 2
