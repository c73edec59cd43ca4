"""A sharded state that the ranks of a node save at a fault: each file once, into one buffer, whichever ranks survive.

Nobody knows beforehand which ranks do. So the writer lends a file to one rank that has it, and again if that rank dies.
The header names the files that are there: nodes need not have the same, and the next round looks whether they are all
files together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from elasticd.checkpointing.buffers import COUNT, Buffers, Snapshot, WriteTask
from elasticd.checkpointing.manifest import Manifest

Key = tuple[int, int]
"""The round, and the number of the save in it."""
Span = tuple[int, int]
"""Offset and size in bytes."""


class FileFill:
    """Of one writer: the last such state. `refusal(size, fds)` says why there is no memory, "" if there is."""

    def __init__(self, buffers: Buffers, refusal: Callable[[int, list[int]], str]) -> None:
        self._buffers, self._refusal = buffers, refusal
        self._key: Key = (0, 0)
        self._buffer = -1
        self._end = 0
        """Of everything lent."""
        self._files: dict[str, Span] = {}
        """That are copied."""
        self._copying: dict[Any, tuple[str, Span]] = {}

    @property
    def ranks(self) -> list[Any]:
        """That copy a file."""
        return list(self._copying)

    @property
    def busy(self) -> set[int]:
        """The buffer into which ranks copy."""
        return {self._buffer} if self._copying else set()

    def lend(
        self, rank: Any, key: Key, wanted: Sequence[tuple[str, int]], filled: Collection[int | None]
    ) -> tuple[dict[str, object], int | None]:
        """The first of the wanted files, by their sizes, that nobody copies: {file, start} and the buffer's descriptor.

        `file` is "" while others copy the rest, and None once all are copied; or {refused}. `filled`: buffers into
        which ranks copy another state, or of which one is being written.
        """
        if key != self._key and (why := self._begin(key, filled)):
            return {"refused": why}, None
        names = {name for name, _ in self._copying.values()}
        left = [(name, size) for name, size in wanted if name not in self._files]
        name, size = next((each for each in left if each[0] not in names), ("", 0))
        if not name:
            return {"file": "" if left else None}, None
        start, end = self._end, self._end + size
        fd = self._buffers.fds[self._buffer]
        if why := self._refusal(end, [fd]):
            return {"refused": why}, None
        self._buffers.grow(self._buffer, end)
        self._end = end
        self._copying[rank] = (name, (start, size))
        return {"file": name, "start": start}, fd

    def _begin(self, key: Key, filled: Collection[int | None]) -> str:
        """Take the buffer with the older state, but none that is to be written; returns why that is not possible.

        A later step of the same round takes the place of the earlier one: the other buffer may be all that is left of
        the state before them.
        """
        held = self._buffers.held[:COUNT]
        own = [self._buffer] if self._buffer >= 0 and self._key[0] == key[0] else range(COUNT)
        free = [at for at in own if at not in {*filled, *self.busy} and not ((each := held[at]) and each.is_due)]
        if key < self._key or not free:
            return "a later step is saved" if key < self._key else "each buffer is in use"
        self._key, self._end, self._files = key, 0, {}
        keys = [(0, 0) if each is None else each.key for each in held]
        self._buffer = min(free, key=lambda at: (keys[at], at))
        self._buffers.erase(self._buffer)
        return ""

    def returned(self, rank: Any, key: Key, draft: Manifest, task: WriteTask | None = None) -> None:
        """The file that was lent to this rank is copied. `task`: at the end of the job."""
        if key != self._key or rank not in self._copying:
            return
        name, span = self._copying.pop(rank)
        self._files[name] = span
        snapshot = Snapshot(draft, key[1], task, files=dict(self._files))
        if not self._copying:
            self._buffers.trim(self._buffer, snapshot)
        self._buffers.describe(self._buffer, snapshot)

    def lost(self, rank: Any) -> None:
        """The rank has died."""
        self._copying.pop(rank, None)

    def release(self, key: Key, buffer: int) -> None:
        """A save as usual is whole. Once the one before it is on the disk, this state's memory is given back."""
        if self._buffer < 0 or key[0] <= self._key[0] or key[1] < 2 or self._copying:
            return
        held = self._buffers.held[self._buffer]
        if self._buffer != buffer and held is not None and held.saved == self._key:
            self._buffers.erase(self._buffer)
            os.ftruncate(self._buffers.fds[self._buffer], 0)
        self._buffer = -1
