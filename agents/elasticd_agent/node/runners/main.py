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
from elasticd_agent.job.reporting import Outputs
from elasticd_agent.job.run import Host, run_job
from elasticd_agent.model.job import AgentSettings, JobSpec, Policy
from elasticd_agent.model.job_dir import JobFiles
from elasticd_agent.model.messages import StopRequested
from elasticd_agent.model.version import version
from elasticd_agent.node.keys import RUNNER
from elasticd_agent.node.runners import liveness as alive
from elasticd_agent.node.runners.history import Book, Rates
from elasticd_agent.node.runners.spec import (
    WHY_CHARS,
    Order,
    Secrets,
    keep_room,
    last_word,
    read_order,
    why_leave,
    write_exit,
)
from elasticd_agent.system.control_socket import Verb
from elasticd_agent.system.process import prctl
from elasticd_agent.telemetry import event_log as eventlog
from elasticd_agent.telemetry import metrics

PR_SET_NAME = 15
STOPPED = 128 + 15
LATE_S = 2.0
"""Whoever wakes up so much later than it wanted to was stopped or starved, and has not heard the daemon meanwhile."""


def job(argv: Sequence[str]) -> int:
    """Run the job of the folder `argv[0]` to its end. Returns the exit code, which the folder then says, too.

    `argv[1]` is the file descriptor that holds the folder's lock, `argv[2]` the one with what opens the store.
    """
    if len(argv) != 3 or not all(text.isdecimal() for text in argv[1:]):
        raise UsageError("job is for the daemon to call: elasticd agent --config FILE")
    os.umask(0o077)
    prctl(PR_SET_NAME, RUNNER)
    _as_mortal_as_others()
    files, lock, handed = JobFiles(Path(argv[0])), int(argv[1]), int(argv[2])
    os.set_inheritable(lock, False)
    alive.sign(lock)
    try:
        order, secrets = read_order(files), Secrets.taken(handed)
    except (OSError, WireError) as error:
        raise UsageError(f"{files.order}: {error}") from None
    return _to_its_end(order, secrets, files, lock)


def _as_mortal_as_others() -> None:
    """The daemon may be spared when memory runs out; a job is not, lest it outlives what the machine needs."""
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        if int(score.read_text()) < 0:
            score.write_text("0")


def _to_its_end(order: Order, secrets: Secrets, files: JobFiles, lock: int) -> int:
    files.exit.unlink(missing_ok=True)
    try:
        keep_room(files)
    except OSError as error:
        print(f"elasticd job: {files.root}: {error.strerror}; the job runs all the same", file=sys.stderr, flush=True)
    book = Book()
    try:
        code = _run(order, secrets, files, lock, book)
        reason = book.ended.reason if book.ended is not None else f"exit code {code}"
    except UsageError as error:
        code, reason = 2, str(error)
        print(f"elasticd job: error: {reason}", file=sys.stderr, flush=True)
    step = book.ended.step if book.ended is not None else None
    try:
        write_exit(files, last_word(order, code, reason, book.rounds, step or 0))
    except OSError as error:
        print(f"elasticd job: {files.exit}: {error.strerror}; ended with {code}: {reason}", file=sys.stderr, flush=True)
    return code


def _run(order: Order, secrets: Secrets, files: JobFiles, lock: int, book: Book) -> int:
    wanted = jobfile.from_json(order.spec)
    spec, policy, settings = jobfile.choices(
        wanted,
        job_id=order.job,
        run=str(order.number),
        node=order.node,
        slots=order.slots,
        rendezvous=order.rendezvous(secrets),
        files=files,
        devices=order.devices,
        user=order.job_user,
    )
    spec = replace(spec, signals=tuple(dict.fromkeys(("SIGTERM", *spec.signals))))
    settings = replace(settings, event_log=files.events, metrics_port=None, live=False, runtime_dir=None)
    try:
        preflight.check(spec, settings, spec.inherited(os.environ))
    except UsageError as error:
        raise jobfile.in_keys(str(error)) from None
    host = Host(
        outputs=lambda *how: RunnerOutputs(*how, order=order, book=book),
        keep=(lock,),
        holds=True,
        leave_within_s=order.drain_timeout_s,
        made=lambda runtime: _point(files.runtime, runtime),
        why=lambda: why_leave(files),
    )
    try:
        return run_job(spec, policy, settings, host)
    except UsageError as error:
        if str(error).startswith("--"):  # of a flag, which is a key in a job file
            raise jobfile.in_keys(str(error)) from None
        raise


def _point(link: Path, runtime: Path) -> None:
    """The runtime directory is in memory, under a name of its own; the job's folder says where."""
    beside = link.with_name(f".{link.name}.new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(runtime)
    os.rename(beside, link)


class RunnerOutputs(Outputs):
    """What a runner tells, and what it answers."""

    def __init__(
        self,
        spec: JobSpec,
        policy: Policy,
        settings: AgentSettings,
        node: str,
        runtime: Path,
        *,
        order: Order,
        book: Book,
    ) -> None:
        self._order, self._book = order, book
        super().__init__(spec, policy, settings, node, runtime)
        self._about |= {"number": order.number, "slots": list(order.slots), "version": version()}

    def open_events(self, job: str, node: str) -> eventlog.Events:
        self._book.log = super().open_events(job, node)
        return self._book

    def open_metrics(self, job: str, node: str) -> metrics.Measures:
        self._rates = Rates(job, node, version())
        return self._rates

    def verbs(self, status: Callable[[], dict[str, Any]], post: Callable[[Message], None]) -> Mapping[str, Verb]:
        def leave(why: str) -> None:
            post(StopRequested("SIGTERM", STOPPED, time.monotonic(), why))

        tether = Tether(self._order.adopt_timeout_s, leave)
        self.callback(tether.close)

        def brief() -> dict[str, Any]:
            now = status()
            said = {name: now[name] for name in ("phase", "round", "world_size", "step", "reason", "benched")}
            alone = all(member["node"] == self._order.node for member in now["members"])
            return said | {"alone": alone} | self._about

        def here(_: Mapping[str, Any]) -> Mapping[str, Any]:
            tether.held()
            return brief()

        def whole(_: Mapping[str, Any]) -> Mapping[str, Any]:
            rate = {"steps_per_second": self._rates.steps_per_second, "track": self._rates.track.points()}
            rate["goodput"] = round(self.story.spent().goodput, 4)
            return {**status(), **self._about, "pid": os.getpid(), **rate, **self._book.told()}

        def asked_to_leave(request: Mapping[str, Any]) -> Mapping[str, Any]:
            leave(str(request.get("why") or "asked to leave")[:WHY_CHARS])
            return brief()

        return {
            "here": here,
            "status": whole,
            "metrics": lambda _: {"text": self.metrics.render().decode()},
            "leave": asked_to_leave,
        }


class Tether:
    """Calls `leave` once when `held` was not called for `seconds`, in time that this process could have heard it."""

    def __init__(self, seconds: float, leave: Callable[[str], None]) -> None:
        self._seconds, self._leave = seconds, leave
        self._heard_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-tether", daemon=True)
        self._thread.start()

    def held(self) -> None:
        self._heard_at = time.monotonic()

    def close(self) -> None:
        self._over.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while (left := self._heard_at + self._seconds - time.monotonic()) > 0:
            wake_at = time.monotonic() + left
            if self._over.wait(left):
                return
            if time.monotonic() > wake_at + LATE_S:
                self._heard_at = max(self._heard_at, time.monotonic() - self._seconds + min(LATE_S, self._seconds))
        with contextlib.suppress(OSError):
            self._leave(f"no daemon has spoken to this runner for {self._seconds:g} s")
