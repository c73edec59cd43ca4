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
from elasticd.heartbeat import worker_events
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
        """The next message, which has to be of this type; a rank may have lost a peer before."""
        wait_for(lambda: self.owner.accept(self), f"the connection of {self.slot}: {self.errors()}")
        self.connection.settimeout(30)
        message = channel.receive(self.connection)
        if message is not None and message["type"] == "LostPeer" != kind:
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
                self.zygote.stdin.write(json.dumps(task) + "\n")
                self.zygote.stdin.flush()
            else:
                out, err = str(member.folder / "out"), str(member.folder / "err")
                member.send({"env": text, "stdout": out, "stderr": err})
            members.append(member)
        return members

    def change(self, members: list[Member], dead: int | None = None) -> list[Member | None]:
        """Once that rank is dead: unwind the others, and await them at their entries. None: all live."""
        if dead is not None:
            wait_for(lambda: members[dead].code is not None, f"the end of rank {dead}")
        kept: list[Member | None] = [member if rank != dead else None for rank, member in enumerate(members)]
        for member in filter(None, kept):
            member.send({"type": "Unwind", "why": f"rank {dead} was killed"})
        for member in filter(None, kept):
            member.await_message("AtEntry")
        return kept

    def pause(self) -> None:
        """As the agent does before a change without a fault."""
        with heartbeat.HeartbeatReader(self.folder / f"round-{self.round}" / "beat-0") as reader:
            reader.write_request(heartbeat.PAUSE)
        wait_for(lambda: any(note.kind == "paused" for note in notes(self, 0)), "the pause")

    def close(self) -> None:
        for member in self.members:
            if member.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
                wait_for(lambda member=member: member.code is not None, "an end")
            if member.connection is not None:
                member.connection.close()
            member.connection = None
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
        owner.server.close()


def results(members: list[Member]) -> list[dict[str, Any]]:
    for member in members:
        wait_for(lambda member=member: member.code is not None, f"the end of {member.slot}")
        assert member.code == 0, member.errors()
    return [member.lines()[-1] for member in members]


def enter(members: list[Member]) -> None:
    for member in members:
        member.await_message("Entered")


def remains(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads, and maps of heartbeats."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), maps.count("/beat-")


def notes(owner: Owner, rank: int) -> list[worker_events.WorkerEvent]:
    return worker_events.WorkerEventReader(owner.folder / f"round-{owner.round}" / f"notes-{rank}").read()[0]


def steps(member: Member) -> dict[int, tuple[str, float]]:
    return {line["step"]: (line["digest"], line["draw"]) for line in member.lines() if "step" in line}


@pytest.mark.parametrize(("dead", "options"), [(0, {}), (1, {}), (1, {"early": True})])
def test_survivor_and_new_process_continue_as_undisturbed_run(
    make_owner: Callable[[str], Owner], dead: int, options: dict[str, Any]
) -> None:
    """Two ranks: a sum of two numbers does not depend on how gradients lie in buckets."""
    owner = make_owner("stays")
    members = owner.start([None] * 2, {**options, "faults": {1: [5, dead, "backward"]}})
    enter(members)
    pid = members[1 - dead].pid
    again = owner.start(owner.change(members, dead), options)
    enter(again)
    ended = results(again)
    assert again[1 - dead].pid == pid
    assert [line["entries"] for line in ended] == ([1, 2] if dead == 0 else [2, 1])
    assert [line["steps"] for line in ended] == [20] * 2
    undisturbed = make_owner("whole").start([None] * 2, {})
    enter(undisturbed)
    assert [line["result"] for line in results(undisturbed)] == [line["result"] for line in ended]
    for member, before in zip(again, undisturbed, strict=True):
        assert {step: at for step, at in steps(before).items() if step in steps(member)} == steps(member)


def test_relative_directory_is_the_same_in_each_round(make_owner: Callable[[str], Owner]) -> None:
    """The script may change its working directory, and new processes begin in the first one."""
    owner = make_owner("stays")
    options = {"from": str(owner.folder), "directory": "own", "epochs": 2}
    members = owner.start([None] * 2, {**options, "faults": {1: [5, 1, "backward"]}})
    enter(members)
    again = owner.start(owner.change(members, 1), options)
    enter(again)
    results(again)
    assert (owner.folder / "own" / "r2-s8").exists()


@pytest.mark.system
def test_three_ranks_continue_as_after_restart_of_all(make_owner: Callable[[str], Owner]) -> None:
    owner = make_owner("stays")
    members = owner.start([None] * 3, {"faults": {1: [5, 1, "optimizer"]}})
    enter(members)
    again = owner.start(owner.change(members, 1), {})
    enter(again)
    ended = results(again)
    other = make_owner("restarted")
    killed = other.start([None] * 3, {"faults": {1: [5, 1, "backward"]}})
    enter(killed)
    wait_for(lambda: killed[1].code is not None, "the end of rank 1")
    other.close()
    restarted = other.start([None] * 3, {})
    enter(restarted)
    assert [line["result"] for line in results(restarted)] == [line["result"] for line in ended]


@pytest.mark.parametrize(
    "faults",
    [
        {1: [2, 1, "barrier"], 2: [4, 0, "save"], 3: [6, 0, "group"], 4: [9, 0, "step"]},
        {
            1: [2, 1, "computing"],
            2: [4, 1, "swallowed"],
            3: [6, 0, "optimizer"],
            4: [8, 0, "backward"],
            5: [10, 1, "passes"],
        },
    ],
    ids=["waits", "others"],
)
def test_survivor_leaves_every_place(make_owner: Callable[[str], Owner], faults: dict[int, list[Any]]) -> None:
    """Wherever a rank stands when the other one dies: four faults in a row, and the result of an undisturbed run."""
    owner = make_owner("stays")
    members = owner.start([None] * 2, {"faults": faults, "workers": 1})
    enter(members)
    for _, dead, _ in faults.values():
        survivor, pid = members[1 - dead], members[1 - dead].pid
        members = owner.start(owner.change(members, dead), {"faults": faults, "workers": 1})
        enter(members)
        assert members[1 - dead] is survivor
        assert survivor.pid == pid
    ended = results(members)
    undisturbed = make_owner("whole").start([None] * 2, {})
    enter(undisturbed)
    assert [line["result"] for line in results(undisturbed)] == [line["result"] for line in ended]


def test_ranks_shrink_to_one_and_grow_again(make_owner: Callable[[str], Owner]) -> None:
    owner = make_owner("stays")
    options = {"faults": {1: [2, 0, "backward"], 2: [4, 1, "backward"]}, "pace": 0.05}
    members = owner.start([None] * 3, options)
    enter(members)
    first = members[1]
    members = owner.start([each for each in owner.change(members, 0) if each], options)
    enter(members)
    assert members[0] is first
    members = owner.start([each for each in owner.change(members, 1) if each], options)
    enter(members)
    wait_for(lambda: 6 in steps(first), "a step of the only rank")
    owner.pause()
    kept = owner.change(members)
    members = owner.start([None, *kept], options)
    enter(members)
    ended = results(members)
    assert ended[0]["parameters"] == ended[1]["parameters"]
    assert [(line["world"], line["rank"]) for line in ended] == [(2, 0), (2, 1)]
    entries = [(line["world"], line["rank"]) for line in first.lines() if "entry" in line]
    assert entries == [(3, 1), (2, 0), (1, 0), (2, 1)]
    printed = [line["step"] for line in first.lines() if "step" in line]
    assert len(printed) == len(set(printed)) == 19, "the step that ended in the pause is not printed"


@pytest.mark.system
def test_fifty_changes_leave_nothing_behind(make_owner: Callable[[str], Owner]) -> None:
    """All ranks stay, and descriptors, threads and heartbeat maps are those of the first changes."""
    owner = make_owner("stays")
    options = {"pace": 0.01, "epochs": 1000}
    members = owner.start([None] * 2, options)
    enter(members)
    seen = []
    for _ in range(50):
        owner.pause()
        seen.append([remains(member.pid) for member in members])
        members = owner.start([each for each in owner.change(members) if each], options)
        enter(members)
    for kind, values in enumerate(zip(*[first + second for first, second in seen], strict=True)):
        # What stays grows; a descriptor that is open at one look may be of a read at that moment.
        assert min(values[-10:]) <= max(values[:10]), (kind, values)


@pytest.mark.parametrize(
    "options",
    [
        {"hooks": True, "ddp": {"static_graph": True}},
        {"compile": "outside", "ddp": {"gradient_as_bucket_view": True}},
        pytest.param({"compile": "inside"}, marks=pytest.mark.system),
        {"freezes": True, "ddp": {"find_unused_parameters": True}},
        pytest.param({"compile": "outside", "backend": "inductor"}, marks=pytest.mark.system),
    ],
    ids=["hooks", "compiled", "compiled inside", "frozen", "by inductor"],
)
def test_model_follows_into_the_next_group(make_owner: Callable[[str], Owner], options: dict[str, Any]) -> None:
    """The module object stays with all its hooks, and nothing is compiled again where rank 0's values arrive."""
    owner = make_owner("stays")
    members = owner.start([None] * 2, {**options, "faults": {1: [5, 0, "backward"]}})
    enter(members)
    members = owner.start(owner.change(members, 0), options)
    enter(members)
    ended = results(members)
    undisturbed = make_owner("whole").start([None] * 2, options)
    enter(undisturbed)
    whole = results(undisturbed)
    assert [line["result"] for line in whole] == [line["result"] for line in ended]
    assert members[1].lines()[-2] == {**undisturbed[1].lines()[-2], "round": 2}
    assert (members[1].lines()[-2]["compiled"] > 0) == ("compile" in options)
    before, after = whole[1]["passes"], ended[1]["passes"]
    if "hooks" in options:
        assert before == {"inside": 20, "outside": 20, "optimizer": 20}
        assert after == {"inside": 21, "outside": 21, "optimizer": 20}, "one forward pass was in vain"


@pytest.mark.parametrize(
    ("place", "code", "text"),
    [("exit", 3, ""), ("error", 1, "ValueError: the rank's own error"), ("doubt", 1, "the rank's own service")],
)
def test_exit_and_own_error_are_no_change(make_owner: Callable[[str], Owner], place: str, code: int, text: str) -> None:
    """SystemExit ends the script, also while the ranks change; an error without a change is raised at once."""
    owner = make_owner("stays")
    members = owner.start([None] * 2, {"faults": {1: [5, None, place]}})
    enter(members)
    if place == "exit":
        wait_for(lambda: '"exiting"' in read(members[0].folder / "out"), "its place")
        members[0].send({"type": "Unwind", "why": "a node joins"})
    if place == "doubt":  # it resembles the loss of a peer, until the launcher knows better
        members[0].await_message("LostPeer")
        members[0].send({"type": "NoFault"})
    wait_for(lambda: members[0].code is not None, "the end of rank 0")
    assert members[0].code == code
    assert text in members[0].errors()


@pytest.mark.parametrize(
    ("preamble", "why"),
    [
        ("collective", "the script uses collectives before session.run()"),
        ("group", "the script makes another process group before session.run()"),
        ("rank", "an ElasticBatchSampler is given a rank before session.run()"),
        ("restore", "a DistributedDataParallel is made after session.restore()"),
        ("module", "a DistributedDataParallel of before run() is gone"),
        ("share", "a DistributedSampler is made before session.run()"),
        ("mesh", "a DeviceMesh is made before session.run()"),
    ],
)
def test_script_whose_processes_cannot_stay_says_so(
    make_owner: Callable[[str], Owner], preamble: str, why: str
) -> None:
    owner = make_owner("stays")
    members = owner.start([None] * 2, {"preamble": preamble})
    assert [line["entries"] for line in results(members)] == [1, 1]
    found = [note.reason for note in notes(owner, 0) if note.kind == "message"]
    assert [reason for reason in found if why in reason and "a change of ranks restarts" in reason]
    wait_for(lambda: owner.accept(members[0]), "its connection")
    assert members[0].connection is not None
    assert channel.receive(members[0].connection) is None, "it has not entered"


def test_process_whose_device_has_failed_does_not_stay(make_owner: Callable[[str], Owner]) -> None:
    """It ends at once. One that waits at its entry ends with its launcher, and not as one that has succeeded."""
    owner = make_owner("stays")
    members = owner.start([None] * 3, {"faults": {1: [5, 2, "device"]}})
    enter(members)
    wait_for(lambda: members[2].code is not None, "the fault")
    for member in members[:2]:
        wait_for(lambda member=member: any("device" in line for line in member.lines()), "the failed collective")
        member.send({"type": "Unwind", "why": "rank 2 was killed"})
    members[1].await_message("AtEntry")
    wait_for(lambda: members[0].code is not None, "the end of rank 0")
    assert members[0].code == -signal.SIGKILL
    assert "cannot stay: CUDA error: an illegal memory access was encountered" in members[0].errors()
    members[1].connection.close()
    members[1].connection = None
    wait_for(lambda: members[1].code is not None, "the end of rank 1")
    assert members[1].code == 1


def test_process_whose_session_train_has_closed_does_not_stay(make_owner: Callable[[str], Owner]) -> None:
    """It has no hooks any more, so that nothing would be saved at the next fault."""
    owner = make_owner("stays")
    members = owner.start([None] * 2, {"closes": True, "faults": {1: [5, 1, "backward"]}})
    enter(members)
    wait_for(lambda: members[1].code is not None, "the fault")
    members[0].send({"type": "Unwind", "why": "rank 1 was killed"})
    wait_for(lambda: members[0].code is not None, "the end of rank 0")
    assert members[0].code == -signal.SIGKILL
    assert "cannot stay: what session.run() calls has closed the session" in members[0].errors()


def test_iterator_that_has_ended_with_its_round_is_no_end_of_training(make_owner: Callable[[str], Owner]) -> None:
    owner = make_owner("stays")
    options = {"iterator": True, "faults": {1: [2, 1, "next batch"]}}
    members = owner.start([None] * 2, options)
    enter(members)
    (member,) = owner.start([each for each in owner.change(members, 1) if each], options)
    wait_for(lambda: member.code is not None, "its end")
    assert member.code == 1
    assert "make the iterator in what run() calls" in member.errors()


def test_rank_leaves_a_pause(make_owner: Callable[[str], Owner]) -> None:
    owner = make_owner("stays")
    options = {"pace": 0.02}
    members = owner.start([None] * 2, options)
    enter(members)
    owner.pause()
    owner.stores.clear()  # as where rank 0's node leaves: the others notice before their launchers know
    members[1].await_message("LostPeer")
    members = owner.start(owner.change(members), options)
    enter(members)
    assert [line["entries"] for line in results(members)] == [2, 2]
    with (
        heartbeat.HeartbeatReader(owner.folder / "round-1" / "beat-1") as old,
        heartbeat.HeartbeatReader(owner.folder / "round-2" / "beat-1") as new,
    ):
        before, after = old.read(), new.read()
    assert after.pid == before.pid == members[1].pid
    assert before.step < after.step == 20
    assert after.source == heartbeat.StepSource.SESSION


def test_run_without_launcher_restores_and_calls_once(start: Any, tmp_path: Path) -> None:
    """As under torchrun: each start is a process of its own."""
    directory = str(tmp_path / "checkpoints")
    for round, at in ((1, 0), (2, 8)):
        job = start("stays.py", {"epochs": 2 * round}, round=round, ELASTICD_CHECKPOINT_DIR=directory)
        for ended in job.results():
            assert (ended["entries"], ended["steps"]) == (1, 8 * round)
        assert json.loads(read(job.ranks[0].folder / "out").splitlines()[0])["at"] == at
    nested = start("stays.py", {"nested": True, "epochs": 9}, round=3, ELASTICD_CHECKPOINT_DIR=directory)
    assert nested.codes() == [1, 1]
    assert "UsageError: run() inside what session.run() calls" in nested.ranks[0].errors()
