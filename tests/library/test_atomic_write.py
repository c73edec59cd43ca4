"""How the bytes of a file get to the disk."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpointing.storage.atomic_write import (
    Staging,
    fsync_directory,
    is_abandoned,
    make_durable_directory,
    staging_path,
    sweep_unfinished,
    write_file,
)
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, Manifest


@pytest.mark.parametrize("size", [1, 4096, 5000, 4 << 20, (4 << 20) + 4096, (9 << 20) + 7])
def test_pages_are_written_as_any_bytes_are(tmp_path: Path, size: int) -> None:
    pages = memoryview(mmap.mmap(-1, size))
    pages[:] = os.urandom(size)
    written = [
        write_file(tmp_path / "pages", lambda file: file.write_pages(pages)),
        write_file(tmp_path / "bytes", lambda file: file.write(pages)),
    ]
    assert written[0] == written[1]
    assert (tmp_path / "pages").read_bytes() == (tmp_path / "bytes").read_bytes() == bytes(pages)


def test_staging_directory_of_several_processes_has_its_lock_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one of them takes it for the rest of a dead one, and deletes it."""
    shared, lockf = staging_path(tmp_path, 1, 5, "e"), fcntl.lockf
    there: list[bool] = []
    monkeypatch.setattr(fcntl, "lockf", lambda *how: (there.append(shared.exists()), lockf(*how)))
    with Staging(tmp_path, 1, 5, "e") as first:
        assert (first.path, there) == (shared, [False])
        with pytest.raises(FileExistsError), Staging(tmp_path, 1, 5, "e"):
            pass
        assert [*tmp_path.iterdir()] == [shared]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("shared", ["e", ""], ids=["shared", "own"])
@pytest.mark.parametrize("moment", ["made", "to-be-locked"])
def test_sweep_of_another_node_does_not_take_what_is_just_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, shared: str
) -> None:
    owner, name = (fcntl, "lockf") if moment == "to-be-locked" else (Path, "mkdir")
    once, call = [1], getattr(owner, name)

    def swept(*args: object, **more: object) -> None:
        if moment == "made":
            call(*args, **more)
        if once and once.pop():
            sweep_unfinished(tmp_path, 9)
        if moment == "to-be-locked":
            call(*args, **more)

    monkeypatch.setattr(owner, name, swept)
    with Staging(tmp_path, 1, 5, shared) as staging:
        assert not once
        write_file(staging.path / "state.pt", lambda file: file.write(b"whole"))
        assert [*tmp_path.iterdir()] == [staging.path]


def test_sweep_of_a_rest_leaves_the_directory_that_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, lockf = staging_path(tmp_path, 1, 5, "e"), fcntl.lockf
    shared.mkdir()
    (shared / "manifest.json").touch()

    def replaced(*how: int) -> None:
        shared.rename(tmp_path / "rest")
        shared.mkdir()
        (shared / "manifest.json").touch()
        lockf(*how)

    monkeypatch.setattr(fcntl, "lockf", replaced)
    sweep_unfinished(tmp_path, 9)
    assert shared.exists()


def test_published_staging_directory_leaves_the_next_one_of_its_name_alone(tmp_path: Path) -> None:
    """Another node may make it at once, and writes its own copy of the same state."""
    with Staging(tmp_path, 1, 5, "e") as first:
        first.publish(Manifest(1, 5, None, 1, 0, NO_CHECKSUM, "job", "run"))
        with Staging(tmp_path, 1, 5, "e") as second:
            first.__exit__(None, None, None)
            assert second.path.exists()


def test_sweep_takes_what_is_half_removed(tmp_path: Path) -> None:
    """Its manifest went first, and then the process that removed it."""
    rest = staging_path(tmp_path, 1, 5, "e")
    rest.mkdir()
    (rest / "state.pt").write_bytes(b"half")
    sweep_unfinished(tmp_path, 9)
    assert not rest.exists()


@pytest.mark.parametrize(("start", "size"), [(0, None), (5, None), (5, 0), (7, 3), (1000, 9 << 20), (4 << 20, 1 << 30)])
def test_part_of_another_file_is_copied(tmp_path: Path, start: int, size: int | None) -> None:
    content = os.urandom((9 << 20) + 7)
    (tmp_path / "source").write_bytes(content)
    with open(tmp_path / "source", "rb") as source:
        written = write_file(
            tmp_path / "copy", lambda file: (file.write(b"before"), file.copy_from(source.fileno(), start, size))
        )
    expected = b"before" + content[start : None if size is None else start + size]
    assert (tmp_path / "copy").read_bytes() == expected
    assert written == write_file(tmp_path / "expected", lambda file: file.write(expected))


def fails(usual: Any, error: int, when: Any = lambda *_: True) -> Any:
    """The system call, which fails where `when` is true of its arguments."""

    def call(*args: Any, **more: Any) -> Any:
        if when(*args):
            raise OSError(error, os.strerror(error))
        return usual(*args, **more)

    return call


def is_direct(_: object, flags: int, *more: object) -> bool:
    return bool(flags & os.O_DIRECT)


def test_file_system_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which some make the file before they refuse."""
    usual = os.open

    def opened(path: Any, flags: int, *more: Any, **how: Any) -> int:
        if flags & os.O_DIRECT:
            os.close(usual(path, flags & ~os.O_DIRECT, *more, **how))
            raise OSError(errno.EINVAL, "Invalid argument")
        return usual(path, flags, *more, **how)

    monkeypatch.setattr(os, "open", opened)
    write_file(tmp_path / "file", lambda file: file.write(b"whole"))
    assert (tmp_path / "file").read_bytes() == b"whole"
    monkeypatch.setattr(os, "open", fails(usual, errno.ENOSPC, is_direct))
    with pytest.raises(OSError, match="No space left on device"):
        write_file(tmp_path / "other", lambda file: file.write(b"whole"))


def test_disk_of_larger_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O_DIRECT refuses a write, and the page cache takes it; if that refuses, too, it is an error."""
    usual = os.write

    def is_refused(fd: int, _: object) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    content = os.urandom(8192)
    monkeypatch.setattr(os, "write", fails(usual, errno.EINVAL, is_refused))
    write_file(tmp_path / "file", lambda file: file.write(content))
    assert (tmp_path / "file").read_bytes() == content
    for error in (errno.EINVAL, errno.EIO):
        monkeypatch.setattr(os, "write", fails(usual, error))
        with pytest.raises(OSError, match=os.strerror(error)):
            write_file(tmp_path / f"other-{error}", lambda file: file.write(content))


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_directory_is_durable_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(os, "fsync", fails(os.fsync, error))
    if error != errno.EIO:
        fsync_directory(tmp_path)
        return
    with pytest.raises(OSError, match="Input/output error"):
        fsync_directory(tmp_path)


def test_names_of_new_directories_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    usual = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), usual(fd)))
    make_durable_directory(tmp_path / "a" / "b")
    assert sorted(synced) == [str(tmp_path), str(tmp_path / "a")]
    make_durable_directory(tmp_path / "a" / "b")
    assert len(synced) == 2


@pytest.mark.parametrize("error", [errno.EACCES, errno.EAGAIN, errno.ENOLCK])
def test_staging_directory_that_a_sweep_has_locked_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """And another one is made. On a file system without locks it is used, as no sweep can take it."""
    tried: list[int] = []
    monkeypatch.setattr(fcntl, "lockf", fails(fcntl.lockf, error, lambda *how: tried.append(1) or len(tried) == 1))
    with Staging(tmp_path, 1, 5) as staging:
        assert [*tmp_path.iterdir()] == [staging.path]
    assert len(tried) == (1 if error == errno.ENOLCK else 2)
    monkeypatch.setattr(fcntl, "lockf", fails(fcntl.lockf, errno.EAGAIN))
    with pytest.raises(FileNotFoundError, match="another process removes it"), Staging(tmp_path, 1, 5):
        pass
    assert [*tmp_path.iterdir()] == []


def test_staging_directory_is_abandoned_once_its_lock_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = staging_path(tmp_path, 1, 5, "e")
    assert is_abandoned(staging)
    staging.mkdir()
    assert is_abandoned(staging)
    (staging / "manifest.json").touch()
    assert is_abandoned(staging)
    monkeypatch.setattr(fcntl, "lockf", fails(fcntl.lockf, errno.EAGAIN))
    assert not is_abandoned(staging)
    sweep_unfinished(tmp_path, 9)
    assert staging.exists()
    sweep_unfinished(tmp_path, 1, with_older_rounds=True)
    assert staging.exists(), "it is of this round"
    sweep_unfinished(tmp_path, 9, with_older_rounds=True)
    assert not staging.exists()
    (tmp_path / "file").touch()
    assert not is_abandoned(tmp_path / "file")


def test_sweep_leaves_what_newer_rounds_are_writing(tmp_path: Path) -> None:
    abandoned = staging_path(tmp_path, 3, 5, "e")
    abandoned.mkdir()
    for own_round, is_left in ((2, True), (3, False)):
        sweep_unfinished(tmp_path, own_round)
        assert abandoned.exists() is is_left


def test_checkpoint_that_cannot_get_its_name_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(1, 5, None, 1, 0, NO_CHECKSUM, "job", "run")
    with Staging(tmp_path, 1, 5) as staging:
        monkeypatch.setattr(os, "rename", fails(os.rename, errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            staging.publish(manifest)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("in_the_way", [lambda path: path.touch(), lambda path: (path.mkdir(), (path / "x").touch())])
def test_checkpoint_takes_the_place_of_anything(tmp_path: Path, in_the_way: Any) -> None:
    """Also where a writer was killed before it had given the name to its own."""
    in_the_way(tmp_path / "r1-s5")
    manifest = Manifest(1, 5, None, 1, 0, NO_CHECKSUM, "job", "run")
    for _ in range(2):
        with Staging(tmp_path, 1, 5) as staging:
            assert staging.publish(manifest) == tmp_path / "r1-s5"
        assert [path.name for path in tmp_path.iterdir()] == ["r1-s5"]
        assert [path.name for path in (tmp_path / "r1-s5").iterdir()] == ["manifest.json"]
        (tmp_path / "r1-s5.again").mkdir()
        (tmp_path / "r1-s5.again" / "state.pt").touch()


def test_file_is_linked_or_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r1-s5").mkdir()
    (tmp_path / "r1-s5" / "state.pt").write_bytes(b"state")
    source = os.open(tmp_path / "r1-s5", os.O_RDONLY)
    try:
        with Staging(tmp_path, 2, 5) as staging:
            assert staging.link_or_copy("state.pt", source) is None
            assert (staging.path / "state.pt").stat().st_nlink == 2
        monkeypatch.setattr(os, "link", fails(os.link, errno.EMLINK))
        with Staging(tmp_path, 2, 5) as staging:
            assert staging.link_or_copy("state.pt", source) == write_file(
                tmp_path / "file", lambda file: file.write(b"state")
            )
            assert (staging.path / "state.pt").read_bytes() == b"state"
    finally:
        os.close(source)
