"""The cost of the rendezvous: N agents join, lose one, lose a tenth, get a tenth of new ones; torch's own beside it.

Real protocol code over a real etcd and a real TCPStore; agents are threads of a few processes and have no workers, so
the rendezvous alone is measured. benchmarks/nodes.py kills the leader, with workers. Prints a markdown table and writes
its results as JSON. torch's rendezvous is measured joining only, for as many nodes as it can handle within the
deadline: nothing else of it survives a lost node.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import rendezvous_plot, report, simulation
from elasticd_agent.model.job import Policy
from tests.etcd import etcd_servers

PROCESSES, TOGETHER = 4, 64
"""Processes, and agents per process above which there are more: threads of one process run in turn."""
STEPS = "join", "lose one", "lose a tenth", "add a tenth"
MANY, MANY_LEASE_S = 256, 30.0
_START_S = 60.0
SETTLED_S = 1.0
"""The time after a round: its records are deleted, every member has answered a probe."""


class DeadlineMissed(Exception):
    """An awaited event did not happen before the deadline."""


@dataclass(slots=True)
class Figures:
    """Seconds, and store requests and bytes per node, of one step of a job's life.

    `cpu_s` is what all agents used of this machine, `etcd_cpu_s` what etcd did; `rounds` is how many Rounds it took:
    more than one is a detour, and `why` has the reason of each.
    """

    seconds: float
    cpu_s: float
    etcd_cpu_s: float
    rounds: int
    requests: float
    sent: float
    received: float
    why: list[str]


@dataclass(slots=True)
class SizeResult:
    """One job of `nodes` agents over `store`."""

    store: str
    nodes: int
    lease_s: float
    steps: dict[str, Figures] = field(default_factory=dict)
    idle_requests_a_second: float = 0.0
    trouble: str = ""


class Agents:
    """All agents of one job, spread over processes; their reports arrive in one queue."""

    def __init__(self, store: str, endpoint: Endpoint, job: str, count: int, deadline_s: float, lease_s: float) -> None:
        self._store, self._endpoint, self._etcd = store, endpoint.address, endpoint.etcd
        host, port = endpoint.address
        self.deadline_s = deadline_s
        self.reports: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self.alive = [f"n{i}" for i in range(count)]
        self.sizes: dict[str, tuple[int, int, float]] = {}
        self.why: dict[int, str] = {}
        self.expected: int | None = None
        self.broken: list[str] = []
        processes = min(max(PROCESSES, count // TOGETHER), count)
        spread = [self.alive[i::processes] for i in range(processes)]
        # All of them at first: min = max. Afterwards fewer are enough, or none could be lost.
        base = [sys.executable, "-m", "benchmarks.agents", store, host, str(port), job, "1", str(count)]
        base.append(str(lease_s))
        self._processes = [
            subprocess.Popen([*base, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for names in spread
        ]
        # Joiners have a home, too.
        self._home = {f"n{i}": i % processes for i in range(2 * count)}
        for process in self._processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()
        for _ in self._processes:
            self._next("ready", time.monotonic() + _START_S)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.reports.put(json.loads(line))

    def _next(self, kind: str, deadline: float) -> dict[str, object]:
        while True:
            try:
                line = self.reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DeadlineMissed(f"no {kind} before the deadline; {self.broken[-1:]}") from None
            if line["kind"] in ("broken", "log"):
                self.broken.append(str(line))
            if line["kind"] == "round":
                node, number, members = str(line["node"]), int(str(line["number"])), int(str(line["size"]))
                self.sizes[node] = number, members, float(str(line["at"]))
                self.why[number] = str(line["why"])
                if self.expected is not None and members > self.expected and node in self.alive:
                    self.send(node, "fail", str(number), node)
            if line["kind"] == kind:
                return line

    def send(self, name: str, *words: str) -> None:
        self._write(self._home[name], " ".join(words))

    def _write(self, process: int, line: str) -> None:
        stdin = self._processes[process].stdin
        assert stdin is not None
        stdin.write(line.encode() + b"\n")
        stdin.flush()

    def broadcast(self, line: str) -> None:
        for process in range(len(self._processes)):
            self._write(process, line)

    def each(self, verb: str, names: Sequence[str]) -> int:
        """Send the verb to every process, with its own ones of `names`; returns the number of processes."""
        homes = {home: [name for name in names if self._home[name] == home] for home in set(self._home.values())}
        receivers = {home: mine for home, mine in homes.items() if mine}
        for home, mine in receivers.items():
            self._write(home, " ".join([verb, *mine]))
        return len(receivers)

    def kill(self, names: Sequence[str]) -> None:
        """From now on a Round with more members than are left has dead ones; its members report it, as with gloo."""
        self.expected = len(self.alive) - len(names)
        self.alive = [name for name in self.alive if name not in names]
        for _ in range(self.each("kill", names)):
            self._next("killed", time.monotonic() + self.deadline_s)

    def start(self, names: Sequence[str]) -> None:
        self.expected = None
        self.alive = [*self.alive, *names]
        self.each("start", names)

    def until_all_in(self, size: int) -> float:
        """When the last living agent had read one Round with `size` members."""
        deadline = time.monotonic() + self.deadline_s
        while True:
            rounds = {self.sizes[name][:2] for name in self.alive if name in self.sizes}
            if len(rounds) == 1 and all(n in self.sizes for n in self.alive) and next(iter(rounds))[1] == size:
                return max(self.sizes[name][2] for name in self.alive)
            self._next("round", deadline)

    @property
    def number(self) -> int:
        """The highest Round that any agent has read."""
        return max(size[0] for size in self.sizes.values())

    def planners(self) -> list[str]:
        """The nodes that plan at this moment."""
        self.broadcast("planners")
        found: list[str] = []
        for _ in self._processes:
            nodes = self._next("planners", time.monotonic() + _START_S)["nodes"]
            assert isinstance(nodes, list)
            found += nodes
        return found

    def traffic(self) -> tuple[float, float, float]:
        """Requests, bytes sent and received, of all agents so far, as etcd counts them; c10d counts nothing."""
        if self._store != "etcd":
            return 0.0, 0.0, 0.0
        host, port = self._endpoint
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=_START_S) as answer:
            lines = answer.read().decode().splitlines()
        client = "etcd_network_client_grpc"
        names = "grpc_server_msg_received_total", f"{client}_received_bytes_total", f"{client}_sent_bytes_total"
        requests, sent, received = (
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in names
        )
        return requests, sent, received

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds of all agents so far, and of etcd."""
        agents = sum(process_cpu_s(process.pid) for process in self._processes)
        return agents, 0.0 if self._etcd is None else process_cpu_s(self._etcd)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def measure_size(
    store: str, endpoint: Endpoint, count: int, deadline_s: float, idle_s: float, lease_s: float
) -> SizeResult:
    """Join, idle, lose one, lose a tenth, get as many new ones."""
    result = SizeResult(store, count, lease_s)
    agents = Agents(store, endpoint, f"bench-{store}-{count}-{os.getpid()}", count, deadline_s, lease_s)
    try:
        before = (0.0, 0.0, 0.0)

        def step(name: str, began: float, size: int, cpu_s: tuple[float, float], number: int) -> None:
            seconds = agents.until_all_in(size) - began
            agents_s, etcd_s = (b - a for a, b in zip(cpu_s, agents.cpu_s(), strict=True))
            used = agents.traffic()
            requests, sent, received = (max(0.0, b - a) / len(agents.alive) for a, b in zip(before, used, strict=True))
            why = [agents.why[n] for n in sorted(agents.why) if n > number]
            assert name in STEPS
            result.steps[name] = Figures(seconds, agents_s, etcd_s, len(why), requests, sent, received, why)

        cpu_s = agents.cpu_s()
        began = time.monotonic()
        agents.broadcast("go")
        step("join", began, count, cpu_s, 0)
        time.sleep(SETTLED_S)
        before = agents.traffic()
        time.sleep(idle_s)
        after = agents.traffic()
        result.idle_requests_a_second = (after[0] - before[0]) / count / idle_s
        tenth = max(1, count // 10)
        for name, lost in (("lose one", 1), ("lose a tenth", tenth)):
            number = agents.number
            planners = agents.planners()
            gone = [node for node in agents.alive if node not in planners][-lost:]
            before = agents.traffic()
            cpu_s = agents.cpu_s()
            began = time.monotonic()
            agents.kill(gone)
            for node in agents.alive:
                agents.send(node, "fail", str(number), node)
            step(name, began, len(agents.alive), cpu_s, number)
            time.sleep(SETTLED_S)
        number, before, cpu_s, began = agents.number, agents.traffic(), agents.cpu_s(), time.monotonic()
        agents.start([f"n{count + i}" for i in range(tenth)])
        step("add a tenth", began, len(agents.alive), cpu_s, number)
    except DeadlineMissed as late:
        result.trouble = f"{late}; the rounds so far: {agents.why}"
    finally:
        agents.end()
    return result


def torch_joins(count: int, deadline_s: float) -> float | None:
    """Seconds for `count` of torch's own handlers to join, as threads of one process; None: not before the deadline."""
    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("scripts") / "torch_rendezvous.py"), str(count)],
            capture_output=True,
            timeout=deadline_s + _START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    text = done.stdout.decode().strip()
    return float(text) if done.returncode == 0 and text else None


def table(lives: Sequence[SizeResult], torch: dict[int, float | None]) -> str:
    of_steps = " / ".join(STEPS)
    titles = ["nodes", "store", *(f"{name} s" for name in STEPS), f"requests a node: {of_steps}"]
    titles += [f"kB a node: {of_steps}", f"processor ms a node, agent + etcd: {of_steps}"]
    titles += ["idle requests a node and second", "torch's rendezvous, join s"]
    rows = [titles, ["---"] * len(titles)]
    for one in lives:
        steps = one.steps
        seconds = [f"{steps[n].seconds:.2f}" if n in steps else "–" for n in STEPS]
        known = [steps[n] for n in STEPS if n in steps]
        requests = " / ".join(f"{f.requests:.1f}" for f in known)
        size = " / ".join(f"{(f.sent + f.received) / 1000:.1f}" for f in known)
        used = " / ".join(f"{1000 * f.cpu_s / one.nodes:.1f} + {1000 * f.etcd_cpu_s / one.nodes:.1f}" for f in known)
        peer = torch.get(one.nodes)
        peers = "–" if one.nodes not in torch else (f"{peer:.1f}" if peer is not None else "not in time")
        idle = f"{one.idle_requests_a_second:.2f}"
        rows.append([str(one.nodes), one.store, *seconds, requests, size, used, idle, peers])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def free_endpoint() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", probe.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the store is."""

    address: tuple[str, int]
    etcd: int | None = None  #: its process; None: an agent hosts the store


def process_cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def endpoints(kind: str) -> Iterator[Endpoint]:
    if kind == "c10d":
        yield Endpoint(free_endpoint())
        return
    with etcd_servers() as etcd:
        yield Endpoint(etcd.endpoints[0], etcd.pid())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--stores", nargs="+", choices=("etcd", "c10d"), default=["etcd"])
    parser.add_argument(
        "--torch", type=int, nargs="*", default=[8, 64], help="nodes torch's own rendezvous is tried with"
    )
    parser.add_argument("--deadline", type=float, default=120.0)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds an idle job is watched")
    parser.add_argument(
        "--lease",
        type=float,
        help=f"seconds; default 3, and {MANY_LEASE_S:g} for more than {MANY} nodes, which a few cores cannot all renew "
        "every second",
    )
    parser.add_argument(
        "--simulate",
        type=int,
        nargs="+",
        metavar="NODES",
        help="instead, so many agents over a simulated etcd and clock: also without their leader, and without a store",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.simulate:
        return simulate_sizes(args.simulate, args.json)
    facts = report.machine()
    lives: list[SizeResult] = []
    torch: dict[int, float | None] = {}
    for count in args.nodes:
        for kind in args.stores:
            with endpoints(kind) as endpoint:
                lease_s = args.lease or (Policy().lease_s if count <= MANY else MANY_LEASE_S)
                lives.append(measure_size(kind, endpoint, count, args.deadline, args.idle, lease_s))
            print(f"{kind}, {count} nodes: {lives[-1]}", file=sys.stderr, flush=True)
        if count in args.torch:
            torch[count] = torch_joins(count, args.deadline)
            print(f"torch, {count} nodes: {torch[count]}", file=sys.stderr, flush=True)
    print(f"Measured on {report.machine_line(facts)}.\n\n{table(lives, torch)}")
    plain = [{**dataclasses.asdict(one), "torch_join_seconds": torch.get(one.nodes)} for one in lives]
    write(plain, facts, args.json)
    return 1 if any(one.trouble for one in lives) else 0


def simulate_sizes(sizes: Sequence[int], path: Path | None) -> int:
    results = []
    for count in sizes:
        results.append(simulation.simulate(count))
        print(f"{count} nodes, simulated: {results[-1]}", file=sys.stderr, flush=True)
    print(simulation.table(results))
    write([dataclasses.asdict(one) for one in results], {}, path)
    return 1 if any(one.trouble for one in results) else 0


def write(lives: Sequence[dict[str, Any]], facts: dict[str, Any], path: Path | None) -> None:
    """All figures as JSON, and as a picture beside it."""
    path = path or Path(tempfile.mkdtemp(prefix="elasticd-bench-")) / "rendezvous.json"
    path.write_text(json.dumps({"machine": facts, "wall": time.time(), "lives": lives}, indent=1) + "\n")
    print(f"\nAll figures: {path}", file=sys.stderr)
    if rendezvous_plot.draw(lives, path.with_suffix(".png")):
        print(f"As a picture: {path.with_suffix('.png')}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
