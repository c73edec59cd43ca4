"""Is imported by itself, which never ends."""

from __future__ import annotations

import importlib
import time

import faults

if __name__ == "__main__":
    importlib.import_module("importing")
else:
    faults.write("importing", "yes")
    time.sleep(3600)
