"""Jobs that are only slow, at full length and under the default policy, for a given time: counts kills.

Two jobs at a time, one with a Session and one without elasticd, so that each also takes CPU from the other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.job import Fault, Job
from tests.hangs import harms
from tests.hangs.situations import PLAIN, SCRIPTS, SESSION, slow

_END_S = 400.0
_PASSES_S = 60.0
"""Between a harm from outside and twenty more steps."""
_SUSPENDED_S, _STOPPED_S, _BUSY_S = 8.0, 2.0, 30.0

Say = Callable[[str], None]


@dataclass(slots=True)
class HangSoak:
    """What was run, how often, and what was done about it that should not have been."""

    minutes: float
    runs: dict[str, int] = field(default_factory=dict)
    suspected: int = 0
    kills: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def soak(minutes: float, scratch: Path, rng: random.Random, say: Say) -> HangSoak:
    found = HangSoak(minutes)
    end, number = time.monotonic() + 60 * minutes, 0
    ways = [*slow(), "harm"]
    while time.monotonic() < end:
        for way in rng.sample(ways, len(ways)):
            number += 1
            _one(way, scratch / str(number), found, say)
            if time.monotonic() >= end:
                break
    return found


def _one(way: str, folder: Path, found: HangSoak, say: Say) -> None:
    faults, args = slow()[way] if way != "harm" else ([], ())
    runs = {script: _start(folder / script, script, faults, args) for script in (SESSION, PLAIN)}
    start = time.monotonic()
    try:
        for script, run in runs.items():
            name = f"{way}, {script}"
            found.runs[name] = found.runs.get(name, 0) + 1
            try:
                if way == "harm":
                    _harm(run)
                code = run.wait(_END_S)
                if code != 0:
                    found.broken.append(f"{name}: exit code {code}")
            except AssertionError as error:
                found.broken.append(f"{name}: {str(error).splitlines()[0]}")
            found.suspected += len(run.events("hang_suspected"))
            found.kills += [f"{name}: {event['reason']}" for event in run.events("hang_detected")]
            say(f"{name}: {time.monotonic() - start:.0f} s, {len(found.kills)} killed so far")
    finally:
        for run in runs.values():
            run.end()


def _start(folder: Path, script: str, faults: list[Fault], args: tuple[str, ...]) -> Job:
    flags = ["--log-dir", str(folder / "log")]
    flags += ["--checkpoint-dir", str(folder / "checkpoints")] if script == SESSION else []
    return Job(folder, SCRIPTS / script, *args, flags=flags, faults=faults)


def _harm(run: Job) -> None:
    """A stop, a debugger, a machine that sleeps, and eight others that want its cores."""
    run.step(30)
    harms.stop([run.worker(1)], _STOPPED_S)
    _goes_on(run)
    harms.trace(run.worker(0), _STOPPED_S)
    _goes_on(run)
    harms.suspend(run, _SUSPENDED_S)
    _goes_on(run)
    with harms.busy(8):
        time.sleep(_BUSY_S)
    _goes_on(run)
    (run.work / "enough").touch()


def _goes_on(run: Job) -> None:
    run.step(max(run.steps())[1] + 20)
