"""One directory, one job: real processes that hold the lock, die, or compete for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.checkpointing.storage import directory_lock
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.errors import DirectoryInUse

HOLD = """
import sys
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.errors import DirectoryInUse
lock = DirectoryLock(*sys.argv[1:4])
try:
    lock.acquire()
    print("held", flush=True)
except DirectoryInUse as error:
    print(error, flush=True)
for line in sys.stdin:
    lock.release()
    print("released", flush=True)
"""


class Holder:
    """Another process that took the lock, or says why not."""

    def __init__(self, directory: Path, job: str, run: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, directory, job, run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    @property
    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def release(self) -> str:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def holders(directory: Path, *who: tuple[str, str]) -> Iterator[list[Holder]]:
    started = [Holder(directory, *each) for each in who]
    try:
        yield started
    finally:
        for each in started:
            each.close()


@contextlib.contextmanager
def acquired(directory: Path, job: str, run: str) -> Iterator[DirectoryLock]:
    lock = DirectoryLock(directory, job, run)
    lock.acquire()
    yield lock
    lock.release()


def test_lock_refuses_other_run_until_released(tmp_path: Path) -> None:
    with holders(tmp_path, ("train", "run-1")) as (first,):
        assert first.answer == "held"
        for job, run in (("train", "run-2"), ("other", "run-1")):
            with pytest.raises(DirectoryInUse, match=r"held by run 'run-1' of job 'train' \(first process \d+ on"):
                DirectoryLock(tmp_path, job, run).acquire()
        assert first.release() == "released"
        with acquired(tmp_path, "train", "run-2") as lock:
            assert lock.unlocked is None


def test_lock_is_shared_by_processes_of_one_run(tmp_path: Path) -> None:
    with holders(tmp_path, *[("job", "run")] * 3) as all_of_one_run:
        assert [each.answer for each in all_of_one_run] == ["held"] * 3
        for each in all_of_one_run:
            with pytest.raises(DirectoryInUse):
                DirectoryLock(tmp_path, "job", "next").acquire()
            each.release()
        with acquired(tmp_path, "job", "next"):
            pass


def test_lock_held_by_stopped_zombie(tmp_path: Path) -> None:
    """A stopped zombie does not lock out its own run, and its death releases the lock."""
    with holders(tmp_path, ("job", "run")) as (zombie,):
        assert zombie.answer == "held"
        os.kill(zombie.process.pid, signal.SIGSTOP)
        with acquired(tmp_path, "job", "run"):
            pass
        with pytest.raises(DirectoryInUse):
            DirectoryLock(tmp_path, "job", "next").acquire()
        os.kill(zombie.process.pid, signal.SIGKILL)
        zombie.process.wait()
        with acquired(tmp_path, "job", "next"):
            pass


def test_lock_race_has_one_winner(tmp_path: Path) -> None:
    runs = [("job", run) for run in "ababab"]
    with holders(tmp_path, *runs) as everyone:
        answer = [each.answer for each in everyone]
        winners = {run for (_, run), each in zip(runs, answer, strict=True) if each == "held"}
        assert len(winners) == 1
        assert answer.count("held") == 3, answer
        assert all("is held by run" in each for each in answer if each != "held")


def test_lock_acquire_and_release_are_idempotent(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "made" / "here", "job", "run")
    lock.release()
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.release()
    assert os.listdir(tmp_path / "made" / "here") == [".lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
def test_lock_that_root_makes_is_of_the_owner_of_the_directory(tmp_path: Path) -> None:
    """One that is there is not root's to give away."""
    os.chown(tmp_path, 4001, 4002)
    for owner in (4001, 4003):
        with acquired(tmp_path, "job", "run"):
            assert (tmp_path / ".lock").stat().st_uid == owner
        os.chown(tmp_path / ".lock", 4003, 4002)


def test_lock_ignores_stale_name_in_file(tmp_path: Path) -> None:
    for left in (b"", b"\xff\x00", b"[]", b'{"job": "x"}', b"{" * 100_000):
        (tmp_path / ".lock").write_bytes(left)
        with acquired(tmp_path, "job", "run"), holders(tmp_path, ("job", "run")) as (same,):
            assert same.answer == "held"


def test_lock_in_unwritable_directory_raises_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        DirectoryLock(tmp_path / "file" / "below", "job", "run").acquire()


# A kernel that answers every F_SETLK with ENOLCK, as one does for an NFS mount without its lock service: by seccomp, so
# it needs no mount and no rights. The numbers are the kernel's own (linux/filter.h, linux/seccomp.h, asm/unistd.h).
WITHOUT_LOCKS = """
import ctypes, errno, platform, struct, sys
FCNTL = {"x86_64": 72, "aarch64": 25}[platform.machine()]
F_SETLK = 6
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
program = b"".join(struct.pack("HBBI", *each) for each in [
    (LOAD, 0, 0, 0), (EQUAL, 0, 3, FCNTL), (LOAD, 0, 0, 24), (EQUAL, 0, 1, F_SETLK),
    (RETURN, 0, 0, 0x00050000 | errno.ENOLCK), (RETURN, 0, 0, 0x7FFF0000)])
memory = ctypes.create_string_buffer(program)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(memory)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()

from elasticd.checkpointing.storage.directory_lock import DirectoryLock
first, second = DirectoryLock(sys.argv[1], "job", "run"), DirectoryLock(sys.argv[1], "another", "run")
first.acquire()
second.acquire()
print(first.unlocked == second.unlocked, first.unlocked)
"""


def test_lock_on_file_system_without_locks_warns(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error", "-c", WITHOUT_LOCKS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"True {tmp_path}: this file system has no locks (No locks available)")
    assert done.stderr.count("this file system has no locks") == 2  # logging's last resort shows warnings


class Kernel:
    """Grants the kinds of locks that are `free`; the answer to others is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int, *free: int) -> None:
        self.error, self.free = error, {fcntl.LOCK_UN, *free}
        self.asked: list[int] = []
        monkeypatch.setattr(fcntl, "lockf", self._lock)
        monkeypatch.setattr(directory_lock, "_TIMEOUT_S", 0.05)

    def _lock(self, _: int, kind: int) -> None:
        self.asked.append(kind & ~fcntl.LOCK_NB)
        if self.asked[-1] not in self.free:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_lock_that_the_file_system_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    Kernel(monkeypatch, error)
    lock = DirectoryLock(tmp_path, "job", "run")
    lock.acquire()
    lock.release()
    assert (lock.unlocked or "").startswith(f"{tmp_path}: this file system has no locks ({os.strerror(error)})")


def test_error_at_the_lock_is_no_lack_of_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Kernel(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        DirectoryLock(tmp_path, "job", "run").acquire()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EAGAIN])
def test_directory_that_another_run_is_just_taking_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Its name is not in the file yet."""
    Kernel(monkeypatch, error)
    with pytest.raises(DirectoryInUse, match="is held by another run; this is run 'run' of job 'job'"):
        DirectoryLock(tmp_path, "job", "run").acquire()


def test_lock_is_shared_with_its_own_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with acquired(tmp_path, "job", "run"):
        pass
    kernel = Kernel(monkeypatch, errno.EAGAIN, fcntl.LOCK_SH)
    with acquired(tmp_path, "job", "run"):
        assert kernel.asked == [fcntl.LOCK_EX, fcntl.LOCK_SH]
    for job, run in (("job", "other"), ("other", "run")):
        kernel.asked.clear()
        with pytest.raises(DirectoryInUse, match="is held by run 'run' of job 'job'"):
            DirectoryLock(tmp_path, job, run).acquire()
        assert kernel.asked[-1] == fcntl.LOCK_UN


def test_lock_that_is_free_a_moment_later_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a directory that is no copy of an object store has none to release."""

    class Later(Kernel):
        def _lock(self, fd: int, kind: int) -> None:
            if self.asked.count(fcntl.LOCK_EX) == 2:
                self.free |= {fcntl.LOCK_EX, fcntl.LOCK_SH}
            super()._lock(fd, kind)

    kernel = Later(monkeypatch, errno.EAGAIN)
    monkeypatch.setattr(directory_lock, "_TIMEOUT_S", 60.0)
    with acquired(tmp_path, "job", "run") as lock:
        assert kernel.asked.count(fcntl.LOCK_EX) == 3
        lock.release_store()
