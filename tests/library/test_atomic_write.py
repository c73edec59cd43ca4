"""How the bytes of a file get to the disk."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from elasticd.checkpointing.storage.atomic_write import Staging, staging_path, sweep, write_file
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
            sweep(tmp_path, 9)
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
    sweep(tmp_path, 9)
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
    sweep(tmp_path, 9)
    assert not rest.exists()
