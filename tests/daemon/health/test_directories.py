"""Real file systems: full, read-only, without inodes, and one whose server does not answer."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd_agent.system.processes import procfs
from elasticd_daemon.health import directories
from elasticd_daemon.health.result import EVERY_JOBS_DIRECTORY
from tests.daemon.health.conftest import Node, until

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MNT_FORCE, MNT_DETACH = 1, 1, 2
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mnt"
    path.mkdir()
    if LIBC.mount(b"none", os.fsencode(path), b"tmpfs", 0, b"size=256k,nr_inodes=40") != 0:
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    yield path
    LIBC.umount2(os.fsencode(path), MNT_DETACH)


def test_good_directory_is_left_unchanged(node: Node) -> None:
    before = os.stat(node.directory).st_mtime_ns
    found = node.run()[f"disk {node.directory}"]
    assert found.outcome == "passed"
    assert found.why.endswith("free, writable")
    assert (os.listdir(node.directory), os.stat(node.directory).st_mtime_ns) == ([], before)


def test_missing_own_directory_is_judged_by_its_parent(node: Node) -> None:
    path = node.tmp / "not" / "there" / "yet"
    found = node.with_settings(state_dir=path).with_health(directories=(path.parent,)).run()
    assert (found[f"disk {path}"].outcome, found[f"disk {path.parent}"].outcome) == ("passed", "failed")
    assert (found[f"disk {path}"].directory, found[f"disk {path.parent}"].directory) == ("", str(path.parent))
    assert not (node.tmp / "not").exists()


def test_file_system_without_o_tmpfile(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what an old kernel makes of the flag: EISDIR
    left = node.directory / f".elasticd-health-{os.uname().nodename}"
    left.symlink_to(node.tmp / "elsewhere")  # of a look that was cut short, or somebody's trap
    directories.try_write(str(node.directory))
    assert os.listdir(node.directory) == []
    assert not (node.tmp / "elsewhere").exists()


@needs_root
def test_root_squash_passes_with_a_remark(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(directory: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directories, "try_write", refused)
    found = directories.check_directory("d", str(node.directory), 1)
    assert (found.outcome, "root_squash" in found.why) == ("passed", True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (
        directories.check_directory("d", str(node.directory), 1).why
        == f"{node.directory} is not writable: Permission denied"
    )


@pytest.mark.parametrize(
    ("make", "why"), [("missing", "cannot be read: No such file or directory"), ("file", "is not a directory")]
)
def test_missing_directory(node: Node, make: str, why: str) -> None:
    path = node.tmp / make
    if make == "file":
        path.touch()
    found = node.with_health(directories=(path,)).run()[f"disk {path}"]
    assert (found.outcome, found.why) == ("failed", f"{path} {why}")


@needs_root
def test_full_directory(node: Node, tmpfs: Path) -> None:
    node.with_health(directories=(tmpfs,), disk_free_min_bytes=64 << 10)
    assert node.run()[f"disk {tmpfs}"].outcome == "passed"
    (tmpfs / "big").write_bytes(b"x" * (200 << 10))
    assert node.run()[f"disk {tmpfs}"].why == f"{tmpfs} has 56 KiB free, less than 64 KiB"
    with pytest.raises(OSError, match="No space"):
        (tmpfs / "more").write_bytes(b"x" * (200 << 10))
    found = node.with_health(disk_free_min_bytes=0)
    assert found.checks() is not None
    assert directories.check_directory("d", str(tmpfs), 0).why == f"{tmpfs} is not writable: No space left on device"


@needs_root
def test_full_state_directory_concerns_new_jobs_only(node: Node, tmpfs: Path) -> None:
    """Its users can fill it: no running job is moved, and who has most of it is named."""
    for job, size in (("one.1", 40), ("two.7", 200)):
        (tmpfs / "jobs" / job / "logs").mkdir(parents=True)
        (tmpfs / "jobs" / job / "logs" / "out").write_bytes(b"x" * (size << 10))
    os.chown(tmpfs / "jobs" / "two.7", 1234, -1)
    found = node.with_settings(state_dir=tmpfs).with_health(disk_free_min_bytes=512 << 10).run()[f"disk {tmpfs}"]
    assert (found.outcome, found.directory) == ("failed", EVERY_JOBS_DIRECTORY)
    assert found.why.endswith("less than 512 KiB; most of it, 200 KiB, has job two.7 of uid 1234")


def test_many_folders_of_jobs_do_not_make_the_check_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that is late counts against the node, and moves the jobs of all users."""
    for number in range(50):
        (tmp_path / "jobs" / "one.1" / str(number)).mkdir(parents=True)
    scanned: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scanned.append(path) or scandir(path))
    monkeypatch.setattr(directories, "LARGEST_JOB_TIMEOUT_S", -1.0)
    assert directories.describe_largest_job(str(tmp_path)) == ""
    assert len(scanned) == 2, "the jobs, and the first folder of the first one"


@needs_root
def test_directory_without_free_inodes(node: Node, tmpfs: Path) -> None:
    for number in range(25):
        (tmpfs / str(number)).touch()
    why = node.with_health(directories=(tmpfs,)).run()[f"disk {tmpfs}"].why
    assert why == f"{tmpfs} has 14 of 40 inodes left: too many files"


@needs_root
def test_read_only_directory(node: Node, tmpfs: Path) -> None:
    assert LIBC.mount(None, os.fsencode(tmpfs), None, 32 | MS_RDONLY, None) == 0  # MS_REMOUNT
    assert "is mounted read-only" in node.with_health(directories=(tmpfs,)).run()[f"disk {tmpfs}"].why


class DeadMount:
    """A FUSE file system that greets the kernel and never answers again, as a server that is gone: who asks, hangs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requested = 0
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0".encode()
        if LIBC.mount(b"dead", os.fsencode(path), b"fuse", 0, options) != 0:
            os.close(self._fd)
            pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        """linux/fuse.h: fuse_in_header, fuse_init_in -> fuse_out_header, fuse_init_out."""
        while True:
            try:
                request = os.read(self._fd, 1 << 20)
            except OSError:  # ENODEV: it is not mounted any more
                return
            _, opcode, unique = struct.unpack_from("<IIQ", request)
            if opcode == 26:
                major, minor = struct.unpack_from("<II", request, 40)
                body = struct.pack("<IIIIHHII", major, min(minor, 31), 0, 0, 0, 0, 1 << 16, 1).ljust(64, b"\0")
                os.write(self._fd, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)
            else:
                self.requested += 1

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        for abort in Path("/sys/fs/fuse/connections").glob("*/abort"):
            if int(abort.parent.name) == os.minor(self._device()):
                abort.write_text("1")
        LIBC.umount2(os.fsencode(self.path), MNT_FORCE | MNT_DETACH)
        self._thread.join(60)
        os.close(self._fd)

    def _device(self) -> int:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[4] == str(self.path):
                major, _, minor = fields[2].partition(":")
                return os.makedev(int(major), int(minor))
        return 0


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[DeadMount]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/fuse")
    path = tmp_path / "dead"
    path.mkdir()
    dead = DeadMount(path)
    yield dead
    dead.close()


@needs_root
def test_dead_mount_costs_one_process_over_many_runs(node: Node, dead: DeadMount) -> None:
    node.with_health(directories=(dead.path, node.directory))
    found = node.run()
    assert found[f"disk {node.directory}"].outcome == "passed"
    reading = found[f"disk {dead.path}"]
    assert reading.outcome == "failed"
    assert reading.why.startswith("no result within 5 s")
    assert dead.requested, "nobody asked the dead mount"
    assert "survives SIGKILL (state D in " in reading.why
    pid = int(reading.why.partition("process ")[2].split()[0])
    for _ in range(3):
        requested = dead.requested
        assert node.run()[f"disk {dead.path}"].why == f"{reading.why}; it still hangs"
        assert dead.requested == requested
    dead.close()
    until(lambda: procfs.state(pid) in ("", "Z"), "end of the process that hung")
    assert node.run()[f"disk {dead.path}"].outcome == "passed"
