"""Jobs that hang in one situation after the other, observed from outside: when each was detected, and with which
verdict.

A job is one repetition of several situations, each in a round of its own, so that one start and one warm-up serve them
all. Times are those of the scripts' own records and of the event log, by one clock. A hang that is not detected in time
is counted, and ends its job.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.faults.job import Event, Fault, Job
from tests.hangs.situations import BY_NAME, SCRIPTS, SESSION, Situation
from tests.multihost.cluster import Cluster
from tests.multihost.net import Network

DEFAULT: tuple[str, ...] = ()
FLOOR = ("--hang-floor", "1s")
TUNED = (*FLOOR, "--stopped-after", "1s")
CEILINGS = ("8s", "3s")
"""For a loop and a start without end, above the floors of the default policy and of the tuned one."""
WARM_UP_STEPS = 220
"""A job of fewer steps than 200 is given more time than what counts here (learning.YOUNG_STEPS)."""
GAP_STEPS = 40
START_S, FOUND_S, RECOVERED_S = 90.0, 90.0, 30.0
_LOOK_S = 0.02

T = TypeVar("T")


@dataclass(slots=True)
class HangOutcome:
    """All repetitions of one situation under one policy. `detected`, `recovered`: seconds since the injection."""

    situation: str
    policy: str
    tried: int = 0
    detected: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    right_cause: int = 0
    right_culprit: int = 0
    evidence_first: int = 0
    wrong: list[str] = field(default_factory=list)


class Missed(Exception):
    """It did not come in time."""


# Those with the same needs share a job; the order keeps one rank from being to blame twice running.
JOBS: tuple[tuple[str, ...], ...] = (
    (
        *("stopped", "sleeps", "dead-locked DataLoader worker", "stopped rank 0", "dead-locked", "holds the GIL"),
        *("blocked on a FIFO", "checkpoint", "infinite loop", "everyone blocked", "zombie"),
    ),
    ("skips a collective", "another collective", "mismatched shapes"),
    ("stopped of 4",),
    ("never joins",),
    ("exit handler",),
    ("store stopped",),
)


def repetition(names: Sequence[str], policy: Sequence[str], folder: Path, outcomes: dict[str, HangOutcome]) -> None:
    """One job that goes through these situations. Raises Missed, with what is known, when one is not found."""
    situations = [BY_NAME[name] for name in names]
    faults: list[Fault] = []
    step = WARM_UP_STEPS
    for number, situation in enumerate(situations, start=1):
        faults += situation.faults(step, round=number)
        step += GAP_STEPS
    args = [arg for situation in situations for arg in situation.args if arg not in ("--steps", "60")]
    if "exit handler" in names:
        args += ["--steps", str(step)]
    ceiling = CEILINGS[bool(policy)]
    flags = [flag for situation in situations for flag in situation.flags(ceiling)]
    run = _start(folder, SESSION, args, max(s.workers for s in situations), [*policy, *flags], faults)
    try:
        struck = 0
        for number, situation in enumerate(situations, start=1):
            outcome = outcomes[situation.name]
            outcome.tried += 1
            struck += len(situation.ranks)
            _one(run, number, situation, struck, outcome)
    finally:
        run.end()


def _start(
    folder: Path, script: str, args: Sequence[str], workers: int, flags: Sequence[str], faults: Sequence[Fault]
) -> Job:
    flags = ["--log-dir", str(folder / "log"), "--max-restarts", "1000", *flags]
    flags += ["--checkpoint-dir", str(folder / "checkpoints")] if script == SESSION else []
    return Job(folder, SCRIPTS / script, *args, workers=str(workers), flags=flags, faults=faults)


def _one(run: Job, number: int, situation: Situation, struck: int, outcome: HangOutcome) -> None:
    where = f"{situation.name}, round {number}"
    if situation.what:
        at = _until(lambda: fired(run.work, struck), START_S, f"{where}: the fault", run)
    else:
        _until(lambda: (number, WARM_UP_STEPS) <= max(run.steps(), default=(0, 0)), START_S, f"{where}: steps", run)
        at = time.monotonic()
        os.kill(run.helper("store"), signal.SIGSTOP)
    hung = _until(lambda: run.events("hang_detected", round=number), FOUND_S, f"{where}: a verdict", run)[0]
    outcome.detected.append(float(hung["mono"]) - at)
    outcome.right_cause += hung["cause"] in situation.causes
    outcome.right_culprit += tuple(hung["ranks"]) == situation.blamed
    if hung["cause"] not in situation.causes or tuple(hung["ranks"]) != situation.blamed:
        outcome.wrong.append(f"{hung['cause']} {hung['ranks']}: {hung['reason']}")
    _until(lambda: run.events("group_ended", round=number), RECOVERED_S, f"{where}: its end", run)
    exits = run.events("worker_exited", round=number)
    _see_evidence(outcome, run.work / "log", number, situation.workers, exits)
    if situation.what != "exit":  # nothing is left to be trained: the next round ends at once
        first = _until(lambda: stepped(run.work, number, situation.workers), RECOVERED_S, f"{where}: steps again", run)
        outcome.recovered.append(first - at)


def fired(work: Path, faults: int) -> float | None:
    """When the last of so many faults struck, once it has."""
    path = work / "fired-at"
    lines = path.read_text().splitlines() if path.exists() else []
    return max(float(line.split()[3]) for line in lines) if len(lines) >= faults else None


def stepped(work: Path, after: int, workers: int) -> float | None:
    """When the last rank had done its first step in a round after that one, once all have."""
    firsts = []
    for rank in range(workers):
        path = work / f"steps-{rank}"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        times = [float(at) for number, _, at in map(str.split, lines) if int(number) > after]
        if not times:
            return None
        firsts.append(min(times))
    return max(firsts)


def _see_evidence(outcome: HangOutcome, log: Path, number: int, workers: int, exits: Sequence[Event]) -> None:
    missing = _missing(log / f"round-{number}" / "evidence", workers, exits)
    outcome.evidence_first += not missing
    outcome.wrong += [f"evidence: {missing}"] if missing else []


def _missing(folder: Path, workers: int, exits: Sequence[Event]) -> str:
    """ "" if stacks and facts of every rank that had not ended are on disk, and were taken before the first kill."""
    killed = min((float(event["wall"]) for event in exits if event["exit_code"] != 0), default=0.0)
    ended = {event["rank"] for event in exits if event["exit_code"] == 0}
    for rank in set(range(workers)) - ended:
        facts, stacks = folder / f"rank-{rank}.json", folder / f"rank-{rank}.stacks.txt"
        if not facts.exists():
            return f"no facts of rank {rank}, only {sorted(path.name for path in folder.glob('*'))}"
        found = json.loads(facts.read_text())
        if found["at_wall"] > killed:
            return f"facts of rank {rank} are {found['at_wall'] - killed:.3f} s late"
        if found["state"] != "Z" and not found.get("source"):  # a zombie has no stacks
            return f"no stacks of rank {rank}: {stacks.read_text()[:200] if stacks.exists() else 'nothing was written'}"
    return ""


def partition(policy: Sequence[str], folder: Path, repetitions: int, outcome: HangOutcome) -> None:
    """Two nodes; packets between them vanish, and arrive again once the verdict is there. Needs root.

    Raises AssertionError when the verdict or training does not come in time.
    """
    flags = ["--rdzv-conf", "last_call_timeout=60", "--max-restarts", "1000", *policy]
    flags += ["--checkpoint-dir", str(folder / "checkpoints"), "--log-dir", str(folder / "log")]
    with Network(2, others=("store",)) as net:
        cluster = Cluster(net, folder / "job", "2:2", SCRIPTS / SESSION, flags=flags)
        cluster.start(env={"OMP_NUM_THREADS": "1"})  # elasticd and torchrun set that for several workers a node only
        for _ in range(repetitions):
            number = cluster.round(max(1, cluster.last_round()))["round"]
            cluster.trains(number, WARM_UP_STEPS if number == 1 else GAP_STEPS)
            outcome.tried += 1
            at = time.monotonic()
            net.cut(*net.hosts)
            hung = cluster.event("hang_detected", FOUND_S, round=number)
            net.heal(*net.hosts)
            outcome.detected.append(float(hung["mono"]) - at)
            outcome.right_cause += hung["cause"] == "network"
            outcome.right_culprit += not hung["ranks"]
            if hung["cause"] != "network" or hung["ranks"]:
                outcome.wrong.append(f"{hung['cause']} {hung['ranks']}: {hung['reason']}")
            first = cluster.event("first_step", RECOVERED_S, round=number + 1)
            outcome.recovered.append(float(first["mono"]) - at)
            exits = cluster.events("worker_exited", round=number)
            _see_evidence(outcome, folder / "log", number, 2, exits)
        cluster.stop()


def _until(condition: Callable[[], T | None], within: float, what: str, run: Job) -> T:
    """Its first true value; Missed if there is none in time, or the job has ended."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() > deadline or run.process.poll() is not None:
            raise Missed(f"{what}: not in time\n{run.err[-1500:]}")
        time.sleep(_LOOK_S)
    return value
