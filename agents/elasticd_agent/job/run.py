"""`elasticd run`: the composition root of one job on one node; the daemon's runners use it, too.

This is the only place that builds the parts of a job and connects them; every part gets what it needs as an argument,
and tests build the same parts around fakes.

The order matters for the time to the first step: first the checks that can refuse, then the warm launcher, and
everything else (metrics, logs, terminal) while it imports torch. It matters for the end as well: an ExitStack closes
the parts in reverse order, whether the job succeeded, failed or was refused halfway.
- The checkpoint directory is locked first and released last: no second job writes there while a process of this one may
  still write.
- The runtime directory exists before the owner starts and is removed after the owner has ended: heartbeats, sockets and
  the private copy of the code lie there.
- The owner ends every worker before it ends itself, also when this process is killed (see `workers.launcher.owner`).
- The membership is left after the loop has ended, so that the record of this node says why it left.

A running job does not read its installation again: `use_private_code` copies elasticd into the runtime directory and
imports from there. An upgrade of the package, under a job that runs for weeks, then changes neither the launcher that a
restart starts nor a module that is imported late.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import math
import os
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from elasticd.checkpointing.storage.object_url import package_of
from elasticd.errors import UsageError
from elasticd.sigterm import TOGETHER_S
from elasticd_agent.hangs.deadlines import StepHistory
from elasticd_agent.hangs.detector import HangDetector
from elasticd_agent.hangs.evidence import EvidenceCollector
from elasticd_agent.hangs.patience import retransmission_s
from elasticd_agent.job import checkpoint_directory
from elasticd_agent.job.join import JobMembership, claim_node_name, join_job, store_listening_address, wait_for_route
from elasticd_agent.job.loop import JobLoop, Message, StraySignal
from elasticd_agent.job.monitor import GroupMonitor
from elasticd_agent.job.slots import Slots
from elasticd_agent.job.worker_setup import WorkerSetup
from elasticd_agent.model.job import EntrypointMode, JobSpec, Policy, RunnerSettings
from elasticd_agent.model.messages import StateMachineRules, StopForced, StopRequested
from elasticd_agent.model.reports import RankReport
from elasticd_agent.system import installation
from elasticd_agent.system.files import remove_tree, temporary_directory
from elasticd_agent.system.gpus.devices import visible_gpus
from elasticd_agent.system.heaps import share_one_heap
from elasticd_agent.system.processes.process import STRAY_SIGNALS, handle_signals_unless_ignored, signal_name
from elasticd_agent.workers.environment import ras_port
from elasticd_agent.workers.file_timer import ENABLE_VARIABLE, FILE_VARIABLE, FileTimerServer
from elasticd_agent.workers.gpu_memory import GpuGate, open_gpu_memory
from elasticd_agent.workers.launcher.owner_client import OwnerClient
from elasticd_agent.workers.launcher.requests import (
    LaunchRequests,
    PreloadPlan,
    find_script,
    plan_preload,
    worker_base_environment,
)
from elasticd_agent.workers.manager import WorkerManager

if TYPE_CHECKING:
    from elasticd_agent.job.reporting import Reporting
    from elasticd_agent.system.network.preemption import PreemptionMonitor


_log = logging.getLogger("elasticd")
_MAX_SHM_ENTRIES = 10_000
"""The most entries of /dev/shm that are read: another user may make any number."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """The differences between `elasticd run` (the defaults) and a runner of the daemon."""

    make_reporting: Callable[[JobSpec, Policy, RunnerSettings, str, Path], Reporting] | None = None
    kept_fds: tuple[int, ...] = ()  #: they stay open for as long as a process of the job is left
    pauses_before_stop: bool = False
    """A stop first requests a checkpoint at the next decision point, also where this node is the only one."""
    leave_within_s: float | None = None  #: the limit of that; None: the policy's grace period
    on_runtime_dir: Callable[[Path], None] = lambda path: None
    stop_reason: Callable[[], str] = lambda: ""  #: the reason for the first stop signal, from its sender
    has_private_code: bool = False  #: the process was started from a copy of the code that no upgrade changes


def run_job(spec: JobSpec, policy: Policy, settings: RunnerSettings, context: RunContext | None = None) -> int:
    """Run the job to its end. Returns the exit code.

    Raises UsageError for an obstacle on this machine, StoreUnavailable if there was no way to the store at the start.
    Whatever is raised, no process of the job is left behind.
    """
    share_one_heap()
    with contextlib.ExitStack() as stack:
        return _run(spec, policy, settings, context or RunContext(), stack)


def _run(
    spec: JobSpec, policy: Policy, settings: RunnerSettings, context: RunContext, stack: contextlib.ExitStack
) -> int:
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    received = stack.enter_context(handled_signals(spec.signals, inbox, context.stop_reason))
    has_store = spec.rendezvous.backend != "memory"
    if has_store or spec.master_addr != "localhost":
        wait_for_route(spec, policy.join_timeout_s, lambda: bool(received), _log.warning)
        if has_store:
            checkpoint_directory.wait_for_earlier_run(spec, policy.join_timeout_s, lambda: bool(received), _log.warning)
        if received:
            return 128 + received[0]
    on_disk = stack.enter_context(checkpoint_directory.lock_directory(spec, _log.warning))
    runtime, lock = stack.enter_context(runtime_directory(settings.runtime_dir))
    context.on_runtime_dir(runtime)
    claimed = claim_node_name(spec, stack)
    node = claimed.name
    gpus = spec.devices or visible_gpus(spec.base_environment(os.environ))

    def start_owner() -> OwnerClient:
        return OwnerClient(runtime, inbox.put, (*context.kept_fds, lock))

    make_workers = _worker_factory(spec, policy, node, runtime, gpus, inbox, stack)
    owner = start_owner()
    copy_error = (
        "" if context.has_private_code else use_private_code(runtime)
    )  # takes no time: the owner's interpreter starts
    running = [make_workers(owner)]
    stack.callback(lambda: running[0].close())
    # Before: the owner removes the private code at its end.
    stack.callback(checkpoint_directory.release_object_store, spec, _log.warning)

    reporting = stack.enter_context(_reporting(spec, policy, settings, context, node, runtime))
    if copy_error:
        reporting.reporter.log(copy_error)
    loops: list[JobLoop] = []
    membership = join_job(
        spec,
        policy,
        node,
        may_host=claimed.is_free,
        found_on_disk=(max(on_disk.highest_round, reporting.logs.highest_round()), on_disk.newest_checkpoint),
        warm=running[0].start_mode_is_known,
        attentive=lambda: not loops or loops[0].overdue_s() < policy.lease_s,
        post=inbox.put,
        log=reporting.reporter.log,
        renewed=reporting.metrics.lease,
        stack=stack,
    )
    evidence = EvidenceCollector(
        runtime,
        inbox.put,
        policy.evidence_timeout_s,
        job=spec.job_id,
        node=membership.node,
        ras=ras_port(spec.base_environment(os.environ)) if gpus else 0,
    )
    stack.callback(evidence.close)
    cpus = _cpus_by_slot(spec, reporting.reporter.log)
    setup = WorkerSetup(spec, policy, node, runtime, reporting.logs, gpus=bool(gpus), cpus=cpus)
    loop = JobLoop(
        node=node,
        rules=StateMachineRules(
            membership.node,
            policy.user_error_wait_s,
            policy.shutdown_timeout_s,
            membership.incarnation,
            multi_node=membership.multi_node,
            leave_grace_s=context.leave_within_s,
            leave_on_stop=membership.multi_node or context.pauses_before_stop,
        ),
        rendezvous=membership.rendezvous,
        turn_rendezvous=membership.turn,
        address=membership.address,
        monitor=_group_monitor(spec, policy, membership, evidence, reporting),
        workers=running[0],
        make_workers=lambda: make_workers(start_owner()),
        prepare=setup.prepare,
        prepare_ahead=setup.prepare_ahead,
        listener=reporting.reporter,
        inbox=inbox,
        max_workers=spec.max_workers,
        slots=Slots(node, range(spec.slots), spec.min_workers, spec.max_workers, spec.rendezvous.max_nodes),
        spares=spec.spares,
    )
    loops.append(loop)
    membership.start()
    if settings.notice_services:
        stack.callback(_preemption_monitor(settings.notice_services, inbox, reporting.reporter.log).close)
    reporting.serve(lambda: status(spec, loop), loop, inbox.put)
    try:
        return loop.run()
    finally:
        running[0] = loop.workers


def _preemption_monitor(
    services: tuple[tuple[str, str], ...], inbox: queue.SimpleQueue[Message], log: Callable[[str], None]
) -> PreemptionMonitor:
    """A notice stops this node's part of the job as SIGTERM does, with the notice as the reason."""
    from elasticd_agent.system.network.preemption import PreemptionMonitor  # it takes an HTTP client

    def stop(notice: str) -> None:
        if notice:
            inbox.put(StopRequested("SIGTERM", 128 + signal.SIGTERM, time.monotonic(), notice))

    return PreemptionMonitor(services, stop, log)


def _cpus_by_slot(spec: JobSpec, log: Callable[[str], None]) -> Mapping[int, tuple[int, ...]]:
    if spec.numa_binding is None:
        return {}
    from elasticd_agent.workers.numa_binding import plan_binding  # few jobs use it

    cpus, sentences = plan_binding(spec.numa_binding, spec.slots, visible_gpus(spec.base_environment(os.environ)))
    for sentence in sentences:
        log(sentence)
    return cpus


def _worker_factory(
    spec: JobSpec,
    policy: Policy,
    node: str,
    runtime: Path,
    gpus: Sequence[str],
    inbox: queue.SimpleQueue[Message],
    stack: contextlib.ExitStack,
) -> Callable[[OwnerClient], WorkerManager]:
    """Makes the manager of an owner's workers: for the first owner, and for each that follows a killed one."""
    inherited = spec.base_environment(os.environ)
    if inherited.get(ENABLE_VARIABLE) == "1":
        timer_file = spec.cwd / (inherited.get(FILE_VARIABLE) or runtime / "file-timer")
        stack.callback(FileTimerServer(timer_file, inbox.put, _log.warning).close)
        inherited = {**inherited, FILE_VARIABLE: str(timer_file)}
    base_env = worker_base_environment(inherited, spec.max_workers)
    preload = preload_for(spec, base_env)
    slot_gpus = spec.devices or (gpus if len(gpus) == spec.slots else ())
    memory = open_gpu_memory(gpus, inbox.put, _log.warning)
    stack.callback(memory.close)

    def make(owner: OwnerClient) -> WorkerManager:
        host, wait = store_listening_address(spec), GpuGate(memory, slot_gpus)
        return WorkerManager(spec, node, base_env, preload, owner, host, wait, policy.startup_ceiling_s)

    return make


def _group_monitor(
    spec: JobSpec, policy: Policy, membership: JobMembership, evidence: EvidenceCollector, reporting: Reporting
) -> GroupMonitor:
    """Build the monitor of this node's groups with its hang detector.

    A job on one node reports every look of its detector; with several nodes the leader asks for reports once it
    suspects a hang.
    """
    member, reporter, multi_node = membership.rendezvous, reporting.reporter, membership.multi_node
    detector = HangDetector(
        membership.node,
        policy,
        evidence,
        member.report_hang,
        reporter.hangs,
        report_every_look=not multi_node,
        retransmission_s=retransmission_s(spec.base_environment(os.environ)),
    )
    return GroupMonitor(member, StepHistory(policy), detector, reporter, multi_node=multi_node)


def use_private_code(runtime: Path) -> str:
    """Continue from a copy of the code, which an upgrade does not change. Returns why that failed, or ""."""
    copy = runtime / "code"
    try:
        installation.copy_to(copy)
    except OSError as error:
        return f"no copy of elasticd in {copy} ({error.strerror}): do not upgrade elasticd while this job runs"
    installation.switch_to_copy(copy)
    return ""


def _reporting(
    spec: JobSpec, policy: Policy, settings: RunnerSettings, context: RunContext, node: str, runtime: Path
) -> Reporting:
    if context.make_reporting is not None:
        return context.make_reporting(spec, policy, settings, node, runtime)
    from elasticd_agent.job.reporting import Reporting

    return Reporting(spec, policy, settings, node, runtime)


def preload_for(spec: JobSpec, base_env: dict[str, str]) -> PreloadPlan:
    """Plan what the warm launcher imports before it forks: torch, what the script imports by name, `--preload`, and the
    package of the checkpoint's object store.

    A program that is no Python has nothing to keep warm and is started cold.
    """
    if spec.mode is EntrypointMode.EXEC:
        return PreloadPlan(cold_reason="--no-python: there is no interpreter to keep warm")
    listed = [spec.cwd / folder for folder in base_env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    script = find_script(spec.mode is EntrypointMode.MODULE, spec.entrypoint, spec.cwd, listed)
    first = spec.cwd if spec.mode is EntrypointMode.MODULE or script is None else script.resolve().parent
    plan = plan_preload(script, spec.args, spec.preload, (first, *listed))
    if (
        plan.cold_reason is None
        and spec.python != sys.executable
        and not LaunchRequests(spec, base_env, plan).hook_runs()
    ):
        return PreloadPlan(
            cold_reason=f"{spec.python} does not run elasticd's start-up hook, as where a wrapper sets PYTHONPATH, so "
            "that no hang of a script without elasticd.init() is found"
        )
    package = package_of(spec.checkpoint_dir) if spec.checkpoint_dir is not None else None
    return replace(plan, modules=(*plan.modules, package)) if package else plan


def status(spec: JobSpec, loop: JobLoop) -> dict[str, Any]:
    """The state of the job as a dict of JSON values: what `elasticd status`, the metrics port and the daemon show. Safe
    from any thread.
    """
    round, seen = loop.round, loop.observation
    return {
        "job": spec.job_id,
        "phase": type(loop.phase).__name__.lower(),
        "round": round.number if round is not None else 0,
        "world_size": round.world_size if round is not None else 0,
        "restarts": round.restarts if round is not None else 0,
        "reason": round.reason if round is not None else "",
        "members": [{"node": m.node, "slots": list(m.slots)} for m in round.members] if round is not None else [],
        "spares": [{"node": loop.node, "slots": list(loop.spares.slots)}] if loop.spares.slots else [],
        "quarantined_slots": [{"node": b.node, "slot": b.slot, "times": b.times} for b in round.quarantined_slots]
        if round
        else [],
        "step": loop.high_water,
        "ranks": [rank_row(rank) for rank in seen.ranks] if seen is not None else [],
    }


def rank_row(seen: RankReport) -> dict[str, Any]:
    """`state` is its process's, as in /proc; `idle_seconds`: since anything of it made progress."""
    return {
        "rank": seen.rank,
        "slot": seen.slot,
        "phase": seen.phase,
        "step": seen.step,
        "idle_seconds": round(seen.idle_s, 1),
        "state": seen.state,
        "barrier": seen.barrier,
        "exited": seen.exited,
    }


@contextlib.contextmanager
def handled_signals(
    names: tuple[str, ...], inbox: queue.SimpleQueue[Message], stop_reason: Callable[[], str]
) -> Iterator[list[int]]:
    """The first of these signals requests a stop, the second kills, TOGETHER_S after the first at the earliest. Yields
    the list of those received so far.

    STRAY_SIGNALS that are not among them are logged: their default would end the agent, and with it the job.
    """
    received, first_at = list[int](), math.inf

    def handle(signum: int, _: FrameType | None) -> None:
        nonlocal first_at
        name, code, now = signal.Signals(signum).name, 128 + signum, time.monotonic()
        forced, first_at = bool(received), min(first_at, now)
        received.append(signum)
        if forced and now < first_at + TOGETHER_S:
            return
        inbox.put(StopForced(name, code, now) if forced else StopRequested(name, code, now, stop_reason()))

    def mention(signum: int, _: FrameType | None) -> None:
        inbox.put(StraySignal(signal_name(signum)))

    stops = [signal.Signals[name] for name in names]
    before = handle_signals_unless_ignored(stops, handle) | handle_signals_unless_ignored(
        set(STRAY_SIGNALS).difference(stops), mention
    )
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def runtime_directory(parent: Path | None) -> Iterator[tuple[Path, int]]:
    """Make a private directory in memory for heartbeats and sockets, and remove it at the end.

    Directories that killed agents have left are removed first. Yields a file descriptor, too, which agent and owner
    hold for as long as they live: it has a lock, and a directory whose lock is free belongs to no process.
    """
    if parent is not None:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    else:
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else temporary_directory()
        try:
            remove_stale_directories(base)
            path = Path(tempfile.mkdtemp(prefix=f"elasticd-{os.getuid()}-{os.getpid()}-", dir=base))
        except OSError as error:
            raise UsageError(f"no place for sockets and heartbeats: {base}: {error.strerror}; set TMPDIR") from error
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path, lock
    finally:
        remove_tree(path)
        os.close(lock)


def remove_stale_directories(base: Path) -> None:
    """The lock decides, and not the pid: containers that share this memory may have the same, and one that is started
    again has it again.

    All users may write there: what is not this user's own is left alone, and nothing there ends the job.
    """
    with os.scandir(base) as entries:
        names = [entry.name for entry in itertools.islice(entries, _MAX_SHM_ENTRIES)]
    for name in names:
        path, (_, _, pid, *_) = base / name, (*name.split("-"), "", "")
        if name.startswith(f"elasticd-{os.getuid()}-") and pid.isdecimal() and _is_abandoned(path):
            remove_tree(path)
            if os.path.lexists(path):
                _log.warning("%s, which a killed agent has left, cannot be removed; it takes memory", path)


def _is_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return bool(os.listdir(fd))  # an empty one was just created and is not locked yet, or it takes no room
    except OSError:
        return False
    finally:
        os.close(fd)
