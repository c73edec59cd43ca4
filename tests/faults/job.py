"""A job under `elasticd run` to do harm to: starts it, follows it, hurts it, and looks what is left of it.

Faults are addressed by (rank, step), in a round if need be, and each one tells when it fires: a test whose fault never
fired fails. Every wait has a deadline; the end of a `Job` kills and reaps whatever it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from elasticd_agent.system.processes import procfs

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_S = 90.0
"""The machine may be busy with other things: this bounds a wait, it measures nothing."""

Event = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """What rank `rank` does to itself right before its step `step`; step 0 is before it joins the group.

    `what`: a signal's name, "exit N" (os._exit), "sys.exit N", "raise TYPE" or "raise MODULE.TYPE", "stop" (it sleeps
    for ever), or "gil" (it holds the GIL for minutes). It happens `times` times at most, in round `round` if one is
    given.
    """

    rank: int
    step: int
    what: str
    round: int | None = None
    times: int = 1


def until(condition: Callable[[], T], what: str | Callable[[], str], within: float = PATIENCE_S) -> T:
    """The first true value of `condition`; fails the test, saying what did not come, when there is none in time."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within:g} s: {what() if callable(what) else what}")
        time.sleep(0.005)
    return value


class Job:
    """One `elasticd run`. `work` is the directory that scripts and tests share."""

    def __init__(
        self,
        work: Path,
        script: str | Path,
        *args: str,
        workers: str = "2",
        flags: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        command: Sequence[str] = ("-m", "elasticd_agent", "run"),
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        stderr: int | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        self.faults = tuple(faults)
        (work / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))
        self.mark = f"ELASTICD_TEST_JOB={uuid.uuid4()}"
        self._log = work / "events.jsonl"
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])
        flags = ["--nproc-per-node", workers, "--event-log", str(self._log), *flags]
        script = SCRIPTS / script if (SCRIPTS / script).exists() else script
        own = {"PYTHONPATH": path, "WORK": str(work), **dict([self.mark.split("=")])}
        with open(work / "out", "ab") as out, open(work / "err", "ab") as err:
            self.process = subprocess.Popen(
                [*prefix, python, *command, *flags, str(script), *args],
                cwd=work,
                env={**os.environ, **own, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if stderr is None else stderr,
            )
        self.pid = self.process.pid

    # --- following -----------------------------------------------------------------------------------------------

    @property
    def out(self) -> str:
        return (self.work / "out").read_text(errors="surrogateescape")

    @property
    def err(self) -> str:
        return (self.work / "err").read_text(errors="surrogateescape")

    def events(self, kind: str | None = None, **having: Any) -> list[Event]:
        """The event log's lines so far, those that say this; the last may not be whole yet."""
        whole = self._log.read_text().rpartition("\n")[0] if self._log.exists() else ""
        found = [json.loads(line) for line in whole.splitlines()]
        having = having if kind is None else {"kind": kind, **having}
        return [event for event in found if having.items() <= event.items()]

    def event(self, kind: str, **having: Any) -> Event:
        """The first such line, once it is there; fails at once when the job ends without it."""

        def look() -> list[Event] | bool:
            over = self.process.poll() is not None
            return self.events(kind, **having) or over

        until(look, lambda: f"{kind} {having}\n{self.report()}")
        found = self.events(kind, **having)
        assert found, f"the job ended without {kind} {having}\n{self.report()}"
        return found[0]

    def wait(self, within: float = PATIENCE_S) -> int:
        """The exit code, once the agent has ended and nothing is left of the job."""
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {within:g} s\n{self.report()}") from None
        self.assert_gone()
        self.assert_fired()
        return code

    def steps(self, rank: int = 0) -> list[tuple[int, int]]:
        """(round, step) of every step that rank finished."""
        path = self.work / f"steps-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(round_), int(step)) for round_, step, *_ in (line.split() for line in lines if line)]

    def step(self, step: int, round: int = 1, rank: int = 0) -> None:
        """Wait until that rank has finished that step in that round or a later one."""

        def look() -> bool:
            assert self.process.poll() is None or (round, step) <= max(self.steps(rank), default=(0, 0)), self.report()
            return (round, step) <= max(self.steps(rank), default=(0, 0))

        until(look, lambda: f"step {step} of rank {rank} in round {round}\n{self.report()}")

    def file(self, name: str, within: float = PATIENCE_S) -> str:
        """A file that the script writes in one go, once it is there."""
        path = self.work / name

        def look() -> bool:
            assert self.process.poll() is None or path.exists(), f"ended without writing {name}\n{self.report()}"
            return path.exists() and path.stat().st_size > 0

        until(look, lambda: f"file {name}\n{self.report()}", within)
        return path.read_text()

    # --- hurting -------------------------------------------------------------------------------------------------

    def worker(self, rank: int, round: int = 1) -> int:
        """That rank's pid."""
        started = self.event("group_started", round=round)
        pid: int = started["pids"][started["ranks"].index(rank)]
        return pid

    def kill(self, rank: int, round: int, signum: int = signal.SIGKILL) -> Event:
        """Signal a rank, and wait until the agent has said that it ended by that."""
        os.kill(self.worker(rank, round), signum)
        return self.event("worker_exited", round=round, rank=rank, signal=int(signum))

    def kill_all(self, ranks: Iterable[int], round: int) -> None:
        """SIGKILL all of them before anybody can answer to the first one's death."""
        pids = {rank: self.worker(rank, round) for rank in ranks}
        owner = self.helper("owner")
        os.kill(owner, signal.SIGSTOP)  # it is what reaps and what kills the rest of a group
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        os.kill(owner, signal.SIGCONT)
        for rank in pids:
            self.event("worker_exited", round=round, rank=rank, signal=int(signal.SIGKILL))

    def helper(self, name: str) -> int:
        """The pid of the job's owner, template ("templ") or store, by the names they go by in `ps`.

        What is parked goes by the same names: the oldest is meant. Numbers of processes begin anew at 32,768.
        """
        comm = f"elasticd-{name}"

        def look() -> int:
            found = [stat for pid in descendants(self.pid) if (stat := procfs.stat(pid)) and stat.comm == comm]
            return min(found, key=lambda stat: stat.start_ticks).pid if found else 0

        return until(look, f"a process called {comm}")

    # --- the end -------------------------------------------------------------------------------------------------

    def assert_fired(self) -> None:
        """Every fault happened as often as it was meant to."""
        fired = (self.work / "fired").read_text().split() if (self.work / "fired").exists() else []
        for number, fault in enumerate(self.faults):
            assert fired.count(str(number)) == fault.times, (
                f"{fault} fired {fired.count(str(number))} times\n{self.report()}"
            )

    def processes(self) -> dict[int, str]:
        """Every process of the job, wherever it went to: by its environment."""
        return {pid: comm_of(pid) for pid in all_pids() if marked(pid, self.mark)}

    def assert_gone(self, within: float = 30.0) -> None:
        """No process, no shared memory, no port."""
        deadline = time.monotonic() + within
        while left := self._left():
            assert time.monotonic() < deadline, f"left after {within:g} s: {left}\n{self.report()}"
            time.sleep(0.01)

    def _left(self) -> list[str]:
        ports = (self.work / "ports").read_text().split() if (self.work / "ports").exists() else []
        return [
            *(f"process {pid} {comm}" for pid, comm in self.processes().items()),
            *map(str, self.memory()),
            *(f"port {port}" for port in set(ports) if listened_to(int(port))),
        ]

    def memory(self) -> list[Path]:
        """The agent's directories, see run.runtime_directory."""
        return [*Path("/dev/shm").glob(f"elasticd-{os.getuid()}-{self.pid}-*")]

    def end(self) -> None:
        """Whatever happened: nothing of the job lives after this. An agent that ended by itself has left nothing."""
        by_itself = self.process.poll() is not None and self.process.returncode >= 0
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        kept = [] if Path("/proc", str(self.pid)).exists() else self.memory()  # or the number is another's by now
        for path in kept:
            shutil.rmtree(path, ignore_errors=True)
        assert not (by_itself and kept), kept

    def report(self) -> str:
        return f"--- events\n{self._log.read_text() if self._log.exists() else ''}--- stderr\n{self.err[-4000:]}"


def all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def marked(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def comm_of(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """False for a zombie, too."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def descendants(pid: int) -> set[int]:
    parents: dict[int, list[int]] = {}
    for child in all_pids():
        parents.setdefault(parent_of(child), []).append(child)
    found: set[int] = set()
    unseen = [pid]
    while unseen:
        children = parents.get(unseen.pop(), [])
        found.update(children)
        unseen += children
    return found


def listened_to(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1)
        return sock.connect_ex(("127.0.0.1", port)) == 0
