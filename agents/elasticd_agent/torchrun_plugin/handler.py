"""torch's RendezvousHandler over our rounds: torch's errors, and a fresh TCPStore for every round.

A TCPStore is never reused: a group that starts in the store of the one before it finds the dead group's addresses.
torch is imported inside functions only, because the agent's modules must import without it.

The handler implements torch's `RendezvousHandler`, so its methods, their order and their exceptions are torch's.
`next_rendezvous` blocks until a round is formed; `num_nodes_waiting` is polled and answers from memory; `shutdown` ends
the job for all nodes. Errors of the store become RendezvousConnectionError, which torchrun treats as a reason to end,
and not as a membership change.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError, WireError
from elasticd_agent.store import Store
from elasticd_agent.system.network.addresses import format_endpoint, local_address
from elasticd_agent.system.network.tcp_store import with_listening_socket
from elasticd_agent.torchrun_plugin.member import JobClosed, JoinTimedOut, Participant
from elasticd_agent.torchrun_plugin.options import PluginOptions
from elasticd_agent.torchrun_plugin.plan import TorchrunMember, TorchrunRound

BACKEND_NAME = "elasticd"
_MEMBERS_POLL_S = 0.02
_FAREWELL_TIMEOUT_S = 1.0
"""The time for which rank 0 keeps its TCPStore for members that still read from it that all have finished."""
_MAX_REJOIN_PAUSE_S = 30.0
"""Between rounds that fail because a registered node cannot be reached."""
_TCP_STORE_TIMEOUT_S = 300.0
"""torch's own default for a TCPStore's clients."""

_log = logging.getLogger(__name__)


def make_etcd_handler(conf: PluginOptions) -> TorchrunHandler:
    """A handler that connects at its first use."""
    from elasticd_agent.store.etcd.store import EtcdStore

    where = conf.rendezvous
    store = EtcdStore(
        where.endpoints,
        tls=where.tls,
        user=where.user,
        password=where.password,
        timeout_s=conf.policy.store_timeout_s,
        log=_log.info,  # the participant reports outages
    )
    several = where.max_nodes > 1
    return make_handler(conf, store, lambda: local_address(where.endpoints, where.local_addr, leave_loopback=several))


def make_handler(conf: PluginOptions, store: Store, address: Callable[[], str]) -> TorchrunHandler:
    """A handler over any store; `address` returns how other nodes reach this machine."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    RendezvousHandler.register(TorchrunHandler)  # a virtual subclass, because this module imports without torch
    return TorchrunHandler(conf, store, address)


class TorchrunHandler:
    """The contract of each method is in torch.distributed.elastic.rendezvous.RendezvousHandler."""

    def __init__(self, conf: PluginOptions, store: Store, address: Callable[[], str]) -> None:
        self._conf = conf
        self._store = store
        self._address = address
        # A new handler is a new node, also on the same machine: its predecessor's workers are gone.
        self._node = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._participant = Participant(store, conf.run_id, self._node, conf.requirements, conf.policy, self._warn)
        self._tcp_store: Any = None
        self._hosts = False
        self._left = False

    def get_backend(self) -> str:
        return BACKEND_NAME

    def get_run_id(self) -> str:
        return self._conf.run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers share the round's TCPStore, which is as fresh as they are; torch's switch against that counts."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        deadline = time.monotonic() + self._conf.policy.join_timeout_s
        pause_s = self._conf.policy.renewal_s
        with self._torch_errors():
            address = self._address()
            while True:
                with _listen(address) as listener:
                    member = TorchrunMember(self._node, address, listener.getsockname()[1])
                    current = self._join(member, deadline)
                    rank = current.members.index(member)
                    store = self._open_shared_tcp_store(current, rank, listener, deadline)
                if store is not None:
                    break
                time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, _MAX_REJOIN_PAUSE_S)
        # Only now: the last round's store lives until its peers have seen that there is a new round.
        self._tcp_store = store
        self._hosts = rank == 0
        _log.info("rank %d of round %d, %d node(s)", rank, current.number, len(current.members))
        agents = PrefixStore("elasticd/agents", store)
        if self.use_agent_store:
            host = current.members[0]
            workers = RendezvousStoreInfo(host.address, host.port)
        else:
            workers = RendezvousStoreInfo.build(rank, agents, address)
        return RendezvousInfo(agents, rank, len(current.members), workers)

    def is_closed(self) -> bool:
        with self._torch_errors():
            return self._participant.read_closed() is not None

    def set_closed(self) -> None:
        with self._torch_errors():
            self._participant.close_job()

    def num_nodes_waiting(self) -> int:
        change = self._participant.membership_change()
        if change.node_count:  # torchrun restarts at once, so this is logged once
            self._warn(f"a new round is needed: {change.why}")
        return change.node_count

    def shutdown(self) -> bool:
        """Leave the job, and close it if this node is a member of its round. False: the store could not be written.

        A node that never became a member must not end the others' job: torchrun calls this also after a failed join.
        """
        if self._left:
            return True
        self._left = closed = True
        if self._participant.is_member:
            try:
                self._participant.close_job()
            except (StoreUnavailable, StoreRefused) as e:
                self._warn(f"the job could not be closed: {e}")
                closed = False
        if closed and self._hosts:
            self._participant.wait_until_others_left(time.monotonic() + _FAREWELL_TIMEOUT_S)
        self._participant.leave()
        self._tcp_store = None
        self._store.close()
        return closed

    def _join(self, member: TorchrunMember, deadline: float) -> TorchrunRound:
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

        outcome = self._participant.join(member, deadline)
        if isinstance(outcome, JobClosed):
            raise RendezvousClosedError(
                f"job {self._conf.run_id} has ended, closed by {outcome.closed_by}; a new run needs another --rdzv-id, "
                "or has to start 10 minutes later"
            )
        if isinstance(outcome, JoinTimedOut):
            raise RendezvousTimeoutError(
                f"job {self._conf.run_id}: no round within {self._conf.policy.join_timeout_s:g} s: {outcome.why}"
            )
        return outcome

    def _open_shared_tcp_store(
        self, current: TorchrunRound, rank: int, listener: socket.socket, deadline: float
    ) -> Any:
        """The round's TCPStore once every member has connected. None: one was lost before; join another round.

        Without it, a node lost between the round and its first use would end the others' agents: torchrun does not
        retry after an error there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

        host = current.members[0]
        policy = self._conf.policy
        patience_s = 1.0 + policy.lease_s + policy.renewal_s  # by then a dead host's lease has ended
        try:
            if rank != 0:
                # First, because TCPStore repeats refused connections and prints a page of C++ frames.
                socket.create_connection((host.address, host.port), patience_s).close()
            store = with_listening_socket(TCPStore)(
                host.address,
                host.port,
                is_master=rank == 0,
                timeout=timedelta(seconds=patience_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach() if rank == 0 else None,
            )
            if store.add("elasticd/here", 1) == len(current.members):
                store.set("elasticd/all", "here")
            while not store.check(["elasticd/all"]):
                if self._participant.membership_change().node_count:
                    return None
                if time.monotonic() >= deadline:
                    raise RendezvousTimeoutError(f"round {current.number}: not all nodes reach {host.address}")
                time.sleep(_MEMBERS_POLL_S)
        except RendezvousTimeoutError:
            raise
        except (OSError, RuntimeError) as e:  # of the socket and of TCPStore: the host is gone
            where = format_endpoint(host.address, host.port)
            self._warn(f"round {current.number} has no store at {where}, joining the next: {e}")
            return None
        store.set_timeout(timedelta(seconds=_TCP_STORE_TIMEOUT_S))
        return store

    def _warn(self, sentence: str) -> None:
        _log.warning("elasticd, job %s: %s", self._conf.run_id, sentence)

    @contextmanager
    def _torch_errors(self) -> Iterator[None]:
        from torch.distributed.elastic.rendezvous import (
            RendezvousConnectionError,
            RendezvousError,
            RendezvousStateError,
        )

        try:
            yield
        except (StoreUnavailable, StoreRefused) as e:
            raise RendezvousConnectionError(str(e)) from e
        except WireError as e:
            raise RendezvousStateError(f"job {self._conf.run_id}: {e}") from e
        except UsageError as e:
            raise RendezvousError(str(e)) from e


def _listen(address: str) -> socket.socket:
    """A socket to which peers may connect before rank 0 is known: they wait in its backlog."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        host, _, interface = address.partition("%")
        listener.bind((host, 0, 0, socket.if_nametoindex(interface)) if interface else (host, 0))
        listener.listen(4096)  # the kernel's own upper limit may be lower
    except OSError:
        listener.close()
        raise
    return listener
