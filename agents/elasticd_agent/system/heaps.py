"""The memory of a process that runs for months, and whose threads read messages of a megabyte.

By itself glibc takes a block of a megabyte from the thread's own heap once another one has been freed. Then each
thread's heap keeps the pages of the largest block that it has had.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 17
"""glibc's own threshold before it adapts."""


def map_large_blocks() -> None:
    """Map each block from LARGE_BYTES by itself, so that the kernel gets its pages back as it is freed."""
    with contextlib.suppress(AttributeError):  # musl has no such function
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def return_free_memory() -> None:
    """Give the kernel the pages that nothing uses: freed memory lies between memory in use, and glibc returns the end
    of its heaps only.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
