"""Waits until processes that have ended hold no GPU memory any more: the next group must not run out of it.

A killed process gives its GPU memory back when the driver has torn its contexts down, which may be after its parent has
reaped it. NVML may take long or hang, so a thread asks it and posts the answers. Process ids are compared, and memory
that no process explains with what they held: a container may show none, or the host's ids, of which none is recognised.
Only the job's GPUs are looked at, and each is free by itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elasticd_agent.system.gpus.nvml import NvmlClient, describe_event, find_pynvml
from elasticd_agent.system.processes.helper_process import HelperError

WAIT_S = 30.0
"""Tens of GB are given back in a second or two; 50 s have been seen elsewhere."""
ANSWER_S = 2.0
"""Finding the GPUs is part of the first answer, and takes a second or two where the driver does not stay loaded."""
CLOSE_S = 2.0
POLL_S = 0.05
CHECK_DEADLINE_S = WAIT_S + ANSWER_S + 3.0
"""The end of a check that never answers."""
SAMPLE_INTERVAL_S = 10.0
"""The interval in which the running processes' memory is read, which takes a millisecond a GPU."""


@dataclass(frozen=True, slots=True)
class MemoryChecked:
    """An answer to one check, whose `number` it has; the last one has no `busy_gpus`."""

    number: int
    holders: tuple[tuple[int, int], ...] = ()  #: (pid, GPU index) of the processes that still hold memory
    waited_s: float = 0.0
    trouble: str = ""  #: why there is no answer
    busy_gpus: tuple[str, ...] = ()
    """GPUs whose memory is not free yet, as in CUDA_VISIBLE_DEVICES; "" where that is unknown."""


class GpuMemory:
    """The memory of a machine without GPUs, or without NVML for Python: nothing to wait for."""

    def track(self, pids: Mapping[int, str]) -> None:
        """These processes were started and may use GPUs, each its own, "" where that is unknown."""

    def start_check(self, except_pids: Collection[int]) -> int:
        """Have MemoryChecked posted: whenever other GPUs are busy, and when none is, or time is up.

        Call it when all tracked processes have ended, except those known not to. Each process is checked once. Returns
        the number of the check, 0 if there is nothing to wait for.
        """
        return 0

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Check:
    number: int
    pids: dict[int, str]
    began: float
    busy_gpus: tuple[str, ...] = ()


class NvmlGpuMemory(GpuMemory):
    """Asks NVML, whose process is started ahead. `track` and `start_check` belong to one thread."""

    def __init__(
        self,
        post: Callable[[MemoryChecked], None],
        wait_s: float = WAIT_S,
        answer_s: float = ANSWER_S,
        warn: Callable[[str], None] = lambda sentence: None,
        gpus: Sequence[str] = (),
    ) -> None:
        """`warn` gets a sentence for each error that the driver reports of a GPU, in another thread. `gpus`: the
        job's, as in CUDA_VISIBLE_DEVICES; none: all.
        """
        self._post = post
        self._wait_s = wait_s
        self._answer_s = answer_s
        self._pids: dict[int, str] = {}
        self._number = 0
        self._requests: queue.SimpleQueue[tuple[int, dict[int, str]] | None] = queue.SimpleQueue()
        """(number of the check, pids), or 0 and the processes that run."""
        at_start = [{"do": do, "gpus": list(gpus)} for do in ("initialize", "events")]
        self._nvml = NvmlClient(at_start, lambda event: warn(describe_event(event)))
        self._thread = threading.Thread(target=self._run, name="elasticd-gpu-memory", daemon=True)
        self._thread.start()

    def track(self, pids: Mapping[int, str]) -> None:
        self._pids.update(pids)
        self._requests.put((0, dict(self._pids)))

    def start_check(self, except_pids: Collection[int]) -> int:
        ended = {pid: gpu for pid, gpu in self._pids.items() if pid not in except_pids}
        self._pids.clear()
        if not ended:
            return 0
        self._number += 1
        self._requests.put((self._number, ended))
        return self._number

    def close(self) -> None:
        """End the NVML process. Bounded."""
        self._requests.put(None)
        self._nvml.cancel_request()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with suppress(OSError, HelperError):  # the first request tries again
            self._nvml.start()
        running: dict[int, str] = {}
        check: _Check | None = None
        while True:
            try:
                request = self._requests.get(
                    timeout=POLL_S if check is not None else SAMPLE_INTERVAL_S if running else None
                )
                if request is None:
                    break
                number, pids = request
                running = {} if number else pids
                if number:  # what an earlier check waits for is waited for, too
                    check = _Check(number, pids if check is None else check.pids | pids, time.monotonic())
            except queue.Empty:
                pass
            if check is not None:
                check = check if self._poll_once(check) else None
            else:
                self._nvml.send({"do": "sample", "pids": list(running)})
        self._nvml.close()

    def _poll_once(self, check: _Check) -> bool:
        """Ask once. True if there is something to wait for."""
        left_s = max(0.0, check.began + self._wait_s - time.monotonic())
        answer = self._nvml.request({"do": "holders", "pids": list(check.pids.items())}, left_s + self._answer_s)
        seconds = time.monotonic() - check.began
        busy = tuple(answer.get("busy", ()))
        if busy and seconds < self._wait_s:
            if busy != check.busy_gpus:
                check.busy_gpus = busy
                self._post(MemoryChecked(check.number, (), seconds, busy_gpus=busy))
            return True
        holders = tuple((pid, gpu) for pid, gpu in answer.get("holders", ()))
        self._post(MemoryChecked(check.number, holders, seconds, answer.get("trouble", "")))
        return False


def open_gpu_memory(
    gpus: Sequence[str],
    post: Callable[[MemoryChecked], None],
    warn: Callable[[str], None] = lambda sentence: None,
) -> GpuMemory:
    """`gpus`: the job's, as in CUDA_VISIBLE_DEVICES; none: it uses none. `warn`: as for NvmlGpuMemory."""
    return NvmlGpuMemory(post, warn=warn, gpus=gpus) if gpus and find_pynvml() else GpuMemory()


class GpuGate:
    """Which of a job's GPUs on this node wait for memory of the last group. It belongs to one thread."""

    def __init__(self, memory: GpuMemory | None = None, gpus: Sequence[str] = ()) -> None:
        """`gpus`: one for each slot, none if they are not known."""
        self.check_deadline: float | None = None
        """The deadline of a check that is not over."""
        self._memory = memory or GpuMemory()
        self._gpus = gpus
        self._number = 0
        self._busy: tuple[str, ...] | None = None
        """GPUs that are not free, as in MemoryChecked; None before the first answer."""

    def track(self, pids: Sequence[int], slots: Sequence[int]) -> None:
        """The workers on `slots` were started."""
        self._memory.track(dict(zip(pids, map(self._gpu_of, slots), strict=True)))

    def start_check(self, except_pids: Collection[int]) -> None:
        """Check what the workers that have ended hold, if there are any."""
        if number := self._memory.start_check(except_pids):
            self._number, self._busy = number, None
            self.check_deadline = time.monotonic() + CHECK_DEADLINE_S

    def accept_answer(self, checked: MemoryChecked) -> bool:
        """False: it is outdated."""
        if checked.number != self._number or self.check_deadline is None:
            return False
        self._busy = checked.busy_gpus
        if not checked.busy_gpus:
            self.check_deadline = None
        return True

    def overdue_answer(self, now: float) -> MemoryChecked | None:
        """The result to take instead of an answer that does not come."""
        if self.check_deadline is None or now < self.check_deadline:
            return None
        return MemoryChecked(self._number, (), CHECK_DEADLINE_S, "the check of the GPU memory did not answer")

    def waiting_ranks(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The local ranks of workers on `slots` whose GPU is not free."""
        busy = self._busy
        if self.check_deadline is None:
            return ()
        return tuple(at for at, slot in enumerate(slots) if busy is None or self._gpu_of(slot) in ("", *busy))

    def _gpu_of(self, slot: int) -> str:
        return self._gpus[slot] if slot < len(self._gpus) else ""
