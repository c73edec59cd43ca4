"""SIGKILL of a rank → next step, of the examples with Trainer, Accelerate and Lightning, under elasticd and torchrun.

    .venv-frameworks/bin/python -m benchmarks.frameworks --kills 3

The packages are those of `make test-frameworks`. Under torchrun the same script resumes from the checkpoints that it
has written itself. Seconds: all kills.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--packages", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    options = parser.parse_args()
    for package in options.packages:
        for launcher in (ELASTICD, TORCHRUN_TUNED):
            with tempfile.TemporaryDirectory() as folder:
                seconds = sorted(measure(launcher, package, options.kills, Path(folder)))
            print(f"{package:<13} {launcher.title:<22}", *(f"{each:6.2f}" for each in seconds), flush=True)


if __name__ == "__main__":
    main()
