"""Checkpoints in an object store: a real S3 server (moto's), and what it does when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elasticd.checkpointing.choice import Choice, OpenState, StateSource
from elasticd.checkpointing.memory import last_write, state_files
from elasticd.checkpointing.memory.buffers import Buffers, Snapshot, WriteTask, donated_number
from elasticd.checkpointing.state_opener import StateOpener
from elasticd.checkpointing.storage import object_store, object_url
from elasticd.checkpointing.storage.checkpoint_files import relink
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import find_damage, lineage, list_names, open_verified
from elasticd.checkpointing.storage.manifest import MANIFEST, NO_CHECKSUM, STATE, Manifest
from elasticd.checkpointing.storage.object_store import ObjectStore, store_of
from elasticd.checkpointing.storage.object_url import resolve, url_of
from elasticd.checkpointing.storage.retention import retain, set_aside, went_back_mark
from elasticd.errors import CheckpointCorrupt, DirectoryInUse, ObjectStoreError, UsageError
from elasticd_agent.cli.checkpoints import checkpoints as command
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage
from tests.library.test_last_write import LATER, NAMES, LastNode, content, end
from tests.library.test_state_files import FILES, held
from tests.s3_server import BUCKET, ROOT, S3

JOB = "lm"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    import fsspec.asyn

    # fsspec's thread runs for as long as the process does; it has one helper.
    loop = fsspec.asyn.get_loop()
    loop.call_soon_threadsafe(loop.set_default_executor, ThreadPoolExecutor(1))
    fsspec.asyn.sync(loop, asyncio.to_thread, int)
    server = S3(tmp_path_factory.mktemp("s3") / "log")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    disconnect()
    server.close()


@pytest.fixture
def s3(servers: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Without faults at the beginning; patience is short."""
    monkeypatch.setattr(object_store, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(object_store, "RESTORE_PATIENCE_S", 2.0)
    servers.fault("clear")
    object_store.cached_store.cache_clear()
    yield servers
    object_store.cached_store.cache_clear()


def disconnect() -> None:
    """As in a new process."""
    import s3fs
    from fsspec.implementations.dirfs import DirFileSystem

    object_store.cached_store.cache_clear()
    for kind in (s3fs.S3FileSystem, DirFileSystem):
        kind.clear_instance_cache()
    gc.collect()  # ends their sessions


class Node:
    """One node's copy of the store, and saves by its rank 0."""

    def __init__(self, folder: Path, prefix: str, run: str = "1", claims: bool = True, scheme: str = "s3") -> None:
        self.directory = resolve(f"{scheme}://{BUCKET}/{prefix}", str(folder))
        self.run = run
        self.lock = DirectoryLock(self.directory, JOB, run)
        if claims:
            self.lock.acquire()

    @property
    def store(self) -> ObjectStore:
        found = store_of(self.directory)
        assert found is not None
        return found

    @property
    def files(self) -> Any:
        """The prefix of the bucket, past elasticd."""
        import fsspec

        url = str(url_of(self.directory))
        client = fsspec.filesystem(url.partition("://")[0], use_listings_cache=False)
        return fsspec.filesystem("dir", path=url.partition("://")[2], fs=client)

    def save(self, step: int, round: int = 1, size: int = 100, mark: float = 0.0) -> str:
        state = {"weights": torch.full((size,), step + mark), "step": step}
        whose = {"world_size": 1, "job": JOB, "run": self.run}
        return checkpoints.save(self.directory, round=round, step=step, parent=None, state=state, **whose).path.name

    def steps(self) -> list[int]:
        """Of the lineage, each loaded and checked."""
        entries, _ = lineage(self.directory)
        for entry in entries:
            loaded = checkpoints.load(entry)
            assert loaded["step"] == entry.manifest.step
            assert bool((loaded["weights"].floor() == loaded["step"]).all())
        return [entry.manifest.step for entry in entries]

    def skipped(self) -> list[str]:
        return [each.why for each in lineage(self.directory)[1]]

    def uploads(self) -> list[str]:
        """Keys of uploads in parts that were neither completed nor aborted."""
        bucket, _, prefix = str(url_of(self.directory)).removeprefix("s3://").partition("/")
        found = self.files.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        return [each["Key"] for each in found.get("Uploads", ())]

    def keys(self) -> set[str]:
        return {key for key in self.files.find("") if not key.startswith(".")}


@pytest.fixture
def nodes(s3: S3, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Node] = []

    def make(name: str = "a", **options: Any) -> Node:
        node = Node(tmp_path / name, request.node.name.replace("/", "-"), **options)
        made.append(node)
        return node

    yield make
    for node in made:
        node.lock.release()


FAULTS = {
    "503 at the state": {"do": "503", "method": "PUT", "path": STATE, "count": 3},
    "500 at the manifest": {"do": "500", "method": "PUT", "path": MANIFEST, "count": 3},
    "cut at the state": {"do": "cut", "method": "PUT", "path": STATE, "count": 3},
    "cut at the manifest": {"do": "cut", "method": "PUT", "path": MANIFEST, "count": 3},
    "lost answer of the manifest": {"do": "lost answer", "method": "PUT", "path": MANIFEST, "count": 1},
    "lost answer of the state": {"do": "lost answer", "method": "PUT", "path": STATE, "count": 1},
    "503 at every look": {"do": "503", "method": "HEAD", "path": "", "count": 3},
    "503 at listings": {"do": "503", "method": "GET", "path": "list-type", "count": 3},
    "the listing is late": {"do": "hide", "method": "GET", "path": "list-type", "count": 1000, "seconds": 60},
    "cut while it is read": {"do": "cut", "method": "GET", "path": STATE, "count": 3},
    "cut while leftovers are listed": {"do": "cut", "method": "GET", "path": r"\?uploads", "count": 1000},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_store_that_fails_for_a_while(fault: dict[str, Any], s3: S3, nodes: Any) -> None:
    writer = nodes()
    writer.save(10)
    s3.fault(**fault)
    writer.save(20)
    # Another node finds it, copies it and compares the checksums.
    reader = nodes("b", claims=False)
    assert reader.steps()[0] == 20
    assert writer.steps() == [20, 10], "what this node knows is not forgotten where the listing is late"
    assert s3.hits()[-1] >= min(fault["count"], 2)


IN_PARTS = {
    "500 at a part": {"do": "500", "method": "PUT", "path": "partNumber=2", "count": 3},
    "503 at each part": {"do": "503", "method": "PUT", "path": "partNumber", "count": 9},
    "cut in a part": {"do": "cut", "method": "PUT", "path": "partNumber=2", "count": 3},
    "lost answer of a part": {"do": "lost answer", "method": "PUT", "path": "partNumber=3", "count": 2},
    "500 at the last request": {"do": "500", "method": "POST", "path": "uploadId", "count": 3},
    "lost answer of the last request": {"do": "lost answer", "method": "POST", "path": "uploadId", "count": 1},
    "500 at the first request": {"do": "500", "method": "POST", "path": r"\?uploads", "count": 3},
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """S3's smallest parts in place of s3fs's 50 MB; returns the numbers of a state of three of them."""
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda size, **options: 5 << 20)
    return (13 << 20) // 4


@pytest.mark.system
@pytest.mark.parametrize("fault", IN_PARTS.values(), ids=IN_PARTS)
def test_an_upload_in_parts(fault: dict[str, Any], s3: S3, nodes: Any, small_parts: int) -> None:
    writer = nodes()
    s3.fault(**fault)
    writer.save(10, size=small_parts)
    assert s3.hits()[-1] == fault["count"], "the fault did not fire"
    assert nodes("b", claims=False).steps() == [10]
    assert writer.uploads() == []


def test_an_upload_in_parts_that_fails(s3: S3, nodes: Any, small_parts: int) -> None:
    """Nothing half is listed, and the parts are aborted."""
    writer = nodes()
    s3.fault("403", method="PUT", path="partNumber=3")
    with pytest.raises(ObjectStoreError, match="access denied"):
        writer.save(10, size=small_parts)
    assert writer.keys() == set()
    assert writer.uploads() == []


@pytest.mark.system
@pytest.mark.parametrize("then", ["same-file", "next-run"])
def test_a_writer_is_killed_between_two_parts(s3: S3, nodes: Any, small_parts: int, then: str) -> None:
    """Where the upload is left as it is; the next writer of the same file, and the next run, abort it."""
    writer = nodes()
    s3.fault("delay", method="PUT", path="partNumber=2", seconds=600)
    script = "from tests.library.test_object_store import save_in_parts; save_in_parts()"
    place = {"URL": str(url_of(writer.directory)), object_url.CACHE_VARIABLE: str(writer.directory.parents[2])}
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **place}, cwd=ROOT)
    deadline = time.monotonic() + 60
    while not s3.hits()[-1]:
        assert process.poll() is None and time.monotonic() < deadline, "it did not begin to put the second part"
        time.sleep(0.02)
    process.kill()
    process.wait()
    reader = nodes("b", claims=False)
    assert writer.uploads() and not writer.keys() and reader.steps() == []
    if then == "next-run":
        nodes("c", run="2")
    else:
        writer.save(10, size=small_parts)
        assert reader.steps() == [10]
    assert writer.uploads() == []


@pytest.mark.parametrize("key", ["other/r1-s10/state.pt", "model.bin"])
def test_an_upload_of_others_below_the_prefix_is_left_alone(nodes: Any, key: str) -> None:
    first = nodes()
    bucket, _, prefix = str(url_of(first.directory)).removeprefix("s3://").partition("/")
    first.files.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{key}")
    nodes("b", run="2").save(10)
    assert first.uploads() == [f"{prefix}/{key}"]


def save_in_parts() -> None:
    import s3fs.core

    s3fs.core.calculate_chunksize = lambda size, **options: 5 << 20
    directory = resolve(os.environ["URL"])
    DirectoryLock(directory, JOB, "1").acquire()
    whose = {"world_size": 1, "job": JOB, "run": "1"}
    checkpoints.save(
        directory, round=1, step=10, parent=None, state={"weights": torch.ones(13 << 18), "step": 10}, **whose
    )


@pytest.mark.system
def test_the_server_dies_in_an_upload(
    s3: S3, nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    s3 = S3(tmp_path / "log")
    request.addfinalizer(s3.close)
    request.addfinalizer(disconnect)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.environment["AWS_ENDPOINT_URL"])
    disconnect()
    writer = nodes()
    writer.save(10)
    s3.fault("die", method="PUT", path=STATE)
    with pytest.raises(ObjectStoreError, match=r"s3://bucket/.*connect"):
        writer.save(20)
    assert s3.process.wait(10)
    assert not [each for each in list_names(writer.directory) if each.step == 20], "nothing is left of it"
    s3.close()
    s3.start()
    writer.save(30)
    assert nodes("b", claims=False).steps() == [30]
    assert writer.steps() == [30], "the server that came back empty has no other"


def test_a_killed_upload_is_no_checkpoint_and_is_deleted(nodes: Any) -> None:
    """Its files are there, its manifest is not."""
    writer = nodes()
    for step in (10, 20, 30, 40):
        writer.save(step)
    writer.files.rm_file(f"r1-s40/{MANIFEST}")
    reader = nodes("b", claims=False)
    assert reader.steps() == [30, 20, 10]
    assert "manifest.json is missing" in reader.skipped()
    for step in (50, 60):
        writer.save(step)
    retain(writer.directory, 1, keep=2)
    assert writer.keys() == {f"r1-s{step}/{file}" for step in (50, 60) for file in (STATE, MANIFEST)}
    assert writer.steps() == reader.steps() == [60, 50]


def test_a_writer_killed_before_any_request(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was committed is the newest; the next run goes on from it, and deletes the rest."""
    import s3fs

    call, left = s3fs.S3FileSystem._call_s3, [0]

    async def call_until_the_end(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if not method.startswith(("get", "head", "list")):
            left[0] -= 1
            if left[0] < 0:
                raise PermissionError("killed")  # also what it does then: nothing of it reaches the store
        return await call(self, method, *args, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call_until_the_end)
    restored, is_over, run = [], False, 0
    while not is_over:
        left[0], run = 1000, run + 1
        writer = nodes(f"writer-{run}", run=str(run))
        writer.save(10 * run + 1)
        retain(writer.directory, 1, keep=1)
        assert writer.keys() == {f"r1-s{10 * run + 1}/{file}" for file in (STATE, MANIFEST)}
        left[0] = run - 1
        try:
            writer.save(10 * run + 2)
            retain(writer.directory, 1, keep=1)
            is_over = True
        except ObjectStoreError:
            pass
        left[0] = 1000
        writer.lock.release()
        reader = nodes(f"reader-{run}", claims=False)
        restored.append(reader.steps()[0] - 10 * run)
    assert restored == sorted(restored) and set(restored) == {1, 2}, restored
    assert run > 3


DAMAGE = {
    "missing": (lambda files, key: files.rm_file(key), "state.pt is missing in "),
    "short": (lambda files, key: files.pipe_file(key, b"short"), "state.pt has 5 bytes in "),
    "a bit": (
        lambda files, key: files.pipe_file(key, _flipped(files.cat_file(key))),
        "state.pt does not match its checksum",
    ),
}


def _flipped(data: bytes) -> bytes:
    return bytes([*data[:200], data[200] ^ 1, *data[201:]])


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_in_the_store_is_found(what: str, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    change, why = DAMAGE[what]
    writer = nodes()
    writer.save(10)
    writer.save(20)
    change(writer.files, f"r1-s20/{STATE}")
    reader = nodes("b", claims=False)
    entries, skipped = lineage(reader.directory)
    if what == "a bit":
        assert find_damage(entries[0]) is not None
        with pytest.raises(CheckpointCorrupt, match=why):
            checkpoints.load(entries[0])
    else:
        assert [entry.manifest.step for entry in entries] == [10]
        assert why in skipped[0].why
    assert command(["verify", url_of(reader.directory)]) == 1
    assert "r1-s10: whole" in capsys.readouterr().out


def test_a_later_run_takes_the_store(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The earlier one can neither commit nor delete, nor take it back."""
    first = nodes()
    for step in (10, 20, 30):
        first.save(step)
    second = nodes("b", run="2")
    assert "was not released by run '1' of job 'lm'" in caplog.text
    before = first.keys()
    with pytest.raises(ObjectStoreError, match="was taken by run '2' of job 'lm'"):
        first.save(40)
    with pytest.raises(ObjectStoreError, match="was taken by run '2'"):
        retain(first.directory, 1, keep=1)
    assert first.keys() == before
    third = nodes("c", run="1", claims=False)
    with pytest.raises(DirectoryInUse, match="Stop one of them"):
        third.lock.acquire()
    second.save(40, round=2)
    second.store.release(JOB, "2")
    caplog.clear()
    nodes("d", run="3").save(50, round=3)
    assert not [each for each in caplog.records if each.name.startswith("elasticd")], "it had been released"


def test_a_name_is_committed_once(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that both believe to own the store: the store lets one of them put the manifest."""
    first, second = nodes(), nodes("b")
    first.save(10)
    monkeypatch.setattr(ObjectStore, "free_name", lambda self, name: name)
    with pytest.raises(ObjectStoreError, match="is there already: another run writes there"):
        second.save(10, mark=0.5)


def test_a_step_saved_twice(nodes: Any) -> None:
    node = nodes()
    assert [node.save(10, mark=mark / 4) for mark in range(3)] == ["r1-s10", "r1-s10.again", "r1-s10"]
    reader = nodes("b", claims=False)
    (entry,), _ = lineage(reader.directory)
    assert checkpoints.load(entry)["weights"][0] == 10.5
    assert node.keys() == {f"r1-s10/{STATE}", f"r1-s10/{MANIFEST}"}


def test_a_round_that_resumes_copies_in_the_store(s3: S3, nodes: Any) -> None:
    nodes().save(10)
    other = nodes("b")
    entries, _ = lineage(other.directory)
    s3.fault("503", method="PUT", path=f"r2-s10/{STATE}", count=1)
    relink(other.directory, entries[0], 2)
    assert {f"r2-s10/{STATE}", f"r2-s10/{MANIFEST}"} < other.keys()
    assert s3.hits()[-1] == 1
    assert nodes("c", claims=False).steps() == [10, 10]


def test_going_back(nodes: Any) -> None:
    node = nodes()
    for step in (10, 20, 30):
        node.save(step)
    set_aside(node.directory, 10)
    other = nodes("b", claims=False)
    assert other.steps() == [10]
    assert went_back_mark(other.directory, 10).exists()
    assert {key.partition("/")[0] for key in sorted(other.keys())} == {"r1-s10", "r1-s20.aside", "r1-s30.aside"}


def test_only_the_newest_is_kept_on_the_node(nodes: Any) -> None:
    node = nodes()
    for step in (10, 20, 30):
        node.save(step)
    assert [path.parent.name for path in node.directory.glob(f"*/{STATE}")] == ["r1-s30"]
    shutil.rmtree(node.directory)
    assert node.steps() == [30, 20, 10]


def test_a_store_that_was_emptied_is_not_a_new_job(nodes: Any) -> None:
    node = nodes()
    node.save(10)
    node.files.rm(node.files.find(""))
    with pytest.raises(ObjectStoreError, match=r"\.owner\.json is gone: was the prefix, or the bucket, deleted"):
        node.steps()
    node.save(20)
    assert node.steps() == nodes("b", claims=False).steps() == [20]


def test_a_damaged_copy_is_made_again(nodes: Any) -> None:
    node = nodes()
    node.save(10)
    (copy,) = node.directory.glob(f"*/{STATE}")
    copy.write_bytes(_flipped(copy.read_bytes()))
    assert node.steps() == [10]


@pytest.mark.parametrize("local_rank", [0, 1])
def test_no_rank_opens_a_damaged_copy(nodes: Any, local_rank: int) -> None:
    """Whichever of a node's ranks is the first."""
    node = nodes()
    node.save(10)
    (entry,), _ = lineage(node.directory)
    copy = entry.path / STATE
    content = copy.read_bytes()
    copy.write_bytes(_flipped(content))
    rank = SimpleNamespace(environment=SimpleNamespace(local_rank=local_rank))
    opened = OpenState()
    choice = Choice(StateSource.DISK, entry.manifest, entry.path.name)
    assert StateOpener(cast("Any", rank), node.directory, opened, []).open_here(choice) == ""
    assert os.pread(opened.fd, len(content), 0) == content
    opened.close()


@pytest.mark.system
def test_wrong_credentials(s3: S3, nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    disconnect()
    with pytest.raises(ObjectStoreError, match=r"^s3://bucket/\S+: access denied"):
        nodes()
    disconnect()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "no"), "access denied (no)"),
        (PermissionError("not yours\nat all"), "access denied (not yours)"),
        (ImportError(" no codec\n"), "no codec"),
        (ImportError(), "ImportError"),
    ],
)
def test_error_of_a_store_is_one_line(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses:
        def cat_file(self, _: str) -> bytes:
            raise error

    monkeypatch.setattr("fsspec.filesystem", lambda *_, **__: Refuses())
    with pytest.raises(ObjectStoreError) as raised:
        ObjectStore(resolve("s3://bucket/run", str(tmp_path)), "s3://bucket/run").read_small_file("r1-s1")
    assert str(raised.value) == f"s3://bucket/run: {said}"


def test_no_such_bucket(s3: S3, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no bucket for s3://other/prefix"):
        command(["list", "s3://other/prefix"])
    lock = DirectoryLock(resolve("s3://other/prefix", str(tmp_path)), JOB, "1")
    with pytest.raises(ObjectStoreError, match="there is no bucket for s3://other/prefix"):
        lock.acquire()


def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_url.importlib.util, "find_spec", lambda name: None)
    directory = resolve("gs://bucket/run", str(tmp_path))
    sentence = r"checkpoints in gs://bucket/run need the package gcsfs: pip install 'elasticd\[objects\]'"
    with pytest.raises(UsageError, match=sentence):
        command(["list", "gs://bucket/run"])
    with pytest.raises(ObjectStoreError, match=sentence):
        DirectoryLock(directory, JOB, "1").acquire()


def test_the_command(nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    node = nodes()
    url = url_of(node.directory)
    for step in (10, 20, 30):
        node.save(step)
    assert command(["list", url]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["r1-s30", "r1-s20", "r1-s10"]
    assert all(line.endswith("can be restored") for line in listed)
    assert command(["show", url]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 30
    assert command(["verify", url]) == 0
    assert command(["prune", url, "--keep", "1"]) == 1
    assert "is held by run '1' of job 'lm'" in capsys.readouterr().out
    node.store.release(JOB, "1")
    assert command(["prune", url, "--keep", "1"]) == 0
    assert node.steps() == [30]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("gs://bucket", "gs://bucket"),
        ("az://container/a/", "az://container/a"),
        (Path("s3://bucket/a"), "s3://bucket/a"),
        (Path.cwd() / "s3://bucket/a", "s3://bucket/a"),
        ("/data/checkpoints", None),
        ("relative/s3", None),
        ("ftp://bucket/a", None),
    ],
)
def test_resolve(given: str, url: str | None, tmp_path: Path) -> None:
    found = resolve(given, str(tmp_path))
    assert url_of(found) == url
    assert found.is_relative_to(tmp_path) is (url is not None)
    assert found.is_absolute() and resolve(found, str(tmp_path)) == found


def test_url_and_package_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = resolve("az://container/a", str(tmp_path))
    assert [object_url.path_or_url(each) for each in (copy, tmp_path)] == ["az://container/a", str(tmp_path)]
    assert [object_url.package_of(each) for each in (copy, tmp_path)] == ["adlfs", None]
    monkeypatch.setitem(object_url.PACKAGES, "az", "fsspec")  # which is there
    assert [object_url.missing_package_reason(each) for each in (copy, tmp_path)] == [None, None]


def test_relative_place_of_copies_is_the_same_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer works in another directory than the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(object_url.CACHE_VARIABLE, "copies")
    assert resolve("s3://bucket/run") == tmp_path / "copies" / "s3:" / "bucket" / "run"


@pytest.mark.parametrize("given", ["s3://", "s3://bucket/../../etc"])
def test_no_bucket(given: str) -> None:
    with pytest.raises(UsageError, match="names no bucket"):
        resolve(given)


def test_a_copy_of_another_user(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = nodes()
    if os.geteuid() == 0:
        os.chown(node.directory.parent, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ObjectStoreError, match="belongs to another user; set ELASTICD_OBJECT_CACHE"):
        lineage(node.directory)


def test_a_store_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's memory: without ETags, and with directories."""
    monkeypatch.setitem(object_url.PACKAGES, "memory", "fsspec")
    node = Node(tmp_path, "run", claims=False)
    node.directory = resolve("memory://bucket/run", str(tmp_path))
    node.lock = DirectoryLock(node.directory, JOB, "1")
    node.lock.acquire()
    for step in (10, 20, 30):
        node.save(step)
    node.save(30)
    retain(node.directory, 1, keep=2)
    shutil.rmtree(node.directory)
    assert node.steps() == [30, 20]
    node.lock.release()


def test_manifests_are_put_last(s3: S3, nodes: Any) -> None:
    node = nodes()
    s3.fault("403", method="PUT", path=MANIFEST)
    with pytest.raises(ObjectStoreError):
        node.save(10)
    assert node.keys() == {f"r1-s10/{STATE}"}
    assert node.steps() == []


def put_together(made: list[Node], token: str, gives_up: str = "") -> list[Any]:
    """What becomes of a sharded checkpoint on each node, its result or its error; None in the list: a lost node."""

    def write(number: int) -> Any:
        with held(made[number].directory, number, token) as (own, snapshot):
            try:
                return state_files.write_own_files(own, snapshot, lambda: gives_up)
            except OSError as error:
                return str(error)

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(write, range(len(made))))


def test_nodes_put_a_sharded_checkpoint_together(s3: S3, nodes: Any) -> None:
    """Each node has a copy of its own; the first one commits what all have put. Each time it gets another name."""
    made = [nodes(name) for name in "abc"]
    for token, name in (("aa", "r1-s10"), ("bb", "r1-s10.again"), ("cc", "r1-s10")):
        s3.fault("503", method="PUT", path="distcp", count=2)
        results = put_together(made, token)
        assert results[0].path.name == name and results[1:] == [None, None]
        reader = nodes("reader", claims=False)
        (entry,), _ = lineage(reader.directory)
        assert entry.path.name == name and find_damage(entry) is None
        for file, expected in ((file, each) for files in FILES.values() for file, each in files.items()):
            fd = open_verified(entry, file)
            assert os.pread(fd, len(expected) + 1, 0) == expected
            os.close(fd)
        assert reader.keys() == {f"{name}/{file}" for files in FILES.values() for file in (*files, MANIFEST)}
        assert not list(made[1].directory.glob(".*staging"))


def test_no_node_puts_its_part_once_a_later_run_has_taken_the_store(nodes: Any) -> None:
    node = nodes("a")
    nodes("b", run="2")
    with held(node.directory, 1) as (own, snapshot):
        part = state_files.write_other_part(node.directory, snapshot.draft, "aa", 1, own)
    assert "was taken by run '2' of job 'lm'" in part["error"]
    assert node.keys() == set()


def test_no_sharded_checkpoint_without_a_node(nodes: Any) -> None:
    made = [nodes(name) for name in "ab"]  # of three
    assert put_together(made, "aa", gives_up="another node did not write its part")[0] == (
        "another node did not write its part"
    )
    assert nodes("reader", claims=False).steps() == []


@pytest.fixture
def ends(s3: S3, nodes: Any, tmp_path: Path) -> Iterator[Any]:
    """Nodes at the end of a job, each with a copy of its own."""
    made: list[LastNode] = []

    def make(number: int) -> LastNode:
        directory = nodes(f"cache-{number}", claims=False).directory
        made.append(LastNode(tmp_path / f"node-{number}", number, directory, whose=(JOB, "1")))
        return made[-1]

    yield make
    for each in made:
        each.close()


def left(node: Any) -> list[int]:
    """The steps of the lineage, each file verified."""
    entries, _ = verified_lineage(node.directory)
    for entry in entries:
        for name in [STATE, *entry.manifest.files]:
            with os.fdopen(open_verified(entry, name), "rb", 0) as file:
                assert file.read() == content(name, entry.manifest.step)
    return [entry.manifest.step for entry in entries]


@pytest.mark.parametrize(
    ("there", "sharded"),
    [
        pytest.param([1], False, id="rank 0's node is lost"),
        pytest.param([1], True, id="rank 0's node is lost, shards", marks=pytest.mark.system),
        pytest.param([0, 1, 2], False, id="all", marks=pytest.mark.system),
        pytest.param([0, 1, 2], True, id="all, shards", marks=pytest.mark.system),
    ],
)
def test_one_of_the_nodes_that_are_left_puts_the_last_state(
    s3: S3, nodes: Any, ends: Any, there: list[int], sharded: bool
) -> None:
    """Others than rank 0's node have all shards or one."""
    every = [ends(number) for number in there]
    for each in every:
        if sharded:
            each.save_files(12, LATER if each is every[0] and len(there) > 1 else NAMES)
        else:
            each.save(12)
    s3.fault("delay", method="PUT", path=STATE, seconds=0.5, count=10)
    results = end(every)
    assert [(each["step"], each["why"]) for each in results] == [(12, "")] * len(there)
    assert s3.hits()[-1] == 1, "one node puts it"
    assert left(nodes("reader", claims=False)) == [12]


def test_last_state_goes_beside_the_save_that_rank_0s_node_is_putting(s3: S3, nodes: Any, ends: Any) -> None:
    """Of the same step, with other bytes: neither spoils the other."""
    usual, other = nodes("a"), ends(1)
    s3.fault("delay", method="PUT", path=f"r1-s12/{STATE}", seconds=1.0, count=1)
    other.save(12)
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(usual.save, 12)
        deadline = time.monotonic() + 30
        while not s3.hits()[-1]:
            assert time.monotonic() < deadline
        assert end([other])[0]["step"] == 12
        assert saved.result() == "r1-s12"
    entries, skipped = verified_lineage(nodes("reader", claims=False).directory)
    assert {entry.path.name for entry in entries} <= {"r1-s12", "r1-s12.again"} and entries
    assert skipped == []


@pytest.mark.system
def test_last_state_that_another_node_has_begun_to_put_is_left_to_it(nodes: Any, ends: Any) -> None:
    """And where that node is lost, too, the checkpoint before is what remains."""
    before, node = nodes("a"), ends(1)
    before.save(10)
    assert before.store.reserve("r1-s12.again", "a lost node")
    node.save(12)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(node.node.flush)
        assert node.node.process is not None
        time.sleep(1)
        node.node.end()
        assert "no node has put all of it" in flushed.result()["why"]
    assert before.keys() == {f"r1-s10/{STATE}", f"r1-s10/{MANIFEST}", "r1-s12.again/.reserved"}
    assert before.steps() == [10]


@pytest.mark.parametrize("number", [0, 1])
def test_without_conditional_puts_rank_0s_node_puts_the_last_state(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def reserve(*_: object) -> bool:
        raise NotImplementedError

    monkeypatch.setattr(ObjectStore, "reserve", reserve)
    monkeypatch.setattr(last_write, "UNBEGUN_PARTS_WAIT_S", 0.0)
    node = nodes()
    task = WriteTask(str(node.directory), 3, "a test", "", "", number, 0.0, node=number, nodes=2)
    draft = Manifest(1, 12, None, 2, len(content(STATE, 12)), NO_CHECKSUM, JOB, "1", None, time.time())
    with open(os.memfd_create("headers"), "rb") as headers, open(os.memfd_create("buffer"), "r+b", 0) as buffer:
        buffer.write(content(STATE, 12))
        last = last_write.LastWrite(Buffers(headers.fileno(), [buffer.fileno()]), lambda: False)
        with pytest.raises(OSError, match="no node has put all of it") if number else contextlib.nullcontext():
            last.write(0, Snapshot(draft, donated_number(12, 1), task))
    assert left(node) == ([] if number else [12])


def test_copies_are_not_kept_where_another_user_has_made_the_directory(tmp_path: Path) -> None:
    """All users may write to /var/tmp, and who owns the directory could replace a checkpoint."""
    place = tmp_path / "objects"
    assert object_url.make_own_directory(str(place)) == str(place)
    assert place.stat().st_mode & 0o777 == 0o700
    assert object_url.make_own_directory(str(place)) == str(place)
    place.chmod(0o777)
    with pytest.raises(UsageError, match="is not this user's alone: set ELASTICD_OBJECT_CACHE"):
        object_url.make_own_directory(str(place))
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is not this user's alone"):
        object_url.make_own_directory(str(place))
