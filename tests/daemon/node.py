"""An `elasticd agent` for fault tests: starts it, follows it and its runners, injects faults, and checks what is left.

Every wait has a deadline. The end of a `Node` kills and reaps whatever the agent or its runners have started: they are
found by their state directory and by their job's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticd_agent.system.network import control_socket as control
from elasticd_daemon.api.client import AgentClient
from elasticd_daemon.job_dir import JobFiles, job_files
from elasticd_daemon.runners import liveness as alive
from elasticd_daemon.runners import poller as visiting
from elasticd_daemon.runners.spec import RunnerExit, read_exit
from tests.faults.job import REPOSITORY, SCRIPTS, Event, all_pids, comm_of, descendants, marked, until
from tests.faults.job import alive as lives

COLD = "${local_rank}"
"""An argument that makes the workers' start cold, which is quicker where torch is not needed."""


def toml(value: object) -> str:
    """Enough of TOML for what tests write."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value))


class AgentNode:
    """One agent. `work` is the directory that its jobs' scripts share with the test."""

    def __init__(self, root: Path, name: str, mark: str, **settings: Any) -> None:
        self.root, self.name, self.mark = root, name, mark
        self.work, self.state = root / "work", root / "state"
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "faults.json").write_text("[]")
        self.settings: dict[str, Any] = {
            "node": name,
            "slots": 2,
            "state_dir": self.state,
            "run_dir": root / "run",
            **settings,
        }
        self.settings.setdefault("http", {"port": 0})
        self.settings.setdefault("health", {"all_reduce": False, "disk_free_min": "1MB"})
        self.jobs: list[dict[str, Any]] = []
        self.python, self.path = sys.executable, [str(REPOSITORY), str(REPOSITORY / "agents")]
        self.process: subprocess.Popen[bytes] | None = None
        self.popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
        """Starts the agent; a host's own has it live there."""
        self.config = root / "agent.toml"

    # --- configuration --------------------------------------------------------------------------------------------

    def job(self, name: str, script: str, *args: str, **how: Any) -> dict[str, Any]:
        """Have a job submitted by the next `start` or `submit_jobs`."""
        job = self.job_table(name, script, *args, **how)
        self.jobs.append(job)
        return job

    def job_table(self, name: str, script: str, *args: str, **how: Any) -> dict[str, Any]:
        path = SCRIPTS / script if (SCRIPTS / script).exists() else Path(__file__).parent / "scripts" / script
        env = {"WORK": str(self.work), "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'agents'}", **self.marked()}
        return {
            "id": name,
            "command": [str(path), *args],
            "workdir": str(self.work),
            "env": env | how.pop("env", {}),
            **how,
        }

    def marked(self) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        return {name: value}

    def write(self) -> Path:
        lines = [f"{key} = {toml(value)}" for key, value in self.settings.items()]
        self.config.write_text("\n".join(lines) + "\n")
        return self.config

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self, *flags: str, prefix: Sequence[str] = (), wait: bool = True, **env: str) -> AgentNode:
        """Start the agent, and wait until it takes part."""
        assert self.process is None or self.process.poll() is not None
        joined = len(self.events("node_registered"))
        self.write()
        path = os.pathsep.join(self.path)
        with open(self.root / "agent.log", "ab") as log:
            self.process = self.popen(
                [*prefix, self.python, "-m", "elasticd_agent", "agent", "--config", str(self.config), *flags],
                cwd=self.root,  # `-m` would import elasticd from a checkout that is the current directory
                env={**os.environ, "PYTHONPATH": path, **self.marked(), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if wait:
            self.until(lambda: len(self.events("node_registered")) > joined, "the agent to take part")
            self.submit_jobs()
        return self

    def submit_jobs(self) -> None:
        """Submit what `job` has described since the last time."""
        while self.jobs:
            body = json.dumps(self.jobs.pop(0)).encode()
            reply = self.unix().post("/v1/jobs", body)
            assert reply.code == 201, reply

    @property
    def socket(self) -> Path:
        return self.root / "run" / "agent.sock"

    def unix(self) -> AgentClient:
        return AgentClient(self.socket)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(20)

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, within: float = 60.0) -> int:
        """Its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent did not end within {within:g} s\n{self.log}") from None

    def drain(self, within: float = 60.0) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(within)

    def upgrade(self) -> None:
        """SIGUSR2, and wait until it has come back as the same process."""
        started = len(self.events("agent_started"))
        joined = len(self.events("node_registered"))
        self.signal(signal.SIGUSR2)
        self.until(lambda: len(self.events("agent_started")) > started, "the agent to replace itself")
        self.until(lambda: len(self.events("node_registered")) > joined, "the agent to take part again")
        assert self.events("agent_started")[-1]["pid"] == self.pid

    # --- following ------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        path = self.root / "agent.log"
        return path.read_text(errors="surrogateescape") if path.exists() else ""

    def events(self, kind: str | None = None, **having: Any) -> list[Event]:
        """The agent's own."""
        return _events(self.state / "logs" / "events.jsonl", kind, having)

    def event(self, kind: str, **having: Any) -> Event:
        self.until(lambda: self.events(kind, **having), f"{kind} {having}")
        return self.events(kind, **having)[0]

    def wait_for_log(self, text: str, within: float = 60.0) -> str:
        """The first line of its log that has this text, once it is there."""
        self.until(lambda: text in self.log, f"it to say {text!r}", within)
        return next(line for line in self.log.splitlines() if text in line)

    def until(self, condition: Any, what: str, within: float = 60.0) -> Any:
        def look() -> Any:
            found = condition()
            if not found and self.process is not None and self.process.poll() is not None:
                found = condition()
                assert found, f"the agent has ended with {self.process.returncode} before {what}\n{self.log}"
            return found

        return until(look, lambda: f"{what}\n{self.log}", within)

    # --- its jobs -------------------------------------------------------------------------------------------------

    def files(self, job: str, number: int = 1) -> JobFiles:
        return job_files(self.state, job, number)

    def job_events(self, job: str, kind: str | None = None, number: int = 1, **having: Any) -> list[Event]:
        return _events(self.files(job, number).events, kind, having)

    def runner(self, job: str, number: int = 1) -> int:
        """The pid of the job's runner, once it has one."""
        lock = self.files(job, number).lock
        found = until(lambda: alive.lock_owner(lock), lambda: f"a runner of {job}\n{self.diagnostics()}")
        return found.pid

    def workers(self, job: str, number: int = 1) -> tuple[int, ...]:
        """The pids of the newest group's workers, once it has started."""
        started = until(
            lambda: self.job_events(job, "group_started", number), lambda: f"workers of {job}\n{self.diagnostics()}"
        )
        return tuple(started[-1]["pids"])

    def request(self, job: str, do: str, number: int = 1) -> dict[str, Any]:
        return control.send_request(self.files(job, number).runtime / control.SOCKET_NAME, {"do": do}, 10)

    def wait_for_exit(self, job: str, number: int = 1, within: float = 60.0) -> RunnerExit:
        found = until(lambda: read_exit(self.files(job, number)), lambda: f"{job} to end\n{self.diagnostics()}", within)
        return found

    def request_as_agent(self, job: str, do: str, number: int = 1) -> dict[str, Any]:
        """As the daemon asks a runner of another user's."""
        return visiting.ask_runner(self.files(job, number), {"do": do}, 10)

    def steps(self, rank: int = 0) -> list[tuple[int, int]]:
        """(round, step) of every step that rank finished here."""
        path = self.work / f"steps-{rank}"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [(int(round_), int(step)) for round_, step, *_ in (line.split() for line in lines if line)]

    def wait_for_step(self, step: int, rank: int = 0, within: float = 60.0) -> None:
        """Wait until that rank has finished that step here."""
        reached = lambda: max((s for _, s in self.steps(rank)), default=0) >= step  # noqa: E731
        until(reached, lambda: f"step {step} of rank {rank}\n{self.diagnostics()}", within)

    def diagnostics(self) -> str:
        """Everything there is to read, for a test that fails."""
        runners = "".join(
            f"--- {path.parent.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.state.glob("jobs/*/runner.log"))
        )
        return f"--- agent\n{self.log[-6000:]}{runners}"

    # --- the end --------------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Every process of the agent's and its jobs', wherever it went to: by its environment."""
        return {pid: comm_of(pid) for pid in all_pids() if marked(pid, self.mark)}

    def job_is_running(self, job: str, number: int = 1) -> bool:
        """True while the job's runner, or what it started, is there."""
        return alive.is_locked(self.files(job, number).lock)

    def assert_gone(self, within: float = 60.0) -> None:
        """No process is left of it, nor shared memory of its runners."""
        deadline = time.monotonic() + within
        while left := self.processes():
            assert time.monotonic() < deadline, f"left after {within:g} s: {left}\n{self.diagnostics()}"
            time.sleep(0.02)

    def end(self) -> None:
        """Whatever happened: nothing of it lives after this."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        left = self.processes()
        for pid, comm in left.items():
            if comm == "elasticd-job":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _events(path: Path, kind: str | None, having: Mapping[str, Any]) -> list[Event]:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []  # a hostile job writes anything
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    found = [event for event in found if isinstance(event, dict)]
    wanted = having if kind is None else {"kind": kind, **having}
    return [event for event in found if wanted.items() <= event.items()]


__all__ = ["COLD", "AgentNode", "comm_of", "descendants", "lives", "toml", "until"]
