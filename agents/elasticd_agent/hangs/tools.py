"""Where py-spy is installed."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def find_py_spy() -> str:
    """Where py-spy is: beside this interpreter, as pip puts it, or on the PATH. "" if nowhere."""
    beside = [Path(sys.executable).with_name("py-spy"), Path(sysconfig.get_path("scripts")) / "py-spy"]
    found = next((str(path) for path in beside if os.access(path, os.X_OK)), None)
    return found or shutil.which("py-spy") or ""
