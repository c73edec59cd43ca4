"""The fixture that fails leaking tests, held against tests that leak one thing each."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import string
import subprocess
import sys
from pathlib import Path

LEAKS = """
import os, socket, subprocess, sys, threading, time
from pathlib import Path

kept = []

def test_clean():
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()

def test_process():
    kept.append(subprocess.Popen(["sleep", "300"]))

def test_zombie():
    kept.append(os.posix_spawnp("true", ["true"], dict(os.environ)))

def test_daemon():
    once = "import os; r, w = os.pipe(); os.fork() and (os.close(w), os.read(r, 1), os._exit(0)); os.setsid(); "
    twice = "os.fork() and os._exit(0); os.execvp('sleep', ['sleep', '300'])"  # the pipe's end: it is `sleep` now
    subprocess.run([sys.executable, "-c", once + twice], check=True)

def test_thread():
    threading.Thread(target=threading.Event().wait, args=(60,), name="forgotten", daemon=True).start()

def test_fd():
    kept.append(os.open("/etc/hostname", os.O_RDONLY))

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_shared_memory():
    Path("/dev/shm/elasticd-leak-test-" + os.environ["LEAK_NAME"]).touch()

def test_still_clean():
    pass
"""

FOUND = {
    "process": "sleep 300",
    "zombie": "a zombie nobody waited for",
    "daemon": "sleep 300",
    "thread": "thread 'forgotten'",
    "fd": "/etc/hostname",
    "port": "listening on ('127.0.0.1', ",
    "shared_memory": "/dev/shm/elasticd-leak-test-",
}


def test_each_kind_of_leak_fails_its_test_and_only_that(tmp_path: Path) -> None:
    name = unlike_others()
    run = ran(tmp_path, LEAKS, LEAK_NAME=name)
    (Path("/dev/shm") / f"elasticd-leak-test-{name}").unlink()
    assert f"9 passed, {len(FOUND)} errors" in run, run
    failed = {line.split("::test_")[1]: line for line in run.splitlines() if line.startswith("ERROR ")}
    assert {name.split(" ")[0] for name in failed} == set(FOUND)
    for what in FOUND.values():
        assert what in run


FOREIGN = """
import os, subprocess
from pathlib import Path

def test_beside_an_agent_of_another_run_that_was_killed():
    dead = subprocess.Popen(["true"])
    dead.wait()
    (Path("/dev/shm") / f"elasticd-{os.getuid()}-{dead.pid}-{os.environ['LEAK_NAME']}").mkdir()
"""


def test_what_another_runs_agent_leaves_in_memory_is_nobodys_leak(tmp_path: Path) -> None:
    """It stays until the next agent sweeps it: a run beside that one must not fail by it."""
    name = unlike_others()
    run = ran(tmp_path, FOREIGN, LEAK_NAME=name)
    for leftover in Path("/dev/shm").glob(f"elasticd-*-{name}"):
        with contextlib.suppress(FileNotFoundError):  # somebody's agent has swept it
            leftover.rmdir()
    assert "1 passed" in run, run
    assert "error" not in run, run


def unlike_others() -> str:
    """What another run leaves at the same time is its own to see and to remove. No digits: they count as processes."""
    return "".join(random.choices(string.ascii_lowercase, k=12))


def ran(folder: Path, tests: str, **env: str) -> str:
    """What pytest says of these tests, with our fixture."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_leaking.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rE", "--rootdir", str(folder)]
    return subprocess.run(
        [*command, "-c", os.devnull, str(folder)],
        env={**os.environ, "LEAK_WAIT_S": "0.4", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout
