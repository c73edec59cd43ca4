"""Serves the round's TCPStore: `python tcp_store.py HOST LISTEN_FD CHANNEL_FD` in a cold start, `serve` in a forked
store.

The process ends when the owner closes the channel or dies, and by no signal sent to the whole job: the workers use the
store up to their end.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def serve(tcp_store: Callable[..., Any] | None, host: str, listen_fd: int, channel: socket.socket) -> None:
    """Serve a TCPStore on a listening socket until the channel's end of file.

    Clients that connect earlier wait in the socket's backlog. Without torch (None) the job cannot use a store, and none
    is served.
    """
    store = None if tcp_store is None else start(tcp_store, host, listen_fd)
    while channel.recv(4096):
        pass
    del store


def start(tcp_store: Callable[..., Any], host: str, listen_fd: int) -> Any:
    """The store, listening. It closes the descriptor when it is deleted."""
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        port = listener.getsockname()[1]
    given = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen_fd}
    return with_listening_socket(tcp_store)(host, port, timeout=timedelta(seconds=60), **given)


def with_listening_socket(tcp_store: Callable[..., Any]) -> Callable[..., Any]:
    """`tcp_store` for a socket that listens already: before torch 2.8 only its older backend supports that, and the
    newer one prints an error.
    """
    major, minor = importlib.import_module("torch.version").__version__.split(".")[:2]
    return tcp_store if (int(major), int(minor)) >= (2, 8) else functools.partial(tcp_store, use_libuv=False)


def main() -> None:
    host, listen_fd, channel_fd = sys.argv[1:]
    try:
        tcp_store = importlib.import_module("torch.distributed").TCPStore
    except ModuleNotFoundError:
        tcp_store = None
    serve(tcp_store, host, int(listen_fd), socket.socket(fileno=int(channel_fd)))


if __name__ == "__main__":
    main()
