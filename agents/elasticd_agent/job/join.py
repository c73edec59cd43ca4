"""Builds this agent's membership of its job: its record, store and planner, and the driver of its rendezvous.

With a store in memory there is no other node: no lease can expire, no probe arrives, and the loop takes the rendezvous'
turns.

Everything that needs the network is put together here, in the order in which it can fail: an address that others can
reach, the port for probes, the store, and then the member that uses them. What can be known to be wrong at once (a name
that no machine has, a port in use) is an error of the user; what may come right (a store that starts later, a network
that is not up yet) is waited for within the join timeout.

The agent's name within its job is claimed among the agents of this machine, by binding an abstract Unix socket, which
the kernel releases when the process ends, however it ends: an agent that replaces a killed one gets its name, and a
second agent beside a live one gets another. Agents on other machines, and in other network namespaces, are told apart
by their host names, and by the store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.model.job import JobSpec, Policy
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.messages import Notice, ProbeReceived
from elasticd_agent.model.records import NO_NODE_RANK, NodeRecord
from elasticd_agent.rendezvous.member import MemberThread, MemberThreadFailed, RendezvousMember, TurnResult
from elasticd_agent.rendezvous.membership_client import JobTerms
from elasticd_agent.rendezvous.peers import PeerNetwork, TcpPeerNetwork
from elasticd_agent.rendezvous.probe import ProbeServer
from elasticd_agent.rendezvous.spec_check import spec_document
from elasticd_agent.rendezvous.takeover import TakeOver
from elasticd_agent.rendezvous.view import LocalFacts, Requirements
from elasticd_agent.store.lease import RenewalListener, ignore_renewals
from elasticd_agent.store.open import MIN_NODES_FOR_TAKEOVER, open_signpost, open_store
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_agent.system.network.addresses import format_endpoint, is_known, local_address


@dataclass(frozen=True, slots=True)
class NodeName:
    name: str
    is_free: bool  #: False: a live agent of the same job on this machine has the name, which was given explicitly


def claim_node_name(spec: JobSpec, stack: contextlib.ExitStack) -> NodeName:
    """--node-id; without it the host name, or the first of HOST-2, HOST-3 … that is free. `stack` releases it."""
    given, host = spec.rendezvous.node, socket.gethostname()
    if spec.rendezvous.backend == "memory":
        return NodeName(given or host, is_free=True)
    if given is not None:
        return NodeName(given, _claim_name(spec, given, stack))
    names = itertools.chain([host], (f"{host}-{number}" for number in itertools.count(2)))
    return NodeName(next(name for name in names if _claim_name(spec, name, stack)), is_free=True)


def _claim_name(spec: JobSpec, name: str, stack: contextlib.ExitStack) -> bool:
    where = spec.rendezvous
    key = json.dumps([where.backend, where.endpoints, spec.job_id, spec.run, name])
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0elasticd-node-{hashlib.sha256(key.encode()).hexdigest()}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            return False
    stack.callback(claim.close)
    return True


NEVER_S = 1e7
DIRECTORY_ID_WAIT_S = 1.0
"""The creator of a directory's id writes it within this time; an empty one was left by a process that died."""
RESOLVE_TIMEOUT_S = 1.0
RESOLVE_RETRY_S = 1.0
REMINDER_INTERVAL_S = 30.0
"""Between the log lines of a start that cannot reach its store: a name may be mistyped, and join_timeout is long."""


@dataclass(frozen=True, slots=True)
class JobMembership:
    """`start` begins the rendezvous, once its messages are received."""

    node: str
    incarnation: str
    multi_node: bool
    rendezvous: RendezvousMember
    address: OwnAddress
    thread: MemberThread | None = None

    def start(self) -> None:
        if self.thread is not None:
            self.thread.start()

    def turn(self, now: float) -> TurnResult:
        """A turn of the loop is also one of the rendezvous, unless a thread takes those."""
        return self.rendezvous.turn(now) if self.thread is None else ([], None)


def join_job(
    spec: JobSpec,
    policy: Policy,
    node: str,
    *,
    may_host: bool,
    found_on_disk: tuple[int, tuple[int, int] | None],
    warm: bool,
    attentive: Callable[[], bool],
    post: Callable[[Notice | MemberThreadFailed], None],
    log: Callable[[str], None],
    renewed: RenewalListener,
    stack: contextlib.ExitStack,
) -> JobMembership:
    """`may_host`: False for an agent that will be refused, so that the store does not end with it. `found_on_disk`:
    the highest round number used here, and the newest checkpoint. `warm`: workers would start at once. `renewed` is
    called with each renewal of the lease. `stack` closes what is opened. Raises UsageError for a store that cannot be
    used."""
    options = spec.rendezvous
    multi_node = options.backend != "memory"
    incarnation = secrets.token_hex(8)
    own, address = OwnAddress(lambda: workers_address(spec)), ""
    network = PeerNetwork()
    if multi_node:
        server = ProbeServer(own.known, node, incarnation, answered=lambda: post(ProbeReceived()))
        stack.callback(server.close)
        network = TcpPeerNetwork(server)
        stack.callback(network.close)
        address = format_endpoint(own.known, server.port)
    highest, resume = found_on_disk
    record = NodeRecord(
        node,
        incarnation,
        address,
        tuple(range(spec.slots)),
        directory=ensure_directory_id(spec.checkpoint_dir) if multi_node else "",
        highest_round=highest,
        warm=int(not multi_node or warm),
        role=spec.role,
        node_rank=NO_NODE_RANK if options.node_rank is None else options.node_rank,
        min_workers=spec.min_workers,
    )
    if options.node_rank is not None:
        where = format_endpoint(*options.endpoints[0])
        log(
            f"--node-rank {options.node_rank}: {options.max_nodes} nodes meet over c10d at {where}, job {spec.job_id}; "
            "the rank orders them while all are there, and a lost node can be replaced"
        )
    store = open_store(options, spec.python, policy, log, may_host, incarnation)
    stack.callback(store.close)
    last_call_timeout_s = policy.last_call_timeout_s if multi_node else 0.0
    requirements = Requirements(
        spec.min_workers, spec.max_workers, options.min_nodes, options.max_nodes, last_call_timeout_s, spec.run,
        spec.spares,
    )  # fmt: skip
    times = policy if multi_node else _without_renewal(policy)
    document = json.dumps(spec_document(spec, policy), sort_keys=True).encode()
    terms = JobTerms(Keys(spec.job_id), times, requirements, document)
    take_over: TakeOver | None = None
    if options.backend == "c10d" and options.max_nodes >= MIN_NODES_FOR_TAKEOVER:
        signpost = open_signpost(options, spec.python, policy, terms.keys, log)
        stack.callback(signpost.close)
        take_over = TakeOver(cast(Any, store), record, policy, network, signpost.show, log)
    member = RendezvousMember(
        store,
        terms,
        record,
        LocalFacts(first_round_number=1 + highest, checkpoint=resume),
        network,
        log,
        attentive=attentive,
        renewed=renewed if multi_node else ignore_renewals,
        take_over=take_over,
    )
    if not multi_node:
        return JobMembership(node, incarnation, multi_node, member, own)
    thread = MemberThread(member, post)
    stack.callback(thread.close)
    return JobMembership(node, incarnation, multi_node, member, own, thread)


def _without_renewal(policy: Policy) -> Policy:
    """No member in this process's memory can be lost, so no lease is renewed."""
    return replace(
        policy, lease_s=NEVER_S, renewal_s=NEVER_S / 4, adopt_timeout_s=2 * NEVER_S, store_away_s=2 * NEVER_S
    )


class OwnAddress:
    """The address of this machine for other nodes, resolved in every round, since it may change while a job runs.

    If the resolver or the route fails, often together with the fault itself, the last address counts after a second.
    """

    def __init__(self, resolve: Callable[[], str]) -> None:
        """Raises the errors of `resolve`."""
        self._resolve = resolve
        self.known = resolve()

    def __call__(self) -> str:
        with contextlib.suppress(UsageError, StoreUnavailable, DeadlineExceeded):
            self.known = run_within(RESOLVE_TIMEOUT_S, self._resolve)
        return self.known


def wait_for_route(spec: JobSpec, within_s: float, stopped: Callable[[], bool], log: Callable[[str], None]) -> None:
    """Wait until the store's name is known and a route leads to it: DNS and the network may start later than the job.
    Of a job on one node it is the name of the workers' store.

    Returns early once `stopped`. Raises StoreUnavailable after `within_s` seconds, UsageError for a wrong address.
    """
    began = due = time.monotonic()
    deadline = began + within_s
    while not stopped():
        try:
            if spec.rendezvous.backend == "memory" and not is_known(spec.master_addr):
                raise StoreUnavailable(f"the workers' store: the address {spec.master_addr!r} cannot be resolved")
            workers_address(spec)
            return
        except StoreUnavailable as error:
            now = time.monotonic()
            left_s = deadline - now
            if left_s <= 0:
                raise StoreUnavailable(f"{error}; retried for {within_s:g} s") from None
            if now >= due:
                so_far = f", {now - began:.0f} s so far" if due > began else ""
                log(f"{error}; retrying for {within_s:g} s{so_far}")
                due += REMINDER_INTERVAL_S
            time.sleep(min(RESOLVE_RETRY_S, left_s))


def workers_address(spec: JobSpec) -> str:
    """MASTER_ADDR when rank 0 is here: with several nodes, a literal address that they reach."""
    if spec.rendezvous.backend == "memory":
        return spec.master_addr
    where = spec.rendezvous
    several = where.backend == "etcd" and where.max_nodes > 1
    return local_address(where.endpoints, where.local_addr, leave_loopback=several)


def store_listening_address(spec: JobSpec) -> str:
    """The address of the workers' store: loopback, unless an address was given or there are other nodes."""
    if spec.rendezvous.backend != "memory":
        return "::" if ":" in workers_address(spec) else "0.0.0.0"
    return "127.0.0.1" if spec.master_addr in ("localhost", "127.0.0.1") else spec.master_addr


def ensure_directory_id(directory: Path | None) -> str:
    """An id of the checkpoint directory that is the same wherever it is mounted; "" without one."""
    if directory is None:
        return ""
    from elasticd.checkpointing.storage.object_url import url_of

    if url := url_of(directory):
        return hashlib.sha256(url.encode()).hexdigest()[:16]
    path, mine = directory / ".directory-id", secrets.token_hex(8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "w", encoding="ascii") as file:
                file.write(mine)
        until = time.monotonic() + DIRECTORY_ID_WAIT_S
        while not (name := path.read_text(errors="replace")) and time.monotonic() < until:
            time.sleep(0.01)  # all nodes start at once: another one has created the file, and not written it yet
        if not name:
            path.write_text(mine, encoding="ascii")
        return name or path.read_text(errors="replace")
    except OSError:  # the first save reports the error; until then the directory counts as not shared
        return secrets.token_hex(8)
