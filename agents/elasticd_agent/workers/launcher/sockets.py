"""The sockets between the agent, the owner and what the owner starts: one JSON object a packet; and the store's own.

Standard library only, since the owner runs without site-packages. Nothing here waits.
"""

from __future__ import annotations

import json
import socket
from typing import Any

PACKET = 1 << 20
"""The most one message may take: a group's environments and arguments."""


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET)
    return ours, theirs


def listen(host: str, port: int) -> socket.socket:
    """Where a round's store will serve; clients wait in the backlog until it does. "::" is every address, IPv4 too."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener
