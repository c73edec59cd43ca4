"""Faults of saving: what holds the states in memory or writes them dies, and the memory is small."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.containers import in_a_small_dev_shm, inside, memory_limit
from tests.faults.job import until

pytestmark = pytest.mark.system


def test_writer_and_owner_die_and_dev_shm_is_small(job: StartJob, tmp_path: Path) -> None:
    """The state is larger than /dev/shm. The writer's successor writes on; with the owner go the states in memory, and
    the job resumes from the disk.
    """
    directory = tmp_path / "checkpoints"
    how = ["--steps", "100000", "--every", "20", "--ballast", str(100 << 20)]
    prefix = in_a_small_dev_shm()
    run = job("resume.py", *how, prefix=prefix, flags=["--checkpoint-dir", str(directory)])
    first = run.event("checkpoint_saved")
    small = os.statvfs(f"/proc/{run.helper('writer')}/root/dev/shm")
    assert not prefix or small.f_blocks * small.f_frsize == 64 << 20
    assert "while training waits" not in run.err, "it was copied into memory"

    writer = run.helper("writer")
    os.kill(writer, signal.SIGKILL)
    until(lambda: run.events("checkpoint_saved")[-1]["step"] >= first["step"] + 60, "checkpoints of the next writer")
    assert run.helper("writer") != writer
    assert not run.events("worker_exited")

    run.kill(1, round=1)
    resumed = run.event("resumed", round=2)
    assert ", in memory" in resumed["reason"]

    # Without progress the next restart would leave that state for an older one.
    saved = until(
        lambda: [each for each in run.events("checkpoint_saved", round=2) if each["step"] > resumed["step"]], "a save"
    )
    os.kill(run.helper("owner"), signal.SIGKILL)
    resumed = run.event("resumed", round=3)
    assert "in memory" not in resumed["reason"]
    assert resumed["step"] >= saved[0]["step"]
    run.event("checkpoint_saved", round=3)
    assert "while training waits" not in run.err, "the next owner has a writer, too"

    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM


def test_memory_limit_below_two_copies(job: StartJob, tmp_path: Path) -> None:
    """Checkpoints are written while training waits, and nothing is killed."""
    directory = tmp_path / "checkpoints"
    how = ["--steps", "40", "--every", "10", "--ballast", str(300 << 20)]
    with memory_limit(1500) as group:
        run = job("resume.py", *how, prefix=inside(group), flags=["--checkpoint-dir", str(directory)])
        assert run.wait() == 0
    assert "while training waits: two copies of a state of 300 MB take 664 MB more, and " in run.err
    assert "left below the memory limit of 1500 MB" in run.err
    assert [event["step"] for event in run.events("checkpoint_saved")] == [10, 20, 30, 40]
    assert not run.events("round_published", round=2)


def test_copies_are_given_up_when_the_memory_does_not_suffice(job: StartJob, tmp_path: Path) -> None:
    """They fit beside the training of the first steps, and not beside that of later ones."""
    directory = tmp_path / "checkpoints"
    how = ["--steps", "40", "--every", "10", "--ballast", str(300 << 20), "--grow", str(350 << 20)]
    with memory_limit(1900) as group:
        run = job("resume.py", *how, prefix=inside(group), flags=["--checkpoint-dir", str(directory)])
        assert run.wait() == 0, run.err
    assert "no more copies of the state in memory: the kernel has killed a process of this cgroup" in run.err
    assert run.events("resumed")[-1]["step"] in (10, 20)
    assert run.events("checkpoint_saved")[-1]["step"] == 40


def test_rank_that_the_kernel_kills_for_lack_of_memory(job: StartJob) -> None:
    with memory_limit(700) as group:
        run = job("plain.py", "${local_rank}", "hungry", prefix=inside(group), flags=["--max-restarts", "1"])
        assert run.wait() == 1
    reasons = [event["reason"] for event in run.events("worker_exited", signal=int(signal.SIGKILL), requested=False)]
    assert len(reasons) == 2
    assert all("rank 1" in reason and "(out of memory)" in reason for reason in reasons)
