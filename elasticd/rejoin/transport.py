"""The backend's part in a change of ranks: how the groups of a round are interrupted, and how they are left.

`process_group.join` makes the next one, for each backend alike.

**gloo.** Its connections are shut down for reading: the pairs, found by the set of descriptors that each of gloo's
loops waits for. Only connections with a peer are: gloo aborts the process if it loses its listening socket.

Their other ends see them open until all ranks have met in the next round. Otherwise a rank that still sends would wait
for ever: gloo's Pair::write keeps an operation that failed with EPIPE or ECONNRESET in tx_, and Pair::signalException
ends none there. Some such waits are left, and the launcher replaces a rank that is in one:
- a send to the process that has died, or to one whose script destroys its groups itself;
- a send of more bytes than the kernel's buffers hold, if it is under way when its rank is interrupted;
- one of a collective that was queued behind the one that failed: an operation whose buffer is gone blocks tx_.

**NCCL.** The communicators are aborted, which ends kernels that wait for a dead rank. What the processor had queued
behind them runs then, with gradients that lack a part: an optimizer's step, too. So what the device holds after an
abort is no state. It was copied before (the launcher sends Unwind once the states of the survivors are saved), and is
loaded after the device has come to the end of its queue. torch's watchdog ends the process for an error that it finds
before or after the abort, unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0. No device has run this under elasticd, so
ranks on GPUs restart; `make gpu-day` tries it.

A thread interrupts, while another one waits: the groups, and the connections to the round's store.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from elasticd import process_group
from elasticd.errors import Reason
from elasticd.process_group import DefaultGroup

if TYPE_CHECKING:
    import torch

SPARE_DESCRIPTORS = 100
"""Descriptors for what else a process opens meanwhile."""


class Gloo:
    """Groups whose ranks meet over connections of this process."""

    def __init__(self) -> None:
        self._held: list[int] = []
        """Our own descriptors of connections, which gloo closes as it is left."""
        self._lock = threading.Lock()
        """The thread that interrupts may not have begun, or still be at it, when the training thread leaves."""

    def reason_against(self) -> Reason:
        """Why a process cannot leave these groups, "" if it can."""
        return ""

    def interrupt(self) -> None:
        """End what the training thread waits in; called by another one."""
        self._disconnect()

    def close_held(self) -> None:
        """Close the connections of the round before, once all its ranks have left it."""
        while self._held:
            os.close(self._held.pop())

    def leave(self, group: DefaultGroup) -> None:
        """Destroy all groups without waiting for other ranks. Raises RuntimeError for a device that is of no use."""
        self._disconnect()
        process_group.leave(group)

    def _disconnect(self) -> None:
        with self._lock:
            self._held += disconnect()


class Nccl(Gloo):
    """Groups with communicators of a device; some may be gloo's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def reason_against(self) -> Reason:
        return f"collectives of {self._device.type} devices cannot be left"

    def interrupt(self) -> None:
        super().interrupt()
        with contextlib.suppress(RuntimeError):  # the thread that leaves gets it, too
            self._abort()

    def leave(self, group: DefaultGroup) -> None:
        import torch

        self._abort()
        torch.accelerator.synchronize(self._device)
        super().leave(group)

    def _abort(self) -> None:
        """Abort the communicators of all groups, as one: those of several could wait for one another."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _abort_process_group

        with self._lock:
            if dist.is_initialized():
                _abort_process_group()


def of_device(device: torch.device) -> Gloo:
    """Those of the device's default backend."""
    return Gloo() if device.type == "cpu" else Nccl(device)


def disconnect() -> list[int]:
    """Shut down the connections of gloo's process groups, and those to the round's store.

    Returns descriptors that keep gloo's open for the other ends, none where too few are left.
    """
    libc, duplicates = ctypes.CDLL(None), []
    pairs = list(_gloo_sockets())
    clients = list(_store_sockets(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")))
    # The groups of the next round have as many, and gloo aborts the process if one of those cannot be opened.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_room = limit < 0 or len(open_descriptors()) + len(pairs) + SPARE_DESCRIPTORS <= limit
    for fd in pairs:
        with contextlib.suppress(OSError):  # gloo has closed it meanwhile
            if has_room:
                duplicates.append(os.dup(fd))
        libc.shutdown(fd, socket.SHUT_RD)  # gloo closes the pair then, and its next use raises
    for fd in clients:
        libc.shutdown(fd, socket.SHUT_RDWR)
    return duplicates


def _gloo_sockets() -> Iterator[int]:
    """gloo's connections: members of a set for epoll(7) that has a listening socket and was made without close-on-exec.

    Each of gloo's loops has such a set. Those of Python, libuv, gRPC and asio are closed on exec.
    """
    for fd, target in open_descriptors():
        if target != "anon_inode:[eventpoll]":
            continue
        with contextlib.suppress(OSError, ValueError):
            if fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                continue
            with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
                members = [int(line.split()[1]) for line in file if line.startswith("tfd:")]
            if any(map(_is_listening, members)):
                yield from (member for member in members if _peer_address(member) is not None)


def _store_sockets(host: str, port: str) -> Iterator[int]:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        address = None
    for fd, target in open_descriptors():
        peer = _peer_address(fd) if target.startswith("socket:") else None
        if peer is not None and str(peer[1]) == port and address in (None, peer[0]):
            yield fd


def _is_listening(fd: int) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_uint(4)
    error = ctypes.CDLL(None).getsockopt(
        fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size)
    )
    return not error and bool(value.value)


def _peer_address(fd: int) -> tuple[Any, int] | None:
    """Address and port of the other end of a TCP connection; None for anything else.

    By libc: a socket object of Python would change the descriptor of a script that has set a default timeout.
    """
    raw = ctypes.create_string_buffer(128)
    if ctypes.CDLL(None).getpeername(fd, raw, ctypes.byref(ctypes.c_uint(len(raw)))):
        return None
    family, port = int.from_bytes(raw.raw[:2], sys.byteorder), int.from_bytes(raw.raw[2:4], "big")
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(raw.raw[4:8]), port
    if family == socket.AF_INET6:
        address = ipaddress.IPv6Address(raw.raw[8:24])
        return address.ipv4_mapped or address, port
    return None


def open_descriptors() -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found
