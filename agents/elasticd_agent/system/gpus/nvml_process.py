"""The process that calls NVML: `python -I -S nvml_process.py DIRECTORY`, with the directory that has pynvml.

A call into a broken driver may never return, so no other process of ours makes one. One JSON object a line: requests on
standard input, answers on standard output, and, once asked for, events between them. It runs without our packages, and
ends with its standard input or with the thread that started it.

    {"do": "gpus"}                                 -> {"gpus": [{fact: value, ...}, ...], "driver": ..., "trouble": ...}
    {"do": "initialize", "gpus": [...]}            without an answer: the GPUs of the job, before it has run
    {"do": "sample", "pids": [...]}                without an answer: what these processes hold now
    {"do": "holders", "pids": [[pid, GPU], ...]}   -> {"holders": [[pid, GPU index], ...], "busy": [GPU, ...]}: the GPUs
                                                      with memory that these ended processes hold or have held
    {"do": "buses", "gpus": [...]}                 -> {"buses": [bus id, ...]}: where they are; "" for one of no known
                                                      place, and none at all where one is unknown by its name
    {"do": "events", "gpus": [...]}                -> {"event": {...}} for every critical XID and double-bit ECC error

A GPU of a job is what CUDA_VISIBLE_DEVICES calls it; no "gpus": all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_KMSG_BYTES = 4 << 20
"""The kernel's own buffer is nearly always smaller."""
GPU_LOST_ERRORS = (15, 16)
"""nvml.h: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED. Some drivers still return a handle then."""
Message = dict[str, Any]
"""A request, an answer or an event."""
PYNVML_MISSING: Message = {"gpus": [], "trouble": "pynvml is not installed: pip install nvidia-ml-py"}
MAX_NVLINKS = 18
"""An H100 or B200 has so many; NVML names more than any GPU has."""
MEMORY_SETTLED_S = 1.0
"""Memory in use that has not shrunk for so long is not being given back."""
SLACK_BYTES = 256 << 20
"""The driver itself may use so much more than before: a context that another client keeps, page retirement."""
EVENT_WAIT_MS = 10_000
"""An event ends the wait at once."""
EVENT_RETRY_S = 5.0
"""After NVML refused to deliver events: the driver is being replaced, or a GPU is being reset."""
_XID_RECORD = re.compile(rb"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(([^)]*)\): (\d+),? ?(.*)", re.MULTILINE)


# ---- facts


def query_gpus(nvml: Any) -> Message:
    """Facts by GPU, under "gpus"; a fact that this GPU or driver does not know is left out."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"gpus": [], "trouble": f"NVML: {error}"}
    try:
        last_xids = read_last_xids()
        return {
            "driver": _query_if_known(nvml, nvml.nvmlSystemGetDriverVersion),
            "gpus": [_query_gpu(nvml, index, last_xids) for index in range(nvml.nvmlDeviceGetCount())],
        }
    finally:
        nvml.nvmlShutdown()


def _query_gpu(nvml: Any, index: int, last_xids: dict[str, str]) -> Message:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"index": index, "error": str(error)}

    lost: list[str] = []

    def query(function: str, *arguments: object) -> Any:
        try:
            return _query_if_known(nvml, lambda: getattr(nvml, function)(handle, *arguments))
        except nvml.NVMLError as error:
            lost.append(str(error))
            return None

    memory, busy = query("nvmlDeviceGetMemoryInfo"), query("nvmlDeviceGetUtilizationRates")
    throttled = query("nvmlDeviceGetCurrentClocksThrottleReasons")
    remapped = query("nvmlDeviceGetRemappedRows") or (None,) * 4
    pci = query("nvmlDeviceGetPciInfo")
    bus = decode_if_bytes(pci.busId) if pci is not None else None
    facts = {
        "index": index,
        "name": query("nvmlDeviceGetName"),
        "uuid": query("nvmlDeviceGetUUID"),
        "bus": bus,
        "utilization_percent": busy.gpu if busy is not None else None,
        "memory_used_bytes": memory.used if memory is not None else None,
        "memory_total_bytes": memory.total if memory is not None else None,
        "temperature_c": query("nvmlDeviceGetTemperature", getattr(nvml, "NVML_TEMPERATURE_GPU", 0)),
        "power_w": _divide_if_known(query("nvmlDeviceGetPowerUsage"), 1000),
        "sm_clock_mhz": query("nvmlDeviceGetClockInfo", getattr(nvml, "NVML_CLOCK_SM", 1)),
        "throttle_reasons": hex(throttled) if throttled is not None else None,
        "ecc_uncorrected": query("nvmlDeviceGetTotalEccErrors", 1, 0),
        "corrected": query("nvmlDeviceGetTotalEccErrors", 0, 0),
        "remap_rows_uncorrected": remapped[1],
        "remap_pending": remapped[2],
        "remap_failed": remapped[3],
        "nvlinks_active": _active_nvlinks(query),
        "fabric": query_fabric(nvml, handle),
        "persistence": query("nvmlDeviceGetPersistenceMode"),
        "mig": (query("nvmlDeviceGetMigMode") or [None])[0],
        "last_xid": last_xids.get(short_bus_id(bus)) if bus is not None else None,
        "pids": [process.pid for process in query("nvmlDeviceGetComputeRunningProcesses") or ()],
    }
    if lost:
        return {"index": index, "error": lost[0]}
    return {name: decode_if_bytes(value) for name, value in facts.items() if value is not None}


def _active_nvlinks(query: Callable[..., Any]) -> int | None:
    """Active NVLinks; None on a GPU without NVLink."""
    states = [query("nvmlDeviceGetNvLinkState", link) for link in range(MAX_NVLINKS)]
    known = [state for state in states if state is not None]
    return sum(known) if known else None


def query_fabric(nvml: Any, handle: Any) -> list[int] | None:
    """[state, status] of the registration with the fabric manager (nvmlGpuFabricInfo_t); None where there is none."""

    def ask() -> list[int]:
        info = nvml.c_nvmlGpuFabricInfo_t()
        nvml.nvmlDeviceGetGpuFabricInfo(handle, info)
        return [int(info.state), int(info.status)]

    state: list[int] | None = None
    with contextlib.suppress(nvml.NVMLError):  # it is lost, which the other facts say
        state = _query_if_known(nvml, ask)
    return state


def read_last_xids(path: str = "/dev/kmsg") -> dict[str, str]:
    """The last XID in the kernel's log, the driver's report of a GPU fault, by bus id; {} if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    last_xids: dict[str, str] = {}
    try:
        size = 0
        while size < MAX_KMSG_BYTES:
            record = os.read(fd, 1 << 16)  # /dev/kmsg returns one record a read
            if not record:
                break
            size += len(record)
            for match in _XID_RECORD.finditer(record):
                at_us, bus, number, what = (decode_if_bytes(part) for part in match.groups())
                last_xids[short_bus_id(bus.removeprefix("PCI:"))] = (
                    f"{number} at {int(at_us) / 1e6:.0f} s after boot: {what[:120]}"
                )
    except OSError:  # EAGAIN: that was all; EPIPE: it was overwritten meanwhile
        pass
    finally:
        os.close(fd)
    return last_xids


def short_bus_id(bus: str) -> str:
    """ "00000000:3B:00.0" and "0000:3b:00" are the same."""
    return bus.lower().rpartition(".")[0][-10:] if "." in bus else bus.lower()[-10:]


def decode_if_bytes(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _query_if_known(nvml: Any, act: Callable[[], Any]) -> Any:
    """None if this GPU, driver or binding does not know it. Raises NVMLError if the GPU is lost."""
    try:
        return act()
    except AttributeError:
        return None
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in GPU_LOST_ERRORS:
            raise
        return None


def _divide_if_known(value: Any, by: int) -> Any:
    return value / by if value is not None else None


# ---- memory


class GpuMemoryTracker:
    """One GPU of the job, and what its processes held when they were last seen alive."""

    def __init__(self, nvml: Any, name: str, index: int, handle: Any) -> None:
        self.name, self.index, self.handle = name, index, handle
        self._nvml = nvml
        self._idle = self._unlisted_bytes(self._processes())
        """The driver's own, and that of processes that NVML does not list, before the job has run."""
        self.held: dict[int, int] = {}
        self._beside = math.inf
        """Bytes that no listed process explained while the job's processes held theirs."""
        self._least = (math.inf, 0.0)

    def sample(self, pids: Collection[int]) -> None:
        processes = self._processes()
        used = {process.pid: process.usedGpuMemory or 0 for process in processes if process.pid in pids}
        if used and used.keys().isdisjoint(self.held):
            self.held, self._beside = {}, math.inf
        if used:
            self.held |= used
            self._beside = min(self._beside, self._unlisted_bytes(processes))  # some may be ending already

    def holders(self, pids: Collection[int], now: float) -> tuple[list[int], bool]:
        """Those of `pids` that hold memory, and whether to wait: they do, or what they held is not given back."""
        processes = self._processes()
        listed = [process.pid for process in processes if process.pid in pids]
        owed = sum(used for pid, used in self.held.items() if pid in pids)
        used = self._unlisted_bytes(processes)
        if used < self._least[0] or listed:
            self._least = used, now
        left = used - (self._beside if owed else self._idle)
        shrinks = now < self._least[1] + MEMORY_SETTLED_S
        return listed, bool(listed) or (left > SLACK_BYTES and (left <= owed + SLACK_BYTES or shrinks))

    def begin_wait(self, now: float) -> None:
        self._least = math.inf, now

    def _processes(self) -> list[Any]:
        """Empty for a GPU that cannot be queried, because it fell off the bus."""
        try:
            return list(self._nvml.nvmlDeviceGetComputeRunningProcesses(self.handle))
        except self._nvml.NVMLError:
            return []

    def _unlisted_bytes(self, processes: list[Any]) -> float:
        """Bytes in use that no process is listed with; 0 if unknown."""
        try:
            used = self._nvml.nvmlDeviceGetMemoryInfo(self.handle).used
        except (self._nvml.NVMLError, AttributeError):
            return 0.0
        return float(max(0, used - sum(process.usedGpuMemory or 0 for process in processes)))


class MemoryHolderObserver:
    """Which processes hold GPU memory. NVML stays initialised: initialising takes seconds where no client does that."""

    def __init__(self, nvml: Any, names: Collection[str]) -> None:
        nvml.nvmlInit()
        by_name = handles_by_name(nvml, names)
        self._names = sorted(names) or [""]
        self._known = by_name is not None
        self._pids: Mapping[int, str] = {}
        if by_name is None:
            by_name = handles_by_index(nvml)
        self._gpus = [GpuMemoryTracker(nvml, name, index, handle) for name, (index, handle) in by_name.items()]

    def sample(self, pids: Collection[int]) -> None:
        for gpu in self._gpus:
            gpu.sample(pids)

    def look(self, pids: Mapping[int, str]) -> tuple[list[tuple[int, int]], list[str]]:
        """(pid, GPU index) of those of the ended processes `pids` that hold memory, and the GPUs that are not free.

        `pids` has the GPU of each; where all were seen on some, the others are not looked at. All are busy while one
        is, where GPUs are unknown by name, or a process used another one than its own.
        """
        now = time.monotonic()
        if pids != self._pids:
            self._pids = pids
            for gpu in self._gpus:
                gpu.begin_wait(now)
        seen = {pid for gpu in self._gpus for pid in gpu.held}
        theirs = [gpu for gpu in self._gpus if gpu.held.keys() & pids.keys() or not pids.keys() <= seen]
        holders, busy = [], []
        for gpu in theirs:
            listed, waits = gpu.holders(pids, now)
            holders += [(pid, gpu.index) for pid in listed]
            busy += [gpu.name] if waits else []
        own = self._known and all(pids.get(pid, gpu.name) == gpu.name for gpu in self._gpus for pid in gpu.held)
        return holders, busy if own or not busy else self._names


def handles_by_index(nvml: Any) -> dict[str, tuple[int, Any]]:
    """Index and handle of each GPU by its index as a string. A lost GPU is left out."""
    by_index = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            by_index[str(index)] = index, nvml.nvmlDeviceGetHandleByIndex(index)
    return by_index


def handles_by_name(nvml: Any, names: Collection[str]) -> dict[str, tuple[int, Any]] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names so, by these names; None if one is unknown, or there are no names.

    CUDA numbers the fastest model first, NVML goes by the bus: numbers are unknown where there are several models.
    """
    by_index = handles_by_index(nvml)
    by_uuid, models = {}, set()
    for index, handle in by_index.values():
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            models.add(nvml.nvmlDeviceGetName(handle))
            by_uuid[decode_if_bytes(nvml.nvmlDeviceGetUUID(handle))] = index, handle
    if len(models) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        by_index = {}
    by_name = {}
    for name in names:
        given = by_index.get(name) or next((by_uuid[uuid] for uuid in by_uuid if uuid.startswith(name)), None)
        if given is None and name.startswith("MIG-"):
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                given = -1, nvml.nvmlDeviceGetHandleByUUID(name)
        if given is None:
            return None
        by_name[name] = given
    return by_name or None


def bus_ids(nvml: Any, names: Collection[str]) -> list[str]:
    nvml.nvmlInit()

    def bus_id(handle: Any) -> str:
        pci = _query_if_known(nvml, lambda: nvml.nvmlDeviceGetPciInfo(handle))
        return "" if pci is None else str(decode_if_bytes(pci.busId))

    def whole(handle: Any) -> Any:  # the GPU of which it is a part (MIG)
        return _query_if_known(nvml, lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))

    by_name = handles_by_name(nvml, names)
    return [] if by_name is None else [bus_id(by_name[name][1]) or bus_id(whole(by_name[name][1])) for name in names]


# ---- events


class EventThread:
    """Reports critical XIDs and double-bit ECC errors of these GPUs for as long as the process lives."""

    def __init__(self, nvml: Any, names: Collection[str], send: Callable[[Message], None]) -> None:
        self._nvml, self._names, self._send = nvml, names, send
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._wait_for_events()
            except (self._nvml.NVMLError, AttributeError):  # no events in this driver or binding, or a GPU is lost
                pass
            time.sleep(EVENT_RETRY_S)

    def _wait_for_events(self) -> None:
        nvml = self._nvml
        nvml.nvmlInit()
        try:
            events = nvml.nvmlEventSetCreate()
            try:
                registered = self._register(events)
                while registered:
                    try:
                        self._report(nvml.nvmlEventSetWait(events, EVENT_WAIT_MS))
                    except nvml.NVMLError as error:
                        if error.value != nvml.NVML_ERROR_TIMEOUT:
                            raise
            finally:
                nvml.nvmlEventSetFree(events)
        finally:
            nvml.nvmlShutdown()

    def _register(self, events: Any) -> int:
        nvml, registered = self._nvml, 0
        types = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        for _, handle in (handles_by_name(nvml, self._names) or handles_by_index(nvml)).values():
            try:
                nvml.nvmlDeviceRegisterEvents(handle, types & nvml.nvmlDeviceGetSupportedEventTypes(handle), events)
                registered += 1
            except nvml.NVMLError:
                continue  # a lost GPU is found by "gpus"; one without events is too old
        return registered

    def _report(self, data: Any) -> None:
        event: Message = {"type": int(data.eventType), "data": int(data.eventData)}
        try:
            event["index"] = self._nvml.nvmlDeviceGetIndex(data.device)
            event["uuid"] = decode_if_bytes(self._nvml.nvmlDeviceGetUUID(data.device))
        except self._nvml.NVMLError:
            pass  # it has fallen off the bus
        self._send({"event": event})


# ---- the process


class Server:
    """Answers requests one at a time."""

    def __init__(self, nvml: Any, send: Callable[[Message], None]) -> None:
        self._nvml, self._send = nvml, send
        self._memory: MemoryHolderObserver | None = None
        self._names: Collection[str] = ()

    def handle(self, request: Message) -> None:
        try:
            answer = PYNVML_MISSING if self._nvml is None else self._answer(request)
        except self._nvml.NVMLError as error:
            answer = {"gpus": [], "trouble": f"NVML: {error}"}
        if request["do"] in ("gpus", "holders", "buses"):
            self._send(answer)

    def _answer(self, request: Message) -> Message:
        match request["do"]:
            case "gpus":
                return query_gpus(self._nvml)
            case "buses":
                return {"buses": bus_ids(self._nvml, request["gpus"])}
            case "events":
                EventThread(self._nvml, request["gpus"], self._send)
            case "initialize":
                self._names = request["gpus"]
                self._memory = MemoryHolderObserver(self._nvml, self._names)
            case "sample" if self._memory is not None:
                self._memory.sample(request["pids"])
            case "holders":
                self._memory = self._memory or MemoryHolderObserver(self._nvml, self._names)
                holders, busy = self._memory.look(dict(request["pids"]))
                return {"holders": holders, "busy": busy}
        return {}


def main() -> None:
    # The process that started us may be killed while a call hangs, and nobody would read the end of our input.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.path += [path for path in sys.argv[1:] if path]
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        pynvml = None
    lock = threading.Lock()

    def send(message: Message) -> None:
        with lock:
            os.write(1, json.dumps(message).encode() + b"\n")

    server = Server(pynvml, send)
    for line in sys.stdin.buffer:
        server.handle(json.loads(line))
    os._exit(0)  # the event thread may wait in the driver for seconds


if __name__ == "__main__":
    main()
