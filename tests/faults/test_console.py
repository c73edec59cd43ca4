"""A console that closes, or Ctrl-C on it: neither costs the job more than output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

NOISY = """
import os, sys, time
for step in range(1 << 30):
    print("step", step, flush=True)
    print("error", step, file=sys.stderr, flush=True)
    if os.path.exists(sys.argv[1]):
        break
    time.sleep(0.02)
open(f"{sys.argv[1]}-{os.environ['RANK']}", "x").close()
"""
FULL = """
import os, sys
if os.environ["ELASTICD_ROUND"] == "1":
    os.makedirs("logs/round-2/rank-0")
    for name in ("stdout", "stderr"):
        os.symlink("/dev/full", f"logs/round-2/rank-0/{name}.log")
    sys.exit(3)
print("step", flush=True)
print("error", file=sys.stderr)
"""
INTERRUPTED = """
import sys, time
def train():
    sys.stdout.write("ready\\n")
    while True:
        time.sleep(0.01)
train()
"""


def start(tmp_path: Path, script: str, *argv: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "elasticd_agent", "run", "--nproc-per-node", "2", *flags, str(path), *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)


@pytest.mark.parametrize("cold", [False, True])
def test_closed_console_costs_no_restart(cold: bool, tmp_path: Path) -> None:
    """`elasticd run … 2>&1 | head -1`: the ranks print to pipes that nobody reads, and so does the agent."""
    enough = tmp_path / "enough"
    argv = [str(enough), *(["${local_rank}"] if cold else [])]
    run = start(tmp_path, NOISY, *argv, flags=("--event-log", str(tmp_path / "events.jsonl")))
    try:
        assert run.stdout.readline().startswith(b"step")
        run.stdout.close()
        run.stderr.close()
        enough.touch()
        assert run.wait(60) == 0
    finally:
        run.kill()
        run.wait()
    assert {path.name for path in tmp_path.glob("enough-*")} == {"enough-0", "enough-1"}
    assert "round_published" in (log := (tmp_path / "events.jsonl").read_text())
    assert log.count('"kind": "round_published"') == 1


def test_program_that_dies_of_the_closed_console_is_restarted_without(tmp_path: Path) -> None:
    """What is not Python gets SIGPIPE, once."""
    program = f"while ! test -e {tmp_path}/enough; do echo step; sleep 0.05; done; echo end"
    command = [sys.executable, "-m", "elasticd_agent", "run", "--no-python", "bash", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        try:
            assert run.stdout.readline() == b"step\n"
            run.stdout.close()
            for line in run.stderr:
                if b"round 2" in line:
                    break
            (tmp_path / "enough").touch()
            said = run.stderr.read()
            assert run.wait(60) == 0, said
        finally:
            run.kill()
    assert b"round 3" not in said


def test_interrupted_rank_is_one_line(tmp_path: Path) -> None:
    run = start(tmp_path, INTERRUPTED)
    assert run.stdout is not None
    assert [run.stdout.readline() for _ in range(2)] == 2 * [b"ready\n"]
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT
    at = re.escape(f"KeyboardInterrupt at {tmp_path}/script.py:")
    assert len(re.findall(rf"{at}[456] in train\n", errors.decode())) == 2, errors.decode()
    assert b"Traceback" not in errors


@pytest.mark.parametrize("argv", [["help"], ["docs", "cli"], ["help", "config"], ["run", "--help"]])
def test_command_whose_reader_has_gone_is_silent(argv: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        command = [sys.executable, "-m", "elasticd_agent", *argv]
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("cold", [pytest.param(False, marks=pytest.mark.system), True])
def test_full_disk_below_the_logs_costs_no_restart(cold: bool, tmp_path: Path) -> None:
    """The disk of the second round's log files is full."""
    argv = ["${local_rank}"] if cold else []
    run = start(tmp_path, FULL, *argv, flags=("--nproc-per-node", "1", "--log-dir", "logs", "--max-restarts", "1"))
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert err.count(b"rank 0's log cannot be written (No space left on device): its output is lost") == 1
