"""The runner, `python -m elasticd_agent job DIR`: what `elasticd run` is, for one job of a daemon's.

It exists so that the daemon's death, upgrade or mistake costs training nothing: the runner has its own session, lease,
planner and judgement. It holds a lock for as long as anything of it is left, answers at a control socket, and writes
last how it ended. When no daemon has spoken to it for `adopt_timeout` it leaves by itself, as after a SIGTERM, so that
the other nodes go on without this one. It never speaks to the daemon first, and never starts anything but its job.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticd.errors import UsageError, WireError
from elasticd_agent.config import job_file as jobfile
from elasticd_agent.job import preflight
from elasticd_agent.job.loop import Message
from elasticd_agent.job.reporting import Reporting
from elasticd_agent.job.run import RunContext, run_job
from elasticd_agent.model.exit_codes import TERMINATED
from elasticd_agent.model.job import AgentSettings, JobSpec, Policy
from elasticd_agent.model.job_dir import JobFiles
from elasticd_agent.model.messages import StopRequested
from elasticd_agent.model.version import version
from elasticd_agent.node.keys import RUNNER_COMM
from elasticd_agent.node.runners import liveness as alive
from elasticd_agent.node.runners.history import RoundHistory, RunnerMetrics
from elasticd_agent.node.runners.spec import (
    MAX_WHY_CHARS,
    RunnerSpec,
    StoreSecrets,
    exit_for,
    leave_reason,
    read_spec,
    reserve_exit_space,
    write_exit,
)
from elasticd_agent.system.control_socket import Verb
from elasticd_agent.system.files import replace_link
from elasticd_agent.system.process import prctl
from elasticd_agent.telemetry import event_log as eventlog
from elasticd_agent.telemetry import metrics

PR_SET_NAME = 15
MAX_WAKE_DELAY_S = 2.0
"""Whoever wakes up so much later than it wanted to was stopped or starved, and has not heard the daemon meanwhile."""


def job(argv: Sequence[str]) -> int:
    """Run the job of the folder `argv[0]` to its end. Returns the exit code, which the folder then says, too.

    `argv[1]` is the file descriptor that holds the folder's lock, `argv[2]` the one with what opens the store.
    """
    if len(argv) != 3 or not all(text.isdecimal() for text in argv[1:]):
        raise UsageError("job is for the daemon to call: elasticd agent --config FILE")
    os.umask(0o077)
    prctl(PR_SET_NAME, RUNNER_COMM)
    _reset_oom_score()
    files, lock, handed = JobFiles(Path(argv[0])), int(argv[1]), int(argv[2])
    os.set_inheritable(lock, False)
    alive.write_owner(lock)
    try:
        order, secrets = read_spec(files), StoreSecrets.from_fd(handed)
    except (OSError, WireError) as error:
        raise UsageError(f"{files.runner_spec}: {error}") from None
    return _run_to_end(order, secrets, files, lock)


def _reset_oom_score() -> None:
    """The daemon may be spared when memory runs out; a job is not, lest it outlives what the machine needs."""
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        if int(score.read_text()) < 0:
            score.write_text("0")


def _run_to_end(spec: RunnerSpec, secrets: StoreSecrets, files: JobFiles, lock: int) -> int:
    files.runner_exit.unlink(missing_ok=True)
    try:
        reserve_exit_space(files)
    except OSError as error:
        print(f"elasticd job: {files.root}: {error.strerror}; the job runs all the same", file=sys.stderr, flush=True)
    book = RoundHistory()
    try:
        code = _run(spec, secrets, files, lock, book)
        reason = book.ended.reason if book.ended is not None else f"exit code {code}"
    except UsageError as error:
        code, reason = 2, str(error)
        print(f"elasticd job: error: {reason}", file=sys.stderr, flush=True)
    step = book.ended.step if book.ended is not None else None
    try:
        write_exit(files, exit_for(spec, code, reason, book.rounds, step or 0))
    except OSError as error:
        print(
            f"elasticd job: {files.runner_exit}: {error.strerror}; ended with {code}: {reason}",
            file=sys.stderr,
            flush=True,
        )
    return code


def _run(runner_spec: RunnerSpec, secrets: StoreSecrets, files: JobFiles, lock: int, history: RoundHistory) -> int:
    wanted = jobfile.from_json(runner_spec.job_file)
    spec, policy, settings = jobfile.run_model(
        wanted,
        job_id=runner_spec.job,
        run=str(runner_spec.number),
        node=runner_spec.node,
        slots=runner_spec.slots,
        rendezvous=runner_spec.rendezvous(secrets),
        files=files,
        devices=runner_spec.devices,
        user=runner_spec.job_user,
    )
    spec = replace(spec, signals=tuple(dict.fromkeys(("SIGTERM", *spec.signals))))
    settings = replace(settings, event_log=files.events, metrics_port=None, live=False, runtime_dir=None)
    try:
        preflight.check(spec, settings, spec.base_environment(os.environ))
    except UsageError as error:
        raise jobfile.in_keys(str(error)) from None
    host = RunContext(
        reporting=lambda *how: RunnerReporting(*how, runner_spec=runner_spec, history=history),
        kept_fds=(lock,),
        pauses_before_stop=True,
        leave_within_s=runner_spec.drain_timeout_s,
        on_runtime_dir=lambda runtime: replace_link(files.runtime, runtime),
        stop_reason=lambda: leave_reason(files),
    )
    try:
        return run_job(spec, policy, settings, host)
    except UsageError as error:
        if str(error).startswith("--"):  # of a flag, which is a key in a job file
            raise jobfile.in_keys(str(error)) from None
        raise


class RunnerReporting(Reporting):
    """What a runner tells, and what it answers."""

    def __init__(
        self,
        spec: JobSpec,
        policy: Policy,
        settings: AgentSettings,
        node: str,
        runtime: Path,
        *,
        runner_spec: RunnerSpec,
        history: RoundHistory,
    ) -> None:
        self._runner_spec, self._history = runner_spec, history
        super().__init__(spec, policy, settings, node, runtime)
        self._about |= {"number": runner_spec.number, "slots": list(runner_spec.slots), "version": version()}

    def open_events(self, job: str, node: str) -> eventlog.EventSink:
        self._history.log = super().open_events(job, node)
        return self._history

    def open_metrics(self, job: str, node: str) -> metrics.MetricsRecorder:
        self._rates = RunnerMetrics(job, node, version())
        return self._rates

    def verbs(self, status: Callable[[], dict[str, Any]], post: Callable[[Message], None]) -> Mapping[str, Verb]:
        def leave(why: str) -> None:
            post(StopRequested("SIGTERM", TERMINATED, time.monotonic(), why))

        tether = AgentWatchdog(self._runner_spec.adopt_timeout_s, leave)
        self.callback(tether.close)

        def brief() -> dict[str, Any]:
            now = status()
            said = {name: now[name] for name in ("phase", "round", "world_size", "step", "reason", "benched")}
            alone = all(member["node"] == self._runner_spec.node for member in now["members"])
            return said | {"alone": alone} | self._about

        def here(_: Mapping[str, Any]) -> Mapping[str, Any]:
            tether.contacted()
            return brief()

        def whole(_: Mapping[str, Any]) -> Mapping[str, Any]:
            rate = {"steps_per_second": self._rates.steps_per_second, "step_samples": self._rates.step_track.points()}
            rate["goodput"] = round(self.reporter.spent().goodput, 4)
            return {**status(), **self._about, "pid": os.getpid(), **rate, **self._history.snapshot()}

        def asked_to_leave(request: Mapping[str, Any]) -> Mapping[str, Any]:
            leave(str(request.get("why") or "asked to leave")[:MAX_WHY_CHARS])
            return brief()

        return {
            "here": here,
            "status": whole,
            "metrics": lambda _: {"text": self.metrics.render().decode()},
            "leave": asked_to_leave,
        }


class AgentWatchdog:
    """Calls `leave` once when `held` was not called for `seconds`, in time that this process could have heard it."""

    def __init__(self, timeout_s: float, leave: Callable[[str], None]) -> None:
        self._timeout_s, self._leave = timeout_s, leave
        self._contact_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-tether", daemon=True)
        self._thread.start()

    def contacted(self) -> None:
        self._contact_at = time.monotonic()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while (left := self._contact_at + self._timeout_s - time.monotonic()) > 0:
            wake_at = time.monotonic() + left
            if self._closing.wait(left):
                return
            if time.monotonic() > wake_at + MAX_WAKE_DELAY_S:
                self._contact_at = max(
                    self._contact_at, time.monotonic() - self._timeout_s + min(MAX_WAKE_DELAY_S, self._timeout_s)
                )
        with contextlib.suppress(OSError):
            self._leave(f"no daemon has spoken to this runner for {self._timeout_s:g} s")
