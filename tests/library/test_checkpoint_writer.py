"""The writer process: what becomes of a state when ranks, the writer, the disk or the memory fail."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpointing.memory import peer, writer_client
from elasticd.checkpointing.memory import writer as writer_module
from elasticd.checkpointing.memory.buffers import (
    ANOTHER_SAVES_REASON,
    PROTOCOL_VERSION,
    STILL_COPIED_REASON,
    Buffers,
    Snapshot,
    WriteTask,
    donated_number,
)
from elasticd.checkpointing.memory.writer import Writer
from elasticd.checkpointing.memory.writer_client import SnapshotRefused, WriterClient
from elasticd.checkpointing.state.layout import Layout, load_mapped, write_at
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, Manifest
from elasticd.heartbeat.worker_events import WorkerEvent, WorkerEventReader
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage
from tests.library.conftest import wait_for
from tests.library.writers import Node

SIZE = 1000
GONE = "writer ended|not connected|Broken pipe|reset by peer|refused|No such file"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path / "node")
    yield one
    one.close()


def state(step: int, size: int = SIZE) -> dict[str, Any]:
    return {"weights": torch.full((size,), float(step)), "own": torch.full((7,), -float(step)), "step": step}


class Saves:
    """A job of two local ranks that saves through a node's writer."""

    def __init__(self, node: Node, tmp_path: Path, shares: int = 2) -> None:
        self.node = node
        self.directory = tmp_path / "checkpoints"
        self.notes = tmp_path / "notes"
        self.ranks = [node.client(share, shares) for share in range(shares)]
        self.number = 0

    def layout(self, step: int, size: int = SIZE) -> Layout:
        content = state(step, size)
        return Layout(content, frozenset([content["weights"].untyped_storage().data_ptr()]))

    def draft(self, layout: Layout, step: int, round: int = 1) -> Manifest:
        return Manifest(round, step, None, 2, layout.bytes, NO_CHECKSUM, "job", "run", None, 0.0)

    def task(self) -> WriteTask:
        return WriteTask(str(self.directory), 3, "by a test", "it is tried again", str(self.notes), 0, 0.01)

    def copy(self, rank: WriterClient, step: int, size: int = SIZE, round: int = 1) -> None:
        layout = self.layout(step, size)
        task = self.task if rank.share == 0 else None
        rank.copy_share(self.draft(layout, step, round), self.number, layout, layout.copy_unshared, task)

    def save(self, step: int, size: int = SIZE, round: int = 1) -> None:
        self.number += 1
        for rank in self.ranks:
            self.copy(rank, step, size, round)

    def wait(self, round: int = 1) -> dict[str, Any]:
        return self.ranks[0].wait_for_result(round, self.number, 60)

    def held(self) -> int:
        """The step of the newest state in memory, 0 for none; every one is verified."""
        for each in self.ranks[0].find_all():
            fd, _, _ = self.ranks[0].open_buffer(each.key)
            try:
                assert_whole(load_mapped(fd), each.draft.step)
            finally:
                os.close(fd)
        found = self.ranks[0].find_newest()
        return found.draft.step if found is not None else 0

    def on_disk(self) -> list[int]:
        entries = verified_lineage(self.directory)[0]
        for entry in entries:
            assert_whole(checkpoints.load(entry), entry.manifest.step)
        return [entry.manifest.step for entry in entries]

    def events(self) -> list[WorkerEvent]:
        """What became of the saves."""
        return [event for event in self.all_events() if event.kind != "snapshot"]

    def all_events(self) -> list[WorkerEvent]:
        found, wrong = WorkerEventReader(self.notes).read()
        assert wrong == []
        return found

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def assert_whole(loaded: dict[str, Any], step: int) -> None:
    assert loaded["step"] == step
    assert bool((loaded["weights"] == step).all()) and bool((loaded["own"] == -step).all())


@pytest.fixture
def saves(node: Node, tmp_path: Path) -> Iterator[Saves]:
    made = Saves(node, tmp_path)
    yield made
    made.close()


def test_shares_of_ranks_become_a_checkpoint(saves: Saves) -> None:
    saves.save(5)
    assert saves.wait() == {"saved": True, "path": str(saves.directory / "r1-s5"), "why": ""}
    assert (saves.held(), saves.on_disk()) == (5, [5])
    whole, event = saves.all_events()
    assert (whole.kind, whole.step) == ("snapshot", 5)
    assert (event.kind, event.step, event.extra["seconds"]) == ("checkpoint_saved", 5, 0.01)
    assert 0.01 < event.extra["written_seconds"] < 60
    for step in range(6, 12):
        saves.save(step)
        assert saves.wait()["saved"]
    assert saves.held() == 11
    saves.node.end()  # retention follows the last save
    assert saves.on_disk() == [11, 10, 9]


def test_state_that_grows_and_shrinks(saves: Saves) -> None:
    for step, size in enumerate((1000, 100_000, 10, 2_000_000, 1), start=1):
        saves.save(step, size)
        assert saves.wait()["saved"]
        assert saves.held() == step
    saves.node.end()
    assert saves.on_disk() == [5, 4, 3]


@pytest.mark.parametrize("moment", ["before its copy", "between copy and report"])
@pytest.mark.parametrize("dies", [0, 1])
def test_rank_killed_during_its_copy(saves: Saves, dies: int, moment: str) -> None:
    """The state of the last save stays whole, and the next save works."""
    saves.save(1)
    assert saves.wait()["saved"]
    saves.number += 1
    layout = saves.layout(2)
    fd, _ = saves.ranks[dies].borrow_buffer(saves.draft(layout, 2), saves.number, dies, 2, layout.shared_digest)
    if moment == "between copy and report":
        layout.copy_shared(functools.partial(write_at, fd), dies, 2)
        layout.copy_unshared(fd)
    os.close(fd)
    saves.ranks[dies].close()
    saves.copy(saves.ranks[1 - dies], 2)
    if dies:
        assert saves.wait() == {
            "saved": False,
            "path": "",
            "why": "a rank ended while it copied its share of the state",
        }
    assert saves.held() == 1
    saves.save(3)
    assert saves.wait()["saved"]
    assert (saves.held(), saves.on_disk()) == (3, [3, 1])
    assert [event.step for event in saves.events() if event.kind == "checkpoint_failed"] == ([2] if dies else [])


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 first", "rank 1 first"])
@pytest.mark.parametrize(("step", "size"), [(1, SIZE + 1), (2, SIZE)], ids=["other shape", "other values"])
def test_states_that_differ_are_not_mixed(saves: Saves, step: int, size: int, first: int) -> None:
    """The first such save fails; from then on rank 0's state is saved, until the next round."""
    saves.number += 1
    saves.copy(saves.ranks[1], step, size)
    saves.copy(saves.ranks[0], 1)
    assert not saves.wait()["saved"]
    assert saves.held() == 0
    assert "hold different states" in saves.events()[0].reason
    saves.number += 1
    for rank in (first, 1 - first):
        with pytest.raises(SnapshotRefused, match="hold different states") if rank else contextlib.nullcontext():
            saves.copy(saves.ranks[rank], 4 if rank else 3)
    assert saves.wait()["saved"]
    assert (saves.held(), saves.on_disk()) == (3, [3])
    saves.save(5, round=2)
    assert saves.wait(round=2)["saved"]
    assert saves.held() == 5


def test_rank_that_comes_to_an_older_save_is_refused(saves: Saves) -> None:
    saves.number += 1
    saves.copy(saves.ranks[0], 1)
    saves.number += 1
    saves.copy(saves.ranks[0], 2)
    saves.number -= 1
    with pytest.raises(SnapshotRefused, match="a later save has begun"):
        saves.copy(saves.ranks[1], 1)
    saves.number += 1
    saves.copy(saves.ranks[1], 2)
    assert saves.wait()["saved"]
    assert saves.on_disk() == [2]
    assert "before every rank had copied" in saves.events()[0].reason


@pytest.mark.parametrize(
    "message",
    [
        b"neither JSON nor text: \xff",
        b"[]",
        b"{}",
        b'{"do": "what_a_later_version_does"}',
        b'{"do": "begin", "round": 2, "number": 2}',
        b'{"do": "begin", "round": "2", "number": null, "share": 0, "shares": 1, "size": 9, "digest": ""}',
        b'{"do": "adopt", "round": 1, "number": 1}',
        b'{"do": "wait"}',
    ],
    ids=range(8),
)
def test_message_that_cannot_be_used_ends_only_its_connection(saves: Saves, message: bytes) -> None:
    saves.save(1)
    assert saves.wait()["saved"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(str(saves.node.path))
        other.settimeout(30)
        other.send(message)
        assert other.recv(100) == b""
    saves.save(2)
    assert saves.wait()["saved"]
    assert (saves.held(), saves.on_disk()) == (2, [2, 1])


@pytest.mark.parametrize("call", ["save", "find", "open", "adopt", "wait"])
def test_rank_of_another_version_is_refused(saves: Saves, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saves.save(1)
    assert saves.wait()["saved"]
    draft = saves.draft(saves.layout(1), 1)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: saves.save(2),
        "find": saves.ranks[0].find_newest,
        "open": lambda: saves.ranks[0].open_buffer((1, 1)),
        "adopt": lambda: saves.ranks[0].adopt((1, 1), draft.relinked_to(2), None),
        "wait": saves.wait,
    }
    with monkeypatch.context() as patch:
        patch.setattr(writer_client, "PROTOCOL_VERSION", 99)
        with pytest.raises(SnapshotRefused, match="another version of the writer's protocol: 99, and the launcher's"):
            calls[call]()
    assert (saves.held(), saves.on_disk()) == (1, [1])


def unfinished(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if "staging" in name] if directory.exists() else []


@pytest.mark.parametrize("times", [1, 3])
def test_successor_of_killed_writer_finishes_the_write(saves: Saves, times: int) -> None:
    saves.save(1, 30_000_000)
    for _ in range(times):
        wait_for(lambda: unfinished(saves.directory), "a checkpoint being written")
        assert saves.node.end(signal.SIGKILL) == -signal.SIGKILL
        assert saves.on_disk() == []  # it was killed while it wrote
        for name in unfinished(saves.directory):
            (saves.directory / name).rename(saves.directory / name.replace("staging", "trash"))
        saves.node.start()
    assert saves.wait()["saved"]
    assert (saves.held(), saves.on_disk()) == (1, [1])
    assert not unfinished(saves.directory)


def test_killed_writer_costs_the_save_in_progress_only(saves: Saves) -> None:
    saves.save(1)
    assert saves.wait()["saved"]
    saves.number += 1
    saves.copy(saves.ranks[0], 2)
    saves.node.end(signal.SIGKILL)
    saves.node.start()
    saves.copy(saves.ranks[1], 2)
    assert not saves.wait()["saved"]
    assert (saves.held(), saves.on_disk()) == (1, [1])
    saves.save(3)
    assert saves.wait()["saved"]
    assert (saves.held(), saves.on_disk()) == (3, [3, 1])


def test_writer_killed_between_two_saves_costs_none(saves: Saves) -> None:
    """Rank 0 has waited for the first one, and knows the successor."""
    saves.save(1)
    assert saves.wait()["saved"]
    saves.node.end(signal.SIGKILL)
    saves.node.start()
    assert saves.wait()["saved"]
    saves.save(2)
    assert saves.wait()["saved"]
    assert (saves.held(), saves.on_disk()) == (2, [2, 1])


KILLED_AT = """
import os, runpy, signal, sys, threading
gate, name, target, number, when = [sys.argv.pop(1) for _ in range(5)]
call, left = getattr(os, name), int(number)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def hurt(*args):
    global left
    where = str(args[1]) if name == "rename" else os.readlink(f"/proc/self/fd/{args[0]}")
    left -= os.path.exists(gate) and where.endswith(target)
    if left or not os.path.exists(gate):
        return call(*args)
    if when == "during":
        threading.Timer(0.05, kill).start()
        while True:
            call(*args)
    if when == "half":
        call(args[0], args[1][: len(args[1]) // 2], *args[2:])
    if when == "after":
        call(*args)
    kill()

setattr(os, name, hurt)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HEADERS = "test-0 (deleted)"
KILLS: dict[str, tuple[tuple[str, str, int, str], int, bool]] = {
    "before the copy": (("pwrite", HEADERS, 1, "before"), 1, False),
    "between data and header": (("pwrite", HEADERS, 2, "before"), 1, False),
    "in the header": (("pwrite", HEADERS, 2, "half"), 1, False),
    "between header and write": (("pwrite", HEADERS, 2, "after"), 2, False),
    "in the write": (("write", "/state.pt", 2, "half"), 2, False),
    "in the fsync of the state": (("fsync", "/state.pt", 1, "during"), 2, False),
    "between state and manifest": (("write", "/manifest.json", 1, "before"), 2, False),
    "in the manifest": (("write", "/manifest.json", 1, "half"), 2, False),
    "in the fsync of the manifest": (("fsync", "/manifest.json", 1, "during"), 2, False),
    "before the rename": (("rename", "/r1-s2", 1, "before"), 2, False),
    "after the rename": (("rename", "/r1-s2", 1, "after"), 2, True),
    "in the fsync of the directory": (("fsync", "/checkpoints", 1, "during"), 2, True),
    "between the rename and the header": (("pwrite", HEADERS, 3, "before"), 2, True),
}
"""A call of the writer's, the end of the file's name, which of these calls, and when; the step that its successor finds
in memory then, and whether the checkpoint is there."""


def give_up() -> None:
    raise ConnectionResetError("the writer ended")


@contextlib.contextmanager
def killed_at(saves: Saves, place: tuple[str, str, int, str], *clients: WriterClient) -> Iterator[None]:
    """The writer has saved step 1, and what is done here gets it to this place; then there is a successor."""
    gate = saves.notes.with_name("gate")
    saves.node.end()
    saves.node.start(sys.executable, "-c", KILLED_AT, str(gate), *map(str, place))
    for _ in range(2):  # both buffers hold a state
        saves.save(1)
        assert saves.wait()["saved"]
    gate.touch()
    for client in (*saves.ranks, *clients):  # or it would wait for the successor, which comes when it has given up
        client.before_successor = give_up
    with contextlib.suppress(OSError):
        yield
    for client in (*saves.ranks, *clients):
        client.before_successor = None
    assert saves.node.process is not None and saves.node.process.wait(30) == -signal.SIGKILL
    saves.close()
    saves.node.start()


@pytest.mark.parametrize(("place", "held", "is_saved"), KILLS.values(), ids=KILLS)
def test_writer_killed_at_each_phase_of_a_save(
    saves: Saves, place: tuple[str, str, int, str], held: int, is_saved: bool
) -> None:
    """The last whole state is in memory and becomes a checkpoint; the save before it is never touched."""
    with killed_at(saves, place):
        saves.save(2, 3_000_000)
    assert saves.on_disk() == ([2, 1] if is_saved else [1])
    assert saves.held() == held
    assert saves.wait()["saved"] == (held == 2)
    assert saves.on_disk() == [*range(held, 0, -1)]
    saves.save(3)
    assert saves.wait()["saved"]
    assert saves.on_disk()[0] == saves.held() == 3
    assert not unfinished(saves.directory)


@pytest.mark.parametrize("phase", [phase for phase, (place, *_) in KILLS.items() if place[0] == "pwrite"][:4])
def test_writer_killed_at_each_phase_of_a_save_at_a_fault(saves: Saves, phase: str) -> None:
    place, held, _ = KILLS[phase]
    donor = saves.node.client()
    with killed_at(saves, place, donor):
        copy_at_fault(saves, donor, 2, 1, saves.task)
    donor.close()
    assert saves.held() == held
    assert saves.node.flush()["step"] == held
    assert saves.on_disk() == [*range(held, 0, -1)]


def test_writer_without_successor_is_an_error(saves: Saves) -> None:
    saves.save(1)
    assert saves.wait()["saved"]
    saves.node.end(signal.SIGKILL)
    saves.node.listener.close()
    with pytest.raises(OSError, match=GONE):
        saves.save(2)
    with pytest.raises(OSError, match=GONE):
        saves.wait()


def test_full_disk_is_reported_and_works_again(saves: Saves) -> None:
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        return  # without the right to mount: the test of a directory that cannot be written is the same path
    saves.directory.mkdir()
    saves.node.end()
    mount = f'mount -t tmpfs -o size=2m none {saves.directory} && exec "$@"'
    saves.node.start(*unshare, "sh", "-c", mount, "sh")
    for step, size in ((1, SIZE), (2, 1_000_000), (3, SIZE)):
        saves.save(step, size)
        result = saves.wait()
        assert result["saved"] == (step != 2)
        assert saves.held() == step
        assert step != 2 or "No space left on device" in result["why"]
    assert [event.kind for event in saves.events()] == ["checkpoint_saved", "checkpoint_failed", "checkpoint_saved"]


def test_directory_that_cannot_be_written_is_reported(saves: Saves) -> None:
    saves.directory.write_text("a file where a directory should be")
    saves.save(1)
    assert not saves.wait()["saved"]
    assert (saves.held(), saves.events()[0].kind) == (1, "checkpoint_failed")
    saves.directory.unlink()
    saves.save(2)
    assert saves.wait()["saved"]


def test_directory_of_another_run_is_not_written(saves: Saves) -> None:
    other = DirectoryLock(saves.directory, "job", "another run")
    other.acquire()
    saves.save(1)
    assert "another run" in saves.wait()["why"]
    other.release()
    saves.save(2)
    assert saves.wait()["saved"]


def test_disk_slower_than_saves_leaves_states_out(saves: Saves) -> None:
    deadline = time.monotonic() + 60
    step = 0
    while not any("was not written: a newer state" in event.reason for event in saves.events()):
        assert time.monotonic() < deadline
        step += 1
        saves.save(step, 5_000_000)
    assert saves.wait()["saved"], "the newest state waits for the disk and is never left out"
    assert saves.held() == step
    saves.node.end()
    assert saves.on_disk()[0] == step
    assert all(event.kind in ("checkpoint_saved", "checkpoint_dropped") for event in saves.events())


def test_state_too_large_for_memory_is_refused_with_figures(saves: Saves) -> None:
    layout = saves.layout(1)
    draft = replace(saves.draft(layout, 1), bytes=1 << 50)
    with pytest.raises(SnapshotRefused, match=r"two copies of a state of \d+ MB take \d+ MB more, and \d+ MB are left"):
        saves.ranks[0].copy_share(draft, 1, layout, layout.copy_unshared, saves.task)
    saves.number = 1
    saves.save(2)
    assert saves.wait()["saved"]


@pytest.mark.parametrize("damage", [b"\0" * 40, b"\xff" * 8, b'{"version": "9"'])
def test_damaged_header_is_no_state(saves: Saves, damage: bytes) -> None:
    """Torn by the death of a writer, or of another version."""
    saves.save(1)
    assert saves.wait()["saved"]
    saves.node.end(signal.SIGKILL)
    for number in range(2):
        os.pwrite(saves.node.memory[0], damage, (number << 20) + (40 if damage.startswith(b"{") else 0))
    saves.node.start()
    saves.close()
    assert saves.held() == 0
    saves.save(2)
    assert saves.wait()["saved"]


def test_round_that_resumed_adopts_the_state(saves: Saves) -> None:
    """Also while an older round's checkpoint of it is written: a re-link, or a file of its own."""
    saves.save(5)
    assert saves.wait()["saved"]
    found = saves.ranks[0].find_newest()
    saves.ranks[0].adopt(found.key, found.draft.relinked_to(2), saves.task())
    saves.number = 0
    assert saves.wait(round=2)["saved"]
    newest, parent = verified_lineage(saves.directory)[0]
    assert (newest.manifest.round, newest.manifest.relinked, newest.manifest.parent) == (2, True, (1, 5))
    assert os.path.samefile(newest.path / "state.pt", parent.path / "state.pt")
    again = saves.ranks[0].find_newest()
    assert again is not None and (again.draft.round, again.draft.step) == (2, 5)


def test_sigterm_lets_the_writer_finish(saves: Saves) -> None:
    saves.save(1, 10_000_000)
    assert saves.node.end(signal.SIGTERM) == 0
    assert saves.on_disk() == [1]


def test_rank_takes_over_from_one_that_dies_while_it_saves_at_a_fault(node: Node, saves: Saves) -> None:
    saves.save(10)
    first, second = (node.client(0, 1) for _ in range(2))
    layout = saves.layout(12)
    draft = saves.draft(layout, 12)
    numbers = [donated_number(12, rank) for rank in (0, 2)]
    fd, _ = first.borrow_buffer(draft, numbers[0], 0, 1, layout.shared_digest)
    os.close(fd)
    with pytest.raises(SnapshotRefused, match=ANOTHER_SAVES_REASON):
        second.borrow_buffer(draft, numbers[1], 0, 1, layout.shared_digest)
    first.close()

    finish_at_fault(saves, second, 12, 2)
    third = node.client(0, 1)
    with pytest.raises(SnapshotRefused, match=ANOTHER_SAVES_REASON):  # not copied again
        third.borrow_buffer(draft, donated_number(12, 1), 0, 1, layout.shared_digest, once=True)
    third.close()
    assert saves.held() == 12


def finish_at_fault(
    saves: Saves, rank: WriterClient, step: int, number: int, task: Callable[[], WriteTask] | None = None
) -> None:
    """Save as soon as the writer lends a buffer, as a rank does at a fault; what it holds stays until then."""

    def save() -> bool:
        with contextlib.suppress(SnapshotRefused):
            copy_at_fault(saves, rank, step, number, task)
            return True
        return False

    wait_for(save, "the buffer")
    wait_for(lambda: saves.held() == step, f"the state of step {step}")
    rank.close()


def copy_at_fault(
    saves: Saves, rank: WriterClient, step: int, number: int, task: Callable[[], WriteTask] | None = None
) -> None:
    layout, before = saves.layout(step), saves.held()
    draft, number = saves.draft(layout, step), donated_number(step, number)
    fd, _ = rank.borrow_buffer(draft, number, 0, 1, layout.shared_digest)
    assert saves.held() == before
    layout.copy_shared(functools.partial(write_at, fd), 0, 1)
    layout.copy_unshared(fd)
    os.close(fd)
    rank.report_copied(draft, number, 0, task)


FORKS = """
import os, socket, sys, time
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
connection.send(sys.argv[2].encode())
connection.recv(4096)
if child := os.fork():
    os.write(1, b"%d" % child)
    os._exit(0)
os.close(1)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["by itself", "while a child holds its connection", "by an exception that it catches"])
def test_state_is_saved_at_a_fault_once_a_rank_that_copies_a_save_has_ended(node: Node, saves: Saves, end: str) -> None:
    """Until then the newest whole state is not given up for it."""
    saves.save(1)
    assert saves.wait()["saved"]
    layout = saves.layout(2)
    donor = node.client()
    begin = {"do": "begin", "round": 1, "number": 2, "share": 0, "shares": 2, "size": layout.bytes}
    begin |= {"digest": layout.shared_digest, "version": PROTOCOL_VERSION}
    child = 0
    if end == "by itself":
        os.close(saves.ranks[0].borrow_buffer(saves.draft(layout, 2), 2, 0, 2, layout.shared_digest)[0])
        for _ in range(2):
            with pytest.raises(SnapshotRefused, match=STILL_COPIED_REASON):
                donor.borrow_buffer(saves.draft(layout, 2), donated_number(2, 1), 0, 1, layout.shared_digest)
        assert saves.ranks[1].find_newest() is not None
        saves.ranks[0].close()
    elif end == "by an exception that it catches":

        def interrupted(fd: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            saves.ranks[0].copy_share(saves.draft(layout, 2), 2, layout, interrupted)
    else:
        argv = [sys.executable, "-ISc", FORKS, str(node.path), json.dumps(begin)]
        child = int(subprocess.check_output(argv))
    try:
        finish_at_fault(saves, donor, 2, 1)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


LEADER_ENDS = """
import ctypes, socket, sys, threading
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
threading.Thread(target=connection.recv, args=(4096,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_rank_has_ended_with_its_last_thread(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        process = subprocess.Popen([sys.executable, "-ISc", LEADER_ENDS, str(tmp_path / "socket")])
        connection, _ = listener.accept()
    with process, connection:
        wait_for(lambda: not peer.is_running(connection), "the end of its main thread")
        assert not peer.process_has_ended(connection)
        connection.send(b"end")
        wait_for(lambda: peer.process_has_ended(connection), "its end")


HELD_DISK = """
import os, runpy, sys, time
gate, fsync = sys.argv.pop(1), os.fsync

def held(fd):
    while os.path.exists(gate):
        time.sleep(0.005)
    fsync(fd)

os.fsync, sys.argv = held, sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_fault_while_the_disk_writes_one_save_and_a_rank_copies_the_next(
    node: Node, saves: Saves, tmp_path: Path
) -> None:
    """No buffer is free until the copying rank has ended; what the disk is writing stays as it is."""
    gate = tmp_path / "gate"
    node.end()
    node.start(sys.executable, "-c", HELD_DISK, str(gate))
    saves.save(1)
    assert saves.wait()["saved"]
    gate.touch()
    saves.save(2)
    wait_for(lambda: list(saves.directory.glob(".r1-s2.*.staging/state.pt")), "the write")
    layout = saves.layout(3)
    os.close(saves.ranks[0].borrow_buffer(saves.draft(layout, 3), 3, 0, 2, layout.shared_digest)[0])
    donor = node.client()
    with pytest.raises(SnapshotRefused, match=STILL_COPIED_REASON):
        donor.borrow_buffer(saves.draft(layout, 3), donated_number(3, 1), 0, 1, layout.shared_digest)
    saves.ranks[0].close()
    finish_at_fault(saves, donor, 3, 1, saves.task)
    gate.unlink()
    node.end()
    assert saves.on_disk() == [2, 1], "a round may resume from the state that was saved at the fault"
    node.start()
    assert node.flush() == {"step": 3, "path": str(saves.directory / "r1-s3"), "why": ""}
    assert saves.on_disk() == [3, 2, 1]


def test_flush_says_why_the_last_state_is_not_on_the_disk(node: Node, saves: Saves) -> None:
    assert node.flush() == {}
    saves.directory.write_text("a file where a directory should be")
    finish_at_fault(saves, node.client(), 3, 1, saves.task)
    result = node.flush()
    assert (result["step"], result["path"]) == (3, "") and result["why"]


@pytest.mark.parametrize(("room_for", "kept"), [(2, [None, 1, 2]), (1, [None, None, None])])
def test_part_of_a_sharded_state_stays_while_the_next_one_is_copied(
    monkeypatch: pytest.MonkeyPatch, room_for: int, kept: list[int | None]
) -> None:
    """Only where there is no memory for two parts the new one takes the place of the one before it."""
    node = [os.memfd_create("test") for _ in range(4)]
    buffers = Buffers(node[0], node[1:])

    def no_memory(size: int, wanted: list[int]) -> str:
        return "" if len({fd for fd in buffers.fds if os.fstat(fd).st_blocks} | {*wanted}) <= room_for else "no room"

    monkeypatch.setattr(writer_module, "no_memory_reason", no_memory)
    found = []
    with socket.socket() as listener:
        writer = Writer(listener, buffers)
        for number in (1, 2, 3):
            begin = {"round": 1, "number": number, "share": 0, "shares": 1, "size": SIZE, "copies": 1, "digest": ""}
            fill = writer.begin_fill((1, number), begin)
            assert not fill.refused
            os.pwrite(buffers.fds[fill.buffer], bytes(SIZE), 0)
            found.append(max((held.save_number for held in buffers.held if held), default=None))
            draft = Manifest(1, 10 * number, None, 1, SIZE, NO_CHECKSUM, "job", "run", None, 0.0)
            buffers.write_header(fill.buffer, Snapshot(draft, number, None, files={"__0_0.distcp": (0, SIZE)}))
        writer._selector.close()
    assert found == kept
    for fd in (*node, writer._wake_read, writer._wake_write):
        os.close(fd)
