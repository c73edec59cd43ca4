"""The main thread's activity, seen from another thread: where its Python is, and whether it waits for other ranks.

Reads frames and the thread's processor time; a thread in a C function shows the last line of Python. Of variables only
the timeout and the group of torch's own collective functions are read.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_WAITING_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
"""A thread in a C function called from these files waits for other ranks, as a rule."""
_BACKWARD_FILES = ("/torch/autograd/graph.py", "/torch/autograd/__init__.py")
"""A backward pass waits for other ranks, too: it ends with DDP's wait for the gradients, but only while it computes
nothing."""
_DDP_FILES = ("/torch/nn/parallel/distributed.py", "/torch/distributed/utils.py")
_C10D_FILE = "/torch/distributed/distributed_c10d.py"
_C10D_WRAPPER_FILE = "/torch/distributed/c10d_logger.py"
_ALL_RANKS_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
)
"""Collectives that end on no rank before all ranks have called them, unlike a broadcast, a send or a receive."""


class MainThread:
    """The main thread of this process."""

    def __init__(self) -> None:
        self._id = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._id)

    def cpu_time_ns(self) -> int:
        """The thread's processor time; 0 once it has ended."""
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            return 0

    def position(self) -> tuple[str, str, tuple[int, int]]:
        """The file and the function of its innermost Python, and two numbers that change when it moves."""
        frame = sys._current_frames().get(self._id)
        if frame is None:
            return "", "", (0, 0)
        return frame.f_code.co_filename, frame.f_code.co_name, (id(frame.f_code), frame.f_lasti)

    def waits_for_ranks(self, file: str, cpu_time_ns: int) -> bool:
        """It waits for others: by its file, and by its processor time before the file was read."""
        if file.endswith(_BACKWARD_FILES):
            return cpu_time_ns == self.cpu_time_ns()
        return any(part in file for part in _WAITING_FILES)

    def wait_arguments(self) -> tuple[Any, Any]:
        """The timeout and the group that the script gave the collective it waits in; None: none."""
        frame, timeout, group = sys._current_frames().get(self._id), None, None
        while frame is not None and not frame.f_code.co_filename.endswith(_C10D_FILE):
            frame = frame.f_back if frame.f_code.co_filename.endswith(_C10D_WRAPPER_FILE) else None
        while frame is not None and frame.f_code.co_filename.endswith((_C10D_FILE, _C10D_WRAPPER_FILE)):
            if frame.f_code.co_filename.endswith(_C10D_FILE):
                given = frame.f_locals
                timeout, group = given.get("timeout") or timeout, given.get("group") or group
            frame = frame.f_back
        return timeout, group

    def awaited_collective(self) -> str:
        """The collective in which it waits for all ranks of a group, "" where that is not certain."""
        cpu_time_ns = self.cpu_time_ns()
        file, function, _ = self.position()
        if not self.waits_for_ranks(file, cpu_time_ns):
            return ""
        if file.endswith(_C10D_FILE):
            return function if function in _ALL_RANKS_COLLECTIVES else ""
        if file.endswith(_DDP_FILES):
            return "DDP's forward"
        return "DDP's backward" if file.endswith(_BACKWARD_FILES) else ""
