"""Messages between processes of one job on one node: JSON objects, one a packet of a SEQPACKET unix socket.

A packet arrives whole or not at all, so nobody sees half a message, whenever its sender dies. It may carry file
descriptors. The kernel bounds a packet by the sender's buffer, and the receiver by MAX_PACKET_BYTES.

Agent, owner, template, workers, writer and the helper of a c10d store use it. The owner runs without site-packages, and
the template loads this file by its path into the job's interpreter: only the standard library is imported.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Mapping
from typing import Any, TypeVar

MAX_PACKET_BYTES = 1 << 20
"""The largest message has a group's environments and arguments."""
MAX_DESCRIPTORS = 253
"""The most that Linux passes with one packet (SCM_MAX_FD)."""

Message = dict[str, Any]
_Record = TypeVar("_Record", bound=tuple[Any, ...])


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        allow_large_messages(end)
    return ends


def allow_large_messages(sock: socket.socket) -> None:
    """Let this end send messages of up to MAX_PACKET_BYTES, as far as net.core.wmem_max permits."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_PACKET_BYTES)


def connect(path: str, timeout_s: float | None = None) -> socket.socket:
    """A connection to the process that listens at `path`; 0: no call on it waits. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        allow_large_messages(sock)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, message: Mapping[str, Any], *descriptors: int) -> None:
    """Send the message, with these descriptors. Raises OSError; EMSGSIZE for one that is too large."""
    packet = json.dumps(message, separators=(",", ":")).encode()
    if len(packet) > MAX_PACKET_BYTES:  # the kernel takes twice as much, and the receiver would cut it off
        raise OSError(errno.EMSGSIZE, f"{len(packet)} bytes, at most {MAX_PACKET_BYTES}")
    if descriptors:
        socket.send_fds(sock, [packet], descriptors)
    else:
        sock.send(packet)


def receive(sock: socket.socket, flags: int = 0) -> Message | None:
    """The next message; None when the other end has closed or died. Raises ValueError, TimeoutError, BlockingIOError.

    `flags` are those of recv(2).
    """
    try:
        packet = sock.recv(MAX_PACKET_BYTES, flags)
    except ConnectionError:  # a reset instead of the end of file: the other end had not read everything
        return None
    return decode(packet) if packet else None


def receive_with_descriptors(
    sock: socket.socket, max_descriptors: int = MAX_DESCRIPTORS
) -> tuple[Message | None, list[int]]:
    """The next message as by `receive`, and at most so many descriptors, which are the caller's to close."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, max_descriptors)
    except ConnectionError:
        return None, []
    return decode(packet) if packet else None, descriptors


def decode(packet: bytes) -> Message:
    """Raises ValueError for what is no JSON object."""
    message = json.loads(packet)
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, not {packet[:80]!r}")
    return message


def to_named_tuple(kind: type[_Record], message: Mapping[str, Any]) -> _Record:
    """The message as a NamedTuple: fields unknown here, of a newer sender, are left out. Raises TypeError."""
    return kind(**{name: message[name] for name in kind._fields if name in message})  # type: ignore[attr-defined]
