"""NVML as a test has it: $FAKE_NVML/gpus.json says which processes hold memory on which GPU, or what is broken.

{"gpus": [[pid, …], null, …], "broken": "" | "init" | "hangs" | "dies"}: null is a GPU that has fallen off the bus.
Every look at a GPU is a line in $FAKE_NVML/looks.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(os.environ["FAKE_NVML"])


class NVMLError(Exception):
    pass


@dataclass
class Process:
    pid: int
    usedGpuMemory: int  # noqa: N815  as NVML calls it


def _told() -> dict[str, Any]:
    told: dict[str, Any] = json.loads((HERE / "gpus.json").read_text())
    return told


def nvmlInit() -> None:  # noqa: N802
    if _told()["broken"] == "init":
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_told()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetComputeRunningProcesses(gpu: int) -> list[Process]:  # noqa: N802
    told = _told()
    if told["broken"] == "hangs":
        time.sleep(3600)
    if told["broken"] == "dies":
        os._exit(1)
    with open(HERE / "looks", "a") as looks:
        looks.write(f"{gpu}\n")
    if told["gpus"][gpu] is None:
        raise NVMLError("GPU is lost")
    return [Process(pid, 1 << 30) for pid in told["gpus"][gpu]]
