"""--cuda-warm: who makes a CUDA context when, on a machine whose libcuda is a stub, and why it is given up."""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.heartbeat import record as beat
from elasticd_agent.model.job import JobSpec, Mode
from elasticd_agent.model.messages import GroupEnded
from elasticd_agent.model.records import Member, Round
from elasticd_agent.workers import manager
from elasticd_agent.workers.gpu_memory import GpuMemory, MemoryChecked, MemoryWait
from elasticd_agent.workers.launcher.client import OwnerClient, OwnerLost, OwnerMessage
from elasticd_agent.workers.launcher.requests import Preload, WorkerSpec, refuse_contexts
from elasticd_agent.workers.manager import GroupStarted, LauncherReady, OwnerEvent, WorkerManager
from tests.gpu.machine import calls, make_gpu_machine

PATIENCE_S = 30.0
TORCH = """
import ctypes, os, types

default_generator = types.SimpleNamespace(seed=lambda: 0)
driver = ctypes.CDLL("libcuda.so.1")

class device:
    def __init__(self, index): self.index = index
    def __enter__(self):
        import torch
        assert torch.cuda is cuda, "as the C++ of torch's own finds it"
        if os.environ.get("FAKE_CUDA_FAILS") == "exit": os._exit(1)
        if os.environ.get("FAKE_CUDA_FAILS") == "hang": import time; time.sleep(600)
        driver.cuDevicePrimaryCtxRetain(None, self.index)
        cuda.made.append((self.index, os.environ.get("CUDA_VISIBLE_DEVICES")))
    def __exit__(self, *error): pass

def free():
    return int(os.environ.get("FAKE_CUDA_FREE", 70 << 30)), 80 << 30

cuda = types.SimpleNamespace(device=device, made=[], synchronize=lambda: None, mem_get_info=free,
                             current_blas_handle=lambda: driver.cublasCreate_v2(None))
"""
SCRIPT = """
import os, sys, time
seen = "torch" in sys.modules
import torch
with open(sys.argv[1], "a") as out:
    out.write(f"{os.getpid()} {seen} {torch.cuda.made}\\n")
time.sleep(600)
"""


class CheckedMemory(GpuMemory):
    """Each start but the first waits for an answer."""

    def __init__(self) -> None:
        self.checks = -1

    def check(self, except_pids: Collection[int]) -> int:
        self.checks += 1
        return self.checks


class Node:
    """Two workers on GPUs 4 and 5, or others, started by a real owner."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self.directory = directory
        self.inbox: queue.SimpleQueue[OwnerMessage | OwnerLost] = queue.SimpleQueue()
        (directory / "runtime").mkdir()
        (directory / "torch.py").write_text(TORCH)
        script = directory / "train" / "train.py"
        script.parent.mkdir()
        script.write_text(SCRIPT)
        spec = JobSpec(
            sys.executable, Mode.SCRIPT, str(script), (str(directory / "ran"),), directory, job_id="job", run="1"
        )
        owner = OwnerClient(directory / "runtime", self.inbox.put)
        env = env | {"PYTHONPATH": str(directory)}
        wait = MemoryWait(CheckedMemory(), ("4", "5"))
        self.workers = WorkerManager(spec, "a", env, Preload(("torch",)), owner, memory=wait, cuda_warm=True)
        self.workers.set_listener(self)
        self.sentences: list[str] = []
        self.messages: list[dict[str, Any]] = []
        self.events: list[OwnerEvent] = []

    def log(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def on(self, event: LauncherReady, now: float) -> None:
        pass

    def until(self, condition: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, (self.sentences, self.messages, self.events)
            self.workers.tick(time.monotonic())
            try:
                message = self.inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            assert isinstance(message, OwnerMessage)
            self.messages.append(message.message)
            self.events += self.workers.handle(message)
        return found

    def start(self, number: int, gpus: str = "4,5", busy: str = "") -> GroupStarted:
        workers = []
        for rank in range(2):
            path = self.directory / f"beat-{number}-{rank}"
            beat.create(path)
            env = {"ELASTICD_HEARTBEAT": str(path), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": gpus}
            workers.append(WorkerSpec(env, None, None, str(path)))
        self.workers.start(Round(number, (Member("a", "i", (0, 1)),)), tuple(workers), ("127.0.0.1", 1))
        self.workers.memory_checked(MemoryChecked(number - 1, busy=tuple(busy)))
        found = self.until(
            lambda: next((e for e in self.events if isinstance(e, GroupStarted) and e.number == number), None)
        )
        assert isinstance(found, GroupStarted)
        return found

    def end(self, number: int) -> None:
        self.workers.signal(number, signal.SIGKILL)
        self.until(lambda: GroupEnded(number) in self.events)

    def parked(self) -> list[list[int]]:
        return [message["pids"] for message in self.messages if message["kind"] == "parked"]

    def ran(self) -> list[str]:
        path = self.directory / "ran"
        return path.read_text().splitlines() if path.exists() else []


class Machine:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = make_gpu_machine(directory)
        self.node: Node | None = None

    def start(self, **env: str) -> Node:
        (self.directory / "node").mkdir()
        self.node = Node(self.directory / "node", self.env | env)
        return self.node

    def took_memory(self) -> list[str]:
        return [call for call in calls(self.env) if ":" in call]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    if machine.node is not None:
        machine.node.workers.close()


def test_parked_workers_make_contexts_after_the_first_step(machine: Machine) -> None:
    """Nobody else, and not before; the next group runs in them, and its script imports torch as ever."""
    node = machine.start()
    first = node.start(1)
    node.until(lambda: len(node.ran()) == 2)
    assert calls(machine.env) == [], "neither the template nor a worker, nor a parked one before the step"
    node.workers.first_step(1, 2, with_store=True)
    node.until(lambda: node.sentences)
    assert node.sentences[0].startswith("the parked workers have CUDA contexts, in 0.")
    assert node.sentences[0].endswith(" s; a GPU has at least 70.0 GiB left")
    parked = node.parked()[-1][1:]
    assert machine.took_memory() == [f"{what}:{pid}" for pid in parked for what in ("context", "cublas")]
    assert not set(parked) & set(first.pids)
    node.end(1)
    second = node.start(2)
    assert second.pids == parked
    node.until(lambda: len(node.ran()) == 4)
    assert sorted(node.ran()[2:]) == sorted(f"{pid} False {[(rank, '4,5')]}" for rank, pid in enumerate(parked))
    assert len(machine.took_memory()) == 4


def test_contexts_on_other_gpus_are_not_used(machine: Machine) -> None:
    node = machine.start()
    node.start(1)
    node.until(lambda: len(node.ran()) == 2)
    node.workers.first_step(1, 2, with_store=True)
    node.until(lambda: node.sentences)
    warm = node.parked()[-1]
    node.end(1)
    second = node.start(2, gpus="4,6")
    assert second.warm
    assert not set(second.pids) & set(warm)
    node.until(lambda: len(node.ran()) == 4)
    assert {line.split(" ", 1)[1] for line in node.ran()[2:]} == {"False []"}


def test_contexts_on_other_gpus_hold_up_no_start(machine: Machine) -> None:
    """GPU 5 is not free for 30 s: the worker on GPU 4 starts at once, in a group without contexts, which gets none."""
    node = machine.start()
    node.start(1)
    node.until(lambda: len(node.ran()) == 2)
    node.workers.first_step(1, 2, with_store=True)
    node.until(lambda: node.sentences)
    made = machine.took_memory()
    node.end(1)
    second = node.start(2, gpus="4,6", busy="5")
    assert (second.warm, second.held) == (True, (1,))
    node.until(lambda: len(node.ran()) == 3)
    node.workers.memory_checked(MemoryChecked(1))
    node.until(lambda: len(node.ran()) == 4)
    assert machine.took_memory() == made


REFUSALS = {
    "exclusive": ({"FAKE_CUDA_MODE": "3"}, "GPU 0 is in compute mode exclusive-process, in which a second process"),
    "no room": ({"FAKE_CUDA_FREE": str(1 << 30)}, "GPU 0 would have 1.0 GiB left, less than 2 GiB"),
    "broken": ({"FAKE_CUDA_FREE": "?"}, "ValueError: "),
    "dies": ({"FAKE_CUDA_FAILS": "exit"}, "a parked process exited with code 1"),
    "hangs": ({"FAKE_CUDA_FAILS": "hang"}, "the contexts were not made within 0.5 s"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_costs_nothing_else(machine: Machine, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group trains on, the next one is parked without contexts, and none is made again."""
    env, why = REFUSALS[case]
    if case == "hangs":
        monkeypatch.setattr(manager, "CONTEXTS_S", 0.5)
    node = machine.start(**env)
    node.start(1)
    node.workers.first_step(1, 2, with_store=True)
    node.until(lambda: node.sentences)
    assert node.sentences[0].startswith(f"--cuda-warm is given up: {why}")
    node.until(lambda: len(node.parked()) == 3)
    made = machine.took_memory()
    assert bool(made) == (case in ("no room", "broken"))
    node.end(1)
    second = node.start(2)
    assert second.pids == node.parked()[-1][1:]
    node.workers.first_step(2, 2, with_store=True)
    node.until(lambda: len(node.parked()) == 4)
    assert machine.took_memory() == made
    assert len(node.sentences) == 1


@pytest.mark.parametrize(
    ("source", "gpus", "why"),
    [
        ("import torch", ("0",), ""),
        ("import torch", (), "there is not one GPU for each worker"),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '3'", ("0",), "train.py may choose its GPU by CUDA_VISIBLE_DEVICES"),
        (None, ("0",), "the program may choose its GPU by CUDA_VISIBLE_DEVICES"),
    ],
)
def test_scripts_that_choose_their_gpu(tmp_path: Path, source: str | None, gpus: tuple[str, ...], why: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source or "")
    found = refuse_contexts(None if source is None else script, gpus)
    assert found.startswith(why)
    assert bool(found) == bool(why)
