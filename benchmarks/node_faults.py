"""Random faults of nodes, network and store, one after the other, in one job that has to end.

Hosts are network namespaces (tests/multihost/net.py), the store is a real etcd, the script resumes from checkpoints and
records every sample. After each fault the job must train again before the next one; during a fault with an end (thaw,
link up, heal) a worker is sometimes killed, too. checker.py judges the logs afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import checker
from tests.multihost.cluster import LINEAGE, Cluster
from tests.multihost.net import Host, Network

SAMPLES = 3000
RECOVERY_S = 90.0
"""Until a job trains again that was hurt: generous, since the machine may be busy. What takes longer is stuck."""
END_S = 120.0

_QUIET_S = 1.0  # observation after a store fault: a wrongly lost node is reported by then
_HELD_S = (0.2, 5.0)  # a freeze, cut or outage lasts so long: shorter and longer than the lease of 3 s
_TRAINS_S = (0.2, 2.0)  # between the end of one fault and the next
_NOT_ALONE = 0.25
_SETTLED_S = 4.5  # a lease, a renewal and the planner's delays: everything about earlier faults has been reported
_ENDS_A_ROUND = ("kill rank", "kill node", "replace agent")

Say = Callable[[str], None]


class JobStuck(Exception):
    """The job did not train again in time."""


@dataclass(slots=True)
class NodeSoak:
    """One job under faults."""

    cluster: Cluster
    rng: random.Random
    say: Say
    count: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    _read: int = 0
    _lines: int = 0
    _seen: dict[int, int] = field(default_factory=dict)
    _also: str = ""

    @property
    def hosts(self) -> list[Host]:
        return self.cluster.net.hosts

    def strike(self) -> None:
        """One fault, its end, and training again on all nodes."""
        what, act = self.rng.choice(self._kinds())
        store_only = what in checker.STORE_FAULTS
        if store_only:
            self._settle()
        self.count += 1
        self.struck[what] += 1
        start, before = time.monotonic(), self.cluster.last_round()
        self._also = ""
        detail = act() + self._also
        if self._also:
            what, store_only = f"{what} +", False
        if store_only:
            self.until(self._stepping(), f"steps after {what}")
            time.sleep(_QUIET_S)
        self._journal(what=what, number=self.count, detail=detail, **{"from": start, "to": time.monotonic()})
        self.everybody_trains(what, before + (what in _ENDS_A_ROUND))
        took = time.monotonic() - start
        self.say(f"{self.count:>4} {what:<15} {detail:<28} round {self.cluster.last_round():>4}  {took:5.1f} s")
        time.sleep(self.rng.uniform(*_TRAINS_S))

    def _settle(self) -> None:
        """Wait until nothing is left to be done about earlier faults: what comes then is the store fault's doing."""

        def settled() -> bool:
            last = max(float(event["mono"]) for event in self.cluster.events("round_published"))
            return time.monotonic() > max(last, struck) + _SETTLED_S

        struck = time.monotonic()
        self.until(settled, "quiet before a store fault")
        self.everybody_trains("a quiet while", 0)

    def _kinds(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("kill rank", self._kill_rank),
            ("kill node", self._kill_node),
            ("replace agent", self._replace_agent),
            ("freeze node", self._freeze_node),
            ("link down", self._link_down),
            ("cut peers", self._cut_peers),
            ("cut from store", self._cut_from_store),
            ("store restart", self._restart_store),
            ("store freeze", self._freeze_store),
        ]

    # --- faults: each returns what it did it to --------------------------------------------------------------------

    def _kill_rank(self) -> str:
        number = self.cluster.last_round()
        rank = self.rng.randrange(self.cluster.round(number)["world_size"])
        self.cluster.kill_rank(rank, number)
        return f"rank {rank}"

    def _meanwhile(self, seconds: float) -> None:
        """A fault is on for so long; sometimes it is not alone."""
        time.sleep(seconds / 2)
        groups = self.cluster.events("group_started", round=self.cluster.last_round())
        if groups and self.rng.random() < _NOT_ALONE:
            with contextlib.suppress(ProcessLookupError):  # the fault may have ended it
                os.kill(self.rng.choice(groups)["pids"][0], signal.SIGKILL)
                self._also = ", a worker killed"
        time.sleep(seconds / 2)

    def _kill_node(self) -> str:
        host = self.rng.choice(self.hosts)
        self.cluster.kill_node(host.name)
        time.sleep(self.rng.choice((0.0, self._some_time())))
        self.cluster.start(host)
        return host.name

    def _replace_agent(self) -> str:
        host = self.rng.choice(self.hosts)
        self.cluster.replace_agent(host.name)
        return host.name

    def _freeze_node(self) -> str:
        host, held_s = self.rng.choice(self.hosts), self._some_time()
        host.freeze()
        self._meanwhile(held_s)
        host.thaw()
        return f"{host.name} for {held_s:.1f} s"

    def _link_down(self) -> str:
        host, held_s = self.rng.choice(self.hosts), self._some_time()
        host.link(up=False)
        self._meanwhile(held_s)
        host.link(up=True)
        return f"{host.name} for {held_s:.1f} s"

    def _cut_peers(self) -> str:
        a, b = self.rng.sample(self.hosts, 2)
        held_s, one_way = self._some_time(), self.rng.random() < 0.5
        self.cluster.net.cut(a, b, one_way=one_way)
        self._meanwhile(held_s)
        self.cluster.net.heal(a, b)
        return f"{a.name} {'->' if one_way else '<->'} {b.name} for {held_s:.1f} s"

    def _cut_from_store(self) -> str:
        host, held_s = self.rng.choice(self.hosts), self._some_time()
        store, one_way = self.cluster.net["store"], self.rng.random() < 0.5
        self.cluster.net.cut(host, store, one_way=one_way)
        self._meanwhile(held_s)
        self.cluster.net.heal(host, store)
        return f"{host.name} {'->' if one_way else '<->'} for {held_s:.1f} s"

    def _restart_store(self) -> str:
        assert self.cluster.store is not None
        held_s = self.rng.choice((0.0, self._some_time()))
        self.cluster.store.kill()
        self._meanwhile(held_s)
        self.cluster.store.start()
        return f"after {held_s:.1f} s"

    def _freeze_store(self) -> str:
        assert self.cluster.store is not None
        held_s = self._some_time()
        self.cluster.store.host.freeze()
        self._meanwhile(held_s)
        self.cluster.store.host.thaw()
        return f"for {held_s:.1f} s"

    # --- following -------------------------------------------------------------------------------------------------

    def everybody_trains(self, after: str, least: int) -> None:
        """Every agent runs, and the last round, numbered `least` or higher, has all nodes in it and makes steps."""
        everybody = {host.name for host in self.hosts}
        steps: dict[int, int] = {}

        def in_it() -> bool:
            for host in self.hosts:
                agent = self.cluster.agent(host.name)
                if not agent.running:
                    raise JobStuck(f"an agent ended by itself: {agent.told()}")
            number = self.cluster.last_round()
            if number < max(least, 1) or set(self.cluster.round(number)["nodes"]) != everybody:
                return False
            return self._steps(number) > steps.setdefault(number, self._steps(number))

        self.until(in_it, f"training on all nodes after {after}")

    def _stepping(self) -> Callable[[], bool]:
        """Something true once training has gone on from now."""
        self._steps(0)
        before = self._lines
        return lambda: (self._steps(0), self._lines > before)[1]

    def _steps(self, number: int) -> int:
        """Steps written down in that round so far. What was read once is not read again: the record gets long."""
        path = self.cluster.work / "record"
        if path.exists():
            with path.open("rb") as record:
                record.seek(self._read)
                whole = record.read().rpartition(b"\n")[0]
            self._read += len(whole) + 1 if whole else 0
            for line in map(json.loads, whole.splitlines()):
                if "step" in line:
                    self._lines += 1
                    self._seen[line["round"]] = self._seen.get(line["round"], 0) + 1
        return self._seen.get(number, 0)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while not condition():
            if time.monotonic() > deadline:
                raise JobStuck(f"no {what} within {RECOVERY_S:g} s")
            time.sleep(0.1)

    def _some_time(self) -> float:
        """Often short, sometimes longer than a lease."""
        least, most = _HELD_S
        return least + (most - least) * self.rng.random() ** 2

    def _journal(self, **entry: object) -> None:
        with (self.cluster.work / "faults.jsonl").open("a") as journal:
            journal.write(json.dumps(entry) + "\n")


def soak(faults: int, hosts: int, seed: int, limit_s: float, keep: Path | None, say: Say) -> list[str]:
    """Run it; returns every breach, none if all is well. Stops striking after `limit_s`, whatever is left."""
    say(f"seed {seed}: {faults} faults on {hosts} nodes")
    with tempfile.TemporaryDirectory(prefix="elasticd-soak-") as scratch:
        work = keep or Path(scratch)
        with Network(hosts, others=("store",)) as net:
            # Nodes that keep failing are left out longer and longer, restarts are counted: here both are the point.
            flags = (
                *("--checkpoint-dir", str(work / "checkpoints"), "--max-restarts", "1000000"),
                *("--rdzv-conf", "node_cooloff=0"),
            )
            job = work / "job"
            args = ("--samples", str(SAMPLES), "--pause", "0.02")
            run = NodeSoak(Cluster(net, job, f"1:{hosts}", LINEAGE, args, flags=flags), random.Random(seed), say)
            found = _run(run, faults, limit_s)
        say(", ".join(f"{count} × {what}" for what, count in sorted(run.struck.items())))
        return found + checker.breaches(checker.read(job, SAMPLES))


def _run(run: NodeSoak, faults: int, limit_s: float) -> list[str]:
    until = time.monotonic() + limit_s
    run.cluster.start()
    try:
        run.everybody_trains("the start", 1)
        while run.count < faults and time.monotonic() < until:
            run.strike()
        run.cluster.finish(END_S)
    except (JobStuck, AssertionError) as error:
        return [f"stuck after fault {run.count}: {str(error)[:6000]}"]
    missed = faults - run.count
    return [f"only {run.count} of {faults} faults in {limit_s:g} s"] if missed else []


def describe(found: Sequence[str]) -> str:
    return "\n".join(f"BREACH {each}" for each in found) or "every promise was kept"
