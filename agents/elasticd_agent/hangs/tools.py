"""Where what evidence is taken with is installed: py-spy and NVML's bindings. It starts neither."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
"""One of them is there if NVIDIA's driver is; the last one is WSL's."""


def find_py_spy() -> str:
    """Where py-spy is: beside this interpreter, as pip puts it, or on the PATH. "" if nowhere."""
    beside = [Path(sys.executable).with_name("py-spy"), Path(sysconfig.get_path("scripts")) / "py-spy"]
    found = next((str(path) for path in beside if os.access(path, os.X_OK)), None)
    return found or shutil.which("py-spy") or ""


def find_nvml() -> str | None:
    """The directory that has pynvml, "" if it is not installed; None on a machine without GPUs."""
    if not any(os.path.exists(path) for path in _DRIVER_FILES):
        return None
    spec = importlib.util.find_spec("pynvml")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin is not None else ""
