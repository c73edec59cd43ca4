"""The states of the default random generators of torch, a GPU, python and numpy, as bytes that cost little to copy.

What python and numpy offer for that takes 10 µs each, a copy of their memory 0.1: it is copied where it is found to be
as we know it, else what they offer. Torch's generator may draw in a thread without the GIL: its memory is compared, and
torch copies it, which takes 1 µs, if it has changed.

    others:  python's index, 624 words | numpy's 624 words, position | numpy's half of a pair: valid, value
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elasticd.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_WORDS, _COUNTERS_BYTES, _SAMPLES_BYTES, _GENERATOR_BYTES = 624, 20, 28, 3072
"""Of at::CPUGeneratorImpl: its words, what it keeps before and after them, and more than the whole of it."""
_WORD = "I"
"""Of `array`: 32 bits."""
_INDEX = struct.Struct("=i")
_HALF = struct.Struct("=i4xd")
"""As in aug_bitgen_t of numpy's legacy-distributions.h."""
_STATE_BYTES = _INDEX.size + 4 * _WORDS
OTHERS_SIZES = (_STATE_BYTES, _STATE_BYTES, _HALF.size)
_KIND = "MT19937"
"""Of numpy's default generator, unless the script replaces it."""
_VERSION = 3
"""Of the state that python's generator returns."""
Source = memoryview | Callable[[], bytes]
"""Memory to copy, or what makes the bytes."""


States = tuple[bytes, bytes, bytes, tuple[int, bool, float]]
"""Torch's; python's and numpy's; a GPU's; flags, and python's half of a pair of normal samples: valid, value."""
NOTHING: States = (b"", b"", b"", (0, False, 0.0))
KNOWN, HAS_NUMPY, HAS_DEVICE = 1, 2, 4
"""Flags."""


class Generators:
    """The default generators of this process."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the rank's, if it is a GPU."""
        import torch

        self._gpu: Any = None if device is None else torch.cuda.default_generators[device.index]
        self._default = torch.default_generator
        self._own = _torch_memory(self._default)
        self._python: Any = vars(random)["_inst"]
        self._numpy: Any = None
        """The default generator, once the script has imported numpy."""
        self._bits: Any = None
        self._follow(_python_source(self._python))
        self._before, self._half, self._states = b"", None, NOTHING

    def of_device(self) -> bytes:
        """The GPU's, which the processor keeps: a seed and how much was drawn; empty without a GPU."""
        return b"" if self._gpu is None else bytes(self._gpu.get_state().numpy())

    def states(self) -> States:
        """The same object, and the same parts of it, while none has changed.

        Raises CheckpointError if numpy's is of another kind.
        """
        if self._numpy is None:
            self._find_numpy()
        elif self._numpy._bit_generator is not self._bits:
            self._locate_numpy()
        for memory, source in self._offered:
            memory[:] = source()
        own, others, half = self._own.tobytes(), b"".join(self._memory), self._python.gauss_next
        of_torch, known, known_of_device, _ = self._states
        of_device = b"" if self._gpu is None else self.of_device()
        if own != self._before or not own:
            found = self._default.get_state()
            of_torch = ctypes.string_at(found.data_ptr(), found.numel())
        elif others == known and half == self._half and of_device == known_of_device:
            return self._states
        self._before, self._half = own, half
        flags = KNOWN | HAS_NUMPY * (self._numpy is not None) | HAS_DEVICE * bool(of_device)
        numbers = (flags, half is not None, half or 0.0)
        self._states = (of_torch, known if others == known else others, of_device, numbers)
        return self._states

    def _find_numpy(self) -> None:
        # Without it while another thread is importing it.
        self._numpy = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
        if self._numpy is not None:
            self._locate_numpy()

    def _locate_numpy(self) -> None:
        bits = self._numpy._bit_generator
        if type(bits).__name__ != _KIND:
            raise CheckpointError(f"numpy's default generator is {type(bits).__name__}, not {_KIND}")
        self._follow(_python_source(self._python), *_numpy_sources(self._numpy))
        self._bits = bits

    def _follow(self, *sources: Source) -> None:
        """Memory that has the states of python and numpy, and what is called before it is read to copy them there."""
        memory = [memoryview(bytearray(size)) for size in OTHERS_SIZES]
        self._memory = [own if callable(each) else each for own, each in zip(memory, sources)]  # noqa: B905
        self._offered = [(own, each) for own, each in zip(self._memory, sources, strict=True) if callable(each)]


def decode(
    torch_state: bytes, others: bytes, has_numpy: bool, python_half: float | None, device_state: bytes
) -> dict[str, Any]:
    """As `state.random_state` has them."""
    import torch

    def words(start: int) -> torch.Tensor:
        return torch.tensor(array(_WORD, others[start : start + 4 * _WORDS]))

    (index,) = _INDEX.unpack_from(others)
    numbers = torch.cat([words(_INDEX.size), torch.tensor([index])])
    states: dict[str, Any] = {"torch": torch.frombuffer(bytearray(torch_state), dtype=torch.uint8)}
    states["python"] = [_VERSION, numbers, python_half]
    if device_state:
        states["cuda"] = torch.frombuffer(bytearray(device_state), dtype=torch.uint8)
    if has_numpy:
        (position,) = _INDEX.unpack_from(others, 2 * _STATE_BYTES - _INDEX.size)
        valid, value = _HALF.unpack_from(others, 2 * _STATE_BYTES)
        states["numpy"] = [_KIND, words(_STATE_BYTES), position, valid, value]
    return states


def _python_source(generator: Any) -> Source:
    """Of its index and words."""

    def offered() -> bytes:
        version, numbers, _ = generator.getstate()
        if version != _VERSION:
            raise CheckpointError(f"python's random state is of version {version}, not {_VERSION}")
        return _INDEX.pack(numbers[-1]) + array(_WORD, numbers[:-1]).tobytes()

    trial = type(generator)(1)
    trial.random()
    _, numbers, _ = trial.getstate()
    whole = _INDEX.pack(numbers[-1]) + array(_WORD, numbers[:-1]).tobytes()
    at = _memory(trial).tobytes().find(whole)
    if at < 0:
        offered()
        return offered
    return _memory(generator)[at : at + _STATE_BYTES]


def _numpy_sources(generator: Any) -> tuple[Source, Source]:
    """Of its words and position, and of its half of a pair of normal samples."""

    def offered() -> bytes:
        _, words, position, _, _ = generator.get_state()
        return bytes(words.tobytes()) + _INDEX.pack(position)

    def offered_half() -> bytes:
        *_, valid, value = generator.get_state()
        return _HALF.pack(valid, value)

    trial = type(generator)(1)
    trial.standard_normal()
    _, words, position, valid, value = trial.get_state()
    at = _memory(trial._bit_generator).tobytes().find(words.tobytes() + _INDEX.pack(position))
    half = _memory(trial).tobytes().find(struct.pack("=d", value)) - (_HALF.size - 8)
    found = half >= 0 and _HALF.unpack_from(_memory(trial), half) == (valid, value) == (1, value)
    trial.standard_normal()
    is_known = at >= 0 and found and _HALF.unpack_from(_memory(trial), half) == (0, 0.0)
    if not is_known:
        return offered, offered_half
    bits = _memory(generator._bit_generator)[at : at + _STATE_BYTES]
    return bits, _memory(generator)[half : half + _HALF.size]


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
