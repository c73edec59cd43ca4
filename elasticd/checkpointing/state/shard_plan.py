"""Which rank writes which tensor, and the bytes of each rank's file: torch.distributed.checkpoint's plan and format.

DCP's planner decides, and its metadata describes the files, so plain `torch.distributed.checkpoint.load` opens them. A
file is a row of small archives, one for each tensor, as `torch.save` writes it; their sizes depend on shapes alone. So
a plan is made by all ranks once, and again only when the state of a rank has another structure.

A plan costs a gather and a scatter of objects and seconds for a large model; a save with a plan costs neither.
`try_use_state` compares what the plan depends on: keys, types, shapes, placements, and the sizes of the few values that
are no tensors and whose pickles may grow.

Loading avoids copies. A tensor's archive has the same bytes before and after its content wherever type and shape are
equal (`archive_around`), so its content can be read from the file into the tensor, or used where it is mapped. An
archive that was written by another torch has other bytes around it and is loaded as DCP does. Metadata is a pickle,
which could run code: it is read by an unpickler that knows the names it may hold.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elasticd.checkpointing.state.in_place import SequentialReader, bytes_of
from elasticd.checkpointing.state.layout import Layout
from elasticd.checkpointing.state.training_state import StateDict
from elasticd.checkpointing.storage.manifest import METADATA, shard_name
from elasticd.errors import CheckpointCorrupt, CheckpointError
from elasticd.process_group import DefaultGroup, gather_objects, host_bytes, scatter_objects

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import ReadItem, SavePlanner, WriteItem

_VECTORS, _VECTOR_BYTES = 1000, 64 << 20
"""The most that one system call writes; the first is below IOV_MAX."""


class ShardPlan:
    """Made by all ranks at the same time, each for its own `state`. Raises CheckpointError on all of them."""

    def __init__(self, state: StateDict, group: DefaultGroup) -> None:
        from torch.distributed.checkpoint import filesystem
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(state, None, group.rank == 0)
        self._structure = _structure(self._planner.state_dict)
        plans = gather_objects(self._planner.create_local_plan(), group)
        answer: list[Any] = []
        metadata: Metadata | None = None
        if plans:
            try:
                global_plan, metadata = self._planner.create_global_plan(plans)
                answer = [(plan, "") for plan in global_plan]
            except Exception as error:  # noqa: BLE001 - the planner raises many kinds, and all ranks wait
                answer = [(None, str(error))] * group.world_size
        answered, why = scatter_objects(answer, group)
        if answered is None:
            raise CheckpointError(f"torch.distributed.checkpoint cannot plan this state: {why}")
        self._own = _RankFile(answered.items)
        self._own_sizes = self._own.python_value_sizes(self._planner)
        at = 0
        places = []
        for item, size in zip(self._own.items, self._own.archive_sizes(self._own_sizes), strict=True):
            places.append((item.index, filesystem._StorageInfo(shard_name(group.rank), at, size)))
            at += size
        data = b""
        every = gather_objects((at, places), group)
        if metadata is not None:
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch 2.6 has none
            metadata.storage_data = dict(pair for _, pairs in every for pair in pairs)
            data = pickle.dumps(metadata)
            sizes = [size for size, _ in every]
            answer = [(sizes, b"" if rank else data) for rank in range(group.world_size)]
        self.sizes: list[int]
        self.metadata: bytes
        """The content of .metadata, on rank 0."""
        self.sizes, self.metadata = scatter_objects(answer, group)

    def try_use_state(self, state: StateDict) -> bool:
        """Use this state from now on. False if another plan has to be made for it."""
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        self._planner.state_dict = flatten_state_dict(state)[0]
        if _structure(self._planner.state_dict) != self._structure:
            return False
        return self._own.python_value_sizes(self._planner) == self._own_sizes

    def content(self) -> Iterator[bytes | memoryview]:
        """This rank's file from its beginning to its end."""
        return self._own.content(self._planner)


class _RankFile:
    """The file that one rank writes: tensors first, whose sizes are fixed, then Python values."""

    def __init__(self, items: list[WriteItem]) -> None:
        from torch.distributed.checkpoint.planner import WriteItemType

        # Python values last: theirs are the only sizes that may change.
        self.items = sorted(items, key=lambda item: item.type is WriteItemType.BYTE_IO)
        self._values = [item for item in self.items if item.type is WriteItemType.BYTE_IO]
        self._tensors = self.items[: len(self.items) - len(self._values)]

    def content(self, planner: SavePlanner) -> Iterator[bytes | memoryview]:
        """Return the file's bytes, a tensor's as views of its memory."""
        with torch.no_grad():
            for item in self._tensors:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor)
                before, after = archive_around(data.dtype, data.shape)
                yield before
                yield host_bytes(data)
                yield after
        yield from self._pickled_values(planner)

    def archive_sizes(self, value_sizes: list[int]) -> Iterator[int]:
        """Return the size of each archive of the file, in its order."""
        for item in self._tensors:
            data = item.tensor_data
            assert data is not None
            before, after = archive_around(data.properties.dtype, data.chunk.sizes)
            yield len(before) + data.chunk.sizes.numel() * data.properties.dtype.itemsize + len(after)
        yield from value_sizes

    def python_value_sizes(self, planner: SavePlanner) -> list[int]:
        return [len(value) for value in self._pickled_values(planner)]

    def _pickled_values(self, planner: SavePlanner) -> list[bytes]:
        resolved = [planner.resolve_data(item) for item in self._values]
        return [value.getvalue() for value in resolved if isinstance(value, io.BytesIO)]


def write_pieces(fd: int, offset: int, content: Iterator[bytes | memoryview]) -> None:
    """Write all of it, with one system call for many small pieces. Raises OSError."""
    waiting: list[bytes | memoryview] = []
    size = 0
    for piece in content:
        waiting.append(piece)
        size += len(piece)
        if len(waiting) == _VECTORS or size >= _VECTOR_BYTES:
            offset, size = _write_vectors(fd, offset, waiting), 0
    _write_vectors(fd, offset, waiting)


def _write_vectors(fd: int, offset: int, waiting: list[bytes | memoryview]) -> int:
    while waiting:
        count = os.pwritev(fd, waiting, offset)
        offset += count
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if count:
            waiting[0] = memoryview(waiting[0])[count:]
    return offset


ReadRange = Callable[[int, int | None], memoryview]
"""Returns so many bytes of a file from an offset on; None: all to its end."""
OpenFile = Callable[[str], AbstractContextManager[ReadRange]]
"""Opens a file of a checkpoint by its name."""


class DiskView:
    """A `ReadRange` of a file on disk, which can also be read without the page cache keeping it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read_range = map_file(fd, 0, os.fstat(fd).st_size)
        self._reader = SequentialReader(fd)

    def __call__(self, start: int, size: int | None) -> memoryview:
        return self._read_range(start, size)

    def starts_with(self, start: int, expected: bytes) -> bool:
        return os.pread(self._fd, len(expected), start) == expected

    def read_into(self, start: int, target: torch.Tensor) -> None:
        """Into a contiguous tensor, at ascending offsets. Raises OSError, CheckpointCorrupt."""
        self._reader.skip_to(start)
        self._reader.read_into(bytes_of(target))
        self._reader.flush()


def open_on_disk(path: Path) -> OpenFile:
    """The files of the checkpoint in the directory `path`."""

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[ReadRange]:
        with open(path / name, "rb", 0) as file:
            yield DiskView(file.fileno())

    return opened


def map_file(fd: int, start: int, size: int) -> ReadRange:
    """`size` bytes of a file from `start` on. It stays mapped as long as something refers to its bytes."""
    content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) if size else bytearray())[start : start + size]
    return lambda offset, count: content[offset:] if count is None else content[offset : offset + count]


def load_shards(open_file: OpenFile, make_targets: Any) -> StateDict:
    """Load into what `make_targets(metadata)` returns, nested; its tensors are filled in place.

    Raises CheckpointError, CheckpointCorrupt.
    """
    from torch.distributed._shard._utils import narrow_tensor_by_index
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadItemType

    with open_file(METADATA) as read_range:
        metadata = read_metadata(bytes(read_range(0, None)))
    planner = DefaultLoadPlanner()
    targets: StateDict = make_targets(metadata)
    planner.set_up_planner(targets, metadata, True)
    by_file: dict[str, list[tuple[Any, Any]]] = {}
    for item in planner.create_local_plan().items:
        place = metadata.storage_data[item.storage_index]
        by_file.setdefault(place.relative_path, []).append((item, place))
    for name, items in by_file.items():
        with open_file(name) as read_range:
            for item, place in sorted(items, key=lambda each: each[1].offset):
                described = metadata.state_dict_metadata[item.storage_index.fqn]
                if item.type is LoadItemType.BYTE_IO:
                    value = _load_value(read_range(place.offset, place.length), described, item.storage_index)
                    set_element(targets, planner.mappings[item.dest_index.fqn], value)
                    continue
                target = planner.resolve_tensor(item).detach()
                if isinstance(read_range, DiskView) and _read_in_place(read_range, place, item, described, target):
                    continue
                value = _load_value(read_range(place.offset, place.length), described, item.storage_index)
                target.copy_(narrow_tensor_by_index(value, item.storage_offsets, item.lengths))
    return targets


def _read_in_place(view: DiskView, place: Any, item: ReadItem, described: Any, target: torch.Tensor) -> bool:
    """Read all of a tensor that was written here, if the target is as large and without gaps; True if that was done."""
    dtype, shape = described.properties.dtype, described.chunks[item.storage_index.index or 0].sizes
    fits = item.lengths == shape == target.shape and target.dtype == dtype and target.is_contiguous()
    if not fits or type(target) is not torch.Tensor:
        return False
    before, after = archive_around(dtype, shape)
    if place.length != len(before) + target.nbytes + len(after) or not view.starts_with(place.offset, before):
        return False
    if target.nbytes:
        view.read_into(place.offset + len(before), target)
    return True


def _load_value(archive: memoryview, described: Any, index: MetadataIndex) -> Any:
    """A tensor or a value. A tensor that was written here is used where it is, another one is loaded as DCP does."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if isinstance(described, TensorStorageMetadata):
        dtype, shape = described.properties.dtype, described.chunks[index.index or 0].sizes
        before, after = archive_around(dtype, shape)
        size = shape.numel() * dtype.itemsize
        if len(archive) == len(before) + size + len(after) and archive[: len(before)] == before:
            content = archive[len(before) : len(before) + size]
            flat = torch.frombuffer(content, dtype=dtype) if size else torch.empty(0, dtype=dtype, device="cpu")
            return flat.view(shape)
    return torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler of metadata: a pickle that cannot run code. Names are checked before anything is imported for them,
    and a name with a dot would lead out of its module.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(member := getattr(torch, name, None), torch.dtype):
            return member
        if name in _METADATA_TYPES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch.distributed.checkpoint.metadata" and "." not in name:
            member = super().find_class(module, name)
            if isinstance(member, type) and member.__module__ == module:
                return member
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


_METADATA_TYPES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}


def read_metadata(content: bytes) -> Metadata:
    """Return DCP's metadata of a checkpoint. Raises CheckpointCorrupt for content that this torch cannot load."""
    try:
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise CheckpointCorrupt(f"{METADATA} cannot be loaded by this torch: {error}") from error
    return metadata


@functools.lru_cache(1 << 16)
def archive_around(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """The bytes that `torch.save` writes before and after those of such a tensor."""
    return Layout(torch.empty(shape, dtype=dtype, device="cpu")).bytes_around_storage()


def _structure(flat: StateDict) -> list[tuple[Any, ...]]:
    """The structure that a plan depends on; it differs in nothing else."""
    return [
        (key, value.dtype, tuple(value.shape), getattr(value, "placements", None))
        if isinstance(value, torch.Tensor)
        else (key,)
        for key, value in flat.items()
    ]
