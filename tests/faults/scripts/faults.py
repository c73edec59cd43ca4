"""The scripts' side of a Fault: does to this rank what the test asked for, and first says that it does.

Standard library only, so that scripts without torch can use it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

WORK = Path(os.environ["WORK"])
RANK = int(os.environ["RANK"])
ROUND = int(os.environ.get("ELASTICD_ROUND", "0"))


def write(name: str, text: str) -> None:
    """Append to a file the test reads: one write, so that ranks and deaths never mix lines."""
    fd = os.open(WORK / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, text.encode())
    os.close(fd)


def finished(step: int) -> None:
    """Tell the test that this rank finished its step."""
    write(f"steps-{RANK}", f"{ROUND} {step}\n")


def at(step: int) -> None:
    """Call it right before each step, and with 0 before joining the group."""
    if step == 0:
        write("ports", os.environ["MASTER_PORT"] + "\n")
    for number, fault in enumerate(json.loads((WORK / "faults.json").read_text())):
        if (fault["rank"], fault["step"]) == (RANK, step) and fault["round"] in (None, ROUND):
            fired = (WORK / "fired").read_text().split() if (WORK / "fired").exists() else []
            if fired.count(str(number)) < fault["times"]:
                write("fired", f"{number}\n")
                happen(fault["what"])


def happen(what: str) -> None:
    kind, _, how = what.partition(" ")
    if kind.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[kind])
    elif kind == "exit":
        os._exit(int(how))
    elif kind == "sys.exit":
        sys.exit(int(how))
    elif kind == "raise":
        module, _, name = how.rpartition(".")
        raise getattr(importlib.import_module(module or "builtins"), name)("a fault")
    elif kind == "gil":
        sum(range(10**10))  # in C, and no other thread of the process runs
    assert kind == "stop" or kind.startswith("SIG"), what
    time.sleep(3600)
