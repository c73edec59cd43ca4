"""Preloads on a machine with a GPU, whose libraries are stubs that log their calls: what may be forked."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_agent.workers.launcher import requests
from tests.gpu.machine import NVML, calls, look, make_gpu_machine


@pytest.fixture
def gpu_machine(tmp_path: Path) -> dict[str, str]:
    return make_gpu_machine(tmp_path)


def test_nvml_left_open_is_shut_down(gpu_machine: dict[str, str]) -> None:
    assert look(gpu_machine, NVML) == ["None", "in the worker: False", "after that: True"]
    assert calls(gpu_machine) == ["nvmlInit"] * 2 + ["nvmlShutdown"] * 2 + ["nvmlInit"] * 2


@pytest.mark.parametrize("before", ["", NVML + "; "])
def test_cuda_driver_is_not_forked(gpu_machine: dict[str, str], before: str) -> None:
    why, *_ = look(gpu_machine, before + "ctypes.CDLL('libcuda.so.1').cuInit(0)")
    device = gpu_machine["FAKE_CUDA_DEVICE"]
    assert why == f"preloading opened {device}: an accelerator's driver does not survive a fork"


def test_default_preloads_touch_no_driver(gpu_machine: dict[str, str]) -> None:
    """With the CPU build of torch in `make test`; the CUDA build calls NVML only if it is asked for devices."""
    # not every torch has all
    there = [name for name in requests.ALWAYS_PRELOADED if importlib.util.find_spec(name) is not None]
    source = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    command = [sys.executable, "-c", source, *there]
    subprocess.run(command, env=gpu_machine | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, timeout=100, check=True)
    assert calls(gpu_machine) == []
