"""What is ended with the children, and what is left alone or gets a moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OTHER_THREAD = """
import ctypes, subprocess, sys, threading, time
from elasticd_agent.system.processes.process import end_children

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as the agent
started, over = threading.Event(), threading.Event()

def other():
    global kept
    kept = subprocess.Popen(["sleep", "100"])
    started.set()
    over.wait(20)

threading.Thread(target=other).start()
started.wait(20)
parent = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!"], stdout=subprocess.PIPE, text=True)
orphan = int(parent.stdout.readline())
began = time.monotonic()
end_children(20.0)
assert time.monotonic() - began < 10, "it waited for what is not its own"
assert kept.poll() is None
try:
    open(f"/proc/{orphan}/stat")
    raise SystemExit("the orphan is still there")
except FileNotFoundError:
    pass
kept.kill()
kept.wait()
over.set()
"""

CLEANER = """
import os, sys
fifo, segment = sys.argv[2:]
print("runs", flush=True)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
os.unlink(segment)
"""
"""In state D until its child, which shares its memory, could open the FIFO."""

READING = """
import os, subprocess, sys, threading, time
from pathlib import Path
from elasticd_agent.system.processes.process import end_children, kernel_state

cleaner, fifo, segment = sys.argv[1:]
command = [sys.executable, "-c", cleaner, "multiprocessing.resource_tracker", fifo, segment]
with subprocess.Popen(command, stdout=subprocess.PIPE) as tracker:
    tracker.stdout.readline()
    deadline = time.monotonic() + 20
    while kernel_state(tracker.pid)["state"] != "D":
        assert time.monotonic() < deadline
    threading.Timer(0.1, lambda: Path(fifo).write_text("")).start()
    end_children(20.0)
assert not Path(segment).exists(), "the cleaner was killed"
"""


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", script, *arguments]
    agents = Path(__file__).parents[3] / "agents"
    done = subprocess.run(command, env={"PYTHONPATH": str(agents)}, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_children_of_another_thread_are_not_waited_for() -> None:
    run(OTHER_THREAD)


def test_a_cleaner_that_reads_from_disk_gets_its_moment(tmp_path: Path) -> None:
    """A cleaner of shared memory that is in state D, when it is looked at, is not killed before its work is done."""
    fifo, segment = tmp_path / "fifo", tmp_path / "segment"
    os.mkfifo(fifo)
    segment.touch()
    run(READING, CLEANER, str(fifo), str(segment))
