"""What NCCL jobs need of this machine; and one with a GPU whose libraries are stubs that log their calls (fakes/)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.system.gpus.devices import visible_gpus
from elasticd_agent.workers.launcher import template

FAKES = Path(__file__).parent / "fakes"
LIBRARIES = {"libcuda.c": "libcuda.so.1", "libnvml.c": "libnvidia-ml.so.1"}
CHECK = "import torch; raise SystemExit(not (torch.cuda.is_available() and torch.distributed.is_nccl_available()))"
LOOK = """
import ctypes, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import template
template.DEVICE_FILES = (os.environ["FAKE_CUDA_DEVICE"],)
one = template.Template.__new__(template.Template)
one.nvml_users = {}
one.hidden = type("Hidden", (), {"get_loaded": lambda self, name: name == "pynvml" or None})()
exec(sys.argv[2])
print(one.why_unfit())
pid = os.fork()
if not pid:
    print("in the worker:", template.find_open_device() is not None)
    one.restore_nvml()
    print("after that:", template.find_open_device() is not None, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
LIMIT_S = 300
"""On a machine that does much else an import of the CUDA build takes minutes."""
NVML = "nvml = ctypes.CDLL('libnvidia-ml.so.1'); nvml.nvmlInit_v2(); nvml.nvmlInit_v2()"


def missing(environ: Mapping[str, str]) -> str:
    """One sentence; "" if jobs can use NCCL on a GPU here."""
    if not visible_gpus(environ):
        return "no CUDA device: this needs one that CUDA_VISIBLE_DEVICES does not hide, and torch's CUDA build"
    if subprocess.run([sys.executable, "-c", CHECK], timeout=LIMIT_S, capture_output=True).returncode:
        return "there is a GPU, but this torch cannot use CUDA and NCCL: this needs its CUDA build and a driver"
    return ""


def make_gpu_machine(directory: Path) -> dict[str, str]:
    """The environment of a machine whose CUDA libraries are the stubs, compiled into `directory`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    for source, library in LIBRARIES.items():
        subprocess.run([compiler, "-shared", "-fPIC", "-o", directory / library, FAKES / source], check=True)
    (directory / "device").touch()
    (directory / "log").touch()
    return os.environ | {
        "LD_LIBRARY_PATH": str(directory),
        "FAKE_CUDA_LOG": str(directory / "log"),
        "FAKE_CUDA_DEVICE": str(directory / "device"),
    }


def calls(machine: dict[str, str]) -> list[str]:
    """Of the libraries so far."""
    return Path(machine["FAKE_CUDA_LOG"]).read_text().split()


def look(machine: dict[str, str], before: str, python: str = sys.executable) -> list[str]:
    """Run `before` in a template's process; its verdict, and whether a worker has a device open, at first and later."""
    command = [python, "-c", "import sys; exec(sys.stdin.read())", template.__file__, before]
    pipes: dict[str, Any] = {"input": LOOK, "capture_output": True, "text": True}
    done = subprocess.run(command, env=machine, timeout=LIMIT_S, check=False, **pipes)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


if __name__ == "__main__":
    raise SystemExit(missing(os.environ))
