"""Steps that count under faults: one job is disturbed for a while, then left alone, again and again.

    python -m benchmarks.goodput --megabytes 600 --every 10 --kill 0 60 --cycles 6

In a disturbed block the job saves every so many seconds, and a random rank gets a SIGKILL (0: none); in the block after
it nothing is saved. Blocks begin and end with a step. Reported for each way of saving: distinct steps a second in the
disturbed blocks over those in the undisturbed block of the same cycle, as median (least to most), since one job's rate
changes by more from minute to minute than saving costs; steps trained twice; kills. The ways: elasticd, with and
without a spare and ranks that stay, torchrun with a synchronous torch.save, torchrun with DCP's async_save. A cycle
takes `--disturbed` (or the time between kills) and `--undisturbed` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
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
SETTLE_S = 3.0
"""Of an undisturbed block, before it counts: the last save may still be on its way to the disk."""
WARM_UP_SAVES = 2.5
"""Times the time between saves: both buffers have been filled."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rank 0's steps between two of them."""

    seconds: float
    distinct: int
    repeated: int
    kills: int = 0

    @property
    def rate(self) -> float:
        return self.distinct / self.seconds


def steps_of(directory: Path) -> list[tuple[int, float]]:
    """(step, CLOCK_MONOTONIC) of every step that rank 0 has finished, in the order of time."""
    with contextlib.suppress(FileNotFoundError):
        lines = (directory / "steps-0.log").read_text().splitlines()
        return [(int(line.split()[0]), float(line.split()[1])) for line in lines if len(line.split()) == 2]
    return []


class Trained:
    """A job that trains, and saves while `saving` is set."""

    def __init__(self, launcher: ComparedLauncher, method: str, args: argparse.Namespace) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=args.scratch))
        self.workers = args.workers
        job = ["--method", method, "--megabytes", str(args.megabytes), "--directory", str(self.directory)]
        job += ["--every", str(args.every), "--step", str(args.step)]
        with (self.directory / "output.log").open("wb") as output:
            self.process = subprocess.Popen(
                launcher.start(str(SCRIPT), args.workers, *job),
                stdout=output,
                stderr=output,
                env=launcher.full_environment(),
            )

    def next_step(self) -> float:
        """When the next step is finished, a new one: CLOCK_MONOTONIC."""
        before = max((step for step, _ in steps_of(self.directory)), default=0)
        deadline = time.monotonic() + START_DEADLINE_S
        while not (found := [at for step, at in steps_of(self.directory) if step > before]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no step; {(self.directory / 'output.log').read_text()[-2000:]}")
            time.sleep(0.05)
        return found[0]

    def set_saving(self, saving: bool) -> None:
        flag = self.directory / "no-saves"
        if saving:
            flag.unlink(missing_ok=True)
        else:
            flag.touch()

    def block(self, seconds: float, saving: bool, kill_after: float = 0.0) -> Block:
        """Until the first new step after `seconds`; a random rank is killed after `kill_after` (0: none)."""
        start, kills = self.next_step(), 0
        self.set_saving(saving)
        if kill_after:
            time.sleep(max(start + kill_after - time.monotonic(), 0.0))
            kills = kill(self.directory, random.randrange(self.workers))
        time.sleep(max(start + seconds - time.monotonic(), 0.0))
        end = self.next_step()
        before = {step for step, at in steps_of(self.directory) if at <= start}
        counted = [step for step, at in steps_of(self.directory) if start < at <= end]
        distinct = set(counted) - before
        return Block(end - start, len(distinct), len(counted) - len(distinct), kills)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        end_all()
        for line in (self.directory / "output.log").read_text().splitlines():
            if "has not saved" in line or "cannot save" in line:  # why steps were trained twice
                print(line, file=sys.stderr)
        shutil.rmtree(self.directory, ignore_errors=True)


def run(launcher: ComparedLauncher, method: str, args: argparse.Namespace, kill_s: float) -> list[tuple[Block, Block]]:
    """One job; of each cycle the disturbed block and the undisturbed one."""
    job = Trained(launcher, method, args)
    try:
        job.next_step()
        time.sleep(WARM_UP_SAVES * args.every)
        cycles = []
        for _ in range(args.cycles):
            length = kill_s or args.disturbed
            disturbed = job.block(length, True, random.uniform(0.1, 0.6) * length if kill_s else 0.0)
            job.set_saving(False)
            time.sleep(SETTLE_S)
            cycles.append((disturbed, job.block(args.undisturbed, False)))
        return cycles
    finally:
        job.end()


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
    parser.add_argument("--kill", type=float, nargs="*", default=[0, 60], help="seconds between kills; 0: none")
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--disturbed", type=float, default=30, help="seconds of a block without kills")
    parser.add_argument("--undisturbed", type=float, default=20, help="seconds of a block without saves")
    parser.add_argument("--step", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--methods", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="the disk to write to")
    args = parser.parse_args()
    adopt_orphans()
    columns = ["way", "kills", "distinct steps / undisturbed", "steps a second", "trained twice", "killed"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for method in args.methods:
        for kill_s in args.kill:
            cycles = run(WAYS[method], method, args, kill_s)
            shares = [disturbed.rate / left.rate for disturbed, left in cycles]
            rates = statistics.median(left.rate for _, left in cycles)
            cells = [method, f"every {kill_s:g} s" if kill_s else "none"]
            cells += [f"{statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})", f"{rates:.2f}"]
            cells += [str(sum(each.repeated for each, _ in cycles)), str(sum(each.kills for each, _ in cycles))]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
