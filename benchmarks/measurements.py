"""What is measured: each function starts its own jobs, ends them, and returns plain numbers.

A recovery is "not recovered" when no new group has committed a step on all its ranks before the deadline; it is then
counted and left out of the medians, so a median alone flatters a launcher that stalls.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.intervals import Interval, median_interval
from benchmarks.job import BenchmarkJob, Memory, Stalled
from benchmarks.launchers import ELASTICD, TORCHRUN, ComparedLauncher

_START_DEADLINE_S = 90.0
# Between a group's first step and the kill, the same for all launchers: faults rarely come in the first second.
_SETTLE_S, _SETTLE_STEPS = 1.0, 50
_TURN_S = 0.5
_WARM_UP_STEPS = 500  # left out of the step rate: page faults, DDP's bucket rebuild, the launcher's own parking

Say = Callable[[str], None]


@dataclass(slots=True)
class Recoveries:
    """Start and recovery times in seconds of one launcher at one number of workers."""

    launcher: str
    workers: int
    start: list[float] = field(default_factory=list)
    kill_other: list[float] = field(default_factory=list)
    kill_rank0: list[float] = field(default_factory=list)
    start_tried: int = 0
    kill_other_tried: int = 0
    kill_rank0_tried: int = 0

    @property
    def all_recovered(self) -> bool:
        done = (len(self.start), len(self.kill_other), len(self.kill_rank0))
        return done == (self.start_tried, self.kill_other_tried, self.kill_rank0_tried)


def warm_up(launcher: ComparedLauncher, scratch: Iterator[Path]) -> None:
    """A run that does not count. Raises Stalled if the launcher cannot do even that, with what it printed."""
    with BenchmarkJob(launcher, 2, next(scratch), "--steps", "10") as job:
        job.wait_for_end(_START_DEADLINE_S)


def recoveries(
    launchers: tuple[ComparedLauncher, ...],
    workers: int,
    repetitions: int,
    deadline_s: float,
    rng: random.Random,
    scratch: Iterator[Path],
    say: Say,
) -> list[Recoveries]:
    """Start, kill a rank that is not 0, kill rank 0; all launchers in each repetition, in a new order each time."""
    results = {launcher.name: Recoveries(launcher.name, workers) for launcher in launchers}
    for repetition in range(repetitions):
        for launcher in rng.sample(launchers, len(launchers)):
            result = results[launcher.name]
            _one_repetition(launcher, workers, result, deadline_s, rng, scratch)
            say(f"recovery {repetition + 1}/{repetitions}, {workers} workers, {launcher.title}: {_last(result)}")
    return list(results.values())


def _one_repetition(
    launcher: ComparedLauncher,
    workers: int,
    result: Recoveries,
    deadline_s: float,
    rng: random.Random,
    scratch: Iterator[Path],
) -> None:
    """Both kills hit the same job, as in life; after one that was not recovered the other gets a fresh job."""
    kills = [("kill_other", rng.randrange(1, workers)), ("kill_rank0", 0)]
    while kills:
        with BenchmarkJob(launcher, workers, next(scratch)) as job:
            result.start_tried += 1
            try:
                group = job.wait_for_group(-1, _START_DEADLINE_S)
                result.start.append(job.first_step_time(group) - job.started)
                while kills:
                    job.train(group, _SETTLE_S, _SETTLE_STEPS, deadline_s)
                    kind, rank = kills.pop(0)
                    setattr(result, f"{kind}_tried", getattr(result, f"{kind}_tried") + 1)
                    killed = job.kill(group, rank)
                    group = job.wait_for_group(group, deadline_s)
                    getattr(result, kind).append(job.first_step_time(group) - killed)
            except Stalled:
                if not job.groups:  # it never even started: do not try for ever
                    return


def _last(result: Recoveries) -> str:
    def figure(values: list[float], tried: int) -> str:
        return f"{values[-1]:.3f} s" if len(values) == tried else f"{len(values)} of {tried} recovered"

    return (
        f"start {figure(result.start, result.start_tried)}, "
        f"other rank {figure(result.kill_other, result.kill_other_tried)}, "
        f"rank 0 {figure(result.kill_rank0, result.kill_rank0_tried)}"
    )


@dataclass(frozen=True, slots=True)
class Overhead:
    """Steps a second without faults, turn by turn, and elasticd's share of torchrun's: a median for each start."""

    workers: int
    elasticd: list[float]
    torchrun: list[float]
    starts: list[float]
    ratio: Interval


def overhead(starts: int, turns: int, rng: random.Random, scratch: Iterator[Path], say: Say) -> Overhead:
    """A job of 2 workers under each launcher at a time; they take turns: one trains, the other one is stopped whole.

    A machine that others use changes its speed by a third within minutes; turns of half a second meet the same machine.
    A start has its luck, too (where its memory lies): the same launcher, started again, differs by three per cent.
    """
    rates: dict[str, list[float]] = {ELASTICD.name: [], TORCHRUN.name: []}
    medians: list[float] = []
    for start in range(starts):
        with BenchmarkJob(ELASTICD, 2, next(scratch)) as ours, BenchmarkJob(TORCHRUN, 2, next(scratch)) as theirs:
            jobs = {ELASTICD.name: ours, TORCHRUN.name: theirs}
            for job in jobs.values():
                job.train(job.wait_for_group(-1, _START_DEADLINE_S), 1.0, _WARM_UP_STEPS, _START_DEADLINE_S)
                job.freeze()
            for _ in range(turns):
                for name in rng.sample(list(jobs), 2):
                    rates[name].append(jobs[name].thaw_for(_TURN_S))
        pairs = list(zip(*rates.values(), strict=True))[-turns:]
        medians.append(statistics.median(ours / theirs for ours, theirs in pairs))
        say(f"steady start {start + 1}/{starts}: elasticd does {medians[-1]:.3f} of torchrun's steps")
    return Overhead(2, rates[ELASTICD.name], rates[TORCHRUN.name], medians, median_interval(medians))


def memory(
    launchers: tuple[ComparedLauncher, ...], workers: int, scratch: Iterator[Path], say: Say
) -> dict[str, Memory]:
    """PSS by part, once each, two seconds into training."""
    found: dict[str, Memory] = {}
    for launcher in launchers:
        with BenchmarkJob(launcher, workers, next(scratch)) as job:
            group = job.wait_for_group(-1, _START_DEADLINE_S)
            job.train(group, 2.0, _SETTLE_STEPS, 60.0)
            found[launcher.name] = job.memory(group)
        say(f"memory, {workers} workers, {launcher.title}: {found[launcher.name].total:.0f} MB in all")
    return found


@dataclass(slots=True)
class Kills:
    """Kills in a row in one job."""

    workers: int
    requested: int
    recovered: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    most_steps_repeated: int = 0


def many_kills(
    count: int, workers: int, deadline_s: float, rng: random.Random, scratch: Iterator[Path], say: Say
) -> Kills:
    """SIGKILL random ranks of one elasticd job at random moments; it resumes from its script's snapshots."""
    result, every = Kills(workers, count), 10
    while len(result.recovered) + len(result.lost) < count:
        with BenchmarkJob(ELASTICD, workers, next(scratch), "--snapshot-every", str(every)) as job:
            try:
                group = job.wait_for_group(-1, _START_DEADLINE_S)
                while len(result.recovered) + len(result.lost) < count:
                    job.train(group, rng.uniform(0, 0.5), rng.randrange(1, 50), deadline_s)
                    rank = rng.randrange(workers)
                    killed = job.kill(group, rank)
                    old, group = group, job.wait_for_group(group, deadline_s)
                    result.recovered.append(job.first_step_time(group) - killed)
                    reached = max(r.last_step for r in job.groups[old].values())
                    repeated = reached + 1 - min(r.first_step for r in job.groups[group].values())
                    result.most_steps_repeated = max(result.most_steps_repeated, repeated)
                    if len(result.recovered) % 20 == 0:
                        say(f"kill {len(result.recovered)}/{count}: rank {rank}, {result.recovered[-1]:.3f} s")
            except Stalled as stalled:
                result.lost.append(str(stalled))
                say(f"kill {len(result.recovered) + len(result.lost)}/{count}: LOST: {stalled}")
    return result
