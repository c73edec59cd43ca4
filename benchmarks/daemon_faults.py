"""What daemon_soak.py does to agents, their runners, their nodes and their store.

Faults overlap: one that lasts (a pause, an outage, a node that is away) is ended later, while others happen. Each
signal is recorded with its time; daemon_checker.py judges the logs afterwards.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.daemon_fleet import ADOPT_S, Fleet, helpers
from tests.daemon.node import AgentNode
from tests.faults.job import comm_of
from tests.multihost.net import Host

LEAVES_S = 120.0


class FleetStuck(Exception):
    """What had to come did not come in time."""


@dataclass(slots=True)
class FleetFaults:
    """`kinds` are the faults; each returns its target, None if there is none at the moment. `wait` ends
    those that last.
    """

    fleet: Fleet
    rng: random.Random
    lasts_s: tuple[float, float]
    spared: str = ""
    cordoned: set[str] = field(default_factory=set)
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _hurt: set[str] = field(default_factory=set)
    _store_hurt: bool = False

    @property
    def last(self) -> bool:
        """True while one is on."""
        return bool(self._later or self.cordoned)

    def pending(self) -> str:
        return ", ".join(do.__qualname__ for _, _, do in self._later)

    def kinds(self) -> dict[str, Callable[[], str | None]]:
        kinds: dict[str, Callable[[], str | None]] = {
            "kill agent": self._kill_agent,
            "kill agent long": lambda: self._kill_agent(ADOPT_S + 6.0),
            "kill runner": self._kill_runner,
            "kill both": self._kill_both,
            "kill worker": self._kill_worker,
            "kill helper": self._kill_helper,
            "kill node": self._kill_node,
            "pause worker": self._pause_worker,
            "pause agent": self._pause_agent,
            "freeze node": self._freeze_node,
            "kill agent twice": self._kill_agent_twice,
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
        if self.fleet.hosts:
            kinds |= {
                "link down": self._link_down,
                "cut peers": self._cut_peers,
                "cut from store": self._cut_from_store,
            }
        if self.fleet.disk is not None:
            kinds["full disk"] = self._fill
        if self.fleet.adversary is not None:
            kinds["poison"] = self._poison
        return kinds

    # --- time -----------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), do))

    def wait(self, seconds: float) -> None:
        """So long, while what is due gets done."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            time.sleep(min(left, 0.05))

    def _some_time(self) -> float:
        return self.rng.uniform(*self.lasts_s)

    # --- whom -----------------------------------------------------------------------------------------------------

    def _well(self, *, ends: bool = True) -> AgentNode | None:
        """A node that nothing is done to at the moment. `ends`: what is done may end processes, which one node's are
        spared.
        """
        others = self._hurt | {self.spared} if ends else self._hurt
        names = [name for name in self.fleet.nodes if name not in others and self.fleet.running(name)]
        return self.fleet.nodes[self.rng.choice(names)] if names else None

    def _runner(self) -> tuple[AgentNode, str, int] | None:
        """A runner on such a node: (node, JOB.NUMBER, pid)."""
        if (node := self._well()) is None:
            return None
        # While an agent starts a runner it has the lock itself.
        runners = {run: pid for run, pid in self.fleet.runners(node.name).items() if pid not in (0, node.pid)}
        found = [(f"{job}.{number}", pid) for (job, number), pid in runners.items()]
        return (node, *self.rng.choice(found)) if found else None

    def _back(self, name: str, seconds: float) -> None:
        """The agent is started again, after a while."""

        node = self.fleet.nodes[name]
        word = f"the agent of node {name} starts"  # in its output: a full disk takes no event
        started = node.log.count(word)

        def start() -> None:
            self.fleet.start_agent(name)
            self._after(0.1, check)

        def check() -> None:
            """It handles signals from then on. An agent that has ended is started again, as by systemd."""
            if not self.fleet.running(name):
                self._after(1.0, start)
            elif node.log.count(word) > started:
                self._hurt.discard(name)
            else:
                self._after(0.1, check)

        self._hurt.add(name)
        self._after(seconds, start)

    # --- faults ------------------------------------------

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
        if (found := self._worker()) is None:
            return None
        node, job, pid = found
        self._signal(pid, signal.SIGKILL, node.name)
        return f"of {job} on {node.name} (pid {pid})"

    def _pause_worker(self) -> str | None:
        """Long enough for a verdict, sometimes, which kills it."""
        if (found := self._worker()) is None:
            return None
        node, job, pid = found
        seconds = self._some_time()
        self._signal(pid, signal.SIGSTOP, node.name)
        self._after(seconds, lambda: self._signal(pid, signal.SIGCONT, node.name))
        return f"of {job} on {node.name} (pid {pid}) for {seconds:.1f} s"

    def _worker(self) -> tuple[AgentNode, str, int] | None:
        if (found := self._runner()) is None:
            return None
        node, job, _ = found
        name, _, number = job.rpartition(".")
        own = node.processes()  # a hostile job may have written other pids
        groups = node.job_events(name, "group_started", int(number))
        pids = [pid for group in groups[-1:] for pid in group.get("pids", ()) if pid in own]
        return (node, job, self.rng.choice(pids)) if pids else None

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
        if (node := self._well(ends=False)) is None:
            return None
        seconds = self._some_time()
        node.signal(signal.SIGSTOP)
        self._hurt.add(node.name)

        def go_on() -> None:
            node.signal(signal.SIGCONT)
            self._hurt.discard(node.name)

        self._after(seconds, go_on)
        return f"{node.name} for {seconds:.1f} s"

    def _freeze_node(self) -> str | None:
        if (node := self._well()) is None:
            return None
        seconds, pids = self._some_time(), node.processes()
        for pid in pids:
            self._signal(pid, signal.SIGSTOP, node.name)
        self._hurt.add(node.name)

        def thaw() -> None:
            for pid in pids:
                self._signal(pid, signal.SIGCONT, node.name)
            self._hurt.discard(node.name)

        self._after(seconds, thaw)
        return f"{node.name} for {seconds:.1f} s"

    def _kill_agent_twice(self) -> str | None:
        """The second time while it starts."""
        if (node := self._well()) is None:
            return None
        node.kill()
        self.fleet.start_agent(node.name)
        self._hurt.add(node.name)

        def again() -> None:
            node.kill()
            self._back(node.name, 0.0)

        self._after(seconds := self.rng.uniform(0.1, 1.5), again)
        return f"{node.name}, again after {seconds:.1f} s"

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
        name, by = node.name, time.monotonic() + LEAVES_S
        node.signal(signal.SIGTERM)
        self._hurt.add(name)

        def look() -> None:
            if not self.fleet.running(name):
                assert node.process is not None
                self.fleet.journal.write("left", node=name, code=node.process.returncode)
                self._back(name, self.rng.choice((0.0, self._some_time())))
            elif time.monotonic() > by:
                raise FleetStuck(f"the agent of {name} does not leave within {LEAVES_S:g} s:\n{node.log[-3000:]}")
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

    def _link_down(self) -> str | None:
        if (node := self._well()) is None:
            return None
        host = self._host(node.name)
        host.link(up=False)
        return self._cut_off([node.name], lambda: host.link(up=True))

    def _cut_peers(self) -> str | None:
        a = self._well()
        b = self._well()
        if a is None or b is None or a is b:
            return None
        return self._cut(self._host(a.name), self._host(b.name), [a.name, b.name])

    def _cut_from_store(self) -> str | None:
        if (node := self._well()) is None:
            return None
        return self._cut(self._host(node.name), self.fleet.hosts[-1], [node.name])

    def _cut(self, a: Host, b: Host, names: list[str]) -> str:
        """Both ways, or what `a` sends, or what `b` sends."""
        ways = self.rng.choice(((a, b), (a,), (b,)))
        for host in ways:
            host.cut(b if host is a else a)

        def heal() -> None:
            a.heal(b)
            b.heal(a)

        return self._cut_off(names, heal) + f", {len(ways)} ways"

    def _cut_off(self, names: list[str], heal: Callable[[], None]) -> str:
        seconds = self._some_time()
        self._hurt.update(names)

        def over() -> None:
            heal()
            self._hurt.difference_update(names)

        self._after(seconds, over)
        return f"{' '.join(names)} for {seconds:.1f} s"

    def _host(self, name: str) -> Host:
        return self.fleet.hosts[list(self.fleet.nodes).index(name)]

    def _submit_without_store(self) -> str | None:
        if self._store(self._some_time()) is None:
            return None
        one = self.fleet.submit()
        return f"{one.job}: {'refused' if one.refused else one.number or 'unknown'}"

    def _cordon(self, how: str) -> str | None:
        if (node := self._well(ends=how == "drain")) is None or len(self.cordoned) > 1:
            return None
        code, _ = self.fleet.request("POST", f"/v1/nodes/{node.name}/{how}")
        self.cordoned.add(node.name)  # the answer may have been lost
        name = node.name
        self._after(self._some_time(), lambda: self.uncordon(name))
        return f"{name} {code}"

    def uncordon(self, name: str) -> None:
        if name in self.cordoned and self.fleet.request("POST", f"/v1/nodes/{name}/uncordon")[0] in (200, 409, 404):
            self.cordoned.discard(name)

    def _cancel(self) -> str | None:
        known = [one for one in self.fleet.unfinished() if one.number and not one.long]
        if not known:
            return None
        one = self.rng.choice(known)
        code, answer = self.fleet.cancel(one)
        return f"{one.job}.{one.number}: {code} {answer.get('outcome', '')}"

    def _submit_twice(self) -> str | None:
        known = [one for one in self.fleet.unfinished() if one.number]
        if not known:
            return None
        one = self.rng.choice(known)
        code = self.fleet.resubmit(one)
        return f"{one.job}: {code}"

    def _damage(self) -> str | None:
        """The agent is killed, a record of its own is cut short, and it comes back."""
        if (node := self._well()) is None:
            return None
        files = [node.state / "node.json"]
        for kind in ("runners/*/runner-spec.json", "jobs/*/exit.json", "runners/*/lock"):
            files += node.state.glob(kind)
        files = [path for path in files if path.is_file() and not path.is_symlink()]  # a hostile job makes others
        newest = sorted(files, key=lambda path: path.stat().st_mtime)[-6:]
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

    def _poison(self) -> str | None:
        adversary = self.fleet.adversary
        assert adversary is not None
        if self._store_hurt or (poison := adversary.poison()) is None:
            return None
        seconds = self._some_time()

        def cure() -> None:
            if self._store_hurt or not adversary.cure(poison):
                self._after(1.0, cure)

        self._after(seconds, cure)
        what = "for" if poison.before is None else "in place of its own for"
        return f"{poison.key[:80]!r} is {poison.value[:60]!r} {what} {seconds:.1f} s"

    def _signal(self, pid: int, signum: int, node: str) -> None:
        self.fleet.journal.write("signals", pid=pid, signal=int(signum), node=node, comm=comm_of(pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
