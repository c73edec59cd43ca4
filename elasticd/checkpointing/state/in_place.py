"""Reading a state from its file straight into the memory where it is needed: the tensors that modules and optimizers
have already, and new ones for what they lack. Nothing is mapped for it, so the page cache need not keep the file.

`torch.load` has unpickled the state and mapped its tensors, which nothing has touched. What can be read in place is
replaced there by the tensors that it was read into; `load_state_dict()` finds them equal to its own and copies nothing.
Everything else stays mapped: tensors of modules and optimizers that load in a way of their own (hooks, methods), those
of another shape or type than at the save, and those that share memory with others.

It is for the peak of memory: a load by `torch.load` alone needs the state twice, once mapped and once in the objects,
and a machine that holds one state comfortably may not hold two. It also saves a copy of each byte.

What may be read in place is decided tensor by tensor, and only where the result is certain to be that of
`load_state_dict()`: same type, shape and strides, memory without gaps, nothing shared that is not shared in the state
as well, and objects whose loading is torch's own. Targets that overlap in memory end it for all. The checksum of the
whole file is computed on the way, so a file that was damaged after it was verified is found before the objects are
used.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.training_state import StateDict, StorageAddresses
from elasticd.checkpointing.storage.manifest import STATE, Checksum
from elasticd.checkpointing.storage.page_cache import CacheWindows
from elasticd.errors import CheckpointCorrupt

_READ_BYTES = 4 << 20
"""The bytes that are read at once, and go into the checksum while they are in the processor's caches."""
_MAX_VIEWS = 512
"""The views of one system call; less than IOV_MAX."""
_MIN_SKIPPED_BYTES = 64 << 10
"""A shorter gap between two tensors is read with them."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place that one tensor of the state is read to."""

    source: torch.Tensor
    target: torch.Tensor
    replace: Callable[[], Any]  #: puts the target into the state


PiecesByOffset = Mapping[int, torch.Tensor]
"""The memory of tensors, each for the bytes of the file from this offset on."""


def read(fd: int, content: StateDict, attached: Mapping[str, Any], checksum: str = "") -> StorageAddresses:
    """Read what the attached objects load into its place, and replace it in `content`, the mapped state in the file.

    Returns the addresses of all storages that were read. `checksum`: of the whole file, "" to compare none. Raises
    CheckpointCorrupt if it has another one, and OSError.
    """
    pieces, replace = find_places(fd, content, attached)
    read_pieces(fd, pieces, checksum)
    replace()
    return frozenset(piece.untyped_storage().data_ptr() for piece in pieces.values())


def find_places(fd: int, content: StateDict, attached: Mapping[str, Any]) -> tuple[PiecesByOffset, Callable[[], None]]:
    """The memory that the attached objects have for parts of `content`, and a function for when it is filled, which
    puts it there in place of what is mapped.
    """
    offset_of = make_offset_lookup(fd)
    users: dict[int, int] = defaultdict(int)
    for tensor in training_state.tensors(content):
        if tensor.layout is torch.strided:
            users[tensor.untyped_storage().data_ptr()] += 1
    places: dict[int, list[_Place]] = defaultdict(list)
    for name, obj in attached.items():
        if name in content:
            for place in _places(content, name, obj):
                places[place.source.untyped_storage().data_ptr()].append(place)
    pieces: dict[int, torch.Tensor] = {}
    replace: list[Callable[[], Any]] = []
    for address, alike in places.items():
        offset = offset_of(address)
        if offset is not None and users[address] == len(alike) and _is_one_target(alike):
            pieces[offset] = bytes_of(alike[0].target)
            replace += [place.replace for place in alike]
    if _have_overlap(pieces.values()):
        pieces, replace = {}, []

    def replace_all() -> None:
        for target in replace:
            target()

    return pieces, replace_all


def _is_one_target(places: list[_Place]) -> bool:
    """The tensors that share memory in the state are one in memory."""
    return len(places) == 1 or len({(str(place.target.device), place.target.data_ptr()) for place in places}) == 1


def _places(content: StateDict, name: str, obj: Any) -> Iterator[_Place]:
    target = training_state.unwrap(obj)
    if isinstance(target, Module):
        content[name] = training_state.with_compiled_keys(content[name], target)
        if _is_plain_module(target) and isinstance(content[name], dict):
            yield from _places_in_module(content[name], target)
    elif isinstance(target, Optimizer):
        if _is_plain_optimizer(target) and isinstance(content[name], dict):
            yield from _places_in_optimizer(content[name], target)
    else:
        for tensor in training_state.tensors(content[name]):
            if _fills_storage(tensor):
                new = training_state.empty_in_huge_pages(tensor, tensor.device)
                yield _Place(tensor, new, functools.partial(_take_memory_of, tensor, new))


def _places_in_module(saved: StateDict, module: torch.nn.Module) -> Iterator[_Place]:
    """Yield the places of a module's tensors: parameters and buffers that have the name, type and shape of the saved
    ones.
    """
    own = module.state_dict(keep_vars=True)
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for key, target in named:
        if own.get(key) is target and _fits(saved.get(key), target):
            yield _Place(saved[key], target, functools.partial(saved.__setitem__, key, target.detach()))


def _places_in_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[_Place]:
    """Yield the places of an optimizer's tensors; those that it does not have yet are made."""
    groups = [[group["params"] for group in groups] for groups in (saved["param_groups"], optimizer.param_groups)]
    if len({tuple(map(len, group)) for group in groups}) > 1:
        return  # loading it fails
    numbers, parameters = map(chain.from_iterable, groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        own = optimizer.state.get(parameter, {})
        values = saved["state"].get(number, {})
        for key, source in values.items() if isinstance(values, dict) else ():
            target = own.get(key)
            if not _fits(source, target):
                if not _fills_storage(source):
                    continue
                target = training_state.empty_in_huge_pages(
                    source, source.device if key == "step" else parameter.device
                )
            yield _Place(source, target, functools.partial(values.__setitem__, key, target))


def _is_plain_module(module: torch.nn.Module) -> bool:
    """True if the module's `load_state_dict()` copies each tensor of the state as it is into the one of that name."""
    from torch.__future__ import get_swap_module_params_on_conversion

    return (
        _underlying_function(module.load_state_dict) is Module.load_state_dict
        and not get_swap_module_params_on_conversion()
        and not any(
            submodule._load_state_dict_pre_hooks
            or not _underlying_function(submodule._load_from_state_dict).__module__.startswith("torch.nn.modules.")
            for submodule in module.modules()
        )
    )


def _is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer's `load_state_dict()` keeps the tensors of the state."""
    return training_state.loads_as_usual(optimizer) and not optimizer._optimizer_load_state_dict_pre_hooks


def _underlying_function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _fits(source: Any, target: Any) -> bool:
    """The bytes of `source` are those that `target` is to have."""
    return (
        _fills_storage(source)
        and type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.layout is torch.strided
        and target.device.type != "meta"
        and not (target.is_conj() or target.is_neg())
        and (source.dtype, source.shape, source.stride()) == (target.dtype, target.shape, target.stride())
    )


def _fills_storage(tensor: Any) -> bool:
    """It has a storage without gaps for itself, as far as it is concerned."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if training_state.component_tensors(tensor)[0] is not tensor:
        return False
    if not tensor.nbytes or tensor.nbytes != tensor.untyped_storage().nbytes() or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


def _take_memory_of(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """The tensor has the other one's memory from now on."""
    with torch.no_grad():
        tensor.set_(new)  # type: ignore[call-overload]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps, in the order of its addresses."""
    start = tensor.storage_offset() * tensor.itemsize
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (tensor.nbytes,))  # type: ignore[call-overload,no-any-return]


def bytes_of_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole memory of a storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload,no-any-return]


def _host_memory(piece: torch.Tensor) -> memoryview | None:
    if piece.device.type != "cpu":
        return None
    return memoryview((ctypes.c_char * piece.nbytes).from_address(piece.data_ptr())).cast("B")


def _have_overlap(pieces: Iterable[torch.Tensor]) -> bool:
    """True if two targets share memory: reading one would change the other."""
    spans = sorted((str(piece.device), piece.data_ptr(), piece.nbytes) for piece in pieces)
    return any(span[0] == other[0] and span[1] + span[2] > other[1] for span, other in pairwise(spans))


def make_offset_lookup(fd: int) -> Callable[[int], int | None]:
    """Which offset of the file a mapped address is; None if it is none."""
    name = os.readlink(b"/proc/self/fd/%d" % fd).replace(b"\n", rb"\012")  # as the kernel writes it there
    mapped = []
    with open("/proc/self/maps", "rb") as file:
        for line in file:
            fields = line.rstrip(b"\n").split(maxsplit=5)
            if fields[5:] == [name]:
                start, end = (int(number, 16) for number in fields[0].split(b"-"))
                mapped.append((start, end, int(fields[2], 16)))

    def offset(address: int) -> int | None:
        return next((address - start + first for start, end, first in mapped if start <= address < end), None)

    return offset


def read_pieces(fd: int, pieces: PiecesByOffset, checksum: str = "") -> None:
    """Read the file into them. Raises as `read` does."""
    reader = SequentialReader(fd, Checksum(checksum.partition(":")[0]) if checksum else None)
    for offset, piece in sorted(pieces.items(), key=lambda each: each[0]):
        reader.skip_to(offset)
        reader.read_into(piece)
    if checksum:
        reader.skip_to(os.fstat(fd).st_size)
    reader.flush()
    if checksum and str(reader.checksum) != checksum:
        raise CheckpointCorrupt(f"{STATE} does not match its checksum: it was damaged after it had been verified")


class SequentialReader:
    """Reads a file from its beginning to its end into any memory, by large system calls."""

    def __init__(self, fd: int, checksum: Checksum | None = None) -> None:
        self._fd = fd
        self.checksum = checksum
        self._cache = CacheWindows(fd)
        self._start = 0
        self._views: list[memoryview] = []
        self._bytes = 0
        self._scratch = memoryview(mmap.mmap(-1, _READ_BYTES))
        """Memory for what has no place on the host; the part of it at an offset from `_start`."""

    def skip_to(self, end: int) -> None:
        """Read the file up to `end` without keeping it."""
        assert end >= self._start + self._bytes, "a file is read from its beginning to its end"
        if self.checksum is None and end - self._start - self._bytes >= _MIN_SKIPPED_BYTES:
            self.flush()
            self._start = end
        while (left := end - self._start - self._bytes) > 0:
            self._reserve(left)

    def read_into(self, piece: torch.Tensor) -> None:
        """Read as many bytes as the piece has, which is complete after the next `flush`."""
        size = piece.nbytes
        if (view := _host_memory(piece)) is not None:
            while len(view):
                view = view[self._reserve(len(view), view) :]
            return
        done = 0
        self.flush()
        while done < size:
            count = self._reserve(size - done)
            self.flush()
            piece[done : done + count].copy_(torch.frombuffer(self._scratch[:count], dtype=torch.uint8))
            done += count

    def _reserve(self, most: int, view: memoryview | None = None) -> int:
        """Reserve the next bytes of the file for a view, or for nobody. Returns how many."""
        if self._bytes == _READ_BYTES or len(self._views) == _MAX_VIEWS:
            self.flush()
        count = min(most, _READ_BYTES - self._bytes)
        self._views.append(self._scratch[self._bytes : self._bytes + count] if view is None else view[:count])
        self._bytes += count
        return count

    def flush(self) -> None:
        """Read what was reserved, and add it to the checksum. Raises OSError, CheckpointCorrupt."""
        left = self._views.copy()
        while left:
            count = os.preadv(self._fd, left, self._start)
            if not count:
                raise CheckpointCorrupt("a file ended early while being read")
            self._start += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        if self.checksum is not None:
            for view in self._views:
                self.checksum.update(view)
        self._views, self._bytes = [], 0
        self._cache.mark_read_until(self._start)
