"""`python -m benchmarks.donors`: ranks of one job are killed at random moments, and every step is compared bit for bit.

The job trains with dropout, BatchNorm, AdamW, a scheduler, a GradScaler and a sampler, and notes a digest of all that
at every step. Afterwards the same job runs undisturbed. Counts the steps that were trained twice, and those that
differ. Exit code 1 if a step differs, is missing, or if a kill cost more than one step. Steps differ after a rank was
killed in the first step of a round while another rank finished that step: its random state is lost, and dropout draws
other numbers.

`--gpu`: the ranks share one GPU, over NCCL. Steps of rank 0 are not compared: after its death it has the averages of
BatchNorm that the rank which saved has.

`--during saves`: there is a save every few steps, and kills come while one is copied or written: of a rank and of the
writer in turn.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from elasticd.heartbeat.record import HeartbeatReader, Phase
from tests.faults.job import Job, until
from tests.gpu.conftest import ALONE

SETTLE_S = 0.6
"""Kills come within so long of the first step of a round."""
WRITER_LIFE_S = 2.5
"""A writer lives so long at least: the launcher starts no other one after three that lived for less than 2 s."""
FLAGS = ["--checkpoint-dir", "checkpoints", "--max-restarts", "100000"]
SAVES = ["--every", "20", "--width", "2500"]
"""A state of 2 MB: saves take long enough to be met."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--during", choices=["saves"])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="elasticd-donors-") as directory:

        def start(name: str, steps: int) -> Job:
            how = ["--steps", str(steps), "--limited", *(SAVES if args.during else [])]
            flags = [*FLAGS, "--virtual-local-rank"] if args.gpu else FLAGS
            env = ALONE if args.gpu else {}
            return Job(Path(directory, name), "donor.py", *how, workers=str(args.workers), flags=flags, env=env)

        disturbed = start("disturbed", 1_000_000)
        kill_all = kill_in_saves if args.during else kill_ranks
        try:
            pauses = kill_all(disturbed, args.kills, args.workers, random.Random(args.seed))
        finally:
            disturbed.end()
        compared = range(int(args.gpu), args.workers)
        steps, repeated = trained(disturbed, compared)
        whole = start("whole", max(steps))
        try:
            code = whole.wait(within=3600)
        finally:
            whole.end()
        expected, _ = trained(whole, compared)
        resumed = disturbed.events("resumed")
        unsaved = [
            line.partition("] ")[2]
            for line in disturbed.err.splitlines()
            if "has not saved" in line or "cannot save" in line
        ]
        reasons = [event["reason"] for event in resumed]
        found = [event for event in disturbed.events() if event["kind"].startswith("checkpoint_")]
        saves = Counter(re.sub("[0-9]+|every.*", "N", event["reason"]) for event in found)
        unnoted = {event["step"] for event in resumed}  # a rank may be killed between its commit and its note
        wrong = [
            step
            for step, notes in expected.items()
            if not steps.get(step, set()) <= notes or (step not in steps and step not in unnoted)
        ]
    saved = sum("after the fault" in reason for reason in reasons)
    print(
        f"seed {args.seed}: {args.kills} kills in {max(steps)} steps, {len(reasons)} resumed, {saved} of them from a "
    )
    print(f"state that was saved after the fault; next step after {sorted(pauses)[len(pauses) // 2]:.2f} s (median)")
    for said, times in Counter(re.sub("[0-9]+", "N", line) for line in unsaved).most_common(5):
        print(f"{times} times: {said}")
    lost = [event["step"] for event in resumed if "random state" in event["reason"]]
    print(f"resumed without the random state of the dead rank, which draws other numbers from then on: at {lost[:10]}")
    print(f"steps trained twice: {sum(repeated.values())}, at most {max(repeated.values(), default=0)} in a round")
    print(f"saves: {dict(saves)}")
    print(f"steps that differ from the undisturbed run, or are missing: {len(wrong)} {wrong[:10]}")
    return 1 if code or wrong or max(repeated.values(), default=0) > 1 else 0


def last_step(job: Job) -> tuple[int, int]:
    """Round and step that rank 0 has noted last; (0, 0) before the first one."""
    path = job.work / "steps-0"
    if not path.exists():
        return 0, 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 200))
        lines = file.read().split(b"\n")
    round_, step, *_ = lines[-2].split() if len(lines) > 1 else (b"0", b"0")
    return int(round_), int(step)


def kill_ranks(job: Job, kills: int, workers: int, draw: random.Random) -> list[float]:
    """Kill one rank after the other; returns the seconds to the next step."""
    pauses: list[float] = []
    until(lambda: last_step(job)[0] == 1, "the first step")
    for round_ in range(1, kills + 1):
        time.sleep(draw.uniform(0, SETTLE_S))
        pauses.append(kill(job, job.worker(draw.randrange(workers), round_), (round_ + 1, 0)))
        report(round_)
    return pauses


def kill_in_saves(job: Job, kills: int, workers: int, draw: random.Random) -> list[float]:
    """Kill a rank and the writer in turn, two of them while a save is copied and two while one is written."""
    pauses: list[float] = []
    until(lambda: last_step(job)[0] == 1, "the first step")
    round_, at = 1, time.monotonic()
    for number in range(kills):
        rank = draw.randrange(workers)
        is_rank, is_written = number % 2 == 0, number % 4 > 1
        time.sleep(0 if is_rank else max(0, at + WRITER_LIFE_S - time.monotonic()))
        pid = job.worker(rank, round_) if is_rank else job.helper("writer")
        if is_written:
            wait_for(lambda: any(name.endswith(".staging") for name in os.listdir(job.work / "checkpoints")))
        else:
            (beat,) = Path("/dev/shm").glob(f"elasticd-{os.getuid()}-{job.pid}-*/round-{round_}/heartbeat-{rank}")
            with HeartbeatReader(beat) as heartbeat:
                wait_for(lambda: heartbeat.read().phase is Phase.CHECKPOINT)
        pauses.append(kill(job, pid, (round_ + 1, 0) if is_rank else last_step(job)))
        round_, at = round_ + is_rank, at if is_rank else time.monotonic()
        report(number + 1)
    return pauses


def wait_for(condition: Callable[[], bool]) -> None:
    """As `until`, for what lasts a millisecond."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "there was no save"
        time.sleep(0.0002)


def kill(job: Job, pid: int, after: tuple[int, int]) -> float:
    """Returns the seconds to the next step that is later than `after`."""
    os.kill(pid, signal.SIGKILL)
    at = time.monotonic()
    until(lambda: last_step(job) > after, f"a step after {after}")
    return time.monotonic() - at


def report(kills: int) -> None:
    if kills % 20 == 0:
        print(f"{kills} kills", file=sys.stderr, flush=True)


def trained(job: Job, ranks: range) -> tuple[dict[int, set[tuple[int, str]]], dict[int, int]]:
    """The digests that ranks have noted of each step, and how many steps each round has trained again."""
    found: dict[int, set[tuple[int, str]]] = {}
    first: dict[int, int] = {}
    again: dict[int, set[int]] = {}
    for rank in ranks:
        for line in (job.work / f"steps-{rank}").read_text().splitlines():
            round_, step, digest = line.split()
            found.setdefault(int(step), set()).add((rank, digest))
            first[int(step)] = min(int(round_), first.get(int(step), 1 << 30))
            if first[int(step)] < int(round_):
                again.setdefault(int(round_), set()).add(int(step))
    return found, {round_: len(steps) for round_, steps in again.items()}


if __name__ == "__main__":
    sys.exit(main())
