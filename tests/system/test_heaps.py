"""What a process keeps of the largest block of each of its threads."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys, threading
from pathlib import Path
from elasticd_agent.system import heaps

def kib():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("RssAnon:"))

if sys.argv[1] == "mapped":
    heaps.share_one_heap()
together, freed, end = threading.Barrier(16), threading.Barrier(17), threading.Event()

def work():
    for _ in range(3):
        message = b"x" * (1 << 20)
        later = b"y" * 2000  # keeps the heap from shrinking
        together.wait()
        del message
    freed.wait()
    end.wait()

before = kib()
for _ in range(16):
    threading.Thread(target=work, daemon=True).start()
freed.wait()
print(kib() - before)
end.set()
"""


def kib_kept(blocks: str) -> int:
    """By 16 threads."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, blocks]
    return int(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=60).stdout)


def test_threads_keep_no_megabyte_each() -> None:
    assert kib_kept("mapped") < 1 << 10 < 4 << 10 < kib_kept("as it is")
