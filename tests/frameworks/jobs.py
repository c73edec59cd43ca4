"""A script under `elasticd run`, with faults at known places, and what it has trained in the end."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.examples.launching import Ran, Run, json_lines


@dataclass
class Job:
    """One run of a script in a folder; runs in the same folder continue each other."""

    run: Run
    folder: Path
    script: Path
    package: str
    first: tuple[str, ...] = ()
    """The script's first arguments."""

    def start(self, workers: object, *arguments: object, options: tuple[object, ...] = ()) -> Ran:
        elastic = ("--nproc-per-node", workers, "--checkpoint-dir", self.folder / "checkpoints")
        seen = ("--event-log", self.folder / "events", "--preload", self.package)
        output = ("--output", self.folder / "output")
        return self.run(
            "-m", "elasticd_agent", "run", *elastic, *seen, *options, self.script, *self.first, *output, *arguments
        )

    def finish(self, workers: object, *arguments: object) -> Ran:
        ran = self.start(workers, *arguments)
        assert ran.wait() == 0, ran.output
        return ran

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in json_lines(self.folder / "events") if each["kind"] == kind]

    def saved(self, step: int) -> bool:
        """A checkpoint of that step or a later one is on the disk."""
        names = (path.name for path in (self.folder / "checkpoints").glob("r*-s*"))
        return any(int(name.partition("-s")[2].partition(".")[0]) >= step for name in names)

    def kill(self, rank: int) -> None:
        os.kill(self.events("group_started")[-1]["pids"][rank], signal.SIGKILL)

    def checkpoint(self) -> dict[str, Any]:
        """The newest checkpoint's content."""
        newest = max((self.folder / "checkpoints").glob("r*-s*"), key=lambda path: path.stat().st_mtime)
        loaded: dict[str, Any] = torch.load(newest / "state.pt", weights_only=True)
        return loaded
