"""Facts of the kernel about sockets: bytes that TCP sockets have moved and hold (sock_diag(7)), and peers.

/proc/PID/io does not count what recv(2) and send(2) move. The kernel answers any user, for the network namespace of
the caller: sockets of a worker in another one are not seen.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20  # linux/netlink.h, linux/sock_diag.h
_REQUEST, _REQUEST_DUMP = 1, 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_UCRED = struct.Struct("3i")
_HEADER, _ATTRIBUTE, _COUNTERS = struct.Struct("=IHHII"), struct.Struct("=HH"), struct.Struct("=QQ")
_STATE_AT, _PEER_PORT_AT, _QUEUES_AT, _USER_AT, _INODE_AT, _MESSAGE_BYTES = 1, 6, 56, 64, 68, 72
"""Offsets in struct inet_diag_msg (linux/inet_diag.h); the queues are what is received, and what is to be sent."""
_CLOSE_WAIT, _LISTENS = 8, 10
"""TCP_CLOSE_WAIT: the end that the peer has sent counts as a byte. TCP_LISTEN: its queues are those of connections."""
_INFO, _COUNTERS_AT = 2, 120
"""INET_DIAG_INFO, and tcpi_bytes_acked in struct tcp_info (linux/tcp.h); tcpi_bytes_received follows."""
_TIMEOUT_S, _BUFFER_BYTES = 0.2, 1 << 16


@dataclass(frozen=True, slots=True)
class TcpByteCounts:
    """The counters of one socket."""

    moved: int  #: sent and acknowledged, and received
    queued: int  #: written, and not acknowledged by the other end; or received, and not read
    peer_port: int = 0


def tcp_bytes_by_inode() -> dict[int, TcpByteCounts]:
    """The counters of every TCP socket, by inode; {} where the kernel does not tell."""
    by_inode: dict[int, TcpByteCounts] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(_TIMEOUT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                asked = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 0xFFFFFFFF)
                header = _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
                netlink.send(header + asked)
                while _read_messages(netlink.recv(_BUFFER_BYTES), by_inode):
                    pass
    except (OSError, struct.error):
        pass
    return by_inode


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a unix socket (unix(7)); of a server, as it began to listen."""
    pid, user, group = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, user, group


def peer_uid(sock: socket.socket) -> int | None:
    """The user of the process at the other end of a TCP connection, if that is in this network namespace."""
    try:
        theirs, ours = (
            (_unmapped_ip(str(host)), int(port)) for host, port, *_ in (sock.getpeername(), sock.getsockname())
        )
        family = socket.AF_INET if theirs[0].version == 4 else socket.AF_INET6
        asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + struct.pack(
            "!HH16s16s12s", theirs[1], ours[1], theirs[0].packed, ours[0].packed, b"\0" * 4 + b"\xff" * 8
        )
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(_TIMEOUT_S)
            netlink.send(_HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + asked)
            answer = netlink.recv(_BUFFER_BYTES)
        if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
            return None
        user, inode = struct.unpack_from("=II", answer, _HEADER.size + _USER_AT)
    except (OSError, ValueError, struct.error):
        return None
    return int(user) if inode else None  # a socket that its process has closed counts as root's


def shut_down(sock: socket.socket) -> None:
    """End a connection under whatever thread waits for it; the descriptor stays open."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _unmapped_ip(host: str) -> IPv4Address | IPv6Address:
    address = ip_address(host.partition("%")[0])
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def _read_messages(data: bytes, by_inode: dict[int, TcpByteCounts]) -> bool:
    """False after the last one."""
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, *_ = _HEADER.unpack_from(data, at)
        if kind in (_ERROR, _DONE) or size < _HEADER.size:
            return False
        body = data[at + _HEADER.size : at + size]
        (inode,) = struct.unpack_from("=I", body, _INODE_AT)
        unread, unsent = struct.unpack_from("=II", body, _QUEUES_AT)
        (peer_port,) = struct.unpack_from("!H", body, _PEER_PORT_AT)
        state = body[_STATE_AT]
        queued = 0 if state == _LISTENS else unsent + max(0, unread - (state == _CLOSE_WAIT))
        for name, value in _attributes(body[_MESSAGE_BYTES:]):
            if name == _INFO and len(value) >= _COUNTERS_AT + _COUNTERS.size:
                by_inode[inode] = TcpByteCounts(sum(_COUNTERS.unpack_from(value, _COUNTERS_AT)), queued, peer_port)
        at += _aligned(size)
    return True


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, name = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size:
            return
        yield name, data[at + _ATTRIBUTE.size : at + size]
        at += _aligned(size)


def _aligned(size: int) -> int:
    return (size + 3) & ~3
