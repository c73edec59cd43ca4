"""From a SIGKILL to the next new step, by the size of the state: the launcher's part, the script's own, the state's.

    python -m benchmarks.resume --megabytes 10 300 --workers 2 4 --kills 5

One job for each row: a random rank is killed, again and again. Reported, as medians (largest): seconds from the kill to
the next step that was not trained before; what the script itself needed in a warm process to build its model and to
make a first step, in the same job's first round; how much longer the kill took than that; and its parts: until the
script runs again, until its model is built, until the state is restored, until the step. Steps trained twice are
counted. With `--nodes 3` each row is three jobs of one worker on each of three nodes, and in each of them all processes
of a random node are killed once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.goodput import kill, steps_of
from benchmarks.launchers import ELASTICD
from benchmarks.processes import adopt_orphans, descendants, end_all
from benchmarks.state import SCRIPT
from tests.etcd import etcd_servers

DEADLINE_S = 120.0
RUN = (sys.executable, "-m", "elasticd_agent", "run", "--max-restarts", "1000")
MOMENTS = ("script runs", "built", "restored", "step")


@dataclass(frozen=True, slots=True)
class Found:
    """In one job."""

    times: list[list[float]]
    """Of each kill: seconds until each of MOMENTS."""
    own: float
    repeated: int


def run(megabytes: float, workers: int, kills: int, every: float, scratch: Path, nodes: Sequence[list[str]]) -> Found:
    """One job; `nodes` are the options of each node's launcher."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    job = ["--method", "elasticd", "--megabytes", str(megabytes), "--directory", str(directory), "--every", str(every)]
    with (directory / "output.log").open("wb") as output:
        launchers = [
            subprocess.Popen(
                [*RUN, *options, "--nproc-per-node", str(workers), str(SCRIPT), *job, "--step", "0.02"],
                stdout=output,
                stderr=output,
                env=ELASTICD.full_environment(),
            )
            for options in nodes
        ]
    try:
        first = first_step(directory, 0, 0)
        while not (directory / f"steps-{workers * len(nodes) - 1}.log").exists():
            time.sleep(0.1)
        times = []
        for _ in range(kills):
            time.sleep(random.uniform(2.2, 3.0) * every)  # both buffers have been used
            rounds = len(moments(directory))
            at = time.monotonic()
            before = max(step for step, _ in steps_of(directory))
            if len(nodes) == 1:
                kill(directory, random.randrange(workers))
            else:
                kill_node(random.choice(launchers).pid)
            stepped = first_step(directory, rounds, before)
            times.append([moment - at for moment in (*moments(directory)[rounds], stepped)])
        steps = [step for step, _ in steps_of(directory)]
        started, built, restored = moments(directory)[0]
        return Found(times, (built - started) + (first - restored), len(steps) - len(set(steps)))
    finally:
        for process in launchers:
            process.kill()
            process.wait()
        end_all()
        shutil.rmtree(directory, ignore_errors=True)


def kill_node(launcher: int) -> None:
    for pid in [launcher, *descendants(launcher)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def lose_nodes(megabytes: float, nodes: int, losses: int, every: float, scratch: Path) -> Found:
    """One job for each loss."""
    found = []
    for number in range(losses):
        with etcd_servers() as etcd:  # it ends with the job's processes
            meet = ["--nnodes", f"{nodes - 1}:{nodes}", "--rdzv-backend", "etcd", "--rdzv-id", f"resume-{number}"]
            meet += ["--rdzv-endpoint", f"127.0.0.1:{etcd.port}", "--local-addr", "127.0.0.1"]
            options = [[*meet, "--node-id", f"n{node}"] for node in range(nodes)]
            found.append(run(megabytes, 1, 1, every, scratch, options))
    own = statistics.median(each.own for each in found)
    return Found([each.times[0] for each in found], own, sum(each.repeated for each in found))


def row(megabytes: float, workers: str, found: Found) -> str:
    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({max(values):.2f})"

    whole = [each[-1] for each in found.times]
    parts = [[each[0], *(after - before for before, after in itertools.pairwise(each))] for each in found.times]
    columns = [cell(whole), f"{found.own:.2f}", cell([each - found.own for each in whole])]
    columns += [cell(list(each)) for each in zip(*parts, strict=True)]
    return f"| {megabytes:g} | {workers} | " + " | ".join(columns) + f" | {found.repeated} |"


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
    parser.add_argument("--nodes", type=int, default=1, help="lose one of so many nodes with one worker each")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between saves")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="the disk to write to")
    args = parser.parse_args()
    adopt_orphans()
    columns = ["MB", "workers", "kill to step, s", "script alone", "more than that", *MOMENTS, "trained twice"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    for megabytes in args.megabytes:
        if args.nodes > 1:
            found = lose_nodes(megabytes, args.nodes, args.kills, args.every, args.scratch)
            print(row(megabytes, f"{args.nodes} x 1", found), flush=True)
            continue
        for workers in args.workers:
            found = run(megabytes, workers, args.kills, args.every, args.scratch, [["--standalone"]])
            print(row(megabytes, str(workers), found), flush=True)


if __name__ == "__main__":
    main()
