"""What a fault costs ranks that stay in their processes, beside a restart of all of them; and many changes in a row.

    python -m benchmarks.in_place --workers 4 --least 2 --megabytes 300 --startup 3
    python -m benchmarks.in_place --changes 200 --workers 3 --least 2
    python -m benchmarks.in_place --workers 2 --least 2 --spares 1 [--nodes]

A random rank of a job gets a SIGKILL. Measured from outside, by the times that the ranks recorded, beyond the median
step: until the next new step, whichever the world size; and, once a replacement is ready, the longest time between two
steps until the job has all its workers again. A survivor finishes first what it computes at the kill, until its next
collective: so the time from the last survivor's way out of `train` to its next call is a row of its own.

The ways take turns: `in place` is a script with `session.run`, `restart` the same script without. With --late the
script makes its model in `train`. With --spares so many slots stand by, and each kill waits until they do again. With
--nodes each worker has an agent of its own, as on so many nodes, which a kill ends with its worker; another node then
joins in its place.

With --changes one job on so many nodes gets so many changes in a row, each after a few steps at the full size: a rank
is killed, or a node is lost or drained, and another one joins. Then its records are checked: every step once on every
rank of its round, with the samples that belong to it; equal hashes on all ranks after each step, of buffers, too, at
each entry; and the hashes of a replay with the same world sizes, which plain torch trains. Descriptors, sockets,
threads and memory of one process, which never ends, are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.launchers import ELASTICD
from benchmarks.processes import adopt_orphans, descendants, end_all
from benchmarks.scrape import free_port
from elasticd import ElasticBatchSampler
from elasticd_agent.model.phrases import count

SCRIPT = Path(__file__).with_name("scripts") / "in_place_job.py"
REPLAY = "benchmarks.scripts.in_place_replay"
DEADLINE_S = 120.0
SAMPLES, BATCH, SEED = 4080, 12, 3
"""Of the script."""
STEPS_BEFORE = 15
"""Steps at the full size before a kill: the job is in its stride."""

Entries = Mapping[int, Sequence[tuple[int, int, str]]]
"""By round: step, world size and hash of each rank that has entered it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's record of one step."""

    step: int
    at: float  #: CLOCK_MONOTONIC
    rank: int
    world: int
    round: int
    digest: str
    samples: tuple[int, ...]
    pid: int


@dataclass(frozen=True, slots=True)
class Change:
    """One kill. Seconds, beyond the median step."""

    way: str
    gap_s: float  #: until the next new step
    between_s: float | None  #: from when all survivors had left `train` until they were in it again; no step in it
    grown_s: float | None  #: the same when the others joined them; they are sent the state
    pause_s: float  #: the longest one from then until the job had all its workers again
    full_s: float  #: until it had
    kept: int  #: survivors that still had their process then


class ChangedJob:
    """A running job; leaving it ends everything."""

    def __init__(self, way: str, args: argparse.Namespace, *more: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="in-place-", dir=args.scratch))
        self.workers = args.workers
        script = ["--directory", str(self.directory), "--way", way, "--megabytes", str(args.megabytes)]
        script += ["--startup", str(args.startup), "--step", str(args.step), *(["--late"] if args.late else []), *more]
        run = ["--checkpoint-dir", str(self.directory / "checkpoints"), "--spares", str(args.spares)]
        self._command = [*run, str(SCRIPT), *script]
        self._spares = args.spares if way == "in place" else 0
        self._agents: list[subprocess.Popen[bytes]] = []
        self._meet: list[str] = []
        size = f"{args.least}:{args.workers}"
        if not (args.nodes or args.changes):
            self._start([*ELASTICD.command, "--nproc-per-node", size])
            return
        port = free_port()
        self._start([sys.executable, "-m", "elasticd_agent", "store", "--port", str(port)])
        self._meet = [sys.executable, "-m", "elasticd_agent", "run", "--max-restarts", "1000", "--nnodes", size]
        self._meet += ["--rdzv-backend", "c10d", "--rdzv-id", "in-place", "--local-addr", "127.0.0.1"]
        self._meet += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "is_host=0"]
        for _ in range(args.workers + args.spares):
            self.start_node()

    def start_node(self) -> None:
        self._start([*self._meet, "--node-id", f"node-{len(self._agents)}"])

    def _start(self, command: Sequence[str]) -> None:
        command = command if "store" in command else [*command, *self._command]
        with (self.directory / "output.log").open("ab") as output:
            started = subprocess.Popen(command, stdout=output, stderr=output, env=ELASTICD.full_environment())
        self._agents.append(started)

    def __enter__(self) -> ChangedJob:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            agent.kill()
            agent.wait()
        end_all()
        shutil.rmtree(self.directory, ignore_errors=True)

    def steps(self) -> list[Step]:
        """All records so far, in the order of time."""
        records = []
        for path in self.directory.glob("steps-*.log"):
            pid = int(path.stem.partition("-")[2])
            for line in path.read_text().splitlines():
                words = line.split()
                if len(words) == 7:
                    samples = () if words[6] == "-" else tuple(map(int, words[6].split(",")))
                    numbers = int(words[2]), int(words[3]), int(words[4])
                    records.append(Step(int(words[0]), float(words[1]), *numbers, words[5], samples, pid))
        return sorted(records, key=lambda step: step.at)

    def between_s(self, pids: set[int], at: float) -> list[float]:
        """Of each change after `at`: from when all of these that stay had left `train` until they were called anew."""
        changes: list[list[tuple[float, float]]] = []
        for pid in pids:
            lines = (self.directory / f"calls-{pid}.log").read_text().splitlines()
            calls = [float(when) for _, when in map(str.split, lines) if float(when) > at]
            for number, pair in enumerate(zip(calls[::2], calls[1::2], strict=False)):
                changes[number:] = changes[number:] or [[]]
                changes[number].append(pair)
        return [max(entered for _, entered in pairs) - max(left for left, _ in pairs) for pairs in changes]

    def wait_for_steps(self, count: int, after: float = 0.0, past: int = 0) -> list[Step]:
        """Wait for so many steps of the full size since `after`, in rounds past that one; returns all records."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            records = self.steps()
            full = {one.step for one in records if one.at > after and one.round > past and one.world == self.workers}
            if len(full) >= count:
                return records
            self._check(f"{len(full)} of {count} steps with {self.workers} workers came", deadline)

    def wait_for_spares(self, faults: int) -> None:
        """Wait until all spares stand by, after so many faults: each has made one of them a rank."""
        if self._meet and faults and self._spares:
            self.start_node()
        deadline = time.monotonic() + DEADLINE_S
        while self.output.count(" as a spare: 1 worker at session.run()") < (self._spares and self._spares + faults):
            self._check("the spares do not stand by", deadline)

    def _check(self, why: str, deadline: float) -> None:
        if all(agent.poll() is not None for agent in self._agents[-2:]) or time.monotonic() > deadline:
            raise SystemExit(f"{why}\n{self.output[-3000:]}")
        time.sleep(0.05)

    @property
    def output(self) -> str:
        return (self.directory / "output.log").read_text(errors="replace")

    def entries(self) -> Entries:
        found = defaultdict(list)
        for path in self.directory.glob("entries-*.log"):
            for step, _, world, round, state in map(str.split, path.read_text().splitlines()):
                found[int(round)].append((int(step), int(world), state))
        return dict(sorted(found.items()))

    def kill(self, rng: random.Random, spared: int = 0, how: str = "lose") -> float:
        """SIGKILL a random rank's process, but not the spared one, and its node; returns when. `how`: "kill", only the
        process; "drain", the node gets SIGTERM."""
        last = self.steps()[-1]
        pids = {step.pid for step in self.steps()[-4 * self.workers :] if step.round == last.round}
        victim = rng.choice(sorted(pids - {spared}))
        agent = next(agent for agent in self._agents if victim in descendants(agent.pid))
        if how == "drain":
            agent.terminate()
        elif self._meet and how == "lose":
            agent.kill()
        if how != "drain":
            os.kill(victim, signal.SIGKILL)
        at = time.monotonic()
        if self._meet and how != "kill":
            agent.wait(DEADLINE_S)
            if not self._spares:
                self.start_node()
        return at


def change(
    job: ChangedJob, way: str, rng: random.Random, spared: int = 0, number: int = 0, how: str = "lose"
) -> Change:
    job.wait_for_spares(number)
    before = job.wait_for_steps(STEPS_BEFORE, time.monotonic())
    pids, round = {step.pid for step in before[-3 * job.workers :]}, before[-1].round
    at = job.kill(rng, spared, how)
    records = job.wait_for_steps(3, at, round)
    return measured(records, at, round, pids, way, job.workers, job.between_s(pids, at))


def measured(
    records: Sequence[Step],
    at: float,
    before: int,
    pids: set[int],
    way: str,
    workers: int,
    between_s: Sequence[float] = (),
) -> Change:
    """The change after the kill at that time, in round `before`: survivors may still have finished a step in it."""
    highest = max(step.step for step in records if step.round <= before)
    new: dict[int, float] = {}
    for step in records:
        if step.round > before and step.step > highest:
            new.setdefault(step.step, step.at)
    times = sorted((at, step) for step, at in new.items())
    usual = sorted({step.step: step.at for step in records if step.at <= at}.values())[-STEPS_BEFORE:]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(usual))
    full_at = min(step.at for step in records if step.round > before and step.world == workers)
    # Beyond the steps in between: no rank records the one at whose end it leaves `train` for the next round.
    pauses = [b - a - (last - first) * step_s for (a, first), (b, last) in itertools.pairwise(times) if b <= full_at]
    kept = {step.pid for step in records if step.round > before and step.world == workers} & pids
    between, grown, *_ = (*between_s, None, None)
    return Change(way, times[0][0] - at - step_s, between, grown, max(pauses, default=0.0), full_at - at, len(kept))


def compare(args: argparse.Namespace, rng: random.Random) -> list[Change]:
    """Jobs of both ways in turn, several kills each."""
    changes = []
    for _ in range(args.jobs):
        for way in ("in place", "restart"):
            with ChangedJob(way, args) as job:
                job.wait_for_steps(STEPS_BEFORE)
                for number in range(args.kills):
                    changes.append(change(job, way, rng, number=number))
                    print(changes[-1], file=sys.stderr, flush=True)
    return changes


def table(changes: Sequence[Change], args: argparse.Namespace) -> str:
    rows = [
        "| seconds beyond a step: median (max) | in place | restart of all |",
        "|---|---|---|",
    ]
    for name, title in (
        ("gap_s", "SIGKILL → next new step"),
        ("between_s", "all survivors out of `train` → in it again"),
        ("grown_s", "the same when the others join, who are sent the state"),
        ("pause_s", "longest pause until all workers are back"),
        ("full_s", "SIGKILL → all workers train"),
        ("kept", f"survivors in their process, of {args.workers - 1}"),
    ):
        cells = []
        for way in ("in place", "restart"):
            found = [getattr(change, name) for change in changes if change.way == way]
            values = [float(value) for value in found if value is not None]
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "–")
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def resources(pid: int) -> dict[str, int]:
    """Descriptors, sockets, threads and resident kilobytes of a process."""
    descriptors = os.listdir(f"/proc/{pid}/fd")
    sockets = 0
    for fd in descriptors:
        with contextlib.suppress(OSError):
            sockets += os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(descriptors),
        "sockets": sockets,
        "threads": int(status["Threads"]),
        "kilobytes": int(status["VmRSS"].split()[0]),
    }


def expected(number: int) -> set[int]:
    """The samples of a step, by the order that is a function of the epoch alone."""
    per_epoch = math.ceil(SAMPLES / BATCH)
    return _batches((number - 1) // per_epoch)[(number - 1) % per_epoch]


@functools.cache
def _batches(epoch: int) -> list[set[int]]:
    sampler = ElasticBatchSampler(SAMPLES, global_batch=BATCH, seed=SEED, rank=0, world_size=1)
    sampler.set_epoch(epoch)
    return [set(batch) for batch in sampler]


def breaches(records: Sequence[Step]) -> list[str]:
    """What is wrong with the records of a job. A rank that is killed, or that the change reaches in `session.step()`,
    has not recorded its step."""
    wrong = []
    by_step: dict[int, list[Step]] = defaultdict(list)
    for step in records:
        by_step[step.step].append(step)
    for number, steps in sorted(by_step.items()):
        if len({(step.round, step.world) for step in steps}) > 1:
            rounds = sorted({step.round for step in steps})
            wrong.append(f"step {number} was trained in rounds {rounds}")
        elif len({step.digest for step in steps}) > 1:
            wrong.append(f"step {number}: ranks differ")
        elif len({step.rank for step in steps}) != len(steps):
            wrong.append(f"step {number}: a rank has trained it twice")
        elif not {index for step in steps for index in step.samples} <= expected(number):
            wrong.append(f"step {number}: samples of another step")
        elif len(steps) == steps[0].world and sum(len(step.samples) for step in steps) != len(expected(number)):
            wrong.append(f"step {number}: {sum(len(step.samples) for step in steps)} samples")
    return wrong


def many_changes(args: argparse.Namespace, rng: random.Random) -> dict[str, object]:
    """Changes in a row in one job, each once the job has its full size again; and what its records show."""
    with ChangedJob("in place", args, "--hashes") as job:
        spared = job.wait_for_steps(STEPS_BEFORE)[-1].pid
        changes, used = list[Change](), list[dict[str, int]]()
        for number in range(args.changes):
            how = rng.choice(("kill", "lose", "drain"))
            changes.append(change(job, how, rng, spared, number, how))
            used.append(resources(spared))
            if number % 10 == 9:
                print(f"{number + 1} changes, {used[-1]}", file=sys.stderr, flush=True)
        records, entries = job.steps(), job.entries()
    kills = [change.gap_s for change in changes if change.way == "kill"]
    return {
        "changes": dict(Counter(change.way for change in changes)),
        "rounds": len(entries),
        "steps": len({step.step for step in records}),
        "gap_s after a kill": statistics.median(kills) if kills else None,
        "worst gap_s after a kill": max(kills, default=None),
        "kept": sum(change.kept for change in changes),
        "breaches": breaches(records) + differing_entries(entries) + differing_replay(records, entries, args.megabytes),
        "after 10": used[min(9, len(used) - 1)],
        "last": used[-1],
    }


def differing_entries(entries: Entries) -> list[str]:
    """Rounds whose ranks did not begin with the same parameters, buffers and optimizers."""
    return [f"round {round}: ranks enter it with different states" for round, at in entries.items() if len(set(at)) > 1]


def parts(entries: Entries, last: int) -> list[tuple[int, int, int]]:
    """First and last step, and world size, of each round that has trained."""
    begun = [(found[0][0] + 1, found[0][1]) for found in entries.values()]
    ends = [first - 1 for first, _ in begun[1:]] + [last]
    return [(first, end, world) for (first, world), end in zip(begun, ends, strict=True) if end >= first]


def differing_replay(records: Sequence[Step], entries: Entries, megabytes: float) -> list[str]:
    """Steps whose hashes are not those of a run with the same world sizes, which plain torch trains without a fault."""
    found = {str(step.step): step.digest for step in records}
    command = [sys.executable, "-m", REPLAY, str(megabytes), json.dumps(parts(entries, max(map(int, found))))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=ELASTICD.full_environment())
    again = json.loads(done.stdout)
    return [f"step {step}: its replay differs" for step in sorted(found, key=int) if again.get(step) != found[step]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--least", type=int, default=2, help="the smallest size; equal to --workers: a fixed size")
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--late", action="store_true", help="the model is made in the function of session.run")
    parser.add_argument("--nodes", action="store_true", help="each worker, and each spare, on a node of its own")
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--startup", type=float, default=3.0, help="seconds that the script needs before it trains")
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--jobs", type=int, default=2, help="of each way")
    parser.add_argument("--kills", type=int, default=3, help="in each job")
    parser.add_argument("--changes", type=int, default=0, help="only this: changes in a row in one job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    adopt_orphans()
    rng = random.Random(args.seed)
    facts = report.machine()
    try:
        if args.changes:
            found: object = many_changes(args, rng)
            print(json.dumps(found, indent=1))
        else:
            changes = compare(args, rng)
            found = [{name: getattr(one, name) for name in Change.__slots__} for one in changes]
            size = f"{args.workers} workers of {args.least}:{args.workers}{', each on a node' if args.nodes else ''}"
            size += f", {count(args.spares, 'spare')}, {args.megabytes:g} MB"
            print(
                f"Measured on {report.machine_line(facts)}; {size}, {args.startup:g} s of start-up, seed {args.seed}.\n"
            )
            print(table(changes, args))
    finally:
        end_all()
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "found": found}, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
