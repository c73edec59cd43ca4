"""Recovery in every way a job can run: cold, without Python, with fewer workers, in a large environment."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import SCRIPTS, Fault, until

COLD = "${local_rank}"


@pytest.mark.system
def test_a_cold_job_recovers_too(job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "cold.py"
    script.write_text(
        f"import os, runpy, sys\nos.environ['OMP_NUM_THREADS'] = '1'\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"runpy.run_path({str(SCRIPTS / 'train.py')!r}, run_name='__main__')\n"
    )
    run = job(script, "10", faults=[Fault(1, 5, "SIGKILL", round=1)])
    assert run.wait() == 0
    assert [event["warm"] for event in run.events("group_started")] == [False, False]
    assert run.event("first_step", round=2)["recovery_seconds"] is not None
    assert "OMP_NUM_THREADS" in run.event("launcher_ready", mode="cold")["reason"]


def test_a_program_that_is_no_python_fails_and_then_succeeds(job: StartJob) -> None:
    run = job("attempt.sh", "an argument", flags=["--no-python"])
    assert run.wait() == 0
    attempts = sorted(run.file("attempts").splitlines())
    assert {line for line in attempts if line.endswith("2 1 an argument")} == {
        f"{rank} 2 2 1 an argument" for rank in (0, 1)
    }
    assert run.event("job_ended", restarts=1)


def test_a_program_that_cannot_be_started_ends_the_job(job: StartJob, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    run = job(program, flags=["--no-python"])
    assert run.wait() == 1
    assert run.event("job_ended", outcome="failed", exit_code=1)
    assert "cannot start" in run.err


def test_a_slot_that_keeps_failing_is_set_aside(job: StartJob) -> None:
    run = job("slot.py", COLD, "broken", workers="1:2")
    assert run.wait() == 0
    sizes = [tuple(map(int, line.split())) for line in run.file("sizes").splitlines()]
    assert {size for round_, _, size in sizes if round_ <= 2} == {2}
    assert [size for round_, _, size in sizes if round_ == 3] == [1]
    assert [event["world_size"] for event in run.events("round_published")] == [2, 2, 1]
    assert "slot 1 of" in run.event("round_published", round=3)["reason"]
    assert "quarantined for 60 s after 2 failures" in run.event("round_published", round=3)["reason"]


@pytest.mark.parametrize("cold", [True, pytest.param(False, marks=pytest.mark.system)])
def test_a_large_environment(job: StartJob, cold: bool) -> None:
    large = {f"LARGE_{number}": "x" * 50_000 for number in range(3)}
    run = job("plain.py", COLD if cold else "warm", "daemon", env=large, faults=[Fault(0, 0, "SIGKILL")])
    assert run.wait() == 0
    assert run.event("group_started", round=2)["warm"] is not cold


def test_an_environment_beyond_all_measure_is_refused(job: StartJob) -> None:
    run = job("plain.py", COLD, "daemon", env={f"LARGE_{number}": "x" * 100_000 for number in range(12)})
    assert run.wait() == 2
    assert "the environment and the arguments take more bytes than" in run.err
    assert "(12" in run.err.splitlines()[-1], "how many they are"


@pytest.mark.system
def test_master_port_in_every_round(job: StartJob) -> None:
    """The stores port is the one asked for in every round."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run = job("train.py", "10", flags=["--master-port", str(port)], faults=[Fault(0, 5, "SIGKILL", round=1)])
    assert run.wait() == 0
    assert run.file("ports").split() == [str(port)] * 4
    assert [event["warm"] for event in run.events("group_started")] == [True, True]


@pytest.mark.system
def test_the_template_dies_while_it_imports(job: StartJob) -> None:
    run = job("train.py", "100000")
    run.event("round_published", round=1)  # before that nobody waits for the template, and another one may come in time
    os.kill(run.helper("templ"), signal.SIGKILL)
    run.step(2, round=1)
    assert not run.event("group_started", round=1)["warm"]
    until(lambda: run.events("launcher_ready", mode="warm"), "another template")
    run.kill(1, round=1)
    run.step(2, round=2)
    assert run.event("group_started", round=2)["warm"]
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
