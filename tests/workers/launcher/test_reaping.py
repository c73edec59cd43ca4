"""Ending orphans leaves alone what another thread of the agent has started, such as a store's helper process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import ctypes, subprocess, sys, threading, time
from elasticd_agent.system.process import end_children

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


def test_children_of_another_thread_are_not_waited_for() -> None:
    """What another thread has started is neither ended nor waited for."""
    agents = Path(__file__).parents[3] / "agents"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={"PYTHONPATH": str(agents)}, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
