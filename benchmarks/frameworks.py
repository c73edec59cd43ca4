"""SIGKILL of a rank → next step, of the examples with Trainer, Accelerate and Lightning, under elasticd and torchrun.

    .venv-frameworks/bin/python -m benchmarks.frameworks --kills 2

The packages are those of `make test-frameworks`. Both launchers take turns, each with a new job; under torchrun, at its
best, the same script resumes from the checkpoints that it has written itself. Prints the seconds of all kills and the
ratio of the medians, and the bytes of a checkpoint; exit code 1 where torchrun takes less than LEAST times as long.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launchers import ELASTICD, TORCHRUN_TUNED, ComparedLauncher

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {"transformers": "hf_trainer.py", "accelerate": "accelerate_loop.py", "lightning": "lightning_fit.py"}
STEPS_BETWEEN = 30
LEAST = 3.0
DEADLINE_S = 120.0

Step = tuple[float, int]
"""When a rank finished a step, and its process."""


def steps_of(log: Path) -> list[Step]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [(float(moment), int(pid)) for moment, pid in (line.split() for line in lines if line.count(" ") == 1)]


def wait_for(log: Path, dead: set[int], count: int, process: subprocess.Popen[bytes]) -> list[Step]:
    """The steps of processes that live, once there are so many."""
    deadline = time.monotonic() + DEADLINE_S
    while len(found := [each for each in steps_of(log) if each[1] not in dead]) < count:
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError(f"no {count} steps in {DEADLINE_S:g} s")
        time.sleep(0.01)
    return found


def measure(launcher: ComparedLauncher, package: str, kills: int, folder: Path) -> list[float]:
    """Seconds from each kill to the first step of a new process."""
    log = folder / "steps"
    traced = str(ROOT / "benchmarks" / "scripts" / "traced_example.py")
    script = (str(log), str(ROOT / "examples" / EXAMPLES[package]))
    own = ["--checkpoint-dir", str(folder / "checkpoints"), "--preload", package] if launcher is ELASTICD else []
    argv = launcher.start(traced, 2, *script, "--epochs", "100000", "--output", str(folder / "output"))
    argv[len(launcher.command) : len(launcher.command)] = own
    environment = {**launcher.full_environment(), "ELASTICD_CHECKPOINT_DIR": str(folder / "checkpoints")}
    found, dead = [], set[int]()
    with open(folder / "log", "wb") as output:
        process = subprocess.Popen(argv, env=environment, cwd=folder, stdout=output, stderr=output)
    try:
        for _ in range(kills):
            alive = {pid for _, pid in wait_for(log, dead, 2 * STEPS_BETWEEN, process)}
            os.kill(random.choice(sorted(alive)), signal.SIGKILL)
            killed_at = time.monotonic()
            dead |= alive
            found.append(wait_for(log, dead, 1, process)[0][0] - killed_at)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return found


def state_bytes(folder: Path) -> int:
    """The largest checkpoint in it."""
    files = (path for path in folder.glob("checkpoints/r*-s*/state.pt"))
    return max((path.stat().st_size for path in files), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2, help="in each job")
    parser.add_argument("--turns", type=int, default=1, help="jobs of each launcher")
    parser.add_argument("--packages", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    options = parser.parse_args()
    slow = 0
    for package in options.packages:
        seconds: dict[str, list[float]] = {}
        size = 0
        for _ in range(options.turns):
            for launcher in (ELASTICD, TORCHRUN_TUNED):
                with tempfile.TemporaryDirectory() as folder:
                    found = measure(launcher, package, options.kills, Path(folder))
                    size = max(size, state_bytes(Path(folder)))
                seconds.setdefault(launcher.title, []).extend(found)
        for title, each in seconds.items():
            print(f"{package:<13} {title:<22}", *(f"{one:6.2f}" for one in sorted(each)), flush=True)
        ours, theirs = map(statistics.median, seconds.values())
        slow += theirs < LEAST * ours
        print(f"{package:<13} {theirs / ours:.1f} times as fast, {size / 1e6:.1f} MB of state, 2 ranks", flush=True)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
