"""The cost of an agent's death for its job, and of the agent without faults.

    python benchmarks/daemon.py [--times 10] [--workers 2] [--out bench-results/daemon.json]

A job of DDP workers makes steps of 200 ms. After a calm minute the agent is, in turn, killed with SIGKILL and started
again, and upgraded in place (SIGUSR2), `--times` times each. Reported: workers that were restarted, and for each of
these events the longest step from it until it has been back for 5 s, against the slowest step of the calm minute. Then,
with the job running on and without any job: the processor time that the agent and the runner take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticd_daemon.api.client import AgentClient

REPOSITORY = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "scripts" / "steps.py"
STEP_S = 0.2
CALM_S = 60.0
AFTER_S = 5.0
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class MeasuredFault:
    """One event: for how long the agent was away, and the longest step meanwhile, in seconds."""

    kind: str
    away_s: float
    longest_s: float
    ratio: float
    restarted: int


class InstalledAgent:
    """One `elasticd agent` with a local store, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.config = folder / "agent.toml"
        head = [f'state_dir = "{self.state}"', f'run_dir = "{folder / "run"}"', 'node = "bench"', "slots = 8"]
        self.config.write_text("\n".join([*head, "[http]", "port = 0", "[health]", "all_reduce = false"]))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])
        before = self.joined()
        with open(self.folder / "agent.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elasticd_agent", "agent", "--config", str(self.config)],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: self.joined() > before, "the agent to take part")

    def submit(self, name: str, notes: Path, workers: int) -> None:
        """A job that makes steps and writes them into `notes`."""
        command = [str(SCRIPT), "--notes", str(notes), "--pause", str(STEP_S)]
        job = {"id": name, "command": command, "workdir": str(notes), "workers": workers}
        AgentClient(self.folder / "run" / "agent.sock").post("/v1/jobs", json.dumps(job).encode()).result()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def upgrade(self) -> None:
        assert self.process is not None
        before = self.joined()
        self.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: self.joined() > before, "the agent to come back")

    def drain(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)

    def joined(self) -> int:
        path = self.state / "logs" / "events.jsonl"
        return path.read_text().count('"kind": "node_registered"') if path.exists() else 0

    def runner(self) -> int:
        return int((self.state / "runners" / "bench.1" / "lock").read_text().split()[0])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


@dataclass(slots=True)
class StepLog:
    """What the ranks wrote of their steps."""

    folder: Path
    workers: int

    def steps(self, rank: int = 0) -> list[tuple[int, float]]:
        """(pid, when it ended) of every step."""
        path = self.folder / f"rank{rank}.steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), float(at)) for _, pid, _, at in (line.split() for line in lines)]

    def between(self, begin: float, end: float) -> list[float]:
        """How long the steps were that ended in this time, of all ranks."""
        found: list[float] = []
        for rank in range(self.workers):
            ends = [at for _, at in self.steps(rank)]
            found += [b - a for a, b in itertools.pairwise(ends) if begin <= b <= end]
        return found

    def pids(self) -> set[int]:
        return {pid for rank in range(self.workers) for pid, _ in self.steps(rank)}


def wait_for(condition: object, what: str, within_s: float = PATIENCE_S) -> None:
    assert callable(condition)
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        time.sleep(0.02)


def cpu_s(pid: int) -> float:
    """Processor seconds of one process, its threads included, its children not."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(pids: Sequence[int], seconds: float) -> list[float]:
    """What each of these takes of one core, in percent, for so long."""
    before = [cpu_s(pid) for pid in pids]
    began = time.monotonic()
    time.sleep(seconds)
    lasted = time.monotonic() - began
    return [100 * (cpu_s(pid) - then) / lasted for pid, then in zip(pids, before, strict=True)]


def hurt(agent: InstalledAgent, notes: StepLog, kind: str, calm_s: float) -> MeasuredFault:
    began, known = time.monotonic(), notes.pids()
    if kind == "kill -9":
        agent.kill()
        agent.start()
    else:
        agent.upgrade()
    back = time.monotonic()
    time.sleep(AFTER_S)
    longest = max(notes.between(began, time.monotonic()))
    return MeasuredFault(kind, back - began, longest, longest / calm_s, len(notes.pids() - known))


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="elasticd-bench-daemon-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def measure(times: int, workers: int, idle_s: float) -> dict[str, object]:
    faults: list[MeasuredFault] = []
    with folder() as place:
        agent, notes = InstalledAgent(place), StepLog(place, workers)
        try:
            agent.start()
            agent.submit("bench", place, workers)
            wait_for(lambda: len(notes.steps()) > 5, "steps")
            time.sleep(CALM_S)
            now = time.monotonic()
            calm = notes.between(now - CALM_S, now)
            for number in range(2 * times):
                faults.append(hurt(agent, notes, ("kill -9", "upgrade")[number % 2], max(calm)))
                print(f"{faults[-1]}", flush=True)
            busy = share([agent.pid, agent.runner()], idle_s)
        finally:
            agent.drain()
    with folder() as place:
        agent = InstalledAgent(place)
        try:
            agent.start()
            time.sleep(5)
            (idle,) = share([agent.pid], idle_s)
        finally:
            agent.drain()
    return {
        "steps_s": {"median": statistics.median(calm), "slowest of the calm minute": max(calm)},
        "faults": [asdict(fault) for fault in faults],
        "percent of a core": {"agent with a job": busy[0], "runner": busy[1], "agent without a job": idle},
    }


def describe(found: dict[str, object]) -> str:
    faults = [MeasuredFault(**one) for one in found["faults"]]  # type: ignore[attr-defined]
    lines = [f"steps without faults: {found['steps_s']}"]
    for kind in ("kill -9", "upgrade"):
        of = [fault for fault in faults if fault.kind == kind]
        ratios, away = sorted(f.ratio for f in of), sorted(f.away_s for f in of)
        lines.append(
            f"{kind}: {len(of)} times, workers restarted {sum(f.restarted for f in of)}, longest step against the "
            f"slowest of the calm minute: median {statistics.median(ratios):.2f}, most {ratios[-1]:.2f}; "
            f"the agent was away for {statistics.median(away):.2f} s (most {away[-1]:.2f})"
        )
    return "\n".join([*lines, f"processor time, percent of a core: {found['percent of a core']}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds for which processor time is measured")
    parser.add_argument("--out", type=Path, default=Path("bench-results/daemon.json"))
    args = parser.parse_args()
    found = measure(args.times, args.workers, args.idle)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(describe(found))
    faults = found["faults"]
    assert isinstance(faults, list)
    return 0 if all(fault["restarted"] == 0 and fault["ratio"] <= 2 for fault in faults) else 1


if __name__ == "__main__":
    sys.exit(main())
