"""What a process keeps of the largest moment of each of its threads."""

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

if sys.argv[1] == "limited":
    heaps.limit_heaps()
end, begun = threading.Event(), threading.Barrier(17)

def work():
    for _ in range(3):
        message = b"x" * (1 << 20)
        later = b"y" * 2000
        del message
    begun.wait()
    end.wait()

before = kib()
for _ in range(16):
    threading.Thread(target=work).start()
begun.wait()
print(kib() - before)
end.set()
"""


def kib_kept(kind: str) -> int:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, kind]
    return int(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=60).stdout)


def test_threads_keep_no_megabyte_each() -> None:
    assert kib_kept("limited") < 4 << 10 < 6 << 10 < kib_kept("as it is")
