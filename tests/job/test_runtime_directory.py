"""The agent's directory in memory: there while it lives, swept away later, and never another container's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd_agent.job import run
from elasticd_agent.job.run import remove_stale_directories, runtime_directory
from elasticd_agent.job.worker_setup import WorkerSetup
from elasticd_agent.model.job import EntrypointMode, JobSpec, Policy, Rendezvous
from elasticd_agent.model.records import Member, Round
from elasticd_agent.system.files import remove_tree
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.workers.logs import JobLogs

HOLD = """
import sys
from pathlib import Path
from elasticd_agent.job.run import runtime_directory
with runtime_directory(Path(sys.argv[1])) as (path, _):
    (path / "round-1").mkdir()
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def deep_place(tmp_path: Path) -> Iterator[Path]:
    """For directories that Python cannot remove, and so neither pytest."""
    yield tmp_path
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """An agent whose pid is in use here: one in another container with the same memory, or before a restart."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        path = Path(process.stdout.readline().strip())
        yield process, path.rename(tmp_path / f"elasticd-{os.getuid()}-{os.getpid()}-x")
        process.kill()


def test_runtime_directory_is_removed_at_the_end(tmp_path: Path) -> None:
    """It is gone when the agent is."""
    with runtime_directory(tmp_path / "run") as (path, _):
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "heartbeat-0").touch()
    assert not path.exists()


def test_stale_runtime_directories_are_removed(tmp_path: Path, other: tuple[subprocess.Popen[str], Path]) -> None:
    """What a killed agent left is swept and what another container uses is not."""
    process, path = other
    remove_stale_directories(tmp_path)
    assert (path / "round-1").is_dir(), "an agent that lives lost its directory"
    process.kill()
    process.wait()
    remove_stale_directories(tmp_path)
    assert not path.exists()


def test_new_runtime_directory_before_its_lock(tmp_path: Path) -> None:
    """One that has just been made is not taken away before it is locked."""
    young = Path(tempfile.mkdtemp(prefix=f"elasticd-{os.getuid()}-{os.getpid()}-", dir=tmp_path))
    remove_stale_directories(tmp_path)
    assert young.exists()
    (young / "round-1").mkdir()
    remove_stale_directories(tmp_path)
    assert not young.exists()


def test_directories_of_others_are_left_alone_and_deep_ones_end_nothing(deep_place: Path) -> None:
    """All users may write to /dev/shm, and a name there is no proof of who made it."""
    script = """
import os, sys
os.mkdir(sys.argv[1], 0o777)
os.chdir(sys.argv[1])
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
"""
    own, other, file, link = (deep_place / f"elasticd-{os.getuid()}-{os.getpid()}-{name}" for name in "abcd")
    for path in (own, other):
        subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    file.touch()
    (deep_place / "kept").mkdir()
    (deep_place / "kept" / "file").touch()
    link.symlink_to("kept")
    if os.geteuid() == 0:
        os.chown(other, 65534, 65534)
    remove_stale_directories(deep_place)
    assert not own.exists()
    assert file.exists() and link.is_symlink() and (deep_place / "kept" / "file").exists()
    assert other.exists() == (os.geteuid() == 0), "another user's may hold anything"


def test_stale_directory_that_cannot_be_removed_costs_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stale = tmp_path / f"elasticd-{os.getuid()}-{os.getpid()}-a"
    (stale / "round-1").mkdir(parents=True)
    monkeypatch.setattr(run, "remove_tree", lambda path: None)
    remove_stale_directories(tmp_path)
    assert [one.message for one in caplog.records] == [
        f"{stale}, which a killed agent has left, cannot be removed; it takes memory"
    ]


def test_deep_runtime_directory_is_removed_at_the_end(deep_place: Path) -> None:
    """A rank of the job may make one: its exit code is the job's all the same."""
    with runtime_directory(deep_place / "run") as (path, _):
        deep = "for _ in range(1500):\n os.mkdir('d')\n os.chdir('d')"
        subprocess.run([sys.executable, "-c", f"import os\n{deep}"], cwd=path, check=True)
    assert not path.exists()


def test_workers_ahead_have_a_place_that_the_job_can_give(tmp_path: Path) -> None:
    """A spare's is that of the last ranks. A second process of a slot follows the first."""

    def places(slots: tuple[int, ...], round: Round, most: int, nodes: int) -> list[tuple[str, ...]]:
        meet = Rendezvous("etcd", (("h", 1),), max_nodes=nodes) if nodes > 1 else Rendezvous()
        spec = JobSpec(sys.executable, EntrypointMode.SCRIPT, "train.py", (), tmp_path, "j", "r", max_workers=most,
                       spares=1, log_dir=Path(os.devnull), rendezvous=meet)  # fmt: skip
        outlet = NonBlockingWriter(2)
        logs = JobLogs(spec, tmp_path, outlet, outlet, print)
        files = WorkerSetup(spec, Policy(), "a", tmp_path, logs, gpus=False, cpus={})
        files.prepare_ahead(round, slots, "127.0.0.1")
        found = files.prepare_ahead(round, slots, "127.0.0.1").values()
        outlet.close()
        return [tuple(one.env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) for one in found]

    alone, others = Round(1, (Member("a", "i", (0, 1)),)), (Member("b", "i", (0, 1)), Member("c", "i", (0, 1)))
    assert places((2,), alone, 2, 1) == [("1", "1", "2")], "a spare slot"
    assert places((2,), alone, 3, 1) == [("2", "2", "3")], "a slot that is back"
    assert places((0, 1), Round(2, others), 2, 2) == [("2", "0", "4"), ("3", "1", "4")], "a spare node"
    assert places((0, 1), Round(3, others), 2, 3) == [("4", "0", "6"), ("5", "1", "6")], "a node that joins"


def test_files_of_older_rounds_are_removed(tmp_path: Path) -> None:
    """A flight recording has 0.9 MB, and this is memory."""
    spec = JobSpec(sys.executable, EntrypointMode.SCRIPT, "train.py", (), tmp_path, "j", "r", log_dir=Path(os.devnull))
    outlet = NonBlockingWriter(2)
    files = WorkerSetup(
        spec, Policy(), "n1", tmp_path, JobLogs(spec, tmp_path, outlet, outlet, print), gpus=False, cpus={}
    )
    for number in (1, 4, 7, 8):
        files.prepare(Round(number, (Member("n1", "i", (0,)),)), "127.0.0.1").observer.close()
    assert sorted(path.name for path in tmp_path.glob("round-*")) == ["round-7", "round-8"]
    remove_tree(tmp_path)
    with pytest.raises(OSError, match="was removed while the job ran, as systemd-logind does"):
        files.prepare(Round(9, (Member("n1", "i", (0,)),)), "127.0.0.1")
    outlet.close()
