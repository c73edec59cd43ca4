"""How the bytes of a file get to the disk."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from elasticd.checkpointing.atomic_write import Staging, staging_path, write_file


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
