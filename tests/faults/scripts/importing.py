"""Is imported by itself, which never ends."""

from __future__ import annotations

import importlib
import time

import faults

if __name__ == "__main__":
    importlib.import_module("importing")
else:
    faults.write("importing", "yes")
    while True:
        time.sleep(0.5)  # Python's handler of a signal that comes right before it runs after it
