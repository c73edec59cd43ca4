"""The memory of the dead: who still holds GPU memory is waited for, a bounded time, and a group starts after that."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol
from unittest.mock import ANY

import pytest

from elasticd.heartbeat import record as beat
from elasticd_agent.model.job import EntrypointMode, JobSpec
from elasticd_agent.model.messages import GroupEnded
from elasticd_agent.model.records import Member, Round
from elasticd_agent.system.processes import procfs
from elasticd_agent.workers import gpu_memory
from elasticd_agent.workers.events import GroupStarted, OwnerEvent, StartModeKnown, WorkersReleased
from elasticd_agent.workers.gpu_memory import (
    ANSWER_S,
    WAIT_S,
    GpuGate,
    GpuMemory,
    MemoryChecked,
    NvmlGpuMemory,
    open_gpu_memory,
)
from elasticd_agent.workers.groups import KeepRequest
from elasticd_agent.workers.launcher import messages
from elasticd_agent.workers.launcher.owner_client import OwnerClient, OwnerLost, OwnerReport
from elasticd_agent.workers.launcher.requests import PreloadPlan, WorkerSpec
from elasticd_agent.workers.manager import WorkerManager
from tests.library.conftest import wait_for

PATIENCE_S = 30.0


class Nvml:
    """What the fake NVML says."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def set_memory(self, *gpus: list[int] | None, broken: str = "", **more: object) -> None:
        new = self.directory / "new"
        new.write_text(json.dumps({"gpus": gpus, "broken": broken, **more}))
        new.rename(self.directory / "gpus.json")

    def queries(self) -> int:
        path = self.directory / "looks"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "system" / "nvml"))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))
    nvml = Nvml(tmp_path)
    nvml.set_memory([])
    return nvml


Inbox = queue.SimpleQueue[OwnerReport | OwnerLost | MemoryChecked]


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


class Open(Protocol):
    def __call__(self, within_s: float, answer_s: float = PATIENCE_S, gpus: Sequence[str] = ()) -> GpuMemory: ...


@pytest.fixture
def opened(nvml: Nvml, inbox: Inbox) -> Iterator[Open]:
    memories: list[GpuMemory] = []

    def start(within_s: float, answer_s: float = PATIENCE_S, gpus: Sequence[str] = ()) -> GpuMemory:
        memories.append(NvmlGpuMemory(inbox.put, within_s, answer_s, gpus=gpus))
        return memories[-1]

    yield start
    for memory in memories:
        memory.close()


def answer_of(inbox: Inbox) -> MemoryChecked:
    message = inbox.get(timeout=PATIENCE_S)
    assert isinstance(message, MemoryChecked)
    return message


def checked(inbox: Inbox) -> MemoryChecked:
    """The last answer."""
    while (answer := answer_of(inbox)).busy_gpus:
        pass
    return answer


def busy(inbox: Inbox) -> tuple[str, ...]:
    return answer_of(inbox).busy_gpus


def test_agent_without_room_for_a_thread_asks_again(
    opened: Open, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "elasticd-nvml":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start_others)
        memory = opened(1.0)
        memory.track({os.getpid(): ""})
        memory.start_check(())
        assert checked(inbox).trouble == "the NVML process cannot be started: can't start new thread"
    memory.track({os.getpid(): ""})
    memory.start_check(())
    assert not checked(inbox).trouble


def test_no_gpus_or_no_nvml(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus = open_gpu_memory((), inbox.put)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for memory in (without_gpus, open_gpu_memory(("0", "1"), inbox.put)):
        memory.track({1: ""})
        assert not memory.start_check(except_pids=())
        memory.close()
        assert type(memory) is GpuMemory


def test_wait_until_memory_is_free(nvml: Nvml, inbox: Inbox) -> None:
    nvml.set_memory([70], [71, 72])
    memory = open_gpu_memory(("0", "1"), inbox.put)
    memory.track({70: "0", 71: "1"})
    assert memory.start_check(except_pids=())
    assert busy(inbox) == ("0", "1")
    nvml.set_memory([], [71, 72])
    assert busy(inbox) == ("1",)
    nvml.set_memory([], [72])  # somebody else's
    answer = answer_of(inbox)
    assert (answer.holders, answer.trouble, answer.busy_gpus) == ((), "", ())
    memory.close()


def test_holders_after_the_deadline(nvml: Nvml, inbox: Inbox, opened: Open) -> None:
    nvml.set_memory([5], None, [71, 70])  # the second one has fallen off the bus
    memory = opened(0.3)
    memory.track({70: "", 71: ""})
    memory.track({72: ""})
    assert memory.start_check(except_pids=(71,))
    answer = checked(inbox)
    assert (answer.holders, answer.trouble) == (((70, 2),), "")
    assert answer.waited_s >= 0.3
    assert not memory.start_check(except_pids=()), "nobody is waited for twice"


@pytest.mark.system  # a second without this process in the middle of it looks like memory that has settled
def test_memory_outlives_the_process_id(nvml: Nvml, inbox: Inbox, opened: Open) -> None:
    """The driver tears a context down after its process has left NVML's list."""
    nvml.set_memory([70], [71], used=[500, 500])
    memory = opened(PATIENCE_S)
    wait_for(lambda: nvml.queries() > 1, "look before the job")
    memory.track({70: ""})
    for megabytes in range(9000, 500, -1000):  # it shrinks for longer than memory that stays is waited for
        nvml.set_memory([], [71], used=[megabytes, 500])
        if megabytes == 9000:
            assert memory.start_check(except_pids=())
            assert busy(inbox) == ("",)
        time.sleep(0.3)
        assert inbox.empty(), megabytes
    nvml.set_memory([], [71], used=[600, 500])
    answer = checked(inbox)
    assert (answer.holders, answer.trouble) == ((), "")
    assert answer.waited_s >= 2.4


def test_other_gpus_are_not_looked_at(nvml: Nvml, inbox: Inbox, opened: Open) -> None:
    """GPU 0 is another job's, whose processes have numbers of their own in a container."""
    nvml.set_memory([70], [], used=[500, 500])
    memory = opened(PATIENCE_S, gpus=("GPU-0001",))
    wait_for(lambda: nvml.queries() > 0, "look before the job")
    nvml.set_memory([70], [], used=[9000, 500])
    memory.track({70: "GPU-0001"})
    memory.start_check(except_pids=())
    assert answer_of(inbox).busy_gpus == ()
    assert set((nvml.directory / "looks").read_text().split()) == {"1"}


@pytest.mark.parametrize("gpus", [(), ("GPU-none",), ("1",)])
def test_unknown_gpus_are_free_together(nvml: Nvml, inbox: Inbox, opened: Open, gpus: tuple[str, ...]) -> None:
    """Without names, a name that NVML does not know, and a number on a machine with several models."""
    nvml.set_memory([70], [], facts={"1": {"name": "Faster 200"}})
    memory = opened(PATIENCE_S, gpus=gpus)
    memory.track({70: ""})
    memory.start_check(except_pids=())
    assert busy(inbox) == (gpus or ("",))
    nvml.set_memory([], [])
    assert busy(inbox) == ()


def test_process_on_several_gpus(nvml: Nvml, inbox: Inbox, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of each rank on GPU 0 is common: none starts before all are free."""
    monkeypatch.setattr(gpu_memory, "SAMPLE_INTERVAL_S", 0.1)
    nvml.set_memory([70, 71], [71])
    memory = opened(PATIENCE_S, gpus=("0", "1"))
    memory.track({70: "0", 71: "1"})
    looks = nvml.queries() + 6
    wait_for(lambda: nvml.queries() > looks, "sample")
    nvml.set_memory([70], [])
    memory.start_check(except_pids=())
    assert busy(inbox) == ("0", "1")
    nvml.set_memory([], [])
    assert busy(inbox) == ()


@pytest.mark.parametrize(("left", "waits"), [(1500, True), (4000, False)])
def test_what_the_dead_held_is_waited_for(
    nvml: Nvml, inbox: Inbox, opened: Open, monkeypatch: pytest.MonkeyPatch, left: int, waits: bool
) -> None:
    """1 GB, also if it does not shrink for a while; more than that is somebody else's."""
    monkeypatch.setattr(gpu_memory, "SAMPLE_INTERVAL_S", 0.1)
    nvml.set_memory([], used=[500])
    memory = opened(PATIENCE_S, gpus=("0",))
    wait_for(lambda: nvml.queries() > 0, "look before the job")
    nvml.set_memory([70], used=[500])
    memory.track({70: "0"})
    looks = nvml.queries() + 3
    wait_for(lambda: nvml.queries() > looks, "sample")
    nvml.set_memory([], used=[left])
    memory.start_check(except_pids=())
    assert busy(inbox) == ("0",)
    if waits:
        with pytest.raises(queue.Empty):
            inbox.get(timeout=1.5)
        nvml.set_memory([], used=[500])
    assert checked(inbox).holders == ()


@pytest.mark.parametrize("used", [None, [40_000]])
def test_memory_that_stays_is_not_waited_for(nvml: Nvml, inbox: Inbox, opened: Open, used: list[int] | None) -> None:
    """Another tenant's, of which NVML shows no process here; or NVML does not say."""
    memory = opened(PATIENCE_S)
    nvml.set_memory([], used=used)
    memory.track({70: ""})
    memory.start_check(except_pids=())
    assert checked(inbox).waited_s < PATIENCE_S


def test_errors_of_the_driver_are_reported(nvml: Nvml, inbox: Inbox) -> None:
    """Also where the kernel's log is closed to a job; of its own GPUs only."""
    nvml.set_memory([], [], [])
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    memory = open_gpu_memory(("0", "1"), inbox.put, said.put)
    path = nvml.directory / "registered"  # the set was made before, and counts from there
    wait_for(lambda: path.exists() and path.read_text().split() == ["0", "1"], "registration for events")
    with open(nvml.directory / "events", "a") as events:
        events.write("1 8 79\n0 8 31\n")
    assert said.get(timeout=PATIENCE_S).startswith("GPU 1 had XID 79; see dmesg")
    assert said.get(timeout=PATIENCE_S) == "GPU 0 had XID 31 (a page fault), which a faulty program can cause"
    memory.close()


def test_nvml_process_that_cannot_start(
    nvml: Nvml, inbox: Inbox, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every round to come would be 15 s late: so long whoever waits for the answer waits for it."""
    with monkeypatch.context() as gone:
        gone.setattr(sys, "executable", "/no/such/python")
        memory = opened(0.1)
        memory.track({70: ""})
        assert memory.start_check(except_pids=())
        assert "No such file" in checked(inbox).trouble
    memory.track({70: ""})
    assert memory.start_check(except_pids=())
    assert checked(inbox).trouble == ""


@pytest.mark.parametrize(
    ("broken", "wait_s", "answer_s", "trouble"),
    [
        ("hangs", 0.1, 0.1, r"NVML did not answer within 0\.[12] s"),
        ("dies", PATIENCE_S, PATIENCE_S, r"the NVML process ended by itself: a crash in the driver's library\?"),
        ("init", PATIENCE_S, PATIENCE_S, "NVML: Driver Not Loaded"),
    ],
)
def test_driver_that_is_broken_holds_nobody_up(
    nvml: Nvml, inbox: Inbox, opened: Open, broken: str, wait_s: float, answer_s: float, trouble: str
) -> None:
    """The next check asks again, another process if need be."""
    nvml.set_memory([], broken=broken)
    memory = opened(wait_s, answer_s)
    memory.track({70: ""})
    memory.start_check(except_pids=())
    answer = checked(inbox)
    assert re.fullmatch(trouble, answer.trouble)
    assert answer.waited_s < PATIENCE_S
    if broken == "dies":
        nvml.set_memory([])
        memory.track({71: ""})
        memory.start_check(except_pids=())
        assert checked(inbox).trouble == ""


# ---- how a group's start waits for it


ENTERING = """
import os, socket, sys
owner = socket.socket(fileno=int(os.environ["ELASTICD_LAUNCH"]))
while True:
    open(sys.argv[1], "a").write("x")
    owner.send(b'{"type": "Entered"}')
    owner.recv(1 << 20) or sys.exit()
    owner.send(b'{"type": "AtEntry"}')
    owner.recv(1 << 20) or sys.exit()
"""


class Node:
    """Workers on GPUs, started by a real owner: without Python, or `warm`; then they can keep their process."""

    def __init__(self, directory: Path, inbox: Inbox, memory: GpuMemory, warm: bool = False) -> None:
        self.directory, self.inbox = directory, inbox
        (directory / "runtime").mkdir()
        script = directory / "script.py"
        script.write_text(ENTERING)
        how = (
            (EntrypointMode.SCRIPT, str(script), (str(directory / "ran"),))
            if warm
            else (EntrypointMode.EXEC, "sleep", ("600",))
        )
        spec = JobSpec(sys.executable, *how, directory, job_id="job", run="1", max_workers=2)
        gpus = ("0", "1") if warm else ()
        owner = OwnerClient(directory / "runtime", inbox.put)
        preload = PreloadPlan(("json",)) if warm else PreloadPlan(cold_reason="no Python")
        self.workers = WorkerManager(spec, "a", dict(os.environ), preload, owner, memory=GpuGate(memory, gpus))
        self.sentences: list[str] = []
        self.workers.set_listener(self)

    def log(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def on(self, event: StartModeKnown, now: float) -> None:
        pass

    def start(self, number: int, slots: tuple[int, ...] = (0,)) -> None:
        workers = []
        for slot in slots:
            path = self.directory / f"beat-{number}-{slot}"
            beat.create(str(path))
            workers.append(WorkerSpec({"ELASTICD_HEARTBEAT": str(path)}, None, None, str(path)))
        self.workers.start(Round(number, (Member("a", "i", slots),)), tuple(workers), ("127.0.0.1", 1))

    def ran(self) -> int:
        path = self.directory / "ran"
        return len(path.read_text()) if path.exists() else 0

    def receive(self) -> list[OwnerEvent | MemoryChecked]:
        message = self.inbox.get(timeout=PATIENCE_S)
        if isinstance(message, MemoryChecked):
            self.workers.memory_checked(message)
            return [message]
        assert isinstance(message, OwnerReport)
        return [*self.workers.handle(message)]

    def started(self, number: int) -> tuple[int, bool]:
        """The pid of the group that is started next, which is this one, and whether memory was checked before it."""
        was_checked = False
        while True:
            for heard in self.receive():
                was_checked = was_checked or isinstance(heard, MemoryChecked)
                if isinstance(heard, GroupStarted):
                    assert heard.number == number
                    return heard.pids[0], was_checked

    def group_started(self) -> GroupStarted:
        while True:
            for heard in self.receive():
                if isinstance(heard, GroupStarted):
                    return heard

    def end(self, number: int) -> None:
        assert self.workers.signal(number, signal.SIGKILL) == []
        while GroupEnded(number) not in self.receive():
            pass


@pytest.fixture
def node(tmp_path: Path, inbox: Inbox, opened: Open) -> Iterator[Node]:
    node = Node(tmp_path, inbox, opened(PATIENCE_S))
    yield node
    node.workers.close()


@pytest.fixture
def warm(tmp_path: Path, inbox: Inbox, nvml: Nvml, opened: Open) -> Iterator[Node]:
    nvml.set_memory([], [])  # before the NVML process looks which GPUs there are
    node = Node(tmp_path, inbox, opened(PATIENCE_S, gpus=("0", "1")), warm=True)
    yield node
    node.workers.close()


def test_start_waits_for_free_memory(node: Node, nvml: Nvml) -> None:
    node.start(1)
    first, was_checked = node.started(1)
    assert not was_checked, "nobody was there before"
    node.end(1)
    nvml.set_memory([first])
    node.start(2)
    assert node.receive() == [MemoryChecked(1, (), ANY, busy_gpus=("",))]
    looks = nvml.queries() + 3
    wait_for(lambda: nvml.queries() > looks, "look at the GPUs")
    assert node.inbox.empty()
    nvml.set_memory([])
    second, was_checked = node.started(2)
    assert was_checked
    assert second != first
    assert node.sentences == []


def test_cancelled_start_while_waiting_for_memory(node: Node, nvml: Nvml) -> None:
    node.start(1)
    first, _ = node.started(1)
    node.end(1)
    nvml.set_memory([first])
    node.start(2)
    assert node.receive() == [MemoryChecked(1, (), ANY, busy_gpus=("",))]
    assert node.workers.signal(2, signal.SIGKILL) == [GroupEnded(2)]
    node.start(3)
    assert node.inbox.empty()
    nvml.set_memory([])
    third, was_checked = node.started(3)
    assert was_checked
    node.end(3)
    nvml.set_memory([third])
    node.start(4)
    node.workers.signal(4, signal.SIGKILL)
    assert node.receive() == [MemoryChecked(2, (), ANY, busy_gpus=("",))]
    nvml.set_memory([])
    assert node.receive() == [MemoryChecked(2, (), ANY)]
    node.start(5)
    assert not node.started(5)[1], "who held it has been asked about"


def test_start_despite_memory_holders(node: Node, nvml: Nvml) -> None:
    node.start(1)
    node.started(1)
    node.end(1)
    node.start(2)
    node.workers.memory_checked(MemoryChecked(1, ((70, 0), (70, 1)), 10.04))
    node.started(2)
    assert node.sentences == [
        "round 2: ended processes still hold GPU memory (process 70 on GPU 0, process 70 on GPU 1); "
        "starting the workers after 10.0 s"
    ]


def test_memory_check_that_never_answers(node: Node, nvml: Nvml) -> None:
    node.start(1)
    first, _ = node.started(1)
    node.end(1)
    nvml.set_memory([first])
    asked = time.monotonic()
    node.start(2)
    due = node.workers.tick(time.monotonic())
    assert due is not None
    assert WAIT_S + ANSWER_S < due - asked < 60
    node.workers.tick(due)
    node.started(2)
    assert node.sentences[0].startswith("round 2: the check of the GPU memory did not answer")


def test_kept_process_does_not_wait_for_its_own_memory(warm: Node, nvml: Nvml) -> None:
    warm.start(1, (0, 1))
    first = warm.group_started()
    wait_for(lambda: warm.ran() == 2, "workers that run")
    warm.workers.park(2, with_store=True)
    entered = set[int]()
    while len(entered) < 2:
        message = warm.inbox.get(timeout=PATIENCE_S)
        assert isinstance(message, OwnerReport)
        warm.workers.handle(message)
        entered |= {message.report.local_rank} if isinstance(message.report, messages.Entered) else set()
    nvml.set_memory([first.pids[0]], [first.pids[1]])
    warm.workers.signal(1, signal.SIGKILL, keep=KeepRequest((0,), PATIENCE_S))
    while GroupEnded(1, (0,)) not in warm.receive():
        pass
    warm.start(2, (0, 1))
    second = warm.group_started()
    assert (second.kept_ranks, second.held_ranks, second.pids[0]) == ((0,), (1,), first.pids[0])
    wait_for(lambda: warm.ran() == 3, "the kept worker")
    nvml.set_memory([first.pids[0]], [])
    while WorkersReleased(2, [1]) not in warm.receive():
        pass
    wait_for(lambda: warm.ran() == 4, "worker that was held")
    warm.end(2)


def test_worker_waits_for_its_own_gpu_only(warm: Node, nvml: Nvml) -> None:
    """The others run meanwhile; a round that ends before is no trouble, and the next one waits, too."""
    warm.start(1, (0, 1))
    first = warm.group_started()
    assert first.held_ranks == ()
    wait_for(lambda: warm.ran() == 2, "workers that run")
    warm.workers.park(2, with_store=True)
    warm.end(1)
    nvml.set_memory([], [first.pids[1]])
    warm.start(2, (0, 1))
    second = warm.group_started()
    assert (second.number, second.held_ranks, second.warm) == (2, (1,), True)
    wait_for(lambda: warm.ran() == 3, "worker that runs")
    wait_for(lambda: procfs.state(second.pids[1]) == "S", "worker that is held")
    assert warm.ran() == 3
    warm.end(2)
    warm.start(3, (0, 1))
    third = warm.group_started()
    assert third.held_ranks == (1,)
    wait_for(lambda: warm.ran() == 4, "worker that runs")
    nvml.set_memory([], [])
    while WorkersReleased(3, [1]) not in warm.receive():
        pass
    wait_for(lambda: warm.ran() == 5, "worker that was held")
    assert warm.sentences == []
    warm.end(3)
