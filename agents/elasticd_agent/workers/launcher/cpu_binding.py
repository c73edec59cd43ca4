"""Binds the calling process, which has one thread, to CPUs: a worker, after its fork and before its script.

Threads and programs that it starts inherit both. The template, in the job's interpreter, loads this file by path.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection

MPOL_LOCAL = 4
"""linux/mempolicy.h"""
_SET_MEMPOLICY_SYSCALLS = {"x86_64": 238, "aarch64": 237}
"""libc has no function for it."""


def bind_to_cpus(cpus: Collection[int]) -> float:
    """Run on these CPUs only; none: on all that are inherited. Returns their share of what is inherited.

    Memory then comes from the nodes of the CPUs, and from others when these are full, whatever policy is inherited, as
    from numactl --interleave. A container may forbid to change it, where it is usually this one anyway.
    """
    if not cpus:
        return 1.0
    inherited = len(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # the cpuset has changed, and has none of them left
        print(f"elasticd: not bound to its CPUs (--numa-binding): {error.strerror}", file=sys.stderr)
        return 1.0
    number = _SET_MEMPOLICY_SYSCALLS.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, MPOL_LOCAL, None, ctypes.c_ulong(0))
    return len(os.sched_getaffinity(0)) / inherited
