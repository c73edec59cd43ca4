"""Asks NVML through its process (nvml_process.py), which is abandoned when it does not answer.

NVML is a C library that talks to a driver, and a driver that is ill hangs its callers in the kernel, where no timeout
reaches them. So it is loaded in a helper process only; the agent asks with a deadline and abandons a helper that does
not answer. Without a driver, or without the Python package, every question has the answer "unknown".
"""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticd.channel import Message
from elasticd_agent.system.installation import program
from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.helper_process import CLOSE_S, HelperError, HelperProcess, HelperTimeout
from elasticd_agent.system.waker import Waker

_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
"""One of them exists where NVIDIA's driver is loaded; the last one is WSL's."""


XID_EVENT, DOUBLE_BIT_EVENT = 0x8, 0x2
"""nvml.h: nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError"""
APPLICATION_XIDS = {
    13: "an exception in a kernel",
    31: "a page fault",
    43: "it stopped a program",
    45: "cleaning up after a program",
    68: "an exception of the video engine",
    109: "a context switch took too long",
}
"""XIDs that a faulty program can cause on a healthy GPU, as in NVIDIA's device plugin for Kubernetes."""


def find_pynvml() -> str:
    """The directory that has pynvml; "" if it is not installed."""
    spec = importlib.util.find_spec("pynvml")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin is not None else ""


def find_pynvml_with_driver() -> str | None:
    """The directory that has pynvml, "" if it is not installed; None on a machine without NVIDIA's driver."""
    return find_pynvml() if any(os.path.exists(path) for path in _DRIVER_FILES) else None


def describe_event(event: Mapping[str, Any]) -> str:
    """A sentence about an event of the driver; "" for a kind of event that was not asked for."""
    if event["type"] == DOUBLE_BIT_EVENT:
        return f"{describe_gpu(event)} had an uncorrectable memory error"
    if event["type"] != XID_EVENT:
        return ""
    number = event["data"]
    if number in APPLICATION_XIDS:
        return f"{describe_gpu(event)} had XID {number} ({APPLICATION_XIDS[number]}), which a faulty program can cause"
    return f"{describe_gpu(event)} had XID {number}; see dmesg, and XID {number} in NVIDIA's list of XID errors"


def describe_gpu(gpu: Mapping[str, Any]) -> str:
    if "index" not in gpu:
        return "a GPU that has lost its index"
    return f"GPU {gpu['index']}" + (f" ({gpu['bus']})" if gpu.get("bus") else "")


def start_nvml_process(pynvml: str) -> HelperProcess:
    """`pynvml` is what find_pynvml returned. The process dies with the calling thread. Raises OSError."""
    return HelperProcess([sys.executable, "-I", "-S", program("nvml"), pynvml])


class NvmlClient:
    """One NVML process: started by the first request, and anew after it failed to answer.

    A process that survives SIGKILL is not followed by another one while it lives. `cancel_request` may be called from
    any thread; all else belongs to one thread, with which the process dies.
    """

    def __init__(
        self,
        at_start: Sequence[Mapping[str, Any]],
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
    ) -> None:
        """The requests `at_start` are sent to every new process. `on_event` is called in another thread, with an event
        as it came.
        """
        self._at_start, self._on_event = at_start, on_event
        self._helper: HelperProcess | None = None
        self._reader: threading.Thread | None = None
        self._stop_reader: Waker | None = None
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._unkillable: HelperProcess | None = None

    def start(self) -> HelperProcess:
        """Start the process ahead of the first request. Raises OSError and HelperError."""
        helper = self._helper = start_nvml_process(find_pynvml())
        self._answers = queue.SimpleQueue()
        self._stop_reader = Waker()
        reader_args = (helper, self._answers, self._stop_reader.fileno())
        self._reader = None
        reader = threading.Thread(target=self._read_messages, args=reader_args, name="elasticd-nvml", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:  # the job has used up its processes
            self._stop_reader.close()
            self.close()
            raise OSError(errno.EAGAIN, str(error)) from None
        self._reader = reader
        for request in self._at_start:
            helper.send(request, time.monotonic() + CLOSE_S)
        return helper

    def send(self, message: Mapping[str, Any]) -> None:
        """A request without an answer, if there is a process."""
        if self._helper is not None:
            with suppress(HelperError):
                self._helper.send(message, time.monotonic() + CLOSE_S)

    def request(self, message: Mapping[str, Any], within_s: float) -> Message:
        """The answer, or {"trouble": why there is none}."""
        if self._unkillable is not None and self._unkillable.alive():
            pid = self._unkillable.pid
            return {"trouble": f"NVML does not answer; process {pid} hangs in the driver (state {procfs.state(pid)})"}
        self._unkillable = None
        deadline = time.monotonic() + within_s
        trouble = "the NVML process ended by itself: a crash in the driver's library?"
        try:
            helper = self._helper or self.start()
            helper.send(message, deadline)
            answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if answer is not None:
                return answer
        except (queue.Empty, HelperTimeout):
            trouble = f"NVML did not answer within {within_s:.3g} s"
        except HelperError:
            pass
        except OSError as error:
            trouble = f"the NVML process cannot be started: {error.strerror or error}"
        self.close()
        return {"trouble": trouble}

    def cancel_request(self) -> None:
        """End a request that waits; it has no answer then."""
        self._answers.put(None)

    def close(self) -> None:
        """End the process. Bounded: one that hangs in the driver is left behind."""
        helper, self._helper = self._helper, None
        if helper is None:
            return
        helper.kill()
        if self._stop_reader is not None and self._reader is not None:
            self._stop_reader.wake()
            self._reader.join(CLOSE_S)
            self._stop_reader.close()
        if helper.close():
            self._unkillable = helper

    def _read_messages(self, helper: HelperProcess, answers: queue.SimpleQueue[Message | None], stop_fd: int) -> None:
        with suppress(HelperError):
            while True:
                message = helper.receive(math.inf, cancel=stop_fd)
                if "event" in message:
                    self._on_event(message["event"])
                else:
                    answers.put(message)
        answers.put(None)
