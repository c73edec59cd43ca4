"""The memory of a process that runs for months, with many threads that read messages of up to a megabyte.

By itself glibc makes a heap for each thread. Each keeps the pages of the largest block that its thread has had, and its
gaps serve no other thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
LARGE_BYTES = 1 << 17
"""glibc's own threshold before it adapts."""


def share_one_heap() -> None:
    """Have all threads allocate from one heap. Map each block from LARGE_BYTES by itself, so that the kernel gets its
    pages back as it is freed.

    Threads that have a heap already keep it.
    """
    with contextlib.suppress(AttributeError):  # musl has no such function
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def return_free_memory() -> None:
    """Give the kernel the pages that nothing uses: freed memory lies between memory in use, and glibc returns the end
    of its heaps only.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
