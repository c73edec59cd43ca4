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
from elasticd_agent.job.run import remove_stale, runtime_directory
from elasticd_agent.job.worker_setup import WorkerSetup
from elasticd_agent.model.job import JobSpec, Mode, Policy
from elasticd_agent.model.records import Member, Round
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.workers.logs import JobLogs

HOLD = """
import sys
from pathlib import Path
from elasticd_agent.job.run import runtime_directory
with runtime_directory(Path(sys.argv[1])) as path:
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
def nobody() -> int:
    """A pid that nobody has."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    return ended.pid


@pytest.fixture
def other(tmp_path: Path, nobody: int) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """An agent that lives where its pid is nobody's here, as in a container with the same shared memory."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        yield process, path.rename(tmp_path / f"elasticd-{os.getuid()}-{nobody}-x")
        process.kill()


def test_runtime_directory_is_removed_at_the_end(tmp_path: Path) -> None:
    """It is gone when the agent is."""
    with runtime_directory(tmp_path / "run") as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "heartbeat-0").touch()
    assert not path.exists()


def test_stale_runtime_directories_are_removed(tmp_path: Path, other: tuple[subprocess.Popen[str], Path]) -> None:
    """What a killed agent left is swept and what another container uses is not."""
    process, path = other
    remove_stale(tmp_path)
    assert (path / "round-1").is_dir(), "an agent that lives lost its directory"
    process.kill()
    process.wait()
    remove_stale(tmp_path)
    assert not path.exists()


def test_new_runtime_directory_before_its_lock(tmp_path: Path, nobody: int) -> None:
    """One that has just been made is not taken away before it is locked."""
    young = Path(tempfile.mkdtemp(prefix=f"elasticd-{os.getuid()}-{nobody}-", dir=tmp_path))
    remove_stale(tmp_path)
    assert young.exists()
    (young / "round-1").mkdir()
    remove_stale(tmp_path)
    assert not young.exists()


def test_directories_of_others_are_left_alone_and_deep_ones_end_nothing(deep_place: Path, nobody: int) -> None:
    """All users may write to /dev/shm, and a name there is no proof of who made it."""
    script = """
import os, sys
os.mkdir(sys.argv[1], 0o777)
os.chdir(sys.argv[1])
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
"""
    own, other, file, link = (deep_place / f"elasticd-{os.getuid()}-{nobody}-{name}" for name in "abcd")
    for path in (own, other):
        subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    file.touch()
    (deep_place / "kept").mkdir()
    (deep_place / "kept" / "file").touch()
    link.symlink_to("kept")
    if os.geteuid() == 0:
        os.chown(other, 65534, 65534)
    remove_stale(deep_place)
    assert not own.exists()
    assert file.exists() and link.is_symlink() and (deep_place / "kept" / "file").exists()
    assert other.exists() == (os.geteuid() == 0), "another user's may hold anything"


def test_stale_directory_that_cannot_be_removed_costs_a_sentence(
    tmp_path: Path, nobody: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stale = tmp_path / f"elasticd-{os.getuid()}-{nobody}-a"
    (stale / "round-1").mkdir(parents=True)
    monkeypatch.setattr(run, "remove_tree", lambda path: None)
    remove_stale(tmp_path)
    assert [one.message for one in caplog.records] == [
        f"{stale}, which a killed agent has left, cannot be removed; it takes memory"
    ]


def test_deep_runtime_directory_is_removed_at_the_end(deep_place: Path) -> None:
    """A rank of the job may make one: its exit code is the job's all the same."""
    with runtime_directory(deep_place / "run") as path:
        deep = "for _ in range(1500):\n os.mkdir('d')\n os.chdir('d')"
        subprocess.run([sys.executable, "-c", f"import os\n{deep}"], cwd=path, check=True)
    assert not path.exists()


def test_files_of_older_rounds_are_removed(tmp_path: Path) -> None:
    """A flight recording has 0.9 MB, and this is memory."""
    spec = JobSpec(sys.executable, Mode.SCRIPT, "train.py", (), tmp_path, "j", "r", log_dir=Path(os.devnull))
    outlet = NonBlockingWriter(2)
    files = WorkerSetup(spec, Policy(), "n1", tmp_path, JobLogs(spec, tmp_path, outlet, outlet, print), gpus=False)
    for number in (1, 4, 7, 8):
        files.prepare(Round(number, (Member("n1", "i", (0,)),)), "127.0.0.1").observer.close()
    outlet.close()
    assert sorted(path.name for path in tmp_path.glob("round-*")) == ["round-7", "round-8"]
