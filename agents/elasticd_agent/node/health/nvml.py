"""Asks NVML through a process that can be given up, and hears from it what happens to a GPU between two questions.

A call into a broken driver may never return, so nobody in the daemon makes one. The process is started at the first
question and anew after it did not answer; one that does not die of SIGKILL is never followed by another while it lives.
It judges nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elasticd_agent.system import nvml_dump as gpu
from elasticd_agent.system import procfs

PR_SET_PDEATHSIG = 1
WAITS_MS = 10_000
"""An event ends the wait at once; this is only how often the process looks up."""
AGAIN_S = 5.0
"""After the events could not be had: the driver is being replaced, or a GPU reset."""
CLOSE_S = 2.0


class Nvml:
    """`look` and `close` belong to one thread; `heard` is called by another one, with an event as it came."""

    def __init__(self, heard: Callable[[Mapping[str, Any]], None], within_s: float) -> None:
        self._heard, self._within_s = heard, within_s
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stuck: subprocess.Popen[bytes] | None = None

    def look(self) -> dict[str, Any]:
        """What gpu.gpus() says, or {"trouble": why not}."""
        if self._stuck is not None and self._stuck.poll() is None:
            state = procfs.state(self._stuck.pid)
            return {"trouble": f"NVML does not answer; process {self._stuck.pid} hangs in the driver (state {state})"}
        self._stuck = None
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        until = time.monotonic() + self._within_s
        try:
            process.stdin.write(b"look\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            self.close()
            return {"trouble": f"NVML has not answered within {self._within_s:g} s"}
        except OSError:
            answer = None
        if answer is None:
            self.close()
            return {"trouble": "the process that asks NVML has ended by itself: a crash in the driver's library?"}
        return answer

    def stop(self) -> None:
        """From any thread: a `look` that waits ends now."""
        self._answers.put(None)

    def close(self) -> None:
        """Bounded: what hangs in the driver is left."""
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is None:
            return
        process.kill()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._stuck = process
        if reader is not None:
            reader.join(CLOSE_S)
        assert process.stdin is not None
        try:
            process.stdin.close()
        except OSError:
            pass  # what was not written yet is of no use any more

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))
        process = subprocess.Popen(
            [sys.executable, "-S", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self._answers = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=self._read, args=(process, self._answers), name="health-nvml", daemon=True
        )
        self._reader.start()
        return process

    def _read(self, process: subprocess.Popen[bytes], answers: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                try:
                    said = json.loads(line)
                except ValueError:  # a line that was cut when the process was killed
                    continue
                if "event" in said:
                    self._heard(said["event"])
                else:
                    answers.put(said["look"])
        answers.put(None)


# ---- the process


class NvmlEventListener:
    """Says what happens to the GPUs, from a thread of its own, for as long as the process lives."""

    def __init__(self, nvml: Any, say: Callable[[dict[str, Any]], None]) -> None:
        self._nvml, self._say = nvml, say
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._listen()
            except (self._nvml.NVMLError, AttributeError):  # this driver or binding knows no events, or a GPU is lost
                time.sleep(AGAIN_S)

    def _listen(self) -> None:
        nvml = self._nvml
        nvml.nvmlInit()
        try:
            events = nvml.nvmlEventSetCreate()
            try:
                if not self._register(events):
                    time.sleep(AGAIN_S)
                    return
                while True:
                    try:
                        self._tell(nvml.nvmlEventSetWait(events, WAITS_MS))
                    except nvml.NVMLError as error:
                        if error.value != nvml.NVML_ERROR_TIMEOUT:
                            raise
            finally:
                nvml.nvmlEventSetFree(events)
        finally:
            nvml.nvmlShutdown()

    def _register(self, events: Any) -> int:
        nvml, registered = self._nvml, 0
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, wanted & nvml.nvmlDeviceGetSupportedEventTypes(handle), events)
                registered += 1
            except nvml.NVMLError:
                continue  # a lost one says so when it is looked at, one that knows no events is too old
        return registered

    def _tell(self, data: Any) -> None:
        told: dict[str, Any] = {"type": int(data.eventType), "data": int(data.eventData)}
        try:
            told["index"] = self._nvml.nvmlDeviceGetIndex(data.device)
            told["uuid"] = gpu.words(self._nvml.nvmlDeviceGetUUID(data.device))
        except self._nvml.NVMLError:
            pass  # it has fallen off the bus
        self._say({"event": told})


def main() -> None:
    # Ends with the thread that started us also while a call hangs: nobody would read the end of our standard input.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    lock = threading.Lock()

    def say(message: dict[str, Any]) -> None:
        with lock:
            os.write(1, json.dumps(message).encode() + b"\n")

    try:
        import pynvml
    except ImportError:
        pynvml = None
    else:
        NvmlEventListener(pynvml, say)
    while os.read(0, 4096):
        say({"look": _looked(pynvml)})
    os._exit(0)  # the listener may wait in the driver for seconds


def _looked(nvml: Any) -> dict[str, Any]:
    if nvml is None:
        return gpu.MISSING
    try:
        return gpu.gpus(nvml)
    except nvml.NVMLError as error:
        return {"gpus": [], "trouble": f"NVML: {error}"}


if __name__ == "__main__":
    main()
