"""The order in which one process sees the plain stores of another one, for records in memory that both have mapped.

Python cannot put a barrier between two stores. On x86 none is needed: stores become visible in their order. An ARM core
may show a later store first, so a record that is guarded by a number before and after it can be read half old and half
new, with the same number twice. A barrier in the reader alone does not help, and one in the writer would cost each step
0.2 µs. Linux can make every core that runs a writer execute a barrier when the reader asks for it (membarrier(2)):

    writer    number = odd; words; number = even               plain stores, in this order
    reader    read; order_stores(); read again                 both alike and the number even: it is whole

If the first reading has a new word, the store of the odd number was executed before it, and is visible after the
barrier: the readings differ. If it has the new even number and an old word, that word is visible after the barrier:
they differ, too. The launcher loads this file by path; it imports nothing of elasticd.
"""

from __future__ import annotations

import ctypes
import os
import time

_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4
"""linux/membarrier.h; Linux 4.16"""
_MEMBARRIER_NUMBERS = {"aarch64": 283, "riscv64": 283}
"""The number of the call where stores may become visible in another order; libc has no function for it."""
_VISIBLE_AFTER_S = 0.001
"""The wait in place of a forbidden call (an old seccomp profile): a store is visible to all cores long before."""
_membarrier_number = _MEMBARRIER_NUMBERS.get(os.uname().machine, 0)


def register_writer() -> None:
    """Let readers order the stores of this process."""
    if _membarrier_number:
        _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def order_stores() -> None:
    """Make all stores that writers have executed so far visible to what this process reads from now on."""
    if _membarrier_number and not _membarrier(_GLOBAL_EXPEDITED):
        time.sleep(_VISIBLE_AFTER_S)


def _membarrier(command: int) -> bool:
    return bool(ctypes.CDLL(None).syscall(_membarrier_number, command, 0, 0) == 0)
