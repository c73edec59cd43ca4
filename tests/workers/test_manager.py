"""Workers of several nodes, each with an owner of its own, on one machine: one round's store for all of them."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from elasticd.heartbeat import record as beat
from elasticd_agent.model.job import EntrypointMode, JobSpec
from elasticd_agent.model.messages import GroupEnded, StartFailed, StoreExited, WorkerExited
from elasticd_agent.model.records import Member, Round
from elasticd_agent.workers.environment import WorkerPaths, worker_environment
from elasticd_agent.workers.events import GroupStarted, OwnerEvent, StoreReady
from elasticd_agent.workers.launcher.messages import Parked, Refused, Report
from elasticd_agent.workers.launcher.owner_client import OwnerClient, OwnerLost, OwnerReport
from elasticd_agent.workers.launcher.requests import PreloadPlan, WorkerSpec, plan_preload, worker_base_environment
from elasticd_agent.workers.manager import WorkerManager
from elasticd_agent.workers.warm_launcher import MODULE_IMPORT_TIMEOUT_S, TEMPLATE_WAIT_S
from tests.library.conftest import wait_for

SCRIPT = Path(__file__).parent / "scripts" / "sum.py"
PATIENCE_S = 60.0
COLD = "the test says so"

T = TypeVar("T")


class Node:
    """One node's Workers, followed: everything they said is in `heard`."""

    def __init__(self, name: str, directory: Path, spec: JobSpec, preload: PreloadPlan, host: str) -> None:
        self.name, self.directory, self.spec = name, directory, spec
        runtime = directory / "runtime"
        runtime.mkdir(parents=True)
        self.inbox: queue.SimpleQueue[OwnerReport | OwnerLost] = queue.SimpleQueue()
        self.owner = OwnerClient(runtime, self.inbox.put)
        self.workers = WorkerManager(spec, name, worker_base_environment(os.environ, 2), preload, self.owner, host)
        self.received: list[OwnerEvent] = []
        self.reports: list[Report] = []

    def until(self, kind: type[T], within: float = PATIENCE_S) -> T:
        """The first such thing, once it was heard."""
        return self.wait(lambda: next((h for h in self.received if isinstance(h, kind)), None), kind.__name__, within)

    def report(self, kind: type[T]) -> T:
        """The owner's first such report."""
        return self.wait(lambda: next((r for r in self.reports if isinstance(r, kind)), None), kind.__name__)

    def wait(self, condition: Callable[[], T | None], what: str, within: float = PATIENCE_S) -> T:
        deadline = time.monotonic() + within
        while (found := condition()) is None:
            assert time.monotonic() < deadline, (
                f"no {what} on {self.name}: {self.received} {self.reports} {self.output()}"
            )
            self.workers.tick(time.monotonic())
            try:
                message = self.inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            assert isinstance(message, OwnerReport)
            self.reports.append(message.report)
            self.received += self.workers.handle(message)
        return found

    def group(self, round: Round, master_addr: str = "127.0.0.1") -> tuple[WorkerSpec, ...]:
        workers = []
        for local_rank in range(len(round.ranks(self.name))):
            directory = self.directory / f"{round.number}-{local_rank}"
            directory.mkdir()
            paths = WorkerPaths(str(directory / "beat"), str(directory / "notes"), str(directory / "error"), "")
            beat.create(paths.heartbeat_file)
            env = worker_environment(round, self.name, local_rank, paths, self.spec, 0, master_addr)
            workers.append(WorkerSpec(env, str(directory / "out"), str(directory / "out"), paths.heartbeat_file))
        return tuple(workers)

    def start(self, round: Round, master: tuple[str, int] | None = None, master_addr: str = "127.0.0.1") -> None:
        self.received.clear()
        self.reports.clear()
        self.workers.start(round, self.group(round, master_addr), master)

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.directory.glob("*/out")))


class StartNode(Protocol):
    def __call__(self, name: str, *args: str, host: str = "127.0.0.1", **how: Any) -> Node: ...


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StartNode]:
    nodes: list[Node] = []

    def start(
        name: str,
        *args: str,
        host: str = "127.0.0.1",
        mode: EntrypointMode = EntrypointMode.SCRIPT,
        entrypoint: str | Path = SCRIPT,
        port: int | None = None,
        preload: PreloadPlan | None = None,
    ) -> Node:
        arguments = args or (str(tmp_path),)
        spec = JobSpec(
            sys.executable, mode, str(entrypoint), arguments, tmp_path, job_id="job", run="1", master_port=port
        )
        if preload is None:
            preload = plan_preload(SCRIPT, (), ()) if mode is EntrypointMode.SCRIPT else PreloadPlan(cold_reason=COLD)
        nodes.append(Node(name, tmp_path / name, spec, preload, host))
        return nodes[-1]

    yield start
    for each in nodes:
        each.workers.close()


def a_round(number: int, **slots: int) -> Round:
    return Round(number=number, members=tuple(Member(name, name, tuple(range(n))) for name, n in slots.items()))


def seen(tmp_path: Path, round: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / f"sum-{round}-{rank}").read_text())
    return found


def finished(node: Node) -> None:
    """Wait for the group's end. It ended well, and its store is no event."""
    node.until(GroupEnded)
    ends = [heard.status.text for heard in node.received if isinstance(heard, WorkerExited)]
    assert ends and set(ends) == {"exited with code 0"}, node.output()
    assert not any(isinstance(heard, StoreExited) for heard in node.received)


def running(name: str) -> int:
    """How many processes below this one go by that name."""
    found, unseen = 0, [os.getpid()]
    while unseen:
        pid = unseen.pop()
        try:
            found += Path(f"/proc/{pid}/comm").read_text().strip() == name
            unseen += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:
            continue  # it has just ended
    return found


def test_store_serves_all_nodes_until_the_end(node: StartNode, tmp_path: Path) -> None:
    a, b = node("a", host="0.0.0.0"), node("b", host="::")
    b.workers.park(1, with_store=False)  # before it can be: it is done as soon as the template is there
    assert len(b.report(Parked).pids) == 1
    first = a_round(1, a=2, b=1)
    a.start(first)
    port = a.until(StoreReady).port
    b.start(first, ("127.0.0.1", port))
    finished(a)
    assert running("elasticd-store") == 1  # the other node's worker still needs it
    (tmp_path / "alone-1").touch()
    finished(b)
    assert [type(heard) for heard in a.received][:2] == [StoreReady, GroupStarted]
    assert not any(isinstance(heard, StoreReady) for heard in b.received)
    assert a.until(GroupStarted).store_pid > 0 == b.until(GroupStarted).store_pid
    assert not any(isinstance(report, Parked) for report in b.reports)  # what was parked is what ran
    for rank, local_rank, group, size in ((0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 1, 1)):
        told = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": group, "ROLE_RANK": rank, "WORLD_SIZE": 3}
        told |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert seen(tmp_path, 1, rank) == {**{name: str(value) for name, value in told.items()}, "total": 6}
    rank_0_moves(a, b, port, tmp_path)


def rank_0_moves(a: Node, b: Node, before: int, tmp_path: Path) -> None:
    """Rank 0 is on the other node now. What is parked is of the wrong kind on both: too much here, too little there."""
    a.workers.park(2, with_store=True)
    b.workers.park(1, with_store=False)
    b.reports.clear()
    assert len(a.report(Parked).pids) == 3 and len(b.report(Parked).pids) == 1
    second = a_round(2, b=1, a=1)
    b.start(second, master_addr="::1")
    port = b.until(StoreReady).port
    assert port != before
    a.start(second, ("::1", port))
    assert a.until(GroupStarted).store_pid == 0
    wait_for(lambda: running("elasticd-store") == 2, "the end of the parked one")  # b may still be in the first round
    a.workers.end_stores()
    wait_for(lambda: running("elasticd-store") == 1, "the end of the first round's")
    (tmp_path / "alone-2").touch()
    finished(a)
    finished(b)
    for rank in (0, 1):
        assert seen(tmp_path, 2, rank).items() >= {("MASTER_ADDR", "::1"), ("MASTER_PORT", str(port)), ("total", 3)}
    b.workers.end_stores()
    wait_for(lambda: running("elasticd-store") == 0, "the end of the store")


def test_store_of_cold_groups(node: StartNode) -> None:
    how: dict[str, Any] = {"mode": EntrypointMode.EXEC, "entrypoint": "/bin/sh"}
    args = ("-c", "echo $MASTER_ADDR $MASTER_PORT; exec sleep 600")
    a, b = node("a", *args, host="::", **how), node("b", *args, **how)
    both = a_round(1, a=1, b=1)
    a.start(both)
    port = a.until(StoreReady).port
    with socket.create_connection(("127.0.0.1", port), timeout=20):
        pass  # it waits in the backlog until the store has loaded torch
    b.start(both, ("127.0.0.1", port))
    assert b.until(GroupStarted).store_pid == 0
    for each in (a, b):
        assert wait_for(each.output, "output") == f"127.0.0.1 {port}\n"
    os.kill(a.until(GroupStarted).store_pid, signal.SIGKILL)
    assert a.until(StoreExited).why == "was killed by SIGKILL"
    for each in (a, b):
        assert each.workers.signal(1, signal.SIGKILL) == []
        each.until(GroupEnded)
        ends = [heard.status.text for heard in each.received if isinstance(heard, WorkerExited)]
        assert ends == ["was killed by SIGKILL"]
    assert not any(isinstance(heard, StoreExited) for heard in b.received)


def test_a_request_reaches_the_rank_it_is_meant_for_and_a_stop_stands(node: StartNode) -> None:
    nodes = [node(name, "-c", "exec sleep 600", mode=EntrypointMode.EXEC, entrypoint="/bin/sh") for name in "ab"]
    for each in nodes:
        each.start(a_round(1, a=2, b=1), ("127.0.0.1", 1))  # nobody asks who listens there
        each.until(GroupStarted)

    def asked(word: int, only: int | None = None, round: int = 1) -> list[int]:
        for each in nodes:
            each.workers.request_stop_or_pause(round, word, only)
        return [request(path) for each in nodes for path in sorted(each.directory.glob("1-*/beat"))]

    assert asked(beat.PAUSE, only=0) == [beat.PAUSE, 0, 0]
    assert asked(0, only=0) == [0, 0, 0]
    assert asked(beat.STOP, round=2) == [0, 0, 0]
    assert asked(beat.STOP) == [beat.STOP] * 3
    assert asked(0) == asked(beat.PAUSE) == [beat.STOP] * 3


def request(path: Path) -> int:
    with beat.HeartbeatReader(path) as reader:
        return reader.read().request


def test_store_that_cannot_listen(node: StartNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        a = node("a", port=taken.getsockname()[1], preload=PreloadPlan())
        a.start(a_round(1, a=1, b=1))
        assert "Address already in use" in a.until(StartFailed).why
    a.until(GroupEnded)
    assert a.report(Parked) and a.report(Refused).group == 1  # first what was parked, then a cold start
    assert not any(isinstance(heard, StoreReady) for heard in a.received)
    wait_for(lambda: running("elasticd-store") == 0 and running("elasticd-templ") == 1, "the end of what was parked")


NO_STORE = ("127.0.0.1", 1)


def test_group_is_not_started_cold_after_its_end_was_asked_for(node: StartNode) -> None:
    """It was released, but what was parked for it had died, and the owner's word on that was still to be read."""
    a = node("a", preload=PreloadPlan())
    a.workers.park(1, with_store=False)
    (pid,) = a.report(Parked).pids
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of what was parked")
    a.start(a_round(1, a=1), NO_STORE)
    assert a.workers.signal(1, signal.SIGKILL) == []
    a.until(GroupEnded)
    assert not any(isinstance(heard, GroupStarted) for heard in a.received)


@pytest.fixture
def slow(node: StartNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose template imports the module `slow`, until the file "go" is there."""
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n    time.sleep(0.01)\n"
    )
    (tmp_path / "job").mkdir()
    script = tmp_path / "job" / "nothing.py"
    script.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = node("a", entrypoint=script, preload=PreloadPlan(("slow",), ("slow",)))
    found.wait(lambda: found.workers.preloading_module == "slow" or None, "import of slow")
    return found


def test_round_starts_cold_while_a_preload_takes_long(slow: Node, tmp_path: Path) -> None:
    """The template keeps coming: a later round is warm."""
    slow.start(a_round(1, a=1), NO_STORE)
    slow.workers.tick(time.monotonic() + TEMPLATE_WAIT_S - 1)
    assert not slow.received
    slow.workers.tick(time.monotonic() + TEMPLATE_WAIT_S)
    assert not slow.until(GroupStarted).warm
    finished(slow)
    assert not slow.workers.start_mode_is_known
    (tmp_path / "go").touch()
    slow.wait(lambda: slow.workers.start_mode_is_known or None, "the template")
    slow.start(a_round(2, a=1), NO_STORE)
    assert slow.until(GroupStarted).warm
    finished(slow)


def test_round_waits_no_longer_than_the_template_takes(slow: Node) -> None:
    """The wait counts from the template's start, so a restart later does not wait again."""
    at = time.monotonic() + TEMPLATE_WAIT_S
    slow.start(a_round(1, a=1), NO_STORE)
    slow.workers.tick(at)
    finished(slow)


def test_preload_that_hangs_is_left_out(slow: Node) -> None:
    slow.start(a_round(1, a=1), NO_STORE)
    slow.workers.tick(time.monotonic() + MODULE_IMPORT_TIMEOUT_S)
    assert slow.until(GroupStarted).warm
    finished(slow)
