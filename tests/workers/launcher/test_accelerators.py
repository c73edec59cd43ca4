"""Preloads on a machine with a GPU, whose libraries are stubs that log their calls: what may be forked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_agent.workers.launcher import requests, template

FAKES = Path(__file__).parents[2] / "gpu" / "fakes"
LIBRARIES = {"libcuda.c": "libcuda.so.1", "libnvml.c": "libnvidia-ml.so.1"}
LOOK = """
import ctypes, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import template
template.DEVICE_FILES = (os.environ["FAKE_CUDA_DEVICE"],)
one = template.Template.__new__(template.Template)
one.nvml_users = {}
one.hidden = type("Hidden", (), {"get": lambda self, name: name == "pynvml" or None})()
exec(sys.argv[2])
print(one.unfit())
pid = os.fork()
if not pid:
    print("in the worker:", template.open_device() is not None)
    one.restore_nvml()
    print("after that:", template.open_device() is not None, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
NVML = "nvml = ctypes.CDLL('libnvidia-ml.so.1'); nvml.nvmlInit_v2(); nvml.nvmlInit_v2()"


@pytest.fixture
def gpu_machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose CUDA libraries are the stubs."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    for source, library in LIBRARIES.items():
        subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / library, FAKES / source], check=True)
    (tmp_path / "device").touch()
    (tmp_path / "log").touch()
    return os.environ | {
        "LD_LIBRARY_PATH": str(tmp_path),
        "FAKE_CUDA_LOG": str(tmp_path / "log"),
        "FAKE_CUDA_DEVICE": str(tmp_path / "device"),
    }


def calls(machine: dict[str, str]) -> list[str]:
    return Path(machine["FAKE_CUDA_LOG"]).read_text().split()


def look(machine: dict[str, str], before: str) -> list[str]:
    command = [sys.executable, "-c", "import sys; exec(sys.stdin.read())", template.__file__, before]
    done = subprocess.run(command, env=machine, input=LOOK, capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


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
    source = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    command = [sys.executable, "-c", source, *requests.ALWAYS]
    subprocess.run(command, env=gpu_machine | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, timeout=100, check=True)
    assert calls(gpu_machine) == []
