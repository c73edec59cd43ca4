"""`session.run`: ranks that stay when another one is lost, unwound and released as the launcher's owner does it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from elasticd import channel
from elasticd.heartbeat import record as heartbeat
from tests.library.conftest import SCRIPTS, read, wait_for


class Member:
    """One process, with the launcher's end of its channel."""

    def __init__(self, owner: Owner, slot: str, folder: Path) -> None:
        self.owner, self.slot, self.folder = owner, slot, folder
        self.messages: list[dict[str, Any]] = []
        self.connection: socket.socket | None = None

    @property
    def pid(self) -> int:
        return int(wait_for(lambda: read(self.folder / "pid"), "a pid"))

    @property
    def code(self) -> int | None:
        text = read(self.folder / "code")
        return int(text) if text else None

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in read(self.folder / "out").splitlines()]

    def errors(self) -> str:
        return read(self.folder / "err")

    def send(self, message: dict[str, Any]) -> None:
        assert self.connection is not None
        channel.send(self.connection, message)

    def await_message(self, kind: str) -> dict[str, Any]:
        """The next message, which has to be of this type."""
        wait_for(lambda: self.owner.accept(self), f"the connection of {self.slot}: {self.errors()}")
        assert self.connection is not None
        self.connection.settimeout(30)
        message = channel.receive(self.connection)
        assert message is not None and message["type"] == kind, (message, self.errors())
        return message


class Owner:
    """The launcher's part, as far as a worker sees it."""

    def __init__(self, zygote: subprocess.Popen[str], folder: Path) -> None:
        self.zygote, self.folder = zygote, folder
        self.path = str(folder / "owner")
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.bind(self.path)
        self.server.listen(64)
        self.server.setblocking(False)
        self.members: list[Member] = []
        self.stores: list[TCPStore] = []
        self.round = 0

    def accept(self, member: Member) -> bool:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self.server.accept()
            connection.setblocking(True)
            slot = connection.recv(100).decode()
            next(each for each in self.members if each.slot == slot).connection = connection
        return member.connection is not None

    def start(self, kept: list[Member | None], options: dict[str, Any], script: str = "stays.py") -> list[Member]:
        """The next round: each rank by the process that stays, or by a new one."""
        self.round += 1
        folder = self.folder / f"round-{self.round}"
        folder.mkdir()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
        self.stores.append(store)
        members: list[Member] = []
        for rank, member in enumerate(kept):
            heartbeat.create(folder / f"beat-{rank}")
            env = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": len(kept),
                "LOCAL_WORLD_SIZE": len(kept),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store.port,
                "GLOO_SOCKET_IFNAME": "lo",
                "ELASTICD_ROUND": self.round,
                "ELASTICD_JOB": "toy",
                "ELASTICD_RUN": "run-1",
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": self.round - 1,
                "ELASTICD_HEARTBEAT": folder / f"beat-{rank}",
                "ELASTICD_WORKER_EVENTS": folder / f"notes-{rank}",
                "ELASTICD_CHECKPOINT_DIR": self.folder / "checkpoints",
            }
            text = {name: str(value) for name, value in env.items()}
            if member is None:
                slot = f"slot{len(self.members)}"
                member = Member(self, slot, self.folder / slot)
                member.folder.mkdir()
                self.members.append(member)
                task = {
                    "script": str(SCRIPTS / script),
                    "argv": [json.dumps(options)],
                    "env": {**text, "OWNER": self.path, "SLOT": slot},
                    "folder": str(member.folder),
                }
                assert self.zygote.stdin is not None
                self.zygote.stdin.write(json.dumps(task) + "\n")
                self.zygote.stdin.flush()
            else:
                out, err = str(member.folder / "out"), str(member.folder / "err")
                member.send({"env": text, "stdout": out, "stderr": err})
            members.append(member)
        return members

    def change(self, members: list[Member], dead: int) -> list[Member | None]:
        """Once that rank is dead: unwind the others, and await them at their entries."""
        wait_for(lambda: members[dead].code is not None, f"the end of rank {dead}")
        kept: list[Member | None] = [member if rank != dead else None for rank, member in enumerate(members)]
        for member in filter(None, kept):
            member.send({"type": "Unwind", "why": f"rank {dead} was killed"})
        for member in filter(None, kept):
            member.await_message("AtEntry")
        return kept

    def close(self) -> None:
        for member in self.members:
            if member.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
                wait_for(lambda member=member: member.code is not None, "an end")
            if member.connection is not None:
                member.connection.close()
        self.server.close()
        self.stores.clear()


@pytest.fixture
def make_owner(zygote: subprocess.Popen[str], tmp_path: Path) -> Iterator[Callable[[str], Owner]]:
    owners: list[Owner] = []

    def make(name: str) -> Owner:
        (tmp_path / name).mkdir()
        owners.append(Owner(zygote, tmp_path / name))
        return owners[-1]

    yield make
    for owner in owners:
        owner.close()


def results(members: list[Member]) -> list[dict[str, Any]]:
    for member in members:
        wait_for(lambda member=member: member.code is not None, f"the end of {member.slot}")
        assert member.code == 0, member.errors()
    return [member.lines()[-1] for member in members]


def enter(members: list[Member]) -> None:
    for member in members:
        member.await_message("Entered")


def steps(member: Member) -> dict[int, tuple[str, float]]:
    return {line["step"]: (line["digest"], line["draw"]) for line in member.lines() if "step" in line}


@pytest.mark.parametrize("dead", [0, 1])
def test_survivor_and_new_process_continue_as_undisturbed_run(make_owner: Callable[[str], Owner], dead: int) -> None:
    """Two ranks: a sum of two numbers does not depend on how gradients lie in buckets."""
    owner = make_owner("stays")
    members = owner.start([None] * 2, {"die": [[1, dead, 5, "backward"]]})
    enter(members)
    pid = members[1 - dead].pid
    again = owner.start(owner.change(members, dead), {})
    enter(again)
    ended = results(again)
    assert again[1 - dead].pid == pid
    assert [line["entries"] for line in ended] == ([1, 2] if dead == 0 else [2, 1])
    assert [line["steps"] for line in ended] == [12] * 2
    undisturbed = make_owner("whole").start([None] * 2, {})
    enter(undisturbed)
    assert [line["result"] for line in results(undisturbed)] == [line["result"] for line in ended]
    for member, before in zip(again, undisturbed, strict=True):
        assert {step: at for step, at in steps(before).items() if step in steps(member)} == steps(member)


def test_three_ranks_continue_as_after_restart_of_all(make_owner: Callable[[str], Owner]) -> None:
    owner = make_owner("stays")
    members = owner.start([None] * 3, {"die": [[1, 1, 5, "optimizer"]]})
    enter(members)
    again = owner.start(owner.change(members, 1), {})
    enter(again)
    ended = results(again)
    other = make_owner("restarted")
    killed = other.start([None] * 3, {"die": [[1, rank, 5, "backward"] for rank in range(3)]})
    enter(killed)
    wait_for(lambda: all(member.code is not None for member in killed), "their ends")
    restarted = other.start([None] * 3, {})
    enter(restarted)
    assert [line["result"] for line in results(restarted)] == [line["result"] for line in ended]
