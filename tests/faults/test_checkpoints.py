"""Jobs with checkpoints: what was saved is never trained again, what is damaged is passed over and said."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.etcd import free_ports
from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job, comm_of, descendants, until


def losses(run: Job) -> dict[int, float]:
    """By step, of the last round that trained it."""
    lines = (line.split() for line in (run.work / "steps-0").read_text().splitlines())
    return {int(step): float(loss) for _, step, loss, _ in lines}


@pytest.mark.system
def test_interrupted_run_is_bit_identical(job: StartJob, tmp_path: Path) -> None:
    """An interrupted run equals the uninterrupted one bit for bit."""
    whole = job("resume.py", "--steps", "40", flags=["--checkpoint-dir", str(tmp_path / "whole")])
    faults = [Fault(1, 13, "SIGKILL"), Fault(0, 27, "SIGKILL"), Fault(1, 38, "exit 3")]
    hurt = job("resume.py", "--steps", "40", faults=faults, flags=["--checkpoint-dir", str(tmp_path / "hurt")])
    assert (whole.wait(), hurt.wait()) == (0, 0)
    assert hurt.file("digest") == whole.file("digest")
    assert losses(hurt) == losses(whole)
    assert [(event["round"], event["step"]) for event in hurt.events("resumed")] == [(2, 10), (3, 25), (4, 35)]
    # Nothing that a checkpoint holds is trained again.
    for number, saved in ((2, 10), (3, 25), (4, 35)):
        assert min(step for round_, step in hurt.steps() if round_ == number) == saved + 1


@pytest.mark.system
def test_stopped_and_submitted_again_with_fewer_workers(job: StartJob, tmp_path: Path) -> None:
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--rdzv-id", "mine"]
    first = job("resume.py", "--steps", "100000", flags=flags)
    first.step(12)
    first.process.terminate()
    assert first.wait() == 128 + signal.SIGTERM
    stopped_at = max(first.steps())[1]
    assert first.event("checkpoint_saved", step=stopped_at)  # a stop saves, and then loses nothing
    assert first.event("job_ended")["reason"] == f"stopped by SIGTERM; the next run resumes from step {stopped_at}"
    again = job("resume.py", "--steps", str(stopped_at + 10), workers="1", flags=flags)
    whole = job("resume.py", "--steps", str(stopped_at + 10), flags=["--checkpoint-dir", str(tmp_path / "whole")])
    assert again.wait() == 0
    assert again.event("resumed", step=stopped_at, round=2, from_round=1)
    assert [event["round"] for event in again.events("group_started")] == [2]
    assert whole.wait() == 0
    assert sorted(losses(again)) == list(range(stopped_at + 1, stopped_at + 11))
    assert {**losses(first), **losses(again)} == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.system
def test_signal_to_every_process_saves(job: StartJob, tmp_path: Path) -> None:
    """As Slurm does without cgroups, LSF, and systemd in a scope; a node of its own in c10d has one process more."""
    meet = ["--nnodes", "1:2", "--rdzv-id", "mine", "--rdzv-conf", "last_call_timeout=0,is_host=1"]
    meet += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--local-addr", "127.0.0.1"]
    run = job("resume.py", "--steps", "100000", flags=["--checkpoint-dir", str(tmp_path / "checkpoints"), *meet])
    run.step(12)
    everybody = [run.pid, *descendants(run.pid)]
    assert {"elasticd-store", "elasticd-c10d-h"} <= {comm_of(pid) for pid in everybody}
    for pid in everybody:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert run.event("checkpoint_saved", step=max(run.steps())[1])
    assert not run.events("worker_exited", requested=False)
    assert not any(complaint in run.err for complaint in ("does not answer", "warm launcher", "store was killed"))


@pytest.mark.system
def test_a_crash_during_a_checkpoint_write(job: StartJob, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    run = job("resume.py", "--steps", "20", "--ballast", str(1 << 26), flags=["--checkpoint-dir", str(directory)])
    run.step(5)
    names = until(lambda: unfinished(directory), "a checkpoint being written")
    run.kill(0, round=1)
    # The checkpoint is not needed: its state, or a newer one, is in memory, whoever writes it.
    assert run.wait(120) == 0
    resumed = run.event("resumed", round=2)
    assert ", in memory" in resumed["reason"]
    assert all(int(name.partition("-s")[2].partition(".")[0]) <= resumed["step"] for name in names), names
    assert not unfinished(directory)
    assert run.event("job_ended", step=20)


def unfinished(directory: Path) -> set[str]:
    """What lies in the directory and is no checkpoint under its final name."""
    return {name for name in os.listdir(directory) if not name.startswith("r") and "lock" not in name}


def test_two_jobs_into_one_directory(job: StartJob, tmp_path: Path) -> None:
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    first = job("resume.py", "--steps", "100000", flags=[*flags, "--rdzv-id", "first"])
    first.event("round_published")
    second = job("resume.py", "--steps", "10", flags=[*flags, "--rdzv-id", "second"])
    assert second.wait() == 2
    (line,) = second.err.splitlines()
    assert line.startswith("elasticd run: error:")
    assert "first" in line
    assert str(tmp_path / "checkpoints") in line
    first.process.terminate()
    assert first.wait() == 128 + signal.SIGTERM


def on_a_small_disk(directory: Path) -> list[str]:
    """A command's head that gives the job a disk of its own, of 4 MB, 3 of them taken; it goes with the job."""
    directory.mkdir()
    mount = 'mount -t tmpfs -o size=4m none "$0" && head -c 3M /dev/zero > "$0/filler" && exec "$@"'
    for unshare in (["unshare", "-m"], ["unshare", "-r", "-m"]):
        if not subprocess.run([*unshare, "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True).returncode:
            return [*unshare, "sh", "-c", mount, str(directory)]
    return []


@pytest.mark.system
def test_full_and_read_only_disk(job: StartJob, tmp_path: Path) -> None:
    """A full disk and a read only one stop nobody."""
    directory = tmp_path / "disk"
    prefix = on_a_small_disk(directory)
    if not prefix:  # without the right to mount: the library's tests do the same with a limit on file sizes
        shutil.rmtree(directory)
        return
    how = ["--ballast", "1100000", "--keep", "1", "--disk", str(directory), "--free-at", "12", "--remount", "18", "23"]
    run = job("resume.py", "--steps", "30", *how, prefix=prefix, flags=["--checkpoint-dir", str(directory)])
    assert run.wait() == 0
    assert run.file("freed").split() == ["12"]
    assert run.file("remounted").split() == ["18", "23"]
    failed = {event["step"]: event["reason"] for event in run.events("checkpoint_failed")}
    assert set(failed) == {5, 10, 20}
    assert "No space left" in failed[5]
    assert "Read-only" in failed[20]
    assert [event["step"] for event in run.events("checkpoint_saved")] == [15, 25, 30]
    assert run.event("job_ended", outcome="succeeded", restarts=0)


@pytest.mark.system
def test_state_is_restored_in_any_locale_and_directory(job: StartJob, tmp_path: Path) -> None:
    """From memory after a fault, and from the disk by the next run."""
    in_ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    how: dict[str, Any] = {
        "work": tmp_path / "caf\udce9",
        "env": in_ascii,
        "flags": ["--checkpoint-dir", "checkpoints"],
    }
    first = job("donor.py", "--steps", "20", "--every", "10", faults=[Fault(1, 14, "SIGKILL")], **how)
    assert first.wait() == 0
    assert first.event("resumed", round=2)["step"] == 13
    second = job("donor.py", "--steps", "22", **how)
    assert second.wait() == 0
    assert second.event("resumed", round=3)["step"] == 20
