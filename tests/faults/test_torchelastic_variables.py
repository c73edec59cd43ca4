"""torchrun's TORCHELASTIC_… variables that its agent reads: the file timer and the port for health checks."""

from __future__ import annotations

import re
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault, until
from tests.faults.nodes import COLD
from tests.library.conftest import free_port


def test_expired_file_timer_kills_the_process_that_set_it(job: StartJob) -> None:
    """A worker's child alone dies alone; a worker restarts the group."""
    run = job("timers.py", "5", faults=[Fault(1, 3, "stop", round=1)], env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert run.wait() == 0, run.err
    assert run.file("child") == str(-signal.SIGKILL)
    assert re.search(
        r"round 1: rank 0 did not release its timer 'a child' in time .*: process \d+ gets SIGKILL", run.err
    )
    assert re.search(
        r"round 1: rank 1 did not release its timer 'step 3' in time .*: process \d+ gets SIGKILL", run.err
    )
    assert run.event("round_published", round=2)["reason"].startswith("rank 1 was killed by SIGKILL")
    assert run.event("job_ended")["restarts"] == 1


def test_file_timer_at_a_given_path(job: StartJob, tmp_path: Path) -> None:
    pipe = tmp_path / "timers"
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(pipe)}
    run = job("tells.py", COLD, workers="1", env=env)
    run.event("group_started")
    assert pipe.is_fifo()
    (run.work / "enough").touch()
    assert run.wait() == 0
    assert not pipe.exists()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def test_health_check_port(job: StartJob) -> None:
    port = free_port()
    run = job("tells.py", COLD, workers="1", env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)})
    run.event("group_started")
    assert get(port, "/healthz") == get(port, "/") == (200, "ok\n")
    assert get(port, "/status")[0] == get(port, "/metrics")[0] == 404
    (run.work / "enough").touch()
    assert run.wait() == 0


@pytest.mark.parametrize("given", ["", "in use"])
def test_health_check_port_that_cannot_be_served_ends_no_job(job: StartJob, given: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = str(server.getsockname()[1]) if given == "in use" else given
        run = job("tells.py", COLD, workers="1", env={"TORCHELASTIC_HEALTH_CHECK_PORT": port})
        until(lambda: "no health check is served" in run.err, "the line about the port")
        (run.work / "enough").touch()
        assert run.wait() == 0
