"""Agents under random faults, with jobs that come and go: the last part but one of `make soak`.

    python -m benchmarks.daemon_soak [--faults 300] [--nodes 4] [--seed N] [--keep DIRECTORY]

Exit code 1 if a guarantee was broken or something is stuck. A seed gives the same faults again; when and where they
happen depends on the machine. As root, one node's disk is filled, too, and there is an adversary: jobs of two users,
some of which attack, and poisoned records (daemon_adversary.py).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import daemon_adversary, daemon_checker
from benchmarks.daemon_adversary import Adversary
from benchmarks.daemon_faults import FleetFaults, FleetStuck
from benchmarks.daemon_fleet import STEPS, Fleet, SubmittedJob, small_disk
from elasticd.errors import StoreUnavailable
from tests.etcd import etcd_servers

CALM = 25
"""Faults until everything must recover, and every submitted job must end."""
CALM_S = 150.0
"""Until all jobs have ended once nothing strikes any more; what takes longer is stuck. The machine may be busy."""
_POISONED = 0.3
"""How many of the faults have a poisoned record beside them."""

Say = Callable[[str], None]


@dataclass(slots=True)
class FleetSoak:
    fleet: Fleet
    faults: FleetFaults
    say: Say
    between_s: tuple[float, float] = (0.1, 2.5)
    unended: int = 4
    long_steps: int = 0
    """There is always one job of so many."""
    at_calm: Callable[[], None] = lambda: None
    stop: threading.Event = field(default_factory=threading.Event)
    count: int = 0
    struck: Counter[str] = field(default_factory=Counter)

    def run(self, faults: float, limit_s: float) -> None:
        """So many, or as many as there is time for. Raises Stuck."""
        until = time.monotonic() + limit_s
        while self.count < faults and time.monotonic() < until and not self.stop.is_set():
            self.strike()
            if self.count % CALM == 0:
                self.calm()
        self.calm(last=True)

    def strike(self, *names: str) -> None:
        """One fault, of these if any are named, that is possible now; jobs are submitted meanwhile."""
        unfinished = self.fleet.unfinished()
        if self.long_steps and not any(one.long for one in unfinished):
            self.fleet.submit(self.long_steps)
        for _ in range(self.unended - sum(not one.long for one in unfinished)):
            self.fleet.submit()
        kinds = self.faults.kinds()
        until = time.monotonic() + CALM_S
        while (detail := kinds[name := self.faults.rng.choice(names or tuple(kinds))]()) is None:
            self.faults.wait(0.05)
            if time.monotonic() > until:
                raise FleetStuck(f"no target for {name}")
        self.count += 1
        self.struck[name] += 1
        self.fleet.journal.write("faults", what=name, number=self.count, detail=detail)
        self.say(f"{self.count:>4} {name:<16} {detail}")
        if "poison" in kinds and self.faults.rng.random() < _POISONED and (also := kinds["poison"]()) is not None:
            self.struck["poison"] += 1
            self.fleet.journal.write("faults", what="poison", number=self.count, detail=also)
            self.say(f"     also poison      {also}")
        self.faults.wait(self.faults.rng.uniform(*self.between_s))

    def calm(self, *, last: bool = False) -> None:
        """Everything is mended, and every job comes to its end; a long one trains, and is cancelled at last. Raises
        Stuck.
        """
        deadline = time.monotonic() + CALM_S
        while self.faults.last:
            self.faults.wait(0.1)
            for name in sorted(self.faults.cordoned):
                self.faults.uncordon(name)
            if time.monotonic() > deadline:
                raise FleetStuck(
                    f"faults do not end: {self.faults.pending()}; cordoned: {sorted(self.faults.cordoned)}"
                )
        began = time.monotonic()
        trained = {one.seq: self.fleet.recorded(one) for one in self.fleet.unfinished() if one.long}
        while left := [
            one
            for one in self.fleet.unfinished()
            if last or not one.long or self.fleet.recorded(one) == trained.get(one.seq)
        ]:
            for one in left:
                if last and one.long and one.number and not one.cancelled:
                    self.fleet.cancel(one)
            self.faults.wait(0.2)
            for name in self.fleet.nodes:
                if not self.fleet.running(name):
                    raise FleetStuck(f"the agent of {name} has ended by itself:\n{self.fleet.nodes[name].log[-3000:]}")
            if time.monotonic() > began + CALM_S:
                raise FleetStuck("; ".join(self._told(one) for one in left))
            self._settle(left)
        while remains := self.fleet.left_of_ended():
            self.faults.wait(0.5)
            if time.monotonic() > began + CALM_S:
                raise FleetStuck(f"left of jobs that have ended: {', '.join(remains)}")
        self.fleet.histories()
        self.say(f"     calm: all jobs have ended after {time.monotonic() - began:.1f} s")
        self.at_calm()

    def _settle(self, left: list[SubmittedJob]) -> None:
        """A job whose submission was uncertain: the store has the answer now."""
        for one in left:
            if not one.number:
                store = self.fleet.store()
                try:
                    self.fleet.look(store)
                    one.refused = not one.number
                except StoreUnavailable:
                    continue  # the next look decides
                finally:
                    store.close()

    def _told(self, one: SubmittedJob) -> str:
        _, answer = self.fleet.request("GET", f"/v1/jobs/{one.job}")
        return (
            f"job {one.job} ({one.seq}, number {one.number}) has not ended {CALM_S:g} s after the last fault: {answer}"
        )


def soak(
    work: Path,
    faults: int | Sequence[str],
    nodes: int,
    seed: int,
    limit_s: float,
    say: Say,
    steps: tuple[int, int] = STEPS,
    lasts_s: tuple[float, float] = (1.0, 8.0),
    hostile: bool = False,
) -> list[str]:
    """Run it; returns every breach. Stops striking after `limit_s`, whatever is left.

    `faults`: how many, or which. `steps`: of a job, least and most; `lasts_s`: what is away or stopped, so likewise.
    `hostile`: with an adversary; after named faults workers are killed until it has tried each attack.
    """
    stuck: list[str] = []
    with etcd_servers() as etcd:
        adversary = Adversary(work, etcd, random.Random(seed)) if hostile else None
        disk = small_disk(work, f"n{nodes}")
        fleet = Fleet(work, etcd, nodes, seed, steps, disk=disk, adversary=adversary)
        run = FleetSoak(fleet, FleetFaults(fleet, random.Random(seed), lasts_s), say)
        try:
            fleet.start()
            if isinstance(faults, int):
                say(f"seed {seed}: {faults} faults of agents on {nodes} nodes")
                run.run(faults, limit_s)
            else:
                for name in faults:
                    run.strike(name)
                until = time.monotonic() + limit_s
                while hostile and time.monotonic() < until and daemon_checker.untried(daemon_checker.read(work)):
                    run.strike("kill worker")
                run.calm()
            fleet.leave()
        except (FleetStuck, AssertionError) as error:
            stuck = [f"stuck after fault {run.count}: {str(error)[:6000]}"]
        finally:
            fleet.close()
            if adversary is not None:
                adversary.close()
    say(", ".join(f"{count} × {what}" for what, count in sorted(run.struck.items())))
    return stuck + daemon_checker.breaches(daemon_checker.read(work))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="(default %(default)s)")
    parser.add_argument("--nodes", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="an empty directory for everything that is written; kept")
    parser.add_argument("--no-adversary", action="store_true", help="no hostile jobs, no poisoned records")
    args = parser.parse_args(argv)
    why = "--no-adversary" if args.no_adversary else daemon_adversary.missing()
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="elasticd-soak-") as scratch:
        work = args.keep or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        if why:
            say(f"no adversary: {why}")
        found = soak(work, args.faults, args.nodes, args.seed, args.limit, say, hostile=not why)
    print("\n".join(f"BREACH {each}" for each in found) or "every promise was kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
