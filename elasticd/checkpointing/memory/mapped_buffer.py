"""A rank's view of a buffer that it copies into again and again: a copy into mapped memory takes a third of the time
that `pwrite` takes, once the pages are in the process's page table.

The first copy into a buffer is written. Afterwards a thread maps what was written; later copies go there. The writer
only lets a buffer grow while a rank may copy into it, so that no access is beyond the buffer's end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from elasticd.checkpointing.memory.buffers import OWN_BUFFER_COUNT
from elasticd.checkpointing.storage.atomic_write import write_at

_POPULATE_READ = 22
"""MADV_POPULATE_READ of linux/mman.h, since Linux 5.14. Of a shared mapping such pages can be written, too."""
_MAP_PIECE_BYTES = 16 << 20
"""The bytes that are mapped at once, in 2 ms, until it looks whether it is to end."""


class MappedBuffers:
    """The buffers of one writer, by their inodes."""

    def __init__(self) -> None:
        self._buffers: dict[int, MappedBuffer] = {}

    def begin_copy(self, fd: int) -> MappedBuffer:
        """The buffer for one copy."""
        inode = os.fstat(fd).st_ino
        buffer = self._buffers.get(inode)
        if buffer is None and len(self._buffers) == OWN_BUFFER_COUNT:
            self.close()  # buffers of a launcher that has died
        if buffer is None or not buffer.fits:
            buffer = self._buffers[inode] = MappedBuffer()
        buffer.begin_copy(fd)
        return buffer

    def close(self) -> None:
        """Nothing is mapped any more."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()


class MappedBuffer:
    """One buffer: `begin_copy`, any number of `write`, `end_copy`."""

    def __init__(self) -> None:
        self.fits = True
        """False: the state has grown beyond what is mapped."""
        self._fd = -1
        self._address, self._mapped = 0, 0
        """The place of the mapping in this process's memory, and its size."""
        self._safe = 0
        """The bytes of the mapping that are in the file during this copy."""
        self._written: list[tuple[int, int]] = []
        """Offset and end of each piece of the first copy."""
        self._view: ctypes.Array[ctypes.c_char] | None = None
        """Keeps it mapped."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin_copy(self, fd: int) -> None:
        self._fd = fd
        self._safe = min(self._mapped, os.fstat(fd).st_size)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Raises OSError."""
        end = offset + len(data)
        if not len(data):
            return
        if end <= self._safe:
            source = data if isinstance(data, bytes) else ctypes.addressof(ctypes.c_char.from_buffer(data))
            ctypes.memmove(self._address + offset, source, len(data))
            return
        if self._thread is None:
            start = self._written.pop()[0] if self._written and self._written[-1][1] == offset else offset
            self._written.append((start, end))
        self.fits = not self._mapped
        write_at(self._fd, offset, memoryview(data))

    def end_copy(self) -> None:
        """Map the buffer for the next copies, unless that has been done."""
        if self._thread is None and self._written:
            fd = os.dup(self._fd)
            self._thread = threading.Thread(target=self._map, args=(fd,), name="elasticd-buffer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _map(self, fd: int) -> None:
        try:
            mapped = mmap.mmap(fd, 0)
            mapped.madvise(mmap.MADV_DONTFORK)  # a child would keep the memory after its writer has died
        except (OSError, ValueError):
            return
        finally:
            os.close(fd)
        self._view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        self._address = ctypes.addressof(self._view)
        madvise = ctypes.CDLL(None).madvise  # mmap's own holds the GIL
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in self._written:
            for at in range(start // mmap.PAGESIZE * mmap.PAGESIZE, end, _MAP_PIECE_BYTES):
                if self._closed:
                    return
                # An error on an older kernel: the next copy finds the pages.
                madvise(self._address + at, min(_MAP_PIECE_BYTES, end - at), _POPULATE_READ)
        self._mapped = len(mapped)
