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
import json
import mmap
import os
import random
import struct
import sys
import weakref
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticd.checkpointing import state
from elasticd.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_HEAD = struct.Struct("<qq")
_pack_head = _HEAD.pack_into
_OTHERS_BYTES = 16 << 10
"""python's and numpy's random states take 5 KB."""
PIECE_BYTES = 64
MOST_PIECES = 16
"""Parameters of which a piece is copied, to find ranks that have diverged and changes that torch does not see."""
_MOST_VECTORS = 1024
"""IOV_MAX of limits.h."""
_WORDS, _COUNTERS_BYTES, _SAMPLES_BYTES, _GENERATOR_BYTES = 624, 20, 28, 3072
"""Of at::CPUGeneratorImpl: its words, what it keeps before and after them, and more than the whole of it."""
_WORD = "I"
"""Of `array`: 32 bits."""
_SLOTS = 4
_EXPECTED = 2


@dataclass(frozen=True, slots=True)
class RecordedCommit:
    """What the record of a rank has of one step."""

    random_state: dict[str, Any]
    buffers: list[torch.Tensor]
    pieces: bytes
    """Of parameters: ranks with different ones have diverged. An expected commit has none."""

    def draws_as(self, other: RecordedCommit) -> bool:
        return state.to_bytes(self.random_state) == state.to_bytes(other.random_state)


class CommitRecord:
    """The writing side, of tensors on the CPU. Raises OSError."""

    def __init__(self, path: str, buffers: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
        self._parameters = [piece(parameter, PIECE_BYTES) for parameter in parameters[:MOST_PIECES]]
        self._buffers = [piece(buffer) for buffer in buffers]
        self._places = _Places(buffers, self._parameters)
        size = self._places.bytes
        self._fd = fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, fd)
        os.posix_fallocate(fd, 0, _SLOTS * size)
        self._map = mmap.mmap(fd, _SLOTS * size)
        self._slots = range(0, _SLOTS * size, size)
        self.locate()
        self._generators = _Generators()
        self._written: list[tuple[bytes, bytes]] = [(b"", b"")] * _SLOTS
        """The random states in each slot."""

    def locate(self) -> None:
        """Find the memory of the tensors again: torch moves one that the script sends to another process."""
        pieces, buffers, size = self._places.pieces, self._places.buffers, self._places.bytes
        both = self._parameters + self._buffers
        self._addresses = [buffer.data_ptr() for buffer in self._buffers]
        self._gathers = [_Gather(self._fd, at * size + pieces, both) for at in range(_EXPECTED)]
        self._gathers += [_Gather(self._fd, at * size + buffers, self._buffers) for at in range(_EXPECTED, _SLOTS)]

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
        slot, gather, before = self._slots[number], self._gathers[number], self._written[number]
        states = self._generators.states()
        if gather.calls or states is not before:
            _pack_head(self._map, slot, -1, 0)
            if states is not before:
                self._copy_states(states, number)
            # What is read of a parameter that has moved is found at the fault: it differs from the parameter then.
            if not gather.write() or (self._buffers and self._are_moved()):
                self.locate()
                if not self._gathers[number].write():
                    raise OSError("the memory of a tensor cannot be read")
        _pack_head(self._map, slot, step, len(states[1]))

    def _copy_states(self, states: tuple[bytes, bytes], number: int) -> None:
        (own, others), before = states, self._written[number]
        if own is not before[0]:
            at = self._slots[number] + _HEAD.size
            self._map[at : at + len(own)] = own
        if others is not before[1]:
            at = self._slots[number] + self._places.others
            self._map[at : at + len(others)] = others
        self._written[number] = states

    def _are_moved(self) -> bool:
        return [buffer.data_ptr() for buffer in self._buffers] != self._addresses


def read(
    path: str, step: int, buffers: list[torch.Tensor], parameters: list[torch.Tensor], expected: bool = False
) -> RecordedCommit | None:
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
    others = _read_others(slot[places.others : places.others + size])
    copies, at = [], places.buffers
    for buffer in buffers:
        end = at + buffer.numel() * buffer.element_size()
        copies.append(_tensor(slot[at:end], buffer))
        at = end
    return RecordedCommit({"torch": generator, **others}, copies, slot[places.pieces : places.buffers])


def last_step(path: str) -> int:
    """The last step that a rank has committed, 0 for none."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size // _SLOTS
            heads = [os.pread(file.fileno(), _HEAD.size, at * size) for at in range(_EXPECTED)]
    except OSError:
        return 0
    return max((_HEAD.unpack(head)[0] for head in heads if len(head) == _HEAD.size), default=0)


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


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, with its counter of changes; other tensors as they are."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def piece(tensor: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """The memory of a dense tensor as bytes, not a copy; `most` bytes from its middle."""
    import torch

    whole = tensor.numel() * tensor.element_size()
    size = whole if most is None else min(most, whole)
    start = tensor.storage_offset() * tensor.element_size() + (whole - size) // 2
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (size,), (1,))


class _Gather:
    """Writes the memory of many tensors to one place of a file by one system call: ten times as fast as a copy of each,
    and memory that was given back meanwhile is an error and no crash.
    """

    def __init__(self, fd: int, offset: int, tensors: list[torch.Tensor]) -> None:
        self._write: Any = ctypes.PyDLL(None).pwritev
        self._write.restype = ctypes.c_ssize_t
        self.calls: list[tuple[tuple[Any, ...], int]] = []
        for start in range(0, len(tensors), _MOST_VECTORS):
            part = [tensor for tensor in tensors[start : start + _MOST_VECTORS] if tensor.numel()]
            vectors = (ctypes.c_size_t * (2 * len(part)))()  # struct iovec: address and size
            vectors[::2], vectors[1::2] = ([t.data_ptr() for t in part], [t.numel() for t in part])
            size = sum(vectors[1::2])
            # Made once: converting numbers at each call takes as long as the call.
            self.calls.append(((ctypes.c_int(fd), vectors, ctypes.c_int(len(part)), ctypes.c_int64(offset)), size))
            offset += size

    def write(self) -> bool:
        """False if some memory has gone."""
        for call, size in self.calls:  # noqa: SIM110 - a generator takes 0.2 µs
            if self._write(*call) != size:
                return False
        return True


class _Generators:
    """The states of the default generators. Copying torch's takes 1 µs, python's and numpy's 30, and comparing the
    memory of the objects 0.3: only those that have moved are copied.
    """

    def __init__(self) -> None:
        import torch

        self._default = torch.default_generator
        self._own = _torch_memory(self._default)
        self._python: Any = vars(random)["_inst"]
        self._numpy: Any = None
        """The default generator, once the script has imported numpy."""
        self._bits: Any = None
        self._memory = [self._own, _memory(self._python)]
        self._before, self._gauss = b"", None
        self._states = (b"", b"")

    def _find_numpy(self) -> None:
        if "numpy" in sys.modules:
            self._numpy = sys.modules["numpy"].random.mtrand._rand
            self._locate_numpy()

    def _locate_numpy(self) -> None:
        self._bits = self._numpy._bit_generator
        self._memory = [self._own, *(_memory(each) for each in (self._python, self._numpy, self._bits))]

    def states(self) -> tuple[bytes, bytes]:
        """Torch's, and the others' (`_other_states`); the same object while none has moved.

        Raises CheckpointError where they do not fit.
        """
        if self._numpy is None:
            self._find_numpy()
        elif self._numpy._bit_generator is not self._bits:
            self._locate_numpy()
        now, gauss = b"".join(self._memory), self._python.gauss_next
        if self._own and now == self._before and gauss == self._gauss:
            return self._states
        own, others = self._states
        size = len(self._own)
        if not size or now[:size] != self._before[:size]:
            found = self._default.get_state()
            own = ctypes.string_at(found.data_ptr(), found.numel())
        if now[size:] != self._before[size:] or gauss != self._gauss:
            others = _other_states()
        self._before, self._gauss = now, gauss
        self._states = (own, others)
        return self._states


def _other_states() -> bytes:
    """Python's and numpy's: a line of JSON, then the words of each. As `torch.save` writes them they take 0.2 ms."""
    version, words, gauss = random.getstate()
    small: dict[str, Any] = {"python": [version, gauss]}
    data = array(_WORD, words).tobytes()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        small["numpy"] = [name, int(position), int(has_gauss), float(cached)]
        data += keys.tobytes()
    data = json.dumps(small).encode() + b"\n" + data
    if len(data) > _OTHERS_BYTES:
        raise CheckpointError(f"python's and numpy's random states take {len(data)} bytes")
    return data


def _read_others(data: bytes) -> dict[str, Any]:
    """As `state.random_state` has them."""
    import torch

    small, _, words = data.partition(b"\n")
    found = json.loads(small)
    numbers = torch.tensor(array(_WORD, words))
    version, gauss = found["python"]
    states: dict[str, Any] = {"python": [version, numbers[: _WORDS + 1].clone(), gauss]}
    if "numpy" in found:
        name, *rest = found["numpy"]
        states["numpy"] = [name, numbers[_WORDS + 1 :].clone(), *rest]
    return states


def _memory(generator: Any) -> memoryview:
    size = type(generator).__basicsize__ - object.__basicsize__
    return _view(id(generator) + object.__basicsize__, size)


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _torch_memory(generator: torch.Generator) -> memoryview:
    """Where a generator (at::CPUGeneratorImpl) keeps its state: seed and counters, 624 words, two normal samples for
    later. Found by the words; empty where it is not as in the versions of torch that we know.
    """
    import torch

    trial = torch.Generator()
    found, memory = _torch_place(generator), _torch_place(trial)
    if found is None or memory is None:
        return memoryview(b"")
    for kind in (torch.float32, torch.float32, torch.float64, torch.float64):  # every second one is a kept sample
        before = bytes(_view(*memory))
        torch.randn(1, generator=trial, dtype=kind)
        if bytes(_view(*memory)) == before:
            return memoryview(b"")
    return _view(*found)


def _torch_place(generator: torch.Generator) -> tuple[int, int] | None:
    """Address and size."""
    import torch

    legacy = generator.get_state()
    if type(generator).__basicsize__ < object.__basicsize__ + 8 or legacy.numel() < 8 * (3 + _WORDS):
        return None
    words = legacy[: 8 * (3 + _WORDS)].view(torch.int64)[3:].to(torch.int32).numpy().tobytes()
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # a wrong address is an error there, and no crash
        try:
            pointer = os.pread(memory.fileno(), 8, id(generator) + object.__basicsize__)
            address = int.from_bytes(pointer, sys.byteorder)
            found = os.pread(memory.fileno(), _GENERATOR_BYTES, address).find(words)
        except (OSError, OverflowError):
            return None
    if found < _COUNTERS_BYTES:
        return None
    return address + found - _COUNTERS_BYTES, _COUNTERS_BYTES + len(words) + _SAMPLES_BYTES
