"""The fixture that fails leaking tests, held against tests that leak one thing each."""

from __future__ import annotations

import os
import shutil
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
    twice = "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); os.execvp('sleep', ['sleep', '300'])"
    subprocess.run([sys.executable, "-c", "import os; " + twice], check=True)

def test_thread():
    threading.Thread(target=threading.Event().wait, args=(60,), name="forgotten", daemon=True).start()

def test_fd():
    kept.append(os.open("/etc/hostname", os.O_RDONLY))

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_shared_memory():
    Path("/dev/shm/elasticd-leak-test-" + str(os.getpid())).touch()

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
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_leaking.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rE", "--rootdir", str(tmp_path)]
    run = subprocess.run(
        [*command, "-c", os.devnull, str(tmp_path)],
        env={**os.environ, "LEAK_WAIT_S": "0.2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    for leftover in Path("/dev/shm").glob("elasticd-leak-test-*"):
        leftover.unlink()
    assert f"9 passed, {len(FOUND)} errors" in run.stdout, run.stdout
    failed = {line.split("::test_")[1]: line for line in run.stdout.splitlines() if line.startswith("ERROR ")}
    assert {name.split(" ")[0] for name in failed} == set(FOUND)
    for what in FOUND.values():
        assert what in run.stdout
