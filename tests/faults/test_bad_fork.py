"""Workers that could not be forked, or not use CUDA then, are started cold, and the log says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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
    said = run.event("launcher_ready", mode="cold")["reason"]
    assert said == "workers start cold from now on: preloading initialised CUDA, which does not survive a fork"
    assert run.event("group_started")["warm"] is False
    run.file("ready-0")
    run.process.send_signal(signal.SIGTERM)
    run.wait()


CANNOT_FORK = """
import os
fork, left = os.fork, [int(os.environ["FORKS"])]

def only_so_often():
    left[0] -= 1
    if left[0] < 0:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = only_so_often
"""
WHO = 'import os; open(os.path.join(os.environ["WORK"], "who"), "a").write(os.environ.get("RANK", "nobody") + "\\n")'


@pytest.mark.parametrize("forks", [1, 3])
def test_process_limit_at_fork(job: StartJob, tmp_path: Path, forks: int) -> None:
    """The first fork asks about CUDA, the second is the intermediate, which then forks the store and the workers."""
    (tmp_path / "few.py").write_text(CANNOT_FORK)
    script = tmp_path / "elsewhere" / "who.py"  # what lies beside a script cannot be preloaded
    script.parent.mkdir()
    script.write_text(WHO)
    path = os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "agents")))
    flags, env = ["--preload", "few"], {"PYTHONPATH": path, "FORKS": str(forks)}
    run = job(script, flags=flags, env=env)
    assert run.wait() == 0
    assert "fork" in run.err and run.event("group_started")["warm"] is False
    assert sorted((run.work / "who").read_text().split()) == ["0", "1"]
