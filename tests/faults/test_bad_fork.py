"""Workers that could not use CUDA once they are forked are started cold, and the log says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.faults.conftest import StartJob
from tests.faults.job import REPOSITORY

# What torch's own fork handler does in the children of a process that has initialised CUDA.
TOUCHES_CUDA = """
import os, torch
os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
"""


def test_a_preloaded_module_that_touches_cuda_means_a_cold_start(job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "touching.py").write_text(TOUCHES_CUDA)
    path = os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "agents")))
    run = job("plain.py", "-", "nothing", flags=["--preload", "touching"], env={"PYTHONPATH": path})
    said = run.event("launcher", mode="cold")["reason"]
    assert said == "workers start cold from now on: preloading initialised CUDA, which does not survive a fork"
    assert run.event("group_started")["warm"] is False
    run.file("ready-0")
    run.process.send_signal(signal.SIGTERM)
    run.wait()
