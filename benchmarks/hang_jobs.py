"""A job that hangs, observed from outside: when it was detected, and with which verdict.

Times are those of the scripts' own records and of the event log, by one clock. A hang that is not detected in time is
counted as tried and not detected.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elasticd_agent.hangs.collector.record import NodeEvidence
from tests.faults.job import Event, Fault, Job
from tests.hangs.situations import SCRIPTS, SESSION, Situation
from tests.multihost.cluster import Cluster
from tests.multihost.net import Network

DEFAULT: tuple[str, ...] = ()
FLOOR = ("--hang-floor", "5s")
TUNED = ("--hang-floor", "1s", "--stopped-after", "1s")
CEILINGS_S: Mapping[Sequence[str], str] = {DEFAULT: "65s", FLOOR: "6s", TUNED: "3s"}
"""For a loop and a start without end, above the floor of each policy."""
WARM_UP_STEPS = 60
GAP_STEPS = 40
START_S, FOUND_S, RECOVERED_S = 600.0, 150.0, 300.0
"""The first and the last are bounds for a busy machine, they measure nothing."""
_LOOK_S = 0.02

T = TypeVar("T")


@dataclass(slots=True)
class HangOutcome:
    """All repetitions of one situation under one policy. `detected`, `recovered`: seconds since the injection."""

    situation: str
    policy: str
    script: str = SESSION
    tried: int = 0
    detected: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    reported: int = 0
    """Of the detected ones: no kill followed."""
    right_cause: int = 0
    right_culprit: int = 0
    evidence_first: int = 0
    wrong: list[str] = field(default_factory=list)


class Missed(Exception):
    """It did not come in time."""


def observe(situation: Situation, script: str, policy: Sequence[str], folder: Path, outcome: HangOutcome) -> None:
    """One job that hangs in this way, and steps again. What goes wrong is in the outcome."""
    flags = [*policy, *situation.flags(CEILINGS_S[tuple(policy)])]
    args = ["--pause", "0.05", *situation.args]
    run = _start(folder, script, args, situation.workers, flags, situation.faults(WARM_UP_STEPS - 10, situation.rounds))
    outcome.tried += 1
    try:
        _one(run, situation, outcome)
    except Missed as missed:
        outcome.wrong.append(str(missed))
    finally:
        run.end()


def _start(
    folder: Path, script: str, args: Sequence[str], workers: int, flags: Sequence[str], faults: Sequence[Fault]
) -> Job:
    flags = ["--log-dir", str(folder / "log"), "--max-restarts", "1000", *flags]
    flags += ["--checkpoint-dir", str(folder / "checkpoints")] if script == SESSION else []
    return Job(folder, SCRIPTS / script, *args, workers=str(workers), flags=flags, faults=faults)


def _one(run: Job, situation: Situation, outcome: HangOutcome) -> None:
    name, number = situation.name, situation.rounds
    if situation.what:
        at = _until(lambda: fired(run.work, len(run.faults)), START_S, f"{name}: the fault", run)
    else:
        _until(lambda: (number, WARM_UP_STEPS) <= max(run.steps(), default=(0, 0)), START_S, f"{name}: steps", run)
        at = time.monotonic()
        os.kill(run.helper(name.split()[0]), signal.SIGSTOP)  # of the store, or of the owner
    found = "hang_detected" if situation.causes else "group_ended"
    hung = _until(
        lambda: run.events(found, round=number) or missed_call(run, number), FOUND_S, f"{name}: a verdict", run
    )[0]
    outcome.detected.append(float(hung["mono"]) - at)
    cause, ranks = (hung["cause"], tuple(hung["ranks"])) if situation.causes else ("", ())
    outcome.right_cause += cause in situation.causes or not situation.causes
    outcome.right_culprit += ranks == situation.blamed
    if outcome.right_cause + outcome.right_culprit < 2 * outcome.tried:
        outcome.wrong.append(f"{cause} {ranks}: {hung.get('reason')}")
    if hung.get("action") == "report":  # a kill may cost a plain script its training
        outcome.reported += 1
        _see_evidence(outcome, run.work / "log", number, situation.workers, [])
        return
    _until(lambda: run.events("group_ended", round=number), RECOVERED_S, f"{name}: its end", run)
    if hung["kind"] == "round_published":
        outcome.evidence_first += 1  # a traceback of the rank at fault
    elif situation.causes:
        exits = run.events("worker_exited", round=number)
        _see_evidence(outcome, run.work / "log", number, situation.workers, exits)
    if situation.what != "exit":  # nothing is left to be trained: the next round ends at once
        first = _until(lambda: stepped(run.work, number, situation.workers), RECOVERED_S, f"{name}: steps again", run)
        outcome.recovered.append(first - at)


def missed_call(run: Job, number: int) -> list[Event]:
    """The library may prove it before the verdict: the rank at fault raises MissedCall, and the round ends by that."""
    ranks = [event["rank"] for event in run.events("worker_exited", round=number, requested=False)]
    published = run.events("round_published", round=number + 1)
    return [{**e, "cause": "missed_collective", "ranks": ranks} for e in published if ".MissedCall: " in e["reason"]]


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
    """ "" if the evidence of every rank that had not ended is on disk, and was taken before the first kill."""
    killed = min((float(event["wall"]) for event in exits if event["exit_code"] != 0), default=math.inf)
    ended = {event["rank"] for event in exits if event["exit_code"] == 0}
    records = [NodeEvidence.from_json(path.read_bytes()) for path in folder.glob("evidence-*.json")]
    late_s = max((record.at_wall - killed for record in records), default=0.0)
    if late_s > 0:
        return f"it is {late_s:.3f} s late"
    ranks = {rank.rank: rank for record in records for rank in record.ranks}
    for rank in set(range(workers)) - ended:
        if rank not in ranks:
            return f"none of rank {rank}, only {sorted(path.name for path in folder.glob('*'))}"
        if ranks[rank].state != "Z" and not ranks[rank].source:  # a zombie has no stacks
            return f"no stacks of rank {rank}: {ranks[rank].trouble[:200]}"
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
