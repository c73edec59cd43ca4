"""Whether the GPUs still hold memory of processes that have ended: the next group on them must not run out of it.

A killed process gives its GPU memory back when the driver has torn its contexts down, which may be after its parent has
reaped it. NVML is asked in a helper process, since a call into a broken driver may never return, and from a thread,
since starting one takes a moment: nobody ever waits here, an answer is posted. It ends nothing and decides nothing.
Only process ids are compared: in a container whose driver reports the host's, nobody is recognised.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

WITHIN_S = 10.0
"""Tens of GB are given back in well under a second; who still holds them after this will not soon."""
ANSWER_S = 2.0
"""How much longer than told the helper may take: finding the GPUs is part of its first answer, and takes a second or
two where the driver does not stay loaded."""
AGAIN_S = 0.02
CLOSING_S = 0.1
"""How soon a thread that waits for an answer sees that nobody wants it any more."""
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class MemoryChecked:
    """The answer to one `ask`. `held`: (pid, GPU index) of those who still hold memory; `trouble` if nobody knows."""

    holders: tuple[tuple[int, int], ...]
    seconds: float
    trouble: str = ""


class GpuMemory(Protocol):
    """What the processes of this node's groups hold. `used_by` and `ask` belong to one thread."""

    def track(self, pids: Collection[int]) -> None:
        """These have been started and may use GPUs."""
        ...

    def check(self, except_pids: Collection[int]) -> bool:
        """True if MemoryChecked will be posted: when no process named before holds GPU memory, or time is up.

        To be asked when all of them have ended, but for those that are known not to. Each is asked about once.
        """
        ...

    def close(self) -> None: ...


class NoGpuMemory:
    """A machine without GPUs, or without NVML for Python: there is nothing to wait for."""

    def track(self, pids: Collection[int]) -> None:
        pass

    def check(self, except_pids: Collection[int]) -> bool:
        return False

    def close(self) -> None:
        pass


class NvmlGpuMemory:
    """Asks through a helper process, which is started ahead, and anew where it did not answer."""

    def __init__(
        self, post: Callable[[MemoryChecked], None], within_s: float = WITHIN_S, answer_s: float = ANSWER_S
    ) -> None:
        self._post, self._within_s, self._answer_s = post, within_s, answer_s
        self._pids: set[int] = set()
        self._requests: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._helper: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="device-memory", daemon=True)
        self._thread.start()

    def track(self, pids: Collection[int]) -> None:
        self._pids.update(pids)

    def check(self, except_pids: Collection[int]) -> bool:
        dead = tuple(self._pids.difference(except_pids))
        self._pids.clear()
        if dead:
            self._requests.put(dead)
        return bool(dead)

    def close(self) -> None:
        """End the helper. Bounded."""
        self._closing = True
        self._requests.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # then it is tried again when it is needed
            self._helper = start_helper()
        while (pids := self._requests.get()) is not None:
            began = time.monotonic()
            answer = self._answer(pids)
            held = tuple((pid, gpu) for pid, gpu in answer.get("held", ()))
            self._post(MemoryChecked(held, time.monotonic() - began, answer.get("trouble", "")))
        self._end_helper()

    def _answer(self, pids: tuple[int, ...]) -> dict[str, Any]:
        try:
            helper = self._helper = self._helper or start_helper()
            assert helper.stdin is not None and helper.stdout is not None
            helper.stdin.write(json.dumps({"pids": pids, "within_s": self._within_s}).encode() + b"\n")
            helper.stdin.flush()
            ready = self._ready(helper.stdout.fileno(), time.monotonic() + self._within_s + self._answer_s)
            line = helper.stdout.readline() if ready else b""
            if line:
                return dict(json.loads(line))
            trouble = "the process that asks NVML has ended" if ready else "NVML does not answer"
        except (OSError, ValueError) as error:
            trouble = f"the process that asks NVML: {error}"
        self._end_helper()
        return {"trouble": trouble}

    def _ready(self, fd: int, until: float) -> bool:
        poll, ready = select.poll(), False
        poll.register(fd, select.POLLIN)
        while not ready and not self._closing and time.monotonic() < until:
            ready = bool(poll.poll(CLOSING_S * 1000))
        return ready

    def _end_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is None:
            return
        assert helper.stdin is not None and helper.stdout is not None
        helper.kill()
        for stream in (helper.stdin, helper.stdout):
            try:
                stream.close()
            except OSError:
                pass  # what was not written yet is of no use any more
        try:
            helper.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            pass  # it hangs in the driver


def open_gpu_memory(gpus: bool, post: Callable[[MemoryChecked], None]) -> GpuMemory:
    """What there is to ask on this machine."""
    return NvmlGpuMemory(post) if gpus and find_spec("pynvml") is not None else NoGpuMemory()


def start_helper() -> subprocess.Popen[bytes]:
    """It ends with its standard input, that is with us."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


# ---- the helper


def main() -> None:
    """Answer each line: {pids, within_s} -> {held: [[pid, GPU], ...]} as soon as there is none, or when time is up."""
    import pynvml

    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    for line in sys.stdin:
        asked = json.loads(line)
        until = time.monotonic() + asked["within_s"]
        pids = set(asked["pids"])
        while (held := holders(pynvml, gpus, pids)) and time.monotonic() < until:
            time.sleep(AGAIN_S)
        print(json.dumps({"held": held}), flush=True)


def holders(nvml: Any, gpus: list[Any], pids: set[int]) -> list[tuple[int, int]]:
    """Which of `pids` hold memory on which GPU. One that cannot be asked (it fell off the bus) holds nothing."""
    held = []
    for index, gpu in enumerate(gpus):
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        except nvml.NVMLError:
            continue
        held += [(process.pid, index) for process in processes if process.pid in pids]
    return held


if __name__ == "__main__":
    main()
