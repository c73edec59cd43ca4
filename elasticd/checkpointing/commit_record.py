"""The small state of one rank as of its last commits, in a file that outlives the process.

A commit is the end of `session.step()`. What a forward pass or the script may change afterwards, without the optimizer,
is copied here at every commit: random states and the buffers of modules. A rank that saves its state at a fault reads
the records of all ranks of its node, those of dead ranks too. Parameters need no copy: `donor` describes why.

A rank may die after others have committed a step, and before it commits that step itself. So it is copied in the
backward pass, too, as the state that the commit is expected to have: the others cannot finish the step without the
gradients that the rank sends afterwards. Few scripts draw random numbers between that and the commit, and a rank that
has committed the step knows whether they do.

    slot = step % 2, 2 more if expected:  step, size of others | torch's generator | others: python, numpy |
                                          pieces of parameters | buffers
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
PIECE_BYTES = 64
MOST_PIECES = 16
"""Parameters of which a piece is copied, to find ranks that have diverged and changes that torch does not see."""
_OBJECT_HEAD_BYTES = 16
"""The reference count and the type of a Python object."""
_SLOTS = 4
_EXPECTED = 2


@dataclass(frozen=True, slots=True)
class Commit:
    """What the record of a rank has of one step."""

    random_state: dict[str, Any]
    buffers: list[torch.Tensor]
    pieces: bytes
    """Of parameters: ranks with different ones have diverged. An expected commit has none."""

    def draws_as(self, other: Commit) -> bool:
        return state.to_bytes(self.random_state) == state.to_bytes(other.random_state)


class CommitRecord:
    """The writing side. `buffers` and `parameters` are tensors on the CPU whose memory stays where it is.

    Raises OSError.
    """

    def __init__(self, path: str, buffers: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
        import torch

        self._generator = torch.default_generator
        self._gather: Any = torch.cat
        """One call for all: ten times as fast as a copy for each."""
        self._parameters = [piece(parameter, PIECE_BYTES) for parameter in parameters[:MOST_PIECES]]
        own = [piece(buffer) for buffer in buffers]
        self._copied = [self._parameters + own] * 2 + [own] * 2
        self._places = _Places(buffers, self._parameters)
        size = self._places.bytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _SLOTS * size)
            self._map = mmap.mmap(fd, _SLOTS * size)
        finally:
            os.close(fd)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        starts = [self._places.pieces] * 2 + [self._places.buffers] * 2
        self._copies = [whole[at * size + start : (at + 1) * size] for at, start in enumerate(starts)]
        self._others = b""
        self._others_in = [b""] * _SLOTS
        self._generators = _OtherGenerators()

    def pieces(self) -> bytes:
        """Of the parameters as they are now."""
        import torch

        return bytes(torch.cat(self._parameters).numpy())

    def commit(self, step: int) -> None:
        """A process that dies in here leaves the slot without a step, and the other slots whole."""
        self._copy(step, step % 2)

    def expect(self, step: int) -> None:
        """What the commit of `step` will have if nothing draws or changes a buffer until then."""
        self._copy(step, step % 2 + _EXPECTED)

    def _copy(self, step: int, number: int) -> None:
        slot = number * self._places.bytes
        _HEAD.pack_into(self._map, slot, -1, 0)
        now = self._generator.get_state()
        ctypes.memmove(self._address + slot + _HEAD.size, now.data_ptr(), self._places.generator)
        if self._generators.moved():
            import torch

            found = state.random_state(torch.device("cpu"))
            del found["torch"]
            self._others = state.to_bytes(found)
            if len(self._others) > _OTHERS_BYTES:
                raise CheckpointError(f"python's and numpy's random states take {len(self._others)} bytes")
        if self._others_in[number] is not self._others:
            at = slot + self._places.others
            self._map[at : at + len(self._others)] = self._others_in[number] = self._others
        if copied := self._copied[number]:
            self._gather(copied, out=self._copies[number])
        _HEAD.pack_into(self._map, slot, step, len(self._others))


def read(
    path: str, step: int, buffers: list[torch.Tensor], parameters: list[torch.Tensor], expected: bool = False
) -> Commit | None:
    """What a rank has committed as of `step`, or has expected to; None if it has not reached that step, or has left it.

    `buffers` and `parameters` have the shapes of the rank's.
    """
    import torch

    places = _Places(buffers, [piece(parameter, PIECE_BYTES) for parameter in parameters[:MOST_PIECES]])
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    if len(data) != _SLOTS * places.bytes:
        return None
    start = (step % 2 + _EXPECTED * expected) * places.bytes
    slot = data[start : start + places.bytes]
    found, size = _HEAD.unpack_from(slot)
    if found != step or not 0 < size <= _OTHERS_BYTES:
        return None
    generator = torch.frombuffer(bytearray(slot[_HEAD.size : places.others]), dtype=torch.uint8)
    others = state.from_bytes(slot[places.others : places.others + size])
    copies, at = [], places.buffers
    for buffer in buffers:
        end = at + buffer.numel() * buffer.element_size()
        copies.append(_tensor(slot[at:end], buffer))
        at = end
    return Commit({"torch": generator, **others}, copies, slot[places.pieces : places.buffers])


def as_expected(
    theirs: list[torch.Tensor], expected: list[torch.Tensor], committed: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The buffers that a rank has expected, where this rank has committed what it has expected; else this rank's."""
    import torch

    triples = zip(theirs, expected, committed, strict=True)
    return [their if torch.equal(before, now) else now for their, before, now in triples]


class _Places:
    """Offsets in a slot."""

    def __init__(self, buffers: list[torch.Tensor], pieces: list[torch.Tensor]) -> None:
        import torch

        self.generator = torch.default_generator.get_state().numel()
        self.others = _HEAD.size + self.generator
        self.pieces = self.others + _OTHERS_BYTES
        self.buffers = self.pieces + sum(piece.numel() for piece in pieces)
        self.bytes = self.buffers + sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def _tensor(data: bytes, like: torch.Tensor) -> torch.Tensor:
    import torch

    if not data:
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).view(like.shape)


def piece(tensor: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """The memory of a dense tensor as bytes, not a copy; `most` bytes from its middle."""
    import torch

    whole = tensor.numel() * tensor.element_size()
    size = whole if most is None else min(most, whole)
    start = tensor.storage_offset() * tensor.element_size() + (whole - size) // 2
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (size,), (1,))


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
