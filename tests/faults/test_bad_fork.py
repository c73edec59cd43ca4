"""Workers that could not be forked, or not use CUDA then, are started cold, and the log says why."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import REPOSITORY, until

# What torch's own fork handler does in the children of a process that has initialised CUDA.
TOUCHES_CUDA = """
import os, torch
os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
"""


# As an extension built with nanobind, which at the end of the process prints what is left of its types. Code in C keeps
# the module.
BINDINGS = """
import ctypes, os, sys
ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules[__name__]))
Type = type("Type", (type,), {"__module__": "nanobind"})
class Bound(metaclass=Type):
    def __del__(self, write=os.write):
        write(2, b"freed\\n")
Bound.instance = Bound()
"""
LEAVES_A_THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"
LATE_THREAD = """
import os, threading, time
forks = []
os.register_at_fork(before=lambda: forks.append(1) or len(forks) == {forks} and threading.Thread(
    target=time.sleep, args=(3600,), daemon=True).start())
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("source", "why"),
    [
        (LEAVES_A_THREAD, "preloading left 2 threads: forking them could dead-lock"),
        ("import sys; sys.exit(3)", "it failed: SystemExit: 3"),
        (TOUCHES_CUDA, "preloading initialised CUDA, which does not survive a fork"),
    ],
)
def test_preload_that_cannot_be_forked_is_left_out(job: StartJob, tmp_path: Path, source: str, why: str) -> None:
    """It costs its own warmth; torch and the other modules stay warm."""
    (tmp_path / "bad.py").write_text(source)
    (tmp_path / "good.py").write_text("")
    path = os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "agents")))
    flags = ["--preload", "bad", "--preload", "good"]
    run = job("plain.py", "-", "nothing", flags=flags, env={"PYTHONPATH": path})
    assert run.event("group_started")["warm"] is True
    until(lambda: f"bad is not preloaded: {why}" in run.err, run.report)
    assert "good is not preloaded" not in run.err
    run.file("ready-0")
    run.process.send_signal(signal.SIGTERM)
    run.wait()


@pytest.mark.parametrize("script", ["import bindings", "import torch"])
def test_modules_are_freed_at_the_end(job: StartJob, tmp_path: Path, script: str) -> None:
    """Also those that the script has not imported, but only the template."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "bindings.py").write_text(BINDINGS)
    (tmp_path / "train.py").write_text(script)
    path = os.pathsep.join(map(str, (library, REPOSITORY, REPOSITORY / "agents")))
    run = job(tmp_path / "train.py", flags=["--preload", "bindings"], env={"PYTHONPATH": path})
    assert run.wait() == 0 and run.event("group_started")["warm"]
    assert run.err.count("freed") == 2, run.err


@pytest.mark.system
@pytest.mark.parametrize(("forks", "warm"), [(1, [True]), (3, [True, False, True])])
def test_thread_that_a_preload_starts_later(job: StartJob, tmp_path: Path, forks: int, warm: list[bool]) -> None:
    """With its first fork, before the template is ready; or with the third one, that of round 1: then round 2 cannot
    be forked, and the next one is warm again, without the preloads."""
    (tmp_path / "late.py").write_text(LATE_THREAD.format(forks=forks))
    path = os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "agents")))
    run = job("plain.py", "-", "nothing", flags=["--preload", "late"], env={"PYTHONPATH": path})
    for round, expected in enumerate(warm, 1):
        assert run.event("group_started", round=round)["warm"] is expected
        if expected is False:
            until(lambda: len(run.events("launcher_ready", mode="warm")) == 2, "another template")
        if round < len(warm):
            run.kill(0, round)
    assert run.err.count("late is not preloaded") == 1
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


@pytest.mark.parametrize("forks", [2, pytest.param(4, marks=pytest.mark.system)])
def test_process_limit_at_fork(job: StartJob, tmp_path: Path, forks: int) -> None:
    """The first two forks ask about CUDA, the third is the intermediate, which then forks the store and the workers."""
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


NO_COLLECTION = """
import gc, os

class Rest:
    def __del__(self):
        open(os.path.join(os.environ["WORK"], "collected-once"), "x").close()

rest = Rest()
rest.itself = rest
del rest
gc.disable()
"""
IS_COLLECTED = """
import gc, os
import off
open(os.path.join(os.environ["WORK"], "enabled-" + os.environ["RANK"]), "w").write(str(gc.isenabled()))
"""


def test_preload_that_turns_collection_off(job: StartJob, tmp_path: Path) -> None:
    """It stays off in the workers, and what the module has left is collected before they are forked. One beside it that
    cannot be imported costs its own warmth only.
    """
    (tmp_path / "bad.py").write_text("raise KeyError('x')")
    (tmp_path / "off.py").write_text(NO_COLLECTION)
    script = tmp_path / "elsewhere" / "collects.py"
    script.parent.mkdir()
    script.write_text(IS_COLLECTED)
    path = os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "agents")))
    run = job(script, flags=["--preload", "bad", "--preload", "off"], env={"PYTHONPATH": path})
    assert run.wait() == 0 and run.event("group_started")["warm"] is True
    assert "bad is not preloaded: it failed: KeyError: 'x'" in run.err and "off is not preloaded" not in run.err
    assert [(run.work / f"enabled-{rank}").read_text() for rank in (0, 1)] == ["False", "False"]
    assert (run.work / "collected-once").exists()


def test_interpreter_that_does_not_run_the_hook(job: StartJob, tmp_path: Path) -> None:
    """A wrapper that sets PYTHONPATH: the script runs in its ranks only, and not in the template, too."""
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH=/nowhere exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "tells.py").write_text("import os\nprint('I am', os.environ.get('RANK'), flush=True)\n")
    run = job(tmp_path / "tells.py", env={"PYTHON_EXEC": str(tmp_path / "python")})
    assert run.wait() == 0
    assert sorted(run.out.splitlines()) == ["I am 0", "I am 1"]
    assert "does not run elasticd's start-up hook" in run.err
