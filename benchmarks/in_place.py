"""What a fault costs ranks that stay in their processes, beside a restart of all of them; and many changes in a row.

    python -m benchmarks.in_place --workers 4 --least 2 --megabytes 300 --startup 3
    python -m benchmarks.in_place --changes 200 --workers 3 --least 2

A random rank of a job gets a SIGKILL. Measured from outside, by the times that the ranks recorded, beyond the median
step: until the next new step, whichever the world size; and, once a replacement is ready, the longest time between two
steps until the job has all its workers again. The ways take turns: `in place` is a script with `session.run`, `restart`
the same script without. With --changes one job gets so many kills in a row, each after a few steps at the full size;
then its records are checked: every step once on every rank of its round, with the samples that belong to it, equal
hashes on all ranks; and descriptors, threads and memory of one process, which is never killed, are printed.
"""

from __future__ import annotations

import argparse
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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.launchers import ELASTICD
from benchmarks.processes import adopt_orphans, end_all
from elasticd import ElasticBatchSampler

SCRIPT = Path(__file__).with_name("scripts") / "in_place_job.py"
DEADLINE_S = 120.0
SAMPLES, BATCH, SEED = 4080, 12, 3
"""Of the script."""
STEPS_BEFORE = 15
"""Steps at the full size before a kill: the job is in its stride."""


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
    pause_s: float  #: the longest one from then until the job had all its workers again
    full_s: float  #: until it had
    kept: int  #: survivors that still had their process then


class ChangedJob:
    """A running job; leaving it ends everything."""

    def __init__(self, way: str, args: argparse.Namespace, *more: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="in-place-", dir=args.scratch))
        self.workers = args.workers
        script = ["--directory", str(self.directory), "--way", way, "--megabytes", str(args.megabytes)]
        script += ["--startup", str(args.startup), "--step", str(args.step), *more]
        command = [*ELASTICD.command, "--nproc-per-node", f"{args.least}:{args.workers}"]
        command += ["--checkpoint-dir", str(self.directory / "checkpoints"), str(SCRIPT), *script]
        with (self.directory / "output.log").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=ELASTICD.full_environment())

    def __enter__(self) -> ChangedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
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

    def wait_for_steps(self, count: int, after: float = 0.0, past: int = 0) -> list[Step]:
        """Wait for so many steps of the full size since `after`, in rounds past that one; returns all records."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            records = self.steps()
            full = {one.step for one in records if one.at > after and one.round > past and one.world == self.workers}
            if len(full) >= count:
                return records
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = (self.directory / "output.log").read_text()[-3000:]
                raise SystemExit(f"{len(full)} of {count} steps with {self.workers} workers came\n{tail}")
            time.sleep(0.05)

    def kill(self, rng: random.Random, spared: int = 0) -> float:
        """SIGKILL a random rank's process, but not the spared one; returns when."""
        last = self.steps()[-1]
        pids = {step.pid for step in self.steps()[-4 * self.workers :] if step.round == last.round}
        os.kill(rng.choice(sorted(pids - {spared})), signal.SIGKILL)
        return time.monotonic()


def change(job: ChangedJob, way: str, rng: random.Random, spared: int = 0) -> Change:
    before = job.wait_for_steps(STEPS_BEFORE, time.monotonic())
    pids, round = {step.pid for step in before[-3 * job.workers :]}, before[-1].round
    at = job.kill(rng, spared)
    return measured(job.wait_for_steps(3, at, round), at, round, pids, way, job.workers)


def measured(records: Sequence[Step], at: float, before: int, pids: set[int], way: str, workers: int) -> Change:
    """The change after the kill at that time, in round `before`: survivors may still have finished a step in it."""
    highest = max(step.step for step in records if step.round <= before)
    new: dict[int, float] = {}
    for step in records:
        if step.round > before and step.step > highest:
            new.setdefault(step.step, step.at)
    times = sorted(new.values())
    usual = sorted({step.step: step.at for step in records if step.at <= at}.values())[-STEPS_BEFORE:]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(usual))
    full_at = min(step.at for step in records if step.round > before and step.world == workers)
    pauses = [b - a for a, b in itertools.pairwise(times) if b <= full_at]
    kept = {step.pid for step in records if step.round > before and step.world == workers} & pids
    return Change(
        way, times[0] - at - step_s, max(pauses, default=0.0) - step_s if pauses else 0.0, full_at - at, len(kept)
    )


def compare(args: argparse.Namespace, rng: random.Random) -> list[Change]:
    """Jobs of both ways in turn, several kills each."""
    changes = []
    for _ in range(args.jobs):
        for way in ("in place", "restart"):
            with ChangedJob(way, args) as job:
                job.wait_for_steps(STEPS_BEFORE)
                for _ in range(args.kills):
                    changes.append(change(job, way, rng))
                    print(changes[-1], file=sys.stderr, flush=True)
    return changes


def table(changes: Sequence[Change], args: argparse.Namespace) -> str:
    rows = [
        "| seconds beyond a step: median (max) | in place | restart of all |",
        "|---|---|---|",
    ]
    for name, title in (
        ("gap_s", "SIGKILL → next new step"),
        ("pause_s", "longest pause until all workers are back"),
        ("full_s", "SIGKILL → all workers train"),
        ("kept", f"survivors in their process, of {args.workers - 1}"),
    ):
        cells = []
        for way in ("in place", "restart"):
            values = [float(getattr(change, name)) for change in changes if change.way == way]
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "–")
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def resources(pid: int) -> dict[str, int]:
    """Descriptors, threads and resident kilobytes of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
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
    """Kills in a row in one job, each once the job has its full size again; and what its records show."""
    with ChangedJob("in place", args, "--hashes") as job:
        spared = job.wait_for_steps(STEPS_BEFORE)[-1].pid
        changes, used = [], []
        for number in range(args.changes):
            changes.append(change(job, "in place", rng, spared))
            used.append(resources(spared))
            if number % 10 == 9:
                print(f"{number + 1} changes, {used[-1]}", file=sys.stderr, flush=True)
        records = job.steps()
    return {
        "changes": len(changes),
        "gap_s": statistics.median(change.gap_s for change in changes),
        "worst_gap_s": max(change.gap_s for change in changes),
        "kept": sum(change.kept for change in changes),
        "breaches": breaches(records),
        "after 10": used[min(9, len(used) - 1)],
        "last": used[-1],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--least", type=int, default=2, help="the smallest size; equal to --workers: a fixed size")
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--startup", type=float, default=3.0, help="seconds that the script needs before it trains")
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--jobs", type=int, default=2, help="of each way")
    parser.add_argument("--kills", type=int, default=3, help="in each job")
    parser.add_argument("--changes", type=int, default=0, help="only this: kills in a row in one job")
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
            size = f"{args.workers} workers of {args.least}:{args.workers}, {args.megabytes:g} MB"
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
