"""The small state of one rank as of its last commits, in a file that outlives the process.

A commit is the end of `session.step()`. What a forward pass or the script may change afterwards, without the optimizer,
is copied here at every commit: random states and the buffers of modules. A rank that saves its state at a fault reads
the records of all ranks of its node, those of dead ranks too. Parameters need no copy: `donor` describes why.

A rank may die after others have committed a step, and before it commits that step itself. So it is copied in the
backward pass, too, as the state that the commit is expected to have: the others cannot finish the step without the
gradients that the rank sends afterwards. Few scripts draw random numbers between that and the commit, and a rank that
has committed the step knows whether they do.

    slot = commits % 2, 2 more if expected: in steps that are no commits (gradients are accumulated) a rank expects the
           next one again and again, and keeps what it has expected of the last one
           head | pieces of parameters | buffers | memory of random generators
    head = step, flags, python's half of a pair of samples: valid, value | a GPU's generator | digest of small objects

Of a GPU's memory it has nothing: see `step_ring`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import operator
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elasticd.checkpointing.state import generators, training_state
from elasticd.checkpointing.state.training_state import RandomState
from elasticd.memory_order import order_stores, register_writer
from elasticd.process_group import host_bytes

_SLOT_HEAD = struct.Struct(f"<qqqd{generators.GPU_GENERATOR_BYTES}s16s")
_NO_STEP = -1
_NEXT_BEGUN, _LATE_CHANGES = 32, 64
"""Flags, beside those of `generators`: the next step has begun; what was changed before that is in the record."""
PIECE_BYTES = 64
MAX_PIECES = 16
"""Parameters of which a piece is copied, to find ranks that have diverged and changes that torch does not see."""
_ALL_PIECES_BYTES = MAX_PIECES * PIECE_BYTES
_MAX_VECTORS = 1024
"""IOV_MAX of limits.h."""
_pwritev: Any = ctypes.PyDLL(None).pwritev
_pwritev.restype = ctypes.c_ssize_t
_SLOT_COUNT = 4
_FIRST_EXPECTED_SLOT = 2
_SLOT_ALIGNMENT = 64
"""The alignment of slots: a step lies in one cache line, so no other process reads half of it."""
BufferPlace = tuple[Any, Any]
"""The place where a module has a buffer: a container, and the key in it. A script may put another tensor there."""


class OtherBuffers(Exception):
    """A module has a buffer of another shape or kind than the record was made for."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A rank's record of one step."""

    random_state: RandomState
    buffers: list[torch.Tensor]
    pieces: bytes  #: bytes of parameters: ranks with different ones have diverged. An expected commit has none.
    digest: bytes
    is_next_begun: bool = False  #: the next step has begun
    has_late_changes: bool = False  #: it has what was changed, or drawn, before the next step began

    def has_same_random_state(self, other: RecordedStep) -> bool:
        return training_state.to_bytes(self.random_state) == training_state.to_bytes(other.random_state)


class StepRecord:
    """The writing side, of tensors on the CPU. Raises OSError.

    Another one for the same path, with buffers of the same sizes, leaves the steps that are there.
    """

    def __init__(
        self,
        path: str,
        buffers: Sequence[BufferPlace],
        parameters: Sequence[torch.Tensor],
        device: torch.device | None = None,
        fixed: Sequence[BufferPlace] = (),
    ) -> None:
        """`device`: the rank's, if it is a GPU. `fixed`: tensors that only the optimizer changes, in place; read as
        buffers behind the others, and not expected.
        """

        self._buffers, self._fixed = list(buffers), list(fixed)
        self._holders, self._keys = [holder for holder, _ in buffers], [key for _, key in buffers]
        self._data_ptr: Any = torch.Tensor.data_ptr
        every = [holder[key] for holder, key in (*buffers, *fixed)]
        self._kinds = list(map(buffer_kind, every))
        self._pieces = [piece(parameter, PIECE_BYTES) for parameter in parameters[:MAX_PIECES]]
        left = _ALL_PIECES_BYTES - sum(map(len, self._pieces))
        self._pieces.append(torch.zeros(left, dtype=torch.uint8, device="cpu"))
        self._places = places = _SlotOffsets(every)
        size = _SLOT_COUNT * places.bytes
        self._fd = fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, fd)
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, size)
        self._map = mmap.mmap(fd, size)
        register_writer()
        self._steps = [memoryview(self._map)[slot : slot + 8].cast("q") for slot in range(0, size, places.bytes)]
        self._flags = [memoryview(self._map)[slot + 8 : slot + 16].cast("q") for slot in range(0, size, places.bytes)]
        self._next = int(self._steps[0][0] > self._steps[1][0])
        """The slot of the next commit, and of what is expected of it."""
        self._written: list[Any] = [None] * _SLOT_COUNT
        """The numbers of the generators and the digest in each slot."""
        self._generators = generators.Generators(device)
        self.moved_at = 0
        """The last step that found a buffer elsewhere than the step before; 0 for none."""
        self.locate_tensors()

    def locate_tensors(self) -> None:
        """Find the memory of the tensors again: torch moves one that the script sends to another process, and the
        script may replace a buffer. Raises OtherBuffers.
        """
        tensors = [holder.get(key) for holder, key in (*self._buffers, *self._fixed)]
        if list(map(buffer_kind, tensors)) != self._kinds:
            raise OtherBuffers
        memory, count = list(map(piece, tensors)), len(self._buffers)
        self._addresses = [buffer.data_ptr() for buffer in tensors[:count]]
        of_buffers, of_pieces, size = self._places.buffers, self._places.pieces, self._places.bytes
        self._gathers = [
            _GatheredWrite(self._fd, at * size + of_pieces, self._pieces + memory) for at in range(_FIRST_EXPECTED_SLOT)
        ]
        self._gathers += [
            _GatheredWrite(self._fd, at * size + of_buffers, memory[:count])
            for at in range(_FIRST_EXPECTED_SLOT, _SLOT_COUNT)
        ]
        self._memory = self._generators.memory
        whole = memoryview(self._map)
        self._copies = []
        for slot in range(0, _SLOT_COUNT * size, size):
            ends = itertools.accumulate(map(len, self._memory), initial=slot + self._places.generators)
            places = [whole[start:end] for start, end in itertools.pairwise(ends)]
            self._copies.append(list(zip(places, self._memory, strict=True)))

    def current_pieces(self) -> bytes:
        """Bytes of the parameters as they are now."""
        return bytes(host_bytes(torch.cat(self._pieces)))

    def commit(self, step: int, digest: bytes = b"") -> None:
        """A process that dies in here leaves the slot without a step, and the other slots whole.

        `digest` has at most 16 bytes. Raises OtherBuffers.
        """
        if self._buffers and self._are_buffers_moved():
            self.moved_at = step
            self.locate_tensors()
        self._write_slot(step, self._next, digest)
        self._next = 1 - self._next

    def replace_commit(self, step: int, digest: bytes = b"") -> None:
        """Replace the last commit, of the same step. Raises OtherBuffers."""
        self._next = 1 - self._next
        self.commit(step, digest)
        self._flags[1 - self._next][0] |= _LATE_CHANGES

    def mark_next_step_begun(self) -> None:
        """The next step does."""
        self._flags[1 - self._next][0] |= _NEXT_BEGUN

    def has_drawn(self) -> bool:
        """The generators have been used since the last commit."""
        at = 1 - self._next
        if self._written[at] is None or self._written[at][0] != self._generators.read_numbers():
            return True
        # Of bytes: a comparison of memoryviews takes ten times as long.
        return any(place.tobytes() != memory.tobytes() for place, memory in self._copies[at])

    def record_expected(self, step: int) -> None:
        """Record what the commit of `step` will have if nothing draws or changes a buffer until then. Raises
        OtherBuffers.

        A buffer that is moved for the first time may be as it was before: `moved_at` says so after the commit.
        """
        if self.moved_at and self._are_buffers_moved():
            self.locate_tensors()
        self._write_slot(step, self._next + _FIRST_EXPECTED_SLOT)

    def _write_slot(self, step: int, number: int, digest: bytes = b"") -> None:
        numbers, of_step = self._generators.read_numbers(), self._steps[number]
        of_step[0] = _NO_STEP
        if self._written[number] != (numbers, digest):
            _SLOT_HEAD.pack_into(self._map, number * self._places.bytes, _NO_STEP, *numbers, digest)
            self._written[number] = numbers, digest
        self._flags[number][0] = numbers[0]
        if self._generators.memory is not self._memory:
            self.locate_tensors()
        # What is read of a parameter that has moved is found at the fault: it differs from the parameter then.
        if not self._gathers[number].write():
            self.moved_at = step
            self.locate_tensors()
            if not self._gathers[number].write():
                raise OSError("the memory of a tensor cannot be read")
        for place, memory in self._copies[number]:
            place[:] = memory
        of_step[0] = step

    def _are_buffers_moved(self) -> bool:
        try:
            return list(map(self._data_ptr, map(operator.getitem, self._holders, self._keys))) != self._addresses
        except (KeyError, TypeError):
            return True


def read(path: str, step: int, buffers: Sequence[torch.Tensor], expected: bool = False) -> RecordedStep | None:
    """The record of a rank's commit of `step`, or of what it has expected of it; None if it has not reached that step,
    or has left it.

    `buffers` have the shapes of the rank's.
    """
    places = _SlotOffsets(buffers)
    try:
        with open(path, "rb", buffering=0) as file:
            slot = read_slot(file.fileno(), step, places.bytes, _FIRST_EXPECTED_SLOT * expected)
    except OSError:
        return None
    if slot is None:
        return None
    _, *numbers, digest = _SLOT_HEAD.unpack_from(slot)
    flags, has_half, half, of_device = numbers
    if not flags & generators.KNOWN_LAYOUT:
        return None
    random_state = generators.decode(slot[places.generators :], (flags, bool(has_half), half, of_device))
    copies, at = [], places.buffers
    for buffer in buffers:
        end = at + buffer.numel() * buffer.element_size()
        copies.append(_tensor_from_bytes(slot[at:end], buffer))
        at = end
    pieces = slot[places.pieces : places.buffers]
    return RecordedStep(random_state, copies, pieces, digest, bool(flags & _NEXT_BEGUN), bool(flags & _LATE_CHANGES))


def read_slot(fd: int, step: int, size: int, first: int) -> bytes | None:
    """The slot of `step`, `first` or the next one, if it has that step before and after all else was read."""
    if os.fstat(fd).st_size != _SLOT_COUNT * size:
        return None

    def step_at(offset: int) -> int:
        return int.from_bytes(os.pread(fd, 8, offset), "little", signed=True)

    for offset in (first * size, (first + 1) * size):
        if step_at(offset) == step:
            order_stores()
            slot = os.pread(fd, size, offset)
            order_stores()
            if len(slot) == size and step_at(offset) == step:
                return slot
    return None


def committed_steps(path: str) -> list[int]:
    """The last two steps that a rank has committed."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size // _SLOT_COUNT
            heads = [os.pread(file.fileno(), _SLOT_HEAD.size, at * size) for at in range(_FIRST_EXPECTED_SLOT)]
    except OSError:
        return []
    return sorted(step for head in heads if len(head) == _SLOT_HEAD.size and (step := _SLOT_HEAD.unpack(head)[0]) > 0)


def last_committed_step(path: str) -> int:
    """The last step that a rank has committed, 0 for none."""
    return max(committed_steps(path), default=0)


def expected_or_committed(
    theirs: list[torch.Tensor], expected: list[torch.Tensor], committed: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The buffers that a rank has expected, where this rank has committed what it has expected; else this rank's."""

    triples = zip(theirs, expected, committed, strict=True)
    return [their if torch.equal(before, now) else now for their, before, now in triples]


class _SlotOffsets:
    """Offsets in a slot."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.pieces = _SLOT_HEAD.size
        self.buffers = self.pieces + _ALL_PIECES_BYTES
        self.generators = self.buffers + sum(buffer.numel() * buffer.element_size() for buffer in buffers)
        used = self.generators + sum(generators.PYTHON_NUMPY_SIZES) + generators.torch_state_bytes()
        self.bytes = -(-used // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


def buffer_kind(buffer: Any) -> Any:
    """Equal for two buffers of which one can be copied to the other's place."""
    if not isinstance(buffer, torch.Tensor):
        return None
    return buffer.shape, buffer.dtype, buffer.device, buffer.layout, buffer.is_contiguous()


def _tensor_from_bytes(data: bytes, like: torch.Tensor) -> torch.Tensor:
    if not data:
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).view(like.shape)


def piece(tensor: torch.Tensor, most_bytes: int | None = None) -> torch.Tensor:
    """The memory of a dense tensor as bytes, not a copy; `most_bytes` from its middle."""
    whole = tensor.numel() * tensor.element_size()
    size = whole if most_bytes is None else min(most_bytes, whole)
    start = tensor.storage_offset() * tensor.element_size() + (whole - size) // 2
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (size,), (1,))


class _GatheredWrite:
    """Writes the memory of many tensors to one place of a file by one system call: ten times as fast as a copy of each,
    and memory that was given back meanwhile is an error and no crash.
    """

    def __init__(self, fd: int, offset: int, tensors: list[torch.Tensor]) -> None:
        self.calls: list[tuple[tuple[Any, ...], int]] = []
        filled = [tensor for tensor in tensors if tensor.numel()]
        for start in range(0, len(filled), _MAX_VECTORS):
            part = filled[start : start + _MAX_VECTORS]
            vectors = (ctypes.c_size_t * (2 * len(part)))()  # struct iovec: address and size
            vectors[::2], vectors[1::2] = ([t.data_ptr() for t in part], [t.numel() for t in part])
            size = sum(vectors[1::2])
            # Made once: converting numbers at each call takes as long as the call.
            self.calls.append(((ctypes.c_int(fd), vectors, ctypes.c_int(len(part)), ctypes.c_int64(offset)), size))
            offset += size

    def write(self) -> bool:
        """False if some memory has gone."""
        for call, size in self.calls:  # noqa: SIM110 - a generator takes 0.2 µs
            if _pwritev(*call) != size:
                return False
        return True
