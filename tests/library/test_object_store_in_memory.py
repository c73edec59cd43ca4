"""What is asked of an object store, and what is kept of it here, over fsspec's store in this process's memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import fsspec.asyn
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from elasticd.checkpointing.storage import object_store, object_store_process, object_url
from elasticd.checkpointing.storage.checkpoint_files import relink
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import (
    Entry,
    find_damage,
    highest_round,
    lineage,
    open_verified,
    pull_from_store,
)
from elasticd.checkpointing.storage.manifest import MANIFEST, STATE
from elasticd.checkpointing.storage.object_store import ObjectStore, store_of
from elasticd.checkpointing.storage.object_url import resolve
from elasticd.checkpointing.storage.retention import retain, set_aside, went_back_mark
from elasticd.errors import DirectoryInUse, ObjectStoreError
from tests.library import checkpoints

URL = "memory://bucket/run"
Make = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _thread() -> None:
    """fsspec's, which runs for as long as the process does."""
    fsspec.asyn.get_loop()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A node's copy of the store by the node's name."""
    monkeypatch.setitem(object_url.PACKAGES, "memory", "fsspec")

    def make(name: str) -> Path:
        directory = resolve(URL, str(tmp_path / name))
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    forget_objects()  # those of another file's tests
    yield make
    forget_objects()


def forget_objects() -> None:
    object_store.cached_store.cache_clear()
    DirFileSystem.clear_instance_cache()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def objects() -> dict[str, bytes]:
    """The content of each object by its key, the one that was put first at the beginning."""
    return {key.removeprefix("/bucket/run/"): file.getvalue() for key, file in MemoryFileSystem.store.items()}


def change(key: str, content: bytes | None) -> None:
    """Past elasticd; None deletes it."""
    files = MemoryFileSystem()
    if content is None:
        files.rm_file(f"/bucket/run/{key}")
    else:
        files.pipe_file(f"/bucket/run/{key}", content)


def store(directory: Path) -> ObjectStore:
    found = store_of(directory)
    assert found is not None
    return found


def save(directory: Path, step: int, round: int = 1, mark: float = 0.0, parent: tuple[int, int] | None = None) -> Entry:
    state = {"weights": torch.full((10,), mark), "step": step}
    return checkpoints.save(directory, state=state, round=round, step=step, parent=parent)


def steps(directory: Path) -> list[int]:
    return [entry.manifest.step for entry in lineage(directory)[0]]


# --- which run may write ----------------------------------------------------------------------------------------------


def test_store_is_taken_from_a_run_that_has_not_released_it(node: Make) -> None:
    first, second, third = (store(node(name)) for name in "abc")
    assert (first.holder(), first.claim("job", "1"), first.claim("job", "1")) == (None, "", "")
    assert first.holder() == json_holder("1")
    assert second.claim("job", "2").startswith(f"{URL} was not released by run '1' of job 'job' on ")
    with pytest.raises(ObjectStoreError, match=r"was taken by run .2. of job .job. on .*; this is run .1. of job"):
        first.write_small_file("file")
    with pytest.raises(DirectoryInUse, match="was taken by run '2' of job 'job'"):
        first.claim("job", "1")
    first.release("job", "1")  # of no effect
    assert second.holder() == json_holder("2")
    second.release("job", "2")
    assert second.holder() is None
    first.write_small_file("file")
    assert third.claim("job", "3") == ""
    assert json.loads(objects()[".owner.json"])["superseded"] == [["job", "1"]]


def json_holder(run: str) -> str:
    return f"run {run!r} of job 'job' on {json.loads(objects()['.owner.json'])['host']}"


@pytest.mark.parametrize("content", [b"no JSON", b"[1]", b'{"job": "job"}'])
def test_record_that_was_overwritten_by_hand_is_of_nobody(node: Make, content: bytes) -> None:
    directory = node("a")
    store(directory).claim("job", "1")
    change(".owner.json", content)
    assert store(directory).holder() is None
    store(directory).write_small_file("file")  # claims it again
    assert store(directory).holder() == json_holder("1")


def test_record_of_an_earlier_version_counts(node: Make) -> None:
    change(".owner.json", b'{"job": "job", "run": "0", "host": "h", "superseded": []}')
    assert store(node("a")).holder() == "run '0' of job 'job' on h"


def test_who_has_not_claimed_the_store_may_read_it(node: Make) -> None:
    store(node("a")).claim("job", "1")
    save(node("a"), 10)
    reader = node("b")
    assert steps(reader) == [10]
    store(reader).assume_claimed("job", "0")
    with pytest.raises(ObjectStoreError, match="was taken by run '1'"):
        lineage(reader)
    change(".owner.json", None)
    with pytest.raises(ObjectStoreError, match=rf"^{URL}/.owner.json is gone: was the prefix, or the bucket, deleted"):
        lineage(reader)


def test_launcher_opens_and_releases_the_store(node: Make) -> None:
    directory = node("a")
    assert object_store_process.main("open", directory, "job", "1") == {
        "taken": "", "highest_round": 0, "newest": None
    }  # fmt: skip
    save(directory, 10)
    save(directory, 20, round=3)
    opened = object_store_process.main("open", directory, "job", "2")
    assert (opened["highest_round"], opened["newest"]) == (3, (3, 20))
    assert "was not released by run '1'" in opened["taken"]
    assert "was taken by run '2'" in object_store_process.main("open", directory, "job", "1")["error"]
    assert object_store_process.main("release", directory, "job", "2") == {}
    assert store(directory).holder() is None


def test_lock_claims_the_store_and_is_given_back_where_it_is_refused(
    node: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (DirectoryLock(node(name), "job", run) for name, run in (("a", "1"), ("b", "2")))
    first.release_store()  # which it has not claimed
    first.acquire()
    assert store(node("a")).holder() == json_holder("1")
    assert not caplog.records
    second.acquire()
    assert "was not released by run '1'" in caplog.text
    first.release()
    with pytest.raises(DirectoryInUse):
        first.acquire()
    other = DirectoryLock(node("a"), "job", "2", claims=False)
    other.release_store()  # which it may not, without the lock
    assert store(node("a")).holder() == json_holder("2")
    other.acquire()
    other.release_store()
    assert store(node("a")).holder() is None
    other.release()
    second.release()


# --- what is in the store ---------------------------------------------------------------------------------------------


def test_files_of_a_checkpoint_are_put_before_its_manifest(node: Make) -> None:
    save(node("a"), 10)
    assert [*objects()] == [f"r1-s10/{STATE}", f"r1-s10/{MANIFEST}", ".newest"]
    assert objects()[".newest"] == b"r1-s10"


def test_checkpoint_that_is_set_aside_gets_its_manifest_last(node: Make) -> None:
    directory = node("a")
    save(directory, 10)
    save(directory, 20)
    change("r1-s20/z", b"a file behind the manifest in each listing")
    set_aside(directory, 10)
    moved = [key for key in objects() if key.startswith("r1-s20")]
    assert sorted(moved) == [f"r1-s20.aside/{file}" for file in (MANIFEST, STATE, "z")]
    assert moved[-1] == f"r1-s20.aside/{MANIFEST}"
    other = node("b")
    assert steps(other) == [10]
    assert went_back_mark(other, 10).exists() and (other / "r1-s20.aside").is_dir()
    change(".went-back-to-s10", None)
    pull_from_store(other)
    assert not went_back_mark(other, 10).exists()


def test_deleted_checkpoint_leaves_no_object(node: Make) -> None:
    save(node("a"), 10)
    store(node("a")).delete_checkpoint("r1-s10")
    assert [*objects()] == [".newest"]
    store(node("a")).delete_checkpoint("r1-s10")  # of no effect


def test_files_that_another_node_puts_meanwhile_stay(node: Make) -> None:
    """Of a sharded checkpoint; what was left by a killed writer goes once there is a newer checkpoint."""
    directory = node("a")
    for step in (10, 20):
        save(directory, step)
    parts = [f"{name}/__1_0.distcp" for name in ("r1-s15", "r1-s20.again", "r1-s30")]
    for part in parts:
        change(part, b"a part")
    retain(directory, 1, keep=1)
    assert {key.partition("/")[0] for key in objects() if key[0] == "r"} == {"r1-s20", "r1-s20.again", "r1-s30"}
    save(directory, 40)
    retain(directory, 1, keep=1)
    assert {key.partition("/")[0] for key in objects() if key[0] == "r"} == {"r1-s40"}


def test_step_that_is_saved_again_has_the_other_name(node: Make) -> None:
    directory = node("a")
    assert [save(directory, 10, mark=mark).path.name for mark in (0, 1, 2)] == ["r1-s10", "r1-s10.again", "r1-s10"]
    assert {key for key in objects() if "/" in key} == {f"r1-s10/{STATE}", f"r1-s10/{MANIFEST}"}
    # A writer was killed before it had deleted the first one: the next save replaces the second.
    manifest, state = (objects()[f"r1-s10/{file}"] for file in (MANIFEST, STATE))
    change(f"r1-s10.again/{MANIFEST}", manifest)
    change(f"r1-s10.again/{STATE}", state)
    assert save(directory, 10, mark=3).path.name == "r1-s10.again"
    (entry,), _ = lineage(node("b"))
    assert checkpoints.load(entry)["weights"][0] == 3


def test_another_writer_of_the_same_name_is_refused(node: Make) -> None:
    directory = node("a")
    entry = save(directory, 10)
    store(directory).commit(entry.path, "r1-s10", entry.manifest, None)  # as at a second try
    change(f"r1-s10/{MANIFEST}", b"of another run")
    with pytest.raises(ObjectStoreError, match=rf"^{URL}/r1-s10/{MANIFEST} is there already: another run writes there"):
        store(directory).commit(entry.path, "r1-s10", entry.manifest, None)


def test_no_checkpoint_without_all_its_files(node: Make) -> None:
    """A file of another node is missing, or is cut short."""
    directory = node("a")
    entry = save(directory, 10)
    store(directory).delete_checkpoint("r1-s10")
    (entry.path / STATE).unlink()
    with pytest.raises(ObjectStoreError, match=rf"^{STATE} is missing in {URL}/r1-s10$"):
        store(directory).commit(entry.path, "r1-s10", entry.manifest, None)
    change(f"r1-s10/{STATE}", b"short")
    size = entry.manifest.bytes
    with pytest.raises(ObjectStoreError, match=rf"^{STATE} has 5 bytes in {URL}/r1-s10, its manifest says {size}$"):
        store(directory).commit(entry.path, "r1-s10", entry.manifest, None)
    assert f"r1-s10/{MANIFEST}" not in objects()


def test_one_process_may_put_a_checkpoint_and_may_try_again(node: Make) -> None:
    here = store(node("a"))
    assert not here.is_reserved("r1-s10")
    assert [here.reserve("r1-s10", who) for who in ("one", "other", "one")] == [True, False, True]
    assert here.is_reserved("r1-s10")


def test_part_is_taken_once(node: Make) -> None:
    here = store(node("a"))
    assert here.take_part("r1-s10", "part") is None
    here.put_part("r1-s10", "part", b"content")
    assert [here.take_part("r1-s10", "part") for _ in range(2)] == [b"content", None]
    here.write_small_file("file", b"small")
    assert (here.read_small_file("file"), here.read_small_file("other")) == (b"small", None)


def test_round_makes_a_checkpoint_its_own_in_the_store(node: Make) -> None:
    save(node("a"), 10, mark=5)
    other = node("b")
    relink(other, lineage(other)[0][0], 2)
    assert objects()[f"r2-s10/{STATE}"] == objects()[f"r1-s10/{STATE}"]
    entries, _ = lineage(node("c"))
    assert [entry.manifest.round for entry in entries] == [2, 1]


# --- the copy on this node --------------------------------------------------------------------------------------------


def test_copy_has_the_names_of_the_store(node: Make) -> None:
    writer, reader = node("a"), node("b")
    save(writer, 10)
    save(writer, 20)
    change("notes/file", b"of others")
    change("file", b"of others")
    assert steps(reader) == [20, 10]
    assert sorted(path.name for path in reader.iterdir() if not path.name.startswith(".")) == ["r1-s10", "r1-s20"]
    assert not (reader / "r1-s20" / STATE).exists()
    before = (reader / "r1-s20").stat().st_ino
    store(writer).delete_checkpoint("r1-s10")
    assert steps(reader) == [20]
    assert (reader / "r1-s20").stat().st_ino == before, "it was made again"
    assert not (reader / "r1-s10").exists()


def test_checkpoint_that_was_replaced_is_learned(node: Make) -> None:
    writer, reader = node("a"), node("b")
    save(writer, 10, mark=1)
    (entry,), _ = lineage(reader)
    assert checkpoints.load(entry)["weights"][0] == 1
    for saves in (1, 2):  # in the place of the other one, and in its own
        names = [save(writer, 10, mark=2 * saves + each).path.name for each in range(saves)]
        (entry,), _ = lineage(reader)
        assert entry.path.name == names[-1]
        assert checkpoints.load(entry)["weights"][0] == 3 * saves - 1


def test_late_listing_hides_nothing(node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known here, and the newest commit, are looked up by their names."""
    writer, reader = node("a"), node("b")
    save(writer, 10)
    assert steps(reader) == [10]
    save(writer, 20)
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: {})
    assert steps(reader) == [20, 10]
    assert steps(node("c")) == [20]


def test_listing_of_what_was_there_before_is_no_damage(node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    save(node("a"), 10)
    usual = MemoryFileSystem.find

    def find(*args: Any, **more: Any) -> Any:
        return {key: {**info, "size": 1} for key, info in usual(*args, **more).items()}

    monkeypatch.setattr(MemoryFileSystem, "find", find)
    assert steps(node("b")) == [10]


DAMAGE: list[tuple[bytes | None, str]] = [
    (None, f"{STATE} is missing in {URL}/r1-s20"),
    (b"short", f"{STATE} has 5 bytes in {URL}/r1-s20, its manifest says "),
]


@pytest.mark.parametrize(("content", "why"), DAMAGE, ids=["missing", "short"])
def test_damage_in_the_store_is_a_reason(node: Make, content: bytes | None, why: str) -> None:
    writer, reader = node("a"), node("b")
    save(writer, 10)
    save(writer, 20)
    change(f"r1-s20/{STATE}", content)
    entries, (skipped,) = lineage(reader)
    assert [entry.manifest.step for entry in entries] == [10]
    assert skipped.why.startswith(why)


def test_checkpoint_without_a_manifest_is_none(node: Make) -> None:
    writer, reader = node("a"), node("b")
    save(writer, 10)
    change(f"r1-s10/{MANIFEST}", None)
    entries, (skipped,) = lineage(reader)
    assert (entries, skipped.why) == ([], f"{MANIFEST} is missing")
    assert highest_round(reader) == 1


def test_verification_reads_the_object_itself(node: Make) -> None:
    entry = save(node("a"), 10)
    assert find_damage(entry) is None
    state = objects()[f"r1-s10/{STATE}"]
    change(f"r1-s10/{STATE}", state[:-1] + bytes([state[-1] ^ 1]))
    assert find_damage(entry) == f"{STATE} does not match its checksum: it was damaged after it was written"
    change(f"r1-s10/{STATE}", state + b"more")
    assert find_damage(entry) is not None
    change(f"r1-s10/{STATE}", None)
    assert "there is no such object" in str(find_damage(entry))


def test_damaged_copy_is_made_again(node: Make) -> None:
    entry = save(node("a"), 10)
    content = (entry.path / STATE).read_bytes()
    (entry.path / STATE).write_bytes(content[:-1] + b"?")
    os.close(open_verified(entry))
    assert (entry.path / STATE).read_bytes() == content
    change(f"r1-s10/{STATE}", None)
    os.close(store(node("a")).fetch_and_open(entry.path, STATE))
    (entry.path / STATE).unlink()
    with pytest.raises(FileNotFoundError, match="there is no such object in"):
        store(node("a")).fetch_and_open(entry.path, STATE)
    assert not [path for path in entry.path.iterdir() if path.name.endswith(".copy")]


def test_copies_of_other_checkpoints_are_dropped(node: Make) -> None:
    directory = node("a")
    entries = [save(directory, step) for step in (10, 20)]
    assert [(entry.path / STATE).exists() for entry in entries] == [False, True]
    (directory / "own").mkdir()
    (directory / "own" / STATE).write_bytes(b"of no store")
    (entries[1].path / ".shard.copy").touch()
    store(directory).drop_local_copies(entries[0].path)
    assert sorted(path.name for path in entries[1].path.iterdir()) == [".remote", MANIFEST]
    assert (directory / "own" / STATE).exists()


def test_checkpoint_that_another_node_has_read_is_known(node: Make) -> None:
    manifest = save(node("a"), 10).manifest
    directory = node("b")
    for _ in range(2):
        store(directory).place_manifest("r1-s10", manifest)
        assert [each.name for each in directory.glob("r*")] == ["r1-s10"]
    assert (directory / "r1-s10" / MANIFEST).read_bytes() == manifest.to_json()
    store(directory).place_manifest("r1-s10", save(node("c"), 20).manifest)
    assert (directory / "r1-s10" / MANIFEST).read_bytes() == manifest.to_json(), "what is known stays"


@pytest.mark.parametrize("above", range(5))
def test_directories_of_other_users_are_refused_up_to_the_root_of_all_copies(
    node: Make, monkeypatch: pytest.MonkeyPatch, above: int
) -> None:
    directory, usual = node("a"), os.stat
    path = [directory, *directory.parents][above]

    def stat(of: Any, **how: Any) -> os.stat_result:
        status = usual(of, **how)
        return os.stat_result((*status[:4], 12345, *status[5:10])) if of == path else status

    monkeypatch.setattr(os, "stat", stat)
    if above == 4:  # what is above is the administrator's choice
        store(directory).claim("job", "1")
        return
    with pytest.raises(ObjectStoreError, match=f"^{path} belongs to another user; set {object_url.CACHE_VARIABLE}$"):
        store(directory).claim("job", "1")


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (OSError(5, "Input/output error"), 3),
        (ValueError("odd"), 3),
        (OSError(28, "No space left on device"), 1),
        (PermissionError(13, "no"), 1),
        (TypeError("a mistake"), 1),
        (type("NoCredentialsError", (Exception,), {})("where?"), 1),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else str(each),
)
def test_call_is_tried_again_if_another_try_may_succeed(
    node: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, calls: int
) -> None:
    monkeypatch.setattr(object_store, "_PAUSE_MAX_S", 0.0)
    made: list[Any] = []

    def fail(*args: Any, **_: Any) -> Any:
        made.append(args)
        raise error

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    here = store(node("a"))
    here.patience_s = 1e-9
    with pytest.raises(ObjectStoreError, match=f"^{URL}: "):
        here.read_small_file("file")
    assert len(made) == calls


@pytest.mark.parametrize(
    "error", [NotImplementedError(), OSError(38, "Function not implemented")], ids=["class", "errno"]
)
def test_store_without_conditional_puts(node: Make, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A checkpoint is put as it is; nobody can reserve one."""
    usual = MemoryFileSystem.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> Any:
        if mode == "create":
            raise error
        return usual(self, path, value, mode=mode, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    save(node("a"), 10)
    assert steps(node("b")) == [10]
    with pytest.raises(NotImplementedError):
        store(node("a")).reserve("r1-s20", "one")


def test_bucket_is_looked_for(node: Make) -> None:
    assert not store(node("a")).has_bucket()
    store(node("a")).write_small_file("file")
    assert store(node("a")).has_bucket()


class S3(MemoryFileSystem):  # type: ignore[misc]
    """In memory, with uploads in parts that killed processes have left."""

    left: ClassVar[list[str]] = []

    def call_s3(self, verb: str, Bucket: str, **how: str) -> dict[str, Any]:  # noqa: N803 - as in S3
        assert Bucket == "bucket"
        if verb == "abort_multipart_upload":
            self.left.remove(how["Key"])
            return {}
        assert verb == "list_multipart_uploads"
        found = [{"Key": key, "UploadId": "1"} for key in self.left if key.startswith(how["Prefix"])]
        return {"Uploads": found} if found else {}


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_uploads_in_parts_that_were_left_are_aborted(
    node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Of a file, before it is put again, and of all files, by the next run. Other stores delete them by themselves."""
    usual, kept = fsspec.filesystem, "run/r1-s10/other"
    monkeypatch.setattr(fsspec, "filesystem", lambda kind, **how: usual("dir", **how) if kind == "dir" else S3())
    monkeypatch.setattr(S3, "left", ["other/file", kept, f"run/r1-s10/{STATE}"])
    here = ObjectStore(node("a"), f"{scheme}://bucket/run")
    (tmp_path / STATE).write_bytes(b"state")
    here.put_files(tmp_path, "r1-s10", [STATE])
    assert objects()[f"r1-s10/{STATE}"] == b"state"
    assert ["other/file", kept] == S3.left[:2] and len(S3.left) == (2 if scheme == "s3" else 3)
    here.claim("job", "1")
    assert (S3.left == ["other/file"]) == (scheme == "s3")
