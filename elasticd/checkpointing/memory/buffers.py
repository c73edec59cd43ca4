"""States in the host's memory: buffers that outlive the processes which fill them, each with a header.

A buffer is an anonymous file (memfd) that holds `state.pt` byte for byte. The launcher's owner keeps the descriptors,
so a state survives the death of every worker and of the writer. A header says which state a buffer holds; it is erased
before the first byte is copied and written after the last one, so a buffer with a header is whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from elasticd.channel import Message
from elasticd.checkpointing.storage.manifest import Manifest, parse
from elasticd.errors import Reason

OWN_BUFFER_COUNT = 2
"""Buffers that ranks of this node fill."""
PARTNER_BUFFER = OWN_BUFFER_COUNT
"""The last buffer: a copy of another node's part of a sharded state."""
PROTOCOL_VERSION = 3
"""Between ranks and the writer: the script may import another elasticd than its launcher, after an upgrade."""
ANOTHER_SAVES_REASON = "another rank is saving that step"
"""Why a rank's state is refused at a fault; if that rank dies, this one may try again."""
STILL_COPIED_REASON = "an earlier save is still being copied"
"""Why a state is refused while ranks copy into the one buffer that may be lent; at a fault a rank tries again."""
WRITER_KILLED_REASON = "the writer was killed meanwhile"
"""Why a save failed of which the writer knows nothing."""
_FIRST_DONATED_NUMBER = 1 << 40
"""Save numbers count from 1; those of states saved at a fault come after all of them."""
_NUMBERS_PER_STEP = 1 << 20
_HEADER_BYTES = 1 << 20
_PREALLOCATED_PIECE_BYTES = 16 << 20
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of linux/falloc.h."""
FilePlace = tuple[int, int]
"""Offset and size of a file in a buffer."""
SaveKey = tuple[int, int]
"""The round, and the number of the save in it."""


def donated_number(step: int, rank: int) -> int:
    """The number of a state that a rank saves at a fault: later steps come after earlier ones, then lower ranks."""
    return _FIRST_DONATED_NUMBER + step * _NUMBERS_PER_STEP + _NUMBERS_PER_STEP - 1 - rank


def donated_step(number: int) -> int | None:
    """The step of a state that was saved at a fault, None for a save as usual."""
    return None if number < _FIRST_DONATED_NUMBER else (number - _FIRST_DONATED_NUMBER) // _NUMBERS_PER_STEP


def donor_of(number: int | None) -> int | None:
    """The rank that saved this state at a fault; None for a save as usual, or a checkpoint."""
    return (
        None if number is None or number < _FIRST_DONATED_NUMBER else _NUMBERS_PER_STEP - 1 - number % _NUMBERS_PER_STEP
    )


@dataclass(frozen=True, slots=True)
class WriteTask:
    """The writer's task with a state: it writes a checkpoint and appends worker events about it."""

    directory: str
    keep: int
    why: str
    again: str  #: when the next try is, should this one fail
    events: str  #: the worker event file of the rank that saved it, "" for none; so are `rank` and `blocked_s`
    rank: int
    blocked_s: float
    keep_every: int = 0  #: the first step from each multiple of it on is never deleted; 0: none
    token: str = ""  #: the name of a sharded state's staging directory. `node` of `nodes` writes its part there.
    node: int = 0
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole state in a buffer."""

    draft: Manifest  #: without a checksum
    save_number: int  #: which save of its round it is, from 1: a step may be saved twice
    task: WriteTask | None
    """None: it is not to be written to disk, or that has been done. Of a state saved at a fault: for the end."""
    checkpoint_path: str = ""
    files: Mapping[str, FilePlace] = field(default_factory=dict)
    """Offset and size of each of the files of a sharded state in this buffer."""
    adopting_round: int = 0  #: the last round that has resumed from a sharded state, 0 for none
    is_copy: bool = False  #: another node's part, kept for it

    @property
    def original_key(self) -> SaveKey:
        """The round and the number of the save."""
        return self.draft.round, self.save_number

    @property
    def key(self) -> SaveKey:
        """The round whose state it is, and the number of the save in it; 0: the round has resumed from it."""
        return (self.adopting_round, 0) if self.adopting_round else self.original_key

    @property
    def is_due(self) -> bool:
        """It is to be written as soon as possible, and not only if no round follows."""
        return self.task is not None and donated_step(self.save_number) is None

    def as_written(self, path: Path | None) -> Snapshot:
        """This state once its task is over; None: without success."""
        return replace(self, task=None, checkpoint_path=str(path or ""))

    def to_json(self) -> bytes:
        fields: Message = {
            "number": self.save_number,
            "task": self.task and asdict(self.task),
            "path": self.checkpoint_path,
        }
        fields |= {"files": dict(self.files), "adopted": self.adopting_round, "is_copy": self.is_copy}
        return json.dumps({**fields, "draft": self.draft.to_json().decode()}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Snapshot:
        """Raises ValueError, KeyError or TypeError for anything else than `to_json` wrote."""
        fields = json.loads(data)
        task = fields["task"] and WriteTask(**fields["task"])
        found = cls.of_draft(fields["draft"].encode(), fields["number"])
        whose = (fields["path"], fields["files"], fields["adopted"], fields["is_copy"])
        return cls(found.draft, found.save_number, task, *whose)

    @classmethod
    def of_draft(cls, draft: bytes, number: int) -> Snapshot:
        """A state that is in no buffer. Raises ValueError for another draft than `Manifest.to_json` wrote."""
        manifest = parse(draft)
        if not isinstance(manifest, Manifest):
            raise ValueError(manifest.why)
        return cls(manifest, number, None)


@dataclass
class BufferFill:
    """A buffer being filled."""

    key: SaveKey
    share_count: int
    buffer: int
    digest: str
    refused: Reason = ""
    copying_ranks: set[socket.socket] = field(default_factory=set)
    copied_shares: set[int] = field(default_factory=set)
    failed: Reason = ""
    snapshot: Snapshot | None = None
    files: dict[str, FilePlace] = field(default_factory=dict)
    partner: Message | None = None  #: the node of whose part this one keeps a copy

    @property
    def is_incomplete(self) -> bool:
        """Some rank has not copied its share."""
        return len(self.copied_shares) < self.share_count or bool(self.copying_ranks)

    def repeats(self, older: BufferFill, once: bool) -> bool:
        """Another rank is copying the same step after the same fault; with `once`, or has done so."""
        step = donated_step(self.key[1])
        same = (self.key[0], step) == (older.key[0], donated_step(older.key[1]))
        return (
            step is not None
            and same
            and bool(older.copying_ranks or (once and older.copied_shares))
            and not older.failed
        )


class Buffers:
    """The descriptors of the header file and of the buffers; `held` is what each buffer holds, None for nothing."""

    def __init__(self, headers: int, buffers: list[int]) -> None:
        self._headers = headers
        self.fds = buffers
        self.held: list[Snapshot | None] = [self._read_header(number) for number in range(len(buffers))]
        self._mapped = [memoryview(b"")] * len(buffers)

    def find(self, key: SaveKey, file: str = "", with_copies: bool = True) -> int | None:
        """The buffer with this state, and with that file of it; without `with_copies`, this node's own part."""
        for number, snapshot in enumerate(self.held):
            if snapshot is None or snapshot.key != key or (snapshot.is_copy and not with_copies):
                continue
            if not file or file in snapshot.files:
                return number
        return None

    def newest_whole(self) -> int | None:
        """The buffer with the newest state that is whole in it."""
        return self._find_newest(False)

    def newest_part(self) -> int | None:
        """The buffer with this node's own part of the newest sharded state."""
        return self._find_newest(True)

    def _find_newest(self, is_sharded: bool) -> int | None:
        own = [(at, snapshot) for at, snapshot in enumerate(self.held) if snapshot and not snapshot.is_copy]
        alike = [(at, snapshot) for at, snapshot in own if bool(snapshot.files) == is_sharded]
        keys = [(snapshot.key[0], snapshot.draft.step, snapshot.save_number, at) for at, snapshot in alike]
        return max(keys, default=(0, 0, 0, None))[3]

    def erase_header(self, number: int) -> None:
        """Before the buffer is filled."""
        self.held[number] = None
        os.pwrite(self._headers, bytes(8), number * _HEADER_BYTES)

    def grow(self, number: int, size: int) -> None:
        """Before ranks get it. Never smaller: a rank that has mapped it may be copying."""
        if os.fstat(self.fds[number]).st_size < size:
            os.ftruncate(self.fds[number], size)

    def trim(self, number: int, snapshot: Snapshot) -> None:
        """Once every rank has copied: exactly the state, without the end of a larger one before it."""
        parts = snapshot.files.values()
        os.ftruncate(self.fds[number], max((at + size for at, size in parts), default=snapshot.draft.bytes))

    def write_header(self, number: int, snapshot: Snapshot) -> None:
        """After the buffer is filled, and again when its task is over. Raises ValueError for too long a description."""
        data = snapshot.to_json()
        if len(data) > _HEADER_BYTES - 64:
            raise ValueError(f"the sampler's position takes {len(data)} bytes; at most {_HEADER_BYTES - 64} fit")
        record = len(data).to_bytes(8, "little") + hashlib.sha256(data).digest() + data
        os.pwrite(self._headers, record, number * _HEADER_BYTES)
        self.held[number] = snapshot

    def map_pages(self, number: int, size: int) -> memoryview:
        """The state in a buffer, `size` bytes. To read it there takes a third of the time that a copy takes, and the
        mapping is kept: page faults take as long as the rest. Raises OSError, ValueError.
        """
        if len(self._mapped[number]) < size:
            self._mapped[number] = memoryview(mmap.mmap(self.fds[number], size))
        return self._mapped[number][:size]

    def preallocate_others(self, number: int) -> None:
        """Memory for as large a state in the other buffers: the next copy, perhaps at a fault, need not wait for it."""
        size = os.fstat(self.fds[number]).st_size
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        for fd in (other for at, other in enumerate(self.fds[:OWN_BUFFER_COUNT]) if at != number):
            if os.fstat(fd).st_blocks * 512 < size:
                # A rank that wants to write into it waits for one piece at most. Its size is the rank's to choose.
                for at in range(0, size, _PREALLOCATED_PIECE_BYTES):
                    fallocate(fd, _KEEP_SIZE, at, min(_PREALLOCATED_PIECE_BYTES, size - at))

    def _read_header(self, number: int) -> Snapshot | None:
        record = os.pread(self._headers, _HEADER_BYTES, number * _HEADER_BYTES)
        size = int.from_bytes(record[:8], "little")
        data = record[40 : 40 + size]
        if not size or hashlib.sha256(data).digest() != record[8:40]:
            return None  # empty, or the writer died while it wrote the header
        try:
            return Snapshot.from_json(data)
        except (ValueError, KeyError, TypeError):
            return None  # of another version
