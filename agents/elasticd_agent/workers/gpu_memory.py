"""Waits until processes that have ended hold no GPU memory any more: the next group must not run out of it.

A killed process gives its GPU memory back when the driver has torn its contexts down, which may be after its parent has
reaped it. NVML may take long or hang, so a thread asks it and posts the answer. Process ids are compared, and memory
that no process explains: a container may show none, or the host's ids, of which none is recognised.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from elasticd_agent.system.helper_process import HelperError
from elasticd_agent.system.nvml import NvmlClient, describe_event, find_pynvml

WAIT_S = 30.0
"""Tens of GB are given back in a second or two; 50 s have been seen elsewhere."""
ANSWER_S = 2.0
"""Finding the GPUs is part of the first answer, and takes a second or two where the driver does not stay loaded."""
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class MemoryChecked:
    """The answer to one `check`."""

    holders: tuple[tuple[int, int], ...]
    """(pid, GPU index) of the processes that still hold memory."""
    seconds: float
    trouble: str = ""
    """Why there is no answer."""


class GpuMemory:
    """Of a machine without GPUs, or without NVML for Python: nothing to wait for."""

    def track(self, pids: Collection[int]) -> None:
        """These processes were started and may use GPUs."""

    def check(self, except_pids: Collection[int]) -> bool:
        """True if MemoryChecked will be posted: when no tracked process holds GPU memory, or time is up.

        Call it when all of them have ended, except those known not to. Each process is checked once.
        """
        return False

    def close(self) -> None:
        pass


class NvmlGpuMemory(GpuMemory):
    """Asks NVML, whose process is started ahead. `track` and `check` belong to one thread."""

    def __init__(
        self,
        post: Callable[[MemoryChecked], None],
        wait_s: float = WAIT_S,
        answer_s: float = ANSWER_S,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`warn` gets a sentence for each error that the driver reports of a GPU, in another thread."""
        self._post = post
        self._wait_s = wait_s
        self._answer_s = answer_s
        self._pids: set[int] = set()
        self._requests: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._nvml = NvmlClient(("initialize", "events"), lambda event: warn(describe_event(event)))
        self._thread = threading.Thread(target=self._run, name="elasticd-gpu-memory", daemon=True)
        self._thread.start()

    def track(self, pids: Collection[int]) -> None:
        self._pids.update(pids)

    def check(self, except_pids: Collection[int]) -> bool:
        ended = tuple(self._pids.difference(except_pids))
        self._pids.clear()
        if ended:
            self._requests.put(ended)
        return bool(ended)

    def close(self) -> None:
        """End the NVML process. Bounded."""
        self._requests.put(None)
        self._nvml.stop()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with suppress(OSError, HelperError):  # the first request tries again
            self._nvml.start()
        while (pids := self._requests.get()) is not None:
            began = time.monotonic()
            request = {"do": "holders", "pids": pids, "within_s": self._wait_s}
            answer = self._nvml.request(request, self._wait_s + self._answer_s)
            holders = tuple((pid, gpu) for pid, gpu in answer.get("holders", ()))
            self._post(MemoryChecked(holders, time.monotonic() - began, answer.get("trouble", "")))
        self._nvml.close()


def open_gpu_memory(
    gpus: bool, post: Callable[[MemoryChecked], None], warn: Callable[[str], None] = lambda sentence: None
) -> GpuMemory:
    """`gpus`: the job uses GPUs. `warn`: as for NvmlGpuMemory."""
    return NvmlGpuMemory(post, warn=warn) if gpus and find_pynvml() else GpuMemory()
