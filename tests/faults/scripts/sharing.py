"""A worker that holds what multiprocessing keeps under /dev/shm: a semaphore as spawn makes them, a named segment."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.shared_memory import SharedMemory

import faults


def main() -> None:
    faults.at(0)
    lock = multiprocessing.get_context("spawn").Lock()
    segment = SharedMemory(create=True, size=4096)
    faults.write("shared", f"sem.{lock._semlock.name[1:]}\n{segment.name}\n")
    faults.write(f"ready-{faults.RANK}", "ready")
    faults.at(1)
    if sys.argv[2] == "sleep" and faults.ROUND == 1:
        time.sleep(3600)
    segment.unlink()


if __name__ == "__main__":
    main()
