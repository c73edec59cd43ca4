"""NVML as a test has it: $FAKE_NVML/gpus.json says which processes hold memory on which GPU, or what is broken.

{"gpus": [[pid, …], null, …], "broken": "" | "init" | "hangs" | "dies"}: null is a GPU that has fallen off the bus.
"used", if given, are MB in use by GPU beside those of its processes.
"facts", if there are any, are by GPU: {"0": {"ecc": 2, "remapped": [0, 0, true, false], "throttle": 64}}. An event is a
line "GPU TYPE DATA" appended to $FAKE_NVML/events. Every look at a GPU is a line in $FAKE_NVML/looks.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(os.environ["FAKE_NVML"])


NVML_ERROR_TIMEOUT = 10
MAX_WAIT_S = 0.05
"""Who waits for an event must bear that none has come."""
nvmlEventTypeDoubleBitEccError = 0x2  # noqa: N816  as NVML calls it
nvmlEventTypeXidCriticalError = 0x8  # noqa: N816


class NVMLError(Exception):
    def __init__(self, text: str, value: int = 999) -> None:
        super().__init__(text)
        self.value = value


@dataclass
class PciInfo:
    busId: bytes  # noqa: N815


@dataclass
class Event:
    device: int
    eventType: int  # noqa: N815
    eventData: int  # noqa: N815


@dataclass
class Process:
    pid: int
    usedGpuMemory: int  # noqa: N815  as NVML calls it


@dataclass
class Memory:
    used: int
    total: int = 80 << 30


def nvmlDeviceGetMemoryInfo(gpu: int) -> Memory:  # noqa: N802
    told = _told()
    used = told.get("used") or [0] * len(told["gpus"])
    return Memory((used[gpu] << 20) + (len(told["gpus"][gpu] or ()) << 30))


def _told() -> dict[str, Any]:
    told: dict[str, Any] = json.loads((HERE / "gpus.json").read_text())
    return told


def nvmlInit() -> None:  # noqa: N802
    if _told()["broken"] == "init":
        raise NVMLError("Driver Not Loaded")


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return "580.1"


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_told()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def _facts(gpu: int) -> dict[str, Any]:
    told = _told()
    if told["gpus"][gpu] is None:
        raise NVMLError("GPU is lost", 15)
    facts: dict[str, Any] = told.get("facts", {}).get(str(gpu), {})
    return facts


def nvmlDeviceGetIndex(gpu: int) -> int:  # noqa: N802
    _facts(gpu)
    return gpu


def nvmlDeviceGetUUID(gpu: int) -> bytes:  # noqa: N802
    _facts(gpu)
    return f"GPU-{gpu:04d}".encode()


def nvmlDeviceGetName(gpu: int) -> str:  # noqa: N802
    return str(_facts(gpu).get("name", "Fake 100"))


def nvmlDeviceGetPciInfo(gpu: int) -> PciInfo:  # noqa: N802
    return PciInfo(f"00000000:{gpu:02X}:00.0".encode())


def nvmlDeviceGetTotalEccErrors(gpu: int, kind: int, counter: int) -> int:  # noqa: N802
    return int(_facts(gpu).get("ecc", 0)) if kind == 1 else 0


def nvmlDeviceGetRemappedRows(gpu: int) -> list[int]:  # noqa: N802
    return list(_facts(gpu).get("remapped", [0, 0, 0, 0]))


def nvmlDeviceGetCurrentClocksThrottleReasons(gpu: int) -> int:  # noqa: N802
    return int(_facts(gpu).get("throttle", 0))


def nvmlDeviceGetNvLinkState(gpu: int, link: int) -> int:  # noqa: N802
    links = _facts(gpu).get("links", "")
    if link >= len(links):
        raise NVMLError("Not Supported", 3)
    return int(links[link])


class c_nvmlGpuFabricInfo_t:  # noqa: N801
    state = status = 0


def nvmlDeviceGetGpuFabricInfo(gpu: int, info: c_nvmlGpuFabricInfo_t) -> None:  # noqa: N802
    info.state, info.status = _facts(gpu).get("fabric", (0, 0))


def nvmlDeviceGetPersistenceMode(gpu: int) -> int:  # noqa: N802
    return int(_facts(gpu).get("persistence", 1))


def nvmlDeviceGetMigMode(gpu: int) -> list[int]:  # noqa: N802
    return [int(_facts(gpu).get("mig", 0))] * 2


def nvmlDeviceGetTemperature(gpu: int, sensor: int) -> int:  # noqa: N802
    return 60


def nvmlDeviceGetSupportedEventTypes(gpu: int) -> int:  # noqa: N802
    _facts(gpu)
    return nvmlEventTypeDoubleBitEccError | nvmlEventTypeXidCriticalError


def nvmlEventSetCreate() -> list[int]:  # noqa: N802
    """How many events there have been."""
    return [len(_events())]


def nvmlDeviceRegisterEvents(gpu: int, types: int, events: list[int]) -> None:  # noqa: N802
    with open(HERE / "registered", "a") as registered:
        registered.write(f"{gpu}\n")


def nvmlEventSetWait(events: list[int], timeout_ms: int) -> Event:  # noqa: N802
    until = time.monotonic() + min(timeout_ms / 1000, MAX_WAIT_S)
    while time.monotonic() < until:
        if len(_events()) > events[0]:
            gpu, kind, data = map(int, _events()[events[0]].split())
            events[0] += 1
            return Event(gpu, kind, data)
        time.sleep(0.01)
    raise NVMLError("Timeout", NVML_ERROR_TIMEOUT)


def nvmlEventSetFree(events: list[int]) -> None:  # noqa: N802
    pass


def _events() -> list[str]:
    path = HERE / "events"
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


def nvmlDeviceGetComputeRunningProcesses(gpu: int) -> list[Process]:  # noqa: N802
    told = _told()
    if told["broken"] == "hangs":
        (HERE / "asked").touch()
        time.sleep(3600)
    if told["broken"] == "dies":
        os._exit(1)
    with open(HERE / "looks", "a") as looks:
        looks.write(f"{gpu}\n")
    if told["gpus"][gpu] is None:
        raise NVMLError("GPU is lost")
    return [Process(pid, 1 << 30) for pid in told["gpus"][gpu]]
