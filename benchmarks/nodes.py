"""Several nodes on one machine: a node, the leader node, a worker is killed, the store restarts; time to the next step.

Each node is a launcher of its own with one worker, all join through one real store; the script is the same plain one as
in recovery.py. A recovery is the time from the fault to the first step of the last rank of the new group. "store
restarts" is twenty of them in one run; "node vanishes" pulls a cable between hosts made of network namespaces, which
needs root. torchrun uses its own c10d store and is killed the same way; it often needs more than a minute, so it runs
only with --torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import report
from benchmarks.job import SCRIPT, Stalled
from benchmarks.processes import adopt_orphans, descendants, end_all
from benchmarks.rendezvous import free_endpoint
from tests.etcd import EtcdServers, etcd_servers
from tests.multihost.cluster import EtcdHost
from tests.multihost.net import Network

_START_S = 90.0
_SETTLE_S = 1.5
_HOSTS_S = 5.0
"""On one machine every node could host the c10d store: the first one has so long to do it."""
RESTARTS = 20
PLANNER = "/elasticd/v1/jobs/vanish/planner"

Popen = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(slots=True)
class NodeLossOutcome:
    """Seconds without a step, and how often there was an end to them."""

    name: str
    seconds: list[float] = field(default_factory=list)
    tried: int = 0


class Nodes:
    """One job of several launchers."""

    def __init__(
        self, command: Sequence[str], folder: Path, popen: Callable[[int], Popen] = lambda node: subprocess.Popen
    ) -> None:
        """`popen` starts a process on a node, as subprocess.Popen does here."""
        self.folder = folder
        self._command, self._popen = command, popen
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        argv = [word.replace("{node}", str(node)) for word in self._command]
        with (self.folder / f"output-{node}.log").open("ab") as out:
            self.launchers[node] = self._popen(node)(
                [*argv, str(SCRIPT), "--notes", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def steps(self) -> list[tuple[int, float]]:
        """(pid, when) of every step noted so far."""
        found = []
        for path in self.folder.glob("rank*.steps"):
            text = path.read_text()
            for line in text[: text.rfind("\n") + 1].splitlines():
                _, pid, _, at = line.split()
                found.append((int(pid), float(at)))
        return found

    def until_stepping(self, size: int, after: float, old: set[int], deadline_s: float) -> float:
        """When the last of `size` workers, none of them in `old`, had done its first step after `after`."""
        deadline = time.monotonic() + deadline_s
        while True:
            first: dict[int, float] = {}
            for pid, at in self.steps():
                if at > after and pid not in old:
                    first[pid] = min(at, first.get(pid, at))
            if len(first) >= size:
                return sorted(first.values())[-1]
            if time.monotonic() > deadline:
                raise Stalled(f"{len(first)} of {size} workers step")
            time.sleep(0.02)

    def end(self) -> None:
        for node in list(self.launchers):
            self.kill_node(node)

    def output(self) -> str:
        logs = sorted(self.folder.glob("output-*.log"))
        return "\n".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-4:])

    def workers(self) -> set[int]:
        return {pid for pid, _ in self.steps()}

    def kill_node(self, node: int) -> float:
        """SIGKILL everything of one node, as if the machine lost its power, except its kernel."""
        launcher = self.launchers.pop(node)
        at = time.monotonic()
        for pid in [launcher.pid, *descendants(launcher.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait(10)
        return at

    def planner(self, etcd: EtcdServers, job: str) -> int:
        """The leader node, from the store."""
        found = json.loads(etcd.ctl("get", "--print-value-only", f"/elasticd/v1/jobs/{job}/planner"))
        return int(str(found["id"]).removeprefix("n"))


def elasticd_command(store: str, endpoint: tuple[str, int], job: str) -> list[str]:
    return [
        *(sys.executable, "-m", "elasticd_agent", "run", "--nnodes", "2:3", "--rdzv-backend", store),
        *("--rdzv-endpoint", f"{endpoint[0]}:{endpoint[1]}", "--rdzv-id", job, "--node-id", "n{node}"),
        *("--nproc-per-node", "1", "--max-restarts", "1000", "--rdzv-conf", "last_call_timeout=20"),
    ]


def torchrun_command(endpoint: tuple[str, int], job: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{endpoint[0]}:{endpoint[1]}", "--rdzv-id", job, "--nproc-per-node", "1"),
        *("--max-restarts", "100", "--rdzv-conf", "last_call_timeout=5"),
    ]


def faults(
    kinds: Sequence[str], store: str, repetitions: int, deadline_s: float, rng: random.Random
) -> list[NodeLossOutcome]:
    """Each fault hits a fresh job of 3 nodes. With c10d the first node hosts the store, and leads."""
    outcomes = {kind: NodeLossOutcome(f"elasticd, {store}: {kind}") for kind in kinds}
    with etcd_servers() as etcd, tempfile.TemporaryDirectory(prefix="elasticd-bench-") as scratch:
        for repetition in range(repetitions):
            for kind in kinds:
                job = f"bench-{kind}-{repetition}-{os.getpid()}"
                folder = Path(scratch) / job
                folder.mkdir()
                endpoint = etcd.endpoints[0] if store == "etcd" else free_endpoint()
                nodes = Nodes(elasticd_command(store, endpoint, job), folder)
                outcome = outcomes[kind]
                outcome.tried += 1
                try:
                    outcome.seconds.append(_one(kind, nodes, etcd if store == "etcd" else None, job, deadline_s, rng))
                except Stalled as stalled:
                    say(f"{kind}: LOST: {stalled}; a node's last output:\n{nodes.output()}")
                else:
                    say(f"{kind} {repetition + 1}/{repetitions}: {outcome.seconds[-1]:.3f} s")
                finally:
                    nodes.end()
    return list(outcomes.values())


def _one(kind: str, nodes: Nodes, etcd: EtcdServers | None, job: str, deadline_s: float, rng: random.Random) -> float:
    for node in range(3):
        nodes.start(node)
        if etcd is None and node == 0:
            time.sleep(_HOSTS_S)
    nodes.until_stepping(3, 0.0, set(), _START_S)
    time.sleep(_SETTLE_S)
    planner, old = nodes.planner(etcd, job) if etcd is not None else 0, nodes.workers()
    if kind in ("node", "planner"):
        victim = planner if kind == "planner" else rng.choice([node for node in range(3) if node != planner])
        at = nodes.kill_node(victim)
        return nodes.until_stepping(2, at, old, deadline_s) - at
    if kind == "worker":
        at = time.monotonic()
        os.kill(rng.choice(sorted(old)), signal.SIGKILL)
        return nodes.until_stepping(3, at, old, deadline_s) - at
    assert etcd is not None
    at = time.monotonic()
    for _ in range(RESTARTS if kind == "store restarts" else 1):
        etcd.restart()
        time.sleep(5.0)  # longer than a lease and a renewal: what a restart leads to has happened
    if nodes.workers() != old:
        raise Stalled("workers were restarted because the store was")
    return _longest_pause(nodes, at)


def vanishing(repetitions: int, deadline_s: float) -> NodeLossOutcome:
    """A node's cable is pulled: nothing resets a connection. Hosts are network namespaces, so this needs root."""
    outcome = NodeLossOutcome("elasticd, etcd: node vanishes")
    for repetition in range(repetitions):
        with Network(3, others=("store",)) as net, tempfile.TemporaryDirectory(prefix="elasticd-bench-") as scratch:
            store = EtcdHost(net["store"])

            def popen(node: int, net: Network = net) -> Popen:
                return net.hosts[node].popen

            nodes = Nodes(elasticd_command("etcd", (store.host.address, 2379), "vanish"), Path(scratch), popen)
            outcome.tried += 1
            try:
                for node in range(3):
                    nodes.start(node)
                nodes.until_stepping(3, 0.0, set(), _START_S)
                time.sleep(_SETTLE_S)
                planner = int(json.loads(store.ctl("get", "--print-value-only", PLANNER))["id"].removeprefix("n"))
                old, victim = nodes.workers(), next(node for node in range(3) if node != planner)
                at = time.monotonic()
                net.hosts[victim].link(up=False)
                outcome.seconds.append(nodes.until_stepping(2, at, old, deadline_s) - at)
                say(f"node vanishes {repetition + 1}/{repetitions}: {outcome.seconds[-1]:.2f} s")
            except Stalled as stalled:
                say(f"node vanishes {repetition + 1}/{repetitions}: LOST: {stalled}; last output:\n{nodes.output()}")
    return outcome


def _longest_pause(nodes: Nodes, after: float) -> float:
    times = sorted(at for _, at in nodes.steps() if at > after)
    return max(b - a for a, b in itertools.pairwise(times))


def torchrun(repetitions: int, deadline_s: float) -> NodeLossOutcome:
    outcome = NodeLossOutcome("torchrun, c10d: node")
    with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as scratch:
        for repetition in range(repetitions):
            folder = Path(scratch) / str(repetition)
            folder.mkdir()
            nodes = Nodes(torchrun_command(free_endpoint(), f"t{repetition}"), folder)
            outcome.tried += 1
            try:
                for node in range(3):
                    nodes.start(node)
                    time.sleep(0.5)  # the first one hosts the store
                nodes.until_stepping(3, 0.0, set(), _START_S)
                time.sleep(_SETTLE_S)
                old = nodes.workers()
                at = nodes.kill_node(2)
                outcome.seconds.append(nodes.until_stepping(2, at, old, deadline_s) - at)
                say(f"torchrun node {repetition + 1}/{repetitions}: {outcome.seconds[-1]:.1f} s")
            except Stalled as stalled:
                say(f"torchrun node {repetition + 1}/{repetitions}: {stalled}")
            finally:
                end_all()
    return outcome


def table(outcomes: Sequence[NodeLossOutcome]) -> str:
    lines = ["| fault, 3 nodes of 1 worker | seconds without a step: median (max) | recovered/tried |", "|---|---|---|"]
    for o in outcomes:
        figure = f"{statistics.median(o.seconds):.2f} ({max(o.seconds):.2f})" if o.seconds else "never"
        lines.append(f"| {o.name} | {figure} | {len(o.seconds)}/{o.tried} |")
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def ended() -> Iterator[None]:
    adopt_orphans()
    try:
        yield
    finally:
        end_all()


def main(argv: Sequence[str] | None = None) -> int:
    kinds = ("node", "planner", "worker", "store restart", "store restarts", "node vanishes")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=kinds, default=kinds[:4])
    parser.add_argument("--store", choices=("etcd", "c10d"), default="etcd")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=30.0)
    parser.add_argument("--torchrun", type=int, default=0, help="repetitions of torchrun beside it, up to 120 s each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with ended():
        here = [kind for kind in args.faults if kind != "node vanishes"]
        if args.store == "c10d":
            here = [kind for kind in here if kind in ("node", "planner", "worker")]
        outcomes = faults(here, args.store, args.repetitions, args.deadline, random.Random(args.seed))
        if "node vanishes" in args.faults:
            outcomes.append(vanishing(args.repetitions, args.deadline))
        if args.torchrun:
            outcomes.append(torchrun(args.torchrun, 120.0))
    print(f"Measured on {report.machine_line(report.machine())}.\n\n{table(outcomes)}")
    return 0 if all(len(o.seconds) == o.tried for o in outcomes if o.name.startswith("elasticd")) else 1


if __name__ == "__main__":
    sys.exit(main())
