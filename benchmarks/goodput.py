"""Steps that count under faults: ranks are killed, and the job's distinct steps are compared with the undisturbed rate.

    python -m benchmarks.goodput --megabytes 600 --every 10 --kill 20 60 --seconds 300

For each way of saving: the same launcher first runs undisturbed and without saving, then with saves only, then with a
SIGKILL of a random rank every so many seconds. Reported: distinct steps over the undisturbed rate times the time, steps
trained twice, and kills. The ways: elasticd, torchrun with a synchronous torch.save, torchrun with DCP's async_save.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launchers import ComparedLauncher
from benchmarks.processes import adopt_orphans, end_all
from benchmarks.state import SCRIPT, WAYS

START_DEADLINE_S = 120.0
WARM_UP_S = 5.0
"""After the first step, before anything counts: imports, page faults, the first save's memory."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Rank 0's steps in a window of time."""

    seconds: float
    distinct: int
    repeated: int
    kills: int

    @property
    def rate(self) -> float:
        return self.distinct / self.seconds


def steps_of(directory: Path) -> list[tuple[int, float]]:
    """(step, CLOCK_MONOTONIC) of every step that rank 0 has finished, in the order of time."""
    with contextlib.suppress(FileNotFoundError):
        lines = (directory / "steps-0.log").read_text().splitlines()
        return [(int(line.split()[0]), float(line.split()[1])) for line in lines if len(line.split()) == 2]
    return []


def run(
    launcher: ComparedLauncher, method: str, args: argparse.Namespace, every: float, kill_s: float, seconds: float
) -> Trained:
    """One job of `seconds` after its warm-up, with a kill every `kill_s` (0: none)."""
    directory = Path(tempfile.mkdtemp(dir=args.scratch))
    job = ["--method", method, "--megabytes", str(args.megabytes), "--directory", str(directory)]
    job += ["--every", str(every), "--step", str(args.step)]
    with (directory / "output.log").open("wb") as output:
        process = subprocess.Popen(
            launcher.start(str(SCRIPT), args.workers, *job),
            stdout=output,
            stderr=output,
            env=launcher.full_environment(),
        )
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not steps_of(directory):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{method}: no step; {(directory / 'output.log').read_text()[-2000:]}")
            time.sleep(0.05)
        time.sleep(WARM_UP_S)
        start = time.monotonic()
        kills = 0
        while (now := time.monotonic()) < start + seconds:
            if kill_s and now >= start + (kills + 1) * kill_s:
                kills += kill(directory, random.randrange(args.workers))
            time.sleep(0.02)
        before = {step for step, at in steps_of(directory) if at < start}
        counted = [step for step, at in steps_of(directory) if start <= at < start + seconds]
        distinct = set(counted) - before
        return Trained(seconds, len(distinct), len(counted) - len(distinct), kills)
    finally:
        process.kill()
        process.wait()
        end_all()
        shutil.rmtree(directory, ignore_errors=True)


def kill(directory: Path, rank: int) -> int:
    """SIGKILL the rank's present process; 1 if it was there."""
    try:
        os.kill(int((directory / f"pid-{rank}").read_text()), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=float, default=10, help="seconds between checkpoints")
    parser.add_argument("--kill", type=float, nargs="*", default=[20, 60], help="seconds between kills")
    parser.add_argument("--seconds", type=float, default=300, help="of each job with kills")
    parser.add_argument("--undisturbed", type=float, default=60, help="seconds of each job without")
    parser.add_argument("--step", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--methods", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="the disk to write to")
    args = parser.parse_args()
    adopt_orphans()
    print(
        "| way | faults | distinct steps / undisturbed | steps a second | trained twice | kills |\n" + "|---" * 6 + "|"
    )
    for method in args.methods:
        launcher = WAYS[method]
        base = run(launcher, method, args, 0.0, 0.0, args.undisturbed)
        rows = [("none, no saves", base), ("none", run(launcher, method, args, args.every, 0.0, args.undisturbed))]
        for kill_s in args.kill:
            rows.append((f"every {kill_s:g} s", run(launcher, method, args, args.every, kill_s, args.seconds)))
        for faults, found in rows:
            cells = f"{found.rate / base.rate:.2f} | {found.rate:.2f} | {found.repeated} | {found.kills}"
            print(f"| {method} | {faults} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
