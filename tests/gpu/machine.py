"""A machine with a GPU whose libraries are stubs that log their calls (fakes/), and what a template makes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_agent.workers.launcher import template

FAKES = Path(__file__).parent / "fakes"
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
    done = subprocess.run(command, env=machine, input=LOOK, capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()
