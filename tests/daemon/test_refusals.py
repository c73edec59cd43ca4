"""What an agent refuses and survives: a second agent, foreign pids, a lost store, a full disk."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.errors import StoreUnavailable
from elasticd.sigterm import TOGETHER_S
from elasticd_agent.model.job import REQUEUE_EXIT_CODE, Rendezvous
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_daemon import agent
from elasticd_daemon import keys as names
from elasticd_daemon.loop import NAME_CONFLICT_MARGIN_S
from elasticd_daemon.runners import liveness as alive
from elasticd_daemon.runners.spec import RunnerSpec
from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, AgentNode, lives, until
from tests.etcd import EtcdServers


def sleeping(node: AgentNode, name: str = "one", **how: object) -> None:
    """A job without torch whose workers wait for nothing."""
    node.job(name, "plain.py", COLD, "sleep", workers=1, **how)


def ready(node: AgentNode, job: str = "one") -> tuple[int, ...]:
    until(lambda: (node.work / "ready-0").exists(), node.diagnostics)
    return node.workers(job)


def test_second_agent_with_the_same_state_directory_is_refused(node: MakeNode) -> None:
    n1 = node().start()
    twin = node("n2", root=n1.root / "twin", state_dir=n1.state)
    twin.start(wait=False)
    assert twin.wait() == REQUEUE_EXIT_CODE
    line = f"state_dir {n1.state}: another agent uses it (pid {n1.pid}); give each agent its own"
    assert twin.log == f"elasticd agent: error: {line}\n"
    assert n1.drain() == 0


def test_agent_is_started_again_until_it_can_listen(node: MakeNode) -> None:
    """As at a boot, where an interface gets its address late: systemd leaves an agent alone that ends with code 2."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        n1 = node(http={"port": other.getsockname()[1]})
        n1.start("--supervised", wait=False)
        n1.wait_for_log(f"the agent ended with code {REQUEUE_EXIT_CODE} and is started again")
    n1.event("node_registered")
    assert n1.drain() == 0


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_local_store_of_an_earlier_version_is_refused(flags: list[str], node: MakeNode) -> None:
    """By the check, too, which comes before an upgraded agent replaces itself."""
    n1 = node()
    n1.state.mkdir(mode=0o700)
    (n1.state / "store.journal").write_text("a job")
    n1.start(*flags, wait=False)
    assert n1.wait() == 2
    assert f"{n1.state / 'store.journal'} has jobs of an earlier version" in n1.log


def test_agent_started_without_standard_streams(node: MakeNode) -> None:
    """Else its lock or its socket would be descriptor 2, where whoever complains writes."""
    n1 = node()
    n1.start(prefix=["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"])
    assert [os.readlink(f"/proc/{n1.pid}/fd/{fd}") for fd in range(3)] == ["/dev/null"] * 3
    n1.upgrade()
    assert n1.drain() == 0


def test_agent_starts_while_the_names_of_etcd_are_unknown(node: MakeNode) -> None:
    """Else the jobs that run there would leave: an agent that was upgraded or crashed in that time would not come."""
    etcd = {"backend": "etcd", "endpoints": ["etcd.invalid:2379"]}
    n1 = node(store=etcd, http={"bind": "0.0.0.0", "port": 0})
    n1.start(wait=False)
    n1.wait_for_log("until then other nodes cannot ask this one")
    n1.wait_for_log("running jobs continue without the store")
    assert n1.drain() == 0


def test_address_is_used_once_a_name_of_the_store_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "ADDRESS_RETRY_S", 0.01)
    answers: list[object] = [StoreUnavailable("etcd:2379 cannot be resolved")] * 3 + ["10.0.0.1:9411"]
    used: queue.SimpleQueue[str] = queue.SimpleQueue()

    def find() -> str:
        if isinstance(answer := answers.pop(0), StoreUnavailable):
            raise answer
        return str(answer)

    said: list[str] = []
    agent.find_address(find, used.put, said.append)
    assert used.get(timeout=30) == "10.0.0.1:9411"
    assert said == ["etcd:2379 cannot be resolved; until then other nodes cannot ask this one"]


def test_name_server_that_does_not_answer_does_not_keep_an_agent_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent, "ADDRESS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(agent, "ADDRESS_RETRY_S", 0.01)
    answers, used = threading.Event(), queue.SimpleQueue[str]()
    said: list[str] = []
    agent.find_address(lambda: "10.0.0.1:9411" * answers.wait(30), used.put, said.append)
    assert said == ["no name of the store was resolved within 0.05 s; until then other nodes cannot ask this one"]
    answers.set()
    assert used.get(timeout=30) == "10.0.0.1:9411"


@pytest.mark.parametrize(
    ("bound", "local", "address"),
    [
        ("127.0.0.1", "10.0.0.7", ""),
        ("::1", "fd00::7", ""),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:9411"),
        ("0.0.0.0", "10.0.0.7", "10.0.0.7:9411"),
        ("0.0.0.0", "fd00::7", ""),
        ("::", "fd00::7", "[fd00::7]:9411"),
        ("10.0.0.8", "10.0.0.7", "10.0.0.8:9411"),
    ],
)
def test_address_that_does_not_lead_others_to_this_node_is_not_told(bound: str, local: str, address: str) -> None:
    settings: Any = SimpleNamespace(local_addr=local)
    etcd = Rendezvous(backend="etcd", endpoints=(("10.0.0.1", 2379),))
    assert agent.advertised_address(settings, etcd, (bound, 9411)) == address


@pytest.mark.system
def test_second_agent_with_the_same_name_is_refused(nodes: MakeNode) -> None:
    n1, twin = nodes("n1").start(), nodes("n1")
    twin.start(wait=False)
    assert twin.wait() == 2
    assert "another agent is node 'n1'" in twin.log
    assert twin.log.splitlines()[-1].startswith("elasticd agent: error: ")
    assert n1.drain() == 0


@pytest.mark.system
def test_agent_whose_jobs_run_starts_although_the_store_refuses_it(nodes: MakeNode, etcd: EtcdServers) -> None:
    """Without jobs it ends at once, and is started again: with the certificate and the password of then."""
    n1 = nodes("n1", drain_timeout="3s")
    sleeping(n1)
    n1.start()
    workers = ready(n1)
    n1.kill()
    etcd.ask_for_passwords("elasticd", "secret", "/elasticd/v1/")
    n1.start(wait=False)
    n1.wait_for_log("running jobs continue without the store: etcd at 127.0.0.1")
    n1.wait_for_log("adopted its runner")
    assert n1.drain() == 0
    assert not any(map(lives, workers))
    n1.start(wait=False)
    assert n1.wait() == REQUEUE_EXIT_CODE


@pytest.mark.system
def test_own_dead_agent_has_the_name_while_the_store_is_away(nodes: MakeNode, etcd: EtcdServers) -> None:
    """Without node.json an agent cannot know its record; a store that comes back gives every lease its full time."""
    n1 = nodes("n1", lease="2s").start()
    n1.event("node_registered")
    n1.kill()
    (n1.state / "node.json").unlink()
    etcd.kill()
    n1.start(wait=False)
    n1.event("store_unavailable")
    time.sleep(2 * 2 + NAME_CONFLICT_MARGIN_S + 0.5)
    etcd.restart()
    until(lambda: len(n1.events("node_registered")) == 2, n1.diagnostics)
    assert n1.drain() == 0


def test_pids_of_an_earlier_boot_are_ignored(node: MakeNode) -> None:
    """The state directory names pids that strangers have now: they are neither adopted nor signalled."""
    n1 = node()
    strangers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    try:
        for number, stranger in enumerate(strangers, 1):
            files = n1.files("old", number)
            files.root.mkdir(parents=True)
            files.agent_folder.mkdir(parents=True)
            files.runner_spec.write_bytes(RunnerSpec("old", number, "n1", (0,), "{}").to_json())
            named = alive.ProcessIdentity.of(stranger.pid)
            boot = "an-earlier-boot" if number == 1 else named.boot_id
            files.lock.write_text(f"{named.pid} {named.start_ticks} {boot}\n")
        n1.start()
        assert n1.event("agent_started")["adopted"] == 0
        assert n1.drain() == 0
        assert all(stranger.poll() is None for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


@pytest.mark.system
def test_runner_without_an_agent_leaves(node: MakeNode) -> None:
    n1 = node(adopt_timeout="5s")
    sleeping(n1)
    n1.start()
    (worker,) = ready(n1)
    n1.kill()
    killed = time.monotonic()
    last = n1.wait_for_exit("one")
    assert 3 < time.monotonic() - killed < 15
    assert (last.outcome, last.exit_code) == ("left", 143)
    assert not lives(worker)
    assert "no agent has contacted this runner for 5 s" in n1.files("one").runner_log.read_text()
    until(lambda: not n1.processes(), n1.diagnostics)
    n1.start()
    n1.event("runner_started")
    until(lambda: n1.workers("one") != (worker,), n1.diagnostics)
    assert n1.drain() == 0


@pytest.mark.system
@pytest.mark.parametrize("backend", ["local", "etcd"])
def test_job_that_has_trained_goes_on_once_its_directory_is_back(node: MakeNode, nodes: MakeNode, backend: str) -> None:
    """After a power cut a file server may be back later than the nodes, and nobody there to cordon them."""
    n1 = (nodes if backend == "etcd" else node)("n1", refuse_timeout="1s")
    sooner, data, away = n1.root / "sooner", n1.root / "data", n1.root / "away"
    sooner.mkdir(parents=True)
    (sooner / "sitecustomize.py").write_text(
        "from elasticd_daemon.runners import reconcile\nreconcile.REFUSAL_RETRY_S = 3.0\n"
    )
    n1.path.insert(0, str(sooner))
    data.mkdir()
    n1.job("one", "ticking.py", COLD, workers=1, workdir=str(data))
    n1.start()
    n1.wait_for_step(5)
    assert n1.drain() == 0
    data.rename(away)
    n1.start()
    n1.wait_for_log(f"job one is refused by this node: workdir: the working directory '{data}' does not exist")
    away.rename(data)
    until(lambda: n1.steps()[-1][0] > 1, n1.diagnostics)
    assert n1.drain() == 0


@pytest.mark.system
def test_runner_whose_directory_is_removed_says_so(node: MakeNode) -> None:
    """As systemd-logind does at the logout of the job's user; its agent lives, and cannot reach it."""
    n1 = node(adopt_timeout="5s")
    sleeping(n1)
    n1.start()
    ready(n1)
    runtime = n1.files("one").runtime.resolve()
    shutil.rmtree(runtime)
    n1.wait_for_log(f"{runtime} was removed while the job ran")
    n1.until(lambda: len(n1.events("runner_started")) == 2, "another runner")
    assert n1.drain() == 0


@pytest.mark.system
def test_stopped_runner_does_not_count_as_an_orphan(node: MakeNode) -> None:
    n1 = node(adopt_timeout="5s")
    sleeping(n1)
    n1.start()
    workers, runner = ready(n1), n1.runner("one")
    os.kill(runner, signal.SIGSTOP)
    time.sleep(7)  # longer than adopt_timeout: nothing else shows that nothing happens
    os.kill(runner, signal.SIGCONT)
    asked = n1.request("one", "status")
    assert asked["phase"] == "running"
    time.sleep(3)
    assert n1.workers("one") == workers
    assert all(map(lives, workers))
    assert n1.drain() == 0


@pytest.mark.system
def test_runner_that_does_not_leave_is_killed_with_all_processes(node: MakeNode) -> None:
    n1 = node(drain_timeout="2s")
    sleeping(n1)
    n1.start()
    (worker,), runner = ready(n1), n1.runner("one")
    os.kill(runner, signal.SIGSTOP)
    assert n1.drain() == 0
    assert "does not end; it is killed" in n1.log
    assert not lives(runner)
    assert not lives(worker)
    n1.assert_gone()


@pytest.mark.system
def test_second_sigterm_kills_at_once(node: MakeNode) -> None:
    n1 = node()
    n1.job("one", "plain.py", COLD, "deaf", workers=1)
    n1.start()
    (worker,) = ready(n1)
    asked = time.monotonic()
    n1.signal(signal.SIGTERM)
    n1.wait_for_log("to leave this node")
    time.sleep(2 * TOGETHER_S)
    n1.signal(signal.SIGTERM)
    assert n1.wait() == 0
    assert time.monotonic() - asked < 20
    assert "SIGTERM again: remaining jobs are killed" in n1.log
    assert not lives(worker)
    n1.assert_gone()


@pytest.mark.system
def test_jobs_continue_without_the_store_and_in_an_empty_one(nodes: MakeNode, etcd: EtcdServers) -> None:
    n1 = nodes("n1")
    sleeping(n1)
    n1.start()
    workers = ready(n1)
    etcd.kill()
    n1.event("store_unavailable")
    time.sleep(5)  # longer than the lease
    assert n1.workers("one") == workers
    etcd.restart()
    n1.event("store_available")
    etcd.restart(empty=True)
    n1.wait_for_log("; registering again")
    store = EtcdStore(etcd.endpoints)
    try:
        until(lambda: store.read(f"{names.SUBMISSIONS}one"), n1.diagnostics)
        placed = until(lambda: store.read(f"{names.PLACEMENTS}one"), n1.diagnostics)
        assert [place["node"] for place in json.loads(placed.value)["assignments"]] == ["n1"]
    finally:
        store.close()
    time.sleep(3)  # what is wrong with the placement would have ended the runner by now
    assert n1.workers("one") == workers, n1.diagnostics()
    assert all(map(lives, workers))
    assert len(n1.events("runner_started")) == 1
    assert n1.drain() == 0
