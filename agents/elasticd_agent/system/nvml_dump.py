"""What NVML says of this machine's GPUs, as one JSON object on standard output.

It runs as a process of its own, `python -I -S nvml_dump.py DIRECTORY` with the directory that holds pynvml: a driver
that
hangs may never let go of who asks it. A fact that this GPU or driver does not know is left out; NVML is only asked.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

KMSG_LIMIT = 4 << 20
"""The kernel's own buffer is smaller, nearly always."""
LOST = (15, 16)
"""nvml.h: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED. Some drivers hand out the handle all the same."""
MISSING: dict[str, Any] = {"gpus": [], "trouble": "pynvml is not installed: pip install nvidia-ml-py"}
_XID = re.compile(rb"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(([^)]*)\): (\d+),? ?(.*)", re.MULTILINE)


def gpus(nvml: Any) -> dict[str, Any]:
    """Facts by GPU, under "gpus". `nvml` is the module pynvml, or another one with its functions."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"gpus": [], "trouble": f"NVML: {error}"}
    try:
        seen = xids()
        return {
            "driver": _asked(nvml, nvml.nvmlSystemGetDriverVersion),
            "gpus": [_gpu(nvml, index, seen) for index in range(nvml.nvmlDeviceGetCount())],
        }
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, seen: dict[str, str]) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"index": index, "error": str(error)}

    lost: list[str] = []

    def ask(function: str, *arguments: object) -> Any:
        try:
            return _asked(nvml, lambda: getattr(nvml, function)(handle, *arguments))
        except nvml.NVMLError as error:
            lost.append(str(error))
            return None

    memory, busy = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    throttled = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    remapped = ask("nvmlDeviceGetRemappedRows") or (None,) * 4
    pci = ask("nvmlDeviceGetPciInfo")
    bus = words(pci.busId) if pci is not None else None
    facts = {
        "index": index,
        "name": ask("nvmlDeviceGetName"),
        "uuid": ask("nvmlDeviceGetUUID"),
        "bus": bus,
        "utilization_percent": busy.gpu if busy is not None else None,
        "memory_used_bytes": memory.used if memory is not None else None,
        "memory_total_bytes": memory.total if memory is not None else None,
        "temperature_c": ask("nvmlDeviceGetTemperature", getattr(nvml, "NVML_TEMPERATURE_GPU", 0)),
        "power_w": _scaled(ask("nvmlDeviceGetPowerUsage"), 1000),
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", getattr(nvml, "NVML_CLOCK_SM", 1)),
        "throttle_reasons": hex(throttled) if throttled is not None else None,
        "ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", 1, 0),
        "corrected": ask("nvmlDeviceGetTotalEccErrors", 0, 0),
        "remap_rows_uncorrected": remapped[1],
        "remap_pending": remapped[2],
        "remap_failed": remapped[3],
        "last_xid": seen.get(short_bus(bus)) if bus is not None else None,
        "pids": [process.pid for process in ask("nvmlDeviceGetComputeRunningProcesses") or ()],
    }
    if lost:
        return {"index": index, "error": lost[0]}
    return {name: words(value) for name, value in facts.items() if value is not None}


def xids(path: str = "/dev/kmsg") -> dict[str, str]:
    """By bus id the last XID in the kernel's log: the driver's word for a GPU's fault. {} if that may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    found: dict[str, str] = {}
    try:
        size = 0
        while size < KMSG_LIMIT:
            record = os.read(fd, 1 << 16)  # of /dev/kmsg one record a read
            if not record:
                break
            size += len(record)
            for one in _XID.finditer(record):
                at_s, bus, number, what = (words(part) for part in one.groups())
                found[short_bus(bus.removeprefix("PCI:"))] = (
                    f"{number} at {int(at_s) / 1e6:.0f} s after boot: {what[:120]}"
                )
    except OSError:  # EAGAIN: that was all; EPIPE: it was overwritten while we read
        pass
    finally:
        os.close(fd)
    return found


def short_bus(bus: str) -> str:
    """ "00000000:3B:00.0" and "0000:3b:00" are the same."""
    return bus.lower().rpartition(".")[0][-10:] if "." in bus else bus.lower()[-10:]


def _asked(nvml: Any, act: Callable[[], Any]) -> Any:
    """None if this GPU, driver or binding does not know it. Raises NVMLError if the GPU is not there any more."""
    try:
        return act()
    except AttributeError:
        return None
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in LOST:
            raise
        return None


def _scaled(value: Any, by: int) -> Any:
    return value / by if value is not None else None


def words(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def main() -> None:
    sys.path += [path for path in sys.argv[1:] if path]
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        found = MISSING
    else:
        found = gpus(pynvml)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
