"""The runner, `elasticd job DIR`: what `elasticd run` is, for one job of an agent.

The runner has its own session, lease, planner and hang detection, so the end, an upgrade or a bug of the agent costs no
training. It holds the lock of its folder while any process of the job exists, answers on a control socket, and writes
its exit last. After `adopt_timeout` without a request from an agent it leaves as after a SIGTERM, so that the other
nodes continue without this one. It never contacts the agent.

The order of its start follows from whom it becomes. As root it may join a control group, read the store's secrets from
a descriptor, and keep a process that holds the locks; then it becomes the job's user, and from that moment other
processes of this user may try to influence it. So it makes itself not dumpable, dies with its keeper, opens its log
without following links, and believes nothing in its folder that it has not opened before.

Its exit file is reserved when it starts, since a disk that is full at the end must not turn a job that succeeded into
one that crashed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError, WireError
from elasticd_agent.config.run_model import RunModel
from elasticd_agent.job import preflight
from elasticd_agent.job.loop import Message
from elasticd_agent.job.reporting import Reporting
from elasticd_agent.job.run import RunContext, run_job
from elasticd_agent.job.worker_setup import removed_sentence
from elasticd_agent.model.job import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE, JobSpec, Policy, RunnerSettings
from elasticd_agent.model.messages import StopRequested
from elasticd_agent.model.version import version
from elasticd_agent.system.files import open_plain, replace_link
from elasticd_agent.system.network.control_socket import VerbHandler
from elasticd_agent.system.processes.cgroups import join_group
from elasticd_agent.system.processes.process import PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_PDEATHSIG, prctl
from elasticd_agent.telemetry import event_log, metrics
from elasticd_daemon.config import job_file
from elasticd_daemon.config.agent_settings import Limits
from elasticd_daemon.config.allow_lists import path_refusal
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.keys import RUNNER_COMM
from elasticd_daemon.runners import liveness
from elasticd_daemon.runners.history import JobHistorySink, RunnerMetrics
from elasticd_daemon.runners.keeper import fork_runner
from elasticd_daemon.runners.spawn import Account, become, blocked_directory_phrase, check_interpreter
from elasticd_daemon.runners.spec import (
    RunnerSpec,
    StoreSecrets,
    exit_for,
    read_spec,
    reserve_exit_space,
    write_exit,
)

MAX_LOG_BYTES = 1 << 20
MAX_WAKE_DELAY_S = 2.0
"""A timer that is later was delayed because this process was stopped or starved, and could not answer meanwhile."""


def job(argv: Sequence[str]) -> int:
    """Run the job of the folder `argv[0]` to its end. Returns the exit code, which is also written to the folder.

    The other arguments are the user to run as, if this process runs as root for another one, and file descriptors: the
    run's lock, the store's secrets, the keeper's lock if there is such a user, and, where the runner was started from a
    copy of the code, the lock of that copy.
    """
    if len(argv) not in (4, 5, 6) or not all(text.isdecimal() for text in argv[2:]):
        raise UsageError("job is an internal command: use elasticd agent --config FILE")
    os.umask(0o077)
    prctl(PR_SET_NAME, RUNNER_COMM)
    _reset_oom_score()
    files = JobFiles(Path(argv[0]))
    lock, secrets_fd, *locks = map(int, argv[2:])
    keeper, code_lock = (fork_runner(locks[0], (lock, secrets_fd)), locks[1:]) if argv[1] else (0, locks)
    for fd in (lock, *code_lock):
        os.set_inheritable(fd, False)
    liveness.write_owner(files.lock)
    try:
        secrets = StoreSecrets.from_fd(secrets_fd)
        spec = read_spec(files)
        if spec.control_group:  # all processes of the job are born in it
            join_group(Path(spec.control_group))
        account = Account.of(argv[1]) if argv[1] else None
        if account is not None:
            refusal = open_plain(files.refusal, os.O_WRONLY | os.O_CREAT)
            # Only now: processes of that user may read the memory and the files of one that is theirs.
            become(account)
            prctl(PR_SET_DUMPABLE, 0)  # the kernel resets it
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                return 1
            with open(refusal, "wb") as file:
                if not os.access(files.root, os.W_OK | os.X_OK):  # it could write no exit there
                    blocked = blocked_directory_phrase(account, files.root, "open it, or move state_dir")
                    why = f"user {account.name!r} may not enter {files.root}{blocked}"
                    file.write(exit_for(spec, 2, why, (), 0).to_json())
                    return 2
    except (OSError, WireError) as error:
        raise UsageError(f"{files.runner_spec}: {error}") from None
    redirect_output_to_log(files)
    return run_to_end(spec, secrets, files, (lock, *code_lock), account)


def redirect_output_to_log(files: JobFiles) -> None:
    """Our output is the agent's until now; the log is opened as the job's user, whose folder may hold any link."""
    with contextlib.suppress(OSError):
        if files.runner_log.stat().st_size > MAX_LOG_BYTES:
            os.rename(files.runner_log, files.runner_log.with_suffix(".log.1"))
    try:
        fd = open_plain(files.runner_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        _print(f"{files.runner_log}: {error.strerror}; the job runs without this log")
        fd = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)


def _reset_oom_score() -> None:
    """The kernel spares the agent when memory runs out, but not its jobs, which use the memory."""
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        if int(score.read_bytes()) < 0:
            score.write_bytes(b"0")


def run_to_end(
    spec: RunnerSpec, secrets: StoreSecrets, files: JobFiles, locks: tuple[int, ...], account: Account | None = None
) -> int:
    """Run the job and write its exit, whatever happens. Returns the exit code.

    `account`: the user that this process has become, None if it is its first user.
    """
    files.runner_exit.unlink(missing_ok=True)
    try:
        reserve_exit_space(files)
    except OSError as error:
        _print(f"{files.root}: {error.strerror}; the job runs anyway")
    history = JobHistorySink()
    try:
        if account is not None:
            check_interpreter(account)
        code = _run(spec, secrets, files, locks, history)
        reason = history.ended.reason if history.ended is not None else f"exit code {code}"
    except (UsageError, StoreUnavailable) as error:
        of_the_store = isinstance(error, (StoreUnavailable, StoreRefused))  # which may be mended; the job is as it is
        code, reason = REQUEUE_EXIT_CODE if of_the_store else 2, str(error)
        _print(f"error: {reason}")
    except OSError as error:  # as a rule this machine has no room, descriptor or process for it at the moment
        traceback.print_exc()
        code, reason = REQUEUE_EXIT_CODE, str(error)
    step = history.ended.step if history.ended is not None else None
    try:
        write_exit(files, exit_for(spec, code, reason, history.rounds, step or 0))
    except OSError as error:
        _print(f"{files.runner_exit}: {error.strerror}; ended with {code}: {reason}")
    return code


def _print(sentence: str) -> None:
    print(f"elasticd job: {sentence}", file=sys.stderr, flush=True)


def checked_model(runner_spec: RunnerSpec, secrets: StoreSecrets, files: JobFiles) -> RunModel:
    """The work of this runner. Raises UsageError if this node cannot run the job."""
    job = job_file.from_json(runner_spec.job_file)
    directories = None if (below := runner_spec.directories) is None else tuple(map(Path, below))
    if wrong := path_refusal(Limits(commands=runner_spec.commands, directories=directories), job):
        raise wrong
    spec, policy, settings = job_file.runner_model(
        job,
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
    settings = replace(settings, metrics_port=None, runtime_dir=None)
    try:
        preflight.check(spec, settings, spec.base_environment(os.environ))
    except UsageError as error:
        raise job_file.in_file_terms(error) from None
    return RunModel(spec, policy, settings)


def _run(
    runner_spec: RunnerSpec, secrets: StoreSecrets, files: JobFiles, locks: tuple[int, ...], history: JobHistorySink
) -> int:
    spec, policy, settings = checked_model(runner_spec, secrets, files)
    context = RunContext(
        make_reporting=lambda *args: RunnerReporting(*args, runner_spec=runner_spec, history=history),
        kept_fds=locks,
        pauses_before_stop=True,
        leave_within_s=runner_spec.drain_timeout_s,
        on_runtime_dir=lambda runtime: replace_link(files.runtime, runtime),
        stop_reason=lambda: liveness.read_stop_reason(locks[0]),
        has_private_code=len(locks) > 1,
    )
    try:
        return run_job(spec, policy, settings, context)
    except UsageError as error:
        if str(error).startswith("--"):  # about a flag, which is a key in a job file
            raise job_file.in_file_terms(error) from None
        raise


class RunnerReporting(Reporting):
    """Adds the job's history to event log and metrics, and the verbs of the control socket."""

    def __init__(
        self,
        spec: JobSpec,
        policy: Policy,
        settings: RunnerSettings,
        node: str,
        runtime: Path,
        *,
        runner_spec: RunnerSpec,
        history: JobHistorySink,
    ) -> None:
        self._runner_spec, self._runtime = runner_spec, runtime
        self._history = history
        super().__init__(spec, policy, settings, node, runtime)
        self._about |= {"number": runner_spec.number, "slots": list(runner_spec.slots), "version": version()}

    def open_events(self, job: str, node: str) -> event_log.EventSink:
        self._history.log = super().open_events(job, node)
        return self._history

    def make_metrics(self, job: str, node: str) -> metrics.Metrics:
        self._metrics = RunnerMetrics(job, node, version())
        return self._metrics

    def verbs(self, status: Callable[[], dict[str, Any]], post: Callable[[Message], None]) -> Mapping[str, VerbHandler]:
        """Return the verbs of the runner's control socket: poll, status, metrics, leave. Each poll shows that an agent
        lives.
        """

        def stop(why: str) -> None:
            post(StopRequested("SIGTERM", TERMINATED_EXIT_CODE, time.monotonic(), why))

        def leave_alone(why: str) -> None:
            stop(why if self._runtime.exists() else removed_sentence(self._runtime))

        watchdog = AgentWatchdog(self._runner_spec.adopt_timeout_s, leave_alone)
        self.callback(watchdog.close)

        def brief() -> dict[str, Any]:
            now = status()
            fields = {
                name: now[name] for name in ("phase", "round", "world_size", "step", "reason", "quarantined_slots")
            }
            alone = all(member["node"] == self._runner_spec.node for member in now["members"])
            return fields | {"alone": alone} | self._about

        def poll(_: Mapping[str, Any]) -> Mapping[str, Any]:
            watchdog.record_contact()
            return brief()

        def full(_: Mapping[str, Any]) -> Mapping[str, Any]:
            return {**status(), **self._about, **self._metrics.status_fields()}

        def leave(request: Mapping[str, Any]) -> Mapping[str, Any]:
            stop(str(request.get("why") or "a stop was requested")[: liveness.MAX_REASON_BYTES])
            return brief()

        return {
            "poll": poll,
            "status": full,
            "metrics": lambda _: {"text": self.metrics.render().decode()},
            "leave": leave,
        }


class AgentWatchdog:
    """Calls `leave` once after `timeout_s` without `record_contact`, except time in which this process was stopped."""

    def __init__(self, timeout_s: float, leave: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._leave = leave
        self._contact_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-agent-watchdog", daemon=True)
        self._thread.start()

    def record_contact(self) -> None:
        """Note that an agent has asked."""
        self._contact_at = time.monotonic()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        """Wait for the timeout, anew after each contact, and longer by as long as this process could not run."""
        while (left := self._contact_at + self._timeout_s - time.monotonic()) > 0:
            wake_at = time.monotonic() + left
            if self._closing.wait(left):
                return
            if (now := time.monotonic()) > wake_at + MAX_WAKE_DELAY_S:
                extended = now - self._timeout_s + min(MAX_WAKE_DELAY_S, self._timeout_s)
                self._contact_at = max(self._contact_at, extended)
        with contextlib.suppress(OSError):
            self._leave(f"no agent has contacted this runner for {self._timeout_s:g} s")
