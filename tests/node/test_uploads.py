"""Uploaded working directories: from a directory to the copy in a job's folder."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_agent.cli.packing import pack
from elasticd_agent.node import keys as names
from elasticd_agent.node import uploads
from elasticd_agent.store.memory import MemoryStore


def project(root: Path) -> Path:
    for name in ("train.py", "pkg/model.py", "pkg/__pycache__/model.pyc", ".git/HEAD", ".env", "run.sh"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (root / "run.sh").chmod(0o755)
    (root / "link.py").symlink_to("train.py")
    return root


def archive(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return gzip.compress(out.getvalue(), mtime=0)


def member(name: str, **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in more.items():
        setattr(info, field, value)
    return info


def header(name: str, fields: dict[str, str]) -> bytes:
    return member(name, pax_headers=fields).tobuf(tarfile.PAX_FORMAT)


MANY = {f"k{n}": "" for n in range(5000)}


def test_directory_arrives_as_it_was(tmp_path: Path) -> None:
    packed = pack(project(tmp_path / "project"))
    assert packed == pack(tmp_path / "project"), "the same files are stored once"
    store = MemoryStore()
    name = uploads.put(store, packed, lambda name: False)
    (tmp_path / "archive").write_bytes(uploads.read(store, name))
    uploads.unpack(tmp_path / "archive", tmp_path / "work")
    copied = {str(path.relative_to(tmp_path / "work")) for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert copied == {"train.py", "link.py", "pkg/model.py", "run.sh"}
    assert (tmp_path / "work" / "link.py").read_text() == "train.py"
    assert (tmp_path / "work" / "run.sh").stat().st_mode & 0o777 == 0o700
    (tmp_path / "work" / "train.py").write_text("changed by the job")
    uploads.unpack(tmp_path / "archive", tmp_path / "work")
    assert (tmp_path / "work" / "train.py").read_text() == "changed by the job", "a runner's restart keeps it"


def test_unused_archives_go_first(tmp_path: Path) -> None:
    store = MemoryStore()
    kept = [uploads.put(store, archive(member(f"f{n}")), lambda name: False) for n in range(uploads.MAX_KEPT)]
    assert uploads.put(store, archive(member("f0")), lambda name: False) == kept[0], "it is the newest now"
    new = uploads.put(store, archive(member("new")), lambda name: name == kept[1])
    assert uploads.read(store, kept[1]) and uploads.read(store, kept[0]) and uploads.read(store, new)
    with pytest.raises(UsageError, match="submit the job again"):
        uploads.read(store, kept[2])
    with pytest.raises(UsageError, match="as many as are kept"):
        uploads.put(store, archive(member("one more")), lambda name: True)
    assert len(store.list(names.UPLOAD)) == uploads.MAX_KEPT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive",
        gzip.compress(b"no tar" * 1000),
        archive(member("a"))[:30],
        archive(member("../above")),
        archive(member("/etc/passwd")),
        archive(member("a/../../b")),
        archive(member("link", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        archive(member("link", type=tarfile.LNKTYPE, linkname="/etc/passwd")),
        archive(member("device", type=tarfile.CHRTYPE)),
        archive(member("zeros", size=65 << 20)),
        archive(*(member(f"f{n}") for n in range(uploads.MAX_FILES + 1))),
        archive(member("a", pax_headers={"comment": "x" * (1 << 20)})),
        gzip.compress(b"".join(member("x").create_pax_global_header({"a": "b"}) for _ in range(2000)), mtime=0),
        b"x" * (uploads.MAX_BYTES + 1),
        archive(member("a", pax_headers={"path": "b\0c"})),
    ],
    ids=range(16),
)
def test_archives_that_are_refused(data: bytes) -> None:
    store = MemoryStore()
    with pytest.raises(UsageError, match="upload"):
        uploads.put(store, data, lambda name: False)
    assert store.list(names.ROOT) == {}


@pytest.mark.parametrize("each", [header, tarfile.TarInfo.create_pax_global_header], ids=["members", "archive"])
def test_headers_take_little_memory(each: Callable[..., bytes]) -> None:
    """Ten uploads at once must not fill the node's."""
    fields = [{f"{n}.{i}": "" for i in range(2000)} for n in range(60)]
    parts = [each(one) if each is not header else header("f", one) for one in fields]
    data = gzip.compress(b"".join(parts) + header("f", {}), mtime=0)
    assert len(data) < uploads.MAX_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="its headers are too large"):
            uploads.put(MemoryStore(), data, lambda name: False)
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


def test_archive_of_git_is_taken(tmp_path: Path) -> None:
    """Its global header names the commit; long names have headers of their own."""
    long = "/".join(["directory" * 12] * 9) + "/train.py"
    commit = tarfile.TarInfo.create_pax_global_header({"comment": "0" * 40})
    data = gzip.compress(commit + b"".join(header(f"{n}/{long}", {}) for n in range(300)), mtime=0)
    (tmp_path / "archive").write_bytes(data)
    assert uploads.put(MemoryStore(), data, lambda name: False)
    uploads.unpack(tmp_path / "archive", tmp_path / "work")
    assert (tmp_path / "work" / "299" / long).read_bytes() == b""


def test_large_directory_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    import random

    (tmp_path / "data.bin").write_bytes(random.Random(1).randbytes(800_000))
    (tmp_path / "train.py").write_text("x")
    with pytest.raises(UsageError, match=r"the largest files are data.bin \(800,000 bytes\), train.py"):
        pack(tmp_path)
    with pytest.raises(UsageError, match="not a directory"):
        pack(tmp_path / "train.py")


def test_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.txt").symlink_to("/sys/kernel/mm/transparent_hugepage/enabled")  # 4096 bytes, says its size
    with pytest.raises(UsageError, match=r"log.txt: unexpected end of data"):
        pack(tmp_path)
