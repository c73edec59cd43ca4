"""One running job: started by any launcher, observed through the files its ranks write, and always ended.

Everything is measured from outside and in the same way: by the times that the script's ranks recorded. The launcher
gets no request.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.launchers import ComparedLauncher
from benchmarks.processes import command_line, descendants, end_all, pss_megabytes

SCRIPT = Path(__file__).with_name("scripts") / "steps.py"
_THAW_S = 0.1  # after SIGCONT, before steps count: sockets and caches warm up again
_LOOK_EVERY_S = 0.005  # how often the step files are read; no measured time depends on it


class Stalled(Exception):
    """An awaited event did not happen before the deadline."""


@dataclass(slots=True)
class RankInGroup:
    """The records of one rank of one group so far."""

    pid: int
    first_step: int
    first_time: float
    last_step: int
    last_time: float


@dataclass(frozen=True, slots=True)
class Memory:
    """PSS in MB while all workers are training."""

    agent: float
    launcher: float
    workers: float
    processes: list[dict[str, object]]

    @property
    def total(self) -> float:
        return self.agent + self.launcher + self.workers


class BenchmarkJob:
    """A context: entering starts the launcher, leaving ends every process below it."""

    def __init__(self, launcher: ComparedLauncher, workers: int, directory: Path, *script_args: str) -> None:
        self.launcher, self.workers, self.directory = launcher, workers, directory
        directory.mkdir(parents=True)
        self._command = launcher.start(str(SCRIPT), workers, "--notes", str(directory), *script_args)
        # group (its restart count) -> rank -> its records
        self.groups: dict[int, dict[int, RankInGroup]] = {}
        self._read: dict[int, int] = {}
        self._times_read = 0

    def __enter__(self) -> BenchmarkJob:
        environment = self.launcher.full_environment()
        with (self.directory / "output.log").open("wb") as output:
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait(10)
        stayed = end_all()
        if stayed and kind is None:
            raise Stalled(f"processes that would not die after {self.launcher.name}: {stayed}")

    def wait_for_group(self, newer_than: int, deadline_s: float) -> int:
        """The restart count of the first group newer than this of which every rank has committed a step."""

        def complete() -> int | None:
            ready = [g for g, ranks in self.groups.items() if g > newer_than and len(ranks) == self.workers]
            return min(ready, default=None)

        deadline = time.monotonic() + deadline_s
        while (group := complete()) is None:
            self._look(deadline, "first step of a new group")
        return group

    def first_step_time(self, group: int) -> float:
        """When the last rank of the group had committed its first step."""
        return max(rank.first_time for rank in self.groups[group].values())

    def train(self, group: int, seconds: float, steps: int, deadline_s: float) -> None:
        """Let a group train for at least this long and this many steps since its first one."""
        now = time.monotonic()
        ranks = self.groups[group]
        while time.monotonic() < now + seconds or any(r.last_step - r.first_step < steps for r in ranks.values()):
            self._look(now + deadline_s, f"{steps} steps of group {group}")

    def kill(self, group: int, rank: int) -> float:
        """SIGKILL a rank; the time.monotonic() just before."""
        at = time.monotonic()
        os.kill(self.groups[group][rank].pid, signal.SIGKILL)
        return at

    def freeze(self) -> None:
        """SIGSTOP the launcher and everything below it."""
        self._signal_all(signal.SIGSTOP)

    def thaw_for(self, seconds: float) -> float:
        """Let a frozen job run for so long; rank 0's steps a second meanwhile, less a moment of settling."""
        self._signal_all(signal.SIGCONT)
        time.sleep(_THAW_S)
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        self.freeze()
        self._times_read, new = self._rank0_times(self._times_read)
        return sum(begin <= at < end for at in new) / (end - begin)

    def _signal_all(self, signum: signal.Signals) -> None:
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            os.kill(pid, signum)

    def _rank0_times(self, offset: int) -> tuple[int, list[float]]:
        """When the steps noted after `offset` bytes of the file were done, and how long the file is now."""
        with (self.directory / "rank0.steps").open("rb") as file:
            file.seek(offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        return offset + len(whole), [float(line.split()[3]) for line in whole.splitlines()]

    def wait_for_end(self, deadline_s: float) -> None:
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise Stalled(f"{self.launcher.name} had not ended after {deadline_s:.0f} s") from None
        self._read_steps()
        if code != 0:
            raise Stalled(f"{self.launcher.name} ended with exit code {code}; its output:\n{self._output()}")

    def memory(self, group: int) -> Memory:
        """PSS of the agent (the process we started), the workers with their children, and all the rest."""
        tree = descendants(self.process.pid)
        working = {rank.pid for rank in self.groups[group].values()}
        working |= {below for pid in working for below in descendants(pid)}
        processes: list[dict[str, object]] = []
        sums = {"agent": 0.0, "launcher": 0.0, "workers": 0.0}
        for pid in [self.process.pid, *tree]:
            part = "agent" if pid == self.process.pid else "workers" if pid in working else "launcher"
            pss = pss_megabytes(pid)
            sums[part] += pss
            processes.append({"part": part, "pss_mb": round(pss, 1), "command": command_line(pid)[:120]})
        return Memory(sums["agent"], sums["launcher"], sums["workers"], processes)

    def _look(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise Stalled(f"{self.launcher.name}: no {what} before the deadline")
        if self.process.poll() is not None:
            self._read_steps()
            code = self.process.returncode
            raise Stalled(f"{self.launcher.name} ended by itself with exit code {code}; its output:\n{self._output()}")
        time.sleep(_LOOK_EVERY_S)
        self._read_steps()

    def _read_steps(self) -> None:
        for rank in range(self.workers):
            path = self.directory / f"rank{rank}.steps"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(rank, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[rank] = self._read.get(rank, 0) + len(whole)
            for line in whole.splitlines():
                self._note(rank, line)

    def _output(self) -> str:
        return "\n".join((self.directory / "output.log").read_text(errors="replace").splitlines()[-15:])

    def _note(self, rank: int, line: bytes) -> None:
        group, pid, step, at = line.split()
        ranks = self.groups.setdefault(int(group), {})
        known = ranks.get(rank)
        if known is None:
            ranks[rank] = RankInGroup(int(pid), int(step), float(at), int(step), float(at))
        else:
            known.last_step, known.last_time = int(step), float(at)
