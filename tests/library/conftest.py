"""Ranks for the library's tests: real processes with torchrun's environment, a heartbeat and an event file each."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat import worker_events as notes

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("ELASTICD_CHECKPOINT_DIR", "WORLD_SIZE")},
    "PYTHONPATH": str(Path(__file__).parents[2]),
    # One thread at each fork of the zygote.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Rank:
    """One process of a job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beat, self.notes = folder / "beat", folder / "notes"

    @property
    def pid(self) -> int:
        return int(wait_for(lambda: read(self.folder / "pid"), "a pid"))

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def read_heartbeat(self) -> heartbeat.Heartbeat:
        with heartbeat.HeartbeatReader(self.beat) as reader:
            return reader.read()

    def request(self, request: int) -> None:
        """As the agent does: heartbeat.STOP, heartbeat.PAUSE, or 0 to withdraw it."""
        with heartbeat.HeartbeatReader(self.beat) as reader:
            reader.write_request(request)

    def read_events(self) -> list[notes.WorkerEvent]:
        """All but the one that every session with a checkpoint makes."""
        found, wrong = notes.WorkerEventReader(self.notes).read()
        assert wrong == []
        return [note for note in found if note.kind not in ("attached", "can_pause")]

    def kinds(self) -> list[str]:
        return [note.kind for note in self.read_events()]

    def result(self) -> dict[str, Any]:
        """What the script printed last."""
        found: dict[str, Any] = json.loads(read(self.folder / "out").splitlines()[-1])
        return found

    def errors(self) -> str:
        return read(self.folder / "err")


class Job:
    """The ranks of one round."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks

    def codes(self, timeout: float = 60) -> list[int]:
        """Every rank's exit code, -n for signal n; waits for them."""
        deadline = time.monotonic() + timeout
        return [
            int(wait_for(lambda rank=rank: read(rank.folder / "code"), f"the end of {rank.folder}", deadline))
            for rank in self.ranks
        ]

    def results(self) -> list[dict[str, Any]]:
        """What every rank printed last, once all have ended well."""
        assert self.codes() == [0] * len(self.ranks), "\n".join(rank.errors() for rank in self.ranks)
        return [rank.result() for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            if not (rank.folder / "code").exists():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    rank.kill(signal.SIGKILL)
        self.codes()


Start = Callable[..., Job]


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPTS / "zygote.py")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as process:
        assert process.stdin is not None
        # On a busy machine importing torch can take longer than a test waits for its ranks.
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
        process.wait(30)


@pytest.fixture
def start(zygote: subprocess.Popen[str], tmp_path: Path) -> Iterator[Start]:
    """Start a script's ranks: start("toy.py", {...}, world_size=2, round=1); they are gone after the test."""
    jobs: list[Job] = []

    def start_job(script: str, *argv: Any, world_size: int = 2, round: int = 1, each_env: Any = (), **env: str) -> Job:
        port = free_port()
        job = Job([Rank(tmp_path / f"job{len(jobs)}-rank{rank}") for rank in range(world_size)])
        jobs.append(job)
        for number, rank in enumerate(job.ranks):
            rank.folder.mkdir()
            heartbeat.create(rank.beat)
            place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            own = each_env[number] if each_env else {}
            ours = {"ELASTICD_ROUND": round, "ELASTICD_JOB": "toy", "ELASTICD_RUN": "run-1"}
            files = {"ELASTICD_HEARTBEAT": rank.beat, "ELASTICD_WORKER_EVENTS": rank.notes}
            task = {
                "script": str(SCRIPTS / script),
                "argv": [each if isinstance(each, str) else json.dumps(each) for each in argv],
                "env": {key: str(value) for key, value in {**place, **where, **ours, **files, **env, **own}.items()},
                "folder": str(rank.folder),
            }
            zygote.stdin.write(json.dumps(task) + "\n")
        zygote.stdin.flush()
        return job

    yield start_job
    for job in jobs:
        job.kill()


_FIRST_PORT = 20_000 + 3000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4)
_PORTS = itertools.cycle(random.sample(range(_FIRST_PORT, _FIRST_PORT + 3000), 3000))
"""This process's own, each given out once before any is given out again."""


def free_port() -> int:
    """For a rank to listen on, in a moment: not one that the kernel gives to a connection of any process until then."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("there is always another port")


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], Any], what: str, deadline: float | None = None) -> Any:
    """Poll until the condition is true and return it; fails after a minute: the machine may be busy."""
    deadline = deadline or time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)
    return found


@pytest.fixture
def scripts() -> Path:
    return SCRIPTS


@pytest.fixture
def environment() -> dict[str, str]:
    """For a script that a test starts by itself."""
    return dict(ENVIRONMENT)


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., Any]:
    return wait_for
