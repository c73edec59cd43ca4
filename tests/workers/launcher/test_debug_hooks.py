"""A worker's second source of stacks: a signal that needs neither the GIL nor the right to trace anybody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.heartbeat import record as beat
from elasticd.heartbeat.record import STACKS_SIGNAL
from elasticd_agent.system.installation import library_file, program
from elasticd_agent.workers.launcher.requests import LIBRARY_MODULES, TEMPLATE_PROGRAMS
from tests.library.conftest import wait_for

Worker = subprocess.Popen[str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts a script as the owner starts a cold worker, but that it is read here; it says "ready" by itself."""
    workers: list[Worker] = []
    launch: dict[str, Any] = {name: program(name) for name in TEMPLATE_PROGRAMS}
    launch |= {
        "library": {name: library_file(name) for name in LIBRARY_MODULES},
        "agent": os.getpid(),
        "pythonpath": None,
        "mode": "cold",
        "logs": [],
        "integrate": (),
    }

    def start_script(script: str, stacks: bool = True, prefix: tuple[str, ...] = ()) -> Worker:
        beat.create(tmp_path / "beat")
        file = tmp_path / "script.py"
        file.write_text("import os, sys\n" + textwrap.dedent(script))
        env = {**os.environ, "PYTHONPATH": program("start_up_hook"), "ELASTICD_LAUNCH": json.dumps(launch)}
        env |= {"ELASTICD_HEARTBEAT": str(tmp_path / "beat"), "PYTHONUNBUFFERED": "1"}
        env |= {"ELASTICD_STACKS": str(tmp_path / "stacks")} if stacks else {}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        worker = subprocess.Popen([*prefix, sys.executable, str(file)], env=env, text=True, **pipes)
        workers.append(worker)
        line = worker.stdout.readline()
        assert line == "ready\n", worker.communicate(timeout=30)
        return worker

    yield start_script
    for worker in workers:
        worker.kill()
        worker.communicate(timeout=30)


def caught(pid: int) -> bool:
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return bool(int(status["SigCgt"], 16) >> (STACKS_SIGNAL - 1) & 1)


def ask_until(pid: int, stacks: Path, found: str) -> None:
    """The script says that it is ready just before it gets where it is to be found."""

    def asked() -> bool:
        os.kill(pid, STACKS_SIGNAL)
        return found in stacks.read_text()

    wait_for(asked, f"stacks that say {found}")


def descriptor(pid: int, stacks: Path) -> int:
    (fd,) = (int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(fd) == str(stacks))
    return fd


def test_a_worker_that_holds_the_gil_says_where(start: Any, tmp_path: Path) -> None:
    worker = start("""
        import ctypes
        def tokenize():
            while True:  # the signal ends each
                ctypes.PyDLL(None).sleep(1000)
        print("ready")
        tokenize()
        """)
    assert caught(worker.pid)
    stacks = tmp_path / "stacks"
    assert stacks.stat().st_mode & 0o777 == 0o600
    ask_until(worker.pid, stacks, "in tokenize")
    assert worker.poll() is None


def test_stack_signal_keeps_a_waiting_script_waiting(start: Any, tmp_path: Path) -> None:
    worker = start("""
        print("ready")
        print(sys.stdin.readline(), end="")
        """)
    for times in (1, 2, 3):
        worker.send_signal(STACKS_SIGNAL)
        wait_for(lambda times=times: (tmp_path / "stacks").read_text().count("<module>") == times, "the stacks")
    out, err = worker.communicate("still there\n", timeout=30)
    assert (worker.returncode, out, err) == (0, "still there\n", "")


def test_the_file_is_out_of_the_way_and_no_childs(start: Any, tmp_path: Path) -> None:
    worker = start("""
        import subprocess
        os.closerange(3, 256)
        ls = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, close_fds=False)
        assert ls.stdout.split() == [b"0", b"1", b"2", b"3"], ls.stdout
        print("ready")
        sys.stdin.read()
        """)
    assert descriptor(worker.pid, tmp_path / "stacks") >= 1000


def test_few_descriptors_are_enough(start: Any, tmp_path: Path) -> None:
    worker = start(
        """
        print("ready")
        sys.stdin.read()
        """,
        prefix=("bash", "-c", 'ulimit -n 32; exec "$@"', "bash"),
    )
    assert descriptor(worker.pid, tmp_path / "stacks") == 31
    worker.send_signal(STACKS_SIGNAL)
    wait_for(lambda: "<module>" in (tmp_path / "stacks").read_text(), "the stacks")


def test_stacks_of_forked_children(start: Any, tmp_path: Path) -> None:
    worker = start("""
        def collate():
            sys.stdin.read()
        child = os.fork()
        if not child:
            print("ready")
            collate()
            os._exit(0)
        os.waitpid(child, 0)
        """)
    (child,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    assert caught(int(child))
    ask_until(int(child), tmp_path / "stacks", "in collate")
    worker.communicate(timeout=30)
    assert worker.returncode == 0


def test_a_handler_of_the_scripts_own_stays_its_own(start: Any, tmp_path: Path) -> None:
    worker = start(f"""
        import signal
        assert signal.getsignal({STACKS_SIGNAL}) is signal.SIG_DFL
        signal.signal({STACKS_SIGNAL}, lambda *_: print("mine"))
        print("ready")
        sys.stdin.read()
        """)
    worker.send_signal(STACKS_SIGNAL)
    assert worker.stdout.readline() == "mine\n"
    assert (tmp_path / "stacks").read_text() == ""


def test_without_a_file_the_signal_is_not_caught(start: Any) -> None:
    worker = start(
        """
        print("ready")
        sys.stdin.read()
        """,
        stacks=False,
    )
    assert not caught(worker.pid), "so nobody may send it"
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == -signal.SIGTERM


def test_a_folder_that_is_not_there_costs_only_the_stacks(start: Any, tmp_path: Path) -> None:
    worker = start(
        """
        print("ready")
        """,
        prefix=("env", f"ELASTICD_STACKS={tmp_path}/nowhere/stacks"),
    )
    assert worker.communicate(timeout=30) == ("", "")
    assert worker.returncode == 0
