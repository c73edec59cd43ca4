"""The runners of one node: starts them, finds those that an earlier daemon started, asks them to leave, sees them end.

It exists so that the deciding thread deals with jobs, not with processes. A runner is known by the lock it holds in its
job's folder and by its process's identity, never by a bare pid, so nobody else is ever signalled. It decides nothing:
what shall run, and when it is tried again, is `reconciling`'s business. All but `alive` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from elasticd.errors import UsageError, WireError
from elasticd_agent.model.job_dir import JobFiles, job_files
from elasticd_agent.node.keys import RUNNER_COMM
from elasticd_agent.node.reconcile import LocalRunner, RunnerEnd
from elasticd_agent.node.runners import liveness as alive
from elasticd_agent.node.runners.liveness import ProcessIdentity
from elasticd_agent.node.runners.poller import RunnerPoller, ask_runner
from elasticd_agent.node.runners.spawn import Account, spawn
from elasticd_agent.node.runners.spec import (
    RunnerSpec,
    StoreSecrets,
    exit_for,
    read_exit,
    read_spec,
    write_exit,
)
from elasticd_agent.system import control_socket as control
from elasticd_agent.system import procfs
from elasticd_agent.system.files import replace_file

KILL_DELAY_S = 5.0
"""From the second SIGTERM, after which a runner kills its workers, to its own SIGKILL."""
REMNANT_GRACE_S = 25.0
"""The owner of a killed runner's processes has ended them by then, or cannot."""
SPEC_FROM_RUNNER_S = 2.0
"""All runners together whose orders cannot be read have so long to say what they run."""
SIGN_GRACE_S = 1.0
"""A runner signs its lock as soon as it runs; one that has not by then could not: the disk was full, or is damaged."""


@dataclass(slots=True, eq=False)
class ManagedRunner:
    """One that lives, or of which something may be left."""

    spec: RunnerSpec
    files: JobFiles
    state: Literal["starting", "running", "leaving"] = "starting"
    why: str = ""
    stop_requested: bool = False
    process: ProcessIdentity | None = None
    pidfd: int | None = None
    child: subprocess.Popen[bytes] | None = None
    search_owner_at: float = field(default_factory=lambda: time.monotonic() + SIGN_GRACE_S)
    leave_deadline: float | None = None
    kill_at: float | None = None
    remnants_deadline: float | None = None
    process_tree: tuple[ProcessIdentity, ...] = ()
    last_status: Mapping[str, Any] | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.spec.job, self.spec.number

    @property
    def summary(self) -> LocalRunner:
        return LocalRunner(self.spec, self.state, self.why)

    def is_running(self) -> bool:
        """The runner itself; what it has left behind is the lock's to tell."""
        if self.child is not None:
            return self.child.poll() is None
        if self.process is None:
            return alive.is_locked(self.files.lock)  # whoever has it has not signed it yet, or could not
        with contextlib.suppress(ChildProcessError):  # one of ours from before an exec of ourselves
            os.waitpid(self.process.pid, os.WNOHANG)
        if self.pidfd is None:
            return self.process.alive
        poll = select.poll()  # which takes no descriptor: who has none left must not take anybody for dead
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def signal(self, signum: int) -> None:
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class RunnerManager:
    """Those of one state directory. `post` is called, from another thread, when it is worth while to `poll`."""

    def __init__(
        self, state: Path, post: Callable[[], None], log: Callable[[str], None], poll_interval_s: float = 2.0
    ) -> None:
        self._state, self._log = state, log
        self._runners: dict[tuple[str, int], ManagedRunner] = {}
        self._poller = RunnerPoller(post, poll_interval_s)

    def close(self) -> None:
        """Look after nobody any more; who runs goes on."""
        self._poller.close()
        for runner in self._runners.values():
            runner.close()

    # --- what there is ----------------------------------------------------------------------------------------------

    def alive(self) -> tuple[LocalRunner, ...]:
        """Safe from any thread."""
        return tuple(runner.summary for runner in list(self._runners.values()))

    def statuses(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """By job and number what each runner said when it was visited last, if it has said something."""
        return {runner.key: runner.last_status for runner in self._runners.values() if runner.last_status is not None}

    def adopt(self) -> list[RunnerEnd]:
        """Find what an earlier daemon has started: who lives is ours from now on; how the others ended comes back."""
        over, until = [], time.monotonic() + SPEC_FROM_RUNNER_S
        for folder in sorted(self._folders()):
            files = JobFiles(folder)
            try:
                order = read_spec(files, own_only=True)
                if folder != job_files(self._state, order.job, order.number).root:
                    raise WireError(f"it is of job {order.job} number {order.number}")
            except FileNotFoundError:
                continue
            except (OSError, WireError) as error:
                # Where it is not ours somebody has put it there, who may answer anything.
                told = _spec_from_runner(files, until) if isinstance(error, WireError) else None
                if told is None:
                    self._log(f"{files.runner_spec}: {error}; it is left alone")
                    continue
                self._log(f"{files.runner_spec}: {error}; its runner itself says what it runs")
                order = told
            if alive.is_locked(files.lock):
                runner = ManagedRunner(order, files)
                self._runners[runner.key] = runner
                self._identify(runner)
                who = f"pid {runner.process.pid}" if runner.process is not None else "no pid yet"
                self._log(f"job {order.job}: its runner ({who}) lives, and goes on")
            else:
                over.append(RunnerEnd(order, read_exit(files), requested=False))
        self._update_poller()
        return over

    def _folders(self) -> list[Path]:
        try:
            return [folder for folder in (self._state / "jobs").iterdir() if folder.is_dir()]
        except FileNotFoundError:
            return []

    # --- starting ---------------------------------------------------------------------------------------------------

    def start(self, spec: RunnerSpec, account: Account, secrets: StoreSecrets) -> int:
        """Start a runner; its pid. Raises OSError when the folder or the process cannot be made, UsageError."""
        files = self._folder(spec, account)
        replace_file(files.runner_spec, spec.to_json(), account.gid if account.uid != os.geteuid() else None)
        files.runner_exit.unlink(missing_ok=True)
        files.leave_reason.unlink(missing_ok=True)
        lock = alive.take_lock(files.lock)
        if lock is None:
            raise UsageError(f"{files.root}: somebody has its lock already")
        try:
            os.fchown(lock, account.uid, account.gid)
            child = spawn(files, lock, account, secrets)
            alive.write_owner(lock, child.pid)
        finally:
            os.close(lock)
        runner = ManagedRunner(spec, files, child=child)
        self._runners[runner.key] = runner
        self._identify(runner)
        self._update_poller()
        return child.pid

    def refuse(self, spec: RunnerSpec, account: Account | None, why: str) -> RunnerEnd:
        """Write down that this node cannot run the job, as its runner would have."""
        files = self._folder(spec, account)
        replace_file(files.runner_spec, spec.to_json())
        last = exit_for(spec, 2, why, (), 0)
        write_exit(files, last)
        return RunnerEnd(spec, last, requested=False)

    def _folder(self, spec: RunnerSpec, account: Account | None) -> JobFiles:
        files = job_files(self._state, spec.job, spec.number)
        files.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if account is not None and account.uid != os.geteuid():
            for above in (self._state, files.root.parent):
                above.chmod(0o711)  # its user gets to its own folder, and sees no other
            os.chown(files.root, account.uid, account.gid)
        return files

    # --- ending -----------------------------------------------------------------------------------------------------

    def request_stop(self, job: str, number: int, why: str, within_s: float) -> bool:
        """SIGTERM, and what must follow if that does not help; `poll` sees to it. False: it was asked before."""
        runner = self._runners.get((job, number))
        if runner is None or runner.stop_requested:
            return False
        runner.stop_requested, runner.state, runner.why = True, "leaving", why
        runner.leave_deadline = time.monotonic() + within_s
        self._write_reason(runner)
        runner.signal(signal.SIGTERM)
        return True

    def _write_reason(self, runner: ManagedRunner) -> None:
        """In a file, which is there when the signal is: nobody waits for a runner that does not answer."""
        try:
            owner = runner.files.root.stat()
            group = owner.st_gid if owner.st_uid != os.geteuid() else None
            replace_file(runner.files.leave_reason, runner.why.encode(), group)
        except OSError as error:
            self._log(f"job {runner.spec.job}: its runner is not told why it leaves: {error.strerror}")

    def expire_deadlines(self) -> None:
        """Who has been asked to leave has had its time."""
        for runner in self._runners.values():
            if runner.leave_deadline is not None:
                runner.leave_deadline = 0.0

    def poll(self, now: float) -> list[RunnerEnd]:
        """See to those that leave, and to those that have ended: these come back, each once."""
        self._poller.raise_failure()
        over = []
        for key, runner in list(self._runners.items()):
            if (seen := self._poller.statuses.get(key)) is not None:
                runner.last_status = seen
                if runner.state == "starting" and seen.get("phase"):
                    runner.state = "running"
            if runner.process is None:
                self._identify(runner)
            if runner.is_running():
                self._enforce_deadlines(runner, now)
            elif not alive.is_locked(runner.files.lock):
                del self._runners[key]
                runner.close()
                over.append(RunnerEnd(runner.spec, read_exit(runner.files), requested=runner.stop_requested))
            else:
                self._kill_remnants(runner, now)
        if over:
            self._update_poller()
        return over

    def next_poll_at(self) -> float | None:
        """When `poll` must be called at the latest; None: when it is posted."""
        times = [
            at
            for r in self._runners.values()
            for at in (r.leave_deadline, r.kill_at, r.remnants_deadline)
            if at is not None
        ]
        unknown = [time.monotonic() + 0.05 for r in self._runners.values() if r.process is None or not r.is_running()]
        return min([*times, *unknown], default=None)

    def _enforce_deadlines(self, runner: ManagedRunner, now: float) -> None:
        job = runner.spec.job
        if runner.leave_deadline is not None and now >= runner.leave_deadline:
            runner.leave_deadline, runner.kill_at = None, now + KILL_DELAY_S
            self._log(f"job {job}: its runner did not leave in time; its workers are killed")
            runner.signal(signal.SIGTERM)
        elif runner.kill_at is not None and now >= runner.kill_at:
            runner.kill_at, runner.process_tree = None, self._process_tree(runner)
            self._log(f"job {job}: its runner does not end; it is killed, with all it has started")
            runner.signal(signal.SIGKILL)

    def _kill_remnants(self, runner: ManagedRunner, now: float) -> None:
        """The runner is dead, and its owner has not ended everything yet, or is dead as well."""
        runner.state, runner.leave_deadline, runner.kill_at = "leaving", None, None
        if runner.remnants_deadline is None:
            runner.why = runner.why or "its runner has ended; what it started is being ended"
            runner.remnants_deadline = now + REMNANT_GRACE_S
        elif now >= runner.remnants_deadline:
            runner.remnants_deadline = now + REMNANT_GRACE_S
            left = {process for process in runner.process_tree if process.alive} | set(self._lock_keepers(runner))
            named = ", ".join(str(process.pid) for process in sorted(left, key=lambda p: p.pid))
            self._log(f"job {runner.spec.job}: processes {named or 'nobody can name'} are left of it, and are killed")
            for process in left:
                _kill(process)

    def _process_tree(self, runner: ManagedRunner) -> tuple[ProcessIdentity, ...]:
        if runner.process is None:
            return ()
        found = procfs.trees([runner.process.pid], procfs.scan().values()).get(runner.process.pid, ())
        return tuple(process for process in map(ProcessIdentity.of, found) if process is not None)

    def _lock_keepers(self, runner: ManagedRunner) -> list[ProcessIdentity]:
        try:
            owner = runner.files.root.stat().st_uid
        except OSError:
            return []
        # The job's user may have put a file in the lock's place that others have open: only its own end over that.
        found = [
            pid
            for pid in alive.processes_with_open(runner.files.lock)
            if pid != os.getpid() and alive.process_user(pid) == owner
        ]
        trees = procfs.trees(found, procfs.scan().values())
        pids = {pid for tree in trees.values() for pid in tree if alive.process_user(pid) == owner} - {os.getpid()}
        return [process for process in map(ProcessIdentity.of, pids) if process is not None]

    # --- who it is --------------------------------------------------------------------------------------------------

    def _identify(self, runner: ManagedRunner) -> None:
        """Get hold of the process that has the lock: by a descriptor that can never mean another one."""
        named = alive.lock_owner(runner.files.lock)
        if named is None and time.monotonic() >= runner.search_owner_at:
            runner.search_owner_at = time.monotonic() + SIGN_GRACE_S
            named = alive.find_unnamed_owner(runner.files.lock, RUNNER_COMM)
        if named is None:
            return
        try:
            fd = os.pidfd_open(named.pid)
        except OSError:
            return
        if ProcessIdentity.of(named.pid) != named:
            os.close(fd)
            return
        runner.process, runner.pidfd = named, fd
        if runner.stop_requested:
            runner.signal(signal.SIGTERM)
        self._update_poller()

    def _update_poller(self) -> None:
        self._poller.set_targets({r.key: (r.files, r.process) for r in self._runners.values() if r.process is not None})


def _spec_from_runner(files: JobFiles, until: float) -> RunnerSpec | None:
    """What a runner whose order cannot be read says that it runs: its slots are taken, whatever is in the file."""
    job, _, number = files.root.name.rpartition(".")
    try:
        said = ask_runner(files, {"do": "here"}, max(0.1, until - time.monotonic()))
        slots = tuple(slot for slot in said["slots"] if type(slot) is int and slot >= 0)
        return RunnerSpec(job, int(number), str(said["node"]), slots, job_file="") if job and slots else None
    except (control.ControlSocketError, KeyError, TypeError, ValueError):
        return None


def _kill(process: ProcessIdentity) -> None:
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
