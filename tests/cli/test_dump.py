"""`elasticd dump`: of a real job that goes on training, and what it says when it cannot choose or reach an agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticd_agent.hangs.collector.record import NodeEvidence
from elasticd_agent.system.network.control_socket import SOCKET_NAME, ControlServer
from tests.faults.job import Job
from tests.system.control_server import Answering

SCRIPTS = Path(__file__).parents[1] / "hangs" / "scripts"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def agent(stack: ExitStack, runtime: Path, directory: Path, answer: str = "") -> None:
    stack.callback(Answering(runtime, directory, answer).close)


def dump(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "elasticd_agent", "dump", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


def runtime(tmp_path: Path, pid: int) -> Path:
    path = tmp_path / f"elasticd-{os.getuid()}-{pid}-x"
    path.mkdir(mode=0o700)
    return path


def test_dump_prints_page_of_new_evidence(stack: ExitStack, tmp_path: Path) -> None:
    """The page shows what the agent has written."""
    agent(stack, runtime(tmp_path, os.getpid()), tmp_path / "logs" / "round-3" / "dump")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    runtime(tmp_path, ended.pid)  # as an agent leaves it that is killed together with its owner
    done = dump(tmp_path, "--pid", str(os.getpid()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Round 3: a dump of a running group: what 1 rank did at step 41.\n")
    done = dump(tmp_path, "--pid", str(os.getpid()), "--out", str(tmp_path / "mine"), "--json")
    assert json.loads(done.stdout)["evidence"] == str(tmp_path / "mine")
    assert (tmp_path / "mine" / "evidence-here.json").exists()


def test_dump_lists_jobs_without_a_single_match(stack: ExitStack, tmp_path: Path) -> None:
    agent(stack, runtime(tmp_path, os.getpid()), tmp_path / "logs")
    agent(stack, runtime(tmp_path, os.getppid()), tmp_path / "logs")
    done = dump(tmp_path, "--job", "llama")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"\n  --pid {os.getpid()}  (job llama, node here)\n" in done.stderr
    done = dump(tmp_path, "--job", "other")
    assert (done.returncode, done.stdout) == (1, "")
    assert "elasticd dump: no job other of this user runs on this machine; there is job " in done.stderr
    assert f"job llama, node here, pid {os.getpid()}" in done.stderr


def test_dump_refuses_directory_with_files(tmp_path: Path) -> None:
    """Evidence of two dumps never mixes."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "rank-7.log").touch()
    done = dump(tmp_path, "--out", str(tmp_path / "full"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "give a new or empty directory" in done.stderr
    assert done.stderr.count("\n") == 1


def test_dump_prints_reason_of_the_agent(stack: ExitStack, tmp_path: Path) -> None:
    agent(stack, runtime(tmp_path, os.getpid()), tmp_path, "no workers are running")
    done = dump(tmp_path, "--pid", str(os.getpid()))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"elasticd dump: job llama, node here, pid {os.getpid()}: no workers are running\n"


def test_dump_names_agent_with_dead_socket(tmp_path: Path) -> None:
    left = runtime(tmp_path, os.getpid())
    ControlServer(left / SOCKET_NAME, lambda _: None).close()
    (left / SOCKET_NAME).touch()
    done = dump(tmp_path, "--pid", str(os.getpid()))
    assert done.returncode == 1
    assert f"the agent with pid {os.getpid()} does not answer: Connection refused\n" in done.stderr


@pytest.mark.system
def test_dump_of_real_job_does_not_disturb_it(stack: ExitStack, tmp_path: Path) -> None:
    flags = ["--log-dir", str(tmp_path / "log"), "--rdzv-id", f"healthy-{os.getpid()}"]
    # Most of a step it sleeps: py-spy reads a process that runs, and a stack that changes meanwhile is torn.
    job = Job(tmp_path / "job", SCRIPTS / "plain.py", "--pause", "0.2", flags=flags)
    stack.callback(job.end)
    job.step(2)
    done = dump(tmp_path, "--pid", str(job.pid))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Round 1: a dump of a running group: what 2 ranks did at step")
    (record,) = (tmp_path / "log" / "round-1" / "dump").glob("evidence-*.json")
    assert all(rank.main_thread is not None for rank in NodeEvidence.from_json(record.read_bytes()).ranks)
    done = dump(tmp_path, "--job", f"healthy-{os.getpid()}", "--out", str(tmp_path / "mine"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["kind"] == "dump"
    assert [rank["step"] > 0 for rank in told["ranks"]] == [True, True]
    job.step(told["ranks"][0]["step"] + 3)
    (job.work / "enough").touch()
    assert job.wait() == 0
    assert not job.events("hang_suspected") + job.events("hang_detected") + job.events("round_published", round=2)
