"""The small state of one rank as of its last two commits, in a file that outlives the process.

A commit is the end of `session.step()`. What a forward pass or the script may change afterwards, without the optimizer,
is copied here at every commit: random states and the buffers of modules. A rank that saves its state at a fault reads
the records of all ranks of its node, those of dead ranks too. Parameters need no copy: `donor` describes why.

    slot = step % 2:  step, size of others | start of a parameter | torch's generator | others: python, numpy | buffers
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticd.checkpointing import state
from elasticd.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_HEAD = struct.Struct("<qq")
_OTHERS_BYTES = 16 << 10
"""python's and numpy's random states, as `state.to_bytes` writes them, take 8 KB."""
_SAMPLE_BYTES = 64
_GENERATOR = _HEAD.size + _SAMPLE_BYTES
_OBJECT_HEAD_BYTES = 16
"""The reference count and the type of a Python object."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What the record of a rank has of one step."""

    random_state: dict[str, Any]
    buffers: list[torch.Tensor]
    sample: bytes
    """The beginning of a parameter: ranks with different ones have diverged."""


class CommitRecord:
    """The writing side. `buffers` and `sample` are tensors on the CPU, the same objects at every commit.

    Raises OSError.
    """

    def __init__(self, path: str, buffers: list[torch.Tensor], sample: torch.Tensor) -> None:
        import torch

        self._generator = torch.default_generator
        self._buffers, self._sample = buffers, sample
        self._sampled = min(_SAMPLE_BYTES, sample.numel() * sample.element_size())
        self._places = _Places(buffers)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, 2 * self._places.bytes)
            self._map = mmap.mmap(fd, 2 * self._places.bytes)
        finally:
            os.close(fd)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._views = [_views(self._map, at * self._places.bytes, self._places, buffers) for at in (0, 1)]
        self._others = b""
        self._others_in: list[bytes] = [b"", b""]
        self._generators = _OtherGenerators()

    def commit(self, step: int) -> None:
        """A process that dies in here leaves the slot without a step, and the other slot whole."""
        import torch

        number = step % 2
        slot = number * self._places.bytes
        _HEAD.pack_into(self._map, slot, -1, 0)
        ctypes.memmove(self._address + slot + _HEAD.size, self._sample.data_ptr(), self._sampled)
        now = self._generator.get_state()
        ctypes.memmove(self._address + slot + _GENERATOR, now.data_ptr(), self._places.generator)
        if self._generators.moved():
            found = state.random_state(torch.device("cpu"))
            del found["torch"]
            self._others = state.to_bytes(found)
            if len(self._others) > _OTHERS_BYTES:
                raise CheckpointError(f"python's and numpy's random states take {len(self._others)} bytes")
        if self._others_in[number] is not self._others:
            at = slot + self._places.others
            self._map[at : at + len(self._others)] = self._others_in[number] = self._others
        if self._buffers:
            torch._foreach_copy_(self._views[number], self._buffers)
        _HEAD.pack_into(self._map, slot, step, len(self._others))


def read(path: str, step: int, buffers: list[torch.Tensor]) -> Commit | None:
    """What a rank has committed as of `step`; None if it has not committed that step, or has left it.

    `buffers` have the shapes of the rank's.
    """
    places = _Places(buffers)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    start = step % 2 * places.bytes
    slot = bytearray(data[start : start + places.bytes])
    if len(data) != 2 * places.bytes:
        return None
    found, size = _HEAD.unpack_from(slot)
    if found != step or not 0 < size <= _OTHERS_BYTES:
        return None
    import torch

    generator = torch.frombuffer(slot, dtype=torch.uint8, count=places.generator, offset=_GENERATOR)
    others = state.from_bytes(slot[places.others : places.others + size])
    sample = bytes(slot[_HEAD.size : _GENERATOR])
    return Commit({"torch": generator.clone(), **others}, _views(slot, 0, places, buffers), sample)


class _Places:
    """Offsets in a slot."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        import torch

        self.generator = torch.default_generator.get_state().numel()
        self.others = _GENERATOR + self.generator
        self.buffers = -(-(self.others + _OTHERS_BYTES) // 64) * 64
        self.bytes = self.buffers + sum(_padded(buffer) for buffer in buffers)


def _padded(buffer: torch.Tensor) -> int:
    return -(-buffer.numel() * buffer.element_size() // 64) * 64


def _views(memory: Any, slot: int, places: _Places, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    import torch

    views, at = [], slot + places.buffers
    for buffer in buffers:
        size = buffer.numel() * buffer.element_size()
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at) if size else torch.empty(0)
        views.append(whole.view(buffer.dtype).view(buffer.shape) if size else torch.empty_like(buffer))
        at += _padded(buffer)
    return views


class _OtherGenerators:
    """Whether python's and numpy's default generators have moved: copying their states takes 20 and 90 µs, comparing
    the memory of the objects one.
    """

    def __init__(self) -> None:
        self._python: Any = vars(random)["_inst"]
        self._memory = [_memory(self._python)]
        self._numpy: Any = None
        self._last: list[Any] = []

    def moved(self) -> bool:
        """Since the last call; True at the first one."""
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random.mtrand._rand
            if numpy._bit_generator is not self._numpy:
                self._numpy = numpy._bit_generator
                self._memory = [_memory(each) for each in (self._python, numpy, self._numpy)]
        now = [self._python.gauss_next, *map(bytes, self._memory)]
        before, self._last = self._last, now
        return now != before


def _memory(generator: Any) -> memoryview:
    size = type(generator).__basicsize__ - _OBJECT_HEAD_BYTES
    return memoryview((ctypes.c_char * size).from_address(id(generator) + _OBJECT_HEAD_BYTES)).cast("B")
