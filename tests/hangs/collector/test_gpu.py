"""What NVML and the kernel's log say of GPUs, of a small NVML in Python; and a driver that does not answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.hangs.evidence import EvidenceTarget
from elasticd_agent.system.gpus import nvml_process
from tests.hangs.stuck_worker import MakeEvidence, Posted, StartWorker

PROGRAM = Path(nvml_process.__file__)

# A small NVML with one good GPU, one of a kind that knows little, and one that has fallen off the bus.
NVML = """
import time
NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
class NVMLError(Exception): pass
class Thing:
    def __init__(self, **facts): self.__dict__.update(facts)
def nvmlInit(): {init}
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "580.1"
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index):
    if index == 2:
        raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetName(gpu): return b"H200"
def nvmlDeviceGetPciInfo(gpu): return Thing(busId=b"00000000:3B:00.0")
def nvmlDeviceGetUtilizationRates(gpu): return Thing(gpu=100, memory=3)
def nvmlDeviceGetMemoryInfo(gpu): return Thing(used=5, total=7)
def nvmlDeviceGetTotalEccErrors(gpu, kind, counter):
    if gpu == 1:
        raise NVMLError("Not Supported")
    return 4 if kind == 1 else 1
def nvmlDeviceGetRemappedRows(gpu): return 0, 2, True, False
def nvmlDeviceGetCurrentClocksThrottleReasons(gpu): return 4
def nvmlDeviceGetComputeRunningProcesses(gpu): return [Thing(pid=42)]
"""


def gpus(directory: Path | str) -> dict[str, Any]:
    """The answer of the NVML process with the pynvml of `directory`."""
    command = [sys.executable, "-I", "-S", str(PROGRAM), str(directory)]
    ran = subprocess.run(command, input=b'{"do": "gpus"}\n', capture_output=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def asked(directory: Path, init: str) -> dict[str, Any]:
    (directory / "pynvml.py").write_text(NVML.replace("{init}", init))
    return gpus(directory)


def test_gpu_facts(tmp_path: Path) -> None:
    found = asked(tmp_path, "pass")
    first, second, third = found["gpus"]
    assert found["driver"] == "580.1"
    assert (first["name"], first["bus"], first["utilization_percent"]) == ("H200", "00000000:3B:00.0", 100)
    assert (first["memory_used_bytes"], first["ecc_uncorrected"], first["corrected"]) == (5, 4, 1)
    assert (first["remap_rows_uncorrected"], first["remap_pending"], first["remap_failed"]) == (2, True, False)
    assert (first["throttle_reasons"], first["pids"]) == ("0x4", [42])
    assert "temperature_c" not in first
    assert "ecc_uncorrected" not in second
    assert third == {"index": 2, "error": "GPU is lost"}


def test_lost_gpu_reports_only_that(tmp_path: Path) -> None:
    lost = "    if gpu == 0: raise Lost('GPU is lost')\n    return b'H200'\nclass Lost(NVMLError): value = 15"
    (tmp_path / "pynvml.py").write_text(
        NVML.replace("{init}", "pass").replace(
            'nvmlDeviceGetName(gpu): return b"H200"', f"nvmlDeviceGetName(gpu):\n{lost}"
        )
    )
    found = gpus(tmp_path)["gpus"]
    assert (found[0], found[1]["name"]) == ({"index": 0, "error": "GPU is lost"}, "H200")


def test_driver_failure_in_words(tmp_path: Path) -> None:
    assert asked(tmp_path, "raise NVMLError('Driver Not Loaded')") == {"gpus": [], "trouble": "NVML: Driver Not Loaded"}


def test_missing_pynvml_names_package() -> None:
    assert "nvidia-ml-py" in gpus("")["trouble"]


def test_last_xid_from_kernel_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,900000,-;usb 1-1: new device\n"
        "4,2,1000000,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1, Graphics Exception\n"
        "4,3,2500000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
        "4,4,3000000,c;NVRM: Xid (PCI:0000:af:00): 63, Row Remapper\n"
    )
    found = nvml_process.read_last_xids(str(log))
    assert found == {
        "0000:3b:00": "79 at 2 s after boot: GPU has fallen off the bus.",
        "0000:af:00": "63 at 3 s after boot: Row Remapper",
    }
    assert nvml_process.read_last_xids(str(tmp_path / "none")) == {}


@pytest.mark.parametrize("bus", ["00000000:3B:00.0", "0000:3b:00"])
def test_bus_id_spellings(bus: str) -> None:
    assert nvml_process.short_bus_id(bus) == "0000:3b:00"


@pytest.mark.parametrize(
    ("init", "budget_s", "said"), [("pass", 20.0, "H200"), ("time.sleep(1e6)", 8.0, "driver did not answer")]
)
def test_gpus_are_read_in_parallel_to_ranks(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path, init: str, budget_s: float, said: str
) -> None:
    """A driver that does not answer costs time, and nothing else."""
    (tmp_path / "pynvml.py").write_text(NVML.replace("{init}", init))
    evidence = takes(budget_s, nvml=str(tmp_path))
    pid = worker("import time; print('ready', flush=True); time.sleep(1e6)")
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], tmp_path / "log", "")
    found = posted.get(timeout=30)
    assert (found.trouble, found.ranks[0].source) == ("", "py-spy")
    assert found.took_s < 20
    assert said in (tmp_path / "log" / "evidence-a.json").read_text()
