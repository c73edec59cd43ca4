"""The torchrun plug-in: handlers as threads over one store in memory, each with a line to it that can be cut."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed.elastic.rendezvous as torchs
import torch.distributed.elastic.rendezvous.registry as torchs_registry
from torch.distributed import TCPStore

from elasticd.errors import UsageError, WireError
from elasticd_agent.model.job import Rendezvous
from elasticd_agent.store import Lease, Watch
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.torchrun_plugin.handler import TorchrunHandler, make_handler
from elasticd_agent.torchrun_plugin.options import PluginOptions, parse_options
from elasticd_agent.torchrun_plugin.plan import (
    STOP_TIMEOUT_S,
    Candidate,
    LiveCandidate,
    NoRoundYet,
    TorchrunMember,
    TorchrunRequirements,
    TorchrunRound,
    TorchrunView,
    membership_change,
    next_round,
)
from tests.etcd import etcd_servers
from tests.scenarios.waystore import NodeStore

Until = Callable[[Callable[[], object], float], object]

ROOT = "/elasticd/v1/jobs/job/torchrun/"
LEASE_S = 1.0
SOON_S = 60.0
"""For what shall happen: far more than it takes, also on a busy machine."""


class AwakeClock:
    """As the host of a c10d store counts: what this process slept through ends no lease."""

    def __init__(self) -> None:
        self._now, self._last = 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._now += min(now - self._last, LEASE_S / 4)
        self._last = now
        return self._now


class Line(NodeStore):
    """One node's connection to the shared store, which can be cut. Closing it affects no other node."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, lambda: not self.cut, lambda deliver: deliver())
        self.cut = False
        self.leases: list[Lease] = []
        self._watches: list[Watch] = []

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        lease = super().announce(key, value, ttl_s)
        self.leases += [] if lease is None else [lease]
        return lease

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        self._watches.append(super().watch(callback, *prefixes))
        return self._watches[-1]

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


class Job:
    """Nodes of one job. A node joins in a thread of its own, as torchrun's would in its process."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.store = MemoryStore(AwakeClock())
        self.lines: dict[TorchrunHandler, Line] = {}
        self._pool = pool

    def node(self, nodes: str, *, last_call_timeout_s: float = 60.0, **changes: Any) -> TorchrunHandler:
        low, high = map(int, nodes.split(":"))
        asked = TorchrunRequirements(low, high, last_call_timeout_s, debounce_s=0.1)
        short = {"lease_s": LEASE_S, "renewal_s": LEASE_S / 5, "store_timeout_s": LEASE_S / 5, "join_timeout_s": 60.0}
        # Shorter than Policy permits.
        conf = PluginOptions("job", Rendezvous(), asked, SimpleNamespace(**{**short, **changes}))  # type: ignore[arg-type]
        line = Line(self.store)
        handler = make_handler(conf, line, lambda: "127.0.0.1")
        self.lines[handler] = line
        return handler

    def join(self, *nodes: TorchrunHandler) -> list[Future[Any]]:
        return [self._pool.submit(node.next_rendezvous) for node in nodes]

    def joined(self, *nodes: TorchrunHandler) -> list[Any]:
        return [future.result(SOON_S) for future in self.join(*nodes)]

    def kill(self, node: TorchrunHandler) -> None:
        """As SIGKILL would: nothing is withdrawn, and its TCPStore is gone."""
        self.lines[node].cut = True
        assert node.shutdown() is False

    def round(self) -> TorchrunRound | None:
        found = self.store.read(f"{ROOT}round")
        return None if found is None else TorchrunRound.from_json(found.value)

    def end(self) -> None:
        for node, line in self.lines.items():
            line.cut = True  # no farewells
            node.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _first_store() -> None:
    """torch's first store makes libuv's pipe for signals, which stays for good and is not the first test's leak."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def job() -> Iterator[Job]:
    with ThreadPoolExecutor() as pool:
        job = Job(pool)
        try:
            yield job
        finally:
            job.end()


def test_maximum_of_nodes_starts_at_once(job: Job) -> None:
    """They share one fresh TCPStore."""
    infos = job.joined(job.node("2:2"), job.node("2:2"))
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    infos[0].store.set("word", "heard")
    assert infos[1].store.get("word") == b"heard"
    first, second = (info.bootstrap_store_info for info in infos)
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    assert first.master_addr == "127.0.0.1"


def test_fewer_nodes_start_after_the_last_call(job: Job) -> None:
    began = time.monotonic()
    (info,) = job.joined(job.node("1:2", last_call_timeout_s=0.5))
    assert (info.rank, info.world_size) == (0, 1)
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("lost", [0, 1])
def test_lost_node_restarts_the_survivor(job: Job, until: Until, lost: int) -> None:
    """num_nodes_waiting reports the loss."""
    nodes = [job.node("1:2"), job.node("1:2")]
    infos = job.joined(*nodes)
    by_rank = {info.rank: node for info, node in zip(infos, nodes, strict=True)}
    survivor = by_rank[1 - lost]
    assert survivor.num_nodes_waiting() == 0
    job.kill(by_rank[lost])
    until(lambda: survivor.num_nodes_waiting() == 1, SOON_S)
    (info,) = job.joined(survivor)  # no last call, which would take a minute
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info.master_port not in {i.bootstrap_store_info.master_port for i in infos}
    assert survivor.num_nodes_waiting() == 0


def test_joining_node_gets_the_last_rank(job: Job, until: Until) -> None:
    first, second = job.node("1:2", last_call_timeout_s=0.1), job.node("1:2")
    job.joined(first)
    (coming,) = job.join(second)
    until(lambda: first.num_nodes_waiting() == 1, SOON_S)
    (info,) = job.joined(first)
    assert (info.rank, info.world_size) == (0, 2)
    assert coming.result(SOON_S).rank == 1


def test_failed_member_restarts_the_others(job: Job, until: Until) -> None:
    first, second = job.node("2:2"), job.node("2:2")
    job.joined(first, second)
    (again,) = job.join(first)
    until(lambda: second.num_nodes_waiting() == 1, SOON_S)
    assert not again.done()
    job.joined(second)
    assert again.result(SOON_S).world_size == 2


def test_surplus_node_restarts_nothing(job: Job) -> None:
    member = job.node("1:1")
    job.joined(member)
    spare = job.node("1:1", join_timeout_s=2.0)
    with pytest.raises(torchs.RendezvousTimeoutError, match="round 1 runs"):
        job.joined(spare)
    assert member.num_nodes_waiting() == 0
    assert spare.shutdown()  # as torchrun does then
    assert not member.is_closed()


def test_spare_replaces_a_lost_node(job: Job, until: Until) -> None:
    nodes = [job.node("2:2"), job.node("2:2")]
    job.joined(*nodes)
    (spare,) = job.join(job.node("2:2"))
    job.kill(nodes[1])
    until(lambda: nodes[0].num_nodes_waiting() > 0, SOON_S)
    (info,) = job.joined(nodes[0])
    assert (info.rank, info.world_size) == (0, 2)
    assert spare.result(SOON_S).rank == 1


def test_closed_job_admits_no_node(job: Job, until: Until) -> None:
    """And it restarts no member."""
    first, second = job.node("1:2"), job.node("1:2")
    job.joined(first, second)
    assert first.shutdown()
    until(lambda: len(job.store.list(f"{ROOT}nodes/")) == 1, SOON_S)
    assert second.is_closed()
    assert second.num_nodes_waiting() == 0
    with pytest.raises(torchs.RendezvousClosedError, match="another --rdzv-id"):
        job.joined(second)
    with pytest.raises(torchs.RendezvousClosedError):
        job.joined(job.node("1:2"))
    assert first.shutdown()  # once more, as torchrun's callers may


def test_too_few_nodes_time_out(job: Job, until: Until) -> None:
    """They are no candidates afterwards."""
    node = job.node("2:2", join_timeout_s=2.0)
    with pytest.raises(torchs.RendezvousTimeoutError, match="1 of at least 2 nodes have joined"):
        job.joined(node)
    until(lambda: not job.store.list(f"{ROOT}nodes/"), SOON_S)
    assert not node.is_closed()


def test_outage_longer_than_the_lease(job: Job, until: Until) -> None:
    nodes = [job.node("1:2"), job.node("1:2")]
    job.joined(*nodes)
    for node in nodes:
        job.lines[node].cut = True
    until(lambda: not job.store.list(f"{ROOT}nodes/"), SOON_S)
    seen = {node.num_nodes_waiting() for node in nodes}
    with pytest.raises(torchs.RendezvousConnectionError, match="does not answer"):
        nodes[0].is_closed()
    job.lines[nodes[0]].cut = False  # the first one back reads no other registration
    until(lambda: len(job.store.list(f"{ROOT}nodes/")) == 1, SOON_S)
    seen |= {nodes[0].num_nodes_waiting()}
    job.lines[nodes[1]].cut = False
    until(lambda: len(job.store.list(f"{ROOT}nodes/")) == 2, SOON_S)
    assert seen | {node.num_nodes_waiting() for node in nodes} == {0}


def test_lease_doubles_for_a_live_node_that_was_lost(job: Job, until: Until) -> None:
    node = job.node("1:1")
    job.joined(node)
    granted, leases = [LEASE_S], job.lines[node].leases
    for _ in range(4):
        lease = leases[-1]
        lease.withdraw()  # as the store does when a renewal is late
        until(lambda old=lease: leases[-1] is not old, SOON_S)
        granted.append(leases[-1].ttl_s)
    assert granted == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_outage_doubles_no_lease(job: Job, until: Until) -> None:
    node = job.node("1:1")
    job.joined(node)
    leases = job.lines[node].leases
    old = leases[-1]
    job.lines[node].cut = True
    until(lambda: not job.store.list(f"{ROOT}nodes/"), SOON_S)
    job.lines[node].cut = False
    until(lambda: leases[-1] is not old, SOON_S)
    assert leases[-1].ttl_s == LEASE_S


@pytest.mark.parametrize(
    ("given", "lease_s", "renewal_s"),
    [
        ({}, 15.0, 5.0),
        ({"keep_alive_interval": 2}, 6.0, 2.0),
        ({"keep_alive_max_attempt": 5}, 25.0, 5.0),
        ({"lease": 3, "renewal": 1}, 3.0, 1.0),
        ({"lease": 4}, 4.0, 1.0),
    ],
)
def test_lease_defaults_to_torchs_keep_alive(given: dict[str, Any], lease_s: float, renewal_s: float) -> None:
    policy = parse_options("job", "127.0.0.1:2379", 1, 1, None, given).policy
    assert (policy.lease_s, policy.renewal_s) == (lease_s, renewal_s)


def test_joining_nodes_during_an_outage(job: Job, until: Until) -> None:
    """They do not count."""
    member = job.node("1:2", last_call_timeout_s=0.0)
    job.joined(member)
    (coming,) = job.join(job.node("1:2"))
    until(lambda: member.num_nodes_waiting() == 1, SOON_S)
    job.lines[member].cut = True
    until(lambda: member.num_nodes_waiting() == 0, SOON_S)
    job.lines[member].cut = False
    until(lambda: member.num_nodes_waiting() == 1, SOON_S)
    job.joined(member)
    coming.result(SOON_S)


def test_join_during_a_long_outage(job: Job) -> None:
    node = job.node("1:1", lease_s=0.1, renewal_s=0.02)
    job.lines[node].cut = True
    with pytest.raises(torchs.RendezvousConnectionError, match="does not answer"):
        job.joined(node)


def test_node_returns_to_a_job_that_continued(job: Job, until: Until) -> None:
    nodes = [job.node("1:2"), job.node("1:2")]
    infos = job.joined(*nodes)
    job.lines[nodes[1]].cut = True
    until(lambda: nodes[0].num_nodes_waiting() == 1, SOON_S)
    assert nodes[1].num_nodes_waiting() == 0
    (alone,) = job.joined(nodes[0])
    assert alone.world_size == 1
    job.lines[nodes[1]].cut = False
    until(lambda: nodes[1].num_nodes_waiting() > 0, SOON_S)
    (back,) = job.join(nodes[1])
    until(lambda: nodes[0].num_nodes_waiting() > 0, SOON_S)
    job.joined(nodes[0])
    assert back.result(SOON_S).world_size == len(infos)


@pytest.mark.parametrize("rank", [0, 1])
def test_node_lost_before_the_first_use_of_a_round(
    job: Job, until: Until, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """It costs another round."""
    # It was announced, is taken into round 1, and never serves the round's store, or never comes to it.
    gone = Candidate(TorchrunMember("gone", "127.0.0.1", 9), 0).to_json()
    if rank == 0:
        assert job.store.announce(f"{ROOT}nodes/gone.1", gone, LEASE_S)
    (coming,) = job.join(job.node("1:2"))
    if rank == 1:
        until(lambda: job.store.list(f"{ROOT}nodes/"), SOON_S)
        assert job.store.announce(f"{ROOT}nodes/gone.1", gone, LEASE_S)
    info = coming.result(SOON_S)
    current = job.round()
    assert current.number > 1
    assert (info.rank, info.world_size) == (0, 1)
    assert "Exception raised from" not in capfd.readouterr().err  # TCPStore's page for a host that refuses


def test_round_is_published_again_in_an_empty_store(job: Job, until: Until) -> None:
    nodes = [job.node("1:2"), job.node("1:2")]
    job.joined(*nodes)
    before = job.round()
    for key in job.store.list(ROOT):
        job.store.delete(key)
    until(lambda: job.round() == before and len(job.store.list(f"{ROOT}nodes/")) == 2, SOON_S)
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0]


def test_undecodable_records(job: Job) -> None:
    job.store.compare_and_swap(f"{ROOT}nodes/other.1", None, b"\xff")
    job.joined(job.node("1:1"))
    found = job.store.read(f"{ROOT}round")
    job.store.compare_and_swap(f"{ROOT}round", found.version, b'{"version": "2.0"}')
    with pytest.raises(torchs.RendezvousStateError, match=r"version 2\.0"):
        job.joined(job.node("1:1"))


def test_torch_disable_share_rdzv_tcp_store(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    node = job.node("1:1")
    assert node.use_agent_store
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not node.use_agent_store
    (info,) = job.joined(node)
    current = job.round()
    assert info.bootstrap_store_info.master_port != current.members[0].port


def test_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="torchrun.handlers", name="elasticd")
    assert entry.value == "elasticd_agent.torchrun_plugin:get_handler"
    params = torchs.RendezvousParameters("elasticd", "127.0.0.1:9", "job", 1, 2, is_host=True, timeout=900)
    handler = torchs_registry.get_rendezvous_handler(params)
    assert isinstance(handler, torchs.RendezvousHandler)
    assert handler.get_backend() == "elasticd"
    assert handler.get_run_id() == "job"
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()


def test_options_as_in_elasticd_run() -> None:
    given = {"lease": "6", "renewal": "2", "join_timeout": "40", "last_call_timeout": "4", "timeout": 900}
    conf = parse_options("job", "https://a:1,https://b:2", 2, 4, "10.0.0.1", given)
    assert conf.rendezvous.endpoints == (("a", 1), ("b", 2))
    assert conf.rendezvous.tls is not None
    assert conf.rendezvous.local_addr == "10.0.0.1"
    assert (conf.policy.lease_s, conf.policy.renewal_s, conf.policy.join_timeout_s) == (6, 2, 40)
    assert (conf.requirements.min_nodes, conf.requirements.max_nodes, conf.requirements.last_call_timeout_s) == (
        2,
        4,
        4,
    )
    assert parse_options("job", "a", 1, 1, None, {"local_addr": "10.0.0.2"}).rendezvous.local_addr == "10.0.0.2"
    with pytest.raises(UsageError, match="did you mean join_timeout"):
        parse_options("job", "a", 1, 1, None, {"join_timout": "1"})
    with pytest.raises(UsageError, match="lease"):
        parse_options("job", "a", 1, 1, None, {"lease": "1", "renewal": "2"})
    with pytest.raises(UsageError, match="rdzv-id"):
        parse_options("a/b", "a", 1, 1, None, {})


@pytest.mark.system
def test_torchrun_restarts_after_a_killed_node(tmp_path: Path, until: Until) -> None:
    """Two real torchruns over a real etcd. Without restarts to spend: a lost node is no failure of the script."""
    with etcd_servers() as etcd, contextlib.ExitStack() as ending:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--rdzv-backend=elasticd", f"--rdzv-endpoint=127.0.0.1:{etcd.port}", "--rdzv-id=job"),
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=0"),
            "--rdzv-conf=lease=5,renewal=0.5,last_call_timeout=60",
            *(str(Path(__file__).parent / "scripts" / "lone_survivor.py"), str(tmp_path)),
        ]
        log = ending.enter_context((tmp_path / "log").open("wb"))
        agents: dict[int, subprocess.Popen[bytes]] = {}
        for _ in range(2):
            agent = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
            ending.callback(agent.wait, 10)
            ending.callback(agent.kill)
            agents[agent.pid] = agent

        def printed(world: int, rank: int) -> list[int]:
            ended = [agent.returncode for agent in agents.values() if agent.poll()]
            assert not ended, (tmp_path / "log").read_text(errors="replace")[-4000:]
            note = tmp_path / f"{world}-{rank}"
            return [int(pid) for pid in note.read_text().split()] if note.exists() else []

        until(lambda: printed(2, 0) and printed(2, 1), 60)
        lost = agents.pop(printed(2, 0)[1])  # rank 0's: the round's store goes, too
        lost.send_signal(signal.SIGSTOP)  # so that it cannot see its worker end first
        for process in [*psutil.Process(lost.pid).children(recursive=True), lost]:
            process.kill()
        until(lambda: printed(1, 0), 30)
        (survivor,) = agents.values()
        assert survivor.wait(20) == 0, (tmp_path / "log").read_text(errors="replace")[-4000:]


# ---- the rules, without a clock


def _view(current: TorchrunRound | None, *here: tuple[str, int, float], closed: str | None = None) -> TorchrunView:
    """`candidates` are (node, after_round, since)."""
    return TorchrunView(
        current, tuple(LiveCandidate(Candidate(_seat(n), past), since) for n, past, since in here), closed
    )


def _seat(node: str) -> TorchrunMember:
    return TorchrunMember(node, "127.0.0.1", 1)


def _round(number: int, *nodes: str) -> TorchrunRound:
    return TorchrunRound(number, tuple(map(_seat, nodes)))


ASKED = TorchrunRequirements(min_nodes=1, max_nodes=3, last_call_timeout_s=5.0, debounce_s=1.0)
AB = _round(4, "a", "b")


@pytest.mark.parametrize(
    ("view", "now", "settled", "expected"),
    [
        pytest.param(_view(None, ("b", 0, 2), ("a", 0, 0)), 6.9, True, 7.0, id="last call after the newest"),
        pytest.param(_view(None, ("b", 0, 2), ("a", 0, 0)), 7.0, True, "ab", id="by arrival"),
        pytest.param(_view(None, ("b", 0, 2), ("a", 0, 2), ("c", 0, 2)), 2.0, True, "abc", id="all of max"),
        pytest.param(_view(AB, ("b", 4, 9), ("a", 4, 9)), 9.0, True, "ab", id="all survivors, in their old order"),
        pytest.param(_view(AB, ("b", 4, 9)), 9.0, True, "b", id="the only survivor"),
        pytest.param(
            _view(AB, ("b", 4, 9)), 9.0, False, 9.0 + STOP_TIMEOUT_S, id="the other may live: the store was away"
        ),
        pytest.param(
            _view(AB, ("a", 0, 1), ("b", 4, 9)), 9.0, True, 9.0 + STOP_TIMEOUT_S, id="the other has yet to stop"
        ),
        pytest.param(_view(AB, ("a", 0, 1), ("b", 4, 9)), 9.0 + STOP_TIMEOUT_S, True, "b", id="it never stopped"),
        pytest.param(_view(AB, ("a", 0, 1), ("c", 0, 1)), 999.0, True, None, id="no member left the running round"),
        pytest.param(_view(AB, ("c", 0, 8), ("b", 4, 9), ("a", 4, 9)), 9.0, True, "abc", id="newcomers come last"),
        pytest.param(_view(AB, ("c", 0, 3)), 4.0, True, 8.0, id="no survivor: as a first round"),
    ],
)
def test_next_round(view: TorchrunView, now: float, settled: bool, expected: str | float | None) -> None:
    verdict = next_round(view, ASKED, now, registrations_settled=settled)
    if isinstance(expected, str):
        assert verdict == _round(1 + (4 if view.current else 0), *expected)
    else:
        assert isinstance(verdict, NoRoundYet)
        assert verdict.retry_at == expected


@pytest.mark.parametrize(
    ("view", "settled", "expected"),
    [
        pytest.param(_view(AB, ("a", 0, 0), ("b", 0, 0)), True, 0, id="peace"),
        pytest.param(_view(AB, ("a", 0, 0)), True, 1, id="lost"),
        pytest.param(_view(AB, ("a", 0, 0)), False, 0, id="perhaps not lost: the store was away"),
        pytest.param(_view(AB, ("a", 0, 0), closed="b"), True, 0, id="finished, not lost"),
        pytest.param(_view(AB, ("a", 0, 0), ("b", 4, 0)), True, 1, id="back"),
        pytest.param(_view(AB, ("a", 0, 0), ("b", 0, 0), ("c", 0, 8)), True, 1, id="a newcomer"),
        pytest.param(_view(AB, ("a", 0, 0), ("b", 0, 0), ("c", 0, 9.5)), True, 0, id="one that others may follow"),
        pytest.param(_view(AB, ("a", 0, 0), ("b", 0, 0), ("c", 0, 0), ("d", 0, 9.5)), True, 1, id="not for ever"),
        pytest.param(_view(AB, ("a", 0, 0), ("c", 0, 0), ("d", 0, 0), ("e", 0, 0)), True, 3, id="lost, room for two"),
        pytest.param(_view(_round(5, "b"), ("a", 0, 0), ("b", 4, 0)), True, 1, id="the job continued without it"),
        pytest.param(_view(None, ("a", 0, 0)), True, 0, id="the store has forgotten the round"),
    ],
)
def test_membership_change(view: TorchrunView, settled: bool, expected: int) -> None:
    assert membership_change(view, AB, ASKED, 10.0, registrations_settled=settled).node_count == expected


def test_membership_change_in_words() -> None:
    def why(*here: str) -> str:
        view = _view(AB, *((node, 0, 0) for node in here))
        return membership_change(view, AB, ASKED, 10.0, registrations_settled=True).why

    assert why("a", "b") == ""
    assert why("a") == "b lost"
    assert why("c") == "2 nodes lost; c waiting to join"


@pytest.mark.parametrize("port", [0, 65536])
def test_member_without_an_address_is_refused(port: int) -> None:
    for node, address, port_ in (("", "10.0.0.1", 1), ("a", "", 1), ("a", "10.0.0.1", port)):
        with pytest.raises(WireError, match="is no address"):
            TorchrunMember(node, address, port_).check()


@pytest.mark.parametrize(("number", "nodes"), [(0, "a"), (1, ""), (1, "aa")])
def test_round_that_cannot_be_is_refused(number: int, nodes: str) -> None:
    with pytest.raises(WireError, match="is invalid"):
        TorchrunRound.from_json(_round(number, *nodes).to_json())
