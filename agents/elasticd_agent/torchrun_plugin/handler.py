"""torch's RendezvousHandler over our rounds: errors by torch's names, and a fresh TCPStore for every round.

It exists to be what torchrun's agent expects, and nothing more: who is in a round is decided elsewhere. torch is
imported inside functions only, because the agent's own modules are imported without it. It never reuses a TCPStore:
a group that starts in the store of the one before it finds the dead group's addresses there.
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
from elasticd_agent.system.addresses import format_endpoint, local_address
from elasticd_agent.system.tcp_store import serving
from elasticd_agent.torchrun_plugin.member import JobClosed, JoinTimedOut, LeaseTimes, Participant
from elasticd_agent.torchrun_plugin.options import PluginOptions
from elasticd_agent.torchrun_plugin.plan import TorchrunMember, TorchrunRound

BACKEND = "elasticd"
_CHECK_IN_S = 0.02
_FAREWELL_S = 1.0
"""How long rank 0 keeps its TCPStore for members that are still reading from it that all have finished."""
_LONGEST_PAUSE_S = 30.0
"""Between rounds that come to nothing because a node cannot be reached that the store says is there."""
_STORE_TIMEOUT_S = 300.0
"""torch's own default for a TCPStore's clients."""

_log = logging.getLogger(__name__)


def make_etcd_handler(conf: PluginOptions) -> TorchrunHandler:
    """A handler that connects when torchrun first asks it for something."""
    from elasticd_agent.store.etcd.store import EtcdStore

    where = conf.rendezvous
    store = EtcdStore(
        where.endpoints,
        tls=where.tls,
        user=where.user,
        password=where.password,
        timeout_s=conf.store_timeout_s,
        log=_log.info,  # outages are said by the attendance
    )
    return make_handler(conf, store, lambda: local_address(where.endpoints, where.local_addr))


def make_handler(conf: PluginOptions, store: Store, address: Callable[[], str]) -> TorchrunHandler:
    """A handler over any store; `address` is how others reach this machine."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    RendezvousHandler.register(TorchrunHandler)  # a subclass by declaration: this module is imported without torch
    return TorchrunHandler(conf, store, address)


class TorchrunHandler:
    """See torch.distributed.elastic.rendezvous.RendezvousHandler for what each method promises."""

    def __init__(self, conf: PluginOptions, store: Store, address: Callable[[], str]) -> None:
        self._conf, self._store, self._address = conf, store, address
        # A new handler is a new node, also on the same machine: what its predecessor ran is gone.
        self._node = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        times = LeaseTimes(conf.lease_s, conf.renewal_s)
        self._attendance = Participant(store, conf.run_id, self._node, conf.requirements, times, self._say)
        self._tcp_store: Any = None
        self._hosts = self._left = False

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._conf.run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers share the round's TCPStore, which is as fresh as they are; torch's switch against that is kept."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        deadline = time.monotonic() + self._conf.join_timeout_s
        pause_s = self._conf.renewal_s
        with self._torchs_errors():
            address = self._address()
            while True:
                with _listen(address) as listener:
                    seat = TorchrunMember(self._node, address, listener.getsockname()[1])
                    current = self._join(seat, deadline)
                    rank = current.members.index(seat)
                    store = self._check_in(current, rank, listener, deadline)
                if store is not None:
                    break
                time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        # Only now, so that the last round's store lives until its peers have seen that there is a new one.
        self._tcp_store, self._hosts = store, rank == 0
        _log.info("rank %d of round %d, %d node(s)", rank, current.number, len(current.members))
        agents = PrefixStore("elasticd/agents", store)
        if self.use_agent_store:
            host = current.members[0]
            workers = RendezvousStoreInfo(host.address, host.port)
        else:
            workers = RendezvousStoreInfo.build(rank, agents, address)
        return RendezvousInfo(agents, rank, len(current.members), workers)

    def is_closed(self) -> bool:
        with self._torchs_errors():
            return self._attendance.closed() is not None

    def set_closed(self) -> None:
        with self._torchs_errors():
            self._attendance.close()

    def num_nodes_waiting(self) -> int:
        unrest = self._attendance.membership_change()
        if unrest.nodes:  # torchrun restarts at once, so this is said once
            self._say(f"a new round is needed: {unrest.why}")
        return unrest.nodes

    def shutdown(self) -> bool:
        """Leave the job, and end it for all if this node took part in it to the last. False: the store was not told.

        A node that did not get in must not end the others' job: torchrun calls this also after a join that timed out.
        """
        if self._left:
            return True
        self._left = told = True
        if self._attendance.is_member:
            try:
                self._attendance.close()
            except (StoreUnavailable, StoreRefused) as e:
                self._say(f"the job could not be closed: {e}")
                told = False
        if told and self._hosts:
            self._attendance.wait_for_others(time.monotonic() + _FAREWELL_S)
        self._attendance.leave()
        self._tcp_store = None
        self._store.close()
        return told

    def _join(self, seat: TorchrunMember, deadline: float) -> TorchrunRound:
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

        outcome = self._attendance.join(seat, deadline)
        if isinstance(outcome, JobClosed):
            raise RendezvousClosedError(
                f"job {self._conf.run_id} has ended, closed by {outcome.closed_by}; a new run needs another --rdzv-id, "
                "or has to start 10 minutes later"
            )
        if isinstance(outcome, JoinTimedOut):
            raise RendezvousTimeoutError(
                f"job {self._conf.run_id}: no round within {self._conf.join_timeout_s:g} s: {outcome.why}"
            )
        return outcome

    def _check_in(self, current: TorchrunRound, rank: int, listener: socket.socket, deadline: float) -> Any:
        """The round's TCPStore once every member is connected to it. None: one was lost first; join another round.

        Without this, a node that dies between the round and its first use would end the others' agents: torchrun does
        not try a second time after an error there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

        host = current.members[0]
        patience_s = 1.0 + self._conf.lease_s + self._conf.renewal_s  # by then a dead host's lease is out
        try:
            if rank != 0:
                # Asked first, because TCPStore answers a refusal with retries and a page of C++ frames.
                socket.create_connection((host.address, host.port), patience_s).close()
            store = serving(TCPStore)(
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
                if self._attendance.membership_change().nodes:
                    return None
                if time.monotonic() >= deadline:
                    raise RendezvousTimeoutError(f"round {current.number}: not all nodes reach {host.address}")
                time.sleep(_CHECK_IN_S)
        except RendezvousTimeoutError:
            raise
        except (OSError, RuntimeError) as e:  # the socket's and TCPStore's: the host is gone
            where = format_endpoint(host.address, host.port)
            self._say(f"round {current.number} has no store at {where}, joining the next: {e}")
            return None
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        return store

    def _say(self, sentence: str) -> None:
        _log.warning("elasticd, job %s: %s", self._conf.run_id, sentence)

    @contextmanager
    def _torchs_errors(self) -> Iterator[None]:
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
    """A socket that peers may connect to before it is known who serves: they wait in its backlog."""
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
