"""Nodes that meet in a c10d store which none of them hosts: `elasticd store`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elasticd_agent.model.keys import Keys
from elasticd_agent.model.records import NodeRecord
from elasticd_agent.store.c10d.store import C10dStore
from tests.faults.job import REPOSITORY, Job, until
from tests.faults.nodes import StartJob
from tests.library.conftest import free_port

HOSTED = "nodes can meet at port"


class Hosted:
    """One `elasticd store`, on a port that stays the same."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "store.log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        before = self.told.count(HOSTED)
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elasticd_agent", "store", "--port", str(self.port)],
                env={**os.environ, "PYTHONPATH": path},
                stderr=log,
            )
        until(lambda: self.told.count(HOSTED) > before, lambda: f"a store: {self.told}")

    def end(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        code = self.process.wait(20)
        self.process = None
        return code

    @property
    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    made = Hosted(tmp_path)
    made.start()
    yield made
    if made.process is not None:
        made.end(signal.SIGKILL)


@pytest.fixture
def three(job: StartJob, hosted: Hosted) -> Callable[[], dict[str, Job]]:
    def start() -> dict[str, Job]:
        meet = [*("--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", "127.0.0.1")]
        meet += ["--rdzv-endpoint", f"127.0.0.1:{hosted.port}", "--rdzv-conf", "is_host=0,last_call_timeout=60"]
        names = ("a", "b", "c")
        return {name: job("tells.py", "${local_rank}", flags=[*meet, "--node-id", name], workers="1") for name in names}

    return start


def test_second_server_at_the_port(hosted: Hosted) -> None:
    """A second one at the same port is refused."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticd_agent", "store", "--port", str(hosted.port)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"cannot host the c10d store at port {hosted.port}" in done.stderr
    assert hosted.end() == 0
    assert "ends on SIGTERM" in hosted.told


@pytest.mark.system
def test_any_node_plans_and_may_die_and_the_store_may_come_back_empty(
    three: Callable[[], dict[str, Job]], hosted: Hosted
) -> None:
    agents = three()
    for agent in agents.values():
        agent.event("group_started", round=1)
    with closing(C10dStore("127.0.0.1", hosted.port, serve=False, timeout_s=5)) as store:
        key = store.read(Keys("job").planner)
        assert store.standalone
        planner = NodeRecord.from_json(key.value).id
        lost = agents.pop(planner)
        lost.process.kill()
        for agent in agents.values():
            agent.event("group_started", round=2)
            assert planner in agent.event("round_published", round=2)["reason"]
        key = store.read(Keys("job").planner)
        assert NodeRecord.from_json(key.value).id in agents
    assert hosted.end(signal.SIGKILL) == -signal.SIGKILL
    for agent in agents.values():
        agent.event("store_unavailable")
    hosted.start()
    for agent in agents.values():
        agent.event("store_available")
        (agent.work / "enough").touch()
    assert [agent.wait() for agent in agents.values()] == [0, 0]
    for agent in agents.values():
        assert len(agent.events("round_published")) == 2, "an empty store makes nobody start again"
    assert hosted.end() == 0
