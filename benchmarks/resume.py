"""From a SIGKILL to the next new step, by the size of the state: the launcher's part, the script's own, the state's.

    python -m benchmarks.resume --megabytes 10 300 --workers 2 4 --kills 5

One job for each row: a random rank is killed, again and again. Reported, as medians (largest): seconds from the kill to
the next step that was not trained before; what the script itself needs in a warm process to build its model and to
make a first step, where it has no state: of as many kills of jobs that save nothing, half of them before and half after
the row's; how much longer the kill took than their median; and its parts: until the script runs again, until its model
is built, until the state is restored, until the step. Steps trained twice are counted. With `--nodes 3` each kill is a
job of one worker on each of three nodes, in which all processes of a random node are killed once.
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
    times: list[list[float]]
    """Of each kill: seconds until each of MOMENTS."""
    repeated: int

    def __add__(self, other: Found) -> Found:
        return Found(self.times + other.times, self.repeated + other.repeated)


@dataclass(frozen=True, slots=True)
class Row:
    megabytes: float
    workers: int
    nodes: int
    every: float
    """Seconds between saves."""
    scratch: Path

    def kills(self, kills: int, method: str) -> Found:
        """`none` for the method: the job has no state, so each round begins at step 1."""
        if self.nodes == 1:
            return self._job(kills, method, [["--standalone"]])
        found = Found([], 0)
        for number in range(kills):  # a lost node stays lost
            with etcd_servers() as etcd:  # it ends with the job's processes
                meet = ["--nnodes", f"{self.nodes - 1}:{self.nodes}", "--rdzv-backend", "etcd"]
                meet += ["--rdzv-id", f"resume-{number}", "--rdzv-endpoint", f"127.0.0.1:{etcd.port}"]
                meet += ["--local-addr", "127.0.0.1"]
                found += self._job(1, method, [[*meet, "--node-id", f"n{node}"] for node in range(self.nodes)])
        return found

    def _job(self, kills: int, method: str, nodes: Sequence[list[str]]) -> Found:
        """`nodes` are the options of each node's launcher."""
        directory = Path(tempfile.mkdtemp(dir=self.scratch))
        job = ["--method", method, "--megabytes", str(self.megabytes), "--directory", str(directory)]
        job += ["--every", str(self.every), "--step", "0.02"]
        with (directory / "output.log").open("wb") as output:
            launchers = [
                subprocess.Popen(
                    [*RUN, *options, "--nproc-per-node", str(self.workers), str(SCRIPT), *job],
                    stdout=output,
                    stderr=output,
                    env=ELASTICD.full_environment(),
                )
                for options in nodes
            ]
        try:
            first_step(directory, 0, 0)
            while not (directory / f"steps-{self.workers * len(nodes) - 1}.log").exists():
                time.sleep(0.1)
            times = []
            for _ in range(kills):
                time.sleep(random.uniform(2.2, 3.0) * self.every)  # both buffers have been used
                rounds = len(moments(directory))
                at = time.monotonic()
                before = 0 if method == "none" else max(step for step, _ in steps_of(directory))
                if len(nodes) == 1:
                    kill(directory, random.randrange(self.workers))
                else:
                    kill_node(random.choice(launchers).pid)
                stepped = first_step(directory, rounds, before)
                times.append([moment - at for moment in (*moments(directory)[rounds], stepped)])
            steps = [step for step, _ in steps_of(directory)]
            return Found(times, len(steps) - len(set(steps)))
        finally:
            for process in launchers:
                process.kill()
                process.wait()
            end_all()
            shutil.rmtree(directory, ignore_errors=True)

    def text(self, own: Found, found: Found) -> str:
        """`own` is of jobs without state."""

        def cell(values: list[float]) -> str:
            return f"{statistics.median(values):.2f} ({max(values):.2f})"

        whole = [each[-1] for each in found.times]
        alone = [stepped - started for started, *_, stepped in own.times]
        parts = [[each[0], *(after - before for before, after in itertools.pairwise(each))] for each in found.times]
        columns = [cell(whole), cell(alone), cell([each - statistics.median(alone) for each in whole])]
        columns += [cell(list(each)) for each in zip(*parts, strict=True)]
        workers = str(self.workers) if self.nodes == 1 else f"{self.nodes} x {self.workers}"
        return f"| {self.megabytes:g} | {workers} | " + " | ".join(columns) + f" | {found.repeated} |"


def kill_node(launcher: int) -> None:
    for pid in [launcher, *descendants(launcher)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
    for megabytes, workers in itertools.product(args.megabytes, args.workers if args.nodes == 1 else [1]):
        row = Row(megabytes, workers, args.nodes, args.every, args.scratch)
        own = row.kills((args.kills + 1) // 2, "none")
        found = row.kills(args.kills, "elasticd")
        own += row.kills((args.kills + 1) // 2, "none")
        print(row.text(own, found), flush=True)


if __name__ == "__main__":
    main()
