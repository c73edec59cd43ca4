"""Runs the repository's scripts as a person would: real launchers, real processes, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 100.0


class Ran:
    """A command running in a folder of its own, its output in a file beside it."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._output = folder.with_suffix(".output")
        paths = [str(REPOSITORY), str(REPOSITORY / "agents"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # For scripts that no elasticd has started.
            "ELASTICD_CHECKPOINT_DIR": os.environ.get("ELASTICD_CHECKPOINT_DIR", str(folder / "checkpoints")),
        }
        self.deadline = time.monotonic() + DEADLINE_S
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(max(0.0, self.deadline - time.monotonic()))

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None, f"it ended too early:\n{self.output}"
            assert time.monotonic() < self.deadline, f"it did not come to that:\n{self.output}"
            time.sleep(0.01)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


Run = Callable[..., Ran]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be growing."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
