"""From a SIGKILL to the next new step, by the size of the state: the launcher's part, the script's own, the state's.

    python -m benchmarks.resume --megabytes 10 300 --workers 2 4 --kills 5

One job for each row: a random rank is killed, again and again. Reported, as medians (largest): seconds from the kill to
the next step that was not trained before; what the script itself needed in a warm process to build its model and to
make a first step, in the same job's first round; how much longer the kill took than that; and its parts: until the
script runs again, until its model is built, until the state is restored, until the step. Steps trained twice are
counted.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.goodput import kill, steps_of
from benchmarks.launchers import ELASTICD
from benchmarks.processes import adopt_orphans, end_all
from benchmarks.state import SCRIPT

DEADLINE_S = 120.0
MOMENTS = ("script runs", "built", "restored", "step")


def run(megabytes: float, workers: int, kills: int, every: float, scratch: Path) -> str:
    """One job; its row."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    job = ["--method", "elasticd", "--megabytes", str(megabytes), "--directory", str(directory), "--every", str(every)]
    with (directory / "output.log").open("wb") as output:
        process = subprocess.Popen(
            ELASTICD.start(str(SCRIPT), workers, *job, "--step", "0.02"),
            stdout=output,
            stderr=output,
            env=ELASTICD.full_environment(),
        )
    try:
        first = first_step(directory, 0, 0)
        times = []
        for number in range(kills):
            time.sleep(random.uniform(2.2, 3.0) * every)  # both buffers have been used
            at = time.monotonic()
            before = max(step for step, _ in steps_of(directory))
            kill(directory, random.randrange(workers))
            stepped = first_step(directory, number + 1, before)
            times.append([moment - at for moment in (*moments(directory)[number + 1], stepped)])
        steps = [step for step, _ in steps_of(directory)]
        started, built, restored = moments(directory)[0]
        own = (built - started) + (first - restored)
        return row(megabytes, workers, times, own, len(steps) - len(set(steps)))
    finally:
        process.kill()
        process.wait()
        end_all()
        shutil.rmtree(directory, ignore_errors=True)


def row(megabytes: float, workers: int, times: list[list[float]], own: float, repeated: int) -> str:
    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({max(values):.2f})"

    whole = [each[-1] for each in times]
    parts = [[each[0], *(after - before for before, after in itertools.pairwise(each))] for each in times]
    columns = [cell(whole), f"{own:.2f}", cell([each - own for each in whole])]
    columns += [cell(list(each)) for each in zip(*parts, strict=True)]
    return f"| {megabytes:g} | {workers} | " + " | ".join(columns) + f" | {repeated} |"


def moments(directory: Path) -> list[list[float]]:
    """Of each round of rank 0: CLOCK_MONOTONIC when the script ran, had built its model, had restored its state."""
    path = directory / "moments-0.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[float(word) for word in line.split()] for line in lines]


def first_step(directory: Path, round: int, beyond: int) -> float:
    """When a step after `beyond` was finished first in the n-th round; a survivor may finish one in the old one."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for restored in [each[-1] for each in moments(directory)[round : round + 1]]:
            if found := [at for number, at in steps_of(directory) if number > beyond and at > restored]:
                return found[0]
        if time.monotonic() > deadline:
            raise SystemExit(f"no step; {(directory / 'output.log').read_text()[-2000:]}")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 300])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between saves")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="the disk to write to")
    args = parser.parse_args()
    adopt_orphans()
    columns = ["MB", "workers", "kill to step, s", "script alone", "more than that", *MOMENTS, "trained twice"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    for megabytes in args.megabytes:
        for workers in args.workers:
            print(run(megabytes, workers, args.kills, args.every, args.scratch), flush=True)


if __name__ == "__main__":
    main()
