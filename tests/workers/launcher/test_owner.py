"""The owner by itself: whatever way its agent goes, it ends without a word and leaves nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import elasticd_agent.workers.launcher

OWNER = Path(elasticd_agent.workers.launcher.__file__).with_name("owner.py")


def owner(tmp_path: Path) -> tuple[subprocess.Popen[str], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (tmp_path / "run").mkdir()
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


def until_unread(channel: socket.socket) -> None:
    assert channel.recv(1, socket.MSG_PEEK)
