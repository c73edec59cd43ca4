"""The files of one run of one job in the node's state directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class JobFiles:
    """`<state>/jobs/<job>.<number>/`, all of it 0600 in a 0700 folder."""

    root: Path

    def __post_init__(self) -> None:
        self.runner_spec = self.root / "order.json"  #: RunnerSpec; may hold secrets, so not in argv or the environment
        self.lock = self.root / "lock"  #: locked (flock) by the runner for as long as it lives; contains its pid
        self.runtime = self.root / "run"  #: the runner's runtime directory, with its control socket `control`
        self.logs = self.root / "logs"
        self.events = self.root / "events.jsonl"
        self.output = self.root / "runner.log"  #: what `elasticd run` would print
        self.leave_reason = self.root / "leave"  #: why the daemon stops the runner: written before the SIGTERM
        self.runner_exit = self.root / "exit.json"  #: RunnerExit, written last


def job_files(state: Path, job: str, number: int) -> JobFiles:
    return JobFiles(state / "jobs" / f"{job}.{number}")
