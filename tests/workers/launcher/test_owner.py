"""The owner by itself: whatever way its agent goes, it ends without a word and leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import elasticd.checkpointing.memory.writer
import elasticd_agent.workers.launcher
from elasticd.checkpointing.memory.buffers import PROTOCOL, WriteTask, donated_number
from elasticd.checkpointing.memory.writer_client import WriterClient
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, Manifest
from elasticd_agent.workers.launcher import writer_process
from tests.library.conftest import wait_for

OWNER = Path(elasticd_agent.workers.launcher.__file__).with_name("owner.py")


def owner(tmp_path: Path) -> tuple[subprocess.Popen[str], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (tmp_path / "run").mkdir(exist_ok=True)
    with theirs:
        argv = [sys.executable, "-I", "-S", str(OWNER), str(theirs.fileno()), str(tmp_path / "run")]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    ours.settimeout(20)
    return process, ours


def test_agent_dies_with_unread_messages(tmp_path: Path) -> None:
    """An agent that dies with words unread is a death like any other."""
    process, agent = owner(tmp_path)
    refused = json.dumps(
        {"do": "park", "group": 1, "workers": 1, "store": True, "host": "127.0.0.1", "port": 0}
    ).encode()
    agent.send(refused)
    agent.recv(1 << 16)
    agent.send(refused)  # its answer stays unread: closing then resets the connection
    until_unread(agent)
    agent.close()
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "")
    assert not (tmp_path / "run").exists()


def test_a_mistake_of_its_own_ends_everything_all_the_same(tmp_path: Path) -> None:
    process, agent = owner(tmp_path)
    spawn = {"do": "template", "argv": ["sleep", "600"], "env": {"PATH": "/usr/bin:/bin"}, "cwd": "/", "launch": {}}
    agent.send(json.dumps(spawn).encode())
    agent.send(b"no JSON")
    _, said = process.communicate(timeout=20)
    assert process.returncode == 1 and "JSONDecodeError" in said
    assert not (tmp_path / "run").exists()  # the leak check finds the sleeper, were it left
    agent.close()


def test_unknown_request_of_a_newer_agent(tmp_path: Path) -> None:
    """An agent one minor version newer is obeyed as far as we understand it."""
    process, agent = owner(tmp_path)
    worker = {"argv": ["true"], "env": {}, "stdout": None, "stderr": None, "nice": 5}
    group = {"group": 1, "store": None, "keep": False, "cwd": "/", "env": {"PATH": "/usr/bin:/bin"}}
    for message in (
        {"do": "freeze", "group": 9},
        {"do": "exec", **group, "host": "127.0.0.1", "port": 0, "workers": [worker], "cgroup": "/x"},
    ):
        agent.send(json.dumps(message).encode())
    said = [json.loads(agent.recv(1 << 16)) for _ in range(4)]
    assert said[0] == {"kind": "refused", "group": 9, "why": "freeze: this launcher is older and cannot do that"}
    assert [message["kind"] for message in said[1:]] == ["started", "exited", "ended"]
    assert said[2]["status"] == 0
    agent.close()
    _, words = process.communicate(timeout=20)
    assert (process.returncode, words) == (0, "")


def test_program_name_that_is_not_utf_8(tmp_path: Path) -> None:
    """What cannot even be named in utf 8 ends its worker and nothing else."""
    process, agent = owner(tmp_path)
    worker = {"argv": ["/nowhere/\udcff"], "env": {}, "stdout": None, "stderr": None}
    group = {"group": 1, "store": None, "keep": False, "cwd": "/", "env": {}, "host": "127.0.0.1", "port": 0}
    agent.send(json.dumps({"do": "exec", **group, "workers": [worker]}).encode())
    said = [json.loads(agent.recv(1 << 16)) for _ in range(3)]
    assert [message["kind"] for message in said] == ["started", "exited", "ended"]
    assert said[1]["status"] == 127 << 8
    assert (tmp_path / "run").exists(), "the failed worker has gone on as its parent"
    agent.close()
    _, words = process.communicate(timeout=20)
    assert process.returncode == 0
    assert words.count("\n") == 1 and words.startswith("elasticd: cannot start /nowhere/\\udcff: ")


def test_template_killed_by_a_nameless_signal(tmp_path: Path) -> None:
    """A template killed by a signal without a name is gone and its owner is not."""
    process, agent = owner(tmp_path)
    dies = ["sh", "-c", "kill -40 $$"]
    spawn = {"do": "template", "argv": dies, "env": {"PATH": "/usr/bin:/bin"}, "cwd": "/", "launch": {}}
    agent.send(json.dumps(spawn).encode())
    said = json.loads(agent.recv(1 << 16))
    assert said["kind"] == "template_ended"
    assert said["why"] in ("was killed by signal 40", "closed its socket")
    agent.close()
    _, words = process.communicate(timeout=20)
    assert (process.returncode, words) == (0, "")


WRITER = [sys.executable, "-I", elasticd.checkpointing.memory.writer.__file__]


def connected(tmp_path: Path, at_end: Callable[[], WriteTask] | None = None) -> WriterClient:
    """A rank, once the owner's writer answers it."""
    rank = WriterClient(str(tmp_path / "run" / "writer"), 0, 1, True, at_end)

    def is_answered() -> bool:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            return rank.find() is None
        rank.close()
        return False

    wait_for(is_answered, "the writer")
    return rank


def test_next_owner_has_a_writer_as_well(tmp_path: Path) -> None:
    """The one before it was killed, and its socket is still there."""
    killed, agent = owner(tmp_path)
    agent.send(json.dumps({"do": "writer", "argv": WRITER, "env": {}}).encode())
    connected(tmp_path).close()
    killed.kill()
    killed.communicate()
    agent.close()
    process, agent = owner(tmp_path)
    agent.send(json.dumps({"do": "writer", "argv": WRITER, "env": {}}).encode())
    connected(tmp_path).close()
    agent.close()
    assert process.communicate(timeout=20)[1] == ""


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_state_in_memory_is_written_at_the_end_though_its_writer_dies(tmp_path: Path, dies: str) -> None:
    process, agent = owner(tmp_path)
    agent.send(json.dumps({"do": "writer", "argv": WRITER, "env": {}}).encode())
    # Of two nodes: a writer waits a second for the other one.
    task = WriteTask(str(tmp_path / "checkpoints"), 3, "at the end", "", "", 0, 0.0, nodes=2)
    rank = connected(tmp_path, lambda: task)
    draft, number = Manifest(1, 5, None, 2, 1000, NO_CHECKSUM, "job", "run"), donated_number(5, 0)
    fd, _ = rank.begin(draft, number, 0, 1, "")
    os.pwrite(fd, b"x" * 1000, 0)
    os.close(fd)
    rank.copied(draft, number, 0)
    assert rank.find() is not None
    rank.close()
    (writer,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if dies == "meanwhile":
        agent.send(b'{"do": "flush"}')
        wait_for((tmp_path / "checkpoints" / "r1-s5").exists, "the checkpoint")
    os.kill(int(writer), signal.SIGKILL)
    if dies == "before":
        wait_for(lambda: not Path(f"/proc/{writer}").exists(), "the end of the writer")
        agent.send(b'{"do": "flush"}')
    path = str(tmp_path / "checkpoints" / "r1-s5")
    for _ in range(2 if dies == "meanwhile" else 1):
        assert json.loads(agent.recv(1 << 16)) == {"kind": "flushing", "bytes": 4096}
    assert json.loads(agent.recv(1 << 16)) == {"kind": "flushed", "step": 5, "path": path, "why": ""}
    agent.close()
    assert process.communicate(timeout=20)[1] == ""


@pytest.mark.parametrize("answers", [True, False])
def test_rank_that_gets_no_processor_at_a_fault_has_the_time_that_would_be_lost(tmp_path: Path, answers: bool) -> None:
    """It answers after 0.6 s, long after the time that a copy takes, or never."""
    process, agent = owner(tmp_path)
    agent.send(json.dumps({"do": "writer", "argv": WRITER, "env": {}}).encode())
    connected(tmp_path).close()
    worker = {"argv": ["sleep", "600"], "env": {}, "stdout": None, "stderr": None}
    group = {"group": 1, "store": None, "keep": False, "cwd": "/", "env": {"PATH": "/usr/bin:/bin"}}
    agent.send(json.dumps({"do": "exec", **group, "host": "127.0.0.1", "port": 0, "workers": [worker]}).encode())
    assert json.loads(agent.recv(1 << 16))["kind"] == "started"
    begun = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(str(tmp_path / "run" / "writer"))
        rank.send(json.dumps({"do": "donor", "round": 1, "version": PROTOCOL}).encode())
        time.sleep(1.2)  # it trains
        agent.send(json.dumps({"do": "signal", "group": 1, "signal": signal.SIGKILL, "save": 1}).encode())
        asked = time.monotonic()
        assert json.loads(rank.recv(4096)) == {"save": 1, "ends": True}
        if answers:
            time.sleep(0.6)
            rank.send(json.dumps({"do": "donated"}).encode())
        said = json.loads(agent.recv(1 << 16))
    waited_s = time.monotonic() - asked
    if answers:
        assert said["kind"] == "exited", said
        assert waited_s >= 0.6
    else:
        assert (said["kind"], said["ranks"]) == ("unsaved", 1)
        assert asked - begun - 0.1 <= said["seconds"] <= waited_s + 0.1
    agent.close()
    assert process.communicate(timeout=20)[1] == ""


def test_writer_that_cannot_be_forked_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(writer_process, "spawn", spawn)
    process = writer_process.WriterProcess(["writer"], {}, str(tmp_path))
    assert "Resource temporarily unavailable" in process.start()
    assert process.request_flush() is None and process.request_save(1, True) is None


def until_unread(channel: socket.socket) -> None:
    assert channel.recv(1, socket.MSG_PEEK)
