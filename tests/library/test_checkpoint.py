"""Checkpoints by hand: the format on disk, lineage, every kind of damage, re-linking, retention."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpointing.choice import Chooser, OpenState
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.state import training_state as training_state
from elasticd.checkpointing.storage import manifest, page_cache, retention
from elasticd.checkpointing.storage.checkpoint_files import relink
from elasticd.checkpointing.storage.lineage import (
    Entry,
    LineageWalk,
    find_damage,
    highest_round,
    lineage,
    list_names_aside,
    open_verified,
    walk_lineage,
)
from elasticd.checkpointing.storage.manifest import Unreadable
from elasticd.checkpointing.storage.retention import retain, set_aside
from elasticd.errors import CheckpointCorrupt, CheckpointError
from elasticd.heartbeat.worker_events import WorkerEventWriter
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage


def save(directory: Path, round: int, step: int, parent: tuple[int, int] | None = None, **state: Any) -> Entry:
    content = {"weights": torch.arange(100.0) + step, "mark": f"r{round}-s{step}", **state}
    return checkpoints.save(directory, round=round, step=step, parent=parent, state=content)


def usable(directory: Path) -> list[str]:
    return [entry.path.name for entry in verified_lineage(directory)[0]]


def whys(directory: Path) -> dict[str, str]:
    return {each.path.name: each.why for each in verified_lineage(directory)[1]}


def present(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(checkpoint_path: Path, **fields: Any) -> None:
    path = checkpoint_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": [0.5, (1, 2)]}
    saved = checkpoints.save(tmp_path / "new" / "dir", step=7, state=state, cursor={"offset": 12})
    (found,), skipped = lineage(tmp_path / "new" / "dir")
    assert not skipped
    assert found == saved
    assert found.manifest.cursor == {"offset": 12}
    loaded = checkpoints.load(found)
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)
    assert vars(loaded["model"]) == vars(state["model"]), "torch keeps the versions of modules there"


def test_state_opens_with_torch_load_and_has_its_checksum(tmp_path: Path) -> None:
    entry = save(tmp_path, 3, 120)
    assert entry.path == tmp_path / "r3-s120"
    assert present(entry.path) == ["manifest.json", "state.pt"]
    assert torch.load(entry.path / "state.pt", weights_only=True)["mark"] == "r3-s120"
    algorithm, _, digits = entry.manifest.checksum.partition(":")
    if algorithm == "xxh3_128":
        from xxhash import xxh3_128 as new
    else:
        new = hashlib.sha256
    assert digits == new((entry.path / "state.pt").read_bytes()).hexdigest()
    assert entry.manifest.bytes == (entry.path / "state.pt").stat().st_size


@pytest.mark.parametrize("size", [1000, (5 << 20) + 7])
def test_read_back_goes_past_the_page_cache(tmp_path: Path, size: int) -> None:
    """Filling it takes most of the CPU time of a save."""
    entry = save(tmp_path, 1, 1, filling=torch.ones(size, dtype=torch.uint8))
    assert usable(tmp_path) == ["r1-s1"]
    with (entry.path / "state.pt").open("rb") as file:
        found = resident_pages(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert found == resident_pages(file.fileno())  # all of them on a file system in memory


@pytest.mark.parametrize(
    ("least_s", "most_s", "stays"),
    [(-1.0, math.inf, False), (math.inf, math.inf, True), (-1.0, -1.0, True)],
    ids=["from a disk", "from the cache", "from a slow disk"],
)
def test_read_once_leaves_little_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_s: float, most_s: float, stays: bool
) -> None:
    monkeypatch.setattr(page_cache, "MIN_WAIT_S_PER_BYTE", least_s)
    monkeypatch.setattr(page_cache, "MAX_WAIT_S_PER_BYTE", most_s)
    entry = save(tmp_path, 1, 1, filling=torch.ones(80 << 20, dtype=torch.uint8))
    with (entry.path / "state.pt").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = resident_pages(file.fileno())  # all of them on a file system in memory
        os.close(open_verified(entry))
        found = (resident_pages(file.fileno()) - before) * mmap.PAGESIZE
        whole = entry.manifest.bytes - before * mmap.PAGESIZE
    assert found > 0.7 * whole if stays else found <= (page_cache.CACHED_WINDOWS + 2) * page_cache.WINDOW_BYTES


def resident_pages(fd: int) -> int:
    with mmap.mmap(fd, 0, mmap.MAP_PRIVATE) as mapped:
        found = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
        start = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), found) == 0
        del start
    return sum(each & 1 for each in found.raw)


def test_checkpoint_files_are_private(tmp_path: Path) -> None:
    entry = save(tmp_path / "made", 1, 1)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "made", entry.path, *entry.path.iterdir())]
    assert modes == [0o700, 0o700, 0o600, 0o600]


def test_lineage_of_empty_or_missing_directory(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        assert lineage(directory) == ([], [])
        assert highest_round(directory) == 0


def test_walk_of_an_empty_directory(tmp_path: Path) -> None:
    assert walk_lineage(tmp_path) == LineageWalk([], [], {}, 0)


def test_highest_round_counts_every_name(tmp_path: Path) -> None:
    save(tmp_path, 2, 5)
    (tmp_path / "r7-s0").mkdir()
    for other in ("r9", "r9-s", "r09-s1", "xr9-s1", "r9-s1.bak", "r9-s1x", "r-1-s1", "r９-s1"):
        (tmp_path / other).mkdir()
    assert highest_round(tmp_path) == 7
    (tmp_path / ".r8-s3.0a1b.staging").mkdir()  # a round that died during its first save was here, too
    assert highest_round(tmp_path) == 8


def test_lineage_follows_parents_and_skips_zombies(tmp_path: Path) -> None:
    save(tmp_path, 1, 10)
    first = save(tmp_path, 1, 20)
    relink(tmp_path, first, 2)
    save(tmp_path, 1, 30)  # rank 0 of round 1 did not know
    assert usable(tmp_path) == ["r2-s20", "r1-s20", "r1-s10"]
    second = save(tmp_path, 2, 25, (1, 20))
    save(tmp_path, 1, 40)
    relink(tmp_path, second, 3)
    save(tmp_path, 2, 35, (1, 20))
    assert usable(tmp_path) == ["r3-s25", "r2-s25", "r2-s20", "r1-s20", "r1-s10"]
    assert "continued from step 20" in whys(tmp_path)["r1-s40"]
    assert "continued from step 25" in whys(tmp_path)["r2-s35"]


def test_lineage_skips_zombie_below_damaged_round(tmp_path: Path) -> None:
    relink(tmp_path, save(tmp_path, 1, 20), 2)
    save(tmp_path, 2, 30, (1, 20))
    save(tmp_path, 1, 30)
    for name in ("r2-s20", "r2-s30"):
        (tmp_path / name / "state.pt").unlink()
    assert usable(tmp_path) == ["r1-s20"]
    for name in ("r2-s20", "r2-s30"):
        (tmp_path / name / "manifest.json").unlink()
    assert usable(tmp_path) == ["r1-s20"]


def test_lineage_skips_zombie_that_rewrites_parent_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 10)
    relink(tmp_path, save(tmp_path, 1, 20), 2)
    save(tmp_path, 1, 20, mark="the zombie's")
    assert usable(tmp_path) == ["r2-s20", "r1-s10"]
    assert checkpoints.load(lineage(tmp_path)[0][0])["mark"] == "r1-s20"
    assert "again after round 2" in whys(tmp_path)["r1-s20"]


def test_lineage_ends_at_round_without_parent(tmp_path: Path) -> None:
    save(tmp_path, 1, 100)
    save(tmp_path, 2, 5)
    assert usable(tmp_path) == ["r2-s5"]


def test_lineage_ends_at_parent_without_manifests(tmp_path: Path) -> None:
    save(tmp_path, 1, 10)  # of another lineage: nobody resumed from it
    relink(tmp_path, save(tmp_path, 2, 20), 3)
    (tmp_path / "r2-s20" / "manifest.json").unlink()
    assert usable(tmp_path) == ["r3-s20"]


def truncate(path: Path) -> None:
    os.truncate(path / "state.pt", (path / "state.pt").stat().st_size - 1)


def swap_states(path: Path) -> None:
    """The same size, another content."""
    other = path.parent / "r1-s10" / "state.pt"
    shutil.copy(other, path / "state.pt")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "cut short"),
    "emptied": (lambda path: os.truncate(path / "state.pt", 0), "cut short"),
    "grown": (lambda path: (path / "state.pt").write_bytes(bytes(5000)), "its manifest says"),
    "a bit flipped": (lambda path: flip_a_bit(path / "state.pt"), "does not match its checksum"),
    "another state": (swap_states, "does not match its checksum"),
    "no state": (lambda path: (path / "state.pt").unlink(), "state.pt is missing"),
    "a directory as state": (lambda path: ((path / "state.pt").unlink(), (path / "state.pt").mkdir()), "is not a file"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "a pipe as manifest": (
        lambda path: ((path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")),
        "is not JSON",
    ),
    "no JSON": (lambda path: (path / "manifest.json").write_bytes(b"\xff{"), "is not JSON"),
    "no object": (lambda path: (path / "manifest.json").write_text("[1]"), "is not an object"),
    "deep JSON": (lambda path: (path / "manifest.json").write_text("[" * 100_000), "is not"),
    "huge manifest": (lambda path: (path / "manifest.json").write_text(" " * (1 << 20) + "{}"), "longer than"),
    "manifest changed": (lambda path: edit(path, world_size=3), "does not match its seal"),
    "a bit of the manifest flipped": (lambda path: flip_a_bit(path / "manifest.json"), "manifest.json"),
    "future version": (lambda path: edit(path, version="2.0", seal="?"), "has version 2.0"),
    "no version": (lambda path: edit(path, version=None), "not 'major.minor'"),
    "renamed": (lambda path: shutil.copytree(path, path.parent / "r1-s30"), "r1-s30"),
    "a file": (lambda path: (shutil.rmtree(path), path.write_text("")), "manifest.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_lineage_skips_damaged_checkpoint(tmp_path: Path, kind: str) -> None:
    """A damaged checkpoint is skipped with its reason, and its predecessor is used."""
    save(tmp_path, 1, 10)
    newest = save(tmp_path, 1, 20).path
    damage, why = DAMAGE[kind]
    damage(newest)
    if kind == "renamed":
        assert usable(tmp_path) == ["r1-s20", "r1-s10"]
        assert "belongs to r1-s20" in whys(tmp_path)["r1-s30"]
        return
    assert usable(tmp_path) == ["r1-s10"]
    assert why in whys(tmp_path)["r1-s20"]


def test_manifest_that_cannot_be_read_may_be_read_later(tmp_path: Path) -> None:
    unreadable = manifest.read(tmp_path / ("n" * 300))
    assert unreadable == Unreadable("manifest.json cannot be read: File name too long", is_permanent=False)
    assert manifest.read(tmp_path) == Unreadable("manifest.json is missing")


def test_least_numbers_and_largest_size_of_a_manifest() -> None:
    least = manifest.Manifest(1, 0, (0, 0), 1, 0, "sha256:0", "job", "run")
    data = least.to_json()
    assert manifest.parse(data.ljust(1 << 20)) == manifest.parse(data) == least
    assert isinstance(manifest.parse(data.ljust((1 << 20) + 1)), Unreadable)


FILES: list[tuple[Any, bool]] = [
    ({}, True),
    ({"a": [0, "sha256:1"], "b": [5, "xxh3_128:2"]}, True),
    ([], False),
    ({"a/b": [0, "sha256:1"]}, False),
    ({"state.pt": [0, "sha256:1"]}, False),
    ({"manifest.json": [0, "sha256:1"]}, False),
    ({"a": {"0": 0, "1": "sha256:1"}}, False),
    ({"a": [0, "sha256:1", 2]}, False),
    ({"a": [0]}, False),
    ({"a": ["0", "sha256:1"]}, False),
    ({"a": [True, "sha256:1"]}, False),
    ({"a": [-1, "sha256:1"]}, False),
    ({"a": [0, "1"]}, False),
    ({"a": [0, None]}, False),
    ({"a": [0, "sha256:1"], "b": [-1, "sha256:1"]}, False),
]


@pytest.mark.parametrize(("files", "are_valid"), FILES)
def test_files_of_a_manifest(files: Any, are_valid: bool) -> None:
    raw = json.loads(manifest.Manifest(1, 10, None, 2, 0, "sha256:0", "job", "run").to_json())
    del raw["seal"]
    raw["files"] = files
    found = manifest.parse(json.dumps({**raw, "seal": manifest.seal_of(raw)}).encode())
    if are_valid:
        assert isinstance(found, manifest.Manifest)
        assert found.files == {name: tuple(state) for name, state in files.items()}
    else:
        assert found == Unreadable("manifest.json: files is missing or invalid")


@pytest.mark.parametrize(
    "version", ["1", "1.", ".1", "1.x", "x.1", "1.123456", "123456.1", "1.\N{SUPERSCRIPT TWO}", 1, None]
)
def test_manifest_of_no_version(version: Any) -> None:
    raw = json.loads(manifest.Manifest(1, 10, None, 2, 0, "sha256:0", "job", "run").to_json()) | {"version": version}
    del raw["seal"]
    found = manifest.parse(json.dumps({**raw, "seal": manifest.seal_of(raw)}).encode())
    assert found == Unreadable(f"manifest.json: version is {version!r}, not 'major.minor'")


@pytest.mark.parametrize("parent", [[], [1], [1, 2, 3], ["0", 5], [0, True], {"0": 0, "1": 5}, "12", 5])
def test_manifest_of_no_parent(parent: Any) -> None:
    raw = json.loads(manifest.Manifest(1, 10, None, 2, 0, "sha256:0", "job", "run").to_json()) | {"parent": parent}
    del raw["seal"]
    found = manifest.parse(json.dumps({**raw, "seal": manifest.seal_of(raw)}).encode())
    assert found == Unreadable("manifest.json: parent is missing or invalid")


def test_load_verifies_while_reading(tmp_path: Path) -> None:
    entry = save(tmp_path, 1, 10)
    flip_a_bit(entry.path / "state.pt")
    assert lineage(tmp_path)[0] == [entry]  # the size is right
    for use in (checkpoints.load, open_verified):
        with pytest.raises(CheckpointCorrupt, match="does not match its checksum"):
            use(entry)
    truncate(entry.path)
    with pytest.raises(CheckpointCorrupt, match="cut short"):
        checkpoints.load(entry)
    (entry.path / "state.pt").unlink()
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        checkpoints.load(entry)


def test_read_that_o_direct_refuses_is_done_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a short read, or on a disk of larger blocks. If that fails, too, it is an error."""
    entry, usual = save(tmp_path, 1, 10), os.preadv

    def refused(fd: int, *where: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return usual(fd, *where)

    monkeypatch.setattr(os, "preadv", refused)
    assert find_damage(entry) is None
    for error, why in ((errno.EINVAL, "[Errno 22] Invalid argument"), (errno.EIO, "state.pt cannot be read: Input/")):

        def failing(*_: Any, error: int = error) -> int:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "preadv", failing)
        assert (find_damage(entry) or "").startswith(why)


def test_checkpoint_with_sha256_is_read_and_verified(tmp_path: Path) -> None:
    """The checksum of older checkpoints; one that this interpreter cannot compute is no reason to skip a checkpoint."""
    entry = save(tmp_path, 1, 10)
    raw = json.loads((entry.path / "manifest.json").read_text())
    del raw["seal"]
    for checksum in (f"sha256:{hashlib.sha256((entry.path / 'state.pt').read_bytes()).hexdigest()}", "xxh9:00"):
        raw["checksum"] = checksum
        (entry.path / "manifest.json").write_text(json.dumps({**raw, "seal": manifest.seal_of(raw)}))
        (found,), _ = lineage(tmp_path)
        if checksum.startswith("sha256"):
            assert checkpoints.load(found)["mark"] == "r1-s10"
            flip_a_bit(entry.path / "state.pt")
            assert "does not match its checksum" in whys(tmp_path)["r1-s10"]
    with pytest.raises(CheckpointError, match="pip install xxhash"):
        checkpoints.load(found)


def test_manifest_keeps_fields_of_newer_minor_version(tmp_path: Path) -> None:
    entry = save(tmp_path, 1, 10)
    raw = {**json.loads((entry.path / "manifest.json").read_text()), "version": "1.9", "mood": {"calm": [1.5]}}
    del raw["seal"]
    (entry.path / "manifest.json").write_text(json.dumps({**raw, "seal": manifest.seal_of(raw)}))
    (newer,), _ = verified_lineage(tmp_path)
    assert (newer.manifest.version, newer.manifest.unknown) == ("1.9", {"mood": {"calm": [1.5]}})
    relink(tmp_path, newer, 2)
    again = verified_lineage(tmp_path)[0][0].manifest
    assert (again.round, again.version, again.unknown) == (2, "1.9", {"mood": {"calm": [1.5]}})


def test_relink_makes_hard_link_that_outlives_source(tmp_path: Path) -> None:
    source = save(tmp_path, 1, 20)
    own = relink(tmp_path, source, 4)
    assert own.path == tmp_path / "r4-s20"
    assert (own.path / "state.pt").samefile(source.path / "state.pt")
    assert (own.manifest.parent, own.manifest.relinked) == ((1, 20), True)
    assert own.manifest.wall == source.manifest.wall, "it was saved then"
    assert relink(tmp_path, source, 4) == own  # twice is once
    assert relink(tmp_path, own, 4) == own
    shutil.rmtree(source.path)
    assert checkpoints.load(own)["mark"] == "r1-s20"
    assert usable(tmp_path) == ["r4-s20"]


def test_relink_of_relink_has_training_round_as_parent(tmp_path: Path) -> None:
    save(tmp_path, 1, 10)
    entry = save(tmp_path, 1, 20)
    for round in (2, 3, 4):
        entry = relink(tmp_path, entry, round)
    assert entry.manifest.parent == (1, 20)
    # A round has one parent, whichever of the twins its session says it resumed from.
    assert save(tmp_path, 4, 30, (3, 20)).manifest.parent == (1, 20)
    assert usable(tmp_path) == ["r4-s30", "r4-s20", "r1-s20", "r1-s10"]


def test_save_finds_parent_through_relink(tmp_path: Path) -> None:
    entry = relink(tmp_path, save(tmp_path, 1, 20), 2)
    assert (entry.manifest.round, save(tmp_path, 3, 30, (2, 20)).manifest.parent) == (2, (1, 20))


def test_relink_refuses_checkpoint_replaced_after_load(tmp_path: Path) -> None:
    entry = save(tmp_path, 1, 20)
    save(tmp_path, 1, 20, mark="another")
    with pytest.raises(OSError, match="replaced after it was loaded"):
        relink(tmp_path, entry, 2)
    shutil.rmtree(entry.path)
    with pytest.raises(FileNotFoundError):
        relink(tmp_path, entry, 2)
    assert present(tmp_path) == []


def test_relink_that_was_done_is_not_done_again(tmp_path: Path) -> None:
    """But what is there by then with another content is replaced."""
    entry = save(tmp_path, 1, 10)
    assert relink(tmp_path, entry, 1) is entry
    relinked = relink(tmp_path, entry, 2)
    before = (tmp_path / "r2-s10").stat().st_ino
    assert relink(tmp_path, entry, 2) == relinked
    assert (tmp_path / "r2-s10").stat().st_ino == before
    save(tmp_path, 2, 10, parent=(1, 10), more=1)
    assert usable(tmp_path) == ["r2-s10", "r1-s10"], "the parent was trained by another round"
    assert relink(tmp_path, entry, 2).manifest == relinked.manifest
    assert usable(tmp_path) == ["r2-s10", "r1-s10"]
    (tmp_path / "r2-s10" / "manifest.json").write_text("damage")
    assert relink(tmp_path, entry, 2).manifest == relinked.manifest


def test_relink_copies_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compares what it has copied."""

    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    entry = save(tmp_path, 1, 10)
    relink(tmp_path, entry, 2)
    assert usable(tmp_path) == ["r2-s10", "r1-s10"]
    flip_a_bit(entry.path / "state.pt")
    with pytest.raises(OSError, match="the checkpoint changed while it was copied"):
        relink(tmp_path, entry, 3)
    assert present(tmp_path) == ["r1-s10", "r2-s10"]


def test_save_of_same_step_replaces_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, 20, mark="old")
    again = save(tmp_path, 1, 20, mark="new")
    assert present(tmp_path) == ["r1-s20"]
    assert checkpoints.load(again)["mark"] == "new"
    damaged = again.path / "manifest.json"
    damaged.unlink()
    assert checkpoints.load(save(tmp_path, 1, 20, mark="third"))["mark"] == "third"


def test_replacement_counts_before_it_has_its_name(tmp_path: Path) -> None:
    """Of a step saved twice the second counts, even while it still has its temporary name."""
    save(tmp_path / "other", 1, 20, mark="new").path.rename(tmp_path / "r1-s20.again")  # as a kill there leaves it
    save_path = save(tmp_path / "other", 1, 20, mark="old").path
    save_path.rename(tmp_path / "r1-s20")
    shutil.rmtree(tmp_path / "other")
    assert usable(tmp_path) == ["r1-s20.again", "r1-s20"]
    assert checkpoints.load(lineage(tmp_path)[0][0])["mark"] == "new"
    save(tmp_path, 1, 20, mark="third")
    assert present(tmp_path) == ["r1-s20"]


def test_save_refuses_invalid_numbers_before_writing(tmp_path: Path) -> None:
    for round, step, parent in ((1, -1, None), (-1, 1, None), (2, 5, (2, 5)), (2, 5, (1, 6)), (1 << 63, 1, None)):
        with pytest.raises(ValueError, match=r"cannot have the parent|negative|64 bits"):
            save(tmp_path, round, step, parent)
    assert present(tmp_path) == []


def test_retention_keeps_newest_of_own_round(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, 1, step)
    assert [path.name for path in retain(tmp_path, 1, 3)] == ["r1-s10", "r1-s20"]
    assert present(tmp_path) == ["r1-s30", "r1-s40", "r1-s50"]
    assert retain(tmp_path, 1, 3) == []
    with pytest.raises(ValueError, match="at least one"):
        retain(tmp_path, 1, 0)


@pytest.mark.parametrize("replaces", [False, True])
def test_retention_keeps_what_another_node_publishes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    """Also in the place of a checkpoint of the same step, which is away for a moment."""
    for step in (10, 20, 30, *([40] if replaces else [])):
        save(tmp_path, 1, step)

    def walk_before_publication(directory: Path) -> LineageWalk:
        if replaces:
            (tmp_path / "r1-s40").rename(tmp_path / "gone")
        found = walk_lineage(directory)
        save(tmp_path, 1, 40)
        return found

    monkeypatch.setattr(retention, "walk_lineage", walk_before_publication)
    assert [path.name for path in retain(tmp_path, 1, 2)] == ["r1-s10"]
    assert present(tmp_path) == [*(["gone"] if replaces else []), "r1-s20", "r1-s30", "r1-s40"]


def test_retention_deletes_older_rounds_after_verified_save(tmp_path: Path) -> None:
    """Older rounds' checkpoints are deleted only once this round has a checkpoint that was read back."""
    for step in (10, 20, 30, 40):
        entry = save(tmp_path, 1, step)
    relink(tmp_path, entry, 2)
    assert retain(tmp_path, 2, 2) == []  # the re-linked one is not trained by round 2
    own = save(tmp_path, 2, 50, (1, 40))
    flip_a_bit(own.path / "state.pt")
    assert retain(tmp_path, 2, 2) == []  # nor is a damaged one a reason to delete
    save(tmp_path, 1, 45)
    save(tmp_path, 2, 60, (1, 40))
    deleted = [path.name for path in retain(tmp_path, 2, 2)]
    assert deleted == ["r1-s45", "r1-s10", "r1-s20", "r1-s30", "r1-s40", "r2-s40"], "what is not in the lineage first"
    assert present(tmp_path) == ["r2-s50", "r2-s60"]


def test_unfinished_checkpoint_of_a_living_writer_stays_until_this_round_has_saved(tmp_path: Path) -> None:
    for step in (10, 20):
        entry = save(tmp_path, 1, step)
    unfinished = tmp_path / ".r1-s30.0a.staging"
    unfinished.mkdir()
    hold = "import fcntl, sys; held = open(sys.argv[1], 'w'); fcntl.lockf(held, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", hold, unfinished / "manifest.json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        relink(tmp_path, entry, 2)
        for step in (25, 30):
            flip_a_bit(save(tmp_path, 2, step, (1, 20)).path / "state.pt")
        assert [path.name for path in retain(tmp_path, 2, 1)] == ["r2-s25"]
        assert unfinished.exists()
        save(tmp_path, 2, 40, (1, 20))
        retain(tmp_path, 2, 1)
        assert not unfinished.exists()
        writer.kill()


def test_retention_counts_relinked_steps_once(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        entry = save(tmp_path, 1, step)
    relink(tmp_path, entry, 2)
    save(tmp_path, 2, 40, (1, 30))
    retain(tmp_path, 2, 3)
    assert present(tmp_path) == ["r1-s20", "r2-s30", "r2-s40"]
    assert usable(tmp_path) == ["r2-s40", "r2-s30", "r1-s20"]


def test_milestones_stay(tmp_path: Path) -> None:
    for step in range(10, 100, 10):
        save(tmp_path, 1, step)
    retain(tmp_path, 1, 2, 40)
    assert present(tmp_path) == ["r1-s40", "r1-s80", "r1-s90"]
    save(tmp_path, 2, 100, (1, 80))
    save(tmp_path, 2, 110, (1, 80))
    retain(tmp_path, 2, 2, 40)
    assert present(tmp_path) == ["r1-s40", "r1-s80", "r2-s100", "r2-s110"]
    assert usable(tmp_path) == ["r2-s110", "r2-s100", "r1-s80", "r1-s40"]


def test_milestone_is_the_first_step_from_a_multiple_on(tmp_path: Path) -> None:
    """As where checkpoints are made at an interval of time."""
    for step in range(7, 130, 9):
        save(tmp_path, 1, step)
        retain(tmp_path, 1, 2, 40)
    assert present(tmp_path) == ["r1-s115", "r1-s124", "r1-s43", "r1-s88"]


def test_checkpoint_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has made it immutable."""
    for step in (10, 20, 30, 40):
        save(tmp_path, 1, step)
    immutable, real = tmp_path / "r1-s10", retention.discard_checkpoint

    def discard(path: Path) -> None:
        if path == immutable:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path)

    monkeypatch.setattr(retention, "discard_checkpoint", discard)
    with pytest.raises(PermissionError, match="r1-s10"):
        retain(tmp_path, 1, 2)
    assert present(tmp_path) == ["r1-s10", "r1-s30", "r1-s40"]


def test_checkpoints_set_aside_are_neither_loaded_nor_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, 1, step)
    assert [path.name for path in set_aside(tmp_path, 10)] == ["r1-s30.aside", "r1-s20.aside"]
    save(tmp_path, 1, 20)
    assert [path.name for path in set_aside(tmp_path, 10)] == ["r1-s20.aside2"]
    assert usable(tmp_path) == ["r1-s10"]
    save(tmp_path, 2, 40, (1, 10))
    retain(tmp_path, 2, 1)
    mark = ".went-back-to-s10"
    assert present(tmp_path) == [mark, "r1-s20.aside", "r1-s20.aside2", "r1-s30.aside", "r2-s40"]
    assert sorted(each.path.name for each in list_names_aside(tmp_path)) == [
        "r1-s20.aside",
        "r1-s20.aside2",
        "r1-s30.aside",
    ]


def test_nothing_is_set_aside_for_a_step_that_cannot_be_loaded(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, 1, step)
    nobody: Any = None
    context = SaveContext(nobody, nobody, nobody, WorkerEventWriter(None, 2, 0), nobody)
    chooser = Chooser(context, tmp_path, 20, OpenState())
    flip_a_bit(tmp_path / "r1-s20" / "state.pt")
    with pytest.raises(CheckpointError, match=r"restore\(step=20\): .* does not match its checksum"):
        chooser.go_back(20, lineage(tmp_path)[0])
    assert present(tmp_path) == ["r1-s10", "r1-s20", "r1-s30"]


def test_retention_keeps_links_between_rounds(tmp_path: Path) -> None:
    for step in (10, 20):
        entry = save(tmp_path, 1, step)
    relink(tmp_path, entry, 2)
    entry = save(tmp_path, 2, 30, (1, 20))
    (tmp_path / "r2-s20" / "state.pt").unlink()
    relink(tmp_path, entry, 3)
    save(tmp_path, 3, 40, (2, 30))
    retain(tmp_path, 3, 4)
    # r2-s30 is r3-s30's twin, but only its manifest knows that round 2 came from round 1.
    assert present(tmp_path) == ["r1-s10", "r1-s20", "r2-s30", "r3-s30", "r3-s40"]
    assert usable(tmp_path) == ["r3-s40", "r3-s30", "r2-s30", "r1-s20", "r1-s10"]


def test_retention_keeps_manifest_of_damaged_round(tmp_path: Path) -> None:
    """A damaged round's manifest stays, because it links the lineage to the parent."""
    relink(tmp_path, save(tmp_path, 1, 20), 2)
    for step in (30, 40):
        save(tmp_path, 2, step, (1, 20))
    for name in ("r2-s20", "r2-s30", "r2-s40"):
        (tmp_path / name / "state.pt").unlink()
    save(tmp_path, 1, 30)  # a zombie's, to be passed by as long as somebody knows
    assert [path.name for path in retain(tmp_path, 2, 1)] == ["r2-s20", "r2-s30"]
    assert usable(tmp_path) == ["r1-s20"]


def test_retention_keeps_last_good_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, 1, step)
    for step in (20, 30, 40):
        flip_a_bit(tmp_path / f"r1-s{step}" / "state.pt")
    retain(tmp_path, 1, 1)
    assert usable(tmp_path) == ["r1-s10"]
    flip_a_bit(tmp_path / "r1-s10" / "state.pt")
    before = present(tmp_path)
    save(tmp_path, 2, 5)
    flip_a_bit(tmp_path / "r2-s5" / "state.pt")
    save(tmp_path, 2, 6)
    flip_a_bit(tmp_path / "r2-s6" / "state.pt")
    assert retain(tmp_path, 2, 1) == []  # nothing good is left to stand on
    assert present(tmp_path) == [*before, "r2-s5", "r2-s6"]


def test_retention_of_zombie_deletes_only_its_own(tmp_path: Path) -> None:
    """A zombie deletes only its own checkpoints, and none that the lineage needs."""
    for step in (10, 20):
        entry = save(tmp_path, 1, step)
    relink(tmp_path, entry, 2)
    for step in (30, 40, 50, 60):
        save(tmp_path, 1, step)
    assert [path.name for path in retain(tmp_path, 1, 2)] == ["r1-s30", "r1-s40", "r1-s20"]
    assert usable(tmp_path) == ["r2-s20", "r1-s10"]


def test_retention_keeps_other_lineage_and_newer_version(tmp_path: Path) -> None:
    """An abandoned lineage and checkpoints of a newer elasticd are left alone."""
    save(tmp_path, 1, 1000)
    save(tmp_path, 2, 5)  # somebody started over
    edit(save(tmp_path, 3, 9, (2, 5)).path, version="2.0")
    entry = lineage(tmp_path)[0][0]
    relink(tmp_path, entry, 4)
    for step in (10, 11, 12):
        save(tmp_path, 4, step, (2, 5))
    retain(tmp_path, 4, 2)
    assert present(tmp_path) == ["r1-s1000", "r3-s9", "r4-s11", "r4-s12"]


def test_lineage_lock_and_retention_import_no_torch(tmp_path: Path) -> None:
    save(tmp_path, 1, 10)
    save(tmp_path, 1, 20)
    script = (
        "import sys; from pathlib import Path; from elasticd.checkpointing.storage.checkpoint_files import relink\n"
        "from elasticd.checkpointing.storage.directory_lock import DirectoryLock\n"
        "from elasticd.checkpointing.storage.lineage import highest_round, lineage\n"
        "from elasticd.checkpointing.storage.retention import retain\n"
        "d = Path(sys.argv[1])\n"
        "lock = DirectoryLock(d, 'job', 'run'); lock.acquire()\n"
        "assert highest_round(d) == 1 and len(lineage(d)[0]) == 2\n"
        "relink(d, lineage(d)[0][0], 2); retain(d, 1, 1)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-W", "error", "-c", script, tmp_path], env=environment, check=True, timeout=60)
