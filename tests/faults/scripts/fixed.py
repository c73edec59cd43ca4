"""train.py for one world size only, as a script with a fixed number of devices: `fixed.py WORLD_SIZE STEPS`."""

from __future__ import annotations

import os
import sys

import train

if __name__ == "__main__":
    if os.environ["WORLD_SIZE"] != sys.argv[1]:
        raise ValueError(f"this script needs {sys.argv[1]} ranks, not {os.environ['WORLD_SIZE']}")
    train.main(int(sys.argv[2]))
