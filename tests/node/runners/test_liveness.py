"""A job's folder of another user: links in it are not followed, and only its owner's processes can be named."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from elasticd_agent.model.job_dir import JobFiles, job_files
from elasticd_agent.node.runners import liveness as alive
from elasticd_agent.node.runners.manager import RunnerManager
from elasticd_agent.node.runners.spawn import Account, spawn
from elasticd_agent.node.runners.spec import (
    MAX_EXIT_BYTES,
    RunnerExit,
    RunnerSpec,
    StoreSecrets,
    read_exit,
    read_spec,
    write_exit,
)
from elasticd_agent.system.files import replace_file


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_lock_that_is_a_link_is_refused(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    link(precious, tmp_path / "lock")
    with pytest.raises(OSError, match=r"symbolic links|another name"):
        alive.take_lock(tmp_path / "lock")
    assert precious.read_text() == "mine"


def test_no_write_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    files = JobFiles(tmp_path)
    (tmp_path / "exit.spare").symlink_to(precious)
    (tmp_path / ".order.json.new").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        write_exit(files, RunnerExit("j", 1, 0, "succeeded", "done"))
    replace_file(files.runner_spec, b"{}")
    assert precious.read_text() == "mine"
    assert files.runner_spec.read_bytes() == b"{}"


def test_lock_owner(tmp_path: Path) -> None:
    """Another user's process cannot be named."""
    path = tmp_path / "lock"
    fd = alive.take_lock(path)
    assert fd is not None
    assert alive.is_locked(path)
    assert alive.lock_owner(path) == alive.ProcessIdentity.of(os.getpid())
    if os.geteuid() == 0:  # only root's agent runs jobs of others
        os.chown(path, 65534, 65534)
        assert alive.lock_owner(path) is None, "a job's user had named a process of root's"
    os.close(fd)
    assert not alive.is_locked(path)


def test_lock_lasts_as_long_as_any_copy_of_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = alive.take_lock(path)
    assert fd is not None
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[fd]
    ) as keeper:
        os.close(fd)
        assert alive.is_locked(path)
        assert keeper.pid in alive.processes_with_open(path)
        assert alive.take_lock(path) is None
    assert not alive.is_locked(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_special_files_do_not_block(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """The deciding thread looks at these; the job's user could have it wait, or read, for ever."""
    files = JobFiles(tmp_path)
    for path in (files.lock, files.runner_exit, files.runner_spec, files.output):
        make(path)
    assert not alive.is_locked(files.lock), "what the job's user put there keeps no slots"
    assert alive.lock_owner(files.lock) is None
    assert read_exit(files) is None
    with pytest.raises(OSError, match=r"not a plain file|symbolic links"):
        read_spec(files)
    with pytest.raises(OSError, match=r"not a plain file|symbolic links|No such device"):
        spawn(files, 0, Account.of(None), StoreSecrets())


def test_exit_too_large_for_the_store_is_ignored(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    write_exit(files, RunnerExit("j", 1, 1, "failed", "." * MAX_EXIT_BYTES))
    assert read_exit(files) is None
    write_exit(files, RunnerExit("j", 1, 1, "failed", "short"))
    last = read_exit(files)
    assert last is not None and last.reason == "short"
    write_exit(files, RunnerExit("j", 1, 2, "refused", "." * (MAX_EXIT_BYTES // 2)))
    last = read_exit(files)
    assert last is not None and len(last.reason) == 2000, "a card of three such would be too large for etcd"


ORDER = RunnerSpec("mine", 1, "n1", (0,), "{}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's agent runs jobs of others")
def test_spec_of_another_user_is_ignored(tmp_path: Path) -> None:
    """The agent registers adopted jobs and their results in the store."""
    files, lines = job_files(tmp_path, "mine", 1), list[str]()
    files.root.mkdir(parents=True)
    replace_file(files.runner_spec, ORDER.to_json(), 65534)
    assert (files.runner_spec.stat().st_uid, files.runner_spec.stat().st_mode & 0o777) == (0, 0o640)
    with closing(RunnerManager(tmp_path, lambda: None, lines.append)) as runners:
        assert [over.key for over in runners.adopt()] == [("mine", 1)]
        os.chown(files.runner_spec, 65534, 65534)
        assert runners.adopt() == []
    assert lines == [f"{files.runner_spec}: [Errno 1] it belongs to user 65534: '{files.runner_spec}'; ignored"]


HOLDS = """
import sys
from pathlib import Path
from elasticd_agent.node.runners import liveness as alive
lock = alive.take_lock(Path(sys.argv[1]))
print("has it", flush=True)
sys.stdin.read()
"""


def test_runner_is_alive_without_a_free_file_descriptor(tmp_path: Path) -> None:
    """A runner that counts as dead is killed after a while, with all its processes."""
    files, lines, before = job_files(tmp_path, "mine", 1), list[str](), resource.getrlimit(resource.RLIMIT_NOFILE)
    files.root.mkdir(parents=True)
    replace_file(files.runner_spec, ORDER.to_json())
    with (
        closing(RunnerManager(tmp_path, lambda: None, lines.append)) as runners,
        subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(files.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as runner,
    ):
        assert runner.stdout is not None
        assert runner.stdout.readline() == "has it\n"
        assert runners.adopt() == []
        (known,) = runners.alive()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            assert runners.poll(time.monotonic()) == []
            assert runners.alive() == (known,)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        runner.communicate()
        assert [over.key for over in runners.poll(time.monotonic())] == [("mine", 1)]


def test_links_have_no_lock_keepers_second_names_have(tmp_path: Path) -> None:
    """What keeps a dead runner's lock is killed, by root: a link to /dev/null would have been everybody."""
    (tmp_path / "lock").symlink_to("/dev/null")
    with open("/dev/null"), open(tmp_path / "ours", "w"):
        assert list(alive.processes_with_open(tmp_path / "lock")) == []
        assert list(alive.processes_with_open(tmp_path / "ours")) == [os.getpid()]
        os.link(tmp_path / "ours", tmp_path / "second")
        assert list(alive.processes_with_open(tmp_path / "second")) == [os.getpid()]


def test_second_name_of_a_lock_keeps_no_slots(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = alive.take_lock(path)
    assert fd is not None
    os.link(path, tmp_path / "lock2")
    assert alive.is_locked(path)
    os.close(fd)
    assert not alive.is_locked(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's agent runs jobs of others")
def test_lock_of_another_user_keeps_no_slots(tmp_path: Path) -> None:
    """With fs.protected_hardlinks = 0 a user can link a lock that is held for ever, such as the agent's."""
    fd = alive.take_lock(tmp_path / "agent.lock")
    assert fd is not None
    (tmp_path / "job").mkdir()
    os.link(tmp_path / "agent.lock", tmp_path / "job" / "lock")
    os.chown(tmp_path / "job", 65534, 65534)
    assert not alive.is_locked(tmp_path / "job" / "lock")
    assert alive.is_locked(tmp_path / "agent.lock")
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's agent runs jobs of others")
@pytest.mark.parametrize("name", ["runner.log", "lock", "exit.spare"])
def test_file_of_root_in_the_users_folder_is_not_given_away(name: str) -> None:
    """A hard link whose other name was removed: the old version of a file that was replaced, such as a password."""
    with tempfile.TemporaryDirectory() as place:  # pytest's directories are closed to others
        os.chmod(place, 0o711)
        _start_in_prepared_folder(Path(place), name)


def _start_in_prepared_folder(state: Path, name: str) -> None:
    nobody, spec = Account.of("nobody"), RunnerSpec("mine", 1, "n1", (0,), "{}")
    files = job_files(state, "mine", 1)
    files.root.mkdir(parents=True)
    secret = files.root / name
    replace_file(secret, b"a secret")
    with closing(RunnerManager(state, lambda: None, lambda line: None)) as runners:
        with pytest.raises(PermissionError):
            runners.refuse(spec, nobody, "why") if name == "exit.spare" else runners.start(spec, nobody, StoreSecrets())
        assert runners.alive() == ()
    assert (secret.stat().st_uid, secret.stat().st_mode & 0o777, secret.read_bytes()) == (0, 0o600, b"a secret")
    replace_file(state / "own", b"")
    assert (state / "own").stat().st_uid == 0, "the thread is root again"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's agent runs jobs of others")
def test_only_the_job_users_lock_keepers_are_killed(tmp_path: Path) -> None:
    files, lines = job_files(tmp_path, "mine", 1), list[str]()
    files.root.mkdir(parents=True)
    replace_file(files.runner_spec, ORDER.to_json())
    os.chown(files.root, 65534, 65534)
    keep = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    fd = alive.take_lock(files.lock)
    assert fd is not None
    os.fchown(fd, 65534, 65534)
    with (
        closing(RunnerManager(tmp_path, lambda: None, lines.append)) as runners,
        subprocess.Popen(keep, stdin=subprocess.PIPE, pass_fds=[fd]) as roots,
        subprocess.Popen(["sleep", "60"], pass_fds=[fd], user=65534) as theirs,
    ):
        os.close(fd)
        try:
            assert runners.adopt() == []
            (runner,) = runners._runners.values()
            assert {process.pid for process in runners._lock_keepers(runner)} == {theirs.pid}
        finally:
            theirs.kill()
            roots.communicate()


def test_spec_in_another_jobs_folder_is_ignored(tmp_path: Path) -> None:
    files, lines = job_files(tmp_path, "yours", 7), list[str]()
    files.root.mkdir(parents=True)
    replace_file(files.runner_spec, ORDER.to_json())
    write_exit(files, RunnerExit("mine", 1, 0, "succeeded", "done"))
    with closing(RunnerManager(tmp_path, lambda: None, lines.append)) as runners:
        assert runners.adopt() == []
    assert lines == [f"{files.runner_spec}: it is of job mine number 1; ignored"]
