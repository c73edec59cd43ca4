"""The files of one run of one job in the node's state directory.

The job's user owns one folder of a run; the agent trusts nothing in it. What the agent relies on is in a second folder,
which that user cannot enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class JobFiles:
    root: Path  #: `<state>/jobs/<job>.<number>/`, 0700 and its user's: what the runner writes

    def __post_init__(self) -> None:
        self.agent_folder = self.root.parent.parent / "runners" / self.root.name  #: 0700 and the agent's
        self.runner_spec = self.agent_folder / "runner-spec.json"  #: RunnerSpec; may hold secrets, so it is in no argv
        self.lock = self.agent_folder / "lock"  #: locked (flock) while a process of the job lives; liveness.py
        self.keeper_lock = self.agent_folder / "keeper"  #: locked by the keeper of another user's job; keeper.py
        self.refusal = self.agent_folder / "refused.json"  #: RunnerExit of a job that could not be started
        self.end_mark = self.agent_folder / "ended"  #: its mtime: when the run was first seen to have ended, 0 before
        self.runtime = self.root / "run"  #: the runner's runtime directory, with its control socket `control`
        self.logs = self.root / "logs"
        self.events = self.root / "events.jsonl"
        self.runner_log = self.root / "runner.log"  #: what `elasticd run` would print
        self.runner_exit = self.root / "exit.json"  #: RunnerExit, written last


def job_files(state: Path, job: str, number: int) -> JobFiles:
    return JobFiles(state / "jobs" / f"{job}.{number}")
