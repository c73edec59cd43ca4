"""`elasticd run`: one agent, one job, one node, a store in memory. Builds the adapters and runs the loop.

The order matters for the time to the first step: what can be refused is checked first, then the warm launcher starts,
and everything else (metrics, logs, terminal) is built while it imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from elasticd import beat
from elasticd.errors import DirectoryInUse, UsageError
from elasticd.wire import NodeRecord, Round
from elasticd_agent.addresses import joined, local_address
from elasticd_agent.agreement import differences, spec_document
from elasticd_agent.config import AgentSettings, JobSpec, Mode, Policy
from elasticd_agent.coordinator import Coordinator
from elasticd_agent.environment import WorkerPaths, visible_devices, worker_environment
from elasticd_agent.interfaces import gloo_environment
from elasticd_agent.knock import KnockServer, knock
from elasticd_agent.launcher.client import OwnerClient
from elasticd_agent.launcher.commands import Worker
from elasticd_agent.launcher.preload import Preload, plan_preload, script_of, worker_base_environment
from elasticd_agent.lines import Lines
from elasticd_agent.logs import JobLogs
from elasticd_agent.loop import Loop, Message
from elasticd_agent.meeting import LocalMeeting, RemoteMeeting
from elasticd_agent.messages import Rules, StopForced, StopRequested
from elasticd_agent.plan import Asked
from elasticd_agent.planner import Facts, Keys, Planner
from elasticd_agent.stall import Stall
from elasticd_agent.store.opening import open_store
from elasticd_agent.watch import Watch
from elasticd_agent.workers import Workers

ALWAYS_S = 1e7
KNOCK_S = 0.2
"""An agent answers a knock within a millisecond; one that does not in this time is silent."""


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
    node = spec.rendezvous.node or socket.gethostname()
    base_env = worker_base_environment(os.environ, spec.max_workers)
    preload = plan(spec)

    def make_workers() -> Workers:
        return Workers(spec, node, base_env, preload, OwnerClient(runtime, inbox.put), listening_address(spec))

    running = [make_workers()]
    stack.callback(lambda: running[0].close())

    from elasticd_agent.outputs import Outputs

    outputs = stack.enter_context(Outputs(spec, policy, settings, node, runtime))
    used, resume = found_in(spec.checkpoint_dir)

    meets = spec.rendezvous
    shared = meets.backend != "memory"
    incarnation = secrets.token_hex(8)
    address = "" if not shared else spec_address(spec)
    knocked = None
    if shared:
        knocked = KnockServer(address, node, incarnation)
        stack.callback(knocked.close)
    highest = max(used, outputs.logs.highest_round())
    record = NodeRecord(
        node,
        incarnation,
        joined(address, knocked.port) if knocked is not None else "",
        tuple(range(spec.max_workers)),
        directory=directory_id(spec.checkpoint_dir) if shared else "",
        highest=highest,
        warm=int(not shared or running[0].settled),
    )
    # In this process's own memory nobody can be lost, so nothing has to be renewed.
    never = replace(
        policy, lease_s=ALWAYS_S, renewal_s=ALWAYS_S / 4, adopt_timeout_s=2 * ALWAYS_S, store_away_s=2 * ALWAYS_S
    )
    times = policy if shared else never
    store, hosts = open_store(meets, spec.python, policy, outputs.story.said)
    stack.callback(store.close)
    facts = Facts(first_number=1 + highest, checkpoint=resume)
    keys = Keys(spec.job_id)
    asked = Asked(
        spec.min_workers,
        spec.max_workers,
        meets.min_nodes,
        meets.max_nodes,
        policy.last_call_s if shared else 0,
        spec.run,
    )
    planner = Planner(store, keys, times, asked, facts, lambda nodes: knock(nodes, KNOCK_S), node, outputs.story.said)
    loops: list[Loop] = []
    lines = Lines(lambda node: coordinator.hung_up(node))
    stack.callback(lines.close)
    coordinator = Coordinator(
        store,
        keys,
        times,
        record,
        planner,
        json.dumps(spec_document(spec), sort_keys=True).encode(),
        unlike,
        may_plan=meets.backend != "c10d" or hosts,
        others_plan=meets.backend != "c10d",
        attentive=lambda: not loops or loops[0].overdue_s() < policy.lease_s,
        keep_lines=lines.keep,
    )
    meeting: LocalMeeting | RemoteMeeting
    if shared:
        meeting = RemoteMeeting(coordinator, facts, inbox.put, hosts)
        coordinator.on_hint(meeting.wake)
        stack.callback(meeting.close)
    else:
        meeting = LocalMeeting(coordinator, facts)
    loop = Loop(
        node=node,
        rules=Rules(node, policy.user_error_wait_s, policy.stop_grace_s, incarnation, shared),
        meeting=meeting,
        address=lambda: spec_address(spec),
        stall=Stall(policy),
        workers=running[0],
        make_workers=make_workers,
        prepare=Files(spec, policy, node, runtime, outputs.logs).prepare,
        story=outputs.story,
        inbox=inbox,
        most_workers=spec.max_workers,
    )
    loops.append(loop)
    if isinstance(meeting, RemoteMeeting):
        meeting.start()
    outputs.serve(lambda: status(spec, loop), loop)
    try:
        return loop.run()
    finally:
        running[0] = loop.workers


def spec_address(spec: JobSpec) -> str:
    """What the workers' MASTER_ADDR says when rank 0 is here: a literal that other nodes reach, if there are any."""
    if spec.rendezvous.backend == "memory":
        return spec.master_addr
    return local_address(spec.rendezvous.endpoints, spec.rendezvous.local_addr)


def listening_address(spec: JobSpec) -> str:
    """Where the workers' store listens: on loopback, unless an address of this machine was given, or others come."""
    if spec.rendezvous.backend != "memory":
        return "::" if ":" in spec_address(spec) else "0.0.0.0"
    return "127.0.0.1" if spec.master_addr in ("localhost", "127.0.0.1") else spec.master_addr


def unlike(mine: bytes, theirs: bytes) -> str | None:
    """In what the job that is running differs from ours; None if it does not."""
    try:
        return differences(json.loads(mine), json.loads(theirs)) or None
    except (ValueError, TypeError, AttributeError):
        return "what its first node has written of itself cannot be understood"


def directory_id(directory: Path | None) -> str:
    """A name for the checkpoint directory that is the same wherever it is mounted; "" without one."""
    if directory is None:
        return ""
    path = directory / ".directory-id"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "w") as file:
                file.write(secrets.token_hex(8))
        return path.read_text()
    except OSError:  # saving will say what is wrong with it; until then nobody shares it
        return secrets.token_hex(8)


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

    def prepare(self, round: Round, address: str) -> tuple[tuple[Worker, ...], Watch]:
        """The workers of `round` on this node, and a Watch over them. `address`: how others reach this machine."""
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
                master_addr=address,
                checkpoint_dir=str(spec.checkpoint_dir) if spec.checkpoint_dir is not None else None,
                virtual_local_rank=spec.virtual_local_rank,
            )
            if spec.rendezvous.backend != "memory":
                env |= gloo_environment(os.environ, address)
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
