"""The memory of the dead: who still holds GPU memory is waited for, a bounded time, and a group starts after that."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from elasticd.heartbeat import record as beat
from elasticd_agent.model.job import JobSpec, Mode
from elasticd_agent.model.messages import GroupEnded
from elasticd_agent.model.records import Member, Round
from elasticd_agent.workers.gpu_memory import (
    ANSWER_S,
    WAIT_S,
    GpuMemory,
    MemoryChecked,
    NvmlGpuMemory,
    open_gpu_memory,
)
from elasticd_agent.workers.launcher.client import OwnerClient, OwnerLost, OwnerMessage
from elasticd_agent.workers.launcher.requests import Preload, WorkerSpec
from elasticd_agent.workers.manager import GroupStarted, LauncherReady, OwnerEvent, WorkerManager

PATIENCE_S = 30.0


class Nvml:
    """What the fake NVML says."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def set_memory(self, *gpus: list[int] | None, broken: str = "", used: list[int] | None = None) -> None:
        new = self.directory / "new"
        new.write_text(json.dumps({"gpus": gpus, "broken": broken, "used": used}))
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


Inbox = queue.SimpleQueue[OwnerMessage | OwnerLost | MemoryChecked]


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


class Open(Protocol):
    def __call__(self, within_s: float, answer_s: float = PATIENCE_S) -> GpuMemory: ...


@pytest.fixture
def opened(nvml: Nvml, inbox: Inbox) -> Iterator[Open]:
    memories: list[GpuMemory] = []

    def start(within_s: float, answer_s: float = PATIENCE_S) -> GpuMemory:
        memories.append(NvmlGpuMemory(inbox.put, within_s, answer_s))
        return memories[-1]

    yield start
    for memory in memories:
        memory.close()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)


def checked(inbox: Inbox) -> MemoryChecked:
    message = inbox.get(timeout=PATIENCE_S)
    assert isinstance(message, MemoryChecked)
    return message


def test_no_gpus_or_no_nvml(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gpus or without nvml nobody is asked."""
    without_gpus = open_gpu_memory(False, inbox.put)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for memory in (without_gpus, open_gpu_memory(True, inbox.put)):
        memory.track([1])
        assert not memory.check(except_pids=())
        memory.close()
        assert type(memory) is GpuMemory


def test_wait_until_memory_is_free(nvml: Nvml, inbox: Inbox) -> None:
    """With both it is waited until nobody holds any."""
    nvml.set_memory([70], [71, 72])
    memory = open_gpu_memory(True, inbox.put)
    memory.track([70, 71])
    assert memory.check(except_pids=())
    until(lambda: nvml.queries() > 6, "look at the GPUs")
    nvml.set_memory([], [71, 72])
    looks = nvml.queries() + 6
    until(lambda: nvml.queries() > looks, "look at the GPUs")
    assert inbox.empty()
    nvml.set_memory([], [72])  # somebody else's
    answer = checked(inbox)
    assert (answer.holders, answer.trouble) == ((), "")
    memory.close()


def test_holders_after_the_deadline(nvml: Nvml, inbox: Inbox, opened: Open) -> None:
    """It is waited for a bounded time and said who it is."""
    nvml.set_memory([5], None, [71, 70])  # the second one has fallen off the bus
    memory = opened(0.3)
    memory.track([70, 71])
    memory.track([72])
    assert memory.check(except_pids=(71,))
    answer = checked(inbox)
    assert (answer.holders, answer.trouble) == (((70, 2),), "")
    assert answer.seconds >= 0.3
    assert not memory.check(except_pids=()), "nobody is waited for twice"


def test_memory_outlives_the_process_id(nvml: Nvml, inbox: Inbox, opened: Open) -> None:
    """The driver tears a context down after its process has left NVML's list."""
    nvml.set_memory([70], [71], used=[500, 500])
    memory = opened(PATIENCE_S)
    until(lambda: nvml.queries() > 1, "look before the job")
    memory.track([70])
    for megabytes in range(9000, 500, -1000):  # it shrinks for longer than memory that stays is waited for
        nvml.set_memory([], [71], used=[megabytes, 500])
        if megabytes == 9000:
            assert memory.check(except_pids=())
        time.sleep(0.3)
        assert inbox.empty(), megabytes
    nvml.set_memory([], [71], used=[600, 500])
    answer = checked(inbox)
    assert (answer.holders, answer.trouble) == ((), "")
    assert answer.seconds >= 2.4


@pytest.mark.parametrize("used", [None, [40_000]])
def test_memory_that_stays_is_not_waited_for(nvml: Nvml, inbox: Inbox, opened: Open, used: list[int] | None) -> None:
    """Another tenant's, of which NVML shows no process here; or NVML does not say."""
    memory = opened(PATIENCE_S)
    nvml.set_memory([], used=used)
    memory.track([70])
    memory.check(except_pids=())
    assert checked(inbox).seconds < 5


def test_errors_of_the_driver_are_reported(nvml: Nvml, inbox: Inbox) -> None:
    """Also where the kernel's log is closed to a job."""
    nvml.set_memory([], [])
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    memory = open_gpu_memory(True, inbox.put, said.put)
    until(lambda: (nvml.directory / "registered").exists(), "registration for events")
    time.sleep(0.1)  # the set was made before, and counts from there
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
        memory.track([70])
        assert memory.check(except_pids=())
        assert "No such file" in checked(inbox).trouble
    memory.track([70])
    assert memory.check(except_pids=())
    assert checked(inbox).trouble == ""


def test_driver_that_does_not_answer(nvml: Nvml, inbox: Inbox, opened: Open) -> None:
    """A driver that does not answer holds nobody up."""
    nvml.set_memory([], broken="hangs")
    memory = opened(0.1, 0.1)
    memory.track([70])
    memory.check(except_pids=())
    assert checked(inbox).trouble == "NVML did not answer within 0.2 s"


def test_nvml_process_that_dies_is_replaced(nvml: Nvml, inbox: Inbox, opened: Open) -> None:
    """Who asks the driver may die of it and another one asks next time."""
    nvml.set_memory([], broken="dies")
    memory = opened(PATIENCE_S)
    memory.track([70])
    memory.check(except_pids=())
    assert "NVML process ended" in checked(inbox).trouble
    nvml.set_memory([])
    memory.track([71])
    memory.check(except_pids=())
    assert checked(inbox).trouble == ""


def test_driver_not_loaded(nvml: Nvml, inbox: Inbox, opened: Open) -> None:
    """A driver that is not there neither."""
    nvml.set_memory([], broken="init")
    memory = opened(5.0)
    memory.track([70])
    memory.check(except_pids=())
    answer = checked(inbox)
    assert answer.trouble == "NVML: Driver Not Loaded"
    assert answer.seconds < 5.0


# ---- how a group's start waits for it


class Node:
    """Workers without Python, started by a real owner."""

    def __init__(self, directory: Path, inbox: Inbox, memory: GpuMemory) -> None:
        self.directory, self.inbox = directory, inbox
        (directory / "runtime").mkdir()
        spec = JobSpec(sys.executable, Mode.EXEC, "sleep", ("600",), directory, job_id="job", run="1")
        owner = OwnerClient(directory / "runtime", inbox.put)
        self.workers = WorkerManager(spec, "a", dict(os.environ), Preload(cold="no Python"), owner, memory=memory)
        self.sentences: list[str] = []
        self.workers.set_listener(self)

    def log(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def on(self, event: LauncherReady, now: float) -> None:
        pass

    def start(self, number: int) -> None:
        path = self.directory / f"beat-{number}"
        beat.create(str(path))
        round = Round(number, (Member("a", "i", (0,)),))
        self.workers.start(round, (WorkerSpec({}, None, None, str(path)),), ("127.0.0.1", 1))

    def receive(self) -> list[OwnerEvent | MemoryChecked]:
        message = self.inbox.get(timeout=PATIENCE_S)
        if isinstance(message, MemoryChecked):
            self.workers.memory_checked(message)
            return [message]
        assert isinstance(message, OwnerMessage)
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

    def end(self, number: int) -> None:
        assert self.workers.signal(number, signal.SIGKILL) == []
        while GroupEnded(number) not in self.receive():
            pass


@pytest.fixture
def node(tmp_path: Path, inbox: Inbox, opened: Open) -> Iterator[Node]:
    node = Node(tmp_path, inbox, opened(PATIENCE_S))
    yield node
    node.workers.close()


def test_start_waits_for_free_memory(node: Node, nvml: Nvml) -> None:
    """A group starts when the last one has given its memory back."""
    node.start(1)
    first, was_checked = node.started(1)
    assert not was_checked, "nobody was there before"
    node.end(1)
    nvml.set_memory([first])
    node.start(2)
    until(lambda: nvml.queries() > 3, "look at the GPUs")
    assert node.inbox.empty()
    nvml.set_memory([])
    second, was_checked = node.started(2)
    assert was_checked
    assert second != first
    assert node.sentences == []


def test_cancelled_start_while_waiting_for_memory(node: Node, nvml: Nvml) -> None:
    """A start that is taken back stays so and the next one waits all the same."""
    node.start(1)
    first, _ = node.started(1)
    node.end(1)
    nvml.set_memory([first])
    node.start(2)
    until(lambda: nvml.queries() > 3, "look at the GPUs")
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
    nvml.set_memory([])
    assert isinstance(node.receive()[0], MemoryChecked)
    node.start(5)
    assert not node.started(5)[1], "who held it has been asked about"


def test_start_despite_memory_holders(node: Node, nvml: Nvml) -> None:
    """Who never gives it back is named and the group starts."""
    node.start(1)
    node.started(1)
    node.end(1)
    node.start(2)
    node.workers.memory_checked(MemoryChecked(((70, 0), (70, 1)), 10.04))
    node.started(2)
    assert node.sentences == [
        "round 2: ended processes still hold GPU memory (process 70 on GPU 0, process 70 on GPU 1); "
        "starting the workers after 10.0 s"
    ]


def test_memory_check_that_never_answers(node: Node, nvml: Nvml) -> None:
    """An answer that never comes is not waited for for ever."""
    node.start(1)
    first, _ = node.started(1)
    node.end(1)
    nvml.set_memory([first])
    node.start(2)
    due = node.workers.tick(time.monotonic())
    assert due is not None
    assert WAIT_S + ANSWER_S < due - time.monotonic() < 60
    node.workers.tick(due)
    assert not node.started(2)[1]
    assert node.sentences[0].startswith("round 2: the check of the GPU memory did not answer")
