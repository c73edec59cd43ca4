"""A worker without torch that does one thing. An argument ${local_rank} makes its start cold, which here is quick."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType

import faults

KEPT: list[bytearray] = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


def main(what: str) -> None:
    faults.at(0)
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    elif what == "slow":
        signal.signal(signal.SIGTERM, slow)
    elif what == "polite":
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, polite)
    elif what == "daemon":
        daemonise()
    elif what == "deaf daemon":
        daemonise(deaf=True)
    elif what == "family":
        daemonise()
        faults.write("family", f"{subprocess.Popen(SLEEP).pid}\n")
        faults.write("family", f"{subprocess.Popen(SLEEP, start_new_session=True).pid}\n")
    faults.write(f"ready-{faults.RANK}", f"{os.getpid()}\n")
    faults.at(1)
    while what == "hungry" and faults.RANK == 1:
        KEPT.append(bytearray(os.urandom(1 << 20)))
    while "daemon" not in what:
        time.sleep(0.5)  # Python's handler of a signal that comes right before it runs after it


def polite(signum: int, _: FrameType | None) -> None:
    faults.write(f"got-{faults.RANK}", signal.Signals(signum).name)
    sys.exit(0)


def slow(signum: int, _: FrameType | None) -> None:
    """Takes longer than what a successful script leaves behind may take."""
    time.sleep(6)
    polite(signum, _)


def daemonise(deaf: bool = False) -> None:
    """As daemons do: fork, setsid, fork; its parent is gone then. Returns in the worker once the daemon runs."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        os.waitpid(child, 0)
        os.read(read, 1)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else signal.SIG_DFL)
    faults.write("family", f"{os.getpid()}\n")
    os.write(write, b"!")
    os.close(write)
    os.execv(sys.executable, SLEEP)


if __name__ == "__main__":
    main(sys.argv[2])
