"""The owner by itself: whatever way its agent goes, it ends without a word and leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import elasticd.checkpointing.memory.writer
from elasticd import channel
from elasticd.checkpointing.memory.buffers import PROTOCOL_VERSION, WriteTask, donated_number
from elasticd.checkpointing.memory.writer_client import WriterClient
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, Manifest
from elasticd_agent.system.processes.process import spawn
from elasticd_agent.workers.launcher import messages, writer_process
from elasticd_agent.workers.launcher.messages import Ended, Exited, Flush, Flushed, Flushing, Refused, Signal, Started
from tests.library.conftest import wait_for
from tests.workers.launcher.owner_process import ENV, OwnerProcess, execute


def test_agent_dies_with_unread_messages(tmp_path: Path) -> None:
    owner = OwnerProcess(tmp_path)
    refused = messages.Park(1, 1, True, "127.0.0.1", 0)
    owner.send(refused)
    assert isinstance(owner.receive(), Refused)
    owner.send(refused)  # its answer stays unread: closing then resets the connection
    assert owner.agent.recv(1, socket.MSG_PEEK)
    assert owner.end() == (0, "")
    assert not owner.runtime.exists()


@pytest.mark.parametrize(("packet", "error"), [(b"no JSON", "JSONDecodeError"), (b"[]", "a message is a JSON object")])
def test_a_mistake_of_its_own_ends_everything_all_the_same(tmp_path: Path, packet: bytes, error: str) -> None:
    owner = OwnerProcess(tmp_path)
    owner.send(messages.StartTemplate(["sleep", "600"], ENV, "/", {}))
    owner.agent.send(packet)
    code, errors = owner.wait()
    assert code == 1 and error in errors
    assert not owner.runtime.exists()  # the leak check finds the sleeper, were it left


def test_unknown_request_of_a_newer_agent(tmp_path: Path) -> None:
    """An agent one minor version newer is obeyed as far as we understand it."""
    owner = OwnerProcess(tmp_path)
    channel.send(owner.agent, {"type": "Freeze", "group": 9})
    request = messages.to_message(execute(1, ["true"]))
    request["workers"][0]["nice"] = 5
    channel.send(owner.agent, {**request, "cgroup": "/x"})
    assert owner.receive() == Refused("Freeze: this launcher is older and cannot do that", 9)
    assert [type(owner.receive()) for _ in range(3)] == [Started, Exited, Ended]
    assert owner.end() == (0, "")


def test_program_name_that_is_not_utf_8(tmp_path: Path) -> None:
    owner = OwnerProcess(tmp_path)
    owner.send(execute(1, ["/nowhere/\udcff"]))
    assert owner.until(Exited).status == 127 << 8
    owner.until(Ended)
    assert owner.runtime.exists(), "the failed worker has gone on as its parent"
    code, errors = owner.end()
    assert code == 0
    assert errors.count("\n") == 1 and errors.startswith("elasticd: cannot start /nowhere/\\udcff: ")


def test_template_killed_by_a_nameless_signal(tmp_path: Path) -> None:
    owner = OwnerProcess(tmp_path)
    owner.send(messages.StartTemplate(["sh", "-c", "kill -40 $$"], ENV, "/", {}))
    assert owner.until(messages.TemplateEnded).why in ("was killed by signal 40", "closed its socket")
    assert owner.end() == (0, "")


def test_template_that_cannot_be_started(tmp_path: Path) -> None:
    """Its manager hears of it at once, and does not wait for its imports."""
    owner = OwnerProcess(tmp_path)
    owner.send(messages.Park(1, 1, False, "127.0.0.1", 0))
    owner.until(Refused)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    before = resource.prlimit(owner.process.pid, resource.RLIMIT_NOFILE, (3, most))
    owner.send(messages.StartTemplate(["sleep", "600"], ENV, "/", {}))
    assert owner.receive() == messages.TemplateEnded("could not be started: Too many open files")
    resource.prlimit(owner.process.pid, resource.RLIMIT_NOFILE, before)
    assert owner.end() == (0, "")


def test_fork_that_fails_blocks_no_signal_of_later_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(BlockingIOError):
        spawn(["true"], {}, "/", None, None)
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == before


HOLD = messages.HoldStates([sys.executable, "-I", elasticd.checkpointing.memory.writer.__file__], {})


def connected(tmp_path: Path, at_end: Callable[[], WriteTask] | None = None) -> WriterClient:
    """A rank, once the owner's writer answers it."""
    rank = WriterClient(str(tmp_path / "run" / "writer"), 0, 1, True, at_end)

    def is_answered() -> bool:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            return rank.find_newest() is None
        rank.close()
        return False

    wait_for(is_answered, "the writer")
    return rank


def test_next_owner_has_a_writer_as_well(tmp_path: Path) -> None:
    """The one before it was killed, and its socket is still there."""
    for is_killed in (True, False):
        owner = OwnerProcess(tmp_path)
        owner.send(HOLD)
        connected(tmp_path).close()
        if is_killed:
            owner.process.kill()
            owner.wait()
    assert owner.end() == (0, "")


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_state_in_memory_is_written_at_the_end_though_its_writer_dies(tmp_path: Path, dies: str) -> None:
    owner = OwnerProcess(tmp_path)
    owner.send(HOLD)
    # Of two nodes: a writer waits a second for the other one.
    task = WriteTask(str(tmp_path / "checkpoints"), 3, "at the end", "", "", 0, 0.0, nodes=2)
    rank = connected(tmp_path, lambda: task)
    draft, number = Manifest(1, 5, None, 2, 1000, NO_CHECKSUM, "job", "run"), donated_number(5, 0)
    fd, _ = rank.borrow_buffer(draft, number, 0, 1, "")
    os.pwrite(fd, b"x" * 1000, 0)
    os.close(fd)
    rank.report_copied(draft, number, 0)
    assert rank.find_newest() is not None
    rank.close()
    pid = owner.process.pid
    (writer,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if dies == "meanwhile":
        owner.send(Flush())
        wait_for((tmp_path / "checkpoints" / "r1-s5").exists, "the checkpoint")
    os.kill(int(writer), signal.SIGKILL)
    if dies == "before":
        wait_for(lambda: not Path(f"/proc/{writer}").exists(), "the end of the writer")
        owner.send(Flush())
    for _ in range(2 if dies == "meanwhile" else 1):
        assert owner.receive() == Flushing(4096)
    assert owner.receive() == Flushed(5, str(tmp_path / "checkpoints" / "r1-s5"))
    assert owner.end() == (0, "")


@pytest.mark.parametrize("answers", [True, False])
def test_rank_that_gets_no_processor_at_a_fault_has_the_time_that_would_be_lost(tmp_path: Path, answers: bool) -> None:
    """It answers after 0.6 s, long after the time that a copy takes, or never."""
    owner = OwnerProcess(tmp_path)
    owner.send(HOLD)
    connected(tmp_path).close()
    owner.send(execute(1, ["sleep", "600"]))
    owner.until(Started)
    begun = time.monotonic()
    with channel.connect(str(owner.runtime / "writer")) as rank:
        channel.send(rank, {"do": "donor", "round": 1, "version": PROTOCOL_VERSION})
        time.sleep(3.0 if answers else 1.2)  # it trains
        owner.send(Signal(1, signal.SIGKILL, save=1))
        asked = time.monotonic()
        assert channel.receive(rank) == {"save": 1, "signum": signal.SIGKILL, "stays": 0}
        if answers:
            time.sleep(0.6)
            channel.send(rank, {"do": "donated"})
        report = owner.receive()
    waited_s = time.monotonic() - asked
    if answers:
        assert isinstance(report, Exited), report
        assert waited_s >= 0.6
    else:
        assert isinstance(report, messages.Unsaved) and report.ranks == 1
        assert min(asked - begun, writer_process.MAX_FIRST_ANSWER_S) - 0.1 <= report.seconds <= waited_s + 0.1
    assert owner.end() == (0, "")


def test_writer_that_cannot_be_forked_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(writer_process, "spawn", fail)
    process = writer_process.WriterProcess(["writer"], {}, str(tmp_path))
    assert "Resource temporarily unavailable" in process.start()
    assert process.request_flush() is None and process.request_save(1, signal.SIGKILL, 0.0) is None
