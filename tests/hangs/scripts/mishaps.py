"""What a rank does to itself in the situations of tests/hangs/situations.py: the ways to hang, and the ways to be slow.

The toys call `at(place, step)` wherever something can go wrong; a fault of faults.json whose `what` belongs to that
place happens there, once, and says so first, with the time. Nothing here imports elasticd.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

WORK = Path(os.environ["WORK"])
RANK = int(os.environ["RANK"])
ROUND = int(os.environ.get("ELASTICD_ROUND") or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)

FOREVER_S = 1e9
_FAULTS = json.loads((WORK / "faults.json").read_text())
_BURN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


def write(name: str, text: str) -> None:
    """Append to a file the test reads: one write, so that ranks and deaths never mix lines."""
    fd = os.open(WORK / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, text.encode())
    os.close(fd)


def finished(step: int) -> None:
    """Tell the test that this rank finished its step, and when."""
    write(f"steps-{RANK}", f"{ROUND} {step} {time.monotonic():.6f}\n")


def at(place: str, step: int) -> bool:
    """Whatever is to go wrong here, at this step, does; says whether something did, for what can be survived."""
    due = _due(place, step)
    for kind, *how in due:
        _ACTIONS[kind][1](*how)
    return bool(due)


def collective(step: int) -> str:
    """What this rank does instead of its all-reduce at this step; "" for nothing else."""
    return next((kind for kind, *_ in _due("collective", step)), "")


def _due(place: str, step: int) -> list[list[str]]:
    found = []
    for number, fault in enumerate(_FAULTS):
        words = fault["what"].split()
        if _ACTIONS[words[0]][0] != place or (fault["rank"], fault["step"]) != (RANK, step):
            continue
        fired = (WORK / "fired").read_text().split() if (WORK / "fired").exists() else []
        if fault["round"] in (None, ROUND) and fired.count(str(number)) < fault["times"]:
            write("fired", f"{number}\n")
            write("fired-at", f"{number} {RANK} {os.getpid()} {time.monotonic():.6f}\n")
            found.append(words)
    return found


# --- hung ----------------------------------------------------------------------------------------------------------


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(FOREVER_S)


def spin() -> None:
    while True:
        pass


def deadlock() -> None:
    """Two threads, two locks, each waits for the other's."""
    mine, theirs, held = threading.Lock(), threading.Lock(), threading.Event()

    def other() -> None:
        with theirs:
            held.set()
            mine.acquire()

    mine.acquire()
    threading.Thread(target=other, daemon=True).start()
    held.wait()
    theirs.acquire()


def hold_gil() -> None:
    """A C call that keeps the GIL and that no signal ends: a mutex, locked twice. PyDLL does not let go of the GIL."""
    mutex = ctypes.create_string_buffer(64)  # all zeros is PTHREAD_MUTEX_INITIALIZER
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def read_fifo() -> None:
    """Opening a FIFO that nobody writes to blocks like a file on a server that is gone."""
    path = WORK / f"fifo-{RANK}-{time.monotonic_ns()}"
    os.mkfifo(path)
    path.read_bytes()


def die_leaving_a_thread() -> None:
    """The main thread ends, another one goes on: the process is a zombie that cannot be reaped."""
    threading.Thread(target=sleep, daemon=True).start()
    ctypes.CDLL(None).pthread_exit(None)


def hang_at_exit() -> None:
    atexit.register(sleep)


# --- slow ----------------------------------------------------------------------------------------------------------


def compile_for(seconds: str) -> None:
    """As torch.compile does: half of the time in a child process, half in this one; each burns a processor."""
    half = float(seconds) / 2
    subprocess.run([sys.executable, "-c", _BURN, str(half)], check=True)
    burn(str(half))


def burn(seconds: str) -> None:
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        sum(range(10_000))


def dawdle(seconds: str) -> None:
    """Idle, and nobody can tell what for."""
    time.sleep(float(seconds))


def write_for(seconds: str) -> None:
    """A checkpoint to a slow disk: a megabyte, a wait, and so on."""
    end, path = time.monotonic() + float(seconds), WORK / f"slow-write-{RANK}"
    with path.open("wb", buffering=0) as file:
        while time.monotonic() < end:
            file.write(b"\0" * (1 << 20))
            os.fsync(file.fileno())
            file.seek(0)
            time.sleep(0.05)
    path.unlink()


def nothing() -> None:
    """What happens instead is the toy's to do, see `collective`."""


_ACTIONS = {
    "stop": ("step", stop),
    "spin": ("step", spin),
    "deadlock": ("step", deadlock),
    "gil": ("step", hold_gil),
    "zombie": ("step", die_leaving_a_thread),
    "sleep": ("data", sleep),
    "fifo": ("data", read_fifo),
    "loader": ("loader", deadlock),
    "skip": ("collective", nothing),
    "other": ("collective", nothing),
    "shape": ("collective", nothing),
    "abort": ("collective", nothing),
    "absent": ("start", sleep),
    "save": ("save", read_fifo),
    "exit": ("end", hang_at_exit),
    "compile": ("step", compile_for),
    "evaluate": ("evaluate", burn),
    "write": ("save", write_for),
    "dawdle": ("meet", dawdle),
}
"""By the first word of a fault's `what`: the place where it happens, and what does."""
