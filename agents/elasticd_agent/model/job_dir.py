"""The files of one run of one job in the node's state directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JobFiles:
    """One run of one job on this node: `<state>/jobs/<job>.<number>/`, all of it 0600 in a 0700 folder."""

    root: Path

    @property
    def runner_spec(self) -> Path:
        """The RunnerSpec as JSON. It may hold secrets, so it is passed neither in argv nor in the environment."""
        return self.root / "order.json"

    @property
    def lock(self) -> Path:
        """Locked (flock) by the runner for as long as it lives; contains its pid."""
        return self.root / "lock"

    @property
    def runtime(self) -> Path:
        """The runner's runtime directory; its control socket is `control` in it."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def output(self) -> Path:
        """The runner's own output, what `elasticd run` would print."""
        return self.root / "runner.log"

    @property
    def leave_reason(self) -> Path:
        """Why the daemon stops the runner: one line, written before the SIGTERM is sent."""
        return self.root / "leave"

    @property
    def runner_exit(self) -> Path:
        """The RunnerExit as JSON, written last."""
        return self.root / "exit.json"


def job_files(state: Path, job: str, number: int) -> JobFiles:
    return JobFiles(state / "jobs" / f"{job}.{number}")
