"""Faults of saving: what holds the states in memory or writes them dies, and the memory is small."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import until

pytestmark = pytest.mark.system

SMALL = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'


def in_a_small_dev_shm() -> list[str]:
    """A command's head: a /dev/shm of 64 MB, as in containers; none without the right to mount."""
    for unshare in (["unshare", "-m"], ["unshare", "-r", "-m"]):
        if not subprocess.run([*unshare, "sh", "-c", SMALL, "-", "true"], capture_output=True).returncode:
            return [*unshare, "sh", "-c", SMALL, "-"]
    return []


def test_writer_and_owner_die_and_dev_shm_is_small(job: StartJob, tmp_path: Path) -> None:
    """The state is larger than /dev/shm. The writer's successor writes on; with the owner go the states in memory, and
    the job resumes from the disk.
    """
    directory = tmp_path / "checkpoints"
    how = ["--steps", "100000", "--every", "20", "--ballast", str(100 << 20)]
    run = job("resume.py", *how, prefix=in_a_small_dev_shm(), flags=["--checkpoint-dir", str(directory)])
    first = run.event("checkpoint_saved")
    assert "while training waits" not in run.err, "it was copied into memory"

    writer = run.helper("writer")
    os.kill(writer, signal.SIGKILL)
    # Rank 0 writes the next one itself, unless it has not noticed the death yet; the one after it is in memory again.
    until(lambda: run.events("checkpoint_saved")[-1]["step"] >= first["step"] + 60, "checkpoints of the next writer")
    assert run.helper("writer") != writer
    assert not run.events("worker_exited")

    run.kill(1, round=1)
    resumed = run.event("resumed", round=2)
    assert resumed["reason"].endswith("in memory")

    # Without progress the next restart would leave that state for an older one.
    saved = until(
        lambda: [each for each in run.events("checkpoint_saved", round=2) if each["step"] > resumed["step"]], "a save"
    )
    os.kill(run.helper("owner"), signal.SIGKILL)
    resumed = run.event("resumed", round=3)
    assert "in memory" not in resumed["reason"]
    assert resumed["step"] >= saved[0]["step"]
    run.step(resumed["step"] + 5, round=3)

    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
