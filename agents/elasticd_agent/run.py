"""`elasticd run`: one agent, one job, one node, a store in memory. Builds the adapters and runs the loop.

The order matters for the time to the first step: what can be refused is checked first, then the warm launcher starts,
and everything else (metrics, logs, terminal) is built while it imports torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from elasticd import beat
from elasticd.errors import DirectoryInUse, UsageError
from elasticd.wire import NodeRecord, Round
from elasticd_agent.config import AgentSettings, JobSpec, Mode, Policy
from elasticd_agent.environment import WorkerPaths, visible_devices, worker_environment
from elasticd_agent.launcher.client import OwnerClient
from elasticd_agent.launcher.commands import Worker
from elasticd_agent.launcher.preload import Preload, plan_preload, script_of, worker_base_environment
from elasticd_agent.logs import JobLogs
from elasticd_agent.loop import Loop, Message
from elasticd_agent.messages import Rules, StopForced, StopRequested
from elasticd_agent.plan import Asked
from elasticd_agent.planner import Keys, Planner
from elasticd_agent.stall import Stall
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.watch import Watch
from elasticd_agent.workers import Workers


def run_job(spec: JobSpec, policy: Policy, settings: AgentSettings) -> int:
    """Run the job to its end. Returns the exit code; raises UsageError for what cannot work on this machine."""
    with contextlib.ExitStack() as stack:
        return _run(spec, policy, settings, stack)


def _run(spec: JobSpec, policy: Policy, settings: AgentSettings, stack: contextlib.ExitStack) -> int:
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    stack.enter_context(handled_signals(spec.signals, inbox))
    if spec.checkpoint_dir is not None:
        stack.enter_context(held(spec))
    runtime = stack.enter_context(runtime_directory(settings.runtime_dir))
    node = socket.gethostname()
    base_env = worker_base_environment(os.environ, spec.max_workers)
    preload = plan(spec)

    def make_workers() -> Workers:
        return Workers(spec, node, base_env, preload, OwnerClient(runtime, inbox.put), listening_address(spec))

    running = [make_workers()]
    stack.callback(lambda: running[0].close())

    from elasticd_agent.outputs import Outputs

    outputs = stack.enter_context(Outputs(spec, policy, settings, node, runtime))
    used, resume = found_in(spec.checkpoint_dir)

    store = MemoryStore()
    keys = Keys(spec.job_id)
    incarnation = secrets.token_hex(8)
    record = NodeRecord(node, incarnation, "127.0.0.1", tuple(range(spec.max_workers)))
    store.compare_and_swap(keys.node(node), None, record.to_json())
    planner = Planner(
        store,
        keys,
        policy,
        Asked(spec.min_workers, spec.max_workers),
        first_number=1 + max(used, outputs.logs.highest_round()),
        checkpoint=resume,
    )
    loop = Loop(
        node=node,
        rules=Rules(node, policy.user_error_wait_s, policy.stop_grace_s),
        planner=planner,
        stall=Stall(policy),
        workers=running[0],
        make_workers=make_workers,
        prepare=Files(spec, policy, node, runtime, outputs.logs).prepare,
        story=outputs.story,
        inbox=inbox,
        most_workers=spec.max_workers,
    )
    outputs.serve(lambda: status(spec, loop), loop)
    try:
        return loop.run()
    finally:
        running[0] = loop.workers


def listening_address(spec: JobSpec) -> str:
    """Where the workers' store listens: on loopback, unless an address of this machine was given."""
    return "127.0.0.1" if spec.master_addr in ("localhost", "127.0.0.1") else spec.master_addr


def found_in(directory: Path | None) -> tuple[int, tuple[int, int] | None]:
    """The highest round that ever wrote there, and the checkpoint to propose."""
    if directory is None:
        return 0, None
    from elasticd import checkpoint

    entries, _ = checkpoint.lineage(directory)
    newest = entries[0].manifest if entries else None
    return checkpoint.highest_round(directory), (newest.round, newest.step) if newest is not None else None


def plan(spec: JobSpec) -> Preload:
    if spec.mode is Mode.EXEC:
        return Preload(cold="--no-python: there is no interpreter to keep warm")
    return plan_preload(script_of(spec.mode is Mode.MODULE, spec.entrypoint, spec.cwd), spec.args, spec.preload)


class Files:
    """Makes the files a group's workers need, and the environment that names them."""

    def __init__(
        self,
        spec: JobSpec,
        policy: Policy,
        node: str,
        runtime: Path,
        logs: JobLogs,
    ) -> None:
        self._spec, self._policy, self._node, self._runtime, self._logs = spec, policy, node, runtime, logs

    def prepare(self, round: Round) -> tuple[tuple[Worker, ...], Watch]:
        """The workers of `round` on this node, and a Watch over them."""
        spec = self._spec
        directory = self._runtime / f"round-{round.number}"
        directory.mkdir(mode=0o700)
        shutil.rmtree(self._runtime / f"round-{round.number - 2}", ignore_errors=True)
        member = round.member(self._node)
        assert member is not None
        workers, restarts = [], self._policy.max_restarts
        for local_rank, rank in enumerate(round.ranks(self._node)):
            files = self._logs.worker(round.number, local_rank, rank)
            paths = WorkerPaths(str(directory / f"beat-{rank}"), str(directory / f"notes-{rank}.jsonl"), files.error)
            beat.create(paths.beat)
            env = worker_environment(
                round,
                self._node,
                local_rank,
                paths,
                job=spec.job_id,
                run=spec.run,
                role=spec.role,
                max_restarts=restarts if restarts is not None else self._policy.max_restarts_per_hour,
                master_addr=spec.master_addr,
                checkpoint_dir=str(spec.checkpoint_dir) if spec.checkpoint_dir is not None else None,
                virtual_local_rank=spec.virtual_local_rank,
            )
            if spec.devices:
                only = local_rank if spec.virtual_local_rank else None
                env["CUDA_VISIBLE_DEVICES"] = visible_devices(member.slots, spec.devices, only)
            workers.append(Worker(env, files.stdout, files.stderr, paths.beat))
        ranks = round.ranks(self._node)
        watch = Watch(
            round.number,
            [directory / f"beat-{rank}" for rank in ranks],
            [directory / f"notes-{rank}.jsonl" for rank in ranks],
        )
        return tuple(workers), watch


def status(spec: JobSpec, loop: Loop) -> dict[str, object]:
    """What /status shows."""
    round = loop.round
    return {
        "job": spec.job_id,
        "phase": type(loop.phase).__name__.lower(),
        "round": round.number if round is not None else 0,
        "world_size": round.world_size if round is not None else 0,
        "restarts": round.restarts if round is not None else 0,
        "reason": round.reason if round is not None else "",
        "members": [{"node": m.node, "slots": list(m.slots)} for m in round.members] if round is not None else [],
        "step": loop.high_water,
    }


@contextlib.contextmanager
def handled_signals(names: tuple[str, ...], inbox: queue.SimpleQueue[Message]) -> Iterator[None]:
    """The first of these signals asks the job to stop, the second does not wait. Restores what was there before."""
    received: list[int] = []

    def handle(signum: int, _: FrameType | None) -> None:
        kind = StopForced if received else StopRequested
        received.append(signum)
        inbox.put(kind(signal.Signals(signum).name, 128 + signum, time.monotonic()))

    before = {}
    for name in names:
        signum = signal.Signals[name]
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup means it
            before[signum] = signal.signal(signum, handle)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def runtime_directory(wanted: Path | None) -> Iterator[Path]:
    """A private directory in memory for beats; those of agents that were killed together with their owner go too."""
    if wanted is not None:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="run-", dir=wanted))
    else:
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        sweep(base)
        path = Path(tempfile.mkdtemp(prefix=f"elasticd-{os.getuid()}-{os.getpid()}-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(base: Path) -> None:
    for path in base.glob(f"elasticd-{os.getuid()}-*-*"):
        pid = path.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def held(spec: JobSpec) -> Iterator[None]:
    """The checkpoint directory's lock, for as long as the job runs."""
    from elasticd import checkpoint

    assert spec.checkpoint_dir is not None
    lock = checkpoint.DirectoryLock(spec.checkpoint_dir, spec.job_id, spec.run)
    try:
        lock.acquire()
    except DirectoryInUse as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"--checkpoint-dir {spec.checkpoint_dir}: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()
