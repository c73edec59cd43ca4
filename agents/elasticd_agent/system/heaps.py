"""The heaps of glibc in a process that runs for months, and that reads messages of a megabyte in each of its threads.

By itself glibc makes a heap for each thread, up to eight a core, and once a megabyte has been freed takes the next one
from the thread's heap: each keeps the pages of the largest moment that it has seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
MAX_HEAPS = 2
LARGE_BYTES = 1 << 17
"""A block of this size has pages of its own, which the kernel gets back at once. It is glibc's default before it
adapts."""


def limit_heaps() -> None:
    """Have few heaps; before the first thread starts."""
    with contextlib.suppress(AttributeError):  # musl has no such function
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, MAX_HEAPS)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def return_free_memory() -> None:
    """Give the kernel the pages that nothing uses: freed memory lies between memory in use, and glibc returns the end
    of its heaps only.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
