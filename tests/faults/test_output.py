"""What workers print reaches where it was sent, whatever it is; what cannot be printed stops nobody."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import SCRIPTS, Fault, until

COLD = "${local_rank}"


@pytest.mark.parametrize("flags", [[], ["--log-dir", "logs", "--redirects", "3"]])
def test_a_hundred_megabytes_from_each_worker(job: StartJob, flags: list[str]) -> None:
    run = job("noise.py", COLD, "much", flags=flags)
    assert run.wait() == 0
    if not flags:
        assert (run.work / "out").stat().st_size == 2 * 100_000_000
        with open(run.work / "out", "rb") as out:  # whole lines only, however the workers' writes met
            assert {len(line) for line in out} == {100}
    (run.work / "out").unlink()


def test_binary_output(job: StartJob) -> None:
    """What is no text passes unchanged."""
    run = job("noise.py", COLD, "bytes", workers="1")
    assert run.wait() == 0
    assert (run.work / "out").read_bytes() == b"\xff\xfe not utf-8 \x80\xc3\n\0 nul\x1b[31m\n"
    assert b"\xe9t\xe9\n" in (run.work / "err").read_bytes()


def test_binary_output_through_tee(job: StartJob) -> None:
    """What is no text passes through tee."""
    run = job("noise.py", COLD, "bytes", workers="1", flags=["--tee", "3", "--log-dir", "logs"])
    assert run.wait() == 0
    assert b"\xff\xfe not utf-8 \x80\xc3\n" in (run.work / "out").read_bytes()


def test_path_of_any_name(job: StartJob, tmp_path: Path) -> None:
    name = "größe 数据 \N{SNOWMAN} quote'and\"$(both)"
    work = tmp_path / name
    work.mkdir()
    script = work / f"{name}.py"
    script.write_text((SCRIPTS / "noise.py").read_text())
    (work / "faults.py").write_text((SCRIPTS / "faults.py").read_text())
    faults = [Fault(0, 0, "exit 3")]
    flags = ["--log-dir", str(work / "logs"), "--tee", "1"]
    run = job(script.name, COLD, "words", name, work=work, workers="1", faults=faults, flags=flags)
    assert run.wait() == 0
    assert f"hello from {name}\n" in run.out
    assert list((work / "logs").rglob("stdout.log")) or list((work / "logs").rglob("*"))


@pytest.mark.system
def test_closed_terminal(job: StartJob) -> None:
    """A terminal that went away stops nobody."""
    read, write = os.pipe()
    run = job("train.py", "30", stderr=write, faults=[Fault(0, 10, "SIGKILL", round=1)])
    os.close(write)
    os.close(read)
    assert run.wait() == 0
    assert run.event("job_ended", outcome="succeeded", restarts=1)


def test_closed_stderr(job: StartJob) -> None:
    """Nobody reading stderr stops nobody."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(write, "wb", buffering=0) as full:
        while full.write(b"x" * 4096):
            pass
        run = job("plain.py", COLD, "polite", stderr=full.fileno(), faults=[Fault(0, 1, "SIGKILL")])
    run.event("group_started", round=2)
    for rank in (0, 1):
        pid = str(run.worker(rank, round=2))
        until(lambda rank=rank, pid=pid: pid in run.file(f"ready-{rank}").split(), f"rank {rank} of the second round")
    started = time.monotonic()
    run.process.terminate()
    try:
        assert run.wait() == 128 + signal.SIGTERM
    finally:
        os.close(read)
    assert time.monotonic() - started < 28
