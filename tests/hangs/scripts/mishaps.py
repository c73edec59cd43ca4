"""What a rank does to itself in the situations of tests/hangs/situations.py: the ways to hang, and the ways to be slow.

The toys call `at(place, step)` wherever something can go wrong; a fault of faults.json whose `what` belongs to that
place happens there, once, and says so first, with the time. Nothing here imports elasticd.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import json
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

WORK = Path(os.environ["WORK"])
RANK = int(os.environ["RANK"])
ROUND = int(os.environ.get("ELASTICD_ROUND") or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)

FOREVER_S = 1e9
_FAULTS = json.loads((WORK / "faults.json").read_text())
step_again: list[Callable[[], object]] = []
"""What counts as a step of this script, for a rank that makes them alone."""
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


def lock_in_native_code() -> None:
    """The same without the GIL: other threads run."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def lock_of_a_dead_process() -> None:
    """A process died with a semaphore; nobody releases it."""
    lock = multiprocessing.get_context("fork").Lock()
    if os.fork() == 0:
        lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    lock.acquire()


def lock_file() -> None:
    """A file that a process left behind: each look is a moment of Python, as in torch's FileBaton."""
    path = WORK / f"stale-{RANK}.lock"
    path.touch()
    while path.exists():
        time.sleep(0.1)


def lock_of_another() -> None:
    """flock(2) of a file whose holder does not end."""
    path, holder = WORK / f"held-{RANK}.lock", "import fcntl, sys, time; file = open(sys.argv[1], 'w')"
    holder += "; fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); time.sleep(1e6)"
    process = subprocess.Popen([sys.executable, "-c", holder, str(path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def receive() -> None:
    """From a peer that is gone without a word: it was never there."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.recv(1)


def read_own_pipe() -> None:
    """A pipe whose only writer is the reader."""
    reader, _ = os.pipe()
    os.read(reader, 1)


def wait_for_child() -> None:
    subprocess.run(["sleep", "infinity"], check=True)


def wait_for_stopped_child() -> None:
    subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"], check=True)


def wait_in_hook() -> None:
    """In a backward pass, called by autograd."""
    import torch

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: sleep())
    weight.sum().backward()


def wait_for_thread() -> None:
    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    thread.join()


def backtrack() -> None:
    """A regular expression that takes years, in native code that computes and keeps the GIL."""
    re.match("(a+)+$", "a" * 60 + "b")


def retry() -> None:
    """Steps again and again, alone: it never comes to the collective that the others wait in."""
    while True:
        step_again[0]()
        time.sleep(0.05)


def mute_store() -> None:
    """The store that this rank is to join by takes connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    server.detach()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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
    "native": ("step", lock_in_native_code),
    "lock": ("step", lock_twice),
    "semaphore": ("step", lock_of_a_dead_process),
    "lockfile": ("step", lock_file),
    "flock": ("step", lock_of_another),
    "socket": ("data", receive),
    "pipe": ("step", read_own_pipe),
    "child": ("step", wait_for_child),
    "stopped-child": ("step", wait_for_stopped_child),
    "hook": ("step", wait_in_hook),
    "thread": ("step", wait_for_thread),
    "queue": ("data", lambda: queue.Queue().get()),
    "asyncio": ("step", lambda: asyncio.run(asyncio.sleep(FOREVER_S))),
    "regex": ("step", backtrack),
    "retry": ("step", retry),
    "kill": ("step", die),
    "sleep": ("data", sleep),
    "fifo": ("data", read_fifo),
    "loader": ("loader", deadlock),
    "loader-stop": ("loader", stop),
    "skip": ("collective", nothing),
    "other": ("collective", nothing),
    "shape": ("collective", nothing),
    "abort": ("collective", nothing),
    "recv": ("collective", nothing),
    "barrier": ("collective", nothing),
    "crossed": ("collective", nothing),
    "subgroup": ("collective", nothing),
    "first-crossed": ("collective", nothing),
    "first-subgroup": ("collective", nothing),
    "unequal": ("collective", nothing),
    "sources": ("collective", nothing),
    "key": ("collective", nothing),
    "absent": ("start", sleep),
    "mute-store": ("start", mute_store),
    "restore": ("restore", read_fifo),
    "save": ("save", read_fifo),
    "exit": ("end", hang_at_exit),
    "compile": ("step", compile_for),
    "evaluate": ("evaluate", burn),
    "write": ("save", write_for),
    "dawdle": ("meet", dawdle),
}
"""By the first word of a fault's `what`: the place where it happens, and what does."""
