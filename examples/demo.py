"""`make demo`: train a small GPT on four CPU workers, SIGKILL one in the middle, and show that nothing was lost.

It runs `elasticd run … train_lm.py`, waits until the loss log reaches a step drawn at random, kills a rank drawn at
random from outside, waits for the job's end and reports; demo.png shows it. The same --seed draws the same
step and rank. It writes demo-run/ and demo.png and nothing else. Exit code 1 if the fault did not fire, the job did not
recover, or did not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_picture import KilledWorker, draw

TRAIN = Path(__file__).with_name("train_lm.py")
SAY_EVERY_S = 30.0
"""Without a terminal, too: at its start a busy machine may be silent for minutes."""


class DemoFailed(Exception):
    """Something the demo promises did not happen; the message says what."""


def main() -> int:
    args = parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10_000)
    rng = random.Random(seed)
    # Not at a checkpoint: then some steps must be trained again, and can be compared.
    at_steps = sorted(rng.sample([s for s in kill_window(args.steps) if s % args.checkpoint_every], args.kills))
    folder: Path = args.folder
    make_folder(folder)
    print(f"demo: {args.workers} workers, {args.steps} steps; --seed {seed} draws the same faults again", flush=True)
    watch = DemoLogs(folder / "events.jsonl", folder / "loss.jsonl")
    try:
        with running(command(args, folder), args.deadline) as job:
            faults = [watch.kill_at(step, rng, job) for step in at_steps]
            watch.until(lambda: job.poll() is not None, job, "the job's end")
        watch.read()
        report(watch, faults, args.steps, job.returncode)
        os.environ.setdefault("MPLCONFIGDIR", str(folder / "matplotlib"))  # its font cache: nothing outside our folder
        draw(watch.events, watch.losses, faults, args.picture)
    except DemoFailed as failed:
        print(f"demo: FAILED: {failed}", file=sys.stderr)
        return 1
    print(f"demo: the picture is {args.picture}, the logs and checkpoints are in {folder}/")
    return 0


def kill_window(steps: int) -> range:
    """Steps at which a fault may fire: the middle of the run, with steps to lose before and to train after."""
    return range(max(2, steps // 4), max(3, steps * 3 // 4))


def command(args: argparse.Namespace, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "elasticd_agent", "run", "--nproc-per-node", str(args.workers)),
        *("--checkpoint-dir", str(folder / "checkpoints"), "--event-log", str(folder / "events.jsonl")),
        *(str(TRAIN), "--steps", str(args.steps), "--checkpoint-every", str(args.checkpoint_every)),
        *("--loss-log", str(folder / "loss.jsonl"), *args.train_args),
    ]


@contextmanager
def running(command: list[str], deadline_s: float) -> Iterator[DemoJob]:
    """The job, ended with everything it started however this block is left."""
    process = subprocess.Popen(command)
    try:
        yield DemoJob(process, deadline_s)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(40)  # more than the 30 s elasticd grants its workers
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True, slots=True)
class DemoJob:
    """The elasticd process, and how long the demo waits for its next step or event."""

    process: subprocess.Popen[bytes]
    deadline_s: float

    def poll(self) -> int | None:
        return self.process.poll()

    def patience_s(self) -> float:
        """`deadline_s`, times as long as a process waits for a processor."""
        return self.deadline_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    @property
    def returncode(self) -> int:
        return self.process.returncode


@dataclass(slots=True)
class DemoLogs:
    """Follows the event log and the loss log while the job writes them."""

    event_log: Path
    loss_log: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)
    moved_at: float = field(default_factory=time.monotonic)
    """When one of them had a new line."""
    _read: dict[Path, int] = field(default_factory=dict)

    def kill_at(self, step: int, rng: random.Random, job: DemoJob) -> KilledWorker:
        """Wait until a step is committed in a group that is complete, then SIGKILL one of its workers."""

        def reached() -> bool:
            return bool(self.losses) and self.losses[-1]["step"] >= step and self.group() is not None

        self.until(reached, job, f"step {step}")
        group = self.group()
        assert group is not None
        rank = rng.randrange(len(group["pids"]))
        pid = group["pids"][rank]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        print(f"demo: SIGKILL to rank {rank} (pid {pid}) after step {self.losses[-1]['step']}", flush=True)
        self.until(lambda: self.first_step_after(at) is not None, job, "the first step after the fault")
        again = self.first_step_after(at)
        assert again is not None
        print(f"demo: recovered in {again['mono'] - at:.3f} s (SIGKILL to the new group's first step)", flush=True)
        return KilledWorker(at=at, rank=rank, pid=pid, round=group["round"], back_at=again["mono"])

    def group(self) -> dict[str, Any] | None:
        """The group that is training now, by its group_started event."""
        started = [e for e in self.events if e["kind"] == "group_started"]
        return started[-1] if started and started[-1]["round"] == self.losses[-1]["round"] else None

    def first_step_after(self, at: float) -> dict[str, Any] | None:
        return next((e for e in self.events if e["kind"] == "first_step" and e["mono"] > at), None)

    def until(self, condition: Callable[[], bool], job: DemoJob, what: str) -> None:
        began = said = time.monotonic()
        while not condition():
            ended = job.poll() is not None
            self.read()
            if condition():
                return
            if ended:
                raise DemoFailed(f"the job ended with exit code {job.returncode} before {what}")
            now, patience_s = time.monotonic(), job.patience_s()
            if now > self.moved_at + patience_s:
                raise DemoFailed(f"{what} did not come, nor any other step or event in the last {patience_s:.0f} s")
            if now > said + SAY_EVERY_S:
                said = now
                print(f"demo: waiting for {what} for {now - began:.0f} s, {self.newest()}", flush=True)
            time.sleep(0.02)

    def newest(self) -> str:
        if self.losses:
            return f"now after step {self.losses[-1]['step']}"
        return f"the last event is {self.events[-1]['kind']}" if self.events else "elasticd is starting"

    def read(self) -> None:
        events, losses = self._new_lines(self.event_log), self._new_lines(self.loss_log)
        self.events += events
        self.losses += losses
        if events or losses:
            self.moved_at = time.monotonic()

    def _new_lines(self, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def report(watch: DemoLogs, faults: list[KilledWorker], steps: int, exit_code: int) -> None:
    """Print what happened. Raises DemoFailed if it is not what the demo promises."""
    for fault in faults:
        killed = [e for e in watch.events if e["kind"] == "worker_exited" and e["pid"] == fault.pid]
        if not killed or killed[0]["signal"] != signal.SIGKILL:
            raise DemoFailed(f"the fault did not fire: no event shows that pid {fault.pid} was killed by SIGKILL")
    if exit_code != 0 or watch.losses[-1]["step"] != steps:
        raise DemoFailed(f"exit code {exit_code} at step {watch.losses[-1]['step']} of {steps}")
    by_step: dict[int, list[float]] = {}
    for line in watch.losses:
        by_step.setdefault(line["step"], []).append(line["loss"])
    repeated = [values for values in by_step.values() if len(values) > 1]
    same = sum(len(set(values)) == 1 for values in repeated)
    seconds = watch.losses[-1]["mono"] - watch.losses[0]["mono"]
    end = statistics.fmean(values[-1] for values in list(by_step.values())[-20:])
    print(f"demo: finished {steps} steps in {seconds:.0f} s; {len(faults)} fault(s), exit code {exit_code}")
    print(f"demo: {len(repeated)} steps after the last checkpoint were trained again, {same} with the very same loss")
    print(f"demo: loss {by_step[1][0]:.3f} at step 1, {end:.3f} at the end (mean of the last 20 steps)")


def make_folder(folder: Path) -> None:
    """An empty folder; an earlier demo's is replaced, anything else is left alone."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "events.jsonl").exists():
        raise SystemExit(f"demo: {folder} exists and is not from an earlier demo; move it away or give --folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "events.jsonl").touch()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="what is killed, and when (default: drawn, and printed)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("demo-run"))
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    parser.add_argument(
        "--deadline",
        type=float,
        default=900.0,
        help="give up after so many seconds without progress, later on a busy machine",
    )
    parser.add_argument("train_args", nargs="*", help="after --: more arguments for train_lm.py")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
