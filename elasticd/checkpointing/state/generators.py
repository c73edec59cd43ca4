"""The states of the default random generators of torch, python and numpy, to be copied at little cost.

What torch offers for that takes 1 µs; what python and numpy offer takes 12 and 24, three times a step, and a copy of
their objects' memory 0.1: it is copied where it is found to be as we know it, else what they offer. If the script draws
in another thread at the same moment, the copy may be of the middle of a draw: the order of draws is not defined there
either.

    memory:  python's index, 624 words | numpy's 624 words, position | numpy's half of a pair: valid, value | torch's
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any

import torch

from elasticd.checkpointing.state.training_state import RandomState
from elasticd.errors import CheckpointError
from elasticd.process_group import host_bytes

_MT_WORDS = 624
_WORD_TYPECODE = "I"
_INDEX_STRUCT = struct.Struct("=i")
_HALF_PAIR_STRUCT = struct.Struct("=i4xd")
"""The layout of aug_bitgen_t in numpy's legacy-distributions.h."""
_MT_STATE_BYTES = _INDEX_STRUCT.size + 4 * _MT_WORDS
PYTHON_NUMPY_SIZES = (_MT_STATE_BYTES, _MT_STATE_BYTES, _HALF_PAIR_STRUCT.size)
_NUMPY_KIND = "MT19937"
"""The class of numpy's default generator, unless the script replaces it."""
_PYTHON_STATE_VERSION = 3
ByteSource = memoryview | Callable[[], bytes]
"""Memory to copy, or what makes the bytes."""


RecordNumbers = tuple[int, bool, float, bytes]
"""Flags; python's half of a pair of normal samples: valid, value; the state of a GPU's generator."""
HAS_NUMPY, HAS_DEVICE, KNOWN_LAYOUT = 2, 4, 128
"""Flags. KNOWN_LAYOUT is in all records of this layout; earlier ones, which a round before an upgrade may have left,
have 1 or 16.
"""
GPU_GENERATOR_BYTES = 16
"""The size of a GPU's generator: a seed and how much was drawn. Its processor keeps them."""
_GPU_GENERATOR_STRUCT = struct.Struct("=QQ")


class Generators:
    """The default generators of this process."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the rank's, if it is a GPU. Raises CheckpointError."""
        self._gpu: Any = None if device is None else torch.cuda.default_generators[device.index]
        self._seed: Any = None
        if self._gpu is not None:
            self._choose_gpu_reader()
        self._torch = torch.default_generator
        self._python: Any = vars(random)["_inst"]
        self._numpy: Any = None
        """The default generator, once the script has imported numpy."""
        self._bits: Any = None
        self._half: Any = None
        self._numbers: RecordNumbers
        self._set_sources(python_source(self._python))

    def read_numbers(self) -> RecordNumbers:
        """Afterwards the states are in `memory`, which is another list if they are elsewhere than before.

        Raises CheckpointError if numpy's generator is of another kind.
        """
        if self._numpy is None:
            self._find_numpy()
        elif self._numpy._bit_generator is not self._bits:
            self._follow_numpy()
        for memory, source in self._offered:
            memory[:] = source()
        half = self._python.gauss_next
        if self._gpu is not None or half != self._half:
            self._half = half
            of_device = b"" if self._gpu is None else self._gpu_state()
            self._numbers = self._flags, half is not None, half or 0.0, of_device
        return self._numbers

    def _torch_state(self) -> bytes:
        offered = self._torch.get_state()
        return ctypes.string_at(offered.data_ptr(), offered.numel())

    def _gpu_state(self) -> bytes:
        if self._seed is None:
            return bytes(host_bytes(self._gpu.get_state()))
        return _GPU_GENERATOR_STRUCT.pack(self._seed(), self._gpu.get_offset())

    def _choose_gpu_reader(self) -> None:
        """Find the quick way to a GPU's generator: what it offers takes 4 µs; its two numbers, where it has no others,
        0.5.
        """
        offered = self._gpu_state()
        if len(offered) != GPU_GENERATOR_BYTES:
            raise CheckpointError("the state of the GPU's random generator has another size than in torch 2.6 to 2.13")
        self._seed = getattr(self._gpu, "initial_seed", None)
        if not hasattr(self._gpu, "get_offset") or self._gpu_state() != offered:
            self._seed = None

    def _find_numpy(self) -> None:
        # Without it while another thread is importing it.
        self._numpy = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
        if self._numpy is not None:
            self._follow_numpy()

    def _follow_numpy(self) -> None:
        bits = self._numpy._bit_generator
        if type(bits).__name__ != _NUMPY_KIND:
            raise CheckpointError(f"numpy's default generator is {type(bits).__name__}, not {_NUMPY_KIND}")
        self._set_sources(python_source(self._python), *numpy_sources(self._numpy))
        self._bits = bits

    def _set_sources(self, *sources: ByteSource) -> None:
        """Memory that has the states of python and numpy, and what is called before it is read to copy them there."""
        own = [memoryview(bytearray(size)) for size in (*PYTHON_NUMPY_SIZES, torch_state_bytes())]
        every = [*sources, *own[len(sources) : -1], self._torch_state]
        self.memory: list[memoryview] = [
            empty if callable(source) else source for empty, source in zip(own, every, strict=True)
        ]
        self._offered = [(empty, source) for empty, source in zip(own, every, strict=True) if callable(source)]
        self._flags = KNOWN_LAYOUT | HAS_NUMPY * (self._numpy is not None) | HAS_DEVICE * (self._gpu is not None)
        self._half = ...  # `read_numbers` sets the numbers


def torch_state_bytes() -> int:
    """The size of what torch's generator offers."""
    return torch.default_generator.get_state().numel()


def decode(memory: bytes, numbers: RecordNumbers) -> RandomState:
    """The states as `training_state.random_state` has them. Raises CheckpointError."""
    flags, has_half, half, of_device = numbers
    others, of_torch = memory[: sum(PYTHON_NUMPY_SIZES)], memory[sum(PYTHON_NUMPY_SIZES) :]

    def words(start: int) -> torch.Tensor:
        return torch.tensor(array(_WORD_TYPECODE, others[start : start + 4 * _MT_WORDS]), device="cpu")

    (index,) = _INDEX_STRUCT.unpack_from(others)
    states: RandomState = {"torch": torch.frombuffer(bytearray(of_torch[: torch_state_bytes()]), dtype=torch.uint8)}
    states["python"] = [
        _PYTHON_STATE_VERSION,
        torch.cat([words(_INDEX_STRUCT.size), torch.tensor([index], device="cpu")]),
        half if has_half else None,
    ]
    if flags & HAS_DEVICE:
        states["cuda"] = torch.frombuffer(bytearray(of_device), dtype=torch.uint8)
    if flags & HAS_NUMPY:
        (position,) = _INDEX_STRUCT.unpack_from(others, 2 * _MT_STATE_BYTES - _INDEX_STRUCT.size)
        valid, value = _HALF_PAIR_STRUCT.unpack_from(others, 2 * _MT_STATE_BYTES)
        states["numpy"] = [_NUMPY_KIND, words(_MT_STATE_BYTES), position, valid, value]
    return states


def python_source(generator: Any) -> ByteSource:
    """The source of a python generator's index and words."""

    def offered() -> bytes:
        version, numbers, _ = generator.getstate()
        if version != _PYTHON_STATE_VERSION:
            raise CheckpointError(f"python's random state is of version {version}, not {_PYTHON_STATE_VERSION}")
        return _INDEX_STRUCT.pack(numbers[-1]) + array(_WORD_TYPECODE, numbers[:-1]).tobytes()

    trial = type(generator)(1)
    trial.random()
    _, numbers, _ = trial.getstate()
    whole = _INDEX_STRUCT.pack(numbers[-1]) + array(_WORD_TYPECODE, numbers[:-1]).tobytes()
    at = _object_memory(trial).tobytes().find(whole)
    if at < 0:
        offered()
        return offered
    return _object_memory(generator)[at : at + _MT_STATE_BYTES]


def numpy_sources(generator: Any) -> tuple[ByteSource, ByteSource]:
    """The sources of a numpy generator's words and position, and of its half of a pair of normal samples."""

    def offered() -> bytes:
        _, words, position, _, _ = generator.get_state()
        return bytes(words.tobytes()) + _INDEX_STRUCT.pack(position)

    def offered_half() -> bytes:
        *_, valid, value = generator.get_state()
        return _HALF_PAIR_STRUCT.pack(valid, value)

    trial = type(generator)(1)
    trial.standard_normal()
    _, words, position, valid, value = trial.get_state()
    at = _object_memory(trial._bit_generator).tobytes().find(words.tobytes() + _INDEX_STRUCT.pack(position))
    half = _object_memory(trial).tobytes().find(struct.pack("=d", value)) - (_HALF_PAIR_STRUCT.size - 8)
    has_half = half >= 0 and _HALF_PAIR_STRUCT.unpack_from(_object_memory(trial), half) == (valid, value) == (1, value)
    trial.standard_normal()
    is_known = at >= 0 and has_half and _HALF_PAIR_STRUCT.unpack_from(_object_memory(trial), half) == (0, 0.0)
    if not is_known:
        return offered, offered_half
    bits = _object_memory(generator._bit_generator)[at : at + _MT_STATE_BYTES]
    return bits, _object_memory(generator)[half : half + _HALF_PAIR_STRUCT.size]


def _object_memory(generator: Any) -> memoryview:
    size = type(generator).__basicsize__ - object.__basicsize__
    return _memory_view(id(generator) + object.__basicsize__, size)


def _memory_view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
