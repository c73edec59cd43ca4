"""Trains alone or in company; in company rank 1 dies at once: its slot is broken. Standard library only."""

from __future__ import annotations

import os
import sys
import time

import faults


def main(what: str) -> None:
    faults.write("sizes", f"{faults.ROUND} {faults.RANK} {os.environ['WORLD_SIZE']}\n")
    faults.at(0)
    if os.environ["WORLD_SIZE"] == "1":
        sys.exit(0)
    if faults.RANK == 1:
        os._exit(7)
    assert what == "broken"
    time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[2])
