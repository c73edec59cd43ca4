"""A worker that sets torch's file timer around each step, as torch.distributed.elastic.timer's users do."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import faults
from torch.distributed.elastic.timer import FileTimerClient


def child() -> None:
    """Sets a timer of its own and never releases it, as a stuck loader process would."""
    FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]).acquire("a child", time.time() + 0.1)
    time.sleep(3600)


def main(steps: int) -> None:
    faults.at(0)
    client = FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"])
    if faults.ROUND == 1 and faults.RANK == 0:
        stuck = multiprocessing.get_context("fork").Process(target=child)
        stuck.start()
        stuck.join()
        faults.write("child", f"{stuck.exitcode}")
    for step in range(1, steps + 1):
        client.acquire(f"step {step}", time.time() + (0.5 if faults.ROUND == 1 else 600))
        faults.at(step)
        client.release(f"step {step}")
        faults.finished(step)


if __name__ == "__main__":
    main(int(sys.argv[1]))
