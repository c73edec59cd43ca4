"""`python -m benchmarks.donors`: ranks of one job are killed at random moments, and every step is compared bit for bit.

The job trains with dropout, BatchNorm, AdamW, a scheduler and a sampler, and notes a digest of all that at every step.
Afterwards the same job runs undisturbed. Counts the steps that were trained twice, and those that differ. Exit code 1
if a step differs, is missing, or if a kill cost more than one step. Steps differ after a rank was killed in the first
step of a round while another rank finished that step: its random state is lost, and dropout draws other numbers.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.job import Job, until

SETTLE_S = 0.6
"""Kills come within so long of the first step of a round."""
FLAGS = ["--checkpoint-dir", "checkpoints", "--max-restarts", "100000"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="elasticd-donors-") as directory:
        disturbed = Job(
            Path(directory, "disturbed"), "donor.py", "--steps", "1000000", workers=str(args.workers), flags=FLAGS
        )
        try:
            pauses = kill(disturbed, args.kills, args.workers, random.Random(args.seed))
        finally:
            disturbed.end()
        steps, repeated = trained(disturbed, args.workers)
        whole = Job(
            Path(directory, "whole"), "donor.py", "--steps", str(max(steps)), workers=str(args.workers), flags=FLAGS
        )
        try:
            code = whole.wait(within=3600)
        finally:
            whole.end()
        expected, _ = trained(whole, args.workers)
        resumed = disturbed.events("resumed")
        reasons = [event["reason"] for event in resumed]
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
    print(f"steps trained twice: {sum(repeated.values())}, at most {max(repeated.values(), default=0)} in a round")
    print(f"steps that differ from the undisturbed run, or are missing: {len(wrong)} {wrong[:10]}")
    lost = [event["step"] for event in resumed if "random state" in event["reason"]]
    print(f"resumed without the random state of the dead rank, which draws other numbers from then on: at {lost[:10]}")
    return 1 if code or wrong or max(repeated.values(), default=0) > 1 else 0


def last_round(job: Job) -> int:
    """Of the last step that rank 0 has noted; 0 before the first one."""
    path = job.work / "steps-0"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 200))
        lines = file.read().split(b"\n")
    return int(lines[-2].split()[0]) if len(lines) > 1 else 0


def kill(job: Job, kills: int, workers: int, draw: random.Random) -> list[float]:
    """Kill one rank after the other; returns the seconds to the next step."""
    pauses: list[float] = []
    until(lambda: last_round(job) == 1, "the first step")
    for round_ in range(1, kills + 1):
        time.sleep(draw.uniform(0, SETTLE_S))
        os.kill(job.worker(draw.randrange(workers), round_), signal.SIGKILL)
        at = time.monotonic()
        until(lambda: last_round(job) > round_, f"a step of round {round_ + 1}")  # noqa: B023
        pauses.append(time.monotonic() - at)
        if round_ % 20 == 0:
            print(f"{round_} kills", file=sys.stderr, flush=True)
    return pauses


def trained(job: Job, workers: int) -> tuple[dict[int, set[tuple[int, str]]], dict[int, int]]:
    """The digests that ranks have noted of each step, and how many steps each round has trained again."""
    found: dict[int, set[tuple[int, str]]] = {}
    first: dict[int, int] = {}
    again: dict[int, set[int]] = {}
    for rank in range(workers):
        for line in (job.work / f"steps-{rank}").read_text().splitlines():
            round_, step, digest = line.split()
            found.setdefault(int(step), set()).add((rank, digest))
            first[int(step)] = min(int(round_), first.get(int(step), 1 << 30))
            if first[int(step)] < int(round_):
                again.setdefault(int(round_), set()).add(int(step))
    return found, {round_: len(steps) for round_, steps in again.items()}


if __name__ == "__main__":
    sys.exit(main())
