"""Random faults of agents, runners, nodes and the store, while jobs come and go: the daemons' soak.

Faults overlap: one that lasts (a pause, an outage, a node that is away) is ended by and by, while others strike. Every
`CALM` faults everything is mended, and then every job that was handed in must come to its end. Each fault is written
down with its time; what was promised is judged afterwards by daemon_checker.py. It never judges by itself.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.daemon_fleet import ADOPT_S, Asked, Fleet, helpers
from elasticd_agent.store.etcd import EtcdStore
from tests.daemon.node import Node
from tests.faults.job import comm_of

CALM = 25
CALM_S = 150.0
"""Until all jobs have ended once nothing strikes any more; what takes longer is stuck. The machine may be busy."""
UNENDED = 4
_BETWEEN_S = (0.1, 2.5)

Say = Callable[[str], None]


class Stuck(Exception):
    """What had to come did not come in time."""


@dataclass(slots=True)
class Soak:
    fleet: Fleet
    rng: random.Random
    say: Say
    lasts_s: tuple[float, float]
    count: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _hurt: set[str] = field(default_factory=set)
    _store_hurt: bool = False
    _cordoned: set[str] = field(default_factory=set)

    def run(self, faults: int, limit_s: float) -> None:
        """So many, or as many as there is time for. Raises Stuck."""
        until = time.monotonic() + limit_s
        while self.count < faults and time.monotonic() < until:
            self.strike()
            if self.count % CALM == 0:
                self.calm()
        self.calm()

    def strike(self, *names: str) -> None:
        """One fault, of these if any are named, that is possible now; jobs are handed in beside it."""
        while len(self.fleet.unended()) < UNENDED:
            self.fleet.submit()
        kinds = self._kinds()
        until = time.monotonic() + CALM_S
        while (detail := kinds[name := self.rng.choice(names or tuple(kinds))]()) is None:
            self._wait(0.05)
            if time.monotonic() > until:
                raise Stuck(f"nobody is there for {name}")
        self.count += 1
        self.struck[name] += 1
        self.fleet.journal.write("faults", what=name, number=self.count, detail=detail)
        self.say(f"{self.count:>4} {name:<16} {detail}")
        self._wait(self.rng.uniform(*_BETWEEN_S))

    def _kinds(self) -> dict[str, Callable[[], str | None]]:
        kinds: dict[str, Callable[[], str | None]] = {
            "kill agent": self._kill_agent,
            "kill agent long": lambda: self._kill_agent(ADOPT_S + 6.0),
            "kill runner": self._kill_runner,
            "kill both": self._kill_both,
            "kill worker": self._kill_worker,
            "kill helper": self._kill_helper,
            "kill node": self._kill_node,
            "pause agent": self._pause_agent,
            "pause runner": self._pause_runner,
            "upgrade": self._upgrade,
            "stop agent": self._stop_agent,
            "store restart": lambda: self._store(0.0),
            "store away": lambda: self._store(self._some_time()),
            "store pause": self._pause_store,
            "submit without store": self._submit_without_store,
            "drain": lambda: self._cordon("drain"),
            "cordon": lambda: self._cordon("cordon"),
            "cancel": self._cancel,
            "submit twice": self._submit_twice,
            "damaged file": self._damage,
        }
        if self.fleet.disk is not None:
            kinds["full disk"] = self._fill
        return kinds

    # --- time -----------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), do))

    def _wait(self, seconds: float) -> None:
        """So long, while what is due gets done."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            time.sleep(min(left, 0.05))

    def _some_time(self) -> float:
        return self.rng.uniform(*self.lasts_s)

    def calm(self) -> None:
        """Everything is mended, and every job comes to its end. Raises Stuck."""
        deadline = time.monotonic() + CALM_S
        while self._later or self._cordoned:
            self._wait(0.1)
            for name in sorted(self._cordoned):
                self._uncordon(name)
            if time.monotonic() > deadline:
                raise Stuck(f"faults do not end: {len(self._later)} are left, {sorted(self._cordoned)} is cordoned")
        began = time.monotonic()
        while left := self.fleet.unended():
            self._wait(0.2)
            for name in self.fleet.nodes:
                if not self.fleet.running(name):
                    raise Stuck(f"the agent of {name} has ended by itself:\n{self.fleet.nodes[name].log[-3000:]}")
            if time.monotonic() > began + CALM_S:
                raise Stuck("; ".join(self._told(one) for one in left))
            self._settle(left)
        self.fleet.histories()
        self.say(f"     calm: all jobs have ended after {time.monotonic() - began:.1f} s")

    def _settle(self, left: list[Asked]) -> None:
        """A job of which nobody knew whether it was handed in: the store knows now."""
        for one in left:
            if not one.number:
                store = EtcdStore(self.fleet.etcd.endpoints)
                try:
                    self.fleet.look(store)
                finally:
                    store.close()
                one.refused = not one.number

    def _told(self, one: Asked) -> str:
        _, answer = self.fleet.ask("GET", f"/v1/jobs/{one.job}")
        return (
            f"job {one.job} ({one.seq}, number {one.number}) has not ended {CALM_S:g} s after the last fault: {answer}"
        )

    # --- whom -----------------------------------------------------------------------------------------------------

    def _well(self) -> Node | None:
        """A node that nothing is done to at the moment."""
        names = [name for name in self.fleet.nodes if name not in self._hurt and self.fleet.running(name)]
        return self.fleet.nodes[self.rng.choice(names)] if names else None

    def _runner(self) -> tuple[Node, str, int] | None:
        """A runner on such a node: (node, JOB.NUMBER, pid)."""
        if (node := self._well()) is None:
            return None
        found = [(f"{job}.{number}", pid) for (job, number), pid in self.fleet.runners(node.name).items() if pid]
        return (node, *self.rng.choice(found)) if found else None

    def _back(self, name: str, seconds: float) -> None:
        """The agent is started again, after a while."""

        node = self.fleet.nodes[name]
        started = len(node.events("agent_started"))

        def start() -> None:
            self.fleet.start_agent(name)
            self._after(0.1, heard)

        def heard() -> None:
            """It hears signals from then on."""
            if len(node.events("agent_started")) > started or not self.fleet.running(name):
                self._hurt.discard(name)
            else:
                self._after(0.1, heard)

        self._hurt.add(name)
        self._after(seconds, start)

    # --- faults: each returns what it did it to, None if there was nobody ------------------------------------------

    def _kill_agent(self, away: float | None = None) -> str | None:
        if (node := self._well()) is None:
            return None
        node.kill()
        seconds = self.rng.choice((0.0, self._some_time())) if away is None else away
        self._back(node.name, seconds)
        return f"{node.name} for {seconds:.1f} s"

    def _kill_runner(self) -> str | None:
        if (found := self._runner()) is None:
            return None
        node, job, pid = found
        self._signal(pid, signal.SIGKILL, node.name)
        return f"{job} on {node.name}"

    def _kill_both(self) -> str | None:
        if (found := self._runner()) is None:
            return None
        node, job, pid = found
        node.kill()
        self._signal(pid, signal.SIGKILL, node.name)
        seconds = self.rng.choice((0.0, self._some_time()))
        self._back(node.name, seconds)
        return f"{job} on {node.name}, back after {seconds:.1f} s"

    def _kill_worker(self) -> str | None:
        if (found := self._runner()) is None:
            return None
        node, job, _ = found
        name, _, number = job.rpartition(".")
        groups = node.job_events(name, "group_started", int(number))
        if not groups:
            return None
        pid = self.rng.choice(groups[-1]["pids"])
        self._signal(pid, signal.SIGKILL, node.name)
        return f"of {job} on {node.name} (pid {pid})"

    def _kill_helper(self) -> str | None:
        """The owner, the template, the round's store, or what is parked."""
        if (node := self._well()) is None:
            return None
        found = sorted(helpers(node.processes()))
        if not found:
            return None
        pid, comm = self.rng.choice(found)
        self._signal(pid, signal.SIGKILL, node.name)
        return f"{comm} on {node.name}"

    def _kill_node(self) -> str | None:
        if (node := self._well()) is None:
            return None
        node.kill()
        deadline = time.monotonic() + 5
        while (left := node.processes()) and time.monotonic() < deadline:
            for pid in left:
                self._signal(pid, signal.SIGKILL, node.name)
            time.sleep(0.01)
        away = (0.0, self._some_time(), ADOPT_S + self._some_time())
        seconds = self.rng.choice(away)
        self._back(node.name, seconds)
        return f"{node.name} for {seconds:.1f} s"

    def _pause_agent(self) -> str | None:
        if (node := self._well()) is None:
            return None
        seconds = self._some_time()
        node.signal(signal.SIGSTOP)
        self._hurt.add(node.name)

        def go_on() -> None:
            node.signal(signal.SIGCONT)
            self._hurt.discard(node.name)

        self._after(seconds, go_on)
        return f"{node.name} for {seconds:.1f} s"

    def _pause_runner(self) -> str | None:
        if (found := self._runner()) is None:
            return None
        node, job, pid = found
        seconds = self._some_time()
        self._signal(pid, signal.SIGSTOP, node.name)
        self._after(seconds, lambda: self._signal(pid, signal.SIGCONT, node.name))
        return f"{job} on {node.name} for {seconds:.1f} s"

    def _upgrade(self) -> str | None:
        if (node := self._well()) is None:
            return None
        node.signal(signal.SIGUSR2)
        return node.name

    def _stop_agent(self) -> str | None:
        if (node := self._well()) is None:
            return None
        name, by = node.name, time.monotonic() + CALM_S
        node.signal(signal.SIGTERM)
        self._hurt.add(name)

        def look() -> None:
            if not self.fleet.running(name):
                assert node.process is not None
                self.fleet.journal.write("left", node=name, code=node.process.returncode)
                self._back(name, self.rng.choice((0.0, self._some_time())))
            elif time.monotonic() > by:
                raise Stuck(f"the agent of {name} does not leave within {CALM_S:g} s:\n{node.log[-3000:]}")
            else:
                self._after(0.1, look)

        self._after(0.1, look)
        return name

    def _store(self, seconds: float) -> str | None:
        if self._store_hurt:
            return None
        self._store_hurt = True
        self.fleet.etcd.kill()

        def back() -> None:
            self.fleet.etcd.restart()
            self._store_hurt = False

        self._after(seconds, back)
        return f"for {seconds:.1f} s"

    def _pause_store(self) -> str | None:
        if self._store_hurt:
            return None
        self._store_hurt = True
        seconds = self._some_time()
        self.fleet.etcd.stop()

        def go_on() -> None:
            self.fleet.etcd.cont()
            self._store_hurt = False

        self._after(seconds, go_on)
        return f"for {seconds:.1f} s"

    def _submit_without_store(self) -> str | None:
        if self._store(self._some_time()) is None:
            return None
        one = self.fleet.submit()
        return f"{one.job}: {'refused' if one.refused else one.number or 'nobody knows'}"

    def _cordon(self, how: str) -> str | None:
        if (node := self._well()) is None or len(self._cordoned) > 1:
            return None
        code, _ = self.fleet.ask("POST", f"/v1/nodes/{node.name}/{how}")
        self._cordoned.add(node.name)  # the answer may have been lost
        name = node.name
        self._after(self._some_time(), lambda: self._uncordon(name))
        return f"{name} {code}"

    def _uncordon(self, name: str) -> None:
        if name in self._cordoned and self.fleet.ask("POST", f"/v1/nodes/{name}/uncordon")[0] in (200, 409, 404):
            self._cordoned.discard(name)

    def _cancel(self) -> str | None:
        known = [one for one in self.fleet.unended() if one.number]
        if not known:
            return None
        one = self.rng.choice(known)
        code, answer = self.fleet.cancel(one)
        return f"{one.job}.{one.number}: {code} {answer.get('outcome', '')}"

    def _submit_twice(self) -> str | None:
        known = [one for one in self.fleet.unended() if one.number]
        if not known:
            return None
        one = self.rng.choice(known)
        code = self.fleet.again(one)
        return f"{one.job}: {code}"

    def _damage(self) -> str | None:
        """The agent is killed, a record of its own is cut short, and it comes back."""
        if (node := self._well()) is None:
            return None
        files = [node.state / "node.json"]
        for kind in ("order.json", "exit.json", "lock"):
            files += node.state.glob(f"jobs/*/{kind}")
        newest = sorted((path for path in files if path.exists()), key=lambda path: path.stat().st_mtime)[-6:]
        path = self.rng.choice(newest)
        node.kill()
        keep = self.rng.randrange(0, path.stat().st_size + 1)
        with contextlib.suppress(OSError):
            os.truncate(path, keep)
        self._back(node.name, self.rng.choice((0.0, self._some_time())))
        return f"{path.relative_to(node.state)} on {node.name} to {keep} bytes"

    def _fill(self) -> str | None:
        disk = self.fleet.disk
        assert disk is not None
        filler = disk / "filler"
        if filler.exists():
            return None
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b" " * 65536):
                pass
        seconds = self._some_time()
        self._after(seconds, lambda: filler.unlink(missing_ok=True))
        return f"{disk.parent.name} for {seconds:.1f} s"

    def _signal(self, pid: int, signum: int, node: str) -> None:
        self.fleet.journal.write("signals", pid=pid, signal=int(signum), node=node, comm=comm_of(pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
