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
from elasticd_agent.node.keys import RUNNER
from elasticd_agent.node.reconcile import Over, Runs
from elasticd_agent.node.runners import liveness as alive
from elasticd_agent.node.runners.liveness import Process
from elasticd_agent.node.runners.poller import Visitor, ask
from elasticd_agent.node.runners.spawn import Account, spawn
from elasticd_agent.node.runners.spec import Order, Secrets, last_word, read_exit, read_order, replace_file, write_exit
from elasticd_agent.system import control_socket as control
from elasticd_agent.system import procfs

FORCE_S = 5.0
"""From the second SIGTERM, after which a runner kills its workers, to its own SIGKILL."""
REMAINS_S = 25.0
"""The owner of a killed runner's processes has ended them by then, or cannot."""
TOLD_S = 2.0
"""All runners together whose orders cannot be read have so long to say what they run."""
NAMED_S = 1.0
"""A runner signs its lock as soon as it runs; one that has not by then could not: the disk was full, or is damaged."""


@dataclass(slots=True, eq=False)
class Runner:
    """One that lives, or of which something may be left."""

    order: Order
    files: JobFiles
    state: Literal["starting", "running", "leaving"] = "starting"
    why: str = ""
    asked: bool = False
    process: Process | None = None
    pidfd: int | None = None
    child: subprocess.Popen[bytes] | None = None
    named_by: float = field(default_factory=lambda: time.monotonic() + NAMED_S)
    leave_by: float | None = None
    force_by: float | None = None
    remains_by: float | None = None
    tree: tuple[Process, ...] = ()
    seen: Mapping[str, Any] | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.order.job, self.order.number

    @property
    def view(self) -> Runs:
        return Runs(self.order, self.state, self.why)

    def lives(self) -> bool:
        """The runner itself; what it has left behind is the lock's to tell."""
        if self.child is not None:
            return self.child.poll() is None
        if self.process is None:
            return alive.held(self.files.lock)  # whoever has it has not signed it yet, or could not
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


class Runners:
    """Those of one state directory. `post` is called, from another thread, when it is worth while to `poll`."""

    def __init__(self, state: Path, post: Callable[[], None], say: Callable[[str], None], visit_s: float = 2.0) -> None:
        self._state, self._say = state, say
        self._runners: dict[tuple[str, int], Runner] = {}
        self._visitor = Visitor(post, visit_s)

    def close(self) -> None:
        """Look after nobody any more; who runs goes on."""
        self._visitor.close()
        for runner in self._runners.values():
            runner.close()

    # --- what there is ----------------------------------------------------------------------------------------------

    def alive(self) -> tuple[Runs, ...]:
        """Safe from any thread."""
        return tuple(runner.view for runner in list(self._runners.values()))

    def heard(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """By job and number what each runner said when it was visited last, if it has said something."""
        return {runner.key: runner.seen for runner in self._runners.values() if runner.seen is not None}

    def adopt(self) -> list[Over]:
        """Find what an earlier daemon has started: who lives is ours from now on; how the others ended comes back."""
        over, until = [], time.monotonic() + TOLD_S
        for folder in sorted(self._folders()):
            files = JobFiles(folder)
            try:
                order = read_order(files, ours=True)
                if folder != job_files(self._state, order.job, order.number).root:
                    raise WireError(f"it is of job {order.job} number {order.number}")
            except FileNotFoundError:
                continue
            except (OSError, WireError) as error:
                # Where it is not ours somebody has put it there, who may answer anything.
                told = _told(files, until) if isinstance(error, WireError) else None
                if told is None:
                    self._say(f"{files.order}: {error}; it is left alone")
                    continue
                self._say(f"{files.order}: {error}; its runner itself says what it runs")
                order = told
            if alive.held(files.lock):
                runner = Runner(order, files)
                self._runners[runner.key] = runner
                self._identify(runner)
                who = f"pid {runner.process.pid}" if runner.process is not None else "no pid yet"
                self._say(f"job {order.job}: its runner ({who}) lives, and goes on")
            else:
                over.append(Over(order, read_exit(files), asked=False))
        self._look_after()
        return over

    def _folders(self) -> list[Path]:
        try:
            return [folder for folder in (self._state / "jobs").iterdir() if folder.is_dir()]
        except FileNotFoundError:
            return []

    # --- starting ---------------------------------------------------------------------------------------------------

    def start(self, order: Order, account: Account, secrets: Secrets) -> int:
        """Start a runner; its pid. Raises OSError when the folder or the process cannot be made, UsageError."""
        files = self._folder(order, account)
        replace_file(files.order, order.to_json(), account.gid if account.uid != os.geteuid() else None)
        files.exit.unlink(missing_ok=True)
        files.leave.unlink(missing_ok=True)
        lock = alive.take(files.lock)
        if lock is None:
            raise UsageError(f"{files.root}: somebody has its lock already")
        try:
            os.fchown(lock, account.uid, account.gid)
            child = spawn(files, lock, account, secrets)
            alive.sign(lock, child.pid)
        finally:
            os.close(lock)
        runner = Runner(order, files, child=child)
        self._runners[runner.key] = runner
        self._identify(runner)
        self._look_after()
        return child.pid

    def refuse(self, order: Order, account: Account | None, why: str) -> Over:
        """Write down that this node cannot run the job, as its runner would have."""
        files = self._folder(order, account)
        replace_file(files.order, order.to_json())
        last = last_word(order, 2, why, (), 0)
        write_exit(files, last)
        return Over(order, last, asked=False)

    def _folder(self, order: Order, account: Account | None) -> JobFiles:
        files = job_files(self._state, order.job, order.number)
        files.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if account is not None and account.uid != os.geteuid():
            for above in (self._state, files.root.parent):
                above.chmod(0o711)  # its user gets to its own folder, and sees no other
            os.chown(files.root, account.uid, account.gid)
        return files

    # --- ending -----------------------------------------------------------------------------------------------------

    def ask_to_leave(self, job: str, number: int, why: str, within_s: float) -> bool:
        """SIGTERM, and what must follow if that does not help; `poll` sees to it. False: it was asked before."""
        runner = self._runners.get((job, number))
        if runner is None or runner.asked:
            return False
        runner.asked, runner.state, runner.why = True, "leaving", why
        runner.leave_by = time.monotonic() + within_s
        self._say_why(runner)
        runner.signal(signal.SIGTERM)
        return True

    def _say_why(self, runner: Runner) -> None:
        """In a file, which is there when the signal is: nobody waits for a runner that does not answer."""
        try:
            owner = runner.files.root.stat()
            group = owner.st_gid if owner.st_uid != os.geteuid() else None
            replace_file(runner.files.leave, runner.why.encode(), group)
        except OSError as error:
            self._say(f"job {runner.order.job}: its runner is not told why it leaves: {error.strerror}")

    def hurry(self) -> None:
        """Who has been asked to leave has had its time."""
        for runner in self._runners.values():
            if runner.leave_by is not None:
                runner.leave_by = 0.0

    def poll(self, now: float) -> list[Over]:
        """See to those that leave, and to those that have ended: these come back, each once."""
        self._visitor.check()
        over = []
        for key, runner in list(self._runners.items()):
            if (seen := self._visitor.seen.get(key)) is not None:
                runner.seen = seen
                if runner.state == "starting" and seen.get("phase"):
                    runner.state = "running"
            if runner.process is None:
                self._identify(runner)
            if runner.lives():
                self._press(runner, now)
            elif not alive.held(runner.files.lock):
                del self._runners[key]
                runner.close()
                over.append(Over(runner.order, read_exit(runner.files), asked=runner.asked))
            else:
                self._clear(runner, now)
        if over:
            self._look_after()
        return over

    def due(self) -> float | None:
        """When `poll` must be called at the latest; None: when it is posted."""
        times = [at for r in self._runners.values() for at in (r.leave_by, r.force_by, r.remains_by) if at is not None]
        unknown = [time.monotonic() + 0.05 for r in self._runners.values() if r.process is None or not r.lives()]
        return min([*times, *unknown], default=None)

    def _press(self, runner: Runner, now: float) -> None:
        job = runner.order.job
        if runner.leave_by is not None and now >= runner.leave_by:
            runner.leave_by, runner.force_by = None, now + FORCE_S
            self._say(f"job {job}: its runner did not leave in time; its workers are killed")
            runner.signal(signal.SIGTERM)
        elif runner.force_by is not None and now >= runner.force_by:
            runner.force_by, runner.tree = None, self._tree(runner)
            self._say(f"job {job}: its runner does not end; it is killed, with all it has started")
            runner.signal(signal.SIGKILL)

    def _clear(self, runner: Runner, now: float) -> None:
        """The runner is dead, and its owner has not ended everything yet, or is dead as well."""
        runner.state, runner.leave_by, runner.force_by = "leaving", None, None
        if runner.remains_by is None:
            runner.why = runner.why or "its runner has ended; what it started is being ended"
            runner.remains_by = now + REMAINS_S
        elif now >= runner.remains_by:
            runner.remains_by = now + REMAINS_S
            left = {process for process in runner.tree if process.alive} | set(self._keepers(runner))
            named = ", ".join(str(process.pid) for process in sorted(left, key=lambda p: p.pid))
            self._say(f"job {runner.order.job}: processes {named or 'nobody can name'} are left of it, and are killed")
            for process in left:
                _kill(process)

    def _tree(self, runner: Runner) -> tuple[Process, ...]:
        if runner.process is None:
            return ()
        found = procfs.trees([runner.process.pid], procfs.scan().values()).get(runner.process.pid, ())
        return tuple(process for process in map(Process.of, found) if process is not None)

    def _keepers(self, runner: Runner) -> list[Process]:
        try:
            owner = runner.files.root.stat().st_uid
        except OSError:
            return []
        # The job's user may have put a file in the lock's place that others have open: only its own end over that.
        found = [pid for pid in alive.keepers(runner.files.lock) if pid != os.getpid() and alive.user_of(pid) == owner]
        trees = procfs.trees(found, procfs.scan().values())
        pids = {pid for tree in trees.values() for pid in tree if alive.user_of(pid) == owner} - {os.getpid()}
        return [process for process in map(Process.of, pids) if process is not None]

    # --- who it is --------------------------------------------------------------------------------------------------

    def _identify(self, runner: Runner) -> None:
        """Get hold of the process that has the lock: by a descriptor that can never mean another one."""
        named = alive.holder(runner.files.lock)
        if named is None and time.monotonic() >= runner.named_by:
            runner.named_by = time.monotonic() + NAMED_S
            named = alive.unsigned(runner.files.lock, RUNNER)
        if named is None:
            return
        try:
            fd = os.pidfd_open(named.pid)
        except OSError:
            return
        if Process.of(named.pid) != named:
            os.close(fd)
            return
        runner.process, runner.pidfd = named, fd
        if runner.asked:
            runner.signal(signal.SIGTERM)
        self._look_after()

    def _look_after(self) -> None:
        self._visitor.visit({r.key: (r.files, r.process) for r in self._runners.values() if r.process is not None})


def _told(files: JobFiles, until: float) -> Order | None:
    """What a runner whose order cannot be read says that it runs: its slots are taken, whatever is in the file."""
    job, _, number = files.root.name.rpartition(".")
    try:
        said = ask(files, {"do": "here"}, max(0.1, until - time.monotonic()))
        slots = tuple(slot for slot in said["slots"] if type(slot) is int and slot >= 0)
        return Order(job, int(number), str(said["node"]), slots, spec="") if job and slots else None
    except (control.Unanswered, KeyError, TypeError, ValueError):
        return None


def _kill(process: Process) -> None:
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
