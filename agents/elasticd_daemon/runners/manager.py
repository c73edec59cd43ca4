"""The runners of one node: starts them, adopts those of an earlier agent, stops them, and notices their end.

A runner is identified by the lock of its run and by its process's identity, never by a bare pid, so no other process is
ever signalled. Everything except `alive` belongs to the main loop's thread.

A runner outlives the agent that started it, since an upgrade of the agent must not restart training. So its life cannot
be known from being its parent. Three things are known about it instead:
- The lock of its folder. The runner and its keeper hold it through one open file description, which their children
  inherit. It is free exactly when no process of the run is left, whichever of them were killed.
- The identity of its process: pid and start time, written beside the lock, and a pidfd. A pid that was given to another
  process has another start time.
- Its control socket, over which it reports what it runs, as long as it answers.

A run is over when its lock is free, and only then are its slots given to another job: two runs on one GPU would take
each other's memory. When the runner was killed and processes of it remain, its owner ends them within
`REMNANT_GRACE_S`; after that they are killed from here, found by the lock that they hold. Two empty scans in a row are
required before the agent believes that it cannot find them, as a scan of /proc may miss a process that is just being
forked.

A folder with an unreadable spec still counts as a runner if its lock is taken. It may use any slot, so none is given
away until it has reported what it runs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from elasticd.errors import UsageError, WireError
from elasticd.sigterm import TOGETHER_S
from elasticd_agent.system.files import replace_file
from elasticd_agent.system.network.control_socket import ControlSocketError
from elasticd_agent.system.processes import cgroups, procfs
from elasticd_daemon.job_dir import JobFiles, job_files
from elasticd_daemon.keys import RUNNER_COMM
from elasticd_daemon.runners import liveness
from elasticd_daemon.runners.liveness import ProcessIdentity, ScanComplete
from elasticd_daemon.runners.poller import RunnersPoller, ask_runner
from elasticd_daemon.runners.reconcile import LocalRunner, RunnerEnd
from elasticd_daemon.runners.spawn import Account, NodeRefusesJob, missing_capability_sentence, spawn
from elasticd_daemon.runners.spec import RunnerSpec, StoreSecrets, exit_for, read_exit, read_spec

LAST_SAVE_S = 10.0
"""The time from a runner's own deadline, when it has its workers' last step saved and kills them, to the second
SIGTERM, which saves nothing. Without the store no other node answers before that deadline."""
SECOND_SIGTERM_GRACE_S = 5.0
"""The time from the second SIGTERM, after which a runner kills its workers, to its own SIGKILL."""
MIN_SIGTERM_INTERVAL_S = 2 * TOGETHER_S
"""The least time between two SIGTERMs to a runner: on a busy machine it may receive the first one late."""
REMNANT_GRACE_S = 25.0
"""The time for the owner of a killed runner to end its processes; after it they are killed from here."""
EMPTY_SCANS_NEEDED = 2
"""Scans of /proc, as far apart as that: one may miss a process that is forked meanwhile, two in a row do not."""
SPEC_REQUEST_TIMEOUT_S = 2.0
"""The time for all runners with unreadable specs together to report what they run."""
IDENTITY_GRACE_S = 1.0
"""A runner writes its identity at once; if it is still missing, the disk was full or the file is damaged."""


@dataclass(slots=True, eq=False)
class ManagedRunner:
    """A runner of this node, as far as it is known: its spec, its processes, and the deadlines of its end."""

    spec: RunnerSpec
    files: JobFiles
    state: Literal["starting", "running", "leaving"] = "starting"
    why: str = ""
    stop_requested: bool = False
    process: ProcessIdentity | None = None
    pidfd: int | None = None
    child: subprocess.Popen[bytes] | None = None  #: the runner, or its keeper
    keeper: ProcessIdentity | None = None
    """The keeper of an adopted runner: it may be our child from before an exec of ourselves."""
    process_not_found: bool = False  #: the lock names no live process, and none that has it is a runner
    search_owner_at: float = field(default_factory=lambda: time.monotonic() + IDENTITY_GRACE_S)
    leave_deadline: float | None = None
    kill_at: float | None = None
    remnants_deadline: float | None = None
    empty_scans: int = 0
    """The scans in a row in which the lock was taken, but no process of the job's user had it: its descriptor is in a
    socket or another user's process, or a process that has it was being forked during the scan of /proc."""
    tree_before_kill: tuple[ProcessIdentity, ...] = ()
    last_status: Mapping[str, Any] | None = None
    job_uid: int | None = field(init=False, default=None)
    """The owner of its folder, which only the agent can replace."""

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):
            self.job_uid = self.files.root.stat().st_uid

    @property
    def key(self) -> tuple[str, int]:
        return self.spec.job, self.spec.number

    @property
    def summary(self) -> LocalRunner:
        return LocalRunner(self.spec, self.state, self.why)

    def is_running(self) -> bool:
        """The runner process itself; the locks show whether any other process of the job is left."""
        if self.child is not None and (self.process is None or self.child.pid == self.process.pid):
            return self.child.poll() is None
        if self.process is None:
            # Its identity is not written yet, or could not be.
            return not self.process_not_found and liveness.has_processes(self.files)
        with contextlib.suppress(ChildProcessError):  # our child from before an exec of ourselves
            os.waitpid(self.process.pid, os.WNOHANG)
        if self.pidfd is None:
            return self.process.alive
        poll = select.poll()  # needs no file descriptor: without a free one a live runner must not count as dead
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def signal(self, signum: int) -> None:
        """Signal the runner through its pidfd, which can name no other process."""
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def reap_keeper(self) -> None:
        """It has released its lock, so it is ending."""
        if self.child is not None:
            self.child.wait()
        elif self.keeper is not None:
            stat = procfs.stat(self.keeper.pid)
            if stat is not None and stat.start_ticks == self.keeper.start_ticks:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self.keeper.pid, 0)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class RunnerManager:
    """The runners of one state directory. `post` is called, from another thread, when `poll` has news.

    `code` is the copy of elasticd that runners are started from; None: the installation.
    """

    def __init__(
        self,
        state: Path,
        post: Callable[[], None],
        log: Callable[[str], None],
        code: Path | None = None,
        poll_interval_s: float = 2.0,
    ) -> None:
        self._state = state
        self._log = log
        self._code = code
        self._runners: dict[tuple[str, int], ManagedRunner] = {}
        self._poller = RunnersPoller(post, poll_interval_s)

    def close(self) -> None:
        """Stop monitoring; the runners continue."""
        self._poller.close()
        for runner in self._runners.values():
            runner.close()

    def alive(self) -> tuple[LocalRunner, ...]:
        """Safe from any thread."""
        return tuple(runner.summary for runner in list(self._runners.values()))

    def statuses(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """The last status of each runner that has answered, by job and number."""
        return {runner.key: runner.last_status for runner in self._runners.values() if runner.last_status is not None}

    def job_uids(self) -> dict[tuple[str, int], int | None]:
        """The users of the jobs here."""
        return {runner.key: runner.job_uid for runner in self._runners.values()}

    def adopt(self) -> list[RunnerEnd]:
        """Take over the runners of an earlier agent. Returns those that have ended meanwhile."""
        ends: list[RunnerEnd] = []
        until = time.monotonic() + SPEC_REQUEST_TIMEOUT_S
        for folder in sorted(self._run_folders()):
            files = JobFiles(folder)
            spec = self._adoptable_spec(files, until)
            if spec is None:
                continue
            runner = ManagedRunner(spec, files)
            if liveness.has_processes(files):
                runner.keeper = liveness.lock_owner(files.keeper_lock)
                self._runners[runner.key] = runner
                if runner.job_uid not in (None, os.geteuid()):
                    with contextlib.suppress(OSError):  # systemd gives StateDirectory= its own mode at each start
                        self._let_users_pass()
                self._open_pidfd(runner)
                if why := liveness.requested_stop(files.lock):  # once more, SIGTERM would kill its workers at once
                    runner.stop_requested, runner.state, runner.why = True, "leaving", why
                    runner.leave_deadline = time.monotonic() + spec.drain_timeout_s + LAST_SAVE_S
                who = f"pid {runner.process.pid}" if runner.process is not None else "pid unknown yet"
                self._log(f"job {spec.job}: adopted its runner ({who})")
            else:
                ends.append(RunnerEnd(spec, read_exit(files), stop_requested=False))
        self._update_poller()
        self._remove_empty_job_groups()
        return ends

    def _adoptable_spec(self, files: JobFiles, until: float) -> RunnerSpec | None:
        """Return the spec of the run in a folder; None: there is none, and no runner either.

        A spec that cannot be read, on a disk that was full, is asked of the runner itself, within
        `SPEC_REQUEST_TIMEOUT_S` for all of them together.
        """
        try:
            spec = read_spec(files)
            if files.root.name != f"{spec.job}.{spec.number}":
                raise WireError(f"it is of job {spec.job} number {spec.number}")
            return spec
        except (OSError, WireError) as error:
            if not liveness.has_processes(files):
                if not isinstance(error, FileNotFoundError):
                    self._log(f"{files.runner_spec}: {error}; ignored")
                return None
            reported = _spec_from_runner(files, until)
            silent = "its runner does not answer, and may use any slot"
            how = silent if reported is None else "its runner reports what it runs"
            self._log(f"{files.runner_spec}: {error}; {how}")
            job, _, number = files.root.name.rpartition(".")
            return reported or (RunnerSpec(job, int(number), "", (), "") if number.isdecimal() else None)

    def _run_folders(self) -> list[Path]:
        """Return the folders of runs that this node has started and not finished."""
        try:
            return [self._state / "jobs" / run.name for run in (self._state / "runners").iterdir()]
        except FileNotFoundError:
            return []

    def start(
        self, spec: RunnerSpec, account: Account, secrets: StoreSecrets, limits: Mapping[str, int] | None = None
    ) -> int:
        """Start a runner and return its pid.

        `limits` are those of its control group, by controller. The lock is taken before the fork and inherited by the
        runner, so there is no moment in which the run has a process and no lock.

        Raises OSError if its folder or process cannot be created, UsageError, NodeRefusesJob where this node cannot
        enforce a limit.
        """
        if limits:
            try:
                group = cgroups.make_job_group(f"{spec.job}.{spec.number}", limits)
            except cgroups.LimitsUnavailable as error:
                raise NodeRefusesJob(f"this node cannot limit the {' and '.join(limits)} of a job: {error}") from None
            spec = replace(spec, control_group=str(group))
        files = self._make_folder(spec, account)
        replace_file(files.runner_spec, spec.to_json())
        for earlier in (files.runner_exit, files.refusal):
            earlier.unlink(missing_ok=True)
        lock = liveness.take_lock(files.lock)
        if lock is None:
            raise UsageError(f"{files.root}: another process has its lock")
        try:
            liveness.write_stop_reason(files.lock, "")
            child = spawn(files, lock, account, secrets, self._code)
            named = liveness.lock_owner(files.lock)
            if named is None or named.pid == os.getpid():  # else the runner has named itself already, below its keeper
                liveness.write_owner(files.lock, child.pid)
        finally:
            os.close(lock)
        runner = ManagedRunner(spec, files, child=child)
        self._runners[runner.key] = runner
        self._open_pidfd(runner)
        self._update_poller()
        return child.pid

    def refuse(self, spec: RunnerSpec, account: Account | None, why: str) -> RunnerEnd:
        """Write the exit of a runner that this node cannot start, as the runner would have."""
        files = self._make_folder(spec, account)
        replace_file(files.runner_spec, spec.to_json())
        refusal = exit_for(spec, 2, why, (), 0)
        replace_file(files.refusal, refusal.to_json())
        return RunnerEnd(spec, refusal, stop_requested=False)

    def _make_folder(self, spec: RunnerSpec, account: Account | None) -> JobFiles:
        files = job_files(self._state, spec.job, spec.number)
        for folder in (files.root, files.agent_folder):
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        files.end_mark.touch(0o600)  # now, because a full disk may have no room for it later
        os.utime(files.end_mark, (0, 0))
        if account is not None and account.uid != os.geteuid():
            self._let_users_pass()
            fd = os.open(files.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid not in (os.geteuid(), account.uid):
                    raise UsageError(f"{files.root} belongs to another user")
                os.fchown(fd, account.uid, account.gid)
            except PermissionError as error:
                raise UsageError(missing_capability_sentence(account)) from error
            finally:
                os.close(fd)
        return files

    def _let_users_pass(self) -> None:
        """Let users reach their jobs' own folders, and list no others."""
        for folder in (self._state, self._state / "jobs"):
            folder.chmod(0o711)

    def request_stop(self, job: str, number: int, why: str, within_s: float) -> bool:
        """SIGTERM; `poll` escalates LAST_SAVE_S after `within_s`. False: no such runner, or it was requested."""
        runner = self._runners.get((job, number))
        if runner is None or runner.stop_requested:
            return False
        runner.stop_requested = True
        runner.state = "leaving"
        runner.why = why
        runner.leave_deadline = time.monotonic() + within_s + LAST_SAVE_S
        try:  # before the signal: the main loop must not wait for a runner that does not answer
            liveness.write_stop_reason(runner.files.lock, why)
        except OSError as error:
            self._log(f"job {job}: its runner gets no reason for its stop: {error.strerror}")
        runner.signal(signal.SIGTERM)
        return True

    def expire_deadlines(self) -> None:
        """Runners that are leaving get no more time than MIN_SIGTERM_INTERVAL_S."""
        for runner in self._runners.values():
            if runner.leave_deadline is not None:
                runner.leave_deadline = min(runner.leave_deadline, time.monotonic() + MIN_SIGTERM_INTERVAL_S)

    def poll(self, now: float) -> list[RunnerEnd]:
        """Escalate stops; returns runners that have ended, each once."""
        self._poller.check_threads()
        ends = []
        for key, runner in list(self._runners.items()):
            if (status := self._poller.statuses.get(key)) is not None:
                runner.last_status = status
                if runner.state == "starting" and status.get("phase"):
                    runner.state = "running"
                if not runner.spec.slots:
                    runner.spec = replace(runner.spec, slots=_reported_slots(status))
            if runner.last_status is None:  # until it has named itself, the lock names the process that was started
                self._open_pidfd(runner)
            if runner.is_running():
                self._enforce_deadlines(runner, now)
            elif runner.empty_scans >= EMPTY_SCANS_NEEDED or not liveness.has_processes(runner.files):
                del self._runners[key]
                runner.reap_keeper()
                runner.close()
                ends.append(RunnerEnd(runner.spec, read_exit(runner.files), stop_requested=runner.stop_requested))
                if liveness.is_locked(runner.files.lock, or_shared=True):  # the next runner takes another one
                    with contextlib.suppress(OSError):
                        runner.files.lock.unlink()
            else:
                self._kill_remnants(runner, now)
        if ends:
            self._update_poller()
            self._remove_empty_job_groups()
        return ends

    def next_poll_at(self) -> float | None:
        """When `poll` is due at the latest; None: after the next `post`."""
        times = [
            at
            for runner in self._runners.values()
            for at in (runner.leave_deadline, runner.kill_at, runner.remnants_deadline)
            if at is not None
        ]
        if any(runner.process is None or not runner.is_running() for runner in self._runners.values()):
            times.append(time.monotonic() + 0.05)
        return min(times, default=None)

    def _enforce_deadlines(self, runner: ManagedRunner, now: float) -> None:
        job = runner.spec.job
        if runner.leave_deadline is not None and now >= runner.leave_deadline:
            runner.leave_deadline = None
            runner.kill_at = now + SECOND_SIGTERM_GRACE_S
            self._log(f"job {job}: its runner did not leave in time; its workers are killed")
            runner.signal(signal.SIGTERM)
        elif runner.kill_at is not None and now >= runner.kill_at:
            runner.kill_at = None
            runner.tree_before_kill = self._process_tree(runner)
            self._log(f"job {job}: its runner does not end; it is killed with all its processes")
            runner.signal(signal.SIGKILL)

    def _kill_remnants(self, runner: ManagedRunner, now: float) -> None:
        """The runner has ended; its owner has not ended all processes yet, or is dead, too."""
        runner.state = "leaving"
        runner.leave_deadline = runner.kill_at = None
        if runner.remnants_deadline is None:
            runner.why = runner.why or "its runner has ended; its processes are being ended"
            runner.remnants_deadline = now + REMNANT_GRACE_S
        elif now >= runner.remnants_deadline:
            runner.remnants_deadline = now + REMNANT_GRACE_S
            holders, complete = self._lock_holders(runner)
            left = {process for process in runner.tree_before_kill if process.alive} | set(holders)
            is_empty = not left and complete and not liveness.is_locked(runner.files.keeper_lock)
            runner.empty_scans = runner.empty_scans + 1 if is_empty else 0
            if runner.empty_scans >= EMPTY_SCANS_NEEDED:
                self._log(f"job {runner.spec.job}: no process of its user has its lock any more; its slots are free")
                return
            pids = ", ".join(str(process.pid) for process in sorted(left, key=lambda p: p.pid))
            self._log(f"job {runner.spec.job}: killing its remaining processes {pids or '(not found)'}")
            for process in left:
                _kill_process(process)

    def _process_tree(self, runner: ManagedRunner) -> tuple[ProcessIdentity, ...]:
        if runner.process is None:
            return ()
        tree = procfs.trees([runner.process.pid], procfs.scan().values()).get(runner.process.pid, ())
        return tuple(process for process in map(ProcessIdentity.of, tree) if process is not None)

    def _lock_holders(self, runner: ManagedRunner) -> tuple[list[ProcessIdentity], ScanComplete]:
        """The job user's processes that have the lock, and their children."""
        owner = runner.job_uid
        if owner is None:
            return [], False
        holders, complete = liveness.processes_with_lock(runner.files.lock, owner)
        trees = procfs.trees(set(holders) - {os.getpid()}, procfs.scan().values())
        pids = {pid for tree in trees.values() for pid in tree if liveness.process_uid(pid) == owner} - {os.getpid()}
        return [process for process in map(ProcessIdentity.of, pids) if process is not None], complete

    def _open_pidfd(self, runner: ManagedRunner) -> None:
        """Open a pidfd for the process that has the lock, which can never refer to another process."""
        process = liveness.lock_owner(runner.files.lock)
        if runner.process is None and process is None and time.monotonic() >= runner.search_owner_at:
            runner.search_owner_at = time.monotonic() + IDENTITY_GRACE_S
            user = runner.job_uid
            if user is not None:
                process, complete = liveness.find_unnamed_owner(runner.files.lock, RUNNER_COMM, user)
                runner.process_not_found = process is None and complete
        if process is None or process == runner.process:
            return
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:
            return
        if ProcessIdentity.of(process.pid) != process:
            os.close(fd)
            return
        runner.close()
        runner.process = process
        runner.pidfd = fd
        if runner.stop_requested:
            runner.signal(signal.SIGTERM)
        self._update_poller()

    def _remove_empty_job_groups(self) -> None:
        cgroups.remove_empty_job_groups(runner.spec.control_group for runner in self._runners.values())

    def _update_poller(self) -> None:
        self._poller.set_targets({r.key: (r.files, r.process) for r in self._runners.values() if r.process is not None})


def _spec_from_runner(files: JobFiles, until: float) -> RunnerSpec | None:
    """The spec that a runner with an unreadable one reports: its slots are in use."""
    job, _, number = files.root.name.rpartition(".")
    try:
        status = ask_runner(files, {"do": "poll"}, max(0.1, until - time.monotonic()))
        slots = _reported_slots(status)
        return RunnerSpec(job, int(number), str(status["node"]), slots, job_file="") if job and slots else None
    except (ControlSocketError, KeyError, TypeError, ValueError):
        return None


def _reported_slots(status: Mapping[str, Any]) -> tuple[int, ...]:
    slots = status.get("slots")
    return tuple(slot for slot in slots if type(slot) is int and slot >= 0) if isinstance(slots, list) else ()


def _kill_process(process: ProcessIdentity) -> None:
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if process.alive:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(fd)
