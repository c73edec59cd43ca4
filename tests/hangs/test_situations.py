"""Ranks that hang, each in a way of its own: found, blamed on the right one, explained on disk, and the job goes on.

One job hangs round after round, so that its start is paid for once. Policy's times are a fifth of the defaults; the
full length is `make soak`'s.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from elasticd_agent.hangs.collector.record import NodeEvidence
from tests.faults.job import Event, Job, until
from tests.hangs.conftest import TUNED, StartHanging
from tests.hangs.situations import BY_NAME, PLAIN, SESSION, Situation

EVERY = 10
"""Steps between the session's checkpoints: a round begins at most so many steps before the fault of the last one."""
GAP = 20


@dataclass(frozen=True, slots=True)
class Chain:
    """Situations that come one after the other in one job, one in each round."""

    script: str
    names: Sequence[str]
    workers: int = 2
    args: tuple[str, ...] = ()

    @property
    def situations(self) -> list[Situation]:
        return [BY_NAME[name] for name in self.names]


OUTSIDE = Chain(SESSION, ["stopped", "holds the GIL", "dead-locked"])
OUTSIDE_TOO = Chain(SESSION, ["checkpoint", "blocked on a FIFO", "zombie"])
PLAIN_ONES = Chain(
    PLAIN,
    ["stopped rank 0", "dead-locked DataLoader worker", "sleeps", "everyone blocked", "infinite loop"],
    args=("--loaders", "1"),
)
IN_COLLECTIVES = Chain(SESSION, ["skips a collective", "another collective", "mismatched shapes"], workers=3)
IN_COLLECTIVES_PLAIN = Chain(PLAIN, ["mismatched shapes", "skips a collective", "another collective"], workers=3)
BEGIN_AND_END = Chain(PLAIN, ["never joins", "exit handler"], args=("--steps", "60"))
IN_GROUPS = Chain(
    SESSION, ["two groups crossed", "barrier of rank 0 only", "receives instead"], workers=3, args=("--groups",)
)
WAITS = Chain(
    SESSION,
    [
        *(
            "native call without the GIL",
            "semaphore of a dead process",
            "locks twice",
            "dead socket",
            "stale lock file",
        ),
        *("hook in backward", "flock of another process", "asyncio", "reads its own pipe", "child that does not end"),
        *("empty queue", "thread that does not end", "stopped child", "retry that steps"),
    ],
)
BEGIN_AND_STORE = Chain(SESSION, ["never joins", "store stopped"])


@pytest.mark.parametrize(
    "chains",
    [
        pytest.param((OUTSIDE, IN_COLLECTIVES), id="with a session"),
        pytest.param((OUTSIDE_TOO,), id="more with a session", marks=pytest.mark.system),
        pytest.param((PLAIN_ONES, BEGIN_AND_STORE), id="without", marks=pytest.mark.system),
        pytest.param((WAITS, IN_GROUPS), id="other waits", marks=[pytest.mark.system, pytest.mark.timeout(300)]),
        pytest.param((BEGIN_AND_END, IN_COLLECTIVES_PLAIN), id="at the end", marks=pytest.mark.system),
    ],
)
def test_hangs_in_sequence(hanging: StartHanging, chains: tuple[Chain, ...]) -> None:
    """Two jobs at a time: mostly they wait."""
    runs = [start(hanging, chain) for chain in chains]
    for run, chain in zip(runs, chains, strict=True):
        for number, situation in enumerate(chain.situations, start=1):
            if not situation.what:
                stop_the_store(run, number)
            assert_hung(run, number, situation)
        ends_well(run, len(chain.names) + 1, trains="exit handler" not in chain.names)


def start(hanging: StartHanging, chain: Chain) -> Job:
    faults = []
    for number, situation in enumerate(chain.situations, start=1):
        # A plain script begins again at its first step in each round.
        step = GAP * number if chain.script == SESSION else GAP
        faults += situation.faults(step, round=number)
    flags = [*TUNED, *(flag for situation in chain.situations for flag in situation.flags("3s"))]
    return hanging(chain.script, faults, *chain.args, workers=chain.workers, flags=flags)


def stop_the_store(run: Job, round: int) -> None:
    run.step(1, round=round)
    os.kill(run.helper("store"), signal.SIGSTOP)


def assert_hung(run: Job, number: int, situation: Situation) -> None:
    """Verdict, culprit and cause are right, all evidence was there before the kill, and a Round came that says so."""
    hung = run.event("hang_detected", round=number, action="restart")
    assert hung["cause"] in situation.causes, hung
    assert tuple(hung["ranks"]) == situation.blamed, hung
    after = run.event("round_published", round=number + 1)
    assert after["cause"] == "hung"
    assert after["reason"].startswith(hung["reason"]), after
    gone = run.event("group_ended", round=number)
    killed = [event for event in run.events("worker_exited", round=number) if event["exit_code"] != 0]
    assert all(event["requested"] and event["signal"] == 9 for event in killed), killed
    assert gone["survivors"] == []
    again = bool(situation.ceiling) or "hang before" in hung["reason"]
    assert_evidence(run, number, situation, min(killed, key=lambda event: event["mono"]), again)


def assert_evidence(run: Job, number: int, situation: Situation, killed: Event, again: bool) -> None:
    evidence = run.work / "log" / f"round-{number}" / "evidence"
    until(lambda: f"elasticd explain {evidence}\n" in run.err, run.report)
    # What was decided is written by the side, nobody waits for it.
    path = evidence / "verdict.json"
    until(lambda: path.exists() and json.loads(path.read_text())["action"] == "restart", str(path))
    assert json.loads(path.read_text())["round"] == number
    exited = {event["rank"] for event in run.events("worker_exited", round=number, exit_code=0)}
    (path,) = evidence.glob("evidence-*.json")
    # Both are this machine's wall clock; a file's time is the kernel's tick, up to 10 ms old. `again`: it was
    # suspicious for so long that newer evidence may be taking its place.
    assert again or path.stat().st_mtime <= killed["wall"], path
    record = NodeEvidence.from_json(path.read_bytes())
    assert record.at_wall <= killed["wall"]
    ranks = {rank.rank: rank for rank in record.ranks}
    for rank in set(range(situation.workers)) - exited:
        assert ranks[rank].source or (situation.name == "zombie" and rank in situation.ranks), ranks[rank].trouble


def ends_well(run: Job, number: int, trains: bool) -> None:
    """The round after the last hang trains, where something is left to train, and nothing more hangs."""
    if trains:
        first = run.event("first_step", round=number)["step"]
        run.step(first + 5, round=number)
    (run.work / "enough").touch()
    assert run.wait() == 0
    assert len(run.events("hang_detected", action="restart")) == number - 1
    assert run.event("job_ended", outcome="succeeded")
