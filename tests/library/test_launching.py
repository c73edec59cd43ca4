"""`elasticd.launch`: a function's values and errors, and functions that no worker can load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import elasticd
from elasticd import launching
from tests.faults.job import REPOSITORY

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])}
SCRIPT = """
import os, sys, time
import elasticd

def value(a, b):
    return os.environ["RANK"], a + b

def fail(here):
    if os.environ["RANK"] == "1":
        raise ValueError("no such layer")
    time.sleep(60)

if __name__ == "__main__":
    print(elasticd.launch(globals()[sys.argv[1]], *sys.argv[2:], nproc=2, max_restarts=0))
"""


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    (directory / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(directory / "script.py"), *words]
    return subprocess.Popen(
        command, env=ENVIRONMENT, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_values_come_back_by_rank(tmp_path: Path) -> None:
    out, err = start(tmp_path, "value", "x", "y").communicate(timeout=60)
    assert out == "{0: ('0', 'xy'), 1: ('1', 'xy')}\n", err


@pytest.mark.system
def test_error_of_a_rank_is_raised_with_its_traceback(tmp_path: Path) -> None:
    started = start(tmp_path, "fail", str(tmp_path))
    _, err = started.communicate(timeout=60)
    assert started.returncode == 1
    raised = err.rpartition("LaunchError: ")[2]
    assert raised.startswith("rank 1 has failed (exit code 1):")
    assert ", in fail\n" in raised
    assert raised.strip().endswith("ValueError: no such layer")


CALLER = "import sys; from elasticd.launching import _run_supervisor as run; run([sys.executable, '-c', sys.argv[1]])"
SUPERVISOR = """
import time
try:
    print("here", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("signum", "said"), [(signal.SIGINT, "interrupted\n"), (signal.SIGKILL, "")])
def test_supervisor_ends_with_its_caller(signum: signal.Signals, said: str) -> None:
    """An interrupt is passed on to it, and raised once it has ended."""
    command = [sys.executable, "-c", CALLER, SUPERVISOR]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout.readline() == "here\n"
        caller.send_signal(signum)
        assert caller.communicate(timeout=50)[0] == said  # until nobody has the output
    assert caller.returncode == -signum


def renumber() -> int:
    """What `Session.run` does in a process that stays: rank 1 of round 1 is rank 0 of round 2."""
    if os.environ["RANK"] == "1":
        os.environ.update(RANK="0", ELASTICD_ROUND="2")
    return os.getpid()


def test_values_are_those_of_the_last_round_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_workers(command: list[str]) -> int:
        for rank in "012":
            own = {**ENVIRONMENT, "RANK": rank, "ELASTICD_ROUND": "1"}
            pids.append(started := subprocess.Popen([sys.executable, *command[-3:]], env=own))
            assert started.wait(60) == 0
        return 0

    pids: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(launching, "_run_supervisor", run_workers)
    assert elasticd.launch(renumber) == {0: pids[1].pid}


def fail_once() -> None:
    """Round 1 ends by an error, round 2 by a signal."""
    if os.environ["ELASTICD_ROUND"] == "1":
        raise ValueError("the network was away")
    os.kill(os.getpid(), signal.SIGKILL)


def test_error_of_an_earlier_round_is_not_that_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_workers(command: list[str]) -> int:
        for number in "12":
            own = {**ENVIRONMENT, "RANK": "0", "ELASTICD_ROUND": number}
            assert subprocess.run([sys.executable, *command[-3:]], env=own, timeout=60).returncode
        return 1

    monkeypatch.setattr(launching, "_run_supervisor", run_workers)
    with pytest.raises(elasticd.LaunchError, match=r"^the job has ended with exit code 1; its log says why$"):
        elasticd.launch(fail_once)


def test_function_that_no_worker_can_load_is_refused() -> None:
    with pytest.raises(elasticd.UsageError, match=r"workers cannot get <function .*lambda"):
        elasticd.launch(lambda: 1)
    said = subprocess.run(
        [sys.executable, "-"],
        input="import elasticd\ndef f(): pass\nelasticd.launch(f)",
        env={**ENVIRONMENT, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "defined in an interactive session, where this needs cloudpickle" in said.stderr


UNGUARDED = """
import os, subprocess, sys
import elasticd
from elasticd import launching
def run_worker(command):
    return subprocess.run([sys.executable, *command[-3:]], env={**os.environ, "RANK": "0"}).returncode
vars(launching).update(_run_supervisor=run_worker)
def f(): pass
elasticd.launch(f)
"""


def test_call_without_a_guard_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    said = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    raised = said.stderr.rpartition("LaunchError: ")[2]
    assert raised.startswith("rank 0 has failed (exit code 1):") and ", in <module>\n" in raised
    assert "call it below `if __name__ == '__main__':`" in raised
