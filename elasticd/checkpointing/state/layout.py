"""The place of each byte of `state.pt`, known before a byte is copied, so that several processes can fill one file.

`state.pt` is the archive that `torch.save` writes and `torch.load` reads: a zip file with one stored record for each
storage and a pickle that refers to them. The records of the storages come first here. Their offsets then depend on
their sizes only and not on the pickle, in which numbers change from step to step, so that a second save into the same
memory touches the same pages. The records carry no crc32: the manifest has a checksum of the whole file. There is no
record `.format_version`: it would promise the distances between records that torch's writer leaves, and torch would
compute offsets from them (`calculate_storage_offsets` of `torch.utils.serialization.config.load`).
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elasticd.checkpointing.state import device_copy
from elasticd.checkpointing.state.device_copy import GpuCopies, StoragePart
from elasticd.checkpointing.state.training_state import StateDict, component_tensors
from elasticd.checkpointing.storage.atomic_write import write_at, write_file
from elasticd.checkpointing.storage.manifest import STATE, SizeAndChecksum
from elasticd.errors import CheckpointError, CheckpointRefused

_RECORD_ALIGNMENT = 64
"""The alignment of records in torch's own writer."""
_SAMPLES, _SAMPLE_BYTES = 256, 256
"""The number of shared storages that are compared by pieces from their middles; where there are more, others at the
next save."""
_ARCHIVE_ROOT = "archive/"
_ZIP64_MARK = 0xFFFFFFFF
# What pickle and torch raise for a value that passed our own list of types.
UNPICKLABLE_ERRORS = (pickle.PicklingError, RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class _Record:
    """A file in the archive."""

    name: bytes
    header_offset: int  #: offset of its local header, as `data_offset` is of its content
    data_offset: int
    data_bytes: int


class Layout:
    """The bytes of `state.pt` for one state: every storage at an offset, headers and pickle between and after them.

    `shared` holds the addresses of storages that are equal on all ranks: any rank may copy them. `at_once`: copies
    a GPU's memory as it is, without waiting for what is queued there. Raises CheckpointRefused for a state that
    cannot be pickled. The object keeps the state's storages alive. `save` is the save's number, the same on all ranks.
    """

    def __init__(
        self, state: Any, shared: frozenset[int] = frozenset(), at_once: GpuCopies | None = None, save: int = 0
    ) -> None:
        pickled, storages = _pickle(state)
        self._state, self._at_once, self._save = state, at_once, save
        self._records: list[_Record] = []
        self._end = 0
        self._own: list[tuple[int, torch.UntypedStorage]] = []
        self._shared: list[tuple[int, torch.UntypedStorage]] = []
        for key, storage in enumerate(storages):
            offset = self._add_record(f"data/{key}", storage.nbytes())
            (self._shared if storage.data_ptr() in shared else self._own).append((offset, storage))
        small = {
            "data.pkl": pickled,
            "byteorder": sys.byteorder.encode(),
            "version": b"3\n",
        }
        self._small = [(self._add_record(name, len(data)), data) for name, data in small.items()]
        self._small += [(record.header_offset, _local_header(record)) for record in self._records]
        directory = _central_directory(self._records, self._end)
        self._small.append((self._end, directory))
        self.bytes = self._end + len(directory)

    def _add_record(self, name: str, size: int) -> int:
        record_name = (_ARCHIVE_ROOT + name).encode()
        data = -(-(self._end + 50 + len(record_name) + 4) // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT
        self._records.append(_Record(record_name, self._end, data, size))
        self._end = data + size
        return data

    @property
    def shared_digest(self) -> str:
        """Equal on two processes that place all shared storages alike, under the same names, if samples of them agree.

        Ranks may have diverged all the same, such as under local SGD, and a mixture of their weights is no state.
        """
        places = {storage.data_ptr(): (offset, storage.nbytes()) for offset, storage in self._shared}
        named = [
            (path, tensor.dtype, tensor.shape, tensor.stride(), places[tensor.untyped_storage().data_ptr()])
            for path, tensor in tensors_by_path(self._state, "")
            if tensor.untyped_storage().data_ptr() in places
        ]
        digest = hashlib.sha256(repr((list(places.values()), named)).encode())
        interval = len(self._shared) // _SAMPLES + 1
        parts = []
        for _, storage in self._shared[self._save % interval :: interval]:
            start = max(storage.nbytes() - _SAMPLE_BYTES, 0) // 2
            parts.append((0, storage, start, min(start + _SAMPLE_BYTES, storage.nbytes())))
        for _, piece in _copy_pieces(parts, self._at_once):
            digest.update(piece)
        return digest.hexdigest()

    @property
    def shared_storages(self) -> list[tuple[int, torch.UntypedStorage]]:
        """The shared storages, each at its offset in the file."""
        return self._shared

    def copy_shared(self, write: Callable[[int, memoryview], None], share: int, shares: int) -> None:
        """Copy one of `shares` equal shares of the shared storages by `write(offset in the file, data)`."""
        whole = sum(storage.nbytes() for _, storage in self._shared)
        first, last = (whole * number // shares // 4096 * 4096 for number in (share, share + 1))
        last = whole if share + 1 == shares else last
        parts, before = [], 0
        for offset, storage in self._shared:
            start, stop = max(first - before, 0), min(last - before, storage.nbytes())
            if start < stop:
                parts.append((offset + start, storage, start, stop))
            before += storage.nbytes()
        for at, piece in _copy_pieces(parts, self._at_once):
            write(at, piece)

    def copy_unshared(self, fd: int) -> None:
        """Copy everything else: storages of this rank only, headers, the pickle and the directory."""
        for offset, piece in self._unshared_pieces():
            write_at(fd, offset, piece)

    @property
    def unshared_bytes(self) -> int:
        """The size of what `copy_unshared` copies."""
        return sum(storage.nbytes() for _, storage in self._own) + sum(len(data) for _, data in self._small)

    @property
    def unshared_checksum(self) -> int:
        """The crc32 of the same."""
        checksum = 0
        for _, piece in self._unshared_pieces():
            checksum = zlib.crc32(piece, checksum)
        return checksum

    def pack_unshared(self, most_bytes: int | None = None) -> bytes:
        """The same as one message, for `write_packed` on another node; empty if it is larger than `most_bytes`."""
        if most_bytes is not None and self.unshared_bytes > most_bytes:
            return b""
        parts = [(offset, bytes(piece)) for offset, piece in self._unshared_pieces()]
        places = json.dumps([(offset, len(data)) for offset, data in parts]).encode()
        return b"".join([places, b"\n", *(data for _, data in parts)])

    def _unshared_pieces(self) -> Iterator[tuple[int, memoryview]]:
        yield from _copy_pieces(
            [(offset, storage, 0, storage.nbytes()) for offset, storage in self._own], self._at_once
        )
        for offset, data in self._small:
            yield offset, memoryview(data)

    def bytes_around_storage(self) -> tuple[bytes, bytes]:
        """The bytes of the file before and after its only storage."""
        ((start, storage),) = self._own
        end = start + storage.nbytes()
        before, after = bytearray(start), bytearray(self.bytes - end)
        for offset, data in self._small:
            part, at = (before, offset) if offset < start else (after, offset - end)
            part[at : at + len(data)] = data
        return bytes(before), bytes(after)

    def write_file(self, folder: Path) -> SizeAndChecksum:
        """Write state.pt into a directory; returns its size and checksum. Raises OSError."""
        return write_file(folder / STATE, lambda file: self.write(file.write))

    def write(self, write: Callable[[memoryview], Any]) -> None:
        """Pass the whole file to `write`, from its beginning to its end."""
        at = 0
        storages = [(offset, storage.nbytes(), storage) for offset, storage in (*self._own, *self._shared)]
        parts: list[tuple[int, int, Any]] = [*storages, *((offset, len(data), data) for offset, data in self._small)]
        for offset, size, part in sorted(parts, key=lambda each: each[:2]):
            write(memoryview(bytes(offset - at)))
            is_small = isinstance(part, bytes)
            pieces = [(0, memoryview(part))] if is_small else _copy_pieces([(0, part, 0, size)], self._at_once)
            for _, piece in pieces:
                write(piece)
            at = offset + size


def write_packed(fd: int, packed: bytes) -> None:
    """Write what `pack_unshared` made on another node."""
    places, _, rest = packed.partition(b"\n")
    data = memoryview(rest)
    for offset, size in json.loads(places):
        write_at(fd, offset, data[:size])
        data = data[size:]


def _pickle(state: Any) -> tuple[bytes, list[torch.UntypedStorage]]:
    """The pickle, and the storages in the order of their first appearance: number n has the key str(n)."""
    storages: list[torch.UntypedStorage] = []
    keys: dict[int, str] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
            if isinstance(value, torch.storage.TypedStorage):
                storage, kind = value._untyped_storage, value._pickle_storage_type()  # type: ignore[no-untyped-call]
                count = value._size()  # type: ignore[no-untyped-call]
            elif isinstance(value, torch.UntypedStorage):
                storage, kind, count = value, "ByteStorage", value.nbytes()
            else:
                return None
            if storage._cdata not in keys:
                keys[storage._cdata] = str(len(storages))
                storages.append(storage)
            location = torch.serialization.location_tag(storage)
            return ("storage", getattr(torch, kind), keys[storage._cdata], location, count)

    buffer = io.BytesIO()
    try:
        Pickler(buffer, protocol=2).dump(state)
    except UNPICKLABLE_ERRORS as error:
        raise CheckpointRefused(f"the state cannot be pickled: {error}. Nothing was saved") from error
    return buffer.getvalue(), storages


def tensors_by_path(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors in nested containers, each with its keys."""
    if isinstance(value, torch.Tensor):
        yield from ((path, part) for part in component_tensors(value) if part.layout is torch.strided)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_by_path(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_by_path(item, f"{path}.{number}")


def _local_header(record: _Record) -> bytes:
    """Sizes as zip64, so that one form serves records of any size; padded up to the record's data."""
    sizes = struct.pack("<HHQQ", 1, 16, record.data_bytes, record.data_bytes)
    padding = record.data_offset - record.header_offset - 30 - len(record.name) - len(sizes) - 4
    extra = sizes + struct.pack("<HH", 0x4246, padding) + bytes(padding)  # "FB", as torch pads
    fixed = struct.pack(
        "<4s5HIIIHH", b"PK\3\4", 45, 0, 0, 0, 0, 0, _ZIP64_MARK, _ZIP64_MARK, len(record.name), len(extra)
    )
    return fixed + record.name + extra


def _central_directory(records: list[_Record], start: int) -> bytes:
    entries = bytearray()
    for record in records:
        extra = struct.pack("<HHQQQ", 1, 24, record.data_bytes, record.data_bytes, record.header_offset)
        sizes = (0, _ZIP64_MARK, _ZIP64_MARK, len(record.name), len(extra), 0, 0, 0, 0, _ZIP64_MARK)
        entries += struct.pack("<4s6H", b"PK\1\2", 45, 45, 0, 0, 0, 0)
        entries += struct.pack("<IIIHHHHHII", *sizes) + record.name + extra
    size, end = len(entries), start + len(entries)
    counts = (len(records), len(records), size, start)
    entries += struct.pack("<4sQHHII4Q", b"PK\6\6", 44, 45, 45, 0, 0, *counts)
    entries += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    entries += struct.pack("<4s4HIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _ZIP64_MARK, _ZIP64_MARK, 0)
    return bytes(entries)


def _copy_pieces(parts: Iterable[StoragePart], at_once: GpuCopies | None) -> Iterator[tuple[int, memoryview]]:
    """Each piece with its place, valid until the next one: what is in the host's memory first, then devices by turn."""
    on_devices: dict[torch.device, list[StoragePart]] = {}
    for place, storage, start, stop in parts:
        if storage.device.type == "cpu":
            if start < stop:
                yield place, device_copy.host_view(storage.data_ptr() + start, stop - start)
        else:
            on_devices.setdefault(storage.device, []).append((place, storage, start, stop))
    for device, every in on_devices.items():
        yield from at_once.copy_pieces(every) if at_once is not None else device_copy.copy_pieces(device, every)


def load_mapped(fd: int, map_location: Any = "cpu") -> StateDict:
    """The state in the file or the memory `fd`, which is whole. On the CPU its tensors are mapped: memory is used for
    what is touched, and whatever changes them changes a private copy of the page. Raises CheckpointError.
    """
    try:
        state = torch.load(f"/proc/self/fd/{fd}", map_location=map_location, weights_only=True, mmap=True)
    except (*UNPICKLABLE_ERRORS, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise CheckpointError(f"{STATE} is undamaged, but this torch cannot load it: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{STATE} holds {type(state).__name__}, not a dict")
    return state
