"""Runs one script under torchrun and under elasticd, side by side, and reads what each of its ranks reported."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 180.0
"""A run takes 15 s on two idle cores."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
ELASTICD = ("-m", "elasticd_agent", "run")

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launcher's run ended and what its workers wrote into `out`."""

    out: Path
    code: int
    stdout: str
    stderr: str
    remains: list[str]

    def facts(self, rank: int = 0) -> Facts:
        """What the rank reported; the run's own folder is called <out> in it."""
        path = self.out / f"facts-{rank}.json"
        assert path.exists(), f"rank {rank} did not report:\n{self.stdout}\n{self.stderr}"
        found: Facts = json.loads(path.read_text().replace(str(self.out), "<out>"))
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in (self.out / "events.jsonl").read_text().splitlines())
        return [event for event in lines if event["kind"] == kind]

    @property
    def warm(self) -> bool:
        """True if every group was forked from the warm launcher."""
        started = self.events("group_started")
        assert started, self.stderr
        return all(event["warm"] for event in started)

    @property
    def why_cold(self) -> str:
        return " ".join(event["reason"] for event in self.events("launcher_ready") if event["mode"] == "cold")


class Launched:
    """A launcher that is running, its output in files beside the folder its workers report to."""

    def __init__(
        self,
        out: Path,
        command: list[str],
        cwd: Path,
        environment: dict[str, str] | None = None,
        stdin: str = "",
        terminal: int | None = None,
    ) -> None:
        out.mkdir(parents=True)
        self.out = out
        self.mark = f"PROBE_MARK={uuid.uuid4()}"
        unwanted = ("OMP_NUM_THREADS", "PYTHONPATH", "PYTEST_CURRENT_TEST")
        given = {name: value for name, value in os.environ.items() if name not in unwanted}
        given |= {"PROBE_OUT": str(out), "PROBE_LEAVES_OUT": ""} | (environment or {})
        given |= dict([self.mark.split("=")])
        paths = [str(REPOSITORY), str(REPOSITORY / "agents"), given.get("PYTHONPATH", "")]
        given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        (out / "stdin").write_text(stdin)
        self.deadline = time.monotonic() + DEADLINE_S
        with open(out / "stdin") as source, open(out / "stdout", "wb") as stdout, open(out / "stderr", "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=cwd,
                env=given,
                stdin=source if terminal is None else terminal,
                stdout=stdout if terminal is None else terminal,
                stderr=stderr if terminal is None else terminal,
                start_new_session=True,
            )

    def outcome(self) -> Outcome:
        """Wait for it to end, or end it when it is late; what of it is still there afterwards is told, and ended."""
        try:
            code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(30)
        remains = self.remains()
        until = time.monotonic() + 30
        while remains and time.monotonic() < until:
            time.sleep(0.05)
            remains = self.remains()
        for pid in remains:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        stdout, stderr = ((self.out / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Outcome(self.out, code, stdout, stderr, list(remains.values()))

    def remains(self) -> dict[int, str]:
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self.mark.encode() in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    command = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry)] = f"{entry}: {command}"
        return found


@dataclass(frozen=True, slots=True)
class Both:
    """The same script under both launchers."""

    torchrun: Outcome
    elasticd: Outcome


def both(
    folder: Path, workers: int, script: list[str], cwd: Path, options: tuple[str, ...] = (), **launch: Any
) -> Both:
    """Run `script` with its arguments under torchrun and elasticd at the same time."""
    common = ["--nproc-per-node", str(workers), *options]
    under_torchrun = Launched(folder / "torchrun", [*TORCHRUN, *common, *script], cwd, **launch)
    under_elasticd = under(folder / "elasticd", [*common, *script], cwd, **launch)
    return Both(under_torchrun.outcome(), under_elasticd.outcome())


def under(out: Path, command: list[str], cwd: Path, **launch: Any) -> Launched:
    """Start elasticd with an event log in its folder."""
    return Launched(out, [*ELASTICD, "--event-log", str(out / "events.jsonl"), *command], cwd, **launch)


def copied(folder: Path, *names: str) -> Path:
    """A folder holding copies of the scripts with these names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(SCRIPTS / name, folder / Path(name).name)
    return folder


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Every leaf where two reports differ, in words: what elasticd's says and what torchrun's says."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            line
            for key in {**theirs, **ours}
            for line in differences(ours.get(key, "(absent)"), theirs.get(key, "(absent)"), f"{at}/{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and ours != theirs:
        if len(ours) == len(theirs) <= 8:
            pairs = zip(ours, theirs, strict=True)
            return [line for index, pair in enumerate(pairs) for line in differences(*pair, f"{at}/{index}")]
        more, fewer = [x for x in ours if x not in theirs], [x for x in theirs if x not in ours]
        if more or fewer:
            return [f"{at}: elasticd also has {more}, torchrun also has {fewer}"]
    return [] if ours == theirs else [f"{at}: elasticd {ours!r}, torchrun {theirs!r}"]
