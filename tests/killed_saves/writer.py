"""The launcher's writer, killed at its system calls while it takes a worker's state and makes it a checkpoint.

A worker hands its state over and dies; no round follows, so the launcher asks for a flush. After a kill one of three
things happens, and each must have the newest state that a system call of the writer has made whole, in the memory or,
by a rename, in the directory:

    another writer finds the launcher's memory, and a new round restores
    another writer finds the launcher's memory, and the launcher asks for a flush again
    the launcher has died as well, and a new job restores from the directory
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticd import channel
from elasticd.checkpointing.memory.buffers import Buffers, WriteTask, donated_number
from elasticd.checkpointing.memory.writer import Writer
from elasticd.checkpointing.memory.writer_client import WriterClient
from elasticd.checkpointing.storage.manifest import MANIFEST, NO_CHECKSUM, Manifest, read
from tests.killed_saves import durability, situations
from tests.killed_saves.situations import Expected, Situation, Tell
from tests.killed_saves.tracer import Point, Trace, fork, mark, run, trace

_MEMORY = "killed-writer"
_DRAWN = re.compile(rb'"(token|blocked_s)": [^,}]*')


@dataclass(frozen=True)
class Handover:
    """How a worker hands its state over, in a directory with three checkpoints or with none."""

    name: str
    has_before: bool = True
    ranks: int = 1  #: of the job; the states of two are shards of one
    at_fault: bool = True  #: only a flush makes it a checkpoint
    keep: int = 1


HANDOVERS = [
    Handover("a worker's state, the first of all", has_before=False),
    Handover("a worker's state", keep=9),
    Handover("a worker's state that prunes"),
    Handover("a worker's last save", at_fault=False),
    Handover("sharded: the workers' states", ranks=2),
]


@dataclass(frozen=True)
class State:
    """What the workers hand over."""

    draft: Manifest
    files: dict[str, bytes]
    digests: list[str]  #: by rank


class Launcher:
    """The launcher's socket and its memory."""

    def __init__(self, folder: Path, contents: Sequence[bytes] = (b"",) * 4) -> None:
        self._folder = folder
        self.path = folder / "writer"
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._memory = [os.memfd_create(_MEMORY) for _ in contents]
        for fd, content in zip(self._memory, contents, strict=True):
            os.pwrite(fd, content, 0)
        self._pids = os.pipe()

    def close(self) -> None:
        self._listener.close()
        for fd in (*self._memory, *self._pids):
            os.close(fd)

    def contents(self) -> list[bytes]:
        return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in self._memory]

    def digest(self) -> str:
        """Of what is whole in the memory, without what differs between equal runs."""
        digest, headers = hashlib.sha256(), Buffers(self._memory[0], self._memory[1:])
        for fd, held in zip(self._memory[1:], headers.held, strict=True):
            content = os.pread(fd, os.fstat(fd).st_size, 0) if held else b""
            digest.update((_DRAWN.sub(b"", held.to_json()) if held else b"-") + hashlib.sha256(content).digest())
        return digest.hexdigest()

    def write(self, _: Tell) -> None:
        """The writer's process. All its calls count."""
        errors = os.open(self._folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 2)
        os.write(self._pids[1], os.getpid().to_bytes(4, "little"))
        mark()
        assert Writer(self._listener, Buffers(self._memory[0], self._memory[1:])).run() == 0
        mark()

    def hand_over(self, handover: Handover, state: State, directory: Path, tell: Tell) -> None:
        """The worker's process until it dies, then the launcher's."""
        again = "after the fault"
        task = WriteTask(str(directory), handover.keep, "at a fault", again, "", 0, 0.0, token="e")
        number = donated_number(state.draft.step, 0) if handover.at_fault else 1
        worker = WriterClient(str(self.path), 0, 1, is_first_node=True, make_task_at_end=lambda: task)
        fd, _ = worker.borrow_buffer(state.draft, number, 0, 1, "")
        files, at = {}, 0
        for name, content in state.files.items():
            os.pwrite(fd, content, at)
            files[name], at = (at, len(content)), at + len(content)
        is_due = not handover.at_fault
        worker.report_copied(
            state.draft, number, 0, (lambda: task) if is_due else None, files if len(files) > 1 else None
        )
        worker.close()
        tell(json.dumps(self.flush()))
        os.kill(int.from_bytes(os.read(self._pids[0], 4), "little"), signal.SIGTERM)

    def flush(self) -> channel.Message:
        with channel.connect(str(self.path), 60.0) as connection:
            channel.send(connection, {"do": "flush"})
            answer = channel.receive(connection)
            assert answer is not None
            return answer

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Another writer; the path of its socket."""
        pid, told, go = fork(self.write_unseen)
        os.close(told)
        os.close(go)
        os.read(self._pids[0], 4)
        try:
            yield str(self.path)
        finally:
            os.kill(pid, signal.SIGTERM)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == 0, code

    def write_unseen(self, tell: Tell) -> None:
        signal.signal(signal.SIGRTMIN + 7, signal.SIG_IGN)  # nobody traces it
        self.write(tell)


def check(handover: Handover, base: Path, kills: int) -> dict[str, object]:
    """Kill the writer at `kills` of the points of its life; the row of the table."""
    present, state = _prepare(handover, base)
    directory = base / "run" / "d"
    changing = (str(directory), f"/memfd:{_MEMORY}")

    def life(point: Point | None) -> tuple[Trace, Launcher]:
        shutil.rmtree(directory.parent, ignore_errors=True)
        directory.parent.mkdir(mode=0o700)
        _copy(base / "origin" / "d", directory)
        launcher = Launcher(directory.parent)
        bodies = [launcher.write, lambda tell: launcher.hand_over(handover, state, directory, tell)]
        return trace(bodies, changing, point), launcher

    judged: dict[tuple[str, ...], list[str]] = {}

    def judge(done: Trace, launcher: Launcher) -> list[str]:
        whole = any(
            call.name == "pwrite64" and call.paths[0].startswith(changing[1]) and call.size == call.result > 8
            for call in done.changes
        )
        lines = [json.dumps({"name": state.draft.name, "digest": each, "traced": True}) for each in state.digests]
        on_disk = present.after(Trace(changes=done.changes, told=lines)).digest
        newest = " ".join(state.digests) if whole else on_disk
        case = (situations.content(directory), launcher.digest(), on_disk, newest)
        if case not in judged:
            judged[case] = _judge(handover, state if whole else None, directory, launcher.contents(), on_disk, newest)
        launcher.close()
        return judged[case]

    done, launcher = life(None)
    assert done.codes == [0, 0], (done.codes, (directory.parent / "errors").read_text())
    assert json.loads(done.told[1]) == {"step": state.draft.step, "path": str(directory / state.draft.name), "why": ""}
    wrong = [*durability.breaches(done, str(directory)), *judge(done, launcher)]
    # After one call is before the next.
    points, fired = [point for point in done.points(changing) if point.when != "after"], 0
    for point in points[:: max(len(points) // kills, 1)] if kills else []:
        killed, launcher = life(point)
        fired += killed.fired
        wrong += [f"killed at {point}, {killed.calls[-1:]}: {why}" for why in judge(killed, launcher)]
    shutil.rmtree(base)
    row = {"name": handover.name, "calls": len(done.calls), "points": len(points), "directories": len(judged)}
    return row | {"killed": fired, "wrong": wrong}


def _prepare(handover: Handover, base: Path) -> tuple[Expected, State]:
    """Make the directory in which the life begins, and the state of a round that goes on from there."""
    (base / "origin").mkdir(parents=True, mode=0o700)
    (base / "aside").mkdir(mode=0o700)
    before = Situation("", situations.next_save, situations.three_saves if handover.has_before else None)
    before = dataclasses.replace(before, ranks=handover.ranks)
    present = situations.prepare(before, origin := base / "origin" / "d")
    _copy(origin, aside := base / "aside" / "d")
    told = run(situations.bodies(before, aside, 2, _save))
    (name,) = situations.digests(told, traced=False)
    draft = read(aside / name)
    assert isinstance(draft, Manifest)
    files = {path.name: path.read_bytes() for path in sorted((aside / name).iterdir()) if path.name != MANIFEST}
    size = sum(map(len, files.values()))
    draft = dataclasses.replace(draft, bytes=size, checksum=NO_CHECKSUM, files={})
    return present, State(draft, files, [json.loads(each)["digest"] for each in told])


def _save(script: situations.Script) -> None:
    script.open()
    script.session.restore()
    script.train()
    script.save()


def _judge(
    handover: Handover, state: State | None, directory: Path, memory: Sequence[bytes], on_disk: str, newest: str
) -> list[str]:
    """What is wrong with what is found in the directory, and in the memory if there is `state` in it."""
    aside = directory.parent / "aside"
    if directory.exists():
        os.rename(directory, aside)
    situation = Situation(handover.name, situations.restore, ranks=handover.ranks)
    wrong = []

    def begin(contents: Sequence[bytes] = (b"",) * 4) -> Launcher:
        shutil.rmtree(directory, ignore_errors=True)
        for events in directory.parent.glob("e*-3-*"):
            events.unlink()
        _copy(aside, directory)
        return Launcher(directory.parent, contents)

    def look(what: str, expected: str, writer: contextlib.AbstractContextManager[str]) -> None:
        why = situations.judge(situation, directory, expected, writer)
        wrong.extend([f"{what}: {why}"] if why else [])

    launcher = begin()
    look("a new job", on_disk, situations.NO_WRITER)
    launcher.close()
    launcher = begin(memory)
    look("a new round", newest, launcher.running())
    launcher.close()
    launcher = begin(memory)
    with launcher.running():
        answer = launcher.flush()
    if state is not None:
        there = {"step": state.draft.step, "path": str(directory / state.draft.name), "why": ""}
        wrong += [f"the flush says {answer}"] if answer != there else []
    look("a new job after a flush", newest, situations.NO_WRITER)
    launcher.close()
    if errors := (directory.parent / "errors").read_text():
        wrong.append(f"a writer says {errors}")
    return wrong


def _copy(source: Path, target: Path) -> None:
    if source.exists():
        shutil.copytree(source, target)
